"""Sampling and training at the same time, on a remote engine that does both: rollouts ahead, and updates by group.

With a staleness of ``k``, the rollouts of a step are made by the policy of ``k`` updates before it, and begin as soon
as that policy is there and the rollouts before them are done: who samples a step does not depend on time. The first
step, and those with evaluations or after regular checkpoints, wait for the update before them.

A batch is trained group by group while it is still being played: the loss is a sum, so the gradients of the groups add
up to the one of the batch. A group is sent once it and all before it are played: the order of the sums is fixed.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import tinker

from viva.judging.judge import SamplingClient
from viva.sdk import TrainingClient
from viva.training.batch import plain_batch
from viva.training.rollouts import GroupOutcome
from viva.training.update import UpdateConfig, send

T = TypeVar("T")


@dataclass(kw_only=True)
class RolloutsAhead(Generic[T]):
    """Starts the rollouts of all steps, one after the other."""

    play: Callable[[int, int, SamplingClient], Awaitable[T]]
    """Makes the rollouts of a step, given the number of updates of the policy that samples, and its sampler."""
    first_step: int
    num_steps: int
    max_staleness: int
    """Updates that this policy may be behind; 0 never samples and trains at the same time."""
    starts_afresh: Callable[[int], bool]
    """Whether a step waits for the update before it all the same."""

    def __post_init__(self) -> None:
        self._next = self.first_step
        self._tasks: dict[int, asyncio.Task[T]] = {}

    def version_of(self, step: int) -> int:
        """Number of updates of the policy that samples a step."""
        oldest = max(self.first_step, step - self.max_staleness)
        fresh = (start for start in range(step, oldest, -1) if self.starts_afresh(start))
        return next(fresh, oldest)

    def offer(self, version: int, sampler: SamplingClient) -> None:
        """Start the rollouts that wait for the policy after so many updates."""
        while self._next < self.num_steps and self.version_of(self._next) == version:
            before = self._tasks.get(self._next - 1)
            self._tasks[self._next] = asyncio.create_task(self._run(self._next, version, sampler, before))
            self._next += 1

    async def take(self, step: int) -> T:
        """The rollouts of a step, which must have been started.

        Raises:
            Exception: What `play` raised.
        """
        played = await self._tasks[step]
        self._tasks.pop(step - 1, None)
        return played

    async def close(self) -> None:
        """Cancel what is under way."""
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(
        self, step: int, version: int, sampler: SamplingClient, before: asyncio.Task[T] | None
    ) -> T:
        if before is not None:
            await asyncio.wait([before])
            before.result()  # what follows a failure is not played
        return await self.play(step, version, sampler)


class GroupStream:
    """Sends the groups of one batch."""

    def __init__(self, client: TrainingClient, config: UpdateConfig) -> None:
        self.sent: list[Awaitable[tinker.ForwardBackwardOutput]] = []
        self._client = client
        self._config = config
        self._played: dict[int, GroupOutcome] = {}
        self._next = 0

    def add(self, index: int, outcome: GroupOutcome) -> None:
        """A group of the batch was played."""
        self._played[index] = outcome
        while self._next in self._played:
            data_D = plain_batch([self._played.pop(self._next)]).data_D
            if data_D:
                self.sent.append(send(self._client, data_D, self._config))
            self._next += 1

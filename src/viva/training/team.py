"""Snapshots of several policies at one step, and the members of a run that take part and are not trained.

A past self is the adapter of a trained member as it was after a multiple of so many steps. Its weights are saved in the
run when that step is reached; checkpoints name those that are still met, so a resumed run meets the same ones.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from viva.judging.judge import SamplingClient
from viva.run.folder import RunFolder
from viva.sdk import ServiceClient, TrainingClient, answers_together, settled


class Team:
    """Sampling clients of all policies of a run, by member; as a client itself it is that of the main one.

    Args:
        main: Name of the main policy.
        pools: By name, the clients that may speak for a member: several for a league of past selves.
    """

    def __init__(self, main: str, pools: Mapping[str, Sequence[SamplingClient]]) -> None:
        self._pools = pools
        client = pools[main][-1]
        self.answers_together = all(answers_together(each) for pool in pools.values() for each in pool)

        # judges look at the signature for what the client can return
        @functools.wraps(client.sample)
        def sample(*args: Any, **options: Any) -> Any:
            return client.sample(*args, **options)

        self.sample = sample

    def member(self, name: str, draw: int = -1) -> SamplingClient:
        """The client of a member; of a league the one that a random number draws, by default the newest."""
        pool = self._pools[name]
        return pool[-1 if draw < 0 else draw % len(pool)]


def member_of(sampler: SamplingClient, name: str) -> SamplingClient:
    """The client of a member.

    Raises:
        TypeError: If the client is that of a single policy.
    """
    if not isinstance(sampler, Team):
        raise TypeError(f"{name!r} is a member of a run with several policies; got a single sampling client")
    return sampler.member(name)


class SavedWeights:
    """Weights of a policy at some steps, which a run saves beside its checkpoints and samples from later.

    Args:
        client: Has the weights.
        service: Of the same engine.
        base_model: Where the local engine finds the base of saved weights; ``None`` where a server knows it.
        folder: Of the run.
        start: Paths by name beside the checkpoint that the run goes on from.
    """

    def __init__(
        self,
        *,
        client: TrainingClient,
        service: ServiceClient,
        base_model: str | None,
        folder: RunFolder,
        start: Mapping[str, str],
    ) -> None:
        self._client = client
        self._service = service
        self._where = {} if base_model is None else {"base_model": base_model}
        self._folder = folder
        self._paths = dict(start)

    async def open(self, name: str, whose: str, *, is_new: bool, kept: Iterable[str] = ()) -> SamplingClient:
        """A client of the weights of a name.

        Args:
            name: Under which they are saved.
            whose: For the message.
            is_new: They are those that the policy has now, and are saved first.
            kept: Names of older ones that are still needed.

        Raises:
            ValueError: If they were to be saved by an earlier process, and its checkpoint does not name them.
        """
        if is_new:
            older = self.paths(kept).values()
            self._paths[name] = await self._folder.checkpoints.save_beside(self._client, name, kept=older)
        elif name not in self._paths:
            raise ValueError(
                f"the checkpoint that the run goes on from does not name the weights of its {whose}, {name}. Give "
                "another log_path, or start anew with behavior_if_exists=delete."
            )
        opened = await settled(
            self._service.create_sampling_client(model_path=self._paths[name], **self._where)
        )
        return self._folder.journal.client(opened, name)

    def paths(self, names: Iterable[str]) -> dict[str, str]:
        """Paths of those names that are saved."""
        return {name: self._paths[name] for name in names if name in self._paths}


class FrozenMember(ABC):
    """A policy that takes part and is not trained."""

    @abstractmethod
    async def reach(self, step: int) -> Sequence[SamplingClient]:
        """Clients that may speak for it after so many steps, oldest first."""

    def beside(self, next_step: int) -> dict[str, str]:
        """Paths by name of what a run needs beside the state to go on after so many steps."""
        del next_step
        return {}


class FixedMember(FrozenMember):
    """Weights that stay the same over the whole run."""

    def __init__(self, client: SamplingClient) -> None:
        self._client = client

    async def reach(self, step: int) -> Sequence[SamplingClient]:
        """The one client."""
        del step
        return [self._client]


class PastSelves(FrozenMember):
    """A trained member as it was after the last multiples of so many steps, the run's beginning included.

    Args:
        name: Of the member.
        saved: Keeps the weights of the trained one.
        every: Steps between two of them.
        most: So many of the newest are met.
    """

    def __init__(self, name: str, saved: SavedWeights, *, every: int, most: int) -> None:
        self._name = name
        self._weights = saved
        self._every = every
        self._most = most
        self._clients: dict[int, SamplingClient] = {}
        """By the number of steps after which they were saved."""

    async def reach(self, step: int) -> Sequence[SamplingClient]:
        """Save the policy where it becomes a past self, and open those that are met from now on."""
        met = self._met(step)
        for saved in met:
            if saved in self._clients:
                continue
            kept = [self._saved_name(older) for older in met if older < step]
            self._clients[saved] = await self._weights.open(
                self._saved_name(saved), f"member {self._name}", is_new=saved == step, kept=kept
            )
        self._clients = {saved: self._clients[saved] for saved in met}
        return list(self._clients.values())

    def beside(self, next_step: int) -> dict[str, str]:
        """The past selves that are met next, but for one that the next step begins with."""
        return self._weights.paths(
            self._saved_name(saved) for saved in self._met(next_step) if saved < next_step
        )

    def _met(self, step: int) -> list[int]:
        newest = step // self._every
        return [number * self._every for number in range(max(0, newest - self._most + 1), newest + 1)]

    def _saved_name(self, saved: int) -> str:
        return f"past-{self._name}-{saved:06d}"

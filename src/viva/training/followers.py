"""Weights of judges, and of members that are not trained, at each step: the policy's, earlier ones, or an average.

A judge looks its policy up in a `PolicyRef`; a follower gives it what it is to have. Steps are counted from the run's
beginning, so a run that is resumed judges with what it would have judged with. A judge behind an endpoint has weights
of its own; its follower tells what it has cost. A past self is the adapter of a trained member as it was after a
multiple of so many steps. Saved weights are named in checkpoints as long as they are needed.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from viva.judging.endpoint import ChatEndpoint, EndpointStoppedError
from viva.judging.judge import PolicyRef, SamplingClient
from viva.run.folder import RunFolder
from viva.run.journal import Journal
from viva.run.kept_answers import AnswerFile
from viva.sdk import AveragingTrainingClient, ServiceClient, TrainingClient, settled
from viva.training.rollouts import GroupOutcome
from viva.training.sampling import member_of

NEVER = 10**18
"""Steps until weights are refreshed that stay as they were at the start."""


class JudgeStoppedError(RuntimeError):
    """The judge behind an endpoint gives no further answer: its budget is spent, or it refuses to be asked."""


class Follower(ABC):
    """Goes along with the policy that is trained, step by step."""

    async def reach(self, step: int) -> None:
        """The training client has the weights after so many steps, which are going to be measured or to sample."""
        del step

    @abstractmethod
    def follow(self, sampler: SamplingClient, version: int) -> None:
        """From now on the policy after `version` steps samples, which `reach` was told of."""

    async def trained(self) -> None:
        """The training client has the weights after one more step."""
        return

    def beside(self, next_step: int) -> dict[str, str]:
        """Paths by name of what a run needs beside the state to go on after so many steps."""
        return {}

    def metrics(self, step: int) -> dict[str, float]:
        """Figures of a step that has been played."""
        return {}

    async def close(self) -> None:
        """The run ends."""
        return


@dataclass
class Current(Follower):
    """The policy that samples; of several policies, one."""

    policy: PolicyRef
    member: str | None = None

    def follow(self, sampler: SamplingClient, version: int) -> None:
        """Take it over."""
        self.policy.sampling_client = sampler if self.member is None else member_of(sampler, self.member)


@dataclass(kw_only=True)
class Every(Follower):
    """The policy as it was after the last multiple of 2 or more steps; `Current` is refreshed at each step."""

    policy: PolicyRef
    past: "PastSelves"
    """Its one past self."""
    max_staleness: int
    """Updates that the policy which samples may be behind."""
    _judges: dict[int, SamplingClient] = field(default_factory=dict[int, SamplingClient], init=False)
    """By the number of steps that were reached."""

    async def reach(self, step: int) -> None:
        """Save the policy where it is the one that judges from now on."""
        oldest = step - self.max_staleness
        self._judges = {version: judge for version, judge in self._judges.items() if version >= oldest}
        (self._judges[step],) = await self.past.reach(step)

    def follow(self, sampler: SamplingClient, version: int) -> None:
        """Judge with what was saved last before the policy that samples, or as it."""
        self.policy.sampling_client = self._judges[version]

    def beside(self, next_step: int) -> dict[str, str]:
        """The weights that judge now, unless the next step begins with new ones."""
        return self.past.beside(next_step)


@dataclass(kw_only=True)
class Averaged(Follower):
    """The exponential moving average of the policy's weights after each step, from those of the beginning on."""

    policy: PolicyRef
    decay: float
    """The share that stays."""
    client: AveragingTrainingClient
    """Keeps the average, which was begun, and saves it with its state."""
    journal: Journal
    _judge: SamplingClient | None = field(default=None, init=False)

    async def reach(self, step: int) -> None:
        """Take a snapshot of it."""
        judge = await settled(self.client.save_average_and_get_sampling_client())
        self._judge = self.journal.client(judge, f"average {step}")

    def follow(self, sampler: SamplingClient, version: int) -> None:
        """Judge with the average as it was when the policy that samples was reached."""
        self.policy.sampling_client = self._judge

    async def trained(self) -> None:
        """Move the average."""
        await self.client.update_average(self.decay)


@dataclass
class OutsideJudge(Follower):
    """A judge behind an endpoint: its answers are kept by step, and it is closed in the end."""

    endpoint: ChatEndpoint
    answers: AnswerFile

    def follow(self, sampler: SamplingClient, version: int) -> None:
        """Its next answers are about what the policy after so many steps says."""
        self.answers.step = version

    def metrics(self, step: int) -> dict[str, float]:
        """``judge/so_far/...``: answers, tokens and, where prices are given, the price of all steps up to this one."""
        usage, prices = self.answers.usage(step), self.endpoint.options.prices
        found: dict[str, float] = {
            "judge/so_far/answers": usage.requests,
            "judge/so_far/tokens": usage.total_tokens,
        }
        return found if prices is None else found | {"judge/so_far/price": usage.price(prices)}

    async def close(self) -> None:
        """Close its connections."""
        await self.endpoint.close()


@dataclass(kw_only=True)
class PastSelves:
    """A trained member as it was after the last multiples of so many steps, the run's beginning included.

    Its weights are saved beside the run's checkpoints, to be sampled from later.
    """

    name: str
    """Saved weights have this name with a number."""
    whose: str
    """The member, for messages."""
    every: int
    most: int
    """Number of past selves that are met, the newest of those that are saved."""
    client: TrainingClient
    """Has the member's weights."""
    service: ServiceClient
    base_model: str | None
    """The base of the weights, where the local engine finds it; a server knows it."""
    folder: RunFolder
    known: dict[str, str]
    """Paths by name of what is saved; at first, beside the checkpoint that the run goes on from."""
    _clients: dict[int, SamplingClient] = field(default_factory=dict[int, SamplingClient], init=False)
    """By the number of steps after which they were saved."""

    async def reach(self, step: int) -> Sequence[SamplingClient]:
        """Save the policy where it becomes a past self; the clients of those that are met from now on, oldest first.

        Raises:
            ValueError: If one was to be saved by an earlier process, and its checkpoint does not name it.
        """
        met = self._met(step)
        for saved in met:
            if saved not in self._clients:
                self._clients[saved] = await self._open(saved, is_new=saved == step)
        self._clients = {saved: self._clients[saved] for saved in met}
        return list(self._clients.values())

    async def _open(self, saved: int, *, is_new: bool) -> SamplingClient:
        name = self._saved_name(saved)
        if is_new:
            older = self.beside(saved).values()
            self.known[name] = await self.folder.checkpoints.save_beside(self.client, name, kept=older)
        elif name not in self.known:
            raise ValueError(
                f"the checkpoint that the run goes on from does not name the weights of its {self.whose}, {name}. Give "
                "another log_path, or start anew with behavior_if_exists=delete."
            )
        opened = await settled(
            self.service.create_sampling_client(model_path=self.known[name], base_model=self.base_model)
        )
        return self.folder.journal.client(opened, name)

    def beside(self, next_step: int) -> dict[str, str]:
        """Paths by name of the past selves that are met next, but for one that the next step begins with."""
        names = [self._saved_name(saved) for saved in self._met(next_step) if saved < next_step]
        return {name: self.known[name] for name in names if name in self.known}

    def _met(self, step: int) -> list[int]:
        newest = step // self.every
        return [number * self.every for number in range(max(0, newest - self.most + 1), newest + 1)]

    def _saved_name(self, saved: int) -> str:
        return f"{self.name}-{saved:06d}"


def check_judge(outcome: GroupOutcome, step: int) -> None:
    """End the step where its other groups could not be judged either: nothing is trained on a part of a batch.

    Raises:
        JudgeStoppedError: See above.
    """
    failure = outcome.void_failure
    if failure is not None and failure.error_type == EndpointStoppedError.__name__:
        raise JudgeStoppedError(
            f"stopped before the end of step {step + 1}: {failure.message}. The state before that step is saved: go on "
            "with the same command and behavior_if_exists=resume."
        )

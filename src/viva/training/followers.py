"""Weights of judges, and of members that are not trained, at each step: the policy's, earlier ones, or an average.

A judge looks its policy up in a `PolicyRef`; a follower gives it what it is to have. Steps are counted from the run's
beginning, so a run that is resumed judges with what it would have judged with. A judge behind an endpoint has weights
of its own; its follower tells what it has cost. A past self is the adapter of a trained member as it was after a
multiple of so many steps. Saved weights are named in checkpoints as long as they are needed.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence

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


class SavedWeights:
    """Weights of a policy at some steps, which a run saves beside its checkpoints and samples from later.

    The local engine finds the base of saved weights as ``base_model``, which a server knows; ``start`` has the paths by
    name beside the checkpoint that the run goes on from.
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

        With ``is_new`` they are those that the policy has now, and are saved first; ``kept`` names older ones still
        needed, ``whose`` is for the message.

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
        del next_step
        return {}

    def metrics(self, step: int) -> dict[str, float]:
        """Figures of a step that has been played."""
        del step
        return {}

    async def close(self) -> None:
        """The run ends."""
        return


class Current(Follower):
    """The policy that samples; of several policies, one."""

    def __init__(self, policy: PolicyRef, member: str | None = None) -> None:
        self.policy = policy
        self.member = member

    def follow(self, sampler: SamplingClient, version: int) -> None:
        """Take it over."""
        del version
        self.policy.sampling_client = sampler if self.member is None else member_of(sampler, self.member)


class Every(Follower):
    """The policy as it was after the last multiple of so many steps, its one past self.

    ``every`` is 2 or more, `Current` refreshes at each step; the policy that samples may be ``max_staleness`` updates
    behind. Weights are saved under the name with a number.
    """

    def __init__(
        self,
        policy: PolicyRef,
        saved: SavedWeights,
        *,
        every: int,
        max_staleness: int,
        name: str = "judge",
    ) -> None:
        self.policy = policy
        self._past = PastSelves(name, saved, whose=name, every=every, most=1)
        self._max_staleness = max_staleness
        self._judges: dict[int, SamplingClient] = {}
        """By the number of steps that were reached."""

    async def reach(self, step: int) -> None:
        """Save the policy where it is the one that judges from now on."""
        oldest = step - self._max_staleness
        self._judges = {version: judge for version, judge in self._judges.items() if version >= oldest}
        (self._judges[step],) = await self._past.reach(step)

    def follow(self, sampler: SamplingClient, version: int) -> None:
        """Judge with what was saved last before the policy that samples, or as it."""
        del sampler
        self.policy.sampling_client = self._judges[version]

    def beside(self, next_step: int) -> dict[str, str]:
        """The weights that judge now, unless the next step begins with new ones."""
        return self._past.beside(next_step)


class Averaged(Follower):
    """The exponential moving average of the policy's weights after each step, from those of the beginning on.

    The client keeps the average, which was begun, and saves it with its state; ``decay`` is the share that stays.
    """

    def __init__(
        self, policy: PolicyRef, *, decay: float, client: AveragingTrainingClient, journal: Journal
    ) -> None:
        self.policy = policy
        self._decay = decay
        self._client = client
        self._journal = journal
        self._judge: SamplingClient | None = None

    async def reach(self, step: int) -> None:
        """Take a snapshot of it."""
        judge = await settled(self._client.save_average_and_get_sampling_client())
        self._judge = self._journal.client(judge, f"average {step}")

    def follow(self, sampler: SamplingClient, version: int) -> None:
        """Judge with the average as it was when the policy that samples was reached."""
        del sampler, version
        self.policy.sampling_client = self._judge

    async def trained(self) -> None:
        """Move the average."""
        await self._client.update_average(self._decay)


class OutsideJudge(Follower):
    """A judge behind an endpoint: its answers are kept by step, and it is closed in the end."""

    def __init__(self, endpoint: ChatEndpoint, answers: AnswerFile) -> None:
        self._endpoint = endpoint
        self._answers = answers

    def follow(self, sampler: SamplingClient, version: int) -> None:
        """Its next answers are about what the policy after so many steps says."""
        del sampler
        self._answers.step = version

    def metrics(self, step: int) -> dict[str, float]:
        """``judge/so_far/...``: answers, tokens and, where prices are given, the price of all steps up to this one."""
        usage, prices = self._answers.usage(step), self._endpoint.options.prices
        found: dict[str, float] = {
            "judge/so_far/answers": usage.requests,
            "judge/so_far/tokens": usage.total_tokens,
        }
        return found if prices is None else found | {"judge/so_far/price": usage.price(prices)}

    async def close(self) -> None:
        """Close its connections."""
        await self._endpoint.close()


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

    It is saved every so many steps under the name with a number, and of the saved ones the newest are met, ``most`` of
    them. Messages call it ``whose``.
    """

    def __init__(self, name: str, saved: SavedWeights, *, whose: str, every: int, most: int) -> None:
        self._name = name
        self._whose = whose
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
                self._saved_name(saved), self._whose, is_new=saved == step, kept=kept
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
        return f"{self._name}-{saved:06d}"


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

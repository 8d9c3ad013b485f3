"""The members of a run with several policies: their snapshots, updates and metrics.

Every trained member has a training client of its own, and is trained on the tokens that it sampled, with the advantages
that they have among all tokens of their conversation. Metrics of a member begin with its name; ``optim/...`` without a
name are sums of counts and means of everything else over the members that took a step.

Legend: ``_P`` groups of a batch, ``_D`` datums.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import tinker

from viva.conversation.coordinator import gather_or_cancel
from viva.judging.judge import SamplingClient
from viva.run.journal import Journal
from viva.sdk import TrainingClient, settled
from viva.selfplay.group import speakers_of
from viva.training.batch import NUM_CHECKED, Batch
from viva.training.followers import PastSelves
from viva.training.metrics import mean_by_key
from viva.training.rollouts import GroupOutcome
from viva.training.sampling import Team
from viva.training.update import UpdateConfig, UpdateResult, check_sampler, update_policy

_COUNTS = ("optim/datums", "optim/steps", "optim/tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Members:
    """The policies of a run, by name."""

    trained: Mapping[str, TrainingClient]
    """The main one comes first."""
    frozen: Mapping[str, SamplingClient | PastSelves] = field(
        default_factory=dict[str, SamplingClient | PastSelves]
    )
    """Those that only take part: one whose weights stay the same is its client."""

    @property
    def main(self) -> str:
        """The policy that stands for the run: evaluations ask it, and its state is the checkpoint's."""
        return next(iter(self.trained))

    @property
    def others(self) -> dict[str, TrainingClient]:
        """Trained members beside the main one."""
        return {name: client for name, client in self.trained.items() if name != self.main}

    async def snapshot(self, journal: Journal, step: int) -> Team:
        """All policies as they are after so many steps."""
        pools = {
            name: await member.reach(step) if isinstance(member, PastSelves) else [member]
            for name, member in self.frozen.items()
        }
        samplers = await gather_or_cancel(
            settled(client.save_weights_and_get_sampling_client()) for client in self.trained.values()
        )
        for name, sampler in zip(self.trained, samplers, strict=True):
            pools[name] = [journal.client(sampler, f"{name} {step}")]
        return Team(self.main, pools)

    def beside(self, next_step: int) -> dict[str, str]:
        """Paths by name of what frozen members need beside the states to go on after so many steps."""
        past = [member for member in self.frozen.values() if isinstance(member, PastSelves)]
        return {name: path for member in past for name, path in member.beside(next_step).items()}


async def update_members(
    members: Members, batch: Batch, config: UpdateConfig, *, temperature: float
) -> UpdateResult:
    """Train each member on the datums that it sampled.

    Of each member, `NUM_CHECKED` datums are scored where the temperature is not the trained one, see `check_sampler`.

    Returns:
        The logprobs of all datums, in the order of the batch.

    Raises:
        FloatingPointError: See `update_policy`.
    """
    is_scored = (temperature or 1.0) != config.temperature

    async def update(name: str, client: TrainingClient) -> UpdateResult:
        data_D = [batch.data_D[place] for place in places[name]]
        checked_D = data_D[:NUM_CHECKED] if is_scored else []
        return await update_policy(
            client,
            data_D,
            config,
            foreign_D=[is_scored] * len(data_D),
            check=await check_sampler(client, checked_D, temperature=temperature),
        )

    speakers_D = batch.speakers_D()
    places = {
        name: [place for place, speaker in enumerate(speakers_D) if speaker == name]
        for name in members.trained
    }
    results = await gather_or_cancel(update(name, client) for name, client in members.trained.items())
    logprobs: dict[int, tinker.TensorData] = {}
    metrics: dict[str, float] = {}
    for name, result in zip(members.trained, results, strict=True):
        logprobs |= dict(zip(places[name], result.logprobs_D, strict=True))
        metrics |= {f"{name}/{key}": value for key, value in result.metrics.items()}
    rows = [result.metrics for result in results]
    metrics |= mean_by_key([row for row in rows if row["optim/steps"]] or rows)
    metrics |= {key: math.fsum(row.get(key, 0) for row in rows) for key in _COUNTS}
    return UpdateResult(logprobs_D=[logprobs[place] for place in range(len(speakers_D))], metrics=metrics)


def member_metrics(outcomes_P: Sequence[GroupOutcome]) -> dict[str, float]:
    """For every member ``NAME/sampled_tokens`` and, where it alone speaks for its seats, ``NAME/reward``, their mean.

    Void groups are left out.
    """
    rows: dict[str, list[float]] = {}
    tokens: dict[str, int] = {}
    is_by_seat = True
    for outcome in outcomes_P:
        if outcome.group is None:
            continue
        paid_G = zip(outcome.group.trajectories_G, outcome.paid_rewards(), strict=True)
        for seat, (trajectory, reward) in enumerate(paid_G):
            speakers = speakers_of(outcome.builder, seat, trajectory)
            if not speakers:  # the seat failed, or is none of a conversation
                continue
            names = [speaker.name for speaker in speakers]
            is_by_seat = is_by_seat and len(set(names)) == 1
            for name, transition in zip(names, trajectory.transitions, strict=True):
                tokens[name] = tokens.get(name, 0) + len(transition.ac.tokens)
            if reward is not None:
                rows.setdefault(names[0], []).append(reward)
    metrics: dict[str, float] = {f"{name}/sampled_tokens": count for name, count in sorted(tokens.items())}
    if is_by_seat:
        metrics |= {f"{name}/reward": math.fsum(row) / len(row) for name, row in sorted(rows.items())}
    return metrics

"""From the calls of a group to the tokens of a step."""

from collections.abc import Sequence
from dataclasses import dataclass

from viva.scaling.calls import Call, TrainedReply
from viva.scaling.tree import Block, Cost, Path, rows_cost, tree_cost

__all__ = ["Counts", "Passes", "count_step"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """What is computed of one kind of sequences, with and without prefix reuse."""

    rows: Cost
    tree: Cost
    targets: float = 0.0
    """Positions at which the output layer is needed, with gradients or for logprobs; the same either way."""

    @property
    def saved(self) -> float:
        """Share of the tokens that reuse saves."""
        return 1.0 - self.tree.tokens / self.rows.tokens if self.rows.tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Tokens of one training step; evaluations and what is played again are not in them."""

    num_groups: int
    num_calls: int
    """Of agents."""
    num_judge_calls: int
    sampled: float
    """By agents."""
    judged: float
    """Sampled by the judge."""
    decoded: Cost
    """Tokens sampled by agents and judge, and what they attend to."""
    prompts: Passes
    """Prompts of agents."""
    judge_prompts: Passes
    scored: Passes
    """The pass of an estimator before the update."""
    trained: Passes
    num_datums: int


def count_step(calls: Sequence[Call], num_groups: int, *, checked: Sequence[TrainedReply] = ()) -> Counts:
    """Count a step whose groups all make these calls.

    Reuse is counted within a group and within one pass: groups share no more than the system message.

    Args:
        calls: Of one group.
        num_groups: Groups of a step.
        checked: Scored once in the step besides, to check the sampler.
    """
    agents = [call for call in calls if call.role == "agent"]
    judges = [call for call in calls if call.role == "judge"]
    trained = [call.trained for call in calls if call.trained is not None]
    scored = [passed for call in calls for passed in call.scored]
    decoded = Cost()
    for call in calls:
        start = sum(block.tokens for block in call.prompt)
        decoded += Cost(tokens=call.reply, pairs=call.reply * start + call.reply * (call.reply + 1) / 2)
    return Counts(
        num_groups=num_groups,
        num_calls=len(agents) * num_groups,
        num_judge_calls=len(judges) * num_groups,
        sampled=sum(call.reply for call in agents) * num_groups,
        judged=sum(call.reply for call in judges) * num_groups,
        decoded=decoded.times(num_groups),
        prompts=_passes([call.prompt for call in agents], num_groups),
        judge_prompts=_passes([call.prompt for call in judges], num_groups),
        scored=_sum(_reply_passes(scored, num_groups), _reply_passes(checked, 1)),
        trained=_reply_passes(trained, num_groups),
        num_datums=len(trained) * num_groups,
    )


def _sum(one: Passes, other: Passes) -> Passes:
    return Passes(rows=one.rows + other.rows, tree=one.tree + other.tree, targets=one.targets + other.targets)


def _passes(paths: Sequence[Path], num_groups: int, targets: float = 0.0) -> Passes:
    return Passes(
        rows=rows_cost(paths).times(num_groups),
        tree=tree_cost(paths).times(num_groups),
        targets=targets * num_groups,
    )


def _reply_passes(replies: Sequence[TrainedReply], num_groups: int) -> Passes:
    """A reply's last token is predicted and not read, so a datum has one token less than context and reply."""
    paths = [
        (*reply.context, Block(key=("reply", index), tokens=reply.tokens - 1))
        for index, reply in enumerate(replies)
    ]
    return _passes(paths, num_groups, sum(reply.tokens for reply in replies))

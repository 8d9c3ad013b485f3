"""Rewards of stored conversations by other rules, beside those that were paid: figures and tables."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from viva.conversation.messages import counted, text_table
from viva.judging.comparison import reward_truth_gap

Rewards: TypeAlias = Mapping[int, float | None]
"""By agent."""
Scored: TypeAlias = tuple[Rewards, Rewards, Rewards]
"""Old and new rewards of a conversation, and the truth that they should follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamChange:
    """One reward before (as it was paid) and after. ``None``: nothing to compute it from."""

    stream: str
    means: tuple[float | None, float | None]
    deviations: tuple[float | None, float | None]
    agreement: float | None
    """Correlation of old with new, within conversations."""
    truth: tuple[float | None, float | None]
    """Correlation of old and of new with the truth, within conversations; see `rescore_text`."""
    num_graded: tuple[int, int]
    """Rewards that the correlations with the truth rest on."""
    num_conversations: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardRow:
    """One of several rewards side by side; ``None``: nothing to compute it from."""

    reward: str
    conversations: int
    """Those that it could be computed for."""
    mean: float | None
    spread: float | None
    with_paid: float | None
    """Correlation with the reward that was paid, within conversations."""
    with_truth: float | None


@dataclass(slots=True, kw_only=True)
class Rescoring:
    """Rewards by other rules, of all conversations so far."""

    rewards: dict[str, list[Scored]]
    """Old rewards, new rewards and truth of every conversation, by stream."""
    is_whole: bool = False
    """Whether all rewards are set side by side."""
    num_conversations: int = 0
    num_void: int = 0
    """Void conversations, which have no rewards."""
    num_other: int = 0
    """Conversations that were not critique self-play."""
    num_without_tokens: int = 0
    """Conversations whose tokens were not kept, left out where a reward looks at nothing else."""
    is_torn: bool = False
    """Whether the last stored conversation was cut while it was written, and is left out."""
    unpaid: dict[str, str] = field(default_factory=dict[str, str])
    """Rewards that could not be computed for every conversation, and why not for the first."""
    notes: tuple[str, ...] = ()
    """Lines about what judge and scorer were asked."""

    @property
    def streams(self) -> tuple[StreamChange, ...]:
        """The change of every reward."""
        return tuple(_change(name, rewards) for name, rewards in self.rewards.items())

    @property
    def reasons(self) -> dict[str, list[str]]:
        """Names of rewards by the reason why they were not computed for every conversation."""
        found: dict[str, list[str]] = {}
        for name, why in self.unpaid.items():
            found.setdefault(why, []).append(name)
        return found

    @property
    def rows(self) -> list[RewardRow]:
        """All rewards side by side: that which was paid, then those that could be computed."""
        computed = [each for each in self.streams if each.num_conversations]
        # what was paid is the old side of any of them
        paid = max(computed or self.streams, key=lambda each: each.num_conversations)
        return [_row(paid, 0, "(paid)"), *(_row(each, 1, each.stream) for each in computed)]

    @property
    def gaps(self) -> dict[str, tuple[float | None, float | None]]:
        """Reward-truth gap of r_sol and total, old and new: mean over conversations with right and wrong solutions."""
        names = [name for name in ("r_sol", "total") if name in self.rewards]
        return {name: (mean_of(self._gaps(name, 0)), mean_of(self._gaps(name, 1))) for name in names}

    @property
    def num_gaps(self) -> int:
        """Conversations counted in `gaps`."""
        return len(self._gaps("total", 0))

    def _gaps(self, name: str, side: Literal[0, 1]) -> list[float]:
        """Gaps of the old (0) or new (1) rewards of every conversation that has one."""
        found: list[float | None] = []
        for scored in self.rewards.get(name, ()):
            paid = {agent: reward for agent, reward in scored[side].items() if reward is not None}
            right = {agent: bool(truth) for agent, truth in scored[2].items()}
            if right and paid.keys() <= right.keys():
                found.append(reward_truth_gap(paid, right))
        return [gap for gap in found if gap is not None]


def _row(change: StreamChange, side: Literal[0, 1], name: str) -> RewardRow:
    return RewardRow(
        reward=name,
        conversations=change.num_conversations,
        mean=change.means[side],
        spread=change.deviations[side],
        with_paid=change.agreement if side else None,
        with_truth=change.truth[side],
    )


def _change(stream: str, rewards: Sequence[Scored]) -> StreamChange:
    old, new = (
        [value for each in rewards for value in each[side].values() if value is not None] for side in (0, 1)
    )
    agreement, _ = within_correlation(_common(old, new) for old, new, _ in rewards)
    truth_old, num_old = within_correlation(_common(old, truth) for old, _, truth in rewards)
    truth_new, num_new = within_correlation(_common(new, truth) for _, new, truth in rewards)
    return StreamChange(
        stream=stream,
        means=(mean_of(old), mean_of(new)),
        deviations=(statistics.pstdev(old) if old else None, statistics.pstdev(new) if new else None),
        agreement=agreement,
        truth=(truth_old, truth_new),
        num_graded=(num_old, num_new),
        num_conversations=len(rewards),
    )


def within_correlation(groups: Iterable[Sequence[tuple[float, float]]]) -> tuple[float | None, int]:
    """Pearson's correlation of pairs of values, each less its mean over the conversation, and the number of pairs.

    This is what training sees of a reward, for its baseline is such a mean. That some problems are easier, and all
    values of their conversations higher, adds nothing to it. A lone pair says nothing, and is not counted.

    Returns:
        The correlation, in [-1, 1], or ``None`` if one of the two never varies within a conversation.
    """
    centred = [np.zeros((0, 2))]
    for own in (np.array(pairs) for pairs in groups if len(pairs) > 1):
        centred.append(
            np.where(np.ptp(own, axis=0) == 0, 0.0, own - own.mean(axis=0))
        )  # equal values: exact zeros
    x_N, y_N = np.concatenate(centred).T
    scale = math.sqrt(x_N @ x_N) * math.sqrt(y_N @ y_N)
    return (max(-1.0, min(1.0, float(x_N @ y_N) / scale)) if scale else None), len(x_N)


def mean_of(values: Sequence[float]) -> float | None:
    """The mean; ``None`` of nothing."""
    return statistics.fmean(values) if values else None


def _common(one: Rewards, other: Rewards) -> list[tuple[float, float]]:
    """Values of agents that have both, by agent."""
    pairs = ((one[agent], other[agent]) for agent in sorted(one.keys() & other.keys()))
    return [(x, y) for x, y in pairs if x is not None and y is not None]


def rescore_text(result: Rescoring) -> str:
    """The change of every reward as a table for the terminal, and what its columns mean."""
    text = _side_by_side(result) if result.is_whole else _old_and_new(result)
    return text + "".join(f"{note}\n" for note in result.notes)


def _side_by_side(result: Rescoring) -> str:
    """All rewards in one table, and why the others are not there."""
    rows: list[tuple[str, ...]] = [("reward", "conversations", "mean", "spread", "with paid", "with truth")]
    for place, each in enumerate(result.rows):
        signed = [_number(value, sign="+") for value in (each.with_paid, each.with_truth)]
        figures = (_number(each.mean), _number(each.spread), signed[0] if place else "", signed[1])
        rows.append((each.reward, str(each.conversations), *figures))
    left_out = "".join(f"  {', '.join(names)}: {why}\n" for why, names in result.reasons.items())
    told = f"\nNot computed for every conversation:\n{left_out}" if left_out else ""
    return (
        f"{_head(result)}\n\n{chr(10).join(text_table(rows))}\n{told}\n"
        "Correlations are within conversations: of values less their mean over the conversation's agents.\n"
        "With truth: whether the final solution is right, where answers are known.\n"
    )


def _head(result: Rescoring) -> str:
    torn = "The last line of transcripts.jsonl is torn, and left out.\n" if result.is_torn else ""
    left_out = f"{result.num_void} void and {result.num_other} of another kind"
    if result.num_without_tokens:
        left_out = f"{result.num_without_tokens} without kept tokens, {left_out}"
    return f"{torn}{counted(result.num_conversations, 'conversation')} ({left_out} left out)"


def _old_and_new(result: Rescoring) -> str:
    streams = result.streams
    rows: list[tuple[str, ...]] = [
        ("", "mean", "", "spread", "", "old with", "truth", ""),
        ("reward", "old", "new", "old", "new", "new", "old", "new"),
    ]
    for change in streams:
        plain = [_number(value) for value in (*change.means, *change.deviations)]
        signed = [_number(value, sign="+") for value in (change.agreement, *change.truth)]
        rows.append((change.stream, *plain, *signed))
    gaps = ""
    if result.num_gaps:
        shown = ", ".join(
            f"{name} {_number(old)} old, {_number(new)} new" for name, (old, new) in result.gaps.items()
        )
        over = counted(result.num_gaps, "conversation")
        gaps = f"\nReward-truth gap over {over} with right and wrong solutions:\n  {shown}\n"
    graded = ", ".join(f"{change.stream} {change.num_graded[1]}" for change in streams)
    return f"{_head(result)}\n\n{chr(10).join(text_table(rows))}\n{gaps}\n{_LEGEND}Rewards with a truth: {graded}.\n"


_LEGEND = """\
Correlations are within conversations: of values less their mean over the conversation's agents.
Truth, where answers are known: for r_sol and total, whether the final solution is right; for r_meta, the share of
the agent's votes between a right and a wrong solution that are right; for r_diag, the share of the critic's targets
whose solution was wrong and became right.
"""


def _number(value: float | None, sign: str = "") -> str:
    return "-" if value is None else f"{value:{sign}.3f}"

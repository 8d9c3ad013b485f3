"""Scoring the stored conversations of a run by other rules, without sampling anything again.

Transcripts of critique self-play are scored as in training (`viva.rewards.review.score_review`) by the run's own rules
with what the options change in them; with ``reward=NAME``, those of any kind by that reward as far as transcripts
suffice, or with ``reward=all`` by each. The result stands beside the rewards that were paid. One conversation is in
memory at a time.
"""

import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

import chz
import numpy as np

from viva.conversation.messages import counted, text_table
from viva.judging.ballots import ballot_accuracy
from viva.judging.comparison import reward_truth_gap
from viva.judging.records import ConversationRecord
from viva.rewards import NAMES, Reward, find_reward
from viva.rewards.base import UNPAID
from viva.rewards.critique import stored_votes
from viva.rewards.review import ReviewRules, ReviewVotes, review_rules, score_review, stored_rules
from viva.selfplay.user_code import reward_named
from viva.view.files import iter_transcripts

_Rewards = Mapping[int, float | None]
"""By agent."""

_Scored = tuple[_Rewards, _Rewards, _Rewards]
"""Old and new rewards of a conversation, and the truth that they should follow."""
ALL = "all"
"""Stands for all rewards."""
_STREAMS = ("r_sol", "r_meta", "r_diag", "total")


@chz.chz
class RescoreOptions:
    """Options of rescore; what is not given stays as it was in the run."""

    reward: str | None = chz.field(
        default=None,
        doc="another reward by name, path.py:FUNCTION, or all: each that the transcripts suffice for, side by side",
    )
    preset: Literal["paper", "robust"] | None = chz.field(
        default=None, doc="all choices and the weights of this preset, but for prior_precision"
    )
    fit: Literal["separate", "joint"] | None = chz.field(
        default=None, doc="initial and revised solutions each on a scale of their own, or on one"
    )
    meta: Literal["majority", "leave_one_out"] | None = chz.field(
        default=None, doc="r_meta: agreement with all votes, or with those of the others"
    )
    diag: Literal["sum", "mean"] | None = chz.field(default=None, doc="r_diag over the targets of a critic")
    noise_floor: float | None = chz.field(
        default=None, doc="gains smaller than so many standard errors pay nothing"
    )
    solution_floor: float | None = chz.field(
        default=None, doc="solutions that differ by fewer standard errors all earn the mean of their scores"
    )
    identical: Literal["apart", "one_item"] | None = chz.field(
        default=None, doc="solutions with the same words: two items, or one"
    )
    prior_precision: float | None = chz.field(default=None, doc="of the Bradley-Terry fit, above 0")
    reward_weights: dict[str, float] | None = chz.field(
        default=None, doc="weights of r_sol, r_meta and r_diag; those that are not named stay"
    )


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


@dataclass(slots=True, kw_only=True)
class Rescoring:
    """Rewards by other rules, of all conversations so far."""

    rewards: dict[str, list[_Scored]]
    """Old rewards, new rewards and truth of every conversation, by stream."""
    is_whole: bool = False
    """Whether all rewards are set side by side."""
    num_conversations: int = 0
    num_void: int = 0
    """Void conversations, which have no rewards."""
    num_other: int = 0
    """Conversations that were not critique self-play."""
    is_torn: bool = False
    """Whether the last stored conversation was cut while it was written, and is left out."""
    unpaid: dict[str, str] = field(default_factory=dict[str, str])
    """Rewards that could not be computed for every conversation, and why not for the first."""

    @property
    def streams(self) -> tuple[StreamChange, ...]:
        """The change of every reward."""
        return tuple(_change(name, rewards) for name, rewards in self.rewards.items())

    @property
    def gaps(self) -> dict[str, tuple[float | None, float | None]]:
        """Reward-truth gap of r_sol and total, old and new: mean over conversations with right and wrong solutions."""
        names = [name for name in ("r_sol", "total") if name in self.rewards]
        return {name: (_mean(self._gaps(name, 0)), _mean(self._gaps(name, 1))) for name in names}

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


def rescore(run_dir: str | Path, options: RescoreOptions) -> Rescoring:
    """Score the conversations of a run's folder again.

    Raises:
        ValueError: If the folder holds no conversation that can be scored, a stored value is damaged, an option is
            out of range, a fit fails, or a joint fit has nothing that links the two rounds.
    """
    rewards = _rewards(options)
    _changed(ReviewRules(), options)  # a mistake in the options is no fault of a stored conversation
    names = rewards or _STREAMS
    result = Rescoring(rewards={name: [] for name in names}, is_whole=options.reward == ALL)
    torn: list[str] = []
    for where, transcript in iter_transcripts(run_dir, torn):
        record = transcript.record
        if record is None or (not rewards and record.protocol != "critique_self_play"):
            result.num_other += 1
        elif transcript.void or not (record.rewards if rewards else record.streams):
            result.num_void += 1
        else:
            result.num_conversations += 1
            try:
                if not rewards:
                    _add_review(result, record, _changed(stored_rules(record), options))
                else:
                    seed = random.Random(f"{transcript.step}/{transcript.group}").getrandbits(31)
                    _add_rewards(result, record, rewards, seed)
            except UNPAID as error:
                raise ValueError(f"{where}: {error}") from error
            except (LookupError, TypeError) as error:
                raise ValueError(
                    f"{where}: no such conversation can have been held ({type(error).__name__}: {error}); the file is "
                    "damaged or was changed. Put it back from a copy, or take this line out"
                ) from error
    if not result.num_conversations:
        hint = "Give another folder." if rewards else "Give the folder of a run of critique_self_play."
        raise ValueError(
            f"{str(run_dir)!r} has no conversation to score again: {result.num_void} were void, and "
            f"{result.num_other} {'without a record' if rewards else 'not critique self-play'}. {hint}"
        )
    result.is_torn = bool(torn)
    return result


def _add_rewards(
    result: Rescoring, record: ConversationRecord, rewards: Mapping[str, Reward], seed: int
) -> None:
    """Score a conversation by other rewards; of all rewards, one that cannot be computed is left out, and noted."""
    right = {agent: float(is_right) for agent, is_right in (record.correct or {}).items()}
    for name, reward in rewards.items():
        try:
            result.rewards[name].append((record.rewards, reward.stored_pay(record, seed), right))
        except UNPAID as error:
            if not result.is_whole:
                raise
            result.unpaid.setdefault(name, str(error))


def _add_review(result: Rescoring, record: ConversationRecord, rules: ReviewRules) -> None:
    """Score a conversation of critique self-play again."""
    votes = stored_votes(record, rules)
    scores = score_review(votes, rules)
    truth = _truth(record, votes)
    for name, new in zip(_STREAMS, (scores.r_sol, scores.r_meta, scores.r_diag, scores.totals), strict=True):
        old = {agent: streams.get(name) for agent, streams in record.streams.items()}
        result.rewards[name].append((old, new, truth.get(name, {})))


def _rewards(options: RescoreOptions) -> dict[str, Reward]:
    """The rewards that are named, by their rows in the table; none: those of critique self-play, by the rules.

    Raises:
        ValueError: If transcripts never suffice for it, or rules of the other kind are given with it.
    """
    if options.reward is None:
        return {}
    rules = [name for name, value in chz.asdict(options).items() if value is not None and name != "reward"]
    if rules:
        raise ValueError(f"{', '.join(rules)} are rules of critique self-play; leave them out beside reward")
    if options.reward == ALL:
        return {name: find_reward(name) for name in NAMES}
    reward = reward_named(options.reward)
    if not reward.pays_stored:
        raise ValueError(
            "reward must be one that transcripts suffice for, like majority, answers, r_sol or shuffled_majority; "
            f"got {options.reward!r}, which needs the sampling logprobs of the replies"
        )
    return {"total": reward}


def _changed(stored: ReviewRules, options: RescoreOptions) -> ReviewRules:
    chosen = stored
    if options.preset is not None:
        chosen = replace(review_rules(options.preset), prior_precision=stored.prior_precision)
    changes: dict[str, object] = {
        name: value
        for name, value in chz.asdict(options).items()
        if value is not None and name not in ("preset", "reward", "reward_weights")
    }
    return replace(chosen, **changes, weights={**chosen.weights, **(options.reward_weights or {})})


def _change(stream: str, rewards: Sequence[_Scored]) -> StreamChange:
    old, new = (
        [value for each in rewards for value in each[side].values() if value is not None] for side in (0, 1)
    )
    agreement, _ = within_correlation(_common(old, new) for old, new, _ in rewards)
    truth_old, num_old = within_correlation(_common(old, truth) for old, _, truth in rewards)
    truth_new, num_new = within_correlation(_common(new, truth) for _, new, truth in rewards)
    return StreamChange(
        stream=stream,
        means=(_mean(old), _mean(new)),
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


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _truth(record: ConversationRecord, votes: ReviewVotes) -> dict[str, _Rewards]:
    """The truth that each reward should follow, by stream and agent; empty where no answer is known."""
    after, before = record.correct, record.correct_initial
    if after is None or before is None:
        return {}
    right = {agent: float(is_right) for agent, is_right in after.items()}
    mended = {agent: float(not before[agent] and after[agent]) for agent in after.keys() & before.keys()}
    return {
        "r_sol": right,
        "r_meta": {voter: ballot_accuracy({voter: own}, after) for voter, own in votes.final.items()},
        "r_diag": {
            critic: _mean([mended[agent] for agent in targets if agent in mended])
            for critic, targets in votes.targets.items()
        },
        "total": right,
    }


def _common(one: _Rewards, other: _Rewards) -> list[tuple[float, float]]:
    """Values of agents that have both, by agent."""
    pairs = ((one[agent], other[agent]) for agent in sorted(one.keys() & other.keys()))
    return [(x, y) for x, y in pairs if x is not None and y is not None]


def rescore_text(result: Rescoring) -> str:
    """The change of every reward as a table for the terminal, and what its columns mean."""
    return _side_by_side(result) if result.is_whole else _old_and_new(result)


def _side_by_side(result: Rescoring) -> str:
    """All rewards in one table, and why the others are not there."""
    computed = [each for each in result.streams if each.num_conversations]
    rows: list[tuple[str, ...]] = [("reward", "conversations", "mean", "spread", "with paid", "with truth")]
    # the first row is of what was paid, the old side of any of them
    sides = [("(paid)", 0, each) for each in (computed or result.streams)[:1]]
    sides += [(each.stream, 1, each) for each in computed]
    for name, side, each in sides:
        agreement = _number(each.agreement, sign="+") if side else ""
        figures = (_number(each.means[side]), _number(each.deviations[side]), agreement)
        rows.append((name, str(each.num_conversations), *figures, _number(each.truth[side], sign="+")))
    left_out = "".join(f"  {name}: {why}\n" for name, why in result.unpaid.items())
    told = f"\nNot computed for every conversation:\n{left_out}" if left_out else ""
    return (
        f"{_head(result)}\n\n{chr(10).join(text_table(rows))}\n{told}\n"
        "Correlations are within conversations: of values less their mean over the conversation's agents.\n"
        "With truth: whether the final solution is right, where answers are known.\n"
    )


def _head(result: Rescoring) -> str:
    torn = "The last line of transcripts.jsonl is torn, and left out.\n" if result.is_torn else ""
    return (
        f"{torn}{counted(result.num_conversations, 'conversation')} ({result.num_void} void and "
        f"{result.num_other} of another kind left out)"
    )


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

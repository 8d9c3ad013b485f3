"""What lists of conversations know of each: a small value instead of the whole text."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from viva.judging.ballots import Item, Preference, Vote
from viva.view.judgement import (
    NO_ORDERS,
    agreement_of_comparisons,
    agreement_of_votes,
    cycles_of_ballots,
    judge_pairs,
    orders_of,
    pair_cycles,
    preferences_of,
)
from viva.view.markup import visible

__all__ = ["Entry", "entry_of", "known_answers"]

_QUESTION_CHARS = 110

_STAGES = {"ranking": "correct_initial", "verdict": "correct"}
"""Which answers the rankings of a segment are about."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of ``transcripts.jsonl``."""

    step: int
    group: int
    offset: int
    """Where the line starts, in bytes."""
    strategy: str
    """Search strategy, else the protocol, else empty."""
    question: str
    """Its beginning."""
    has_record: bool
    """Whether what was said was kept."""
    is_void: bool
    void_reason: str | None
    num_failures: int
    num_right: int
    num_graded: int
    """0 if the answer is not known."""
    num_mended: int
    """Right solutions that revision gained, less those that it lost."""
    reward_min: float | None
    reward_mean: float | None
    reward_max: float | None
    num_pairs: int
    """Pairs judged in both orders with a winner in each."""
    num_flips: int
    """Of these, how many have two winners."""
    num_cycles: int
    num_agreeing: int
    """Preferences between a right and a wrong solution that went to the right one."""
    num_decidable: int
    """Such preferences."""
    orders: tuple[int, ...] = NO_ORDERS
    """Pairs judged in both orders, by what was said in one of them and in the other; see `orders_of`."""

    @property
    def share_correct(self) -> float | None:
        """Share of agents whose final solution is right; ``None`` if nobody was graded."""
        return self.num_right / self.num_graded if self.num_graded else None

    @property
    def reward_spread(self) -> float:
        """Highest minus lowest reward: how clearly the judge decided."""
        return (self.reward_max or 0.0) - (self.reward_min or 0.0)


def entry_of(offset: int, row: Mapping[str, Any]) -> Entry:
    """The entry of a transcript's line, as `viva.view.run_files.parse_line` read it.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, OverflowError: If it is no transcript.
    """
    record: Mapping[str, Any] = row.get("record") or {}
    rewards = [float(value) for value in (record.get("rewards") or {}).values()]
    if not record:
        rewards = [float(value) for value in row.get("rewards") or [] if value is not None]
    if not all(map(math.isfinite, rewards)):
        raise ValueError(f"rewards are finite numbers; got {rewards}")
    before, after = _truth(record, "correct_initial"), _truth(record, "correct")
    void_reason = row.get("void_reason")
    return Entry(
        step=int(row["step"]),
        group=int(row["group"]),
        offset=offset,
        strategy=visible(str(row.get("strategy") or record.get("protocol") or "")),
        question=visible(str(record.get("question") or "")[:_QUESTION_CHARS]),
        has_record=bool(record),
        is_void=bool(row.get("void")),
        void_reason=None if void_reason is None else str(void_reason),
        num_failures=len(record.get("failures") or row.get("failures") or ()),
        num_right=sum(after.values()),
        num_graded=len(after),
        num_mended=sum(after[agent] - before[agent] for agent in before.keys() & after.keys()),
        reward_min=min(rewards, default=None),
        reward_mean=sum(rewards) / len(rewards) if rewards else None,
        reward_max=max(rewards, default=None),
        **_judged(record),
    )


def known_answers(before: Mapping[int, bool], after: Mapping[int, bool], segment: str) -> dict[Item, bool]:
    """Which of the items that a segment's votes are about are right, where that is known."""
    if segment == "comparison":
        stages = {"initial": before, "revised": after}
        return {(stage, agent): right for stage, known in stages.items() for agent, right in known.items()}
    about = before if _STAGES.get(segment) == "correct_initial" else after
    return {**about}


def _truth(record: Mapping[str, Any], key: str) -> dict[int, bool]:
    return {int(agent): bool(right) for agent, right in (record.get(key) or {}).items()}


def _judged(record: Mapping[str, Any]) -> dict[str, Any]:
    before, after = _truth(record, "correct_initial"), _truth(record, "correct")
    said = [
        (item.get("agent_id"), int(item["first"]), int(item["second"]), str(item["outcome"]))
        for item in record.get("comparisons") or ()
    ]
    pairs = judge_pairs(said)
    both = [pair for pair in pairs if pair.in_both_orders]
    agreement = agreement_of_comparisons(said, before, after)
    agreeing, decidable = agreement.num_right, agreement.num_pairs
    num_cycles = len(pair_cycles(pairs))
    for segment, ballots in _ballots(record).items():
        num_cycles += len(cycles_of_ballots(ballots))
        votes = [vote for cast_votes in ballots.values() for vote in cast_votes]
        found = agreement_of_votes(preferences_of(votes), known_answers(before, after, segment))
        agreeing, decidable = agreeing + found.num_right, decidable + found.num_pairs
    orders = orders_of(pairs)
    return {
        "num_pairs": len(both),
        "num_flips": sum(pair.is_flipped for pair in both),
        "num_cycles": num_cycles,
        "num_agreeing": agreeing,
        "num_decidable": decidable,
        "orders": orders if any(orders) else NO_ORDERS,  # one value for all that have none
    }


def _ballots(record: Mapping[str, Any]) -> dict[str, dict[int, list[Vote]]]:
    """Preferences by segment and voter; ties do not matter here."""
    found: dict[str, dict[int, list[Vote]]] = {}
    for turn in record.get("turns") or ():
        votes = turn["response"].get("preferences")
        if votes:
            own = found.setdefault(str(turn.get("segment")), {}).setdefault(int(turn["agent_id"]), [])
            own += [
                Preference(_item(vote["winner"]), _item(vote["loser"])) for vote in votes if "winner" in vote
            ]
    return found


def _item(value: Any) -> Item:
    return int(value) if not isinstance(value, list) else (str(cast("list[Any]", value)[0]), int(value[1]))

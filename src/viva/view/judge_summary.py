"""The judge over many conversations: flips, cycles and agreement with known answers, and where to look."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from viva.view.entries import Entry
from viva.view.judgement import NO_ORDERS

__all__ = ["JudgeTotals", "judge_by_step", "judge_totals", "telling"]


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgeTotals:
    """Sums over conversations."""

    conversations: int
    pairs: int
    """Judged in both orders, with a winner in each."""
    flips: int
    """Of these, how many have two winners."""
    cycles: int
    agreeing: int
    """Preferences between a right and a wrong solution that went to the right one."""
    decidable: int
    """Such preferences."""
    orders: tuple[int, ...]
    """Pairs by their verdicts in both orders, see `viva.view.judgement.orders_of`."""


def judge_totals(entries: Iterable[Entry]) -> JudgeTotals:
    """Sums over some conversations."""
    known = list(entries)
    return JudgeTotals(
        conversations=len(known),
        pairs=sum(entry.num_pairs for entry in known),
        flips=sum(entry.num_flips for entry in known),
        cycles=sum(entry.num_cycles for entry in known),
        agreeing=sum(entry.num_agreeing for entry in known),
        decidable=sum(entry.num_decidable for entry in known),
        orders=tuple(map(sum, zip(NO_ORDERS, *(entry.orders for entry in known), strict=True))),
    )


def judge_by_step(entries: Iterable[Entry]) -> dict[int, JudgeTotals]:
    """Sums by step, in order."""
    by_step: dict[int, list[Entry]] = {}
    for entry in entries:
        by_step.setdefault(entry.step, []).append(entry)
    return {step: judge_totals(own) for step, own in sorted(by_step.items())}


def telling(entries: Iterable[Entry]) -> Sequence[Entry]:
    """Conversations with flips or cycles, in the order in which they are given."""
    return [entry for entry in entries if entry.num_flips or entry.num_cycles]

"""Sums of verdicts over conversations."""

from dataclasses import replace

from viva.view.entries import entry_of
from viva.view.judge_summary import judge_by_step, judge_totals, telling

PLAIN = entry_of(0, {"step": 0, "group": 0, "record": {"question": "How many pens?"}})


def test_totals_are_sums_also_by_step() -> None:
    said = [(0, 1, "A"), (1, 0, "A"), (0, 2, "B"), (2, 0, "A")]
    comparisons = [{"first": a, "second": b, "outcome": outcome} for a, b, outcome in said]
    record = {"question": "?", "comparisons": comparisons, "correct": {"0": False, "2": True}}
    judged = [entry_of(0, {"step": step, "group": 0, "record": record}) for step in (3, 1, 3)]
    totals = judge_totals([PLAIN, *judged])
    assert (totals.conversations, totals.pairs, totals.flips, totals.cycles) == (4, 6, 3, 0)
    assert (totals.agreeing, totals.decidable) == (6, 6)
    assert totals.orders == (3, 0, 0, 3, 0, 0, 0, 0, 0)
    assert {step: sums.flips for step, sums in judge_by_step([PLAIN, *judged]).items()} == {0: 0, 1: 1, 3: 2}
    assert judge_totals([]).orders == (0,) * 9


def test_conversations_with_flips_or_cycles_are_worth_a_look() -> None:
    flips, cycles = replace(PLAIN, num_flips=1), replace(PLAIN, num_cycles=1)
    assert telling([PLAIN, flips, cycles]) == [flips, cycles]

"""Which conversations a report shows."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from viva.view.chosen import choose
from viva.view.entries import Entry, entry_of

PLAIN = entry_of(0, {"step": 0, "group": 0, "record": {"question": "How many?"}})


def entries(draw: st.DrawFn) -> list[Entry]:
    places = draw(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), unique=True).map(sorted))
    return [
        replace(
            PLAIN,
            step=step,
            group=group,
            is_void=draw(st.booleans()),
            has_record=draw(st.booleans()),
            num_failures=draw(st.integers(0, 2)),
            num_right=draw(st.integers(0, 3)),
            num_graded=draw(st.sampled_from([0, 3])),
            num_mended=draw(st.integers(-2, 2)),
            reward_min=0.0,
            reward_max=draw(st.floats(0, 2)),
            offset=offset,
        )
        for offset, (step, group) in enumerate(places)
    ]


@given(st.composite(entries)())
def test_every_choice_is_recorded_and_shown_once(found: list[Entry]) -> None:
    choices = choose(found)
    assert len(choices) <= 7
    assert len({choice.entry.offset for choice in choices}) == len(choices)
    assert all(choice.entry.has_record for choice in choices)
    recorded = [entry for entry in found if entry.has_record]
    assert bool(choices) == bool(recorded)
    failed = any(entry.is_void or entry.num_failures for entry in recorded)
    assert failed == any(choice.entry.is_void or choice.entry.num_failures for choice in choices)


def test_best_and_worst_go_by_right_answers_where_they_are_known() -> None:
    rights = [1, 3, 0, 2]
    found = [replace(PLAIN, step=step, num_right=right, num_graded=3) for step, right in enumerate(rights)]
    reasons = {choice.entry.step: choice.reason for choice in choose(found)}
    assert reasons[0] == "the first conversation of the run"
    assert reasons[3] == "the first conversation of the last step"
    assert "most agents right" in reasons[1]
    assert "fewest agents right" in reasons[2]


def test_without_answers_they_go_by_how_clearly_the_judge_decided() -> None:
    spreads = [0.5, 2.0, 0.1, 0.4]
    found = [
        replace(PLAIN, step=step, reward_min=0.0, reward_max=spread) for step, spread in enumerate(spreads)
    ]
    reasons = {choice.entry.step: choice.reason for choice in choose(found)}
    assert "most clearly" in reasons[1]
    assert "least difference" in reasons[2]


def test_the_conversations_that_revision_mended_and_spoiled_most_are_shown() -> None:
    mended = [0, 1, 2, -1, 0]
    found = [replace(PLAIN, step=s, num_right=1, num_graded=2, num_mended=m) for s, m in enumerate(mended)]
    reasons = {choice.entry.step: choice.reason for choice in choose(found)}
    assert reasons[2] == "revision mended the most solutions"
    assert reasons[3] == "revision spoiled the most solutions"
    assert 1 not in reasons

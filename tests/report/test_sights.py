"""What was said before a turn: all of earlier rounds, and of its own round what agents of lower ids said in turn."""

import pytest

from viva.view.recorded import RecordedConversation
from viva.view.sights import sightings


def conversation(**changes):
    turns = [
        {"agent_id": agent, "round_index": number, "segment": "turn", "lane": 0, "text": f"{number}{agent}"}
        | {"response": {"solution": f"solution {number} of {agent}"}, "status": "ok", "prompt": prompt}
        for number, prompts in enumerate(
            [("", "> solution 0 of 0"), ("> solution 0 of 1", "> solution 1 of 0")]
        )
        for agent, prompt in enumerate(prompts)
    ]
    return RecordedConversation.model_validate({"question": "?", "turns": turns} | changes)


def seen(record, place):
    return {each.turn: each.is_seen for each in sightings(record, place)}


@pytest.mark.parametrize(
    "told", [{"order": "sequential", "protocol": "any"}, {"protocol": "round_robin"}, {}], ids=str
)
def test_in_a_sequential_round_those_of_lower_ids_spoke_before(told):
    record = conversation(**told)
    assert seen(record, 1) == {0: True}
    assert seen(record, 3) == {0: False, 1: False, 2: True}


@pytest.mark.parametrize(
    "told",
    [{"order": "simultaneous", "protocol": "round_robin"}, {"protocol": "critique_self_play"}],
    ids=str,
)
def test_in_a_simultaneous_round_nobody_spoke_before_so_nothing_was_hidden(told):
    record = conversation(**told)
    assert seen(record, 1) == {}
    assert seen(record, 2) == {0: False, 1: True}
    assert seen(record, 3) == {0: False, 1: False}

"""A conversation as the page gets it: what was said, what each agent saw of it, what it was worth, and its tokens."""

import pytest

from viva.conversation.records import Solution
from viva.judging.records import ConversationRecord, Transcript
from viva.view.conversation import (
    MAX_TEXT_CHARS,
    conversation_payload,
    sightings,
    text_at,
    token_payload,
)


def conversation(**changes):
    turns = [
        {"agent_id": agent, "round_index": number, "segment": "turn", "lane": 0, "text": f"{number}{agent}"}
        | {"response": {"solution": f"solution {number} of {agent}"}, "status": "ok", "prompt": prompt}
        for number, prompts in enumerate(
            [("", "> solution 0 of 0"), ("> solution 0 of 1", "> solution 1 of 0")]
        )
        for agent, prompt in enumerate(prompts)
    ]
    return ConversationRecord.model_validate({"question": "?", "turns": turns} | changes)


def seen(record, place):
    return {each["turn"]: each["is_seen"] for each in sightings(record, place)}


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


def shown(line):
    return conversation_payload(Transcript.model_validate(line))["record"]


def test_what_a_review_said_and_was_worth_is_all_there(critique_transcript):
    record = shown(critique_transcript(0, 0))
    said = [(turn["segment"], turn["agent_id"], turn["lane"]) for turn in record["turns"]]
    assert said[3:5] == [("ranking", 0, 0), ("critique", 0, 1)]
    assert record["turns"][3]["response"]["preferences"] == [{"winner": 2, "loser": 1}]
    assert record["turns"][5]["response"]["preferences"] == [{"first": 0, "second": 2}]
    assert record["turns"][4]["response"]["critiques"][0]["text"] == "The sum of agent 1 is off by one."
    assert record["turns"][8]["response"]["dropped"] == {"own": 1}
    assert (record["correct_initial"]["0"], record["correct"]["0"], record["rewards"]["0"]) == (
        False,
        True,
        1.57,
    )
    assert {name: values["0"] for name, values in record["scores"].items()} == {
        "initial": 0.3125,
        "initial_error": 0.21,
        "final": 0.828125,
        "final_error": 0.18,
    }
    assert record["streams"]["0"] == {"r_sol": 0.57, "r_meta": 1.0, "r_diag": 0.0, "total": 1.57}
    assert record["rules"]["fit"] == "joint"
    assert [each["segment"] for each in record["verdicts"]] == [None, "ranking", "verdict"]
    assert [(pair["agent_id"], pair["is_flipped"]) for pair in record["pairs"]] == [(0, False), (1, True)]


def test_votes_on_initial_and_revised_solutions_name_both(critique_transcript):
    line = critique_transcript(0, 0)
    vote = {"winner": ["revised", 0], "loser": ["initial", 1]}
    last = line["record"]["turns"][-1]
    line["record"]["turns"].append({**last, "segment": "comparison", "response": {"preferences": [vote]}})
    record = shown(line)
    assert record["turns"][-1]["response"]["preferences"] == [vote]
    # agent 0's revised solution is right, agent 1's initial one is wrong
    assert record["verdicts"][3]["agreement"] == [1, 1]


def test_a_long_text_loses_its_middle_and_is_found_again_by_its_reference(transcript, turn):
    long = "a" * 500_000 + "MIDDLE" + "z" * 500_000
    line = transcript(0, 0, turns=[turn(0, 0, long)])
    text = shown(line)["turns"][0]["response"]["solution"]
    assert len(text["head"]) + text["left_out"] + len(text["tail"]) == len(long)
    assert len(text["head"]) + len(text["tail"]) < MAX_TEXT_CHARS
    assert text_at(line, text["ref"]) == long


def tokens_row(**changes):
    turn = {
        "seat": 0,
        "turn": 0,
        "ids": [5, 6, 7],
        "pieces": ["a ", "<b>", "\n"],
        "sampling": [-0.5, -0.25, -1.0],
    }
    turn |= {"training": [-0.5, -0.5, None], "anchor": None, "weights": None, "mask": [1, 1, 0]}
    turn |= {"advantages": [0.5, -0.25, 0.0], "sampled_in": None, "trained_in": None}
    turn |= {"spans": [{"start": 0, "stop": 1, "stream": "r_sol", "reward": 0.75}]}
    return {"step": 3, "group": 1, "strategy": "iid", "turns": [turn | changes]}


def test_every_token_has_its_numbers():
    (turn,) = token_payload(tokens_row(), None)["turns"]
    assert (turn["title"], list(turn["weights"]), list(turn["anchor"])) == (
        "seat 0, turn 1",
        [1.0] * 3,
        [-0.5, -0.25, -1.0],
    )
    assert turn["ratios"] == [1.0, pytest.approx(0.7788, rel=1e-4), None]


@pytest.mark.parametrize("name", ["pieces", "sampling", "mask", "advantages"])
def test_a_turn_without_one_value_per_token_is_refused(name):
    with pytest.raises(ValueError, match="one value per token"):
        token_payload(tokens_row(**{name: ["a"] if name == "pieces" else [1]}), None)


def test_fields_of_turns_and_failures_that_are_not_known_are_passed_over():
    turn = {"agent_id": 0, "round_index": 0, "response": {"solution": "4"}, "tokens": 12}
    failure = {"agent_id": 1, "round_index": 0, "reason": "cut", "seconds": 3}
    record = ConversationRecord.model_validate({"question": "q", "turns": [turn], "failures": [failure]})
    assert (record.turns[0].response, record.failures[0].reason) == (Solution(solution="4"), "cut")


def test_an_unreadable_reply_is_named_by_its_place_in_the_file():
    turn = {"agent_id": 0, "round_index": 0, "response": {"solution": 4}}
    with pytest.raises(ValueError, match=r"f:1: not a transcript: record\.turns\.0\.response\.solution: "):
        Transcript.parse("f:1", {"step": 0, "group": 0, "record": {"question": "q", "turns": [turn]}})

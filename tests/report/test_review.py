"""Conversations of critique self-play on the page: what was said, and what it was worth."""

import html
import re
from collections.abc import Callable
from typing import Any

import pytest

from viva.view.conversation import conversation_html
from viva.view.recorded import Transcript

MakeLine = Callable[..., dict[str, Any]]


def shown(line: dict[str, Any]) -> str:
    return conversation_html(Transcript.model_validate(line), "an example")


def text(markup: str) -> str:
    return html.unescape(re.sub(r"<[^>]*>", " ", markup))


def cells(markup: str, tag: str) -> list[str]:
    return [" ".join(text(cell).split()) for cell in re.findall(rf"<{tag}[ >].*?</{tag}>", markup, re.S)]


def rows(markup: str, css_class: str) -> list[list[list[str]]]:
    """Cells of every table of a class."""
    tables = re.findall(rf'<table class="{css_class}">(.*?)</table>', markup, re.S)
    return [[cells(row, "t[dh]") for row in re.findall("<tr>.*?</tr>", table, re.S)] for table in tables]


@pytest.fixture
def page(critique_transcript: MakeLine) -> str:
    return shown(critique_transcript(0, 0))


def test_parallel_replies_of_a_round_stand_in_one_cell_in_their_order(page: str) -> None:
    ((_, *rounds),) = rows(page, "rounds")
    heads = [re.sub(" What it read.*?$", "", cell) for cell in rounds[1]]
    assert [row[0] for row in rounds] == ["1", "2", "3", "4"]
    assert heads[1].startswith("Ranking 2 > 1")
    titles = re.findall("<h4>(.*?)</h4>", page)
    assert titles[:9] == [
        *["Proposal"] * 3, "Ranking", "Critique of agent 1", "Ranking", "Critique of agent 0", "Ranking", "Critique",
    ]  # fmt: skip
    assert titles[9:15] == ["Revision: revise", "Revision: defend", "Revision: unstated", *["Verdict"] * 3]


def test_replies_show_what_was_read_and_what_was_left_out(page: str) -> None:
    blocks = [html.unescape(block) for block in re.findall("<pre>(.*?)</pre>", page, re.S)]
    assert {"2 > 1", "0 = 2", "The sum of agent 1 is off by one.", "no vote", "no critique"} <= set(blocks)
    assert "left out: own 1" in " ".join(text(page).split())


def test_right_and_wrong_are_marked_before_and_after(page: str) -> None:
    (((_, *agents), *_),) = rows(page, "rounds")
    assert agents == [
        "Agent 0 reward +1.57 ✗ wrong → ✓ right",
        "Agent 1 reward +1.75 ✗ wrong → ✗ wrong",
        "Agent 2 reward +0.77 ✓ right → ✓ right",
    ]


def test_scores_errors_changes_and_every_stream_are_those_of_the_record(page: str) -> None:
    assert rows(page, "scores") == [
        [
            ["", "V before", "V after", "change", "right or wrong", "r_sol", "r_meta", "r_diag", "total"],
            ["agent 0", "0.31 ± 0.21", "0.83 ± 0.18", "+0.52", "✗ wrong → ✓ right", "0.57", "1.00", "0.00", "1.57"],
            ["agent 1", "0.25 ± 0.22", "0.19 ± 0.17", "-0.06", "✗ wrong → ✗ wrong", "0.22", "0.50", "0.52", "1.75"],
            ["agent 2", "0.75 ± 0.23", "0.78 ± 0.19", "+0.03", "✓ right → ✓ right", "0.77", "none", "0.00", "0.77"],
        ]
    ]  # fmt: skip
    assert "Rules: diag=mean, diag_credit=target, fit=joint," in page


def test_rankings_are_a_matrix_of_voters_before_and_after(page: str) -> None:
    heads = ["", "agent 0", "agent 1", "agent 2"]
    assert rows(page, "matrix") == [
        [heads, ["agent 0", "", "", "=1"], ["agent 1", "", "", ""], ["agent 2", "=1", "0", ""]],
        [heads, ["agent 0", "", "2", ""], ["agent 1", "", "", ""], ["agent 2", "1", "0", ""]],
    ]
    assert re.findall("<caption>(.*?)</caption>", page) == ["ranking", "verdict"]


def test_votes_on_initial_and_revised_solutions_are_a_matrix_of_both(critique_transcript: MakeLine) -> None:
    line = critique_transcript(0, 0)
    vote = {"winner": ["revised", 0], "loser": ["initial", 1]}
    line["record"]["turns"].append(
        {**line["record"]["turns"][-1], "segment": "comparison", "response": {"preferences": [vote]}}
    )
    page = shown(line)
    assert "revised 0 > initial 1" in text(page)
    assert rows(page, "matrix")[2] == [
        ["", "revised 0", "initial 1"],
        ["revised 0", "", "2"],
        ["initial 1", "", ""],
    ]


def test_revised_against_initial_names_the_winner_in_both_orders_and_marks_flips(page: str) -> None:
    assert rows(page, "verdicts") == [
        [
            ["", "initial shown first", "revised shown first"],
            ["agent 0", "revised +0.75", "revised -0.50"],
            ["agent 1", "initial -0.12 flips", "revised -0.25 flips"],
        ]
    ]


def test_a_void_conversation_shows_what_was_said_and_why_it_ended(critique_transcript: MakeLine) -> None:
    line = critique_transcript(
        0, 0, void=True, void_reason="agent 1 failed in round 2", scores={}, streams={}, rewards={},
        comparisons=[], correct=None, correct_initial=None,
        failures=[{"agent_id": 1, "round_index": 1, "reason": "TimeoutError: no reply within 60 s"}],
    )  # fmt: skip
    line["record"]["turns"] = line["record"]["turns"][:3]
    page = shown(line)
    assert "TimeoutError: no reply within 60 s" in page
    assert "Void, it trained nothing: agent 1 failed in round 2" in page
    assert "Scores and rewards" not in page
    assert "Who prefers whom" not in page

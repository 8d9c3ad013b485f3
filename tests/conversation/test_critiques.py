import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.conversation.critiques import read_critiques, read_revision
from viva.conversation.protocol import View, read_solution
from viva.conversation.records import CritiqueReply, ReplyStatus, Revision, Solution

VIEW = View(agent_id=1, num_agents=4, round_index=1, aliases=(2, 0, 1, 3), persona="")
"""A is agent 2, B agent 0, C the reader itself, D agent 3."""

PIECES = (
    *(
        "Critique of ",
        "critique on ",
        "To ",
        "Solution ",
        "Agent ",
        "A",
        "B",
        "C",
        "D",
        "Z",
        "b",
        ":",
        "**",
        "- ",
    ),
    *(
        "1. ",
        "> ",
        "\n",
        "\r\n",
        "\u2028",
        " ",
        "\t",
        "Revise",
        "Revised solution",
        "Defend",
        "I ",
        ".",
        "##",
        "wrong",
    ),
)
texts = st.lists(st.one_of(st.text(max_size=4), st.sampled_from(PIECES)), max_size=30).map("".join)


def critiques_of(text: str) -> CritiqueReply:
    response = read_critiques(text, VIEW).response
    assert isinstance(response, CritiqueReply)
    return response


def revision_of(text: str) -> tuple[str, str, str]:
    reading = read_revision(text, VIEW)
    assert isinstance(reading.response, Revision)
    return reading.response.decision, reading.response.solution, reading.status.value


@pytest.mark.parametrize(
    "header",
    [
        *("Critique of B:", "critique of b:", "**Critique of B:**", "**Critique of B**:", "- Critique of B:"),
        *(
            "## Critique of Solution B:",
            "1. Critique of B :",
            "Critique of (B):",
            'Critique of "B":',
            "* To B:",
        ),
        *("To B:", "To agent B:", "B:", "**B:**", "Solution B:", "**Solution B**:", "Agent B:", "  B:"),
        *("Feedback on B:", "Review of the solution B:", "> Critique of B:"),
    ],
)
def test_a_header_names_its_target(header: str) -> None:
    text = f"{header} the sum is\nwrong.\n"
    (critique,) = critiques_of(text).critiques
    assert (critique.target, critique.text) == (0, "the sum is\nwrong.")
    assert text[critique.start : critique.stop] == text.rstrip()
    assert read_critiques(text, VIEW).status is ReplyStatus.OK


@pytest.mark.parametrize(
    "line", ["Note: x", "Q: why?", "A is worse: B is better", "about B: no", "AB: x", "b: x"]
)
def test_a_line_of_prose_is_no_header(line: str) -> None:
    text = f"Critique of B: first\n{line}"
    assert [critique.text for critique in critiques_of(text).critiques] == [f"first\n{line}"]


def test_every_critique_that_does_not_count_is_counted_by_cause() -> None:
    text = "Hm.\nCritique of C: me\nCritique of A:\nCritique of A: good\nTo Z: x\nA: more\nCritique of me: y"
    reply = critiques_of(text)
    assert [(critique.target, critique.text) for critique in reply.critiques] == [(2, "good")]
    assert reply.dropped == {"own": 1, "empty": 1, "unknown_alias": 2, "repeated_target": 1}
    assert read_critiques(text, VIEW).status is ReplyStatus.REPAIRED


@pytest.mark.parametrize("text", ["", "No idea.", "Critique of C: me", "Critique of A:"])
def test_without_a_critique_that_counts_the_reply_is_unstructured(text: str) -> None:
    assert read_critiques(text, VIEW).status is ReplyStatus.UNSTRUCTURED


def test_repeating_a_critique_changes_nothing() -> None:
    once = "Critique of A: bad\nCritique of B: good"
    assert critiques_of(once).critiques == critiques_of(f"{once}\n{once}").critiques


@given(text=texts)
def test_ranges_lie_in_the_text_in_order_and_apart(text: str) -> None:
    reply = critiques_of(text)
    place = 0
    for critique in reply.critiques:
        assert place <= critique.start < critique.stop <= len(text)
        assert text[critique.start : critique.stop].endswith(critique.text)
        assert critique.text == critique.text.strip() != ""
        place = critique.stop
    targets = [critique.target for critique in reply.critiques]
    assert len(set(targets)) == len(targets)
    assert VIEW.agent_id not in targets
    assert set(reply.dropped) <= {"unknown_alias", "own", "repeated_target", "empty"}


@pytest.mark.parametrize(
    ("text", "decision", "solution", "status"),
    [
        ("Revise: 4", "revise", "4", "ok"),
        ("Defend: 4", "defend", "4", "ok"),
        ("**Revise:**\n\n4", "revise", "4", "ok"),
        ("## Revised solution\n4", "revise", "4", "ok"),
        ("I defend my solution.\n4", "defend", "4", "ok"),
        ("I will revise: 4", "revise", "4", "ok"),
        ("We will defend our sum", "unstated", "We will defend our sum", "repaired"),
        ("Decision: revise\r\n4", "revise", "4", "ok"),
        ("They are right.\nREVISE: 4", "revise", "4", "repaired"),
        ("4", "unstated", "4", "repaired"),
        ("Revise the sum and get 4", "unstated", "Revise the sum and get 4", "repaired"),
        ("Revise: 4\nDefend: 5", "revise", "4\nDefend: 5", "ok"),
        ("Defend:", "defend", "", "unstructured"),
        ("  \n", "unstated", "", "unstructured"),
    ],
)
def test_a_revision_says_what_it_does_and_gives_a_solution(
    text: str, decision: str, solution: str, status: str
) -> None:
    assert revision_of(text) == (decision, solution, status)


@given(text=texts)
def test_a_solution_is_the_end_of_what_was_written(text: str) -> None:
    _, solution, status = revision_of(text)
    assert text.rstrip().endswith(solution)
    assert (status == "unstructured") == (not solution)
    whole = read_solution(text, VIEW)
    assert whole.response == Solution(solution=text.strip())
    assert (whole.status is ReplyStatus.UNSTRUCTURED) == (not text.strip())


# Regression: backtracking on model text (DESIGN, trap 16)


@pytest.mark.parametrize(
    "unit", [*PIECES, "Critique of the the ", "- - ", "* ", "Critique of B:\n", "I : ", "Revise "]
)
def test_reading_takes_linear_time(unit: str) -> None:
    text = unit * (200_000 // len(unit))
    start = time.process_time()
    for read in (read_critiques, read_revision, read_solution):
        read(text, VIEW)
        read(f"Critique of {text}", VIEW)
    assert time.process_time() - start < 3.0

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.conversation.critiques import proposal_instruction
from viva.conversation.protocol import AGENT_SYSTEM_PROMPTS, View, introduction, persona, quote
from viva.conversation.records import AgentResponse, ReplyStatus, Turn
from viva.selfplay.round_robin import round_robin_protocol

BREAKS = ("\n", "\r", "\r\n", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029")
texts = st.lists(
    st.one_of(st.text(max_size=5), st.sampled_from([*BREAKS, "[round 1, agent 0]", "solution:"]))
).map("".join)


def view_of(agent_id: int, round_index: int, text: str) -> View:
    return View(agent_id=agent_id, num_agents=2, round_index=round_index, aliases=(0, 1), persona=text)


def turn_prompt(question: str, turns: list[Turn], agent_id: int, round_index: int) -> str:
    view = view_of(agent_id, round_index, persona(agent_id))
    return round_robin_protocol(3).prompt(question, turns, view)


def turn(agent_id: int, round_index: int, text: str) -> Turn:
    response = AgentResponse(reflection=text, evaluation=text, solution=text)
    return Turn(
        agent_id=agent_id,
        round_index=round_index,
        prompt="",
        text=text,
        response=response,
        status=ReplyStatus.OK,
    )


@given(text=texts)
def test_every_line_of_a_quoted_text_is_marked(text: str) -> None:
    lines = quote(text).splitlines()
    assert lines
    assert all(line.startswith("> ") for line in lines)
    assert [line[2:] for line in lines] == [
        *(text + ".").splitlines()[:-1],
        (text + ".").splitlines()[-1][:-1],
    ]


@given(question=texts, replies=st.lists(texts, max_size=4))
def test_headers_are_the_protocols_own(question: str, replies: list[str]) -> None:
    turns = [turn(place % 2, place // 2, text) for place, text in enumerate(replies)]
    prompt = turn_prompt(question, turns, 0, 2)
    own = [line for line in prompt.splitlines() if not line.startswith("> ")]
    headers = [f"[round {place // 2 + 1}, agent {place % 2}]" for place in range(len(replies))]
    assert [line for line in own if line.startswith("[")] == headers
    assert own.count("solution:") == own.count("reflection:") == own.count("evaluation:") == len(replies)


@given(question=texts, replies=st.lists(texts, min_size=1, max_size=4))
def test_a_later_prompt_begins_with_the_transcript_of_an_earlier_one(
    question: str, replies: list[str]
) -> None:
    turns = [turn(place % 2, place // 2, text) for place, text in enumerate(replies)]
    prompts = [turn_prompt(question, turns[:count], count % 2, count // 2) for count in range(len(turns) + 1)]
    for earlier, later in itertools.pairwise(prompts):
        assert later.startswith(earlier[: earlier.rindex("You are agent")])


@given(agent_ids=st.lists(st.integers(0, 40), unique=True, min_size=2, max_size=2))
def test_no_two_agents_read_the_same_persona(agent_ids: list[int]) -> None:
    first, second = (persona(agent_id) for agent_id in agent_ids)
    assert first != second


def test_listed_personas_come_as_they_are_and_then_in_turn() -> None:
    assert persona(1) == AGENT_SYSTEM_PROMPTS[1]
    assert persona(4).startswith(AGENT_SYSTEM_PROMPTS[1] + " You are number 2")
    assert (
        persona(2, {0: "only"}) == "only You are number 3 in this role: take another way than your namesake."
    )


@pytest.mark.parametrize("table", [{}, {1: "a"}, {0: "a", 2: "b"}])
def test_personas_with_gaps_are_refused(table: dict[int, str]) -> None:
    with pytest.raises(ValueError, match=r"ids 0, 1, 2, \.\.\. without gaps"):
        persona(0, table)


def test_the_format_example_names_no_order_and_no_answer() -> None:
    (system, user) = round_robin_protocol(2).messages("prompt")
    assert user["content"] == "prompt"
    assert not any(character.isdigit() for character in str(system["content"]))


@pytest.mark.parametrize(
    ("text", "numbered", "alone"),
    [
        ("the Fox: be sly.", "You are agent 3, the Fox: be sly.", "You are the Fox: be sly."),
        ("an expert", "You are agent 3, an expert.", "You are an expert."),
        (
            "You are a domain expert. Provide technical solutions...",
            "You are agent 3. You are a domain expert. Provide technical solutions...",
            "You are a domain expert. Provide technical solutions...",
        ),
        ("you are a skeptic", "You are agent 3. You are a skeptic.", "You are a skeptic."),
        ("Challenge assumptions!", "You are agent 3. Challenge assumptions!", "Challenge assumptions!"),
    ],
)
def test_a_persona_is_a_name_or_a_sentence_of_its_own(text, numbered, alone):
    assert introduction(text, 3) == numbered
    assert introduction(text) == alone
    assert round_robin_protocol(2).rounds[0].segments[0].instruction(view_of(3, 0, text)) == (
        f"{numbered} This is round 1 of 2. Reply with the JSON object."
    )
    assert proposal_instruction(view_of(3, 0, text)) == f"{alone} Write your full solution."

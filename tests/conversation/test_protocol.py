from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from viva.conversation.protocol import (
    Protocol,
    Round,
    Segment,
    Sight,
    View,
    draw_aliases,
    quote,
    read_solution,
)
from viva.conversation.records import (
    AgentResponse,
    Conversation,
    Critique,
    CritiqueReply,
    Failure,
    Reply,
    ReplyStatus,
    Solution,
    Turn,
)
from viva.selfplay.round_robin import round_robin_protocol


def view_of(**changes: Any) -> View:
    defaults = {"agent_id": 0, "num_agents": 3, "round_index": 0, "aliases": (2, 0, 1), "persona": "the One."}
    return View(**{**defaults, **changes})


def turn_of(agent_id: int, round_index: int, response: Reply, segment: str = "turn", lane: int = 0) -> Turn:
    return Turn(
        agent_id=agent_id,
        round_index=round_index,
        prompt="",
        text="",
        response=response,
        status=ReplyStatus.OK,
        segment=segment,
        lane=lane,
    )


# letters


@given(num_agents=st.integers(1, 26), round_index=st.integers(0, 5), key=st.text(max_size=5))
def test_agents_with_an_odd_id_meet_the_others_in_reverse_order(
    num_agents: int, round_index: int, key: str
) -> None:
    orders = [draw_aliases(range(num_agents), agent, round_index, key) for agent in range(num_agents)]
    assert all(sorted(order) == list(range(num_agents)) for order in orders)
    for agent_id, order in enumerate(orders):
        assert order == (orders[0] if agent_id % 2 == 0 else orders[0][::-1])


def test_letters_are_drawn_anew_for_each_round_and_conversation() -> None:
    orders = {draw_aliases(range(6), 0, round_index, key) for round_index in range(4) for key in "abcd"}
    assert len(orders) > 10


@given(agent_id=st.integers(0, 4), permutation=st.permutations(range(5)), missing=st.sets(st.integers(0, 4)))
def test_a_letter_leads_to_its_agent_and_back(
    agent_id: int, permutation: list[int], missing: set[int]
) -> None:
    aliases = tuple(other for other in permutation if other not in missing)
    view = view_of(agent_id=agent_id, num_agents=5, aliases=aliases)
    assert list(view.letters) == list("ABCDE"[: len(aliases)])
    assert tuple(view.letters.values()) == aliases
    assert (view.own is None) == (agent_id in missing)
    assert view.own is None or view.letters[view.own] == agent_id


def test_more_agents_than_letters_are_refused_where_letters_are_needed() -> None:
    view = view_of(num_agents=27, aliases=tuple(range(27)))
    with pytest.raises(ValueError, match="at most 26 of them; got 27"):
        _ = view.letters


# prompts


@given(
    replies=st.lists(st.text(max_size=8), max_size=5),
    question=st.text(max_size=8),
    simultaneous=st.booleans(),
)
def test_round_robin_prompts_are_what_they_always_were(
    replies: list[str], question: str, simultaneous: bool
) -> None:
    order = "simultaneous" if simultaneous else "sequential"
    protocol = round_robin_protocol(3, order=order)
    round_index, agent_id = divmod(len(replies), 2)
    turns = [
        turn_of(place % 2, place // 2, AgentResponse(reflection=text, evaluation=text, solution=text))
        for place, text in enumerate(replies)
        if not simultaneous or place // 2 < round_index
    ]
    view = view_of(agent_id=agent_id, num_agents=2, round_index=round_index, persona="the Innovator.")
    shown = "".join(
        f"[round {turn.round_index + 1}, agent {turn.agent_id}]\n"
        + "".join(f"{name}:\n{quote(turn.response.solution)}\n" for name in AgentResponse.model_fields)
        for turn in turns
    )
    assert protocol.prompt(question, turns, view) == (
        f"Problem:\n{quote(question)}\nConversation:\n{shown}You are agent {agent_id}, the Innovator. "
        f"This is round {round_index + 1} of 3. Reply with the JSON object."
    )


def test_a_sight_shows_the_named_segments_of_those_it_is_about() -> None:
    critiques = tuple(Critique(target=target, text="x", start=0, stop=1) for target in (0, 2))
    turns = [
        turn_of(0, 0, Solution(solution="a"), "idea"),
        turn_of(1, 0, Solution(solution="b"), "idea"),
        turn_of(1, 1, CritiqueReply(critiques=critiques, dropped={}), "critique", 1),
    ]

    def seen(agent_id: int, whose: Any, *segments: str) -> list[Turn]:
        sight = Sight(segments=segments, whose=whose, show=lambda turns, view: "")
        return sight.select(turns, view_of(agent_id=agent_id))

    assert seen(1, "all", "idea") == turns[:2]
    assert seen(1, "own", "idea", "critique") == turns[1:]
    assert seen(0, "addressed", "critique") == turns[2:]
    assert seen(1, "addressed", "critique") == []
    assert seen(0, "addressed", "idea") == []


def test_a_conversation_knows_the_solutions_of_a_segment_and_the_last_ones() -> None:
    turns = (
        turn_of(0, 0, Solution(solution="a"), "idea"),
        turn_of(1, 0, Solution(solution="b"), "idea"),
        turn_of(0, 1, CritiqueReply(critiques=(), dropped={}), "critique"),
        turn_of(0, 2, Solution(solution="c"), "end"),
    )
    failure = Failure(agent_id=1, round_index=1, reason="gone")
    conversation = Conversation(question="q", num_agents=2, max_rounds=3, turns=turns, failures=(failure,))
    assert conversation.solutions("idea") == {0: "a", 1: "b"}
    assert conversation.final_solutions == {0: "c"}


# mistakes


def ask(view: View) -> str:
    return "Say it."


IDEA = Segment(name="idea", instruction=ask, read=read_solution, stream="r_sol")
END = replace(IDEA, name="end")
SEES_IDEA = Sight(segments=("idea",), whose="all", show=lambda turns, view: "")
FIRST = Round(name="first", segments=(IDEA,))
SECOND = Round(name="second", segments=(END,), sights=(SEES_IDEA,))
GOOD = Protocol(name="good", system_prompt="", rounds=(FIRST, SECOND))


def sees(name: str, whose: Any = "all") -> tuple[Sight]:
    return (replace(SEES_IDEA, segments=(name,), whose=whose),)


@pytest.mark.parametrize(
    ("protocol", "complaint"),
    [
        (replace(GOOD, rounds=()), "it has no round: add at least one"),
        (replace(GOOD, on_failure="retry"), "on_failure must be 'void' or 'continue'; got 'retry'"),
        (replace(GOOD, rounds=(Round("first", replace(IDEA, stream=None)),)), "no segment has a stream"),
        (replace(GOOD, min_agents=0), "min_agents must be at least 1; got 0"),
        (replace(GOOD, personas={1: "x"}), "personas must have the ids 0, 1, 2"),
        (replace(GOOD, rounds=(FIRST, FIRST)), "round 'first' stands twice: give it another name"),
        (replace(GOOD, rounds=(replace(FIRST, segments=()),)), "'first' asks for nothing"),
        (replace(GOOD, rounds=(replace(FIRST, order="any"),)), "order must be 'sequential'"),
        (replace(GOOD, rounds=(replace(FIRST, segments=(IDEA, IDEA)),)), "two segments 'idea'"),
        (replace(GOOD, rounds=(replace(FIRST, segments=(replace(IDEA, name=""),)),)), "without a name"),
        (
            replace(GOOD, rounds=(replace(FIRST, segments=(replace(IDEA, on_invalid="die"),)),)),
            "on_invalid must be 'keep' or 'fail'; got 'die'",
        ),
        (
            replace(GOOD, rounds=(FIRST, replace(SECOND, segments=(replace(IDEA, stream=None),)))),
            "segment 'idea' is one thing in round 'first' and another in round 'second'",
        ),
        (replace(GOOD, rounds=(FIRST, replace(SECOND, sights=sees("idea", "mine")))), "got 'mine'"),
        (
            replace(GOOD, rounds=(FIRST, replace(SECOND, sights=sees("ideas")))),
            "'ideas', which no round asks for; allowed: end, idea",
        ),
        (
            replace(GOOD, rounds=(replace(FIRST, sights=sees("end")), SECOND)),
            "'end', which is asked for only later: move the sight to a later round",
        ),
        (
            replace(GOOD, rounds=(FIRST, replace(SECOND, sights=sees("end")))),
            "a simultaneous round never sees itself: set order='sequential'",
        ),
        (
            replace(GOOD, rounds=(FIRST, replace(SECOND, sights=sees("end", "own"), order="sequential"))),
            "of the agent itself before it is written",
        ),
        (
            replace(GOOD, rounds=(FIRST, replace(SECOND, sights=(replace(SEES_IDEA, segments=()),)))),
            "a sight of no segment",
        ),
        (
            replace(GOOD, rounds=(replace(FIRST, segments=(replace(IDEA, instruction=7),)),)),
            "segment 'idea': instruction must be a text, or a function of the View that makes one; got 7",
        ),
    ],
)
def test_a_mistake_is_named_and_says_what_to_do(protocol: Protocol, complaint: str) -> None:
    with pytest.raises(ValueError, match="cannot be played") as caught:
        protocol.check()
    assert complaint in str(caught.value)
    assert str(caught.value).count("\n- ") == 1


def test_all_mistakes_are_told_at_once() -> None:
    bad = replace(GOOD, on_failure="x", min_agents=0, rounds=(replace(FIRST, order="x"), FIRST))
    with pytest.raises(ValueError, match="cannot be played") as caught:
        bad.check()
    assert str(caught.value).count("\n- ") == 4


def test_a_protocol_without_mistakes_passes() -> None:
    GOOD.check()
    replace(GOOD, rounds=(replace(FIRST, order="sequential", sights=sees("idea")), SECOND)).check()


def test_seats_are_numbered_by_agent_and_then_lane() -> None:
    wide = replace(GOOD, rounds=(FIRST, replace(SECOND, segments=(END, replace(END, name="vote")))))
    seats = wide.seats(3)
    assert seats == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]
    assert all(seats.index((agent, lane)) == agent * wide.num_lanes + lane for agent, lane in seats)


# short forms


def test_a_text_is_a_segment_behind_the_persona_and_a_name_is_a_sight_of_all() -> None:
    protocol = Protocol(
        rounds=[Round("argue", "Make your point."), Round("final", "Conclude.", ["argue"])],
        personas={0: "the Proposer.", 1: "the Opponent."},
    )
    protocol.check()
    assert protocol.streams == ("reward",)
    view = View(agent_id=1, num_agents=2, round_index=1, aliases=(0, 1), persona="the Opponent.")
    said = Turn(
        agent_id=0,
        round_index=0,
        prompt="",
        text="It is 4.",
        response=Solution(solution="It is 4."),
        status=ReplyStatus.OK,
        segment="argue",
    )
    assert protocol.prompt("2 + 2?", [said], view) == (
        "Problem:\n> 2 + 2?\n[round 1, agent 0, argue]\n> It is 4.\nYou are agent 1, the Opponent. Conclude."
    )
    assert protocol.rounds[0].segments[0].read("4", view).response == Solution(solution="4")


def test_a_round_can_be_rebuilt_from_its_fields() -> None:
    assert replace(SECOND, order="sequential").sights == SECOND.sights
    assert replace(SECOND) == SECOND


def test_a_lone_value_is_one_of_its_kind() -> None:
    segment = Segment(name="a", instruction="Answer.")
    protocol = Protocol(rounds=iter([Round("a", segment), Round("b", "B", Sight(segments="a"))]))
    protocol.check()
    assert protocol.rounds == (Round("a", [segment]), Round("b", "B", ["a"]))
    assert Protocol(rounds=protocol.rounds[0]).rounds == protocol.rounds[:1]
    assert protocol.prompt("2?", [], view_of(round_index=0)).endswith("You are agent 0, the One. Answer.")


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Round("a", ["Answer.", "Other."]), "round 'a': segments must be .*; got 'Answer.'"),
        (
            lambda: Round("a", None),
            "round 'a': segments must be one text, one function, or Segments; got None",
        ),
        (lambda: Round("a", "x", None), "round 'a': sights must be names of segments, or Sights; got None"),
        (lambda: Protocol(rounds=["a"]), "protocol 'conversation': rounds must be Rounds; got 'a'"),
        (lambda: Protocol(rounds=None), "rounds must be Rounds; got None"),
    ],
)
def test_what_is_no_part_of_a_protocol_is_refused_where_it_is_given(make: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        make()

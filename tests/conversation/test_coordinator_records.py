"""What the coordinator writes down of every turn, and what it tells an agent of its place."""

import pytest

from viva.conversation.coordinator import MultiAgentCoordinator, OutOfTurnError
from viva.conversation.protocol import Protocol, Round, Segment, persona, read_solution
from viva.conversation.records import ReplyStatus, Solution, ToolCall

PERSONAS = {0: "You doubt.", 1: "You build."}


def protocol_of(*widths: int, on_invalid: str = "keep", personas: dict[int, str] | None = None) -> Protocol:
    rounds = tuple(
        Round(
            name=str(index),
            segments=tuple(
                Segment(
                    name=f"{index}.{lane}",
                    instruction=lambda view: "Say it.",
                    read=read_solution,
                    stream="r_sol",
                    on_invalid=on_invalid,  # pyright: ignore[reportArgumentType]
                )
                for lane in range(width)
            ),
        )
        for index, width in enumerate(widths)
    )
    return Protocol(
        name="plain",
        system_prompt="",
        rounds=rounds,
        personas=personas,
        on_failure="continue",
        min_agents=1,
    )


async def test_a_turn_holds_everything_that_was_said_and_asked() -> None:
    coordinator = MultiAgentCoordinator("q", 2, protocol_of(1, 2))
    for agent_id in (0, 1):
        await coordinator.wait_for_turn(agent_id)
        first = await coordinator.submit_response(agent_id, Solution(solution="4"))
        assert (first.lane, first.segment, first.status) == (0, "0.0", ReplyStatus.OK)
        assert (first.prompt, first.text) == ("", "")
    assert await coordinator.wait_for_turn(1, 1) == 1
    turn = await coordinator.submit_response(
        1, Solution(solution="5"), lane=1, prompt="asked", text="said", status=ReplyStatus.REPAIRED
    )
    assert (turn.agent_id, turn.round_index, turn.lane, turn.segment) == (1, 1, 1, "1.1")
    assert (turn.prompt, turn.text, turn.status) == ("asked", "said", ReplyStatus.REPAIRED)
    assert turn.response == Solution(solution="5")
    conversation = coordinator.conversation
    assert conversation.turns[-1] == turn
    assert (conversation.question, conversation.num_agents, conversation.max_rounds) == ("q", 2, 2)
    assert conversation.failures == ()


async def test_an_agent_that_leaves_takes_the_calls_of_its_unfinished_round_along_and_no_other() -> None:
    coordinator = MultiAgentCoordinator("q", 2, protocol_of(1, 1))

    async def call(agent_id: int, value: str) -> None:
        await coordinator.submit_response(
            agent_id, ToolCall(tool="add", arguments="{}", output=value, stop=0)
        )

    for agent_id in (0, 1):
        await coordinator.wait_for_turn(agent_id)
        await call(agent_id, f"first of {agent_id}")
        await coordinator.submit_response(agent_id, Solution(solution="4"))
    for agent_id in (0, 1):
        await coordinator.wait_for_turn(agent_id)
        await call(agent_id, f"second of {agent_id}")
    await coordinator.fail(0, "it left")
    found = [turn.response for turn in coordinator.conversation.turns]
    outputs = [each.output for each in found if isinstance(each, ToolCall)]
    assert outputs == ["first of 0", "first of 1", "second of 1"]


async def test_a_view_is_the_place_of_the_agents_next_turn() -> None:
    coordinator = MultiAgentCoordinator("q", 3, protocol_of(1, 2, personas=PERSONAS))
    for agent_id in range(3):
        view = coordinator.view(agent_id)
        assert (view.agent_id, view.num_agents, view.round_index) == (agent_id, 3, 0)
        assert view.persona == persona(agent_id, PERSONAS)
        assert coordinator.view(agent_id, 1).round_index == 1  # the first round of lane 1
    before = coordinator.view(0)
    for agent_id in range(3):
        await coordinator.wait_for_turn(agent_id)
        await coordinator.submit_response(agent_id, Solution(solution="4"))
    assert coordinator.view(0).round_index == 1
    assert coordinator.view(0).seed != before.seed


def test_what_a_round_shuffles_is_one_seed_for_all_its_agents() -> None:
    def seeds(question: str, seed: int) -> set[int]:
        coordinator = MultiAgentCoordinator(question, 4, protocol_of(1), seed=seed)
        return {coordinator.view(agent_id).seed for agent_id in range(4)}

    drawn = [seeds(question, seed) for question in "qr" for seed in range(2)]
    assert [len(each) for each in drawn] == [1] * 4
    assert len(set[int]().union(*drawn)) == 4
    assert all(0 <= one < 2**32 for each in drawn for one in each)
    default = MultiAgentCoordinator("q", 4, protocol_of(1))
    assert {default.view(0).seed} == seeds("q", 0)


async def test_of_an_unreadable_reply_the_reason_holds_the_first_80_characters() -> None:
    coordinator = MultiAgentCoordinator("q", 2, protocol_of(1, on_invalid="fail"))
    await coordinator.wait_for_turn(0)
    text = "x" * 80 + "y" * 20
    turn = await coordinator.submit_response(
        0, Solution(solution=""), text=text, status=ReplyStatus.UNSTRUCTURED
    )
    assert turn.text == text
    (failure,) = coordinator.conversation.failures
    assert failure.reason == f"its reply to '0.0' cannot be read: {'x' * 80!r}"
    # a reply that was only repaired stays, even here
    await coordinator.wait_for_turn(1)
    await coordinator.submit_response(1, Solution(solution="4"), status=ReplyStatus.REPAIRED)
    assert coordinator.conversation.final_solutions == {1: "4"}


async def test_seats_that_do_not_exist_have_no_view_and_see_nothing() -> None:
    coordinator = MultiAgentCoordinator("q", 2, protocol_of(2))
    for call in (coordinator.view, coordinator.visible_turns):
        with pytest.raises(ValueError, match=r"agent_id must be from 0 to 1; got 2"):
            call(2, 0)
        with pytest.raises(ValueError, match=r"lane must be from 0 to 1; got -1"):
            call(0, -1)


async def test_an_agent_is_out_of_a_lane_before_it_is_out_of_all() -> None:
    coordinator = MultiAgentCoordinator("q", 1, protocol_of(2))
    await coordinator.wait_for_turn(0, 1)
    await coordinator.submit_response(0, Solution(solution="4"), lane=1)
    assert coordinator.is_out(0, 1)
    assert not coordinator.is_out(0, 0)
    assert not coordinator.is_out(0)
    assert not coordinator.episode_done
    assert coordinator.num_agents_left == 1


async def test_who_has_finished_sees_everything_and_is_told_that_it_has() -> None:
    coordinator = MultiAgentCoordinator("q", 1, protocol_of(2))
    await coordinator.wait_for_turn(0, 1)
    await coordinator.submit_response(0, Solution(solution="4"), lane=1)
    with pytest.raises(OutOfTurnError, match="agent 0 may not reply: the conversation is over for it"):
        await coordinator.submit_response(0, Solution(solution="5"), lane=1)
    with pytest.raises(OutOfTurnError, match="it has not been given a turn"):
        await coordinator.submit_response(0, Solution(solution="5"))
    await coordinator.wait_for_turn(0)
    await coordinator.submit_response(0, Solution(solution="5"))
    for lane in (0, 1):
        assert [turn.lane for turn in coordinator.visible_turns(0, lane)] == [0, 1]
        assert await coordinator.wait_for_turn(0, lane) is None

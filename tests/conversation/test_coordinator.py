import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from viva.conversation.coordinator import MultiAgentCoordinator, OutOfTurnError
from viva.conversation.protocol import Order
from viva.conversation.records import AgentResponse, Failure
from viva.selfplay.round_robin import round_robin_protocol

ORDERS: tuple[Order, ...] = ("sequential", "simultaneous")


def coordinator_of(
    num_agents: int, max_rounds: int, *, order: Order = "sequential", min_agents: int = 1
) -> MultiAgentCoordinator:
    protocol = round_robin_protocol(max_rounds, order=order, on_failure="continue", min_agents=min_agents)
    return MultiAgentCoordinator("q", num_agents, protocol)


def says(text: str) -> AgentResponse:
    return AgentResponse(solution=text)


async def settle(*coroutines: Coroutine[Any, Any, Any]) -> list[asyncio.Task[Any]]:
    """Start tasks and let everything run until nothing moves any more, without a clock."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    for _ in range(400):
        await asyncio.sleep(0)
    return tasks


async def end(tasks: list[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_sequential_agents_reply_round_robin_and_see_everything_before() -> None:
    coordinator = coordinator_of(3, 2)
    for round_index in range(2):
        for agent_id in range(3):
            assert await coordinator.wait_for_turn(agent_id) == round_index
            seen = [(turn.round_index, turn.agent_id) for turn in coordinator.visible_turns(agent_id)]
            assert seen == [divmod(place, 3) for place in range(3 * round_index + agent_id)]
            assert not coordinator.episode_done
            turn = await coordinator.submit_response(agent_id, says(f"{agent_id}/{round_index}"))
            assert (turn.agent_id, turn.round_index) == (agent_id, round_index)
    assert coordinator.episode_done
    assert [await coordinator.wait_for_turn(agent_id) for agent_id in range(3)] == [None] * 3
    assert coordinator.conversation.final_solutions == {0: "0/1", 1: "1/1", 2: "2/1"}


async def test_a_simultaneous_round_is_a_barrier() -> None:
    coordinator = coordinator_of(3, 2, order="simultaneous")
    assert [await coordinator.wait_for_turn(agent_id) for agent_id in (2, 0, 1)] == [0, 0, 0]
    await coordinator.submit_response(2, says("fast"))
    assert coordinator.visible_turns(0) == ()  # nobody sees a reply of the same round
    (next_round,) = await settle(coordinator.wait_for_turn(2))
    assert not next_round.done()  # the fast agent does not play a round alone
    await coordinator.submit_response(0, says("a"))
    await coordinator.submit_response(1, says("b"))
    await settle()
    assert next_round.done()
    assert next_round.result() == 1
    assert [turn.agent_id for turn in coordinator.visible_turns(2)] == [0, 1, 2]


@pytest.mark.parametrize("order", ORDERS)
async def test_a_failure_wakes_those_who_wait_and_the_round_skips_the_agent(order: Order) -> None:
    coordinator = coordinator_of(3, 2, order=order)
    assert await coordinator.wait_for_turn(0) == 0
    if order == "simultaneous":
        for agent_id in (1, 2):
            assert await coordinator.wait_for_turn(agent_id) == 0
            await coordinator.submit_response(agent_id, says("x"))
    tasks = await settle(coordinator.wait_for_turn(1), coordinator.wait_for_turn(2))
    assert not any(task.done() for task in tasks)
    await coordinator.fail(0, "sampler died")
    done = await settle()
    assert tasks[0].result() == (1 if order == "simultaneous" else 0)
    assert await coordinator.wait_for_turn(0) is None
    conversation = coordinator.conversation
    assert conversation.failures == (Failure(agent_id=0, round_index=0, reason="sampler died"),)
    await end([*tasks, *done])


async def test_an_agent_that_fails_before_its_turn_is_skipped_when_it_comes() -> None:
    coordinator = coordinator_of(3, 1)
    await coordinator.fail(1, "gone")
    assert await coordinator.wait_for_turn(0) == 0
    await coordinator.submit_response(0, says("a"))
    assert await coordinator.wait_for_turn(2) == 0
    await coordinator.submit_response(2, says("c"))
    assert coordinator.episode_done
    assert coordinator.conversation.final_solutions == {0: "a", 2: "c"}


async def test_the_solutions_of_an_agent_that_failed_later_do_not_count() -> None:
    coordinator = coordinator_of(2, 2)
    for agent_id in (0, 1):
        await coordinator.wait_for_turn(agent_id)
        await coordinator.submit_response(agent_id, says(f"{agent_id}"))
    await coordinator.wait_for_turn(0)
    await coordinator.fail(0, "late")
    assert await coordinator.wait_for_turn(1) == 1
    await coordinator.submit_response(1, says("end"))
    assert coordinator.conversation.final_solutions == {1: "end"}
    assert len(coordinator.conversation.turns) == 3


async def test_only_the_first_failure_counts_and_none_after_the_last_turn() -> None:
    coordinator = coordinator_of(2, 1)
    await coordinator.wait_for_turn(0)
    await coordinator.submit_response(0, says("a"))
    await coordinator.fail(0, "after the last turn")
    await coordinator.fail(1, "first")
    await coordinator.fail(1, "second")
    assert coordinator.conversation.failures == (Failure(agent_id=1, round_index=0, reason="first"),)


async def test_with_too_few_agents_left_the_conversation_is_over_for_all() -> None:
    coordinator = coordinator_of(3, 5, min_agents=3)
    (waiting,) = await settle(coordinator.wait_for_turn(1))
    assert await coordinator.wait_for_turn(0) == 0
    await coordinator.fail(2, "gone")
    await settle()
    assert waiting.done()
    assert waiting.result() is None
    assert coordinator.episode_done
    with pytest.raises(OutOfTurnError, match="the conversation is over for it"):
        await coordinator.submit_response(0, says("late"))


# Regression: a late reply lands on the wrong agent or round (DESIGN, trap 1)


async def test_a_reply_without_a_turn_is_refused() -> None:
    coordinator = coordinator_of(2, 1)
    with pytest.raises(OutOfTurnError, match="agent 1 may not reply: it has not been given a turn"):
        await coordinator.submit_response(1, says("x"))
    await coordinator.wait_for_turn(0)
    await coordinator.submit_response(0, says("x"))
    with pytest.raises(OutOfTurnError, match="over for it"):
        await coordinator.submit_response(0, says("again"))
    await coordinator.wait_for_turn(1)
    await coordinator.fail(1, "timeout")
    with pytest.raises(OutOfTurnError, match=r"it left in round 1 \(timeout\)"):
        await coordinator.submit_response(1, says("late"))
    assert [turn.response.solution for turn in coordinator.conversation.turns] == ["x"]


async def test_a_turn_is_given_once_per_reply() -> None:
    coordinator = coordinator_of(1, 2)
    assert await coordinator.wait_for_turn(0) == 0
    assert await coordinator.wait_for_turn(0) == 0  # asking again gives the same turn
    await coordinator.submit_response(0, says("x"))
    with pytest.raises(OutOfTurnError, match="call wait_for_turn first"):
        await coordinator.submit_response(0, says("y"))


async def test_cancelling_one_waiter_disturbs_nobody() -> None:
    coordinator = coordinator_of(3, 1)
    tasks = await settle(coordinator.wait_for_turn(1), coordinator.wait_for_turn(2))
    tasks[0].cancel()
    await settle()
    assert tasks[0].cancelled()
    await coordinator.fail(1, "cancelled")
    await coordinator.wait_for_turn(0)
    await coordinator.submit_response(0, says("a"))
    await settle()
    assert tasks[1].done()
    assert tasks[1].result() == 0


async def test_a_failure_is_recorded_even_if_telling_it_is_cancelled() -> None:
    coordinator = coordinator_of(2, 1)
    await coordinator.wait_for_turn(0)
    (waiting,) = await settle(coordinator.wait_for_turn(1))
    telling = asyncio.ensure_future(coordinator.fail(0, "killed"))
    await asyncio.sleep(0)
    telling.cancel()
    await settle()
    assert waiting.done()
    assert waiting.result() == 0
    assert coordinator.conversation.failures[0].reason == "killed"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_agents": 0}, "num_agents=0"),
        ({"max_rounds": 0}, "max_rounds=0"),
        ({"order": "random"}, "'random'"),
        ({"min_agents": 4}, "from 1 to num_agents=3; got 4"),
        ({"min_agents": 0}, "min_agents must be at least 1; got 0"),
    ],
)
def test_a_conversation_that_cannot_be_held_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        coordinator_of(**{"num_agents": 3, "max_rounds": 2, **changes})


async def test_an_unknown_agent_is_refused_everywhere() -> None:
    coordinator = coordinator_of(2, 1)
    for call in (
        coordinator.wait_for_turn(2),
        coordinator.fail(-1, "x"),
        coordinator.submit_response(5, says("x")),
    ):
        with pytest.raises(ValueError, match="agent_id must be from 0 to 1"):
            await call


# whatever the speeds and failures, everybody ends, and the conversation is the same


@settings(max_examples=150)
@given(
    data=st.data(), order=st.sampled_from(ORDERS), num_agents=st.integers(1, 5), max_rounds=st.integers(1, 4)
)
def test_nobody_waits_for_ever_and_nobody_overtakes(
    data: st.DataObject, order: Order, num_agents: int, max_rounds: int
) -> None:
    latency = data.draw(
        st.lists(st.integers(0, 5), min_size=num_agents * max_rounds, max_size=num_agents * max_rounds)
    )
    fails_in = data.draw(st.lists(st.integers(0, 2 * max_rounds), min_size=num_agents, max_size=num_agents))
    min_agents = data.draw(st.integers(1, num_agents))
    coordinator = coordinator_of(num_agents, max_rounds, order=order, min_agents=min_agents)
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}

    async def agent(agent_id: int) -> None:
        while (round_index := await coordinator.wait_for_turn(agent_id)) is not None:
            visible = coordinator.visible_turns(agent_id)
            seen[round_index, agent_id] = [(turn.round_index, turn.agent_id) for turn in visible]
            for _ in range(latency[round_index * num_agents + agent_id]):
                await asyncio.sleep(0)
            if fails_in[agent_id] == round_index:
                await coordinator.fail(agent_id, "as told")
            elif not coordinator.is_out(agent_id):
                await coordinator.submit_response(agent_id, says(f"{agent_id}/{round_index}"))

    async def run() -> None:
        tasks = await settle(*(agent(agent_id) for agent_id in range(num_agents)))
        try:
            assert all(task.done() and task.exception() is None for task in tasks)
        finally:
            await end(tasks)

    asyncio.run(run())
    assert coordinator.episode_done
    turns = coordinator.conversation.turns
    places = [(turn.round_index, turn.agent_id) for turn in turns]
    assert places == sorted(set(places))
    assert all(turn.response.solution == f"{turn.agent_id}/{turn.round_index}" for turn in turns)
    for (round_index, agent_id), visible in seen.items():
        horizon = (round_index, agent_id if order == "sequential" else 0)
        assert visible == [place for place in places if place < horizon]
    if min_agents == 1:
        for agent_id in range(num_agents):
            wanted = min(fails_in[agent_id], max_rounds)
            assert sum(turn.agent_id == agent_id for turn in turns) == wanted

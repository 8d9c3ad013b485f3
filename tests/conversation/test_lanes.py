"""Rounds with parallel segments: barriers over lanes, failures in each of them, and nobody who waits for ever."""

import asyncio
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from viva.conversation.coordinator import MultiAgentCoordinator, OutOfTurnError
from viva.conversation.protocol import Order, Protocol, Round, Segment, Sight, read_solution
from viva.conversation.records import Failure, ReplyStatus, Solution

OnFailure = Literal["void", "continue"]


def protocol_of(
    widths: list[int],
    orders: list[Order] | None = None,
    *,
    on_failure: OnFailure = "continue",
    min_agents: int = 2,
    on_invalid: Literal["keep", "fail"] = "keep",
) -> Protocol:
    """Rounds of so many segments each; every round sees all that was said before."""
    rounds: list[Round] = []
    names: list[str] = []
    for index, width in enumerate(widths):
        segments = tuple(
            Segment(
                name=f"{index}.{lane}",
                instruction=lambda view: "Say it.",
                read=read_solution,
                stream="r_sol",
                on_invalid=on_invalid,
            )
            for lane in range(width)
        )
        order = orders[index] if orders else "simultaneous"
        if order == "sequential":
            names += [segment.name for segment in segments]
        sights = (Sight(segments=tuple(names), whose="all", show=lambda turns, view: ""),) if names else ()
        rounds.append(Round(name=str(index), segments=segments, sights=sights, order=order))
        names = [*dict.fromkeys([*names, *(segment.name for segment in segments)])]
    return Protocol(
        name="wide", system_prompt="", rounds=tuple(rounds), on_failure=on_failure, min_agents=min_agents
    )


def says(text: str) -> Solution:
    return Solution(solution=text)


async def settle(steps: int = 50) -> None:
    for _ in range(steps):
        await asyncio.sleep(0)


async def test_a_lane_plays_only_the_rounds_that_have_it_and_the_barrier_is_over_all_lanes() -> None:
    coordinator = MultiAgentCoordinator("q", 2, protocol_of([1, 2, 1]))
    early = asyncio.ensure_future(coordinator.wait_for_turn(0, 1))
    for agent_id in (0, 1):
        assert await coordinator.wait_for_turn(agent_id) == 0
        await settle()
        assert not early.done()  # lane 1 begins in the second round
        await coordinator.submit_response(agent_id, says("a"))
    assert await early == 1
    assert [await coordinator.wait_for_turn(agent_id) for agent_id in (0, 1)] == [1, 1]
    assert await coordinator.wait_for_turn(1, 1) == 1
    for agent_id, lane in ((0, 0), (1, 0), (1, 1)):
        await coordinator.submit_response(agent_id, says("b"), lane=lane)
    assert await coordinator.wait_for_turn(1, 1) is None  # its last turn was its only one
    last = asyncio.ensure_future(coordinator.wait_for_turn(1))
    await settle()
    assert not last.done()  # agent 0 owes its second lane
    await coordinator.submit_response(0, says("c"), lane=1)
    assert await last == 2
    places = [(turn.round_index, turn.agent_id, turn.lane) for turn in coordinator.visible_turns(1)]
    assert places == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)]
    assert [turn.segment for turn in coordinator.visible_turns(0)][-1] == "1.1"


@pytest.mark.parametrize("replied", [0, 1])
async def test_a_failure_in_one_lane_ends_all_lanes_and_drops_the_round(replied: int) -> None:
    """Otherwise it would depend on speed whether the others see what the other lane said."""
    coordinator = MultiAgentCoordinator("q", 3, protocol_of([2, 1]))
    for lane in (0, 1):
        await coordinator.wait_for_turn(0, lane)
    if replied:
        await coordinator.submit_response(0, says("fast"), lane=1)
    await coordinator.fail(0, "lane 0 died")
    with pytest.raises(OutOfTurnError, match=r"it left in round 1 \(lane 0 died\)"):
        await coordinator.submit_response(0, says("late"), lane=1)
    assert await coordinator.wait_for_turn(0, 1) is None
    assert coordinator.conversation.turns == ()
    assert coordinator.conversation.failures == (Failure(agent_id=0, round_index=0, reason="lane 0 died"),)


async def test_an_agent_that_left_has_no_letter_from_the_next_round_on() -> None:
    coordinator = MultiAgentCoordinator("q", 3, protocol_of([1, 1]))
    await coordinator.wait_for_turn(0)
    await coordinator.fail(1, "gone")
    assert sorted(coordinator.view(0).aliases) == [0, 1, 2]  # it was there when the round began
    await coordinator.submit_response(0, says("a"))
    await coordinator.wait_for_turn(2)
    await coordinator.submit_response(2, says("a"))
    assert await coordinator.wait_for_turn(0) == 1
    assert sorted(coordinator.view(0).aliases) == [0, 2]


@pytest.mark.parametrize(("on_invalid", "failures"), [("keep", 0), ("fail", 1)])
async def test_a_reply_that_cannot_be_read_ends_the_agent_where_the_protocol_says_so(
    on_invalid: Literal["keep", "fail"], failures: int
) -> None:
    coordinator = MultiAgentCoordinator("q", 3, protocol_of([1], on_invalid=on_invalid))
    await coordinator.wait_for_turn(1)
    await coordinator.submit_response(1, says(""), text="?!", status=ReplyStatus.UNSTRUCTURED)
    assert coordinator.num_agents_left == 3 - failures
    assert [failure.reason for failure in coordinator.conversation.failures] == [
        "its reply to '0.0' cannot be read: '?!'"
    ][:failures]


async def test_an_unknown_lane_is_refused() -> None:
    coordinator = MultiAgentCoordinator("q", 2, protocol_of([1, 2]))
    with pytest.raises(ValueError, match="lane must be from 0 to 1; got 2"):
        await coordinator.wait_for_turn(0, 2)


def test_views_do_not_depend_on_who_asks_first_but_on_seed_and_question() -> None:
    def views(question: str, seed: int) -> list[tuple[int, ...]]:
        coordinator = MultiAgentCoordinator(question, 6, protocol_of([1]), seed=seed)
        return [coordinator.view(agent_id).aliases for agent_id in range(6)]

    assert views("q", 0) == views("q", 0)
    assert len({tuple(views(question, seed)) for question in "qr" for seed in range(3)}) == 6


class Script:
    """Latency and failure of every turn, drawn beforehand."""

    def __init__(self, data: st.DataObject, seats: list[tuple[int, int]], num_rounds: int) -> None:
        turns = [(agent_id, lane, r) for agent_id, lane in seats for r in range(num_rounds)]
        self.latency = {turn: data.draw(st.integers(0, 6)) for turn in turns}
        fails = data.draw(st.sets(st.sampled_from(turns), max_size=3))
        self.fate = {turn: data.draw(st.sampled_from(["fail", "invalid"])) for turn in sorted(fails)}


def play(coordinator: MultiAgentCoordinator, script: Script, slowness: int = 1) -> dict[Any, Any]:
    """Play to the end in virtual time; what every turn saw."""
    seats = coordinator.protocol.seats(coordinator.num_agents)
    seen: dict[Any, Any] = {}

    async def seat(agent_id: int, lane: int) -> None:
        while (round_index := await coordinator.wait_for_turn(agent_id, lane)) is not None:
            place = (agent_id, lane, round_index)
            assert place not in seen
            visible = [(t.round_index, t.agent_id, t.lane) for t in coordinator.visible_turns(agent_id, lane)]
            seen[place] = (visible, coordinator.view(agent_id, lane))
            for _ in range(slowness * script.latency[place]):
                await asyncio.sleep(0)
            fate = script.fate.get(place)
            if fate == "fail":
                await coordinator.fail(agent_id, "as told")
            elif not coordinator.is_out(agent_id, lane):
                status = ReplyStatus.UNSTRUCTURED if fate else ReplyStatus.OK
                await coordinator.submit_response(
                    agent_id, says(str(place)), lane=lane, text="said", status=status
                )

    async def run() -> None:
        tasks = [asyncio.ensure_future(seat(agent_id, lane)) for agent_id, lane in seats]
        await settle(steps=2000)
        try:
            assert all(task.done() for task in tasks)  # nobody waits for ever
            for task in tasks:
                assert task.exception() is None
        finally:
            for task in tasks:
                task.cancel()

    asyncio.run(run())
    return seen


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    widths=st.lists(st.integers(1, 3), min_size=1, max_size=3),
    num_agents=st.integers(2, 4),
    on_failure=st.sampled_from(["void", "continue"]),
)
def test_whatever_the_speeds_and_failures_everybody_ends(
    data: st.DataObject, widths: list[int], num_agents: int, on_failure: OnFailure
) -> None:
    orders = [data.draw(st.sampled_from(["sequential", "simultaneous"])) for _ in widths]
    protocol = protocol_of(widths, orders, on_failure=on_failure, on_invalid="fail")
    script = Script(data, protocol.seats(num_agents), len(widths))
    coordinator = MultiAgentCoordinator("q", num_agents, protocol)
    seen = play(coordinator, script)
    assert coordinator.episode_done
    turns = coordinator.conversation.turns
    places = [(turn.round_index, turn.agent_id, turn.lane) for turn in turns]
    assert places == sorted(set(places))
    assert all(turn.response == says(str((turn.agent_id, turn.lane, turn.round_index))) for turn in turns)
    for (agent_id, _, round_index), (visible, _) in seen.items():
        horizon = (round_index, agent_id if orders[round_index] == "sequential" else 0)
        assert all(place[:2] < horizon for place in visible)
    if on_failure == "void" and coordinator.num_agents_left < num_agents:
        return  # the others stop at once, how far they got is a matter of speed
    if coordinator.num_agents_left < coordinator.min_agents:
        return
    again = MultiAgentCoordinator("q", num_agents, protocol)
    seen_again = play(again, script, slowness=0)
    kept = {failure.agent_id: failure.round_index for failure in coordinator.conversation.failures}
    assert again.conversation.turns == turns
    assert {f.agent_id: f.round_index for f in again.conversation.failures} == kept
    for place, sight in seen.items():
        if place[2] < kept.get(place[0], len(widths)):
            assert seen_again[place] == sight

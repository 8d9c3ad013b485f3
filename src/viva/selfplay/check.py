"""``viva protocol check``: a protocol is found by name, played by scripted agents without a model, and described.

Every case is played in virtual time: an agent that is slow gives way a number of times, and a conversation in which
nothing moves any more is seen to hang.
"""

import asyncio
import inspect
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

from viva.conversation.coordinator import MultiAgentCoordinator
from viva.conversation.messages import counted
from viva.conversation.protocol import Protocol, Round, View
from viva.conversation.records import Conversation, ReplyStatus, Turn
from viva.judging.ballots import Outcome
from viva.judging.ranking import LabelAnswer, LabelBallot, label_ballot
from viva.selfplay.controls import scripted_reply
from viva.selfplay.critique import critique_protocol
from viva.selfplay.round_robin import round_robin_protocol
from viva.selfplay.user_code import is_target, load_target

_QUESTION = "What is 2 + 2?"
_MALFORMED = '{"solution": "4", ]] <solution> Critique of : > Ranking: A >> \x00'

Seen = tuple[str, int]
"""Segment and agent of a turn that was shown."""
_Act = Callable[[View, int], tuple[str | None, int]]
"""From place and lane to the reply (``None``: the policy call fails) and how often the agent gives way before it;
``""`` and other texts are replies, `_HONEST` stands for one that the segment's reader can read."""
_HONEST = "\0honest"


@dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """Outcome of one case."""

    case: str
    """The agents' behaviour in this case."""
    conversation: Conversation
    seen: dict[tuple[int, int], tuple[Seen, ...]]
    """Shown text, by (round, agent)."""
    is_void: bool
    """Whether the failure rule takes all rewards."""
    problems: tuple[str, ...]
    """Faults of the protocol: code that raises, agents that wait for ever."""

    def earners(self, protocol: Protocol) -> dict[str, dict[int, int]]:
        """Number of readable turns that earn, by stream and agent."""
        counts: dict[str, dict[int, int]] = {stream: {} for stream in protocol.streams}
        failed = {failure.agent_id for failure in self.conversation.failures}
        for turn in () if self.is_void else self.conversation.turns:
            stream = protocol.rounds[turn.round_index].segments[turn.lane].stream
            if stream is None or turn.agent_id in failed or turn.status is ReplyStatus.UNSTRUCTURED:
                continue
            counts[stream][turn.agent_id] = counts[stream].get(turn.agent_id, 0) + 1
        return counts


def dry_runs(protocol: Protocol, num_agents: int) -> list[DryRun]:
    """Play a protocol with scripted agents: all honest; one silent, malformed, slow, or failing in each round.

    The agent that misbehaves is the last one. A slow agent must change nothing.

    Raises:
        ValueError: If the protocol has mistakes, cannot be played with so many agents, or has a tool that cannot be
            loaded in a process of its own.
    """
    for tool in (tool for round_ in protocol.rounds for tool in round_.tools):
        tool.check()
    odd = num_agents - 1

    def only_odd(text: str | None, round_index: int | None = None) -> _Act:
        def act(view: View, lane: int) -> tuple[str | None, int]:
            acts = view.agent_id == odd and round_index in (None, view.round_index)
            return (text, 0) if acts else (_HONEST, 0)

        return act

    acts: dict[str, _Act] = {
        "all honest": lambda view, lane: (_HONEST, 0),
        f"agent {odd} silent": only_odd(""),
        f"agent {odd} malformed": only_odd(_MALFORMED),
        **{
            f"agent {odd} fails in round {index + 1}": only_odd(None, index)
            for index in range(len(protocol.rounds))
        },
        f"agent {odd} slow": lambda view, lane: (_HONEST, 9 * (view.agent_id == odd) + lane),
    }
    *runs, slow = [_run(protocol, num_agents, case, act) for case, act in acts.items()]
    if slow.conversation != runs[0].conversation and not slow.problems:
        slow = replace(slow, problems=("the conversation depends on who is fast",))
    return [*runs, slow]


def _run(protocol: Protocol, num_agents: int, case: str, act: _Act) -> DryRun:
    coordinator = MultiAgentCoordinator(_QUESTION, num_agents, protocol)
    seats = protocol.seats(num_agents)
    seen: dict[tuple[int, int], tuple[Seen, ...]] = {}

    async def play_all() -> list[str]:
        tasks = [
            asyncio.create_task(_play(coordinator, agent_id, lane, act, seen)) for agent_id, lane in seats
        ]
        for _ in range(
            100 + 40 * len(protocol.rounds) * len(seats)
        ):  # until nothing has happened for too long
            if all(task.done() for task in tasks):
                break
            await asyncio.sleep(0)
        waiting = [seat for seat, task in zip(seats, tasks, strict=True) if not task.done()]
        for task in tasks:
            task.cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        broken = [f"{type(error).__name__}: {error}" for error in results if isinstance(error, Exception)]
        hangs = [f"seats (agent, lane) {waiting} wait for ever"] if waiting else []
        return broken or hangs

    with ThreadPoolExecutor(1) as pool:  # the caller may have an event loop that runs, as in a notebook
        problems = pool.submit(asyncio.run, play_all()).result()
    return DryRun(
        case=case,
        conversation=coordinator.conversation,
        seen=seen,
        is_void=coordinator.num_agents_left < coordinator.min_agents,
        problems=tuple(dict.fromkeys(problems)),
    )


async def _play(
    coordinator: MultiAgentCoordinator,
    agent_id: int,
    lane: int,
    act: _Act,
    seen: dict[tuple[int, int], tuple[Seen, ...]],
) -> None:
    """Play one seat, and note what it is shown."""
    while (round_index := await coordinator.wait_for_turn(agent_id, lane)) is not None:
        view = coordinator.view(agent_id, lane)
        round_ = coordinator.protocol.rounds[round_index]
        turns = coordinator.visible_turns(agent_id, lane)
        seen[round_index, agent_id] = tuple(
            (turn.segment, turn.agent_id) for sight in round_.sights for turn in sight.select(turns, view)
        )
        segment = round_.segments[lane]
        text, latency = act(view, lane)
        for _ in range(latency):
            await asyncio.sleep(0)
        if text is None:
            await coordinator.fail(agent_id, "the policy call failed")
            continue
        if segment.votes_on is not None:  # not written, so it cannot be silent or malformed
            ballot, prompt = _scripted_ballot(coordinator.protocol, turns, view, lane)
            if not coordinator.is_out(agent_id, lane):
                await coordinator.submit_response(
                    agent_id, ballot, lane=lane, prompt=prompt, status=ballot.status
                )
            continue
        prompt = coordinator.protocol.prompt(_QUESTION, turns, view, lane)
        reading = segment.read(scripted_reply(segment, view) if text == _HONEST else text, view)
        if not coordinator.is_out(agent_id, lane):
            await coordinator.submit_response(
                agent_id, reading.response, lane=lane, prompt=prompt, text=text, status=reading.status
            )


BUILT_IN = ("critique", "round_robin")
"""Names of the protocols that come with Viva."""


def find_protocol(target: str, num_agents: int) -> Protocol:
    """A protocol by its built-in name, or from code.

    The target is ``critique``, ``round_robin``, ``module:ATTRIBUTE`` or ``path.py:ATTRIBUTE``: a `Protocol`, or a
    function that returns one and takes nothing, or ``num_agents``.

    Raises:
        ValueError: If there is no such protocol.
    """
    if target == "critique":
        return critique_protocol(num_agents)
    if target == "round_robin":
        return round_robin_protocol(2)
    if not is_target(target):
        raise ValueError(
            f"unknown protocol {target!r}; allowed: {', '.join(BUILT_IN)}, module:ATTRIBUTE or path.py:ATTRIBUTE"
        )
    found: Any = load_target(target)
    if not isinstance(found, Protocol) and callable(found):
        found = _made(target, found, num_agents)
    if not isinstance(found, Protocol):
        raise ValueError(
            f"{target!r} must be a viva.Protocol, or a function that returns one; got {type(found).__name__}"
        )
    return found


def _made(target: str, make: Callable[..., Any], num_agents: int) -> Any:
    takes = inspect.signature(make)
    given = takes.bind_partial()
    if "num_agents" in takes.parameters:
        given.arguments["num_agents"] = num_agents
    try:
        takes.bind(*given.args, **given.kwargs)
    except TypeError as error:
        raise ValueError(
            f"{target!r} must take nothing, or num_agents: {error}; give its other parameters a default"
        ) from error
    return make(*given.args, **given.kwargs)


def check_protocol(protocol: Protocol, num_agents: int) -> tuple[list[str], list[str]]:
    """Validate a protocol and play it with scripted agents.

    Returns:
        Lines of the report, and problems, none for a protocol that works.

    Raises:
        ValueError: If the protocol has mistakes, with all of them.
    """
    runs = dry_runs(protocol, num_agents)
    problems = [f"{run.case}: {problem}" for run in runs for problem in run.problems]
    lines = [*_overview(protocol, num_agents), *_rounds(protocol, runs[0])]
    lines += ["", "what becomes of it when"]
    for run in runs:
        lines += _case(protocol, run)
    return lines, problems


def _overview(protocol: Protocol, num_agents: int) -> Iterator[str]:
    yield f"protocol {protocol.name}: {counted(len(protocol.rounds), 'round')}, {counted(num_agents, 'agent')}"
    written = [each for round_ in protocol.rounds for each in round_.segments if each.votes_on is None]
    calls = num_agents * len(written)
    yield f"generations: {calls}; at most {counted(protocol.num_lanes, 'lane')} in parallel for each agent"
    goes_on = f"leaves it going with {protocol.agents_needed(num_agents)} or more"
    yield f"an agent's failure {'voids the conversation' if protocol.on_failure == 'void' else goes_on}"


def _rounds(protocol: Protocol, run: DryRun) -> Iterator[str]:
    for index, round_ in enumerate(protocol.rounds):
        yield ""
        yield f"round {index + 1}: {round_.name} ({round_.order})"
        yield from _asked(round_, run, index)
        yield from (f"  agents may call {tool.told}" for tool in round_.tools)
        for (round_index, agent_id), seen in sorted(run.seen.items()):
            if round_index == index:
                yield f"  agent {agent_id} sees {_seen(seen)}"


def _asked(round_: Round, run: DryRun, index: int) -> Iterator[str]:
    for lane, segment in enumerate(round_.segments):
        earns = "earns nothing" if segment.stream is None else f"earns {segment.stream}"
        invalid = "stays" if segment.on_invalid == "keep" else "leaves"
        asks = "asks for" if segment.votes_on is None else "has, by label probabilities, the votes of"
        turns = [turn for turn in run.conversation.turns if (turn.round_index, turn.lane) == (index, lane)]
        unread = sum(turn.status is ReplyStatus.UNSTRUCTURED for turn in turns)
        note = " (no scripted reply could be read)" if turns and unread == len(turns) else ""
        yield f"  {asks} {segment.name}: {earns}; who cannot be read {invalid}{note}"


def _seen(seen: tuple[Seen, ...]) -> str:
    agents: dict[str, list[int]] = {}
    for segment, agent_id in seen:
        agents.setdefault(segment, []).append(agent_id)
    listed = [f"{segment} of {', '.join(map(str, ids))}" for segment, ids in agents.items()]
    return "; ".join(["the problem", *listed])


def _case(protocol: Protocol, run: DryRun) -> Iterator[str]:
    yield f"  {run.case}:"
    for failure in run.conversation.failures:
        yield f"    agent {failure.agent_id} leaves in round {failure.round_index + 1}: {failure.reason}"
    if run.is_void:
        yield "    void: nobody earns anything"
        return
    for stream, counts in run.earners(protocol).items():
        earners = ", ".join(f"agent {agent_id} ({count})" for agent_id, count in sorted(counts.items()))
        yield f"    {stream}: {earners or 'nobody'}"


def _scripted_ballot(
    protocol: Protocol, turns: Sequence[Turn], view: View, lane: int
) -> tuple[LabelBallot, str]:
    """The ballot of an agent that prefers what is named first, and all it was asked."""
    texts = protocol.voted_on(turns, view, lane)
    answers: list[LabelAnswer] = []
    prompts: list[str] = []
    for (one, first), (other, second) in permutations(enumerate(texts), 2):
        score, outcome = (-1.0, Outcome.A) if one < other else (1.0, Outcome.B)
        prompts.append(protocol.pair_prompt(_QUESTION, texts[first], texts[second], view, lane))
        answers.append(LabelAnswer(first=first, second=second, outcome=outcome, score=score))
    return label_ballot(answers), "\n\n".join(prompts)

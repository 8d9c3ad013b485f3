"""``viva protocol check``: find a protocol by name, validate it, play it without a model, and say what happened."""

import inspect
from collections.abc import Iterator
from typing import Any

from viva.conversation.protocol import Protocol, Round
from viva.conversation.records import ReplyStatus
from viva.selfplay.check import DryRun, Seen, dry_runs
from viva.selfplay.critique import critique_protocol
from viva.selfplay.round_robin import round_robin_protocol
from viva.selfplay.user_code import is_target, load_target

__all__ = ["BUILT_IN", "check_protocol", "find_protocol"]

BUILT_IN = ("critique", "round_robin")
"""Names of the protocols that come with Viva."""


def find_protocol(target: str, num_agents: int) -> Protocol:
    """A protocol by its built-in name, or from code.

    Args:
        target: ``critique``, ``round_robin``, ``module:ATTRIBUTE`` or ``path.py:ATTRIBUTE``. The attribute is a
            `Protocol`, or a function that returns one and takes nothing, or ``num_agents``.
        num_agents: Passed on to such a function.

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
        takes = inspect.signature(found).parameters
        found = found(num_agents) if "num_agents" in takes else found()
    if not isinstance(found, Protocol):
        raise ValueError(
            f"{target!r} must be a viva.conversation.protocol.Protocol, or a function that returns "
            f"one; got {type(found).__name__}"
        )
    return found


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
    yield f"protocol {protocol.name}: {_count(len(protocol.rounds), 'round')}, {_count(num_agents, 'agent')}"
    calls = num_agents * sum(len(round_.segments) for round_ in protocol.rounds)
    yield f"generations: {calls}; at most {_count(protocol.num_lanes, 'lane')} in parallel for each agent"
    needed = protocol.agents_needed(num_agents)
    rule = (
        "voids the conversation"
        if protocol.on_failure == "void"
        else f"leaves it going with {needed} or more"
    )
    yield f"an agent's failure {rule}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _rounds(protocol: Protocol, run: DryRun) -> Iterator[str]:
    for index, round_ in enumerate(protocol.rounds):
        yield ""
        yield f"round {index + 1}: {round_.name} ({round_.order})"
        yield from _asked(round_, run, index)
        for (round_index, agent_id), seen in sorted(run.seen.items()):
            if round_index == index:
                yield f"  agent {agent_id} sees {_seen(seen)}"


def _asked(round_: Round, run: DryRun, index: int) -> Iterator[str]:
    for lane, segment in enumerate(round_.segments):
        earns = "earns nothing" if segment.stream is None else f"earns {segment.stream}"
        invalid = "stays" if segment.on_invalid == "keep" else "leaves"
        turns = [turn for turn in run.conversation.turns if (turn.round_index, turn.lane) == (index, lane)]
        unread = sum(turn.status is ReplyStatus.UNSTRUCTURED for turn in turns)
        note = " (no scripted reply could be read)" if turns and unread == len(turns) else ""
        yield f"  asks for {segment.name}: {earns}; who cannot be read {invalid}{note}"


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

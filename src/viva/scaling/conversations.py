"""The calls of a conversation: any protocol of the package, and the judge behind it."""

import random
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from viva.conversation.prompts import persona
from viva.conversation.protocol import Protocol, View, draw_aliases
from viva.conversation.records import Solution, Turn
from viva.scaling.calls import Call, Counter, Markers, Template, TrainedReply, message_blocks

__all__ = ["Lengths", "conversation_calls", "judge_calls", "solution_key"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Tokens of what is not the package's own text."""

    prompt: float = 150.0
    """The problem."""
    solution: float = 400.0
    """A solution, wherever one is written."""
    remark: float = 60.0
    """Reflection, evaluation, and the critique of one solution."""
    ranking: float = 150.0
    """What is written to rank solutions, with the line that counts."""
    verdict: float = 64.0
    """A verdict that the judge writes."""
    stop: float = 1.0
    """The end of a turn."""


def solution_key(agent_id: int, round_index: int) -> Hashable:
    """What the words of a solution go by in blocks."""
    return ("solution", round_index, agent_id)


def conversation_calls(
    protocol: Protocol,
    num_agents: int,
    *,
    lengths: Lengths,
    count: Counter,
    template: Template,
    markers: Markers,
) -> list[Call]:
    """Every reply of every agent, in order of (round, agent, lane). Segments that earn something are trained.

    Args:
        protocol: `viva.selfplay.round_robin` or `viva.selfplay.critique`, or one whose segments read what
            theirs do.
        num_agents: Agents.
        lengths: Of problem and replies.
        count: Tokens of the package's texts.
        template: Of the chat format.
        markers: Of this group.

    Raises:
        ValueError: If a segment is not one of those protocols'.
    """
    question = markers.new("problem", lengths.prompt)
    turns: list[Turn] = []
    calls: list[Call] = []
    wave = -1
    for round_index, round_ in enumerate(protocol.rounds):
        before = list(turns)
        wave += 1
        for agent_id in range(num_agents):
            if round_.order == "sequential":
                wave += agent_id > 0
                before = list(turns)
            view = _view(protocol, num_agents, agent_id, round_index)
            for lane, segment in enumerate(round_.segments):
                text = _reply_text(segment.name, view, lengths, markers)
                prompt = message_blocks(
                    [
                        ("system", protocol.system_prompt),
                        ("user", protocol.prompt(question, before, view, lane)),
                    ],
                    markers,
                    count,
                    template,
                )
                tokens = markers.tokens(text, count) + lengths.stop
                trained = None if segment.stream is None else TrainedReply(context=prompt, tokens=tokens)
                reading = segment.read(text, view)
                solver = agent_id if isinstance(reading.response, Solution) else None
                calls.append(Call(prompt=prompt, reply=tokens, wave=wave, trained=trained, solver=solver))
                turns.append(
                    Turn(
                        agent_id=agent_id,
                        round_index=round_index,
                        prompt="",
                        text="",
                        response=reading.response,
                        status=reading.status,
                        segment=segment.name,
                        lane=lane,
                    )
                )
    return calls


def _view(protocol: Protocol, num_agents: int, agent_id: int, round_index: int) -> View:
    return View(
        agent_id=agent_id,
        num_agents=num_agents,
        round_index=round_index,
        aliases=draw_aliases(range(num_agents), agent_id, round_index, "cost"),
        persona=persona(agent_id, protocol.personas),
        seed=random.Random(f"view/{round_index}/cost").getrandbits(32),
    )


def _reply_text(segment: str, view: View, lengths: Lengths, markers: Markers) -> str:
    """A reply as the segment asks for it, with a marker for everything the agent makes up."""

    def new(what: str, tokens: float, *more: int) -> str:
        return markers.new((what, view.round_index, view.agent_id, *more), tokens)

    if segment == "turn":
        remarks = [new(what, lengths.remark) for what in ("reflection", "evaluation")]
        return (
            f'{{"reflection": "{remarks[0]}", "evaluation": "{remarks[1]}", '
            f'"solution": "{new("solution", lengths.solution)}"}}'
        )
    if segment == "proposal":
        return new("solution", lengths.solution)
    if segment == "revision":
        return f"Revise: {new('solution', lengths.solution)}"
    if segment == "critique":
        others = [(letter, target) for letter, target in view.letters.items() if target != view.agent_id]
        return "\n".join(
            f"Critique of {letter}: {new('critique', lengths.remark, target)}" for letter, target in others
        )
    if segment in ("ranking", "verdict", "comparison"):
        return new(segment, lengths.ranking)
    raise ValueError(f"nothing is known about replies to the segment {segment!r}")


def judge_calls(
    matches: Sequence[tuple[Hashable, Hashable]],
    *,
    messages: Callable[[str, str, str], Sequence[tuple[str, str]]],
    prefill: str | None,
    lengths: Lengths,
    count: Counter,
    template: Template,
    wave: int,
) -> list[Call]:
    """A judge's comparisons.

    Args:
        matches: What is shown first and second, by key (`solution_key`).
        messages: Role and text of a prompt, from problem and both solutions.
        prefill: What the reply is made to begin with if one label is read from its next token; ``None``: a verdict is
            written.
        lengths: See `conversation_calls`.
        count: See there.
        template: See there.
        wave: When they are made.
    """
    markers = Markers()
    question = markers.new("problem", lengths.prompt)
    shown = {
        key: markers.new(key, lengths.solution)
        for key in dict.fromkeys(key for match in matches for key in match)
    }
    calls: list[Call] = []
    for first, second in matches:
        asked = messages(question, shown[first], shown[second])
        prompt = message_blocks(asked, markers, count, template, prefill=prefill or "")
        reply = 1.0 if prefill is not None else lengths.verdict
        calls.append(Call(prompt=prompt, reply=reply, role="judge", wave=wave))
    return calls

"""A conversation declared as data: rounds, who sees what, what is asked for, and which reward it earns.

A `Protocol` is all that the coordinator and the environments know about a system of self-play. Every prompt is
laid out from most shared to least shared, so that agents and parallel segments share token prefixes: system
prompt | problem | heading | sights of the round | instruction (persona and request).

Letters: in each round every agent goes by a letter of its own, drawn anew, so that nobody is known by its place.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from string import ascii_uppercase
from typing import TYPE_CHECKING, Literal

from viva.conversation.prompts import quote
from viva.conversation.protocol_check import protocol_mistakes
from viva.conversation.records import CritiqueReply, Reply, ReplyStatus, Turn

if TYPE_CHECKING:
    from tinker_cookbook.renderers.base import Message

__all__ = ["Order", "Protocol", "Reading", "Round", "Segment", "Sight", "View", "draw_aliases"]

Order = Literal["sequential", "simultaneous"]
"""``sequential``: agents 0, 1, 2, ... reply one after another and see everything said before.
``simultaneous``: all reply to the rounds before; nobody sees a reply of the same round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """One agent's place in one round: all that an instruction and a reader may depend on."""

    agent_id: int
    num_agents: int
    """Agents that the conversation began with."""
    round_index: int
    aliases: tuple[int, ...]
    """Ids of the agents that take part in the round, by position; position k goes by the k-th letter."""
    persona: str
    seed: int = 0
    """For whatever else the round shuffles; the same for all agents of the round."""

    @property
    def letters(self) -> dict[str, int]:
        """Agent ids by letter, in order of the letters.

        Raises:
            ValueError: If there are more agents than letters.
        """
        if len(self.aliases) > len(ascii_uppercase):
            raise ValueError(
                f"a round whose agents go by letters can have at most {len(ascii_uppercase)} of them; got "
                f"{len(self.aliases)}. Use fewer agents."
            )
        return dict(zip(ascii_uppercase, self.aliases, strict=False))

    @property
    def own(self) -> str | None:
        """The agent's own letter, if it takes part."""
        return next((letter for letter, agent_id in self.letters.items() if agent_id == self.agent_id), None)


def draw_aliases(agent_ids: Sequence[int], agent_id: int, round_index: int, key: str) -> tuple[int, ...]:
    """The order in which an agent meets all agents of a round.

    One permutation for each conversation and round, which agents with an even id see forwards and those with an odd
    id backwards: a preference for early letters cancels out and can be measured, and within each half the prompts
    share their prefix.

    Args:
        agent_ids: Agents of the round.
        agent_id: Who looks at them.
        round_index: Counted from 0.
        key: What tells the conversation from others: its seed and question.
    """
    shuffled = sorted(agent_ids)
    random.Random(f"aliases/{round_index}/{key}").shuffle(shuffled)
    return tuple(reversed(shuffled) if agent_id % 2 else shuffled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A reply that was read."""

    response: Reply
    status: ReplyStatus
    strategy: str = ""
    """Which way it was read, for logs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sight:
    """Something of what was said before that a round's agents see."""

    segments: tuple[str, ...]
    """Names of the segments whose turns are seen: those of earlier rounds, and in a sequential round also those
    that agents of lower id took in it."""
    whose: Literal["all", "own", "addressed"]
    """Turns of all agents, of the agent that looks, or critiques of the agent that looks."""
    show: Callable[[Sequence[Turn], View], str]
    """Text of the turns, which come in order of (round, agent, lane); called also if there are none. Everything
    that a model wrote must go through `viva.conversation.prompts.quote`."""

    def select(self, turns: Sequence[Turn], view: View) -> list[Turn]:
        """Those of the visible turns that this is about."""
        turns = [turn for turn in turns if turn.segment in self.segments]
        if self.whose == "own":
            return [turn for turn in turns if turn.agent_id == view.agent_id]
        if self.whose == "addressed":
            return [turn for turn in turns if _addresses(turn.response, view.agent_id)]
        return turns


def _addresses(response: Reply, agent_id: int) -> bool:
    return isinstance(response, CritiqueReply) and any(
        critique.target == agent_id for critique in response.critiques
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One thing that is asked of every agent in a round: one prompt, one generation."""

    name: str
    instruction: Callable[[View], str]
    """The prompt's last part: persona and request."""
    read: Callable[[str, View], Reading]
    """Reads the reply; must not raise for what a model wrote, and must take time linear in it."""
    stream: str | None
    """The reward stream that its tokens earn, one of the protocol's; ``None``: they earn nothing."""
    on_invalid: Literal["keep", "fail"] = "keep"
    """What becomes of an agent whose reply is ``unstructured``: it stays and earns what could be read, or it leaves
    the conversation with a recorded reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """One round: what its agents see, and what is asked of them."""

    name: str
    segments: tuple[Segment, ...]
    """Parallel generations on the same sights; the place in the tuple is the lane."""
    sights: tuple[Sight, ...] = ()
    """In order of their place in the prompt: most shared first."""
    order: Order = "simultaneous"


@dataclass(frozen=True, slots=True, kw_only=True)
class Protocol:
    """A whole conversation, declared."""

    name: str
    system_prompt: str
    rounds: tuple[Round, ...]
    personas: dict[int, str] | None = None
    """Persona texts by agent id, see `viva.conversation.prompts.persona`."""
    on_failure: Literal["void", "continue"] = "void"
    """``void``: one agent's failure ends the conversation. ``continue``: the others go on."""
    min_agents: int = 2
    """With fewer agents left than this, a conversation that would continue is over for all."""
    streams: tuple[str, ...] = ("r_sol", "r_meta", "r_diag")
    """Reward streams that segments may earn."""
    heading: str = ""
    """Text between the problem and what is seen."""

    @property
    def num_lanes(self) -> int:
        """Most segments of a round."""
        return max(len(round_.segments) for round_ in self.rounds)

    def seats(self, num_agents: int) -> list[tuple[int, int]]:
        """Agent and lane by seat: seat number is ``agent_id * num_lanes + lane``."""
        return [(agent_id, lane) for agent_id in range(num_agents) for lane in range(self.num_lanes)]

    def agents_needed(self, num_agents: int) -> int:
        """With fewer agents left than this, the conversation is over, by the failure rule."""
        return num_agents if self.on_failure == "void" else self.min_agents

    def prompt(self, question: str, turns: Sequence[Turn], view: View, lane: int = 0) -> str:
        """The user message of one turn.

        Args:
            question: The problem.
            turns: What the agent may see, in order of (round, agent, lane).
            view: Whose turn it is.
            lane: Which segment of the round.
        """
        round_ = self.rounds[view.round_index]
        seen = "".join(sight.show(sight.select(turns, view), view) for sight in round_.sights)
        return f"Problem:\n{quote(question)}\n{self.heading}{seen}{round_.segments[lane].instruction(view)}"

    def messages(self, prompt: str) -> list[Message]:
        """The messages of one turn, for a renderer; ``prompt`` is the user message."""
        return [{"role": "system", "content": self.system_prompt}, {"role": "user", "content": prompt}]

    def check(self) -> None:
        """Look for mistakes in the declaration.

        Raises:
            ValueError: With every mistake there is, one per line, each saying what to do.
        """
        if mistakes := protocol_mistakes(self):
            listed = "\n".join(f"- {mistake}" for mistake in mistakes)
            raise ValueError(f"protocol {self.name!r} cannot be played:\n{listed}")

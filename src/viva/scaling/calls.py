"""The calls of one group: every reply that is sampled, what it is prompted with, and what of it is trained behind what.

Prompts are those of the package, built by its own functions: where an agent's words would stand, there is one character
that stands for them (a marker), and the text between is counted as it is. So the counts follow the prompts when these
change, and are exact for a tokenizer that encodes characters one by one.
"""

import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from viva.scaling.tree import Block

__all__ = ["Call", "Counter", "Markers", "Template", "TrainedReply", "message_blocks"]

Counter: TypeAlias = Callable[[str], float]
"""Tokens of a text of the package's own."""

_WORDS = re.compile(r"\S+\s*|\s+")
_FIRST_MARKER = 0xF0000  # a plane of private characters: no prompt has them


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """Tokens that the chat format adds."""

    system: float = 5.0
    """To a system message."""
    user: float = 5.0
    assistant: float = 5.0
    """To a reply that is over."""
    reply: float = 3.0
    """Before the reply that is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedReply:
    """What the update sees of a call."""

    context: tuple[Block, ...]
    tokens: float
    """Of the reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request for a reply."""

    prompt: tuple[Block, ...]
    reply: float
    """Tokens to be sampled, the end of the turn included."""
    role: Literal["agent", "judge"] = "agent"
    wave: int = 0
    """Calls of one wave are in flight together; a wave begins when the one before is over."""
    trained: TrainedReply | None = None
    """``None``: nothing of it is trained."""
    scored: tuple[TrainedReply, ...] = ()
    """Passes without gradients before the update."""
    solver: int | None = None
    """The agent that gives a solution in this reply; ``None`` if none is given."""


class Markers:
    """Characters that stand for words of agents."""

    def __init__(self) -> None:
        self._blocks: dict[str, Block] = {}

    def new(self, key: Hashable, tokens: float) -> str:
        """A character for words of so many tokens; equal keys are equal words."""
        marker = chr(_FIRST_MARKER + len(self._blocks))
        self._blocks[marker] = Block(key=key, tokens=tokens)
        return marker

    def blocks(self, text: str, count: Counter) -> list[Block]:
        """A text as blocks: a block for each marker, and for each word between them with the space behind it."""
        found: list[Block] = []
        literal: list[str] = []

        def flush() -> None:
            for word in _WORDS.findall("".join(literal)):
                found.append(Block(key=word, tokens=count(word)))
            literal.clear()

        for character in text:
            if character in self._blocks:
                flush()
                found.append(self._blocks[character])
            else:
                literal.append(character)
        flush()
        return found

    def tokens(self, text: str, count: Counter) -> float:
        """Tokens of a text."""
        return sum(block.tokens for block in self.blocks(text, count))


def message_blocks(
    messages: Iterable[tuple[str, str]],
    markers: Markers,
    count: Counter,
    template: Template,
    *,
    prefill: str = "",
) -> tuple[Block, ...]:
    """A prompt in the chat format: role and text of every message, then the beginning of the reply."""
    frames = {"system": template.system, "user": template.user, "assistant": template.assistant}
    found: list[Block] = []
    for role, text in messages:
        found += [Block(key=("frame", role), tokens=frames[role]), *markers.blocks(text, count)]
    found.append(Block(key=("frame", "reply"), tokens=template.reply))
    return (*found, *markers.blocks(prefill, count))

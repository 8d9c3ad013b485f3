"""The calls of a group, and the tokens and attention pairs of a step that they make.

Prompts are those of the package, built by its own functions: where an agent's words would stand, there is one character
that stands for them (a marker), and the text between is counted as it is. So the counts follow the prompts when these
change, and are exact for a tokenizer that encodes characters one by one.

A sequence is a path of blocks; two sequences share what they have in common from their beginning, block by block. The
shared computation is the tree (trie) of all paths. Pure counting: the engine's own trees go by single tokens, so they
can only share more.
"""

import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A piece of a sequence; equal blocks behind equal beginnings are equal tokens."""

    key: Hashable
    tokens: float


Blocks: TypeAlias = Sequence[Block]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """The work of a forward pass over sequences."""

    tokens: float = 0.0
    pairs: float = 0.0
    """Pairs of a query and a key that it attends to, itself included."""

    def __add__(self, other: "Cost") -> "Cost":
        """The cost of both."""
        return Cost(tokens=self.tokens + other.tokens, pairs=self.pairs + other.pairs)

    def times(self, count: float) -> "Cost":
        """The cost of so many of it."""
        return Cost(tokens=self.tokens * count, pairs=self.pairs * count)


def _block_cost(start: float, tokens: float) -> Cost:
    """The cost of a block that begins behind `start` tokens."""
    return Cost(tokens=tokens, pairs=tokens * start + tokens * (tokens + 1) / 2)


def rows_cost(paths: Iterable[Blocks]) -> Cost:
    """Every sequence by itself."""
    return sum((_block_cost(0.0, sum(block.tokens for block in path)) for path in paths), Cost())


_Tree: TypeAlias = "dict[tuple[Hashable, float], _Tree]"
"""By key and tokens of a block, what follows it."""


def tree_cost(paths: Iterable[Blocks]) -> Cost:
    """Every common beginning once."""
    root: _Tree = {}
    cost = Cost()
    for path in paths:
        node, start = root, 0.0
        for block in path:
            branch = (block.key, block.tokens)
            if branch not in node:
                node[branch] = {}
                cost += _block_cost(start, block.tokens)
            node, start = node[branch], start + block.tokens
    return cost


Counter: TypeAlias = Callable[[str], float]
"""Tokens of a text of the package's own."""

_FIRST_MARKER = 0xF0000  # planes of private characters: no prompt has them
_PIECE = re.compile("[\U000f0000-\U0010ffff]|[^\\s\U000f0000-\U0010ffff]+\\s*|\\s+")
"""A marker, or a word with the space behind it."""


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
    """The part of a call that is trained."""

    context: tuple[Block, ...]
    tokens: float
    """Length of the reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request for a reply."""

    prompt: tuple[Block, ...]
    reply: float
    """Tokens to be sampled, the end of the turn included."""
    role: Literal["agent", "judge", "outside"] = "agent"
    """``outside`` is a judge whose tokens are read and sampled elsewhere."""
    wave: int = 0
    """Calls of one wave are in flight together; a wave begins when the one before is over."""
    trained: TrainedReply | None = None
    """``None``: nothing of it is trained."""
    scored: tuple[TrainedReply, ...] = ()
    """Passes without gradients before the update."""
    solver: int | None = None
    """The agent that gives a solution in this reply; ``None`` if none is given."""


class Prompts:
    """Prompts in a chat format as blocks: one for a word, and one for a marker, a character that stands for words.

    Args:
        count: Tokens of a word of the package's own.
        template: Tokens that the chat format adds.
    """

    def __init__(self, count: Counter, template: Template) -> None:
        self._count = count
        self._frames = {"system": template.system, "user": template.user, "assistant": template.assistant}
        self._reply = template.reply
        self._markers: dict[str, Block] = {}

    def marker(self, key: Hashable, tokens: float) -> str:
        """A character for words of so many tokens; equal keys are equal words."""
        marker = chr(_FIRST_MARKER + len(self._markers))
        self._markers[marker] = Block(key=key, tokens=tokens)
        return marker

    def blocks(self, messages: Iterable[tuple[str, str]], *, prefill: str = "") -> tuple[Block, ...]:
        """A prompt: role and text of every message, then the beginning of the reply."""
        found: list[Block] = []
        for role, text in messages:
            found += [Block(key=("frame", role), tokens=self._frames[role]), *self._text(text)]
        return (*found, Block(key=("frame", "reply"), tokens=self._reply), *self._text(prefill))

    def tokens(self, text: str) -> float:
        """Tokens of a text."""
        return sum(block.tokens for block in self._text(text))

    def _text(self, text: str) -> list[Block]:
        pieces: list[str] = _PIECE.findall(text)
        return [self._markers.get(each) or Block(key=each, tokens=self._count(each)) for each in pieces]


@dataclass(frozen=True, slots=True, kw_only=True)
class Passes:
    """The passes over one kind of sequences, with and without prefix reuse."""

    rows: Cost
    tree: Cost
    targets: float = 0.0
    """Positions at which the output layer is needed, with gradients or for logprobs; the same either way."""

    def __add__(self, other: "Passes") -> "Passes":
        """The passes of both."""
        return Passes(
            rows=self.rows + other.rows, tree=self.tree + other.tree, targets=self.targets + other.targets
        )

    def cost(self, *, reuse: bool) -> Cost:
        """Work with or without prefix reuse."""
        return self.tree if reuse else self.rows

    @property
    def saved(self) -> float:
        """Share of the tokens that reuse saves."""
        return 1.0 - self.tree.tokens / self.rows.tokens if self.rows.tokens else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """Tokens of one training step; evaluations and what is played again are not in them."""

    num_groups: int
    num_calls: int
    """Calls of agents."""
    num_judge_calls: int
    sampled: float
    """By agents."""
    judged: float
    """Sampled by the judge."""
    decoded: Cost
    """Tokens sampled by agents and judge, and what they attend to."""
    prompts: Passes
    """Prompts of agents."""
    judge_prompts: Passes
    num_outside_calls: int
    outside: tuple[float, float]
    """Read and sampled elsewhere."""
    scored: Passes
    """The pass of an estimator before the update."""
    trained: Passes
    num_datums: int

    @property
    def total(self) -> float:
        """Tokens that agents, judge and scorer read and sample, every prompt in full."""
        read = self.prompts.rows.tokens + self.judge_prompts.rows.tokens
        return read + self.sampled + self.judged + sum(self.outside)


def count_step(calls: Sequence[Call], num_groups: int, *, checked: Sequence[TrainedReply] = ()) -> Counts:
    """Count a step whose groups all make these calls.

    Reuse is counted within a group and within one pass: groups share no more than the system message.

    Args:
        calls: Of one group.
        num_groups: Groups of a step.
        checked: Scored once in the step besides, to check the sampler.
    """
    agents = [call for call in calls if call.role == "agent"]
    judges = [call for call in calls if call.role == "judge"]
    outside = [call for call in calls if call.role == "outside"]
    trained = [call.trained for call in calls if call.trained is not None]
    scored = [passed for call in calls for passed in call.scored]
    decoded = [
        _block_cost(sum(block.tokens for block in call.prompt), call.reply) for call in (*agents, *judges)
    ]
    return Counts(
        num_groups=num_groups,
        num_calls=len(agents) * num_groups,
        num_judge_calls=len(judges) * num_groups,
        sampled=sum(call.reply for call in agents) * num_groups,
        judged=sum(call.reply for call in judges) * num_groups,
        decoded=sum(decoded, Cost()).times(num_groups),
        prompts=_passes([call.prompt for call in agents], num_groups),
        judge_prompts=_passes([call.prompt for call in judges], num_groups),
        num_outside_calls=len(outside) * num_groups,
        outside=(
            sum(block.tokens for call in outside for block in call.prompt) * num_groups,
            sum(call.reply for call in outside) * num_groups,
        ),
        scored=_reply_passes(scored, num_groups) + _reply_passes(checked, 1),
        trained=_reply_passes(trained, num_groups),
        num_datums=len(trained) * num_groups,
    )


def _passes(paths: Sequence[Blocks], num_groups: int, targets: float = 0.0) -> Passes:
    return Passes(
        rows=rows_cost(paths).times(num_groups),
        tree=tree_cost(paths).times(num_groups),
        targets=targets * num_groups,
    )


def _reply_passes(replies: Sequence[TrainedReply], num_groups: int) -> Passes:
    """A reply's last token is predicted and not read, so a datum has one token less than context and reply."""
    paths = [
        (*reply.context, Block(key=("reply", index), tokens=reply.tokens - 1))
        for index, reply in enumerate(replies)
    ]
    return _passes(paths, num_groups, sum(reply.tokens for reply in replies))

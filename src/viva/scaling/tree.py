"""Sequences that begin alike, computed once: how many tokens and attention pairs that leaves.

A sequence is a path of blocks; two sequences share what they have in common from their beginning, block by block. The
shared computation is the tree (trie) of all paths. Pure counting: the engine's own trees go by single tokens, so
they can only share more.
"""

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

__all__ = ["Block", "Cost", "Path", "rows_cost", "tree_cost"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A piece of a sequence; equal keys behind equal beginnings are equal tokens."""

    key: Hashable
    tokens: float


Path: TypeAlias = Sequence[Block]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What a forward pass over sequences computes."""

    tokens: float = 0.0
    pairs: float = 0.0
    """Of a query and a key that it attends to, itself included."""

    def __add__(self, other: "Cost") -> "Cost":
        """Of both."""
        return Cost(tokens=self.tokens + other.tokens, pairs=self.pairs + other.pairs)

    def times(self, count: float) -> "Cost":
        """Of so many of it."""
        return Cost(tokens=self.tokens * count, pairs=self.pairs * count)


def _block_cost(start: float, tokens: float) -> Cost:
    """Of a block that begins behind `start` tokens."""
    return Cost(tokens=tokens, pairs=tokens * start + tokens * (tokens + 1) / 2)


def rows_cost(paths: Iterable[Path]) -> Cost:
    """Every sequence by itself."""
    cost = Cost()
    for path in paths:
        cost += _block_cost(0.0, sum(block.tokens for block in path))
    return cost


@dataclass(slots=True)
class _Node:
    tokens: float
    children: "dict[Hashable, _Node]" = field(default_factory=dict[Hashable, "_Node"])


def tree_cost(paths: Iterable[Path]) -> Cost:
    """Every common beginning once.

    Raises:
        ValueError: If one key stands for two lengths behind the same beginning.
    """
    root, cost = _Node(tokens=0.0), Cost()
    for path in paths:
        node, start = root, 0.0
        for block in path:
            child = node.children.get(block.key)
            if child is None:
                child = node.children[block.key] = _Node(tokens=block.tokens)
                cost += _block_cost(start, block.tokens)
            elif child.tokens != block.tokens:
                raise ValueError(
                    f"block {block.key!r} has {child.tokens} and {block.tokens} tokens behind the same beginning; "
                    "equal keys must be equal tokens"
                )
            node, start = child, start + block.tokens
    return cost

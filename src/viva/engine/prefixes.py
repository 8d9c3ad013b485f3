"""Keys and values of earlier sequences, found again by the tokens a new prompt begins with.

Turns of a conversation, the judges who read it and the samples of a group begin with the same tokens. A prompt is
looked up by blocks of tokens under a chained digest, and only what follows the longest known beginning is computed.
What is stored is a tree: a sequence that begins like another one stores only what it adds.
A cache belongs to one snapshot of the weights, so it cannot serve keys of other weights.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["BLOCK", "Prefix", "PrefixCache", "block_digests"]

BLOCK = 16
"""Tokens per block; beginnings are shared in multiples of it."""


@dataclass(kw_only=True, eq=False)
class Prefix:
    """A node of the tree: blocks that follow those of another node."""

    parent: "Prefix | None"
    start: int
    """Blocks before this node's first. All of them are the parent's or its ancestors'; it may have more than these."""
    digests: list[bytes]
    """One per block of this node, each covering everything up to its end."""
    states: list[torch.Tensor]
    """Keys and values, ``[2, K, length, D]`` per layer."""
    num_children: int = 0

    @property
    def num_bytes(self) -> int:
        """Memory of the states."""
        return sum(state.nbytes for state in self.states)

    def beginning(self, blocks: int) -> list[torch.Tensor]:
        """Keys and values of the first ``blocks`` of the sequence, which end in this node."""
        parts: list[list[torch.Tensor]] = []
        node: Prefix | None = self
        while node is not None:
            parts.append([state[:, :, : (blocks - node.start) * BLOCK] for state in node.states])
            node, blocks = node.parent, node.start
        if len(parts) == 1:
            return parts[0]
        return [torch.cat(layer, dim=2) for layer in zip(*reversed(parts), strict=True)]


class PrefixCache:
    """Finds stored beginnings; forgets the least recently used ones beyond ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._by_digest: dict[bytes, Prefix] = {}
        self._nodes: OrderedDict[int, Prefix] = OrderedDict()

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self._num_bytes

    def find(self, digests: Sequence[bytes]) -> tuple[int, Prefix | None]:
        """The longest known beginning: its number of blocks, and the node in which it ends."""
        for blocks in range(len(digests), 0, -1):
            node = self._by_digest.get(digests[blocks - 1])
            if node is not None:
                self._use(node)
                return blocks, node
        return 0, None

    def add(self, digests: Sequence[bytes], read: Callable[[int, int], list[torch.Tensor]]) -> Prefix | None:
        """Store what is not known yet of a sequence; this may push out what was used least recently.

        Args:
            digests: Of the sequence's blocks.
            read: Gives the states of its tokens from a first to before a last one.

        Returns:
            The node in which the sequence ends (even if it is too large to be found again); ``None`` for an empty one.
        """
        start, parent = self.find(digests)
        if start == len(digests):
            return parent
        states = read(start * BLOCK, len(digests) * BLOCK)
        node = Prefix(parent=parent, start=start, digests=list(digests[start:]), states=states)
        self._nodes[id(node)] = node
        self._num_bytes += node.num_bytes
        self._by_digest.update(dict.fromkeys(node.digests, node))
        if parent is not None:
            parent.num_children += 1
        while self._num_bytes > self._max_bytes:
            self._remove(next(each for each in self._nodes.values() if not each.num_children))
        return node

    def _use(self, node: Prefix | None) -> None:
        """A node's ancestors are used after it, so that the end of a sequence goes before its beginning."""
        while node is not None:
            self._nodes.move_to_end(id(node))
            node = node.parent

    def _remove(self, node: Prefix) -> None:
        del self._nodes[id(node)]
        self._num_bytes -= node.num_bytes
        for digest in node.digests:
            del self._by_digest[digest]
        if node.parent is not None:
            node.parent.num_children -= 1


def block_digests(tokens: np.ndarray) -> list[bytes]:
    """A digest for every full block of tokens, each covering all tokens up to the block's end."""
    data = np.ascontiguousarray(tokens, dtype=np.int32)
    digests: list[bytes] = []
    previous = b""
    for end in range(BLOCK, len(data) + 1, BLOCK):
        previous = hashlib.blake2b(previous + data[end - BLOCK : end].tobytes(), digest_size=16).digest()
        digests.append(previous)
    return digests

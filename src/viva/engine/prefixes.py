"""Keys and values of earlier sequences, found again by the tokens a new prompt begins with.

Turns of a conversation, the judges who read it and the samples of a group begin with the same tokens. A prompt is
looked up by blocks of tokens under a chained digest, and only what follows the longest known beginning is computed.
A cache belongs to one snapshot of the weights, so it cannot serve keys of other weights.
"""

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
import torch

__all__ = ["BLOCK", "Prefix", "PrefixCache", "block_digests"]

BLOCK = 16
"""Tokens per block; beginnings are shared in multiples of it."""


@dataclass(kw_only=True, eq=False)
class Prefix:
    """A stored beginning: in a live row of the key-value store, or saved after its row left."""

    digests: list[bytes] = field(default_factory=list[bytes])
    """One per full block, each covering everything up to its end."""
    row: int | None = None
    """Live row that holds it; kept up to date by the decoder."""
    states: list[torch.Tensor] | None = None
    """Saved keys and values, ``[2, K, length, D]`` per layer."""

    @property
    def num_bytes(self) -> int:
        """Memory of the saved states."""
        return sum(state.nbytes for state in self.states or [])


class PrefixCache:
    """Finds stored beginnings; forgets the least recently used saved ones beyond ``max_bytes``."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._by_digest: dict[bytes, Prefix] = {}
        self._saved: OrderedDict[int, Prefix] = OrderedDict()

    def find(self, digests: list[bytes]) -> tuple[int, Prefix | None]:
        """The longest known beginning: its number of blocks, and where it is stored."""
        for blocks in range(len(digests), 0, -1):
            prefix = self._by_digest.get(digests[blocks - 1])
            if prefix is not None:
                if id(prefix) in self._saved:
                    self._saved.move_to_end(id(prefix))
                return blocks, prefix
        return 0, None

    def add(self, prefix: Prefix) -> None:
        """Remember a live row, or saved states (which may push out older ones)."""
        if prefix.states is not None:
            if prefix.num_bytes > self._max_bytes:
                return
            self._saved[id(prefix)] = prefix
            self._num_bytes += prefix.num_bytes
        for digest in prefix.digests:
            self._by_digest[digest] = prefix
        while self._num_bytes > self._max_bytes:
            self.remove(next(iter(self._saved.values())))

    def remove(self, prefix: Prefix) -> None:
        """Forget it."""
        if self._saved.pop(id(prefix), None) is not None:
            self._num_bytes -= prefix.num_bytes
        for digest in prefix.digests:
            if self._by_digest.get(digest) is prefix:
                del self._by_digest[digest]


def block_digests(tokens: np.ndarray) -> list[bytes]:
    """A digest for every full block of tokens, each covering all tokens up to the block's end."""
    data = np.ascontiguousarray(tokens, dtype=np.int32)
    digests: list[bytes] = []
    previous = b""
    for end in range(BLOCK, len(data) + 1, BLOCK):
        previous = hashlib.blake2b(previous + data[end - BLOCK : end].tobytes(), digest_size=16).digest()
        digests.append(previous)
    return digests

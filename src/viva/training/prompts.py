"""A data set of prompts in a seeded order that is a pure function of (seed, epoch)."""

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from viva.training.seeds import derive_seed

__all__ = ["PromptItem", "PromptOrder", "PromptsChangedError", "prompts_digest"]


class PromptsChangedError(ValueError):
    """A prompt is no longer what it was when the run began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptItem:
    """One problem; ``answer`` is ``None`` where the data carry none."""

    question: str
    answer: str | None = None


def prompts_digest(*lists: Iterable[PromptItem]) -> str:
    """A short fingerprint of lists of prompts: a resumed run must have the same ones, in the same order."""
    digest = hashlib.blake2b(digest_size=8)
    # the JSON text of the lists, item by item: they may be larger than memory
    for index, items in enumerate(lists):
        digest.update(b", [" if index else b"[[")
        for place, item in enumerate(items):
            text = json.dumps([item.question, item.answer])
            digest.update(f"{', ' if place else ''}{text}".encode())
        digest.update(b"]")
    digest.update(b"]" if lists else b"[]")
    return digest.hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOrder:
    """Which prompts a batch gets: shuffled passes over the data, one after another, without gaps.

    Position ``p`` of the endless sequence is entry ``p % n`` of pass ``p // n``. Every pass is a permutation, so all
    prompts are seen equally often, also where a batch is larger than the data or spans two passes.
    """

    items: Sequence[PromptItem]
    """Asked for one by one, so that they may be read when needed."""
    seed: int
    groups_per_batch: int
    num_groups: int
    """Total number of groups of the run; the last batch may be smaller than the others."""

    def __post_init__(self) -> None:
        """Reject an order that could not fill a batch."""
        if not self.items or self.groups_per_batch < 1 or self.num_groups < 1:
            raise ValueError(
                f"an order needs prompts and positive sizes; got {len(self.items)} prompts, "
                f"groups_per_batch={self.groups_per_batch}, num_groups={self.num_groups}"
            )

    def __len__(self) -> int:
        """Number of batches."""
        return -(-self.num_groups // self.groups_per_batch)

    @property
    def num_passes(self) -> float:
        """How often the run sees every prompt."""
        return self.num_groups / len(self.items)

    def batch(self, index: int) -> list[PromptItem]:
        """The prompts of batch ``index``.

        Raises:
            IndexError: If there is no such batch.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"batch index must be from 0 to {len(self) - 1}; got {index}")
        start = index * self.groups_per_batch
        stop = min(start + self.groups_per_batch, self.num_groups)
        orders: dict[int, Sequence[int]] = {}
        batch: list[PromptItem] = []
        for position in range(start, stop):
            epoch, place = divmod(position, len(self.items))
            if epoch not in orders:
                orders[epoch] = self._permutation(epoch)
            batch.append(self.items[orders[epoch][place]])
        return batch

    def _permutation(self, epoch: int) -> Sequence[int]:
        order = list(range(len(self.items)))
        random.Random(derive_seed(self.seed, "data", epoch)).shuffle(order)
        return order

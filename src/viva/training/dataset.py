"""Prompts as a tinker-cookbook data set: each batch is a list of freshly made group builders."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset

from viva.training.prompts import PromptItem, PromptOrder
from viva.training.seeds import derive_seed

__all__ = ["BuilderFactory", "PromptDataset"]

BuilderFactory = Callable[[PromptItem, int], EnvGroupBuilder]
"""Makes the group for a prompt and a seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDataset(RLDataset):
    """Groups for the prompts of a `PromptOrder`; every group has its own seed."""

    order: PromptOrder
    make_builder: BuilderFactory

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """The groups of batch `index`."""
        return [
            self.make_builder(item, derive_seed(self.order.seed, "group", index, place))
            for place, item in enumerate(self.order.batch(index))
        ]

    def __len__(self) -> int:
        """Number of batches."""
        return len(self.order)

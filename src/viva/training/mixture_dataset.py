"""Several strategies in every batch: all of them on each prompt, or the prompts dealt out among them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset

from viva.training.dataset import BuilderFactory
from viva.training.prompts import PromptOrder
from viva.training.seeds import derive_seed

__all__ = ["Assignment", "MixtureDataset"]

Assignment = Literal["all", "split"]
"""``all``: every strategy answers every prompt, which shared baselines and ``balance`` need. ``split``: each prompt
goes to one strategy, in turns over the whole run, so that a batch holds equal parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureDataset(RLDataset):
    """Groups of several strategies, interleaved prompt by prompt; every group has its own seed.

    Raises:
        ValueError: If there is no strategy, or `assignment` has no meaning.
    """

    order: PromptOrder
    factories: Mapping[str, BuilderFactory]
    """By strategy, in the order of their groups. Seeds depend on the name: one more leaves the others' as they were."""
    assignment: Assignment = "all"

    def __post_init__(self) -> None:
        """Check."""
        if not self.factories:
            raise ValueError("a mixture needs at least one strategy")
        if self.assignment not in ("all", "split"):
            raise ValueError(f"assignment must be 'all' or 'split'; got {self.assignment!r}")

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """The groups of batch `index`."""
        names = list(self.factories)
        first = index * self.order.groups_per_batch
        groups: list[EnvGroupBuilder] = []
        for place, item in enumerate(self.order.batch(index)):
            own = names if self.assignment == "all" else [names[(first + place) % len(names)]]
            groups += [
                self.factories[name](item, derive_seed(self.order.seed, "group", index, place, name))
                for name in own
            ]
        return groups

    def __len__(self) -> int:
        """Number of batches."""
        return len(self.order)

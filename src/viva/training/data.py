"""The prompts of a run, as tinker-cookbook data sets in a seeded order that is a pure function of (seed, epoch).

Nothing of a run's randomness has to be saved: every seed is derived from the run's seed and the place that asks for it
(step, group, seat, call, attempt), so a resumed run draws what the uninterrupted one would have drawn.
"""

import hashlib
import json
import math
import random
import re
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Generic, Literal, TypeVar, overload

import tinker
from tinker_cookbook.rl.types import EnvGroupBuilder, RLDataset

ItemT = TypeVar("ItemT")

SPELLED_OUT = "prompts/spelled_out"
"""Metric of the first step: see `spelled_out`."""
_WORD = re.compile("[A-Za-z\u00c0-\u058f]{4,}")
"""Words of scripts that put spaces between words; others have no words to look up."""
_BITS = 31  # fits the signed 32-bit field that samplers take


def derive_seed(*parts: int | str) -> int:
    """A seed in ``[0, 2**31)`` that depends on every part and on nothing else.

    Parts are encoded with their type and length: ``("a", "b")`` and ``("ab",)``, ``1`` and ``"1"`` are unrelated.
    """
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        text = f"{'i' if isinstance(part, int) else 's'}{part}".encode()
        digest.update(len(text).to_bytes(8, "big") + text)
    return int.from_bytes(digest.digest(), "big") >> (64 - _BITS)


class PromptsChangedError(ValueError):
    """A prompt is no longer what it was when the run began."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptItem:
    """One problem; ``answer`` is ``None`` where the data carry none."""

    question: str
    answer: str | None = None


def spelled_out(encode: Callable[[str], Sequence[int]], texts: Sequence[str]) -> float | None:
    """Share of words of four letters or more that take more than a token for every two letters; ``None`` without words.

    The texts are prompts without chat format and instructions.
    """
    words = [word for text in texts for word in _WORD.findall(text)]
    if not words:
        return None
    return sum(len(encode(f" {word}")) > len(word) / 2 for word in words) / len(words)


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


def prompt_item(question: object, answer: object, key: str, place: str) -> PromptItem:
    """The prompt of a checked question and answer; `key` and `place`, where they stand, are for messages.

    Raises:
        ValueError: If it is no text, or the answer is neither text nor number.
    """
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{place}: {key!r} must be text that is not empty; got {question!r:.80}")
    if answer is not None and (isinstance(answer, bool) or not isinstance(answer, (str, int, float))):
        raise ValueError(f"{place}: the answer must be text or a number; got {answer!r:.80}")
    if (isinstance(answer, float) and not math.isfinite(answer)) or (
        isinstance(answer, str) and not answer.strip()
    ):
        raise ValueError(
            f"{place}: the answer must be text that is not empty or a finite number; got {answer!r:.80}. Leave it out "
            "where none is known"
        )
    check_text(question, f"{place}: {key!r}")
    check_text(str(answer), f"{place}: the answer")
    return PromptItem(question=question, answer=None if answer is None else str(answer))


def check_text(text: str, place: str) -> None:
    """Refuse what no UTF-8 file can hold and no tokenizer reads."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{place} holds half of a surrogate pair, {text[error.start]!r} at character {error.start}; write the "
            "whole character, or leave it out"
        ) from error


class LazyPrompts(Sequence[PromptItem]):
    """Several sources one after another: for each its length, and what reads the item at a place."""

    def __init__(self, parts: Sequence[tuple[int, Callable[[int], PromptItem]]]) -> None:
        self._readers = [read for _, read in parts]
        self._ends = list(accumulate(length for length, _ in parts))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @overload
    def __getitem__(self, index: int) -> PromptItem: ...

    @overload
    def __getitem__(self, index: slice) -> list[PromptItem]: ...

    def __getitem__(self, index: int | slice) -> PromptItem | list[PromptItem]:
        """One prompt, read now, or several."""
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        place = range(len(self))[index]
        part = bisect_right(self._ends, place)
        return self._readers[part](place - (self._ends[part - 1] if part else 0))


def item_digest(item: PromptItem) -> int:
    """Eight bytes of a digest of a prompt and its answer."""
    text = repr((item.question, item.answer)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")


def unchanged(read: Callable[[int], PromptItem], digests: Sequence[int], source: str) -> LazyPrompts:
    """The items of a file or data set, which raise `PromptsChangedError` where one is no longer what it was.

    Args:
        read: Reads the item at a place.
        digests: `item_digest` of every item.
        source: For the message.
    """

    def checked(place: int) -> PromptItem:
        told = (
            f"{source} was changed while the run reads from it: prompt {place + 1} is no longer what it was when the "
            "run began. Put the data back as they were, or give a copy of the new ones to a new run."
        )
        try:
            item = read(place)
        except (ValueError, OSError) as error:
            raise PromptsChangedError(told) from error
        if item_digest(item) != digests[place]:
            raise PromptsChangedError(told)
        return item

    return LazyPrompts([(len(digests), checked)])


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOrder(Generic[ItemT]):
    """The prompts, or examples, of every batch: shuffled passes over the data, one after another, without gaps.

    Position ``p`` of the endless sequence is entry ``p % n`` of pass ``p // n``, a permutation.
    """

    items: Sequence[ItemT]
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
        return -(-self.num_groups // self.groups_per_batch)

    @property
    def num_passes(self) -> float:
        """Passes of the run over all prompts."""
        return self.num_groups / len(self.items)

    def batch(self, index: int) -> list[ItemT]:
        """The prompts of batch ``index``.

        Raises:
            IndexError: If there is no such batch.
        """
        if not 0 <= index < len(self):
            raise IndexError(f"batch index must be from 0 to {len(self) - 1}; got {index}")
        start = index * self.groups_per_batch
        stop = min(start + self.groups_per_batch, self.num_groups)
        orders: dict[int, Sequence[int]] = {}
        batch: list[ItemT] = []
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


BuilderFactory = Callable[[PromptItem, int], EnvGroupBuilder]
"""Makes the group for a prompt and a seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptDataset(RLDataset):
    """Groups for the prompts of a `PromptOrder`; every group has its own seed."""

    order: PromptOrder[PromptItem]
    make_builder: BuilderFactory

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """The groups of batch `index`."""
        return [
            self.make_builder(item, derive_seed(self.order.seed, "group", index, place))
            for place, item in enumerate(self.order.batch(index))
        ]

    def __len__(self) -> int:
        return len(self.order)


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A completion to imitate behind its prompt, as token ids."""

    prompt: tuple[int, ...]
    completion: tuple[int, ...]
    kind: str = "message"
    """The thing it teaches, such as a protocol's segment."""

    def record(self) -> dict[str, Any]:
        """The example, ready for JSON."""
        return {"kind": self.kind, "prompt": list(self.prompt), "completion": list(self.completion)}

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> "Example":
        """The example of a record."""
        return cls(
            prompt=tuple(record["prompt"]), completion=tuple(record["completion"]), kind=record["kind"]
        )

    def datum(self) -> tinker.Datum:
        """For ``cross_entropy``: the completion's tokens have weight 1, the prompt's 0."""
        import torch
        from tinker_cookbook.supervised.common import datum_from_model_input_weights

        weights_T = torch.tensor([0.0] * len(self.prompt) + [1.0] * len(self.completion))
        tokens = tinker.ModelInput.from_ints([*self.prompt, *self.completion])
        return datum_from_model_input_weights(tokens, weights_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleDataset(RLDataset):
    """Batches of examples to imitate; nothing is sampled for them."""

    order: PromptOrder[Example]

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """No group is played."""
        return ()

    def __len__(self) -> int:
        return len(self.order)


Assignment = Literal["all", "split"]
"""``all``: every strategy answers every prompt, which shared baselines and ``balance`` need. ``split``: each prompt
goes to one strategy, in turns over the whole run, so that a batch holds equal parts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstSteps(RLDataset):
    """The first batches of a data set."""

    dataset: RLDataset
    num_steps: int

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """The groups of batch `index`."""
        return self.dataset.get_batch(index)

    def __len__(self) -> int:
        return self.num_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureDataset(RLDataset):
    """Groups of several strategies, interleaved prompt by prompt; every group has its own seed.

    Raises:
        ValueError: If there is no strategy, or `assignment` has no meaning.
    """

    order: PromptOrder[PromptItem]
    factories: Mapping[str, BuilderFactory]
    """Factories by strategy, in the order of their groups. Seeds depend on the name: one more changes no other."""
    assignment: Assignment = "all"

    def __post_init__(self) -> None:
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
        return len(self.order)

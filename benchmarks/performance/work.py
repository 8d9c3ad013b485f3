"""What is measured: model sizes, shapes and the tokens of a step. Only the standard library, for all environments."""

import functools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LORA_RANK = 16
LORA_ALPHA = 32
"""The local engine's, as in the tinker API."""
LEARNING_RATE = 1e-6
WORDS_FILE = "words.json"
"""In a model's folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A Llama architecture with tied embeddings, and heads of 64 but for the smallest."""

    vocab: int
    hidden: int
    feed_forward: int
    layers: int
    heads: int
    kv_heads: int
    context: int = 4096

    @property
    def head(self) -> int:
        return self.hidden // self.heads

    @property
    def products(self) -> tuple[tuple[int, int, int], ...]:
        """Matrix products of a layer stack as (outputs, inputs, how many), without the output layer."""
        return (
            (self.hidden, self.hidden, 2 * self.layers),
            self.keys_and_values,
            (self.feed_forward, self.hidden, 2 * self.layers),
            (self.hidden, self.feed_forward, self.layers),
        )

    @property
    def keys_and_values(self) -> tuple[int, int, int]:
        """The products that make them, as (outputs, inputs, how many)."""
        return self.kv_heads * self.head, self.hidden, 2 * self.layers

    @property
    def parameters(self) -> int:
        return self.vocab * self.hidden + sum(out * into * count for out, into, count in self.products)


SIZES = {
    "1m": Size(vocab=4096, hidden=128, feed_forward=384, layers=4, heads=4, kv_heads=2),
    "42m": Size(vocab=32000, hidden=512, feed_forward=1536, layers=8, heads=8, kv_heads=4),
    "85m": Size(vocab=32000, hidden=768, feed_forward=2176, layers=9, heads=12, kv_heads=6),
    "smollm2": Size(vocab=49152, hidden=576, feed_forward=1536, layers=30, heads=9, kv_heads=3, context=8192),
}
"""The last one is SmolLM2-135M-Instruct as others trained it; weights of the others are random."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One policy-gradient step."""

    prompt: int
    completion: int
    group: int
    distinct: int = 1
    """Prompts; each has ``group`` completions."""

    @property
    def rows(self) -> int:
        return self.group * self.distinct


SHAPES = {
    "long": Shape(prompt=768, completion=48, group=12),
    "balanced": Shape(prompt=128, completion=128, group=12),
    "distinct": Shape(prompt=128, completion=128, group=1, distinct=12),
}


@functools.cache
def words(folder: str) -> Sequence[int]:
    """Ids of the model's whole words, each with a space before it: any sequence of them is spelled in one way."""
    found: Sequence[int] = json.loads((Path(folder) / WORDS_FILE).read_text())
    return found


def prompts(folder: str, shape: Shape, number: int) -> list[list[int]]:
    """The prompts of a step, ``[distinct][prompt]``; other ones in every step."""
    rng = random.Random(number)
    return [tail(words(folder), shape.prompt, rng) for _ in range(shape.distinct)]


def advantages(count: int) -> list[float]:
    """Of the rows of a step: they sum to zero, none is zero."""
    return [1.0 if index % 2 else -1.0 for index in range(count)]


def tail(words_of: Sequence[int], length: int, rng: random.Random) -> list[int]:
    """Random words."""
    return [rng.choice(words_of) for _ in range(length)]


def batch_title(distinct: int, samples: int) -> str:
    """A batch's name: its prompts and the samples of each."""
    return f"{distinct} x {samples}"


def batches(
    settings: Mapping[str, Any],
    number: int,
    sample: Callable[[list[list[int]], int, int, random.Random], tuple[int, float, float]],
) -> dict[str, float]:
    """Milliseconds by token of every batch, the refresh of weights in it, and the seconds of that refresh.

    Settings: ``model`` (folder) and ``batches``, of which each is ``[prompts, samples, prompt tokens, new tokens]``;
    step 0, which warms up, has two of them. From prompts, samples of each, tokens of each sample and random numbers
    `sample` gives the tokens that it drew, the seconds of all, and those of the refresh.
    """
    found: dict[str, float] = {}
    for distinct, samples, length, new in settings["batches"][: None if number else 2]:
        rng = random.Random(f"{number} {distinct} {samples}")
        asked = [tail(words(settings["model"]), length, rng) for _ in range(distinct)]
        tokens, seconds, refresh_s = sample(asked, samples, new, rng)
        assert tokens == distinct * samples * new
        title = batch_title(distinct, samples)
        found |= {title: 1000 * seconds / tokens, f"{title} refresh": refresh_s}
    return found

"""What is measured: model sizes, shapes and the tokens of a step. Only the standard library, for all environments."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["SHAPES", "SIZES", "Shape", "Size", "advantages", "prompts", "words"]

LORA_RANK = 16
LORA_ALPHA = 32
"""The local engine's, as in the tinker API."""
LEARNING_RATE = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A Llama architecture with tied embeddings and heads of 64."""

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
}


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


def words(size: Size) -> range:
    """Ids of the tokenizer's whole words: their text has one spelling, whatever stands around them."""
    return range(600, size.vocab - 8)


def prompts(size: Size, shape: Shape, number: int) -> list[list[int]]:
    """The prompts of a step, ``[distinct][prompt]``; other ones in every step."""
    rng, ids = random.Random(number), words(size)
    return [[rng.choice(ids) for _ in range(shape.prompt)] for _ in range(shape.distinct)]


def advantages(count: int) -> list[float]:
    """Of the rows of a step: they sum to zero, none is zero."""
    return [1.0 if index % 2 else -1.0 for index in range(count)]


def tail(words_of: Sequence[int], length: int, rng: random.Random) -> list[int]:
    """Random words."""
    return [rng.choice(words_of) for _ in range(length)]

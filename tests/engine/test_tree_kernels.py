"""The compiled attention of a tree, and the tiles it is made of, against torch in float64."""

from typing import Any

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engine import with_kernels

from viva.engine import trees
from viva.engine.kernels import as_array
from viva.engine.kernels import trees as tree_kernels
from viva.engine.kernels.tile import HAS_PAIRS, TILE_COLUMNS, TILE_ROWS, add_rows
from viva.engine.trees import TreeStep, pack_tree

CPU = torch.device("cpu")
ERRORS = {torch.float32: 1e-5, torch.bfloat16: 2**-5}


@numba.njit
def multiply(*given: Any) -> None:
    add_rows(*given)


@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 2 * TILE_ROWS),
    count=st.integers(0, 70),
    offsets=st.tuples(*[st.integers(0, 5)] * 3),
    turned=st.booleans(),
    keep=st.booleans(),
)
def test_tiles(
    stored: str, rows: int, count: int, offsets: tuple[int, int, int], turned: bool, keep: bool
) -> None:
    generator = np.random.default_rng(count)
    side, width = max(rows, count) + 3, TILE_COLUMNS + 3
    numbers = torch.from_numpy(generator.normal(size=offsets[0] + side * side)).to(getattr(torch, stored))
    right, sums = (
        generator.normal(size=offset + size * width).astype(np.float32)
        for offset, size in zip(offsets[1:], (count, rows), strict=True)
    )
    before = sums.astype(np.float64)
    at = (offsets[0], 1, side) if turned else (offsets[0], side, 1)
    multiply(
        rows, as_array(numbers), at, right, (offsets[1], width), sums, (offsets[2], width), count, int(keep)
    )
    factor = numbers[offsets[0] :].double().numpy().reshape(side, side)
    factor = (factor.T if turned else factor)[:rows, :count]
    place = before[offsets[2] :].reshape(rows, width)[:, :TILE_COLUMNS]
    place *= keep
    place += factor @ right[offsets[1] :].reshape(count, width)[:, :TILE_COLUMNS]
    np.testing.assert_allclose(sums, before, rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(
    not HAS_PAIRS, reason="this processor multiplies no pairs of bfloat16, or has something faster"
)
@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(0, 2 * TILE_ROWS),
    pairs=st.integers(0, 40),
    offsets=st.tuples(*[st.integers(0, 5)] * 3),
    keep=st.booleans(),
)
def test_tiles_of_pairs(rows: int, pairs: int, offsets: tuple[int, int, int], keep: bool) -> None:
    generator = torch.Generator().manual_seed(pairs)
    width = TILE_COLUMNS + 3
    left, right, sums = (
        torch.randn(offset + size, generator=generator)
        for offset, size in zip(offsets, (rows * 2 * pairs, pairs * width * 2, rows * width), strict=True)
    )
    left, right, before = left.bfloat16(), right.bfloat16(), sums.double()
    places = (offsets[0], 2 * pairs, 2), (offsets[1], 2 * width), (offsets[2], width)
    arrays = [as_array(each) for each in (left, right, sums)]
    multiply(rows, arrays[0], places[0], arrays[1], places[1], arrays[2], places[2], pairs, int(keep))
    first = left[offsets[0] :].double().view(rows, 2 * pairs)
    second = right[offsets[1] :].double().view(pairs, width, 2).transpose(1, 2).reshape(2 * pairs, width)
    place = before[offsets[2] :].view(rows, width)[:, :TILE_COLUMNS]
    place *= keep
    place += (first @ second)[:, :TILE_COLUMNS]
    torch.testing.assert_close(sums.double(), before, rtol=1e-4, atol=1e-4)


texts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), min_size=1, max_size=9)


def attended(
    step: TreeStep, states: list[torch.Tensor], slopes: torch.Tensor, **given: Any
) -> tuple[torch.Tensor, ...]:
    """The output, and slopes by queries, keys and values."""
    states = [each.detach().requires_grad_() for each in states]
    module: Any = trees
    output, _ = module.tree_attention(None, *states, None, tree=step, **given)
    return output, *torch.autograd.grad(output, states, slopes.to(output.dtype))


@pytest.mark.parametrize("dtype", ERRORS, ids=str)
@settings(max_examples=60, deadline=None)
@given(
    texts=texts,
    heads=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    size=st.sampled_from([8, 24, 64, 70]),
    window=st.sampled_from([None, None, 3, 20]),
    scaling=st.sampled_from([None, 0.7]),
    price=st.integers(0, 300),
    threads=st.integers(1, 7),
    data=st.data(),
)
def test_attention_and_its_gradients(
    dtype: torch.dtype,
    texts: list[list[int]],
    heads: tuple[int, int],
    size: int,
    window: int | None,
    scaling: float | None,
    price: int,
    threads: int,
    data: st.DataObject,
) -> None:
    tree = pack_tree([np.array(text) for text in sorted(texts)], price)
    step = TreeStep(tree, CPU)
    indices = list(range(len(tree.cells)))
    cells = data.draw(st.none() | st.lists(st.sampled_from(indices), unique=True).map(sorted))
    generator = torch.Generator().manual_seed(len(tree.tokens))
    keys, groups = heads
    query, key, value, slopes = (
        torch.randn(1, each, len(tree.tokens), size, generator=generator).to(dtype)
        for each in (keys * groups, keys, keys, keys * groups)
    )
    slopes = slopes.transpose(1, 2)
    given_too: dict[str, Any] = {"scaling": scaling, "sliding_window": window, "cells": cells}
    with pytest.MonkeyPatch.context() as context:
        context.setattr(tree_kernels, "num_threads", lambda: threads)
        found = attended(step, [query, key, value], slopes, **given_too)
    expected = attended(step, [each.double() for each in (query, key, value)], slopes, **given_too)
    # slopes by queries and keys are differences of rounded numbers, times the scaling
    steeper = max(1.0, (scaling or 0.0) * size**0.5)
    for mine, other, rounding in zip(found, expected, (1.0, steeper, steeper, 1.0), strict=True):
        assert mine.dtype == dtype
        assert mine.shape == other.shape
        error = (mine.double() - other).abs().max().item()
        assert error <= ERRORS[dtype] * max(rounding, other.abs().max().item())


@with_kernels
def test_a_key_that_is_seen_in_spite_of_its_mask_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = pack_tree([np.array([0, 1, 2]), np.array([0, 1, 3])], 100)
    states = [torch.randn(1, 2, 4, 8, generator=torch.Generator().manual_seed(1)) for _ in range(3)]
    right = attended(TreeStep(tree, CPU), states, torch.ones(1, 4, 2, 8))
    step = TreeStep(tree, CPU)
    plan: Any = step.plan(None)
    plan._hidden[:] = False
    wrong = attended(step, states, torch.ones(1, 4, 2, 8))
    for mine, other in zip(wrong, right, strict=True):
        assert (mine - other).abs().max() > 0.01


def test_same_inputs_same_bits() -> None:
    tree = pack_tree([np.arange(300), np.concatenate([np.arange(200), np.arange(90)])], 0)
    states = [
        torch.randn(1, 4, len(tree.tokens), 64, generator=torch.Generator().manual_seed(2)) for _ in range(3)
    ]
    slopes = torch.randn(1, len(tree.tokens), 4, 64, generator=torch.Generator().manual_seed(3))
    first, second = (attended(TreeStep(tree, CPU), states, slopes) for _ in range(2))
    assert all(map(torch.equal, first, second))

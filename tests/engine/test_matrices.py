"""Attention by the matrix instructions of AMX, and its parts, against torch."""

import math

import numba
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from viva.engine.kernels import averages, matrices
from viva.engine.kernels.attention import SharedKeys, attend_rows
from viva.engine.kernels.averages import turned_values
from viva.engine.kernels.compiler import power_of_two
from viva.engine.kernels.matrices import MATRIX, has_matrices

with_matrices = pytest.mark.skipif(not has_matrices(), reason="this processor has no AMX")


@numba.njit
def powers(numbers: np.ndarray, found: np.ndarray) -> None:
    for index in range(len(numbers)):
        found[index] = power_of_two(numbers[index])


@numba.njit
def multiply(
    left: np.ndarray, right: np.ndarray, sums: np.ndarray, width: int, count: int, keep: int
) -> None:
    size = count * MATRIX
    matrices.begin_matrices()
    at, pairs = (0, size, MATRIX // 2 * size, MATRIX), (0, width, MATRIX // 2 * width)
    matrices.add_matrix(left, at, right, pairs, sums, (0, width), count, keep)
    matrices.end_matrices()


def test_powers_of_two_are_finer_than_bfloat16() -> None:
    numbers = np.concatenate([-np.linspace(0, 130, 400_001), [-0.0, -math.inf, math.nan]]).astype(np.float32)
    found = np.empty_like(numbers)
    powers(numbers, found)
    expected = np.exp2(numbers.astype(np.float64))
    seen = numbers >= -126
    assert np.abs(found[seen] / expected[seen] - 1).max() < 3e-6
    assert not found[numbers < -126].any()
    assert np.isnan(found[-1])


@settings(max_examples=40, deadline=None)
@given(
    found=st.lists(st.tuples(st.integers(1, 100), st.integers(0, 120)), min_size=1, max_size=5),
    size=st.sampled_from([16, 64, 80]),
)
def test_turned_values_are_pairs_of_a_column_from_the_first_seen_with_zeros_behind_the_last(
    found: list[tuple[int, int]], size: int
) -> None:
    stored = [torch.randn(length, size).bfloat16() for length, _ in found]
    places = [(each.data_ptr(), *place) for each, place in zip(stored, found, strict=True)]
    turned, starts = turned_values(np.array(places), stored[0])
    blocks = torch.from_numpy(turned.view(np.int16)).view(torch.bfloat16)
    number = 0
    for values, (length, first), start in zip(stored, found, starts.tolist(), strict=True):
        for key in range(first // MATRIX * MATRIX, length, MATRIX):
            rows = blocks[start + key // MATRIX].T
            assert torch.equal(rows[: length - key], values[key : key + MATRIX])
            assert not rows[length - key :].any()
            number += 1
    assert len(blocks) == number


@with_matrices
@settings(max_examples=20, deadline=None)
@given(count=st.integers(0, 5), wider=st.integers(0, 9), keep=st.booleans())
def test_products_of_matrices(count: int, wider: int, keep: bool) -> None:
    generator = torch.Generator().manual_seed(count)
    size, width = count * MATRIX, MATRIX + wider
    left, right = (
        torch.randn(*shape, generator=generator).bfloat16() for shape in ((MATRIX, size), (size, width))
    )
    sums = torch.randn(MATRIX, width, generator=generator)
    before = sums.double()
    pairs = right.view(-1, 2, width).transpose(1, 2).contiguous().view(torch.int16).numpy().reshape(-1)
    numbers = left.view(torch.int16).numpy().reshape(-1)
    multiply(numbers, pairs.view(np.uint32), sums.numpy().reshape(-1), width, count, int(keep))
    before[:, :MATRIX] *= keep
    before[:, :MATRIX] += (left.double() @ right.double())[:, :MATRIX]
    torch.testing.assert_close(sums.double(), before, rtol=1e-5, atol=1e-5)


@with_matrices
@settings(max_examples=30, deadline=None)
@given(
    past=st.lists(st.integers(0, 400), min_size=1, max_size=3),
    new=st.sampled_from([1, 2, 50]),
    size=st.sampled_from([32, 64, 128]),
    begin=st.sampled_from([None, 8, 264]),
    window=st.sampled_from([None, 5, 200]),
    seed=st.integers(0, 9),
)
def test_matrices_attend_as_tiles_do(
    past: list[int], new: int, size: int, begin: int | None, window: int | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    store, prefix, query = (
        torch.randn(*shape, generator=generator).bfloat16()
        for shape in ((2, len(past), 2, 512, size), (2, 2, begin or 8, size), (len(past), 6, new, size))
    )
    first = torch.tensor(past) + (begin or 0)
    rows = [list(range(len(past)))]
    shared = SharedKeys([[prefix]], rows, first[:, None] + torch.arange(new), 3) if begin else None
    given = query, store, np.array(past) + new, size**-0.5, window, shared
    output, sums = attend_rows(*given)
    assert averages.uses_matrices(query, size**-0.5)
    assert not averages.uses_matrices(query, 0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(averages, "has_matrices", lambda: False)
        expected, totals = attend_rows(*given)
    assert (output.float() - expected.float()).abs().max() <= 2**-7 * expected.abs().max()
    torch.testing.assert_close(sums, totals, rtol=1e-5, atol=1e-5)


@with_matrices
def test_what_lies_behind_the_keys_has_no_part_in_it() -> None:
    store, query = torch.ones(2, 1, 1, 64, 32).bfloat16(), torch.ones(1, 1, 3, 32).bfloat16()
    store[:, :, :, 20:] = math.nan
    output, sums = attend_rows(query, store, np.array([20]), 1.0, None)
    assert output.eq(1).all()
    assert sums.isfinite().all()

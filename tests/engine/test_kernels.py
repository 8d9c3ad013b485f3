"""The compiled kernels of a decode step against torch in float64."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_engine import with_kernels
from torch.nn.functional import rms_norm, silu

from viva.engine.kernels import (
    LowRank,
    Norm,
    SharedKeys,
    add_low_rank,
    as_array,
    attend_rows,
    can_compile,
    chunks_of,
    draw,
    gate,
    multiply,
    place,
    records_of,
    tiled,
    tiles_of,
    use_threads,
)

TYPES = {torch.float32: 2e-6, torch.bfloat16: 2**-8}
"""Types, and the error that rounding makes, relative to the largest number."""
types = pytest.mark.parametrize("dtype", TYPES, ids=str)


def numbers(*shape: int, seed: int, dtype: torch.dtype, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def assert_near(actual: torch.Tensor, expected: torch.Tensor) -> None:
    error = (actual.double() - expected).abs().max().item()
    assert error <= TYPES[actual.dtype] * max(1.0, expected.abs().max().item())


@types
@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 70), size=st.integers(1, 900), scale=st.sampled_from([1e-3, 1.0, 50.0]))
def test_norms(dtype: torch.dtype, rows: int, size: int, scale: float) -> None:
    hidden = numbers(rows, 1, size, seed=rows, dtype=dtype, scale=scale)
    weight = numbers(size, seed=size, dtype=dtype)
    expected = rms_norm(hidden.double(), (size,), weight.double(), 1e-5)
    assert_near(Norm(weight, 1e-5)(hidden), expected)


@types
@settings(max_examples=30, deadline=None)
@given(rows=st.integers(1, 70), size=st.integers(1, 900), scale=st.sampled_from([0.1, 3.0, 200.0]))
def test_gates(dtype: torch.dtype, rows: int, size: int, scale: float) -> None:
    both = numbers(rows, 1, 2 * size, seed=rows, dtype=dtype, scale=scale)
    gates, values = both.double().chunk(2, -1)
    assert_near(gate(both), silu(gates) * values)


@types
@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(1, 9),
    new=st.sampled_from([1, 3, 40]),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (8, 1)]),
    size=st.sampled_from([2, 8, 64, 80]),
    normed=st.booleans(),
)
def test_placing(
    dtype: torch.dtype, rows: int, new: int, heads: tuple[int, int], size: int, normed: bool
) -> None:
    queries, keys = heads
    inner = numbers(rows, new, (queries + 2 * keys) * size, seed=rows, dtype=dtype)
    angles = numbers(rows * new, size, seed=new, dtype=torch.float32)
    cosines, sines = angles.cos().to(dtype), angles.sin().to(dtype)
    weight = numbers(queries + keys if normed else 0, size, seed=1, dtype=dtype)
    past = np.arange(rows) * 5 % 7
    where = np.arange(2, rows + 2).repeat(new), (past[:, None] + np.arange(new)).flatten()
    store = numbers(2, rows + 3, keys, 64, size, seed=3, dtype=dtype)
    before = store.clone()
    query = place(
        inner,
        (as_array(weight), np.float32(1e-6)),
        (as_array(cosines), as_array(sines)),
        where,
        store,
        queries,
    )
    each = inner.double().view(rows, new, -1, size)
    turned, values = each.split([queries + keys, keys], 2)
    if normed:
        turned = rms_norm(turned, (size,), None, 1e-6) * weight.double()
    first, second = turned.chunk(2, -1)
    turns = (cosines.double().view(rows, new, 1, size), sines.double().view(rows, new, 1, size))
    expected = turned * turns[0] + torch.cat([-second, first], -1) * turns[1]
    assert query.shape == (rows, queries, new, size)
    assert_near(query.transpose(1, 2), expected[:, :, :queries])
    for row in range(rows):
        span = slice(int(past[row]), int(past[row]) + new)
        assert_near(store[0, row + 2, :, span].transpose(0, 1), expected[row, :, queries:])
        assert torch.equal(store[1, row + 2, :, span].transpose(0, 1).double(), values[row])
        before[:, row + 2, :, span] = store[:, row + 2, :, span]
    assert torch.equal(store, before), "nothing else is written to"


def test_a_rotation_of_a_part_of_a_head_is_refused() -> None:
    """A kernel that read it would read beyond its end."""
    part, store = np.zeros((1, 4), np.float32), torch.zeros(2, 1, 1, 64, 8)
    norms = np.zeros((0, 8), np.float32), np.float32(0)
    where = np.zeros(1, np.int64), np.zeros(1, np.int64)
    with pytest.raises(ValueError, match="rotary embeddings of 4 numbers do not fit heads of 8"):
        place(torch.zeros(1, 1, 24), norms, (part, part), where, store, 1)


def reference(
    query: torch.Tensor, store: torch.Tensor, start: int, lengths: Any, scale: float, window: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    groups = query.shape[1] // store.shape[2]
    outputs: list[torch.Tensor] = []
    sums: list[torch.Tensor] = []
    for row, length in enumerate(lengths):
        first = 0 if window is None else max(0, length - window)
        keys, values = store[:, start + row, :, first:length].double().repeat_interleave(groups, 1)
        scores = scale * (keys @ query[row].double().transpose(1, 2))[..., 0]
        outputs.append(scores.softmax(-1)[:, None] @ values)
        sums.append(scores.logsumexp(-1, keepdim=True))
    return torch.stack(outputs), torch.stack(sums)


@types
@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 256), min_size=1, max_size=9),
    heads=st.sampled_from([(1, 1), (4, 2), (6, 2), (8, 1)]),
    size=st.sampled_from([2, 8, 64, 80]),
    window=st.sampled_from([None, 1, 7, 64, 100, 1000]),
    scale=st.sampled_from([0.1, 1.0, 30.0]),
)
def test_attention_of_one_token(
    dtype: torch.dtype,
    lengths: list[int],
    heads: tuple[int, int],
    size: int,
    window: int | None,
    scale: float,
) -> None:
    queries, keys = heads
    store = numbers(2, len(lengths) + 2, keys, 256, size, seed=len(lengths), dtype=dtype)
    query = numbers(len(lengths), queries, 1, size, seed=sum(lengths), dtype=dtype)
    output, sums = attend_rows(query, store[:, 1:].contiguous(), np.array(lengths), scale, window)
    expected, totals = reference(query, store, 1, lengths, scale, window)
    bound = 2e-6 * max(1.0, float(totals.abs().max()))  # scores are float32, of any type of keys
    assert (output.double() - expected).abs().max() <= 6 * bound + (
        TYPES[dtype] * 5 if dtype != torch.float32 else 0
    )
    assert (sums - totals).abs().max() <= bound


@types
@settings(max_examples=40, deadline=None)
@given(
    past=st.lists(st.integers(0, 900), min_size=1, max_size=3),
    new=st.integers(2, 120),
    heads=st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    size=st.sampled_from([2, 8, 64, 70]),
    window=st.sampled_from([None, 1, 7, 64, 500]),
    scale=st.sampled_from([0.1, 1.0]),
)
def test_attention_of_several_tokens_is_that_of_one_after_another(
    dtype: torch.dtype,
    past: list[int],
    new: int,
    heads: tuple[int, int],
    size: int,
    window: int | None,
    scale: float,
) -> None:
    queries, keys = heads
    store = numbers(2, len(past) + 2, keys, 1024, size, seed=len(past), dtype=dtype)
    query = numbers(len(past), queries, new, size, seed=sum(past), dtype=dtype)
    output, sums = attend_rows(query, store[:, 1:].contiguous(), np.array(past) + new, scale, window)
    for token in {0, 1, new // 2, new - 1}:
        lengths = [length + token + 1 for length in past]
        expected, totals = reference(query[:, :, token : token + 1], store, 1, lengths, scale, window)
        bound = 2e-6 * max(1.0, float(totals.abs().max()))
        error = 6 * bound + (TYPES[dtype] * 5 if dtype != torch.float32 else 0)
        assert (output[:, :, token : token + 1].double() - expected).abs().max() <= error
        assert (sums[:, :, token : token + 1] - totals).abs().max() <= 2 * bound
    alone = attend_rows(query[:1], store[:, 1:].contiguous(), np.array(past[:1]) + new, scale, window)
    assert torch.equal(alone[0][0], output[0])


@types
@settings(max_examples=40, deadline=None)
@given(
    begins=st.lists(st.sampled_from([None, 1, 65, 400]), min_size=1, max_size=9),
    new=st.sampled_from([1, 3, 40]),
    heads=st.sampled_from([(1, 1), (4, 2), (9, 3)]),
    size=st.sampled_from([2, 8, 64, 70]),
    window=st.sampled_from([None, 1, 7, 64, 500]),
    scale=st.sampled_from([0.1, 1.0]),
)
def test_attention_to_prefixes_that_rows_share_is_that_to_their_own_copies(
    dtype: torch.dtype,
    begins: list[int | None],
    new: int,
    heads: tuple[int, int],
    size: int,
    window: int | None,
    scale: float,
) -> None:
    queries, keys = heads
    lengths = sorted({length for length in begins if length is not None})
    # of a longer one the first tokens, so that heads do not follow one another
    prefixes = {length: numbers(2, 2, keys, length + 3, size, seed=length, dtype=dtype) for length in lengths}
    states = [list(prefixes[length][:, :, :, :length]) for length in lengths]
    past = [7 * row % 23 for row in range(len(begins))]
    store = numbers(2, len(begins), keys, 64, size, seed=1, dtype=dtype)
    query = numbers(len(begins), queries, new, size, seed=2, dtype=dtype)
    first = torch.tensor([begin or 0 for begin in begins]) + torch.tensor(past)
    rows = [[row for row, begin in enumerate(begins) if begin == length] for length in lengths]
    shared = None
    if lengths:
        shared = SharedKeys(states, rows, first[:, None] + torch.arange(new), queries // keys)
    output, _ = attend_rows(query, store, np.array(past) + new, scale, window, shared, layer=1)
    for row, begin in enumerate(begins):
        for token in {0, new - 1}:
            own = store[:, row, :, : past[row] + token + 1]
            whole = own if begin is None else torch.cat([prefixes[begin][1, :, :, :begin], own], 2)
            asked = query[row : row + 1, :, token : token + 1]
            expected, totals = reference(asked, whole[:, None], 0, [whole.shape[2]], scale, window)
            bound = 2e-6 * max(1.0, float(totals.abs().max()))
            error = 6 * bound + (TYPES[dtype] * 8 if dtype != torch.float32 else 0)
            assert (output[row : row + 1, :, token : token + 1].double() - expected).abs().max() <= error


@types
def test_a_row_does_not_depend_on_the_others_nor_on_threads(dtype: torch.dtype) -> None:
    lengths = np.array([200, 3, 77, 64, 128, 129])
    store = numbers(2, 6, 2, 256, 16, seed=1, dtype=dtype)
    query = numbers(6, 4, 1, 16, seed=2, dtype=dtype)
    whole, sums = attend_rows(query, store, lengths, 0.3, None)
    threads = torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            use_threads()
            for row in range(6):
                alone = attend_rows(
                    query[row : row + 1], store[:, row:].contiguous(), lengths[row : row + 1], 0.3, None
                )
                assert torch.equal(alone[0][0], whole[row])
                assert torch.equal(alone[1][0], sums[row])
    finally:
        torch.set_num_threads(threads)


@types
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_no_number_stays_so(dtype: torch.dtype, value: float) -> None:
    for size in (40, 40_000):
        row = torch.ones(2, size, dtype=dtype)
        row[0, 7] = value
        assert not Norm(torch.ones(size, dtype=dtype), 1e-5)(row)[0].isfinite().all()
        assert Norm(torch.ones(size, dtype=dtype), 1e-5)(row)[1].isfinite().all()
        assert not gate(row)[0].isfinite().all()
        assert gate(row)[1].isfinite().all()
    store, query = torch.ones(2, 2, 1, 64, 8, dtype=dtype), torch.ones(2, 2, 1, 8, dtype=dtype)
    store[0, 0, 0, 3, 2] = value
    output, sums = attend_rows(query, store, np.array([10, 10]), 1.0, None)
    assert output[0].isnan().all()
    assert not sums[0].isfinite().any()
    assert output[1].isfinite().all()


def test_keys_that_are_not_seen_weigh_nothing() -> None:
    store, query = torch.zeros(2, 1, 1, 64, 8), torch.zeros(1, 2, 1, 8)
    store[1, :, :, :5] = 1e38
    output, _ = attend_rows(query, store, np.array([30]), 1.0, 25)
    assert output.abs().max() == 0


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 5),
    size=st.sampled_from([1, 2, 127, 128, 129, 700, 5000]),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    seed=st.integers(0, 2**20),
)
def test_drawing(rows: int, size: int, scale: float, temperature: float, seed: int) -> None:
    logits = numbers(rows, size, seed=seed, dtype=torch.float32, scale=scale)
    logits[:, 1::5] = -math.inf
    uniforms = np.random.default_rng(seed).random(rows)
    uniforms[0] = 0 if seed % 2 else np.nextafter(1, 0)
    divisors = torch.full((rows,), temperature or 1.0, dtype=torch.float64)
    drawn = draw(logits, divisors, range(rows) if temperature == 0 else (), uniforms.tolist())
    tokens, logprobs, totals = drawn[0].int().tolist(), drawn[1].tolist(), drawn[2]
    weights = (logits.double() - logits.amax(1, keepdim=True)) / divisors[:, None]
    torch.testing.assert_close(totals, weights.exp().sum(1), rtol=1e-6, atol=0)
    exact = (logits.double() / (temperature or 1)).log_softmax(-1)
    for row, token in enumerate(tokens):
        assert abs(logprobs[row] - exact[row, token].item()) < 1e-5
        assert exact[row, token] > -math.inf
        if temperature == 0:
            assert token == logits[row].argmax()
        else:
            ends = exact[row].exp().cumsum(0)
            assert (ends[token - 1] if token else 0) - 1e-5 <= uniforms[row] <= ends[token] + 1e-5


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.integers(0, 3), min_size=1, max_size=70),
    inputs=st.sampled_from([1, 16, 60, 576]),
    sizes=st.sampled_from([(64,), (7,), (600,), (64, 32, 130)]),
    ranks=st.lists(st.sampled_from([0, 1, 3, 8, 33]), min_size=12, max_size=12),
)
def test_low_rank_products(rows: list[int], inputs: int, sizes: tuple[int, ...], ranks: list[int]) -> None:
    """Rows of several adapters in any order; some adapters have no part in some layers, or in none."""
    given, outputs = (numbers(len(rows), size, seed=7, dtype=torch.float32) for size in (inputs, sum(sizes)))
    expected, adapters = outputs.double(), []
    for adapter in range(4):
        pairs = [
            (
                numbers(rank, inputs, seed=rank, dtype=torch.float32),
                numbers(size, rank, seed=adapter, dtype=torch.float32),
            )
            if rank
            else None
            for rank, size in zip(ranks[3 * adapter :], sizes, strict=False)
        ]
        adapters.append(LowRank(pairs, 0.5) if any(pairs) else None)
        mine = torch.tensor([row == adapter for row in rows])[:, None]
        for pair, part in zip(pairs, expected.split(sizes, dim=1), strict=True):
            if pair is not None:
                part += mine * 0.5 * given.double() @ pair[0].double().T @ pair[1].double().T
    order = np.argsort(rows, kind="stable")
    where = records_of(adapters, len(sizes)), tiles_of(sizes)
    found = outputs.clone()
    add_low_rank(found, given, *where, chunks_of([rows.count(adapter) for adapter in range(4)]), order)
    assert_near(found, expected)
    last = outputs[-1:].clone()
    add_low_rank(
        last, given[-1:], *where, chunks_of([adapter == rows[-1] for adapter in range(4)]), np.zeros(1, int)
    )
    assert torch.equal(last, found[-1:])


def test_a_large_input_does_not_take_the_digits_of_the_others() -> None:
    """As the first token's hidden states of real models have one; a single sum would be off by 0.017."""
    torch.manual_seed(0)
    weight, inputs = torch.randn(64, 4096), torch.randn(8, 4096)
    inputs[:, 0] = 1e4
    outputs = torch.zeros(8, 64)
    multiply(inputs, tiled(weight), outputs, keep=False)
    exact = inputs.double() @ weight.double().T
    assert (outputs - exact).square().mean().sqrt() < 0.008


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_told(value: float) -> None:
    logits = torch.zeros(3, 300)
    logits[1, 200] = value
    logits[2] = -math.inf
    for greedy in ((), (0, 1, 2)):
        drawn = draw(logits, torch.ones(3, dtype=torch.float64), greedy, [0.5] * 3)
        assert drawn[2].isfinite().tolist() == [True, False, False]


@with_kernels
def test_other_types_and_devices_are_left_to_torch() -> None:
    assert can_compile(torch.zeros(1))
    assert can_compile(torch.zeros(1, dtype=torch.bfloat16))
    assert not can_compile(torch.zeros(1, dtype=torch.float64))
    assert not can_compile(torch.zeros(1, device="meta"))


def run_alone(code: str) -> None:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


def test_kernels_need_no_folder_to_keep_code_in() -> None:
    """As on a system that can only be read, for a user without a home."""
    run_alone(
        "from numba.core import caching\n"
        "caching.CacheImpl._locator_classes = []\n"
        "import torch\n"
        "from viva.engine.kernels import gate\n"
        "assert float(gate(torch.zeros(1, 2)).sum()) == 0\n"
    )


def test_kernels_do_without_keeping_code_on_a_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    run_alone(
        "import errno, os, torch\n"
        "from numba.core import caching\n"
        "from viva.engine.kernels import gate\n"
        "tried = []\n"
        "def save(*arguments):\n"
        "    tried.append(arguments)\n"
        "    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))\n"
        "caching.IndexDataCacheFile.save = save\n"
        "assert float(gate(torch.zeros(1, 2)).sum()) == 0\n"
        "assert len(tried) == 1\n"
    )


def test_kernels_run_in_a_forked_process() -> None:
    run_alone(
        "import os, torch\n"
        "from viva.engine.kernels import gate\n"
        "torch.set_num_threads(2)\n"
        "both = torch.ones(40, 2000)\n"
        "assert gate(both).isfinite().all()\n"
        "torch.set_num_threads(1)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    torch.set_num_threads(2)\n"
        "    gate(both)\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )


def test_code_that_was_kept_and_threads_compute_the_same_bits(tmp_path: Path) -> None:
    """A run that resumes finds kept code, and may have another number of threads."""
    code = (
        "import hashlib, numpy as np, torch\n"
        "from viva.engine.kernels import attend_rows, gate_pair, normalise\n"
        "def gate_back(gates, values, slopes):\n"
        "    given = gates.clone().requires_grad_(), values.clone().requires_grad_()\n"
        "    gate_pair(*given).backward(slopes)\n"
        "    return [each.grad for each in given]\n"
        "generator = torch.Generator().manual_seed(1)\n"
        "many = [torch.randn(n, 2100, generator=generator) for n in (40, 40, 40)]\n"
        "few = [tensor[:5, :48].contiguous() for tensor in many]\n"
        "sizes = np.array([3, 40, 64])\n"
        "store, query = torch.randn(2, 3, 2, 64, 8, generator=generator), few[0][:3, :32].reshape(3, 4, 1, 8)\n"
        "for threads in (1, 2):\n"
        "    torch.set_num_threads(threads)\n"
        "    found = [*gate_back(*many), *gate_back(*few), normalise(many[0], many[1][0], 1e-5)]\n"
        "    found += [normalise(few[0], few[1][0], 1e-5), *attend_rows(query, store, sizes, 0.3, None)]\n"
        "    print(hashlib.sha256(b''.join(each.numpy().tobytes() for each in found)).hexdigest())\n"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "2"}
    told = [
        subprocess.run(
            [sys.executable, "-c", code], check=True, timeout=300, env=environment, capture_output=True
        ).stdout.split()
        for _ in ("compiled", "kept")
    ]
    assert [len(digests) for digests in told] == [2, 2]
    assert len({*told[0], *told[1]}) == 1
    assert any(tmp_path.rglob("*.nbc"))

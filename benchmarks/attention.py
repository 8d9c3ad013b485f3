"""Attention to many keys in bfloat16: by our kernels with AMX and by their tiles, and by torch's operation.

    python benchmarks/attention.py [heads=9x3x64]

Milliseconds of a layer with all threads, medians of seven tries in turns, for rows of new tokens behind keys of their
own and perhaps a beginning that they share. ``heads`` are queries, keys and size of a head. torch's operation gets keys
repeated for the queries that share them; it has no form for rows that share a beginning.
"""

import sys
from collections.abc import Callable
from typing import Any

from products import median_seconds

from viva.threads import prepare_threads

SHAPES = (
    (4, 768, 0, 0),
    (1, 768, 2232, 0),
    (4, 100, 2900, 0),
    (8, 30, 30, 1000),
    (8, 1, 199, 3000),
    (64, 1, 63, 1000),
)
"""Rows, new tokens, own tokens before them, and tokens of the shared beginning."""


def ways_of(shape: tuple[int, int, int, int], heads: tuple[int, int, int]) -> dict[str, Callable[[], Any]]:
    """The operations on one set of random numbers."""
    import numpy as np
    import torch

    from viva.engine.kernels import SharedKeys, attend_rows, averages

    (rows, new, past, begin), (queries, keys, size) = shape, heads
    total = past + new
    store = torch.zeros(2, rows, keys, -(-total // 64) * 64, size, dtype=torch.bfloat16)
    store[:, :, :, :total] = torch.randn(2, rows, keys, total, size)
    query = torch.randn(rows, new, queries, size).bfloat16().transpose(1, 2)
    shared = None
    if begin:
        prefix = torch.randn(2, keys, begin, size).bfloat16()
        positions = (begin + past + torch.arange(new)).expand(rows, new).contiguous()
        shared = SharedKeys([[prefix]], [list(range(rows))], positions, queries // keys)
    given = query, store, np.full(rows, total), size**-0.5, None, shared

    def by(has_matrices: Callable[[], bool]) -> Any:
        averages.has_matrices = has_matrices
        return attend_rows(*given)

    ways: dict[str, Callable[[], Any]] = {"tiles": lambda: by(lambda: False)}
    has_matrices = averages.has_matrices
    if has_matrices():
        ways["AMX"] = lambda: by(has_matrices)
    if not begin:
        mask = None if not past else torch.ones(new, total, dtype=torch.bool).tril(past)
        parts = [each[:, :, :total].repeat_interleave(queries // keys, 1) for each in store]
        operation = torch.nn.functional.scaled_dot_product_attention
        ways["torch"] = lambda: operation(query, *parts, attn_mask=mask, is_causal=mask is None)
    return ways


def main() -> None:
    given = dict(argument.split("=", 1) for argument in sys.argv[1:])
    queries, keys, size = map(int, given.pop("heads", "9x3x64").split("x"))
    if given:
        sys.exit(f"unknown option {next(iter(given))!r}; allowed: heads")
    prepare_threads()
    from viva.engine.kernels import use_threads

    use_threads()
    print("| rows | new | own before | shared before | tiles | AMX | torch |\n|---|---|---|---|---|---|---|")
    for shape in SHAPES:
        seconds = median_seconds(ways_of(shape, (queries, keys, size)))
        found = [f"{1000 * seconds[way]:.2f}" if way in seconds else "-" for way in ("tiles", "AMX", "torch")]
        print(f"| {' | '.join([*map(str, shape), *found])} |", flush=True)


if __name__ == "__main__":
    main()

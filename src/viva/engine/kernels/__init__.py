"""Kernels for a CPU, compiled by numba: the one interface to them.

A decode step takes a few rows through a layer. Each operation of torch costs some 20 us there whatever it computes, and
its attention to keys of a row's own reads them at half the memory's speed (see the log). Here every step between two
products is one call, and attention reads keys and values once, as they lie. Attention of prompts and of trees is made
of tiles whose scores never leave the processor's cache, at twice to three times the speed of torch's operations.

Callers ask `can_compile` and have torch's operations for where it is false: on a GPU, for other types of numbers, and
everywhere with ``VIVA_KERNELS=off`` in the environment. Numba compiles a function where it is first called. Here all
are compiled at one point before the first number is computed, unless code of theirs is kept: so what is computed never
depends on when a kernel was ready, and a compiler that fails does so where torch's operations can still take over.
"""

import logging
import os
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numba.core.errors import NumbaError

from viva.engine.kernels.attention import SharedKeys, attend_rows
from viva.engine.kernels.averages import turned_values
from viva.engine.kernels.compiler import as_array, is_code_kept, use_threads
from viva.engine.kernels.layers import Norm, draw, gate, gate_pair, normalise, place
from viva.engine.kernels.matrices import MATRIX, has_matrices
from viva.engine.kernels.products import (
    LowRank,
    add_low_rank,
    can_multiply,
    chunks_of,
    multiply,
    records_of,
    tiled,
    tiles_of,
)
from viva.engine.kernels.trees import TreePlan, attend_tree

__all__ = [
    "LowRank",
    "Norm",
    "SharedKeys",
    "TreePlan",
    "add_low_rank",
    "as_array",
    "attend_rows",
    "attend_tree",
    "can_compile",
    "can_multiply",
    "chunks_of",
    "compile_all",
    "draw",
    "gate",
    "gate_pair",
    "multiply",
    "normalise",
    "place",
    "records_of",
    "tiled",
    "tiles_of",
    "use_threads",
]

_ENABLED = os.environ.get("VIVA_KERNELS") != "off"
"""The one switch: without kernels the engine computes by torch's operations."""
_log = logging.getLogger(__name__)


def can_compile(tensor: torch.Tensor) -> bool:
    """Whether the kernels compute on such tensors; never with ``VIVA_KERNELS=off``, nor where they do not compile."""
    return (
        _ENABLED
        and tensor.device.type == "cpu"
        and tensor.dtype in (torch.float32, torch.bfloat16)
        and _are_compiled()
    )


@cache
def _are_compiled() -> bool:
    """Whether the kernels of float32 could be compiled; says so where that was not done before."""
    if is_code_kept():
        return True
    _log.warning(
        "The engine's kernels are compiled for this processor, which takes 30 to 50 s once "
        "(`python -m viva.engine.kernels` does it ahead of a run)."
    )
    try:
        compile_all()
    except (NumbaError, OSError, RuntimeError) as error:
        _log.warning(
            "The engine's kernels cannot be compiled here (%s: %s). This process computes by torch's operations, the "
            "same to within rounding but slower; `python -m viva.engine.kernels` shows the whole error.",
            type(error).__name__,
            str(error).partition("\n")[0],
        )
        return False
    return True


@torch.inference_mode(False)
@torch.enable_grad()
def compile_all() -> None:
    """Call every kernel with float32, which compiles those of which no code is kept; with AMX attention in bfloat16."""
    wide = torch.ones(2, 1, 1, 64, MATRIX, dtype=torch.bfloat16)
    turned_values(np.array([(wide.data_ptr(), 64, 0)]), wide[0])
    if has_matrices():
        _attend_all(torch.ones(1, 1, 2, MATRIX, dtype=torch.bfloat16), wide)
    rows = torch.ones(2, 8)
    heads = torch.ones(1, 1, 2, 8)
    store = torch.ones(2, 1, 1, 64, 8)
    _attend_all(heads, store)
    cell: Any = SimpleNamespace(queries=slice(0, 2), keys=(slice(0, 2),), visible=np.ones((2, 2), bool))
    plan = TreePlan([cell], [(2, torch.zeros(2, 0, dtype=torch.bool))])
    attend_tree(heads.clone().requires_grad_(), heads, heads, plan, [0], 1.0).sum().backward()
    trained = rows.clone().requires_grad_()
    normalise(trained, rows[0], 1e-5).sum().backward()
    gate(rows)
    gate_pair(trained, trained).sum().backward()
    norms = np.zeros((0, 8), np.float32), np.float32(0)
    turn, first = np.ones((1, 8), np.float32), np.zeros(1, np.int64)
    place(torch.ones(1, 1, 24), norms, (turn, turn), (first, first), store, 1)
    draw(rows, torch.ones(2, dtype=torch.float64), (), (0.5, 0.5))
    for weight in (rows, rows.bfloat16()):
        multiply(rows, tiled(weight), torch.ones(2, 2), keep=True)
    adapter = LowRank([(rows, rows.T)], 1.0)
    where = tiles_of([8]), chunks_of([2]), np.arange(2)
    add_low_rank(torch.ones(2, 8), rows, records_of([adapter], 1), *where)


def _attend_all(query: torch.Tensor, store: torch.Tensor) -> None:
    shared = SharedKeys([[store[:, 0]]], [[0]], torch.tensor([[64, 65]]), 1)
    attend_rows(query, store, np.array([2]), 1.0, None, shared)
    attend_rows(query[:, :, :1], store, np.array([2]), 1.0, None)

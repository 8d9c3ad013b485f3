"""Whether kernels are used, decided once per process, and their compilation ahead of that.

Numba compiles a function where it is first called. Here all are compiled at one point before the first number is
computed, unless code of theirs is kept: so what is computed never depends on when a kernel was ready, and a compiler
that fails does so where torch's operations can still take the kernels' place.
"""

import logging
import os
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from numba.core.errors import NumbaError

from viva.engine.kernels import layers, products
from viva.engine.kernels.attention import attend_rows
from viva.engine.kernels.compiler import is_code_kept
from viva.engine.kernels.trees import TreePlan, attend_tree

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
        "The engine's kernels are compiled for this processor, which takes some 30 s once "
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
    """Call every kernel with float32, which compiles those of which no code is kept."""
    rows = torch.ones(2, 8)
    heads = torch.ones(1, 1, 2, 8)
    store = torch.ones(2, 1, 1, 64, 8)
    attend_rows(heads, store, np.array([2]), 1.0, None)
    attend_rows(heads[:, :, :1], store, np.array([2]), 1.0, None)
    _use_tree(heads)
    layers.normalise(rows, rows[0], 1e-5)
    layers.normalise_back(rows, rows[0], 1e-5, rows)
    layers.gate(rows)
    layers.gate_pair(rows, rows)
    layers.gate_back(rows, rows, rows)
    norms = np.zeros((0, 8), np.float32), np.float32(0)
    turn, first = np.ones((1, 8), np.float32), np.zeros(1, np.int64)
    layers.place(torch.ones(1, 1, 24), norms, (turn, turn), (first, first), store, 1)
    layers.draw(rows, torch.ones(2, dtype=torch.float64), (), (0.5, 0.5))
    products.multiply(rows, products.tiled(rows), torch.ones(2, 2), keep=True)
    adapter = products.LowRank([(rows, rows.T)], 1.0)
    where = products.tiles_of([8]), products.chunks_of([2]), np.arange(2)
    products.add_low_rank(torch.ones(2, 8), rows, products.records_of([adapter], 1), *where)


def _use_tree(heads: torch.Tensor) -> None:
    cell: Any = SimpleNamespace(queries=slice(0, 2), keys=(slice(0, 2),), visible=np.ones((2, 2), bool))
    plan = TreePlan([cell], [(2, torch.zeros(2, 0, dtype=torch.bool))])
    attend_tree(heads.clone().requires_grad_(), heads, heads, plan, [0], 1.0).sum().backward()

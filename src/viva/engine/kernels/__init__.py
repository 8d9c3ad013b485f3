"""Kernels for a CPU, compiled by numba: the one interface to them.

A decode step takes a few rows through a layer. Each operation of torch costs some 20 us there whatever it computes, and
its attention to keys of a row's own reads them at half the memory's speed (see the log). Here every step between two
products is one call, and attention reads keys and values once, as they lie. Attention of prompts and of trees is made
of tiles whose scores never leave the processor's cache, at twice to three times the speed of torch's operations.

Callers ask `can_compile` and have torch's operations for where it is false: on a GPU, for other types of numbers, and
everywhere with ``VIVA_KERNELS=off`` in the environment.
"""

from viva.engine.kernels.ahead import can_compile
from viva.engine.kernels.attention import attend_rows
from viva.engine.kernels.compiler import as_array, use_threads
from viva.engine.kernels.layers import (
    Norm,
    draw,
    gate,
    gate_back,
    gate_pair,
    normalise,
    normalise_back,
    place,
)
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
    "TreePlan",
    "add_low_rank",
    "as_array",
    "attend_rows",
    "attend_tree",
    "can_compile",
    "can_multiply",
    "chunks_of",
    "draw",
    "gate",
    "gate_back",
    "gate_pair",
    "multiply",
    "normalise",
    "normalise_back",
    "place",
    "records_of",
    "tiled",
    "tiles_of",
    "use_threads",
]

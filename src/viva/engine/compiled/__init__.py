"""Kernels for a CPU, compiled by numba.

A decode step takes a few rows through a layer. Each operation of torch costs some 20 us there whatever it computes, and
its attention to keys of a row's own reads them at half the memory's speed (see the log). Here every step between two
products is one call, and attention reads keys and values once, as they lie. Attention of prompts and of trees is made
of tiles whose scores never leave the processor's cache, at twice to three times the speed of torch's operations.
"""

from viva.engine.compiled.attention import attend_one
from viva.engine.compiled.drawing import draw
from viva.engine.compiled.layers import gate, gate_back, gate_pair, normalise, normalise_back, place
from viva.engine.compiled.prompts import attend_many
from viva.engine.compiled.tiles import TILE_COLUMNS, TILE_ROWS
from viva.engine.compiled.trees import BLOCK_ROWS, attend_tree, attend_tree_back
from viva.engine.compiled.vectors import Kernel

__all__ = [
    "BLOCK_ROWS",
    "KERNELS",
    "TILE_COLUMNS",
    "TILE_ROWS",
    "Kernel",
    "attend_many",
    "attend_one",
    "attend_tree",
    "attend_tree_back",
    "draw",
    "gate",
    "gate_back",
    "gate_pair",
    "normalise",
    "normalise_back",
    "place",
]

KERNELS = (
    attend_many,
    attend_one,
    attend_tree,
    attend_tree_back,
    draw,
    gate,
    gate_back,
    gate_pair,
    normalise,
    normalise_back,
    place,
)
"""All of them."""

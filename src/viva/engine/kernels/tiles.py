"""A product of a few rows whose sums stay in the processor's registers, from which larger products are made.

Compilers do not find this form by themselves, so its instructions are written out for LLVM. Matrices lie in flat arrays
of float32. Where they begin, and how far apart their rows or columns are, is counted in numbers.
"""

from collections.abc import Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils, extending

from viva.engine.kernels.compiler import inner

__all__ = ["TILE_COLUMNS", "TILE_ROWS", "add_rest", "add_tile"]

_IS_WIDE = bool(llvm.get_host_cpu_features().get("avx512f"))
_LANES, _VECTORS = (16, 4) if _IS_WIDE else (8, 2)
TILE_ROWS = 6
TILE_COLUMNS = _LANES * _VECTORS
"""Sums of a tile fill three quarters of the registers; what is multiplied takes the rest."""

_intrinsic: Any = extending.intrinsic(prefer_literal=True)
_INDEX, _WORD = ir.IntType(64), ir.IntType(32)
_VECTOR = ir.VectorType(ir.FloatType(), _LANES)
_POINTER = _VECTOR.as_pointer()


@_intrinsic
def _add(
    context: Any,
    rows: Any,
    left: Any,
    at: Any,
    right: Any,
    right_at: Any,
    sums: Any,
    sums_at: Any,
    count: Any,
    keep: Any,
) -> Any:
    """`add_tile` of so many rows, a literal number."""
    pair, triple = (types.UniTuple(types.int64, size) for size in (2, 3))
    number = types.int64
    signature = types.void(rows, left, triple, right, pair, sums, pair, number, number)
    return signature, _generate(rows.literal_value)


@inner
def add_tile(
    left: Any, at: Any, right: Any, right_at: Any, sums: Any, sums_at: Any, count: int, keep: int
) -> None:
    """``sums[r, c] = keep * sums[r, c] + sum_k left[r, k] right[k, c]`` for all ``r`` and ``c`` of a tile.

    Args:
        left: Holds the first factor, as float32 or bfloat16.
        at: Where that begins, and the distances of its rows and of its columns.
        right: Holds the second factor; the numbers of a row follow one another.
        right_at: Where that begins, and the distance of its rows.
        sums: Holds the result as ``right`` its factor; written to.
        sums_at: As ``right_at``.
        count: Of ``k``.
        keep: 1 to add to what is there, 0 to forget it.
    """
    _add(TILE_ROWS, left, at, right, right_at, sums, sums_at, count, keep)


@inner
def add_rest(
    rows: int, left: Any, at: Any, right: Any, right_at: Any, sums: Any, sums_at: Any, count: int, keep: int
) -> None:
    """`add_tile` of fewer rows."""
    if rows == 1:
        _add(1, left, at, right, right_at, sums, sums_at, count, keep)
    elif rows == 2:
        _add(2, left, at, right, right_at, sums, sums_at, count, keep)
    elif rows == 3:
        _add(3, left, at, right, right_at, sums, sums_at, count, keep)
    elif rows == 4:
        _add(4, left, at, right, right_at, sums, sums_at, count, keep)
    elif rows == 5:
        _add(5, left, at, right, right_at, sums, sums_at, count, keep)


def _generate(num_rows: int) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        left, right, sums = (
            (context.make_array(signature.args[i])(context, builder, arguments[i]).data, arguments[i + 1])
            for i in (1, 3, 5)
        )
        begin, row_step, column_step = cgutils.unpack_tuple(builder, left[1])
        rights, right_step = _begin(builder, *right)
        results, result_step = _begin(builder, *sums)
        places = [
            _vectors(builder, builder.gep(results, [builder.mul(result_step, _INDEX(row))]))
            for row in range(num_rows)
        ]
        totals = [[cgutils.alloca_once(builder, _VECTOR) for _ in row] for row in places]
        _start(builder, places, totals, arguments[8])
        with cgutils.for_range(builder, arguments[7]) as loop:
            column = builder.add(begin, builder.mul(loop.index, column_step))
            lefts = [builder.add(column, builder.mul(row_step, _INDEX(row))) for row in range(num_rows)]
            numbers = [_widened(builder, builder.load(builder.gep(left[0], [place]))) for place in lefts]
            row = builder.gep(rights, [builder.mul(loop.index, right_step)])
            _multiply(builder, numbers, [_load(builder, place) for place in _vectors(builder, row)], totals)
        for row, kept in zip(places, totals, strict=True):
            for place, total in zip(row, kept, strict=True):
                builder.store(builder.load(total), place).align = 4
        return context.get_dummy_value()

    return generate


def _begin(builder: Any, data: Any, at: Any) -> tuple[Any, Any]:
    """Where a matrix begins, and the distance of its rows."""
    begin, step = cgutils.unpack_tuple(builder, at)
    return builder.gep(data, [begin]), step


def _vectors(builder: Any, row: Any) -> list[Any]:
    """Where the vectors of a row are."""
    return [
        builder.bitcast(builder.gep(row, [_INDEX(index * _LANES)]), _POINTER) for index in range(_VECTORS)
    ]


def _load(builder: Any, place: Any) -> Any:
    return builder.load(place, align=4)


def _widened(builder: Any, number: Any) -> Any:
    if number.type == ir.FloatType():
        return number
    return builder.bitcast(builder.shl(builder.zext(number, _WORD), _WORD(16)), ir.FloatType())


def _start(builder: Any, places: Sequence[Any], totals: Sequence[Any], keep: Any) -> None:
    """Let sums begin with what is there, or with nothing."""
    with builder.if_else(builder.icmp_signed("!=", keep, _INDEX(0))) as (kept, fresh):
        for branch, is_kept in ((kept, True), (fresh, False)):
            with branch:
                for row, begun in zip(places, totals, strict=True):
                    for place, total in zip(row, begun, strict=True):
                        zero = ir.Constant(_VECTOR, [0.0] * _LANES)
                        builder.store(_load(builder, place) if is_kept else zero, total)


def _multiply(builder: Any, numbers: Sequence[Any], vectors: Sequence[Any], totals: Sequence[Any]) -> None:
    """Add each number's products with all vectors to the sums of its row."""
    kinds = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    fused = cgutils.get_or_insert_function(builder.module, kinds, f"llvm.fma.v{_LANES}f32")
    nothing = ir.Constant(_VECTOR, ir.Undefined)
    first = ir.Constant(ir.VectorType(_WORD, _LANES), [0] * _LANES)
    for number, row in zip(numbers, totals, strict=True):
        spread = builder.shuffle_vector(builder.insert_element(nothing, number, _WORD(0)), nothing, first)
        for vector, total in zip(vectors, row, strict=True):
            builder.store(builder.call(fused, [spread, vector, builder.load(total)]), total)

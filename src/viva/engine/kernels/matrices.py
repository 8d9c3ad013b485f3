"""Products of bfloat16 by the matrix instructions of AMX, from which attention to many keys is made.

A tile is a matrix of 16 rows in a register of the processor. One instruction multiplies a tile of 32 bfloat16 columns
by one whose rows hold pairs, two numbers of a column, and adds to 16 columns of float32. A thread tells the processor
the size of its tiles before it uses them.
"""

import struct
from functools import cache
from typing import Any

from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.core.typing.templates import Signature

from viva.engine.kernels.compiler import Codegen, Value, Values
from viva.engine.kernels.tile import FEATURES, IS_OURS
from viva.threads import may_use_amx

MATRIX = 32
"""Rows, columns and numbers of a sum of the products that are made at once."""
HALF = MATRIX // 2
_ROW_BYTES = 64
_SIZES = struct.pack("<BB14x8H16x8B8x", 1, 0, *[_ROW_BYTES] * 8, *[HALF] * 8)
"""Eight tiles of 16 rows of 64 bytes."""

_intrinsic: Any = extending.intrinsic
_INDEX, _WORD, _BYTE = ir.IntType(64), ir.IntType(32), ir.IntType(8)


@cache
def has_matrices() -> bool:
    """Whether code is made for a processor with AMX on which this process may use it."""
    # half of the columns of a tile, which averages may have, are a matrix with vectors of 16 numbers
    is_there = IS_OURS and all(map(FEATURES.get, ("amx-bf16", "amx-tile", "avx512f")))
    return is_there and may_use_amx()


def _turn(builder: ir.IRBuilder, rows: Values) -> Values:
    """The columns of 16 vectors: row and column exchange a bit of their numbers at a time."""
    turned = list(rows)
    for bit in (1, 2, 4, 8):
        before, turned = turned, []
        for row in range(HALF):
            # of the two rows that differ in this bit, both have half of their numbers here
            pair = before[row & ~bit], before[row | bit]
            picks = [(column & ~bit | row & bit) + (HALF if column & bit else 0) for column in range(HALF)]
            mask = ir.Constant(ir.VectorType(_WORD, HALF), picks)
            turned.append(builder.shuffle_vector(*pair, mask))
    return turned


def _turner(paired: bool) -> Any:
    @_intrinsic
    def turn(
        context: object,
        source: types.Type,
        source_at: types.Type,
        target: types.Type,
        target_at: types.Type,
    ) -> Codegen:
        """Write the columns of a matrix as rows, 16 of 16 words each.

        Args:
            context: Numba's; callers leave it out.
            source: Flat array of words; or of bfloat16, of which two rows become one of pairs.
            source_at: Its start, and the distance of its rows.
            target: Flat array of words.
            target_at: Start of the result, and the distance of its rows.
        """

        def generate(
            context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Values
        ) -> Value:
            (begin, step), (to, to_step) = (cgutils.unpack_tuple(builder, arguments[i]) for i in (1, 3))
            data, results = (
                context.make_array(signature.args[i])(context, builder, arguments[i]).data for i in (0, 2)
            )
            kind = ir.VectorType(ir.IntType(16) if paired else _WORD, HALF)

            def load(row: int) -> Value:
                place = builder.gep(data, [builder.add(begin, builder.mul(step, _INDEX(row)))])
                return builder.load(builder.bitcast(place, kind.as_pointer()), align=2)

            words = ir.VectorType(_WORD, HALF)
            if paired:
                shift = ir.Constant(words, [16] * HALF)
                halves = [builder.zext(load(row), words) for row in range(MATRIX)]
                rows = [
                    builder.or_(low, builder.shl(high, shift))
                    for low, high in zip(halves[::2], halves[1::2], strict=True)
                ]
            else:
                rows = [load(row) for row in range(HALF)]
            for row, column in enumerate(_turn(builder, rows)):
                place = builder.gep(results, [builder.add(to, builder.mul(to_step, _INDEX(row)))])
                builder.store(column, builder.bitcast(place, words.as_pointer()), align=4)
            return context.get_dummy_value()

        pair = types.UniTuple(types.int64, 2)
        return types.void(source, pair, target, pair), generate

    return turn


turn_words = _turner(paired=False)
turn_pairs = _turner(paired=True)


def _call(builder: ir.IRBuilder, name: str, *given: Value) -> None:
    """One of LLVM's names for an instruction of AMX."""
    kinds = ir.FunctionType(ir.VoidType(), [each.type for each in given])
    builder.call(cgutils.get_or_insert_function(builder.module, kinds, f"llvm.x86.{name}"), given)


def _move(builder: ir.IRBuilder, name: str, tile: int, begin: Value, row_step: Value) -> None:
    """Read a tile from an address, or write it."""
    _call(builder, name, _BYTE(tile), builder.inttoptr(begin, _BYTE.as_pointer()), row_step)


@_intrinsic
def begin_matrices(context: object) -> Codegen:
    """Tell the processor the size of this thread's tiles, until `end_matrices`."""

    def generate(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Values
    ) -> Value:
        kind = ir.ArrayType(_BYTE, len(_SIZES))
        place = cgutils.alloca_once_value(builder, ir.Constant(kind, bytearray(_SIZES)))
        _call(builder, "ldtilecfg", builder.bitcast(place, _BYTE.as_pointer()))
        return context.get_dummy_value()

    return types.void(), generate


@_intrinsic
def end_matrices(context: object) -> Codegen:
    """Let go of this thread's tiles, as other libraries expect."""

    def generate(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Values
    ) -> Value:
        _call(builder, "tilerelease")
        return context.get_dummy_value()

    return types.void(), generate


@_intrinsic
def add_matrix(  # an intrinsic takes no variable number of arguments
    context: object,
    left: types.Type,
    left_at: types.Type,
    right: types.Type,
    right_at: types.Type,
    sums: types.Type,
    sums_at: types.Type,
    count: types.Type,
    keep: types.Type,
) -> Codegen:
    """``sums = keep * sums + left right``, of which ``sums`` is a square of `MATRIX`.

    Args:
        context: Numba's; callers leave it out.
        left: Flat array that holds the first factor, bfloat16 or two of a row in a word.
        left_at: Its start, and the distances of its rows, of its second half of rows, and of every `MATRIX` columns.
        right: Flat array that holds the second factor, two bfloat16 of a column in a word.
        right_at: Its start, and the distances of its rows of pairs, and of every ``MATRIX / 2`` of them.
        sums: Flat array of float32; written to.
        sums_at: Start of the result, and the distance of its rows.
        count: Of `MATRIX` columns of the first factor.
        keep: 1 to add to what is there, 0 to forget it.
    """

    def generate(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Values
    ) -> Value:
        data = [
            builder.ptrtoint(
                context.make_array(signature.args[i])(context, builder, arguments[i]).data, _INDEX
            )
            for i in (0, 2, 4)
        ]
        lefts, rights, results = (
            [
                builder.mul(each, _INDEX(signature.args[i].dtype.bitwidth // 8))
                for each in cgutils.unpack_tuple(builder, arguments[i + 1])
            ]
            for i in (0, 2, 4)
        )

        first = builder.add(data[2], results[0])
        below = builder.add(first, builder.mul(results[1], _INDEX(HALF)))
        squares = [builder.add(row, _INDEX(column)) for row in (first, below) for column in (0, _ROW_BYTES)]
        with builder.if_else(builder.icmp_signed("!=", arguments[7], _INDEX(0))) as (kept, fresh):
            with kept:
                for tile, place in enumerate(squares):
                    _move(builder, "tileloadd64", tile, place, results[1])
            with fresh:
                for tile in range(4):
                    _call(builder, "tilezero", _BYTE(tile))
        with cgutils.for_range(builder, arguments[6]) as loop:
            upper = builder.add(builder.add(data[0], lefts[0]), builder.mul(loop.index, lefts[3]))
            before = builder.add(builder.add(data[1], rights[0]), builder.mul(loop.index, rights[2]))
            _move(builder, "tileloadd64", 4, upper, lefts[1])
            _move(builder, "tileloadd64", 6, before, rights[1])
            _move(builder, "tileloadd64", 5, builder.add(upper, lefts[2]), lefts[1])
            _move(builder, "tileloadd64", 7, builder.add(before, _INDEX(_ROW_BYTES)), rights[1])
            for tile in range(4):
                _call(builder, "tdpbf16ps", _BYTE(tile), _BYTE(4 + tile // 2), _BYTE(6 + tile % 2))
        for tile, place in enumerate(squares):
            _move(builder, "tilestored64", tile, place, results[1])
        return context.get_dummy_value()

    def places(count: int) -> types.UniTuple:
        return types.UniTuple(types.int64, count)

    number = types.int64
    return types.void(left, places(4), right, places(3), sums, places(2), number, number), generate

"""A product of a few rows whose sums stay in the processor's registers, from which larger products are made.

Compilers do not find this form by themselves, so its instructions are written out for LLVM. Matrices lie in flat
arrays. Where they begin, and how far apart their rows or columns are, is counted in numbers of the array.

Numbers are float32, those of either factor perhaps bfloat16. Where both factors are, the second one holds pairs: two
numbers of a column follow one another, and one instruction adds both products to a float32 sum. Where the second one
alone is, each of its numbers is followed by the one of the same row that is a vector further, and both become float32.
"""

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils, config
from numba.core.base import BaseContext
from numba.core.typing.templates import Signature

from viva.engine.kernels.compiler import Array, Codegen, Value, Values, inner, widened

Place = tuple[int, int, int]
"""Start of a matrix in an array, and the distances of its rows and of its columns."""
RowPlace = tuple[int, int]
"""Start of a matrix of neighbouring columns, and the distance of its rows."""

llvm.initialize_native_asmparser()  # for `_multiply`
FEATURES = llvm.get_host_cpu_features()
LANES, _VECTORS = (16, 4) if FEATURES.get("avx512f") else (8, 2)
TILE_ROWS = 6
TILE_COLUMNS = LANES * _VECTORS
"""Sums of a tile fill three quarters of the registers; what is multiplied takes the rest."""
_target: Any = config  # numba has no types
IS_OURS = _target.CPU_NAME is None and _target.CPU_FEATURES is None
HAS_PAIRS = bool(IS_OURS and FEATURES.get("avx512bf16") and not FEATURES.get("amx-bf16"))
"""Whether code is made for a processor that multiplies pairs of bfloat16 and has nothing faster (AMX, for matrices)."""

_literal_intrinsic: Any = extending.intrinsic(prefer_literal=True)
_INDEX, _WORD = ir.IntType(64), ir.IntType(32)
_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_PAIRS = ir.VectorType(_WORD, LANES)


def _tile_adder(vectors: int) -> Any:
    @_literal_intrinsic
    def add_tile(  # an intrinsic takes no variable number of arguments
        context: object,
        rows: types.IntegerLiteral,
        left: types.Type,
        at: types.Type,
        right: types.Type,
        right_at: types.Type,
        sums: types.Type,
        sums_at: types.Type,
        count: types.Type,
        keep: types.Type,
    ) -> Codegen:
        """``sums[r, c] = keep * sums[r, c] + sum_k left[r, k] right[k, c]`` for all ``r`` and ``c`` of a tile.

        Args:
            context: Numba's; callers leave it out.
            rows: Of the tile, a literal number up to `TILE_ROWS`.
            left: Array that holds the first factor, as float32 or bfloat16.
            at: `Place` of that.
            right: Array that holds the second factor. If both are bfloat16, two numbers of a column follow one another:
                then ``k`` counts pairs, of either factor.
            right_at: `RowPlace` of that.
            sums: Array that holds the result, in float32; written to.
            sums_at: `RowPlace` of that.
            count: Of ``k``.
            keep: 1 to add to what is there, 0 to forget it.
        """
        pair, triple = (types.UniTuple(types.int64, size) for size in (2, 3))
        number = types.int64
        signature = types.void(rows, left, triple, right, pair, sums, pair, number, number)
        return signature, _generate(rows.literal_value, vectors)

    return add_tile


add_tile = _tile_adder(_VECTORS)


def _rows_adder(add_tile: Any) -> Callable[..., None]:
    @inner
    def add(
        rows: int,
        left: Array,
        at: Place,
        right: Array,
        right_at: RowPlace,
        sums: Array,
        sums_at: RowPlace,
        count: int,
        keep: int,
    ) -> None:
        """`add_tile` of any number of rows."""
        begin, row_step, step = at
        place, width = sums_at
        whole = rows // TILE_ROWS * TILE_ROWS
        for row in range(0, whole, TILE_ROWS):
            tile, target = (begin + row * row_step, row_step, step), (place + row * width, width)
            add_tile(TILE_ROWS, left, tile, right, right_at, sums, target, count, keep)
        rest = rows - whole
        tile, target = (begin + whole * row_step, row_step, step), (place + whole * width, width)
        if rest == 1:
            add_tile(1, left, tile, right, right_at, sums, target, count, keep)
        elif rest == 2:
            add_tile(2, left, tile, right, right_at, sums, target, count, keep)
        elif rest == 3:
            add_tile(3, left, tile, right, right_at, sums, target, count, keep)
        elif rest == 4:
            add_tile(4, left, tile, right, right_at, sums, target, count, keep)
        elif rest == 5:
            add_tile(5, left, tile, right, right_at, sums, target, count, keep)

    return add


add_rows = _rows_adder(add_tile)
"""`add_tile` of any number of rows, of whole tiles."""
add_narrow_rows = _rows_adder(_tile_adder(_VECTORS // 2))
"""The same of half as many columns."""


def _generate(num_rows: int, vectors: int) -> Callable[..., Value]:
    def generate(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Values
    ) -> Value:
        left, right, sums = (
            (context.make_array(signature.args[i])(context, builder, arguments[i]).data, arguments[i + 1])
            for i in (1, 3, 5)
        )
        is_narrow = signature.args[3].dtype == types.int16
        is_paired = is_narrow and signature.args[1].dtype == types.int16
        read = _pair if is_paired else _number
        begin, row_step, column_step = cgutils.unpack_tuple(builder, left[1])
        rights, right_step = _begin_of(builder, *right)
        results, result_step = _begin_of(builder, *sums)
        places = [
            _vectors(builder, builder.gep(results, [builder.mul(result_step, _INDEX(row))]), _VECTOR, vectors)
            for row in range(num_rows)
        ]
        totals = [[cgutils.alloca_once(builder, _VECTOR) for _ in row] for row in places]
        _start(builder, places, totals, arguments[8])
        with cgutils.for_range(builder, arguments[7]) as loop:
            column = builder.add(begin, builder.mul(loop.index, column_step))
            lefts = [builder.add(column, builder.mul(row_step, _INDEX(row))) for row in range(num_rows)]
            numbers = [read(builder, builder.gep(left[0], [place])) for place in lefts]
            row = builder.gep(rights, [builder.mul(loop.index, right_step)])
            stored = [
                _load(builder, place)
                for place in _vectors(builder, row, _PAIRS if is_narrow else _VECTOR, vectors)
            ]
            if is_narrow and not is_paired:
                stored = _widened(builder, stored[: vectors // 2])
            _multiply(builder, numbers, stored, totals)
        for row, kept in zip(places, totals, strict=True):
            for place, total in zip(row, kept, strict=True):
                builder.store(builder.load(total), place, align=4)
        return context.get_dummy_value()

    return generate


def _begin_of(builder: ir.IRBuilder, data: Value, at: Value) -> tuple[Value, Value]:
    """The first place of a matrix, and the distance of its rows."""
    begin, step = cgutils.unpack_tuple(builder, at)
    return builder.gep(data, [begin]), step


def _vectors(builder: ir.IRBuilder, row: Value, kind: ir.VectorType, number: int) -> list[Value]:
    """Places of the vectors of a row."""
    first = builder.bitcast(row, kind.as_pointer())
    return [builder.gep(first, [_INDEX(index)]) for index in range(number)]


def _load(builder: ir.IRBuilder, place: Value) -> Value:
    return builder.load(place, align=4)


def _number(builder: ir.IRBuilder, place: Value) -> Value:
    """The number at a place as float32."""
    return widened(builder, builder.load(place))


def _pair(builder: ir.IRBuilder, place: Value) -> Value:
    """Two numbers from a place on, as they are stored."""
    return builder.load(builder.bitcast(place, _WORD.as_pointer()), align=2)


def _widened(builder: ir.IRBuilder, words: Values) -> Values:
    """Two vectors of float32 from each of words that hold a bfloat16 of either."""
    low, high = (ir.Constant(_PAIRS, [number] * LANES) for number in (16, 0xFFFF0000))
    halves = [half for each in words for half in (builder.shl(each, low), builder.and_(each, high))]
    return [builder.bitcast(half, _VECTOR) for half in halves]


def _start(builder: ir.IRBuilder, places: Sequence[Values], totals: Sequence[Values], keep: Value) -> None:
    """Let sums begin with what is there, or with nothing."""
    with builder.if_else(builder.icmp_signed("!=", keep, _INDEX(0))) as (kept, fresh):
        for branch, is_kept in ((kept, True), (fresh, False)):
            with branch:
                for row, begun in zip(places, totals, strict=True):
                    for place, total in zip(row, begun, strict=True):
                        zero = ir.Constant(_VECTOR, [0.0] * LANES)
                        builder.store(_load(builder, place) if is_kept else zero, total)


def _multiply(builder: ir.IRBuilder, numbers: Values, vectors: Values, totals: Sequence[Values]) -> None:
    """Add each number's products with all vectors to the sums of its row; or each pair's, of two numbers."""
    kind = vectors[0].type
    if kind == _PAIRS:
        # LLVM's own name for it takes a type of numbers that llvmlite does not have
        types_of = ir.FunctionType(_VECTOR, [kind, kind, _VECTOR])
        fused: Value = ir.InlineAsm(types_of, "vdpbf16ps $2, $1, $0", "=v,v,v,0", side_effect=False)
    else:
        types_of = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        fused = cgutils.get_or_insert_function(builder.module, types_of, f"llvm.fma.v{LANES}f32")
    nothing = ir.Constant(kind, ir.Undefined)
    first = ir.Constant(ir.VectorType(_WORD, LANES), [0] * LANES)
    for number, row in zip(numbers, totals, strict=True):
        spread = builder.shuffle_vector(builder.insert_element(nothing, number, _WORD(0)), nothing, first)
        for vector, total in zip(vectors, row, strict=True):
            builder.store(builder.call(fused, [spread, vector, builder.load(total)]), total)

"""The compiler of kernels, and their smallest parts: numbers as they are stored, the exponential, the largest number.

Everything is computed in float32. Sums may be taken in any order, which lets them use vectors; that something is no
number is not assumed away.
"""

import os
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any, TypeVar

import numba
import numpy as np
import torch
from llvmlite import ir
from numba import extending, types
from numba.core import cgutils
from numba.core.base import BaseContext
from numba.core.typing.templates import Signature
from numba.np.numpy_support import carray

_LINE = 64
"""Bytes of a cache line."""
LOG2_E = np.float32(1.4426950408889634)
_ROUND = np.float32(12582912.0)  # 1.5 * 2^23: adding it leaves the nearest integer in the lowest bits
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_LEAST, _MOST = np.float32(-87.0), np.float32(88.0)
_OPTIONS: dict[str, object] = {
    "error_model": "numpy",  # an error at a division by zero, as Python has it, forbids vectors
    "fastmath": {"contract", "reassoc", "nsz"},
}
Array = np.ndarray
PartT = TypeVar("PartT", bound=Callable[..., object])
Value = Any  # of LLVM; what the library is inferred to give does not hold
Values = Sequence[Value]
Codegen = tuple[Signature, Callable[..., Value]]
"""A part's types, and what writes its instructions."""
_njit: Any = numba.njit  # numba has no types
_intrinsic: Any = extending.intrinsic


def inner(function: PartT) -> PartT:
    """A part of a kernel, always inlined.

    A call would find this process' own code of the part, or, where the kernel's code was kept, a copy of it compiled
    within the kernel, whose sums may have another order.
    """
    return _njit(forceinline=True, **_OPTIONS)(function)


def choose(part: Callable[..., object], form: Callable[..., Callable[..., object]]) -> None:
    """Let kernels that call a part have the form of it that belongs to the types of its arguments."""
    options: Any = {"forceinline": True} | _OPTIONS
    extending.overload(part, jit_options=options, strict=False)(form)


class Kernel:
    """A loop over rows in threads, and the same in one; each is compiled when it is first called.

    Threads do not survive a fork, and numba's end a process that tries; where there is one, it needs none woken.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self._in_threads = _njit(parallel=True, **_OPTIONS)(_copied(function, "in_threads"))
        self._alone = _njit(**_OPTIONS)(_copied(function, "alone"))
        _kernels.append(self)

    def __call__(self, *arguments: object) -> None:
        """Compute in threads where that is possible."""
        compute = self._in_threads if _has_threads() else self._alone
        try:
            compute(*arguments)
        except OSError:  # a full disk: its code is compiled now, but could not be kept
            compute(*arguments)

    def is_kept(self) -> bool:
        """Whether code that a call would use is kept, of any type of numbers, or cannot be."""
        kept = (self._in_threads if _has_threads() else self._alone)._cache
        return kept.cache_path is None or bool(kept._cache_file._load_index())

    def keep_code(self) -> None:
        """Keep code between processes from now on: beside its source or in the user's cache folder."""
        try:
            self._in_threads.enable_caching()
            self._alone.enable_caching()
        except RuntimeError:  # neither folder can be written
            return


_kernels: list[Kernel] = []
"""All that were made so far."""


def is_code_kept() -> bool:
    """Whether code of every kernel, as this process would call it, is kept, or none can be."""
    return all(kernel.is_kept() for kernel in _kernels)


def use_threads() -> None:
    """Let the kernels that this thread calls use as many threads as torch does."""
    if _has_threads():
        numba.set_num_threads(min(torch.get_num_threads(), _most_threads()))


@cache
def _most_threads() -> int:
    """Numba's own limit, which it starts with in every thread."""
    with ThreadPoolExecutor(1) as fresh:
        return fresh.submit(numba.get_num_threads).result()


@cache
def _home() -> int | None:
    """The process that threads can be used in, at the first call: of numba's kinds, one does not bear two callers."""
    for kernel in _kernels:
        kernel.keep_code()
    return os.getpid() if any(map(_is_there, ("tbbpool", "omppool"))) else None


def _is_there(pool: str) -> bool:
    try:
        import_module(f"numba.np.ufunc.{pool}")
    except ImportError:  # its library is missing
        return False
    return True


def _has_threads() -> bool:
    return os.getpid() == _home() and torch.get_num_threads() > 1


def num_threads() -> int:
    """Threads that a kernel called now is computed with."""
    return numba.get_num_threads() if _has_threads() else 1


def as_array(tensor: torch.Tensor) -> Array:
    """The memory of a contiguous tensor, bfloat16 as int16."""
    return tensor.view(torch.int16).numpy() if tensor.dtype == torch.bfloat16 else tensor.numpy()


def as_rows(tensor: torch.Tensor) -> Array:
    """The memory of a contiguous tensor as a matrix of its last dimension."""
    return as_array(tensor.view(-1, tensor.shape[-1]))


def _copied(function: Callable[..., None], suffix: str) -> FunctionType:
    """A copy under a name of its own, by which kept code is found.

    It changes with any kernel's source: numba by itself looks at one file, not at what is called from others.
    """
    name = f"{function.__name__}_{suffix}"
    copied = FunctionType(function.__code__, function.__globals__, name)
    copied.__qualname__ = f"{name}_{_digest():08x}"
    copied.__module__ = function.__module__
    return copied


@cache
def _digest() -> int:
    files = sorted(Path(__file__).parent.glob("*.py"))
    return zlib.crc32(b"".join(path.read_bytes() for path in files))


def widened(builder: ir.IRBuilder, number: Value) -> Value:
    """A stored number as float32: the instructions of `widen`."""
    if number.type == ir.FloatType():
        return number
    bits = builder.shl(builder.zext(number, ir.IntType(32)), ir.IntType(32)(16))
    return builder.bitcast(bits, ir.FloatType())


@_intrinsic
def widen(context: object, value: types.Type) -> Codegen:
    """A stored number as float32."""

    def generate(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Values
    ) -> Value:
        return widened(builder, arguments[0])

    return types.float32(value), generate


@_intrinsic
def narrow(context: object, value: types.Type, like: types.Type) -> Codegen:
    """A float32 as another number is stored: bfloat16 is rounded to nearest, ties to even."""

    def generate(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Values
    ) -> Value:
        if like == types.float32:
            return arguments[0]
        word = ir.IntType(32)
        bits = builder.bitcast(arguments[0], word)
        odd = builder.and_(builder.lshr(bits, word(16)), word(1))
        rounded = builder.add(bits, builder.add(odd, word(0x7FFF)))
        is_number = builder.fcmp_ordered("ord", arguments[0], arguments[0])
        kept = builder.select(is_number, rounded, word(0x7FC00000))
        return builder.trunc(builder.lshr(kept, word(16)), ir.IntType(16))

    return like(types.float32, like), generate


@_intrinsic
def fetch(context: object, array: types.Type, row: types.Type, count: types.Type) -> Codegen:
    """Begin to read rows of a matrix ahead of their use. Past its end that does nothing."""

    def generate(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Values
    ) -> Value:
        kind = signature.args[0]
        matrix = context.make_array(kind)(context, builder, arguments[0])
        size = builder.extract_value(matrix.shape, 1)
        byte = ir.IntType(8).as_pointer()
        begin = builder.bitcast(builder.gep(matrix.data, [builder.mul(arguments[1], size)]), byte)
        number, word = ir.IntType(64), ir.IntType(32)
        num_bytes = builder.mul(builder.mul(arguments[2], size), number(kind.dtype.bitwidth // 8))
        kinds = ir.FunctionType(ir.VoidType(), [byte, word, word, word])
        fetch = cgutils.get_or_insert_function(builder.module, kinds, "llvm.prefetch.p0")
        with cgutils.for_range_slice(builder, number(0), num_bytes, number(_LINE), number) as (offset, _):
            builder.call(fetch, [builder.gep(begin, [offset]), word(0), word(3), word(1)])
        return context.get_dummy_value()

    return types.void(array, types.int64, types.int64), generate


@_intrinsic
def _pointer(context: object, address: types.Type, like: types.Type) -> Codegen:
    kind: Any = like

    def generate(
        context: BaseContext, builder: ir.IRBuilder, signature: Signature, arguments: Values
    ) -> Value:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(kind.dtype)(types.int64, like), generate


@inner
def numbers_at(address: int, count: int, like: Array) -> Array:
    """The ``count`` numbers of an array's type at an address of memory, which must hold them."""
    return carray(_pointer(address, like), count)


# with sums in any order, what is added and taken away for rounding would vanish
@_njit(error_model="numpy", forceinline=True, fastmath={"contract"})
def exp(given: np.float32) -> np.float32:
    """``e^x`` to 2 units in the last place; 0 below ``e^-87`` and ``e^88`` above that (Cephes' polynomial)."""
    x = _LEAST if given < _LEAST else given
    x = _MOST if x > _MOST else x
    shifted = x * LOG2_E + _ROUND
    whole = shifted - _ROUND
    rest = x - whole * _LN2_HIGH - whole * _LN2_LOW
    y = np.float32(1.9875691500e-4)
    y = y * rest + np.float32(1.3981999507e-3)
    y = y * rest + np.float32(8.3334519073e-3)
    y = y * rest + np.float32(4.1665795894e-2)
    y = y * rest + np.float32(1.6666665459e-1)
    y = y * rest + np.float32(5.0000001201e-1)
    y = y * rest * rest + rest + np.float32(1.0)
    y *= np.int32((np.float32(shifted).view(np.int32) << np.int32(23)) + np.int32(0x3F800000)).view(
        np.float32
    )
    return np.float32(0) if given < _LEAST else y


_NO_LESS = np.float32(-126)


@_njit(error_model="numpy", forceinline=True, fastmath={"contract"})
def power_of_two(given: np.float32) -> np.float32:
    """``2^x`` of ``x <= 0`` to within 3e-6 of itself, finer than bfloat16; 0 below ``2^-126``."""
    x = _NO_LESS if given < _NO_LESS else given
    shifted = x + _ROUND
    rest = x - (shifted - _ROUND)
    y = np.float32(0.009570102207362652)
    y = y * rest + np.float32(0.05591786280274391)
    y = y * rest + np.float32(0.240247443318367)
    y = y * rest + np.float32(0.6931217908859253)
    y = y * rest + np.float32(0.9999992847442627)
    whole = np.float32(shifted).view(np.int32) << np.int32(23)
    y = np.int32(np.float32(y).view(np.int32) + whole).view(np.float32)
    return np.float32(0) if given < _NO_LESS else y


MAX_LANES = 16
"""Numbers that `largest` compares at once."""


@inner
def largest(numbers: Array, length: int, lanes: Array) -> np.float32:
    """The largest of the first numbers of an array; what is no number is passed over.

    Args:
        numbers: Float32.
        length: How many.
        lanes: Room for `MAX_LANES` numbers: a maximum in one would be one comparison after another.
    """
    whole = length // MAX_LANES * MAX_LANES
    lanes[:] = -np.inf
    for first in range(0, whole, MAX_LANES):
        for i in range(MAX_LANES):
            lanes[i] = numbers[first + i] if numbers[first + i] > lanes[i] else lanes[i]
    for i in range(length - whole):
        lanes[i] = numbers[whole + i] if numbers[whole + i] > lanes[i] else lanes[i]
    return lanes.max()

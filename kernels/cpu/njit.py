"""The numba decorator of every file of loops, and views of memory by its address.

A tensor as an address (`data_ptr()`) costs a call a twentieth of what it costs as an array.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numba
import numpy as np
from numba.core import cgutils, types as numba_types
from numba.extending import intrinsic

from ..features import (
    BASE,
    COLUMN,
    DIM,
    FIELDS,
    MEAN,
    ROWS,
)
from .vectors import FORM

# numba keeps compiled code by the name of its function and sees changes of that function's file only: whoever changes
# what stands below raises the first number, so that what was kept is compiled anew
_FORM = "_".join(map(str, (2, FORM, BASE, COLUMN, DIM, FIELDS, MEAN, ROWS)))

# to type checkers these are functions of fewer arguments, and types without voidptr
_intrinsic: Any = intrinsic
_types: Any = numba_types
_carray: Any = numba.carray

# keep compiled code alive whose entry points files of loops hold
_dispatchers: list[Any] = []


def compiled(*signature: Any, inline: bool = False) -> Callable[[Any], Any]:
    """numba.njit without the GIL. With a signature a function for Python, compiled when it is first called and kept on
    disk where that can be written; without one a function for other loops."""
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}

    def decorate(function: Any) -> Any:
        if not signature:
            return numba.njit(forceinline=inline, **options)(function)
        function.__qualname__ += f"_{_FORM}"

        def first(*args: Any) -> Any:
            try:
                made = numba.njit(*signature, cache=True, **options)(function)
            except RuntimeError:
                # no place to keep it: neither beside its file nor in the home of the user can anything be written
                made = numba.njit(*signature, **options)(function)
            # past the dispatcher, which looks at the type of each argument: these are all int
            entry = next(iter(made.overloads.values())).entry_point
            _dispatchers.append(made)
            function.__globals__[function.__name__] = entry
            return entry(*args)

        return first

    return decorate


def worker(function: Any) -> Callable[[], int]:
    """Gives the address of a C function of a job's address, which threads call (threads.py); compiled when it is
    first asked for, and kept on disk where that can be written."""
    # 1: of `taken` in vectors.py
    function.__qualname__ += f"_{_FORM}_1"

    @cache
    def made() -> Any:
        kind = _types.void(_types.int64)
        try:
            return numba.cfunc(kind, cache=True, error_model="numpy")(function)
        except RuntimeError:
            # no place to keep it: neither beside its file nor in the home of the user can anything be written
            return numba.cfunc(kind, error_model="numpy")(function)

    return lambda: made().address


@_intrinsic
def pointer(typing: Any, address: Any) -> Any:
    """An address as a pointer."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.ir.IntType(8).as_pointer())

    return _types.voidptr(_types.int64), generate


@_intrinsic
def memcpy(typing: Any, to: Any, source: Any, nbytes: Any) -> Any:
    """Copy bytes from one address to another."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        byte = cgutils.ir.IntType(8).as_pointer()
        to, source = (builder.inttoptr(arg, byte) for arg in args[:2])
        cgutils.raw_memcpy(builder, to, source, args[2], 1)
        return context.get_dummy_value()

    return _types.void(_types.int64, _types.int64, _types.int64), generate


@compiled(inline=True)
def i8(address: int, n: int) -> Any:
    """n int64 at an address."""
    return _carray(pointer(address), (n,), np.int64)


@compiled(inline=True)
def i4(address: int, n: int) -> Any:
    """n int32 at an address."""
    return _carray(pointer(address), (n,), np.int32)


@compiled(inline=True)
def f4(address: int, n: int) -> Any:
    """n fp32 at an address."""
    return _carray(pointer(address), (n,), np.float32)


@compiled(inline=True)
def u1(address: int, n: int) -> Any:
    """n bytes at an address."""
    return _carray(pointer(address), (n,), np.uint8)


@_intrinsic
def float_of(typing: Any, bits: Any) -> Any:
    """The fp32 number of these bits."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], cgutils.ir.FloatType())

    return _types.float32(_types.int32), generate


@_intrinsic
def bits_of(typing: Any, x: Any) -> Any:
    """The bits of an fp32 number."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], cgutils.ir.IntType(32))

    return _types.int32(_types.float32), generate


@compiled(inline=True)
def half_value(bits: int) -> Any:
    """The value of an fp16 number."""
    # exponent and mantissa in the places of fp32's, whose exponent counts from 112 more; then infinities and NaN
    value = float_of(np.int32((bits & 0x7FFF) << 13)) * np.float32(5.192296858534828e33)
    special = float_of(np.int32(0x7F800000 | ((bits & 0x3FF) << 13)))
    value = special if (bits & 0x7C00) == 0x7C00 else value
    return -value if bits & 0x8000 else value


@_intrinsic
def prefetch(typing: Any, address: Any) -> Any:
    """Ask for the line of memory at an address, which need not be there."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        ir = cgutils.ir
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        function = builder.module.declare_intrinsic(
            "llvm.prefetch", [byte], ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        )
        read, keep, data = (ir.Constant(number, n) for n in (0, 3, 1))
        builder.call(function, [builder.inttoptr(args[0], byte), read, keep, data])
        return context.get_dummy_value()

    return _types.void(_types.int64), generate

"""The numba decorator of every file of loops, and views of memory by its address.

A tensor as an address (`data_ptr()`) costs a call a twentieth of what it costs as an array. Compiled code is kept on
disk, where that can be written, and loads by itself: a process that compiles nothing does not load numba's compiler.
What cannot be loaded or kept costs time alone: the loop is compiled, or compiled anew by the next process.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from typing import Any

import numba
import numpy as np
from numba.core import cgutils, sigutils, types as numba_types
from numba.core.caching import CompileResultCacheImpl, FunctionCache
from numba.core.ccallback import CFunc
from numba.core.runtime import rtsys
from numba.extending import intrinsic

from ..features import (
    BASE,
    COLUMN,
    DIM,
    FIELDS,
    MEAN,
    ROWS,
)
from ..numba_loops import line
from .vectors import FORM

# numba keeps compiled code by the name of its function and sees changes of that function's file only: whoever changes
# what stands below raises the first number, so that what was kept is compiled anew
_FORM = "_".join(map(str, (3, FORM, BASE, COLUMN, DIM, FIELDS, MEAN, ROWS)))

# to type checkers these are functions of fewer arguments, and types without voidptr
_intrinsic: Any = intrinsic
_types: Any = numba_types
_carray: Any = numba.carray

_OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy"}

# keep compiled code alive whose entry points files of loops hold
_dispatchers: list[Any] = []


class _CompiledLoop(CompileResultCacheImpl):  # type: ignore[misc]
    """What is kept of a compiled loop: its code, without numba's own modules."""

    def reduce(self, cres: Any) -> tuple[Any, ...]:
        # last: the environments of functions of numba that were compiled in. Exceptions in them would read these, and
        # loops raise none; to load one imports the module that it is of
        return (*super().reduce(cres)[:-1], ())


class _LoopCache(FunctionCache):  # type: ignore[misc]
    """Compiled loops on disk, which load without what compiling needs."""

    _impl_class = _CompiledLoop

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        # numba would load here all that it can compile, scipy among it, in 0.4 s; a compilation does so by itself
        rtsys.initialize(target_context)
        result = None
        try:
            with self._guard_against_spurious_io_errors():
                result = self._load_overload(sig, target_context)
        except Exception:
            # damaged, another user's, or no folder any more. Saving reads the index too, so that begins anew
            with suppress(Exception):
                self.flush()
        if result is None:
            say_that_loops_compile(self.cache_path)
        return result

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except Exception as error:
            # the text of an OSError has the name of a file that each loop has of its own
            _say_that_loops_are_not_kept(self.cache_path, getattr(error, "strerror", None) or line(error))


@cache
def say_that_loops_compile(place: str) -> None:
    """Log, once a process and folder, that loops are compiled, which the first calls on a new machine wait for."""
    logging.getLogger("shardwise").warning(
        "shardwise: compiling its loops for this CPU, seconds each, once: kept in %s (SHARDWISE_NUMBA=0 runs on torch)",
        place,
    )


@cache
def _say_that_loops_are_not_kept(place: str, error: str) -> None:
    """Log, once a process, folder and error, that other processes have to compile the loops again."""
    logging.getLogger("shardwise").warning(
        "shardwise: compiled loops could not be kept in %s (export NUMBA_CACHE_DIR=<a folder>): %s", place, error
    )


def _keep(made: Any, function: Any) -> Any:
    """Have a dispatcher or C function of numba keep its code on disk; in memory where neither beside its file nor in
    the home of the user can anything be written."""
    try:
        made._cache = _LoopCache(function)
    except RuntimeError:
        say_that_loops_compile("memory")
    return made


def compiled(*signature: Any, inline: bool = False) -> Callable[[Any], Any]:
    """numba.njit without the GIL. With a signature a function for Python, compiled when it is first called and kept;
    without one a function for other loops."""

    def decorate(function: Any) -> Any:
        if not signature:
            return numba.njit(forceinline=inline, **_OPTIONS)(function)
        function.__qualname__ += f"_{_FORM}"

        def first(*args: Any) -> Any:
            made = _keep(numba.njit(**_OPTIONS)(function), function)
            # past the dispatcher, which looks at the type of each argument: these are all int
            entry = made.compile(*signature)
            _dispatchers.append(made)
            function.__globals__[function.__name__] = entry
            return entry(*args)

        return first

    return decorate


def compiled_by_types(function: Any) -> Any:
    """numba.njit without the GIL of a function for Python, compiled for the types of each call's arguments and kept."""
    return _keep(numba.njit(**_OPTIONS)(function), function)


def c_function(function: Any) -> int:
    """The address of a C function of a job's address, which threads call (threads.py); compiled now, and kept."""
    signature = sigutils.normalize_signature(_types.void(_types.int64))
    made = _keep(CFunc(function, signature, {}, {"error_model": "numpy"}), function)
    made.compile()
    _dispatchers.append(made)
    return int(made.address)


def worker(function: Any) -> Callable[[], int]:
    """Gives the address of such a C function, which is compiled when it is first asked for."""
    # 1: of `taken` in vectors.py
    function.__qualname__ += f"_{_FORM}_1"
    return cache(partial(c_function, function))


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

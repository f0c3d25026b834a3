"""Vector parts of the CPU's loops: prefetched rows, sums of rows that stay in registers, a counter for threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numba
from numba import float32, int64
from numba.core import cgutils, types as numba_types
from numba.extending import intrinsic, models, register_model

# numba keeps compiled code by the name of its function and sees changes of that function's file only: whoever changes
# what stands below raises this, so that what was kept is compiled anew
FORM = 1

AHEAD = 16  # rows whose memory is asked for before they are needed
LINE = 16  # fp32 in a cache line
LANES = 16  # fp32 of a vector
VECTORS = 4  # vectors of sums that stay in registers

# to type checkers these are functions of fewer arguments, and types without void
_intrinsic: Any = intrinsic
_types: Any = numba_types
_models: Any = models
_ir: Any = cgutils.ir


def compiled(**options: Any) -> Callable[[Any], Any]:
    """numba.njit for other loops, which is compiled where it is called."""
    # LLVM takes these for too long to inline, and a call costs more than a row
    return numba.njit(nogil=True, error_model="numpy", forceinline=True, **options)  # type: ignore[no-any-return]


def called(function: Any) -> Any:
    """numba.njit for what is long and rarely called: compiled once for all loops of this file that call it."""
    return numba.njit(nogil=True, error_model="numpy")(function)


@_intrinsic
def taken(typing: Any, address: Any, place: Any) -> Any:
    """The number at a place of a job, which becomes one more: no two threads see the same."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        counter = builder.inttoptr(args[0], _ir.IntType(64).as_pointer())
        counter = builder.gep(counter, [args[1]])
        return builder.atomic_rmw("add", counter, _ir.Constant(_ir.IntType(64), 1), "acq_rel")

    return int64(int64, int64), generate


def _prefetches(writes: int) -> Any:
    @_intrinsic
    def ask(typing: Any, array: Any, at: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            data = context.make_array(signature.args[0])(context, builder, args[0]).data
            _ask(builder, builder.gep(data, [args[1]]), writes)
            return context.get_dummy_value()

        return _types.void(array, _types.int64), generate

    return ask


def _ask(builder: Any, pointer: Any, writes: int) -> None:
    byte, number = _ir.IntType(8).as_pointer(), _ir.IntType(32)
    call = builder.module.declare_intrinsic(
        "llvm.prefetch", [byte], _ir.FunctionType(_ir.VoidType(), [byte, number, number, number])
    )
    # to read or to write, to keep in all caches, data
    hints = [_ir.Constant(number, value) for value in (writes, 3, 1)]
    builder.call(call, [builder.bitcast(pointer, byte), *hints])


prefetch_read, prefetch = _prefetches(0), _prefetches(1)


class Lanes(_types.Type):  # type: ignore[misc]
    """So many fp32 side by side: a vector of LLVM, which lies in registers."""

    def __init__(self, count: int) -> None:
        self.count = count
        super().__init__(name=f"lanes{count}")


@register_model(Lanes)
class _LanesModel(_models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, of: Any) -> None:
        super().__init__(manager, of, _ir.VectorType(_ir.FloatType(), of.count))


def zeros_of(count: int) -> Any:
    """An intrinsic that gives so many zeros."""

    @_intrinsic
    def zeros(typing: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return _ir.Constant(context.get_value_type(signature.return_type), None)

        return Lanes(count)(), generate

    return zeros


def shuffled(builder: Any, x: Any, lanes: Iterable[int]) -> Any:
    """These lanes of a vector."""
    where = [_ir.Constant(_ir.IntType(32), lane) for lane in lanes]
    places = _ir.Constant(_ir.VectorType(_ir.IntType(32), len(where)), where)
    return builder.shuffle_vector(x, _ir.Constant(x.type, _ir.Undefined), places)


def spread_lanes(builder: Any, count: int, x: Any) -> Any:
    """The same fp32 in every lane."""
    vector = _ir.VectorType(_ir.FloatType(), count)
    first_lane = builder.insert_element(_ir.Constant(vector, _ir.Undefined), x, _ir.Constant(_ir.IntType(32), 0))
    return shuffled(builder, first_lane, [0] * count)


def _row_adders(vectors: int) -> Any:
    """Sums over some rows of as many columns as so many vectors have, which stay in registers meanwhile."""

    @_intrinsic
    def add_rows(typing: Any, at: Any, n: Any, gradient: Any, factor: Any, total: Any) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            at, n, gradient, factor, total = args
            i64, f32 = _ir.IntType(64), _ir.FloatType()
            vector = _ir.VectorType(f32, LANES)
            rounded = cgutils.get_or_insert_function(
                builder.module, _ir.FunctionType(vector, [vector] * 3), f"llvm.fma.v{LANES}f32"
            )
            at, factor = (builder.inttoptr(p, t.as_pointer()) for p, t in ((at, i64), (factor, f32)))
            gradient, total = (builder.inttoptr(p, f32.as_pointer()) for p in (gradient, total))
            lanes = [_ir.Constant(i64, LANES * k) for k in range(vectors)]
            zero, none = _ir.Constant(i64, 0), _ir.Constant(vector, None)
            unset = _ir.Constant(vector, _ir.Undefined)
            scaled = builder.icmp_unsigned("!=", builder.ptrtoint(factor, i64), zero)

            def loop(scales: bool) -> None:
                # at least one row is there
                before, body, end = builder.block, builder.append_basic_block(), builder.append_basic_block()
                builder.branch(body)
                builder.position_at_end(body)
                i = builder.phi(i64)
                i.add_incoming(zero, before)
                sums = [builder.phi(vector) for _ in lanes]
                row = builder.gep(gradient, [builder.load(builder.gep(at, [i]))])
                ahead = builder.gep(at, [builder.add(i, _ir.Constant(i64, AHEAD))])
                ahead = builder.gep(gradient, [builder.load(ahead)])
                scale = unset
                if scales:
                    scale = builder.insert_element(
                        unset, builder.load(builder.gep(factor, [i])), _ir.Constant(_ir.IntType(32), 0)
                    )
                    scale = builder.shuffle_vector(
                        scale, unset, _ir.Constant(_ir.VectorType(_ir.IntType(32), LANES), None)
                    )
                for lane, old in zip(lanes, sums, strict=True):
                    old.add_incoming(none, before)
                    x = builder.load(builder.bitcast(builder.gep(row, [lane]), vector.as_pointer()), align=4)
                    old.add_incoming(builder.call(rounded, [scale, x, old]) if scales else builder.fadd(old, x), body)
                    _ask(builder, builder.gep(ahead, [lane]), 0)
                following = builder.add(i, _ir.Constant(i64, 1))
                i.add_incoming(following, body)
                builder.cbranch(builder.icmp_signed("<", following, n), body, end)
                builder.position_at_end(end)
                for lane, old in zip(lanes, sums, strict=True):
                    place = builder.bitcast(builder.gep(total, [lane]), vector.as_pointer())
                    builder.store(old.incomings[1][0], place, align=4)

            with builder.if_else(scaled) as (then, otherwise):
                with then:
                    loop(True)
                with otherwise:
                    loop(False)
            return context.get_dummy_value()

        return _types.void(int64, int64, int64, int64, int64), generate

    return add_rows


add_wide, add_narrow = _row_adders(VECTORS), _row_adders(1)


@_intrinsic
def fma(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """x * y + z in fp32, rounded once, as the torch path and the kernels have it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return _types.float32(_types.float32, _types.float32, _types.float32), generate


@compiled()
def prefetch_row(array: Any, at: int, dim: int) -> None:
    for d in range(0, dim, LINE):
        prefetch(array, at + d)


# numba compiles what an assignment of slices says of unequal shapes for seconds: rows are copied by loops
@compiled()
def begin_row(total: Any, row: Any) -> None:
    for d in range(total.shape[0]):
        total[d] = float32(0) + row[d]


@compiled()
def add_row(total: Any, row: Any) -> None:
    for d in range(total.shape[0]):
        total[d] += row[d]

"""PTX's arithmetic: an opcode as a function of numpy arrays, one element a thread.

`operation("fma.rn.f32")` gives the function with the types of its operands. Rounding is that of the PTX ISA: once for
`fma`, once for each operation of 16 bits, flushed where `.ftz` says so. Instructions that the ISA leaves approximate
(`div.full`, `div.approx`, `rcp.approx`, `sqrt.approx`, `rsqrt`, `ex2`, `lg2`, `sin`, `cos`, `tanh`) are rounded
correctly, or within one unit in the last place for the last five: on a GPU they may differ by a few units. A NaN is a
NaN: its bits are not those of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from .conversions import conversion
from .rounding import MODES, NARROW, Array, flush, fma_f32, fma_f64, odd_sum, widen_bf16
from .types import DTYPES, FLOATS, UNSIGNED, Function, Operation

_WIDER = {"s16": "s32", "u16": "u32", "s32": "s64", "u32": "u64"}


@lru_cache(None)
def operation(opcode: str, operands: int = 3) -> Operation | None:
    """The function of `opcode` with this many operands, or None where it is no arithmetic.

    Raises ValueError for a variant of an arithmetic opcode that is not supported.
    """
    parts = opcode.split(".")
    if parts[0] == "cvt":
        return conversion(opcode)
    build = _FAMILIES.get(parts[0])
    return build(parts[0], parts[1:-1], parts[-1], operands) if build else None


def _require(opcode: str, modifiers: list[str], allowed: set[str]) -> None:
    if unknown := set(modifiers) - allowed:
        raise ValueError(f"{opcode} with .{' .'.join(sorted(unknown))} is not supported")


def _of_type(function: Function, kind: str) -> Function:
    """The function for a packed type from that for its half, else itself."""
    if not kind.endswith("x2"):
        return function
    half, whole = DTYPES[kind[:-2]], DTYPES[kind]

    def packed(*values: Array) -> Array:
        result = function(*(np.ascontiguousarray(value).view(half) for value in values))
        return np.ascontiguousarray(result).view(whole)

    return packed


def _with_modifiers(function: Function, kind: str, modifiers: list[str]) -> Function:
    """Flushing of subnormals around a float function, saturation after it."""
    flushes, saturates = "ftz" in modifiers and kind in ("f32", "f16"), "sat" in modifiers
    if not flushes and not saturates:
        return function

    def modified(*values: Array) -> Any:
        result: Array = function(*(flush(value) if flushes else value for value in values))
        result = flush(result) if flushes else result
        # NaN saturates to zero
        unit, zero = result.dtype.type(1), result.dtype.type(0)
        return np.where(result > 0, np.minimum(result, unit), zero) if saturates else result

    return modified


# arithmetic of two or three floats: exactly enough in a wider format, then rounded once
def _rounded(function: Function, kind: str, mode: str) -> Function:
    """`function` of float64, whose result is exact or odd, for values of type `kind`."""
    narrow = NARROW[kind]
    widen = widen_bf16 if kind == "bf16" else (lambda x: x)

    def rounded(*values: Array) -> Array:
        return narrow(function(*(widen(value).astype(np.float64) for value in values)), mode)

    return rounded


_EXACT: dict[str, Function] = {
    "add": odd_sum,
    "sub": lambda a, b: odd_sum(a, -b),
    "mul": lambda a, b: a * b,
    "fma": lambda a, b, c: odd_sum(a * b, c),
}
# float32 and float64 round to the nearest as numpy does, and so does float16 by way of float32
_NEAREST: dict[str, Function] = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _float_function(name: str, kind: str, mode: str) -> Function:
    if mode == "rn" and name in _NEAREST and kind != "bf16":
        return _NEAREST[name]
    if mode == "rn" and name == "fma" and kind in ("f32", "f64"):
        return fma_f32 if kind == "f32" else fma_f64
    if kind == "f64":
        raise ValueError(f"{name}.{mode}.f64 is not supported")
    return _rounded(_EXACT[name], kind, mode)


def _arithmetic(name: str, modifiers: list[str], kind: str, _: int) -> Operation:
    """add, sub, mul, mad, fma."""
    count = 3 if name in ("fma", "mad") else 2
    half = kind.removesuffix("x2")
    if "f32" in modifiers:
        return _mixed(name, [m for m in modifiers if m != "f32"], kind)
    if half in FLOATS:
        _require(name, modifiers, {*MODES, "ftz", "sat", "relu"})
        mode = next((m for m in modifiers if m in MODES), "rn")
        function = _float_function("fma" if name == "mad" else name, half, mode)
        if ("sat" in modifiers and half == "bf16") or "relu" in modifiers:
            raise ValueError(f"{name} of {kind} with .sat or .relu is not supported")
        return Operation(_of_type(_with_modifiers(function, half, modifiers), kind), (kind,) * count, (kind,))
    if name in ("add", "sub"):
        _require(name, modifiers, {"sat"} if kind == "s32" else set())
        plain: Function = np.add if name == "add" else np.subtract

        def saturated(a: Array, b: Array) -> Any:
            return plain(a.astype(np.int64), b).clip(-(2**31), 2**31 - 1).astype(np.int32)

        return Operation(_of_type(saturated if "sat" in modifiers else plain, kind), (kind, kind), (kind,))
    _require(name, modifiers, {"lo", "hi", "wide"})
    inputs: tuple[str, ...] = (kind, kind)
    if "wide" in modifiers:
        result = _WIDER[kind]
        dtype = DTYPES[result]

        def product(a: Array, b: Array) -> Any:
            return a.astype(dtype) * b.astype(dtype)

    else:
        result = kind
        product = _high if "hi" in modifiers else np.multiply  # type: ignore[assignment]
    if name == "mul":
        return Operation(product, inputs, (result,))
    return Operation(lambda a, b, c: product(a, b) + c, (*inputs, result), (result,))


def _mixed(name: str, modifiers: list[str], kind: str) -> Operation:
    """add, sub, fma of operands of 16 bits and a last one of f32."""
    _require(name, modifiers, {"rn"})
    plain = _float_function(name, "f32", "rn")
    count = 2 if name == "fma" else 1

    def function(*values: Array) -> Any:
        narrow = (widen_bf16(value) if kind == "bf16" else value.astype(np.float32) for value in values[:-1])
        return plain(*narrow, values[-1])

    return Operation(function, (kind,) * count + ("f32",), ("f32",))


def _high(a: Array, b: Array) -> Any:
    """The upper half of the whole product."""
    bits = a.dtype.itemsize * 8
    if bits < 64:
        wide = np.int64 if a.dtype.kind == "i" else np.uint64
        return ((a.astype(wide) * b.astype(wide)) >> wide(bits)).astype(a.dtype)
    x, y, low, shift = a.view(np.uint64), b.view(np.uint64), np.uint64(2**32 - 1), np.uint64(32)
    x1, x0, y1, y0 = x >> shift, x & low, y >> shift, y & low
    middle = x1 * y0 + ((x0 * y0) >> shift)
    other = x0 * y1 + (middle & low)
    high = x1 * y1 + (middle >> shift) + (other >> shift)
    if a.dtype.kind == "i":
        high = high - np.where(a < 0, y, np.uint64(0)) - np.where(b < 0, x, np.uint64(0))
    return high.view(a.dtype)


def _division(name: str, modifiers: list[str], kind: str, _: int) -> Operation:
    """div, rem."""
    if kind in FLOATS:
        _require(name, modifiers, {"rn", "full", "approx", "ftz"})
        return Operation(_with_modifiers(np.divide, kind, modifiers), (kind, kind), (kind,))
    _require(name, modifiers, set())

    def divide(a: Array, b: Array) -> Any:
        unsigned = UNSIGNED[a.dtype.itemsize]
        x, y = np.abs(a).view(unsigned), np.abs(b).view(unsigned)
        # what a division by zero gives is unspecified
        quotient = x // np.where(y == 0, unsigned(1), y)
        result = np.where((a < 0) != (b < 0), unsigned(0) - quotient, quotient)
        return np.where(b == 0, ~unsigned(0), result).astype(unsigned).view(a.dtype)

    if name == "div":
        return Operation(divide, (kind, kind), (kind,))
    return Operation(lambda a, b: (a - divide(a, b) * b).astype(a.dtype), (kind, kind), (kind,))


def _extreme(name: str, modifiers: list[str], kind: str, _: int) -> Operation:
    """min, max: of a number and a NaN the number, unless `.NaN`; the zeros are ordered."""
    half = kind.removesuffix("x2")
    if half not in FLOATS:
        _require(name, modifiers, set())
        return Operation(_of_type(np.minimum if name == "min" else np.maximum, kind), (kind, kind), (kind,))
    _require(name, modifiers, {"NaN", "ftz"})
    functions: dict[str, Function] = {"min": np.fmin, "max": np.fmax, "min.NaN": np.minimum, "max.NaN": np.maximum}
    choose = functions[f"{name}.NaN" if "NaN" in modifiers else name]
    bitwise = np.bitwise_or if name == "min" else np.bitwise_and

    def ordered(a: Array, b: Array) -> Any:
        bits = UNSIGNED[a.dtype.itemsize]
        x, y = np.ascontiguousarray(a).view(bits), np.ascontiguousarray(b).view(bits)
        return np.where(a == b, bitwise(x, y), choose(a, b).view(bits)).view(a.dtype)

    def of_bf16(a: Array, b: Array) -> Any:
        return (ordered(widen_bf16(a), widen_bf16(b)).view(np.uint32) >> np.uint32(16)).astype(np.uint16)

    function = _with_modifiers(of_bf16 if half == "bf16" else ordered, half, modifiers)
    return Operation(_of_type(function, kind), (kind, kind), (kind,))


def _sign(name: str, modifiers: list[str], kind: str, _: int) -> Operation:
    """neg, abs."""
    half = kind.removesuffix("x2")
    _require(name, modifiers, {"ftz"})
    if half == "bf16":
        mask = np.uint16(0x8000)
        function: Function = (lambda a: a ^ mask) if name == "neg" else (lambda a: a & ~mask)
    else:
        function = np.negative if name == "neg" else np.abs
    return Operation(_of_type(_with_modifiers(function, half, modifiers), kind), (kind,), (kind,))


def _copysign(name: str, modifiers: list[str], kind: str, _: int) -> Operation:
    """The sign of the first operand on the second."""
    return Operation(lambda a, b: np.copysign(b, a), (kind, kind), (kind,))


def _bitwise(name: str, modifiers: list[str], kind: str, _: int) -> Operation:
    """and, or, xor, not, cnot."""
    _require(name, modifiers, set())
    functions: dict[str, Function] = {
        "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "not": np.invert,
        "cnot": lambda a: (a == 0).astype(a.dtype),
    }  # fmt: skip
    return Operation(functions[name], (kind,) * (1 if name in ("not", "cnot") else 2), (kind,))


def _shift(name: str, modifiers: list[str], kind: str, _: int) -> Operation:
    """shl, shr: past the width all bits are shifted out."""
    _require(name, modifiers, set())
    width = DTYPES[kind](0).itemsize * 8

    def function(a: Array, count: Array) -> Array:
        bounded = np.minimum(count, np.uint32(width - 1)).astype(a.dtype)
        shifted = a << bounded if name == "shl" else a >> bounded
        filled = np.where(a < 0, a.dtype.type(-1), a.dtype.type(0)) if kind[0] == "s" and name == "shr" else 0
        return np.where(count >= width, filled, shifted).astype(a.dtype)

    return Operation(function, (kind, "u32"), (kind,))


def _unary_float(name: str, modifiers: list[str], kind: str, _: int) -> Operation:
    """sqrt, rsqrt, rcp, ex2, lg2, sin, cos, tanh."""
    _require(name, modifiers, {"rn", "approx", "ftz"})
    functions: dict[str, Function] = {
        "sqrt": np.sqrt, "rsqrt": lambda a: 1 / np.sqrt(a), "rcp": lambda a: 1 / a, "ex2": np.exp2, "lg2": np.log2,
        "sin": np.sin, "cos": np.cos, "tanh": np.tanh,
    }  # fmt: skip
    exact = functions[name]
    half = kind.removesuffix("x2")
    if half == "f64":
        return Operation(exact, (kind,), (kind,))
    function = _rounded(exact, half, "rn")
    return Operation(_of_type(_with_modifiers(function, half, modifiers), kind), (kind,), (kind,))


_COMPARE: dict[str, Function] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "lo": np.less, "ls": np.less_equal, "hi": np.greater, "hs": np.greater_equal,
}  # fmt: skip
_BOOLEAN: dict[str, Function] = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor}


def _comparison(name: str, modifiers: list[str], kind: str, operands: int) -> Operation:
    """setp: a comparison and its negation, each combined with a third operand where there is one."""
    compare = modifiers[0]
    boolean = next((m for m in modifiers[1:] if m in _BOOLEAN), None)
    _require(name, modifiers[1:], {*_BOOLEAN, "ftz"})
    if kind.endswith("x2") or (boolean is None) != (operands == 3):
        raise ValueError(f"setp of {kind} with {operands} operands is not supported")
    widen = widen_bf16 if kind == "bf16" else (flush if "ftz" in modifiers and kind != "f64" else (lambda x: x))
    unordered = kind in FLOATS and compare[-1] == "u" and compare not in _COMPARE

    def function(a: Array, b: Array, c: Array | None = None) -> tuple[Array, Array]:
        a, b = widen(a), widen(b)
        if compare in ("num", "nan"):
            result = np.isnan(a) | np.isnan(b)
            result = ~result if compare == "num" else result
        elif unordered:
            result = _COMPARE[compare[:-1]](a, b) | np.isnan(a) | np.isnan(b)
        elif compare == "ne" and kind in FLOATS:
            # ordered: false with a NaN
            result = (a < b) | (a > b)
        else:
            result = _COMPARE[compare](a, b)
        if boolean is None or c is None:
            return result, ~result
        return _BOOLEAN[boolean](result, c), _BOOLEAN[boolean](~result, c)

    inputs = (kind, kind) if boolean is None else (kind, kind, "pred")
    return Operation(function, inputs, ("pred", "pred"))


def _selection(name: str, modifiers: list[str], kind: str, _: int) -> Operation:
    """selp, slct."""
    if name == "selp":
        return Operation(lambda a, b, p: np.where(p, a, b), (kind, kind, "pred"), (kind,))
    value = next(m for m in modifiers if m != "ftz")
    return Operation(lambda a, b, c: np.where(c >= 0, a, b), (value, value, kind), (value,))


def _bits(name: str, modifiers: list[str], kind: str, _: int) -> Operation:
    """popc, clz, brev, bfind."""
    width = DTYPES[kind](0).itemsize * 8

    def spread(a: Array) -> Array:
        """[T, width] bits, the lowest first."""
        return np.unpackbits(np.ascontiguousarray(a).view(np.uint8).reshape(len(a), -1), axis=1, bitorder="little")

    def leading(a: Array) -> Any:
        bits = spread(a)[:, ::-1]
        return np.where(bits.any(axis=1), bits.argmax(axis=1), width).astype(np.uint32)

    if name == "popc":
        return Operation(lambda a: spread(a).sum(axis=1).astype(np.uint32), (kind,), ("u32",))
    if name == "clz":
        return Operation(leading, (kind,), ("u32",))
    if name == "brev":
        return Operation(
            lambda a: np.packbits(spread(a)[:, ::-1], axis=1, bitorder="little").reshape(-1).view(a.dtype),
            (kind,), (kind,),
        )  # fmt: skip

    def find(a: Array) -> Array:
        magnitude = np.where(a < 0, ~a, a) if kind[0] == "s" else a
        zeros = leading(magnitude)
        place = np.uint32(width - 1) - zeros
        place = zeros if "shiftamt" in modifiers else place
        return np.where(zeros == width, np.uint32(0xFFFFFFFF), place).astype(np.uint32)

    return Operation(find, (kind,), ("u32",))


def _field(name: str, modifiers: list[str], kind: str, _: int) -> Operation:
    """bfe, bfi."""
    dtype = DTYPES[kind]
    unsigned, width = UNSIGNED[dtype(0).itemsize], dtype(0).itemsize * 8

    def mask(length: Array) -> Any:
        short = np.minimum(length, np.uint32(width - 1)).astype(unsigned)
        return np.where(length >= width, ~unsigned(0), (unsigned(1) << short) - unsigned(1)).astype(unsigned)

    def shifted(a: Array, by: Array, left: bool) -> Any:
        short = np.minimum(by, np.uint32(width - 1)).astype(unsigned)
        return np.where(by >= width, unsigned(0), a << short if left else a >> short).astype(unsigned)

    def extract(a: Array, position: Array, length: Array) -> Any:
        position, length = position & np.uint32(255), length & np.uint32(255)
        value = shifted(a.view(unsigned), position, False) & mask(length)
        if kind[0] == "s":
            top = np.minimum(position + length - np.uint32(1), np.uint32(width - 1)).astype(unsigned)
            negative = ((a.view(unsigned) >> top) & unsigned(1) != 0) & (length != 0)
            # bits that the field takes from beyond the top are copies of the sign too
            kept = np.minimum(length, np.where(position < width, np.uint32(width) - position, 0)).astype(np.uint32)
            value = np.where(negative, (value & mask(kept)) | ~mask(kept), value)
        return value.astype(unsigned).view(dtype)

    def insert(a: Array, b: Array, position: Array, length: Array) -> Any:
        position, length = position & np.uint32(255), length & np.uint32(255)
        where = shifted(mask(length), position, True)
        return (shifted(a, position, True) & where) | (b & ~where)

    if name == "bfe":
        return Operation(extract, (kind, "u32", "u32"), (kind,))
    return Operation(insert, (kind, kind, "u32", "u32"), (kind,))


def _permutation(name: str, modifiers: list[str], kind: str, _: int) -> Operation:
    """prmt: any four bytes of two words, or their signs; the modes choose by the last two bits of the third operand."""
    mode = kind if kind != "b32" else ""
    selected = {
        "f4e": [(0, 1, 2, 3), (1, 2, 3, 4), (2, 3, 4, 5), (3, 4, 5, 6)],
        "b4e": [(0, 7, 6, 5), (1, 0, 7, 6), (2, 1, 0, 7), (3, 2, 1, 0)],
        "rc8": [(i,) * 4 for i in range(4)],
        "ecl": [(0, 1, 2, 3), (1, 1, 2, 3), (2, 2, 2, 3), (3, 3, 3, 3)],
        "ecr": [(0, 0, 0, 0), (0, 1, 1, 1), (0, 1, 2, 2), (0, 1, 2, 3)],
        "rc16": [(0, 1, 0, 1), (2, 3, 2, 3), (0, 1, 0, 1), (2, 3, 2, 3)],
    }
    tables = {name: np.array(rows) for name, rows in selected.items()}

    def function(a: Array, b: Array, c: Array) -> Array:
        data = np.stack([np.ascontiguousarray(x).view(np.uint8).reshape(-1, 4) for x in (a, b)], 1).reshape(-1, 8)
        if mode in tables:
            chosen = tables[mode][c & np.uint32(3)]
            result = np.take_along_axis(data, chosen, 1)
        else:
            chosen = (c[:, None] >> np.arange(0, 16, 4, dtype=np.uint32)) & np.uint32(15)
            result = np.take_along_axis(data, (chosen & 7).astype(np.int64), 1)
            result = np.where(chosen & 8 != 0, np.where(result & 128 != 0, 255, 0), result)
        return np.ascontiguousarray(result.astype(np.uint8)).view(np.uint32).reshape(-1)

    return Operation(function, ("b32",) * 3, ("b32",))


def _funnel(name: str, modifiers: list[str], kind: str, _: int) -> Operation:
    """shf: a word of the 64 bits `b:a`, shifted."""
    left, wrap = "l" in modifiers, "wrap" in modifiers

    def function(a: Array, b: Array, c: Array) -> Array:
        count = (c & np.uint32(31) if wrap else np.minimum(c, np.uint32(32))).astype(np.uint64)
        both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
        shifted = (both << count) >> np.uint64(32) if left else both >> count
        # a shift by all of 32 to the left leaves the lower word
        return (shifted & np.uint64(0xFFFFFFFF)).astype(np.uint32)

    return Operation(function, ("b32",) * 3, ("b32",))


def _logic(name: str, modifiers: list[str], kind: str, _: int) -> Operation:
    """lop3: the function of three bits whose table is the fourth operand."""

    def function(a: Array, b: Array, c: Array, table: Array) -> Array:
        result = np.zeros_like(a)
        for i in range(8):
            term = (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
            result |= np.where((table >> np.uint32(i)) & np.uint32(1) != 0, term, np.uint32(0))
        return result

    return Operation(function, ("b32",) * 4, ("b32",))


def _dot(name: str, modifiers: list[str], kind: str, _: int) -> Operation:
    """dp4a: four products of bytes, added to a third operand."""
    first, second = DTYPES[modifiers[-1][0] + "8"], DTYPES[kind[0] + "8"]
    result = "u32" if modifiers[-1][0] == kind[0] == "u" else "s32"

    def function(a: Array, b: Array, c: Array) -> Any:
        x, y = (np.ascontiguousarray(v).view(t).reshape(-1, 4).astype(np.int64) for v, t in ((a, first), (b, second)))
        return ((x * y).sum(axis=1) + c).astype(np.int64).astype(DTYPES[result])

    return Operation(function, ("b32", "b32", result), (result,))


def _test(name: str, modifiers: list[str], kind: str, _: int) -> Operation:
    """testp."""

    def subnormal(a: Array) -> Any:
        return (a != 0) & (np.abs(a) < np.finfo(a.dtype).tiny)

    functions: dict[str, Function] = {
        "finite": np.isfinite, "infinite": np.isinf, "number": lambda a: ~np.isnan(a), "notanumber": np.isnan,
        "subnormal": subnormal, "normal": lambda a: np.isfinite(a) & (np.abs(a) >= np.finfo(a.dtype).tiny),
    }  # fmt: skip
    return Operation(functions[modifiers[0]], (kind,), ("pred",))


def _sad(name: str, modifiers: list[str], kind: str, _: int) -> Operation:
    """c + |a - b|."""
    return Operation(lambda a, b, c: c + np.where(a < b, b - a, a - b), (kind,) * 3, (kind,))


_FAMILIES: dict[str, Callable[[str, list[str], str, int], Operation]] = {
    **dict.fromkeys(("add", "sub", "mul", "mad", "fma"), _arithmetic),
    **dict.fromkeys(("div", "rem"), _division),
    **dict.fromkeys(("min", "max"), _extreme),
    **dict.fromkeys(("neg", "abs"), _sign),
    **dict.fromkeys(("and", "or", "xor", "not", "cnot"), _bitwise),
    **dict.fromkeys(("shl", "shr"), _shift),
    **dict.fromkeys(("sqrt", "rsqrt", "rcp", "ex2", "lg2", "sin", "cos", "tanh"), _unary_float),
    **dict.fromkeys(("selp", "slct"), _selection),
    **dict.fromkeys(("popc", "clz", "brev", "bfind"), _bits),
    **dict.fromkeys(("bfe", "bfi"), _field),
    "setp": _comparison, "copysign": _copysign, "prmt": _permutation, "shf": _funnel, "lop3": _logic, "dp4a": _dot,
    "testp": _test, "sad": _sad,
}  # fmt: skip

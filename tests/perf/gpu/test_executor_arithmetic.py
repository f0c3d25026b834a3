"""Arithmetic of the executor beside another of whole numbers and fractions, on edges and random bits."""

from __future__ import annotations

import math
import operator
import struct
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from executor_ptx import compute

Array = np.ndarray[Any, Any]
COUNT = 512
# bits of the significand, least exponent, greatest
FORMATS = {"f16": (11, -14, 15), "bf16": (8, -126, 127), "f32": (24, -126, 127), "f64": (53, -1022, 1023)}
BITS: dict[str, type[Any]] = {"16": np.uint16, "32": np.uint32, "64": np.uint64}
INTEGERS = ("s16", "u16", "s32", "u32", "s64", "u64")


def dtype_of(kind: str) -> type[Any]:
    if kind == "bf16":
        return np.uint16
    return np.dtype({"s": "i", "u": "u", "b": "u", "f": "f"}[kind[0]] + str(int(kind[1:]) // 8)).type


def operands(kind: str, count: int, rng: np.random.Generator) -> list[Array]:
    """Random bits, numbers of like size, and every pair or so of edges."""
    dtype = dtype_of(kind)
    size = np.dtype(dtype).itemsize
    if kind == "pred":
        return [rng.integers(0, 2, COUNT).astype(np.uint8) for _ in range(count)]
    made = []
    for _ in range(count):
        bits = rng.integers(0, 256, (COUNT, size)).astype(np.uint8).view(f"u{size}").reshape(-1)
        if kind in FORMATS:
            near = rng.normal(size=COUNT) * 2.0 ** rng.integers(-3, 4, COUNT)
            near = (
                near.astype(dtype) if kind != "bf16" else (near.astype(np.float32).view(np.uint32) >> 16).astype(dtype)
            )
            edges = edge_bits(kind)
            chosen = rng.choice(np.array(edges, f"u{size}"), COUNT)
            which = rng.integers(0, 4, COUNT)
            bits = np.where(which == 0, bits, np.where(which == 1, chosen, near.view(f"u{size}")))
        else:
            width = 8 * size
            edges = [0, 1, 2, 31, 32, 33, 63, 64, 65, 255, 256, 2**width - 1, 2 ** (width - 1), 2 ** (width - 1) - 1]
            chosen = rng.choice(np.array(edges, f"u{size}"), COUNT)
            bits = np.where(rng.integers(0, 2, COUNT) == 0, bits, chosen)
        made.append(bits.astype(f"u{size}").view(dtype))
    return made


def edge_bits(kind: str) -> list[int]:
    precision, _, top = FORMATS[kind]
    width = {"f16": 16, "bf16": 16, "f32": 32, "f64": 64}[kind]
    infinity = ((2 * top + 1) << (precision - 1)) & ((1 << (width - 1)) - 1)
    positive = [0, 1, 2, (1 << (precision - 1)) - 1, 1 << (precision - 1), infinity - 1, infinity, infinity + 1]
    positive += [struct.unpack(">Q", struct.pack(">d", 1.0))[0]] if kind == "f64" else []
    return positive + [bits | 1 << (width - 1) for bits in positive]


def numbers(kind: str, data: Array) -> list[Any]:
    """Python's numbers."""
    if kind == "bf16":
        data = (data.astype(np.uint32) << 16).view(np.float32)
    return [float(x) for x in data] if kind in FORMATS else [int(x) for x in data]


def rounded(exact: Fraction, kind: str, mode: str, zero: float = 0.0) -> float:
    """A fraction as a float of a format; `zero` is what zero is."""
    if exact == 0:
        return zero
    precision, least, greatest = FORMATS[kind]
    sign = -1 if exact < 0 else 1
    size = abs(exact)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    exponent -= Fraction(2) ** exponent > size
    unit = Fraction(2) ** (max(exponent, least) - precision + 1)
    whole, rest = divmod(size, unit)
    up = {"rn": rest * 2 > unit or (rest * 2 == unit and whole % 2 == 1), "rz": False}
    up |= {"rm": rest > 0 and sign < 0, "rp": rest > 0 and sign > 0}
    size = (whole + up[mode]) * unit
    largest = (2 - Fraction(2) ** (1 - precision)) * Fraction(2) ** greatest
    if size > largest:
        over = mode == "rn" or (mode == "rm" and sign < 0) or (mode == "rp" and sign > 0)
        return sign * (math.inf if over else float(largest))
    return math.copysign(float(size), sign)


def exactly(function: Callable[..., Any]) -> Callable[..., float]:
    """A function of fractions as one of floats: `evaluate(kind, mode, *floats)`."""

    def evaluate(kind: str, mode: str, *values: float) -> float:
        if not all(map(math.isfinite, values)):
            return float(function(*values))
        # Python's own floats give zeros their sign
        ordinary = function(*values)
        return rounded(function(*map(Fraction, values)), kind, mode, ordinary if ordinary == 0 else 0.0)

    return evaluate


def assert_floats(kind: str, got: Array, want: list[float]) -> None:
    have = numbers(kind, got)
    wrong = [
        (i, x, y)
        for i, (x, y) in enumerate(zip(have, want, strict=True))
        if not (math.isnan(x) and math.isnan(y)) and (x != y or math.copysign(1, x) != math.copysign(1, y))
    ]
    assert not wrong, wrong[:5]


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "fma": lambda a, b, c: a * b + c,
}  # fmt: skip


@pytest.mark.parametrize("name", FUNCTIONS)
def test_sums_and_products_are_rounded_once(name: str) -> None:
    kinds = [("rn", kind) for kind in FORMATS] + [(mode, "f32") for mode in ("rz", "rm", "rp")]
    for mode, kind in kinds:
        values = operands(kind, 3 if name == "fma" else 2, np.random.default_rng(1))
        if name == "fma" and kind == "f32":
            # the exact sum lies just below the middle of two float32, in float64 it is the middle
            for data, x in zip(values, (2.0**-24 * (1 + 2.0**-23), 1 - 2.0**-23, 1 + 2.0**-23), strict=True):
                data[0] = x
        got = compute(f"{name}.{mode}.{kind}", values, dtype_of(kind))
        evaluate, rows = exactly(FUNCTIONS[name]), zip(*(numbers(kind, v) for v in values), strict=True)
        assert_floats(kind, got, [evaluate(kind, mode, *row) for row in rows])


def division(a: float, b: float) -> Any:
    if b == 0 or not math.isfinite(a) or not math.isfinite(b):
        with np.errstate(all="ignore"):
            return np.float64(a) / np.float64(b)
    return a / b


@pytest.mark.parametrize("opcode", ["div.rn.f32", "div.full.f32", "div.approx.f32", "div.rn.f64"])
def test_divisions_are_rounded_once(opcode: str) -> None:
    kind = opcode.split(".")[-1]
    a, b = operands(kind, 2, np.random.default_rng(2))
    evaluate = exactly(division)
    want = []
    for x, y in zip(numbers(kind, a), numbers(kind, b), strict=True):
        want.append(evaluate(kind, "rn", x, y) if y != 0 else float(division(x, y)))
    assert_floats(kind, compute(opcode, [a, b], dtype_of(kind)), want)


def root(x: float, kind: str) -> float:
    if not x > 0 or math.isinf(x):
        return x if x == 0 or x == math.inf else math.nan
    # enough bits of the root that only an exact one can be a tie
    scaled = Fraction(x) * 4**1200
    whole = math.isqrt(scaled.numerator // scaled.denominator)
    exact = Fraction(whole, 2**1200)
    return rounded(exact if exact * exact == Fraction(x) else exact + Fraction(1, 2**1202), kind, "rn")


@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_square_roots_are_rounded_once(kind: str) -> None:
    (a,) = operands(kind, 1, np.random.default_rng(3))
    assert_floats(kind, compute(f"sqrt.rn.{kind}", [a], dtype_of(kind)), [root(x, kind) for x in numbers(kind, a)])


def reciprocal_root(x: float) -> float:
    if x == 0:
        return math.copysign(math.inf, x)
    return math.nan if not x >= 0 else 1 / math.sqrt(x)


APPROXIMATE: dict[str, Callable[[float], float]] = {
    "ex2.approx.f32": lambda x: math.nan if math.isnan(x) else 2.0**x if x < 1024 else math.inf,
    "lg2.approx.f32": lambda x: (math.log2(x) if x else -math.inf) if x >= 0 else math.nan,
    "sin.approx.f32": lambda x: math.sin(x) if math.isfinite(x) else math.nan,
    "cos.approx.f32": lambda x: math.cos(x) if math.isfinite(x) else math.nan,
    "tanh.approx.f32": math.tanh, "rsqrt.approx.f32": reciprocal_root,
    "rcp.rn.f32": lambda x: 1 / x if x else math.copysign(math.inf, x),
    "sqrt.approx.f32": lambda x: math.sqrt(x) if x >= 0 else math.nan,
}  # fmt: skip


@pytest.mark.parametrize("opcode", APPROXIMATE)
def test_approximate_functions_are_as_good_as_float32_can_be(opcode: str) -> None:
    (a,) = operands("f32", 1, np.random.default_rng(4))
    with np.errstate(all="ignore"):
        want = np.array([APPROXIMATE[opcode](x) for x in numbers("f32", a)]).astype(np.float32)
    got = compute(opcode, [a], np.float32)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    fine = np.isfinite(want)
    np.testing.assert_array_equal(got[~fine], want[~fine])
    assert (np.abs(got[fine].astype(np.float64) - want[fine]) <= np.spacing(np.abs(want[fine]))).all()


def extreme(name: str, propagates: bool, a: float, b: float) -> float:
    if math.isnan(a) or math.isnan(b):
        return math.nan if propagates or (math.isnan(a) and math.isnan(b)) else b if math.isnan(a) else a
    # the zeros have an order
    return (min if name == "min" else max)((a, b), key=lambda x: (x, math.copysign(1, x)))


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("name", ["min", "max"])
def test_extremes_know_nan_and_the_sign_of_zero(name: str, kind: str) -> None:
    a, b = operands(kind, 2, np.random.default_rng(5))
    # PTX has no .NaN for f64
    for propagates in (False, True)[: 1 + (kind != "f64")]:
        got = compute(f"{name}{'.NaN' * propagates}.{kind}", [a, b], dtype_of(kind))
        want = [extreme(name, propagates, x, y) for x, y in zip(numbers(kind, a), numbers(kind, b), strict=True)]
        assert_floats(kind, got, want)


@pytest.mark.parametrize("opcode", ["add.ftz.f32", "mul.ftz.f32", "fma.rn.ftz.f32"])
def test_subnormal_numbers_are_flushed_where_the_opcode_says_so(opcode: str) -> None:
    name = opcode.split(".")[0]
    values = operands("f32", 3 if name == "fma" else 2, np.random.default_rng(6))
    evaluate = exactly(FUNCTIONS[name])

    def flushed(x: float) -> float:
        return math.copysign(0.0, x) if abs(x) < 2.0**-126 else x

    want = [
        flushed(evaluate("f32", "rn", *map(flushed, row)))
        for row in zip(*(numbers("f32", v) for v in values), strict=True)
    ]
    assert_floats("f32", compute(opcode, values, np.float32), want)


def test_saturated_sums_lie_between_zero_and_one() -> None:
    a, b = operands("f32", 2, np.random.default_rng(7))
    got = compute("add.sat.f32", [a, b], np.float32)
    sums = [exactly(operator.add)("f32", "rn", x, y) for x, y in zip(numbers("f32", a), numbers("f32", b), strict=True)]
    assert got.tolist() == [0.0 if math.isnan(x) else min(max(x, 0.0), 1.0) for x in sums]


def bits_of(kind: str) -> int:
    return int(kind[1:])


def signed(kind: str, value: int) -> int:
    """The value modulo the type's width, as the type sees it."""
    width = bits_of(kind)
    value &= (1 << width) - 1
    return value - (1 << width) if kind[0] == "s" and value >> (width - 1) else value


def truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def funnel(left: bool, wrap: bool) -> Callable[[int, int, int], int]:
    def function(a: int, b: int, c: int) -> int:
        n = c & 31 if wrap else min(c, 32)
        both = b << 32 | a
        return ((both << n) >> 32 if left else both >> n) & 0xFFFFFFFF

    return function


def permuted(a: int, b: int, c: int) -> int:
    data = (b << 32 | a).to_bytes(8, "little")
    result = []
    for i in range(4):
        choice = c >> (4 * i) & 15
        byte = data[choice & 7]
        result.append((255 if byte & 128 else 0) if choice & 8 else byte)
    return int.from_bytes(bytes(result), "little")


def extracted(kind: str) -> Callable[[int, int, int], int]:
    def function(a: int, position: int, length: int) -> int:
        width, position, length = bits_of(kind), position & 255, length & 255
        if length == 0:
            return 0
        top = min(position + length - 1, width - 1)
        sign = (a >> top & 1) if kind[0] == "s" else 0
        bits = [(a >> (position + i) & 1) if i < length and position + i < width else sign for i in range(width)]
        return sum(bit << i for i, bit in enumerate(bits))

    return function


def inserted(kind: str) -> Callable[[int, int, int, int], int]:
    def function(a: int, b: int, position: int, length: int) -> int:
        for i in range(length & 255):
            if (position & 255) + i < bits_of(kind):
                b = b & ~(1 << ((position & 255) + i)) | (a >> i & 1 if i < bits_of(kind) else 0) << (
                    (position & 255) + i
                )
        return b

    return function


def logic(table: int) -> Callable[[int, int, int], int]:
    return lambda a, b, c: sum(
        (table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32)
    )


def leading_zeros(width: int) -> Callable[[int], int]:
    return lambda a: width - (a & ((1 << width) - 1)).bit_length()


def dot(first: str, second: str) -> Callable[[int, int, int], int]:
    def function(a: int, b: int, c: int) -> int:
        x = struct.unpack(f"<4{'b' if first == 's32' else 'B'}", a.to_bytes(4, "little"))
        y = struct.unpack(f"<4{'b' if second == 's32' else 'B'}", b.to_bytes(4, "little"))
        return c + sum(map(operator.mul, x, y))

    return function


# opcode: types of the operands, of the result, and the function of whole numbers
WHOLE: dict[str, Any] = {
    **{f"{n}.{k}": ((k, k), k, f) for k in INTEGERS for n, f in (("add", operator.add), ("sub", operator.sub))},
    **{f"mul.lo.{k}": ((k, k), k, operator.mul) for k in INTEGERS},
    **{f"mul.hi.{k}": ((k, k), k, lambda a, b, k=k: a * b >> bits_of(k)) for k in INTEGERS},
    **{f"mul.wide.{k}": ((k, k), f"{k[0]}{bits_of(k) * 2}", operator.mul) for k in INTEGERS[:4]},
    **{f"mad.lo.{k}": ((k, k, k), k, lambda a, b, c: a * b + c) for k in INTEGERS},
    **{f"mad.hi.{k}": ((k, k, k), k, lambda a, b, c, k=k: (a * b >> bits_of(k)) + c) for k in ("s32", "u32", "u64")},
    **{
        f"mad.wide.{k}": ((k, k, f"{k[0]}{bits_of(k) * 2}"), f"{k[0]}{bits_of(k) * 2}", lambda a, b, c: a * b + c)
        for k in INTEGERS[:4]
    },
    **{f"div.{k}": ((k, k), k, lambda a, b: truncated(a, b) if b else None) for k in INTEGERS},
    **{f"rem.{k}": ((k, k), k, lambda a, b: a - truncated(a, b) * b if b else None) for k in INTEGERS},
    **{f"{n}.{k}": ((k, k), k, f) for k in INTEGERS for n, f in (("min", min), ("max", max))},
    **{f"neg.{k}": ((k,), k, operator.neg) for k in ("s16", "s32", "s64")},
    **{f"abs.{k}": ((k,), k, abs) for k in ("s16", "s32", "s64")},
    **{f"sad.{k}": ((k,) * 3, k, lambda a, b, c: c + abs(a - b)) for k in ("u32", "s64")},
    **{
        f"{n}.b{w}": ((f"u{w}",) * 2, f"u{w}", f)
        for w in (16, 32, 64)
        for n, f in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor))
    },
    **{f"not.b{w}": ((f"u{w}",), f"u{w}", operator.invert) for w in (16, 32, 64)},
    **{f"cnot.b{w}": ((f"u{w}",), f"u{w}", lambda a: int(a == 0)) for w in (16, 32, 64)},
    **{f"shl.b{w}": ((f"u{w}", "u32"), f"u{w}", lambda a, n, w=w: a << n if n < w else 0) for w in (16, 32, 64)},
    **{f"shr.{k}": ((k, "u32"), k, lambda a, n: a >> min(n, 64)) for k in INTEGERS},
    **{f"popc.b{w}": ((f"u{w}",), "u32", lambda a: a.bit_count()) for w in (32, 64)},
    **{f"clz.b{w}": ((f"u{w}",), "u32", leading_zeros(w)) for w in (32, 64)},
    **{f"brev.b{w}": ((f"u{w}",), f"u{w}", lambda a, w=w: int(f"{a:0{w}b}"[::-1], 2)) for w in (32, 64)},
    **{
        f"bfind.{k}": ((k,), "u32", lambda a: ((~a if a < 0 else a).bit_length() - 1) & 0xFFFFFFFF)
        for k in ("u32", "s32", "u64", "s64")
    },
    **{f"bfe.{k}": ((k, "u32", "u32"), k, extracted(k)) for k in ("u32", "s32", "u64", "s64")},
    **{f"bfi.b{w}": ((f"u{w}", f"u{w}", "u32", "u32"), f"u{w}", inserted(f"u{w}")) for w in (32, 64)},
    "prmt.b32": (("u32",) * 3, "u32", permuted),
    **{
        f"shf.{d}.{m}.b32": (("u32",) * 3, "u32", funnel(d == "l", m == "wrap"))
        for d in "lr"
        for m in ("wrap", "clamp")
    },
    **{f"dp4a.{a}.{b}": (("u32", "u32", "s32"), "s32", dot(a, b)) for a in ("s32", "u32") for b in ("s32", "u32")},
    "add.sat.s32": (("s32", "s32"), "s32", lambda a, b: min(max(a + b, -(2**31)), 2**31 - 1)),
}


@pytest.mark.parametrize("family", dict.fromkeys(opcode.split(".")[0] for opcode in WHOLE))
def test_whole_numbers(family: str) -> None:
    for opcode, (kinds, result, function) in WHOLE.items():
        if opcode.split(".")[0] != family:
            continue
        rng = np.random.default_rng(8)
        values = [operands(kind, 1, rng)[0] for kind in kinds]
        got = compute(opcode, values, dtype_of(result)).tolist()
        want = [function(*row) for row in zip(*(v.tolist() for v in values), strict=True)]
        # what a division by zero gives is not specified
        checked = [(x, signed(result, y)) for x, y in zip(got, want, strict=True) if y is not None]
        assert len(checked) > COUNT // 2
        assert [x for x, _ in checked] == [y for _, y in checked], opcode


def test_any_function_of_three_bits() -> None:
    values = operands("u32", 3, np.random.default_rng(9))
    for table in (0x96, 0xE8, 0x00, 0xFF, 0x2A, 0xCA):
        got = compute("lop3.b32", values, np.uint32, f", {table}").tolist()
        assert got == [logic(table)(*row) for row in zip(*(v.tolist() for v in values), strict=True)]


COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
}  # fmt: skip


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
def test_comparisons_of_floats_and_nan(kind: str) -> None:
    a, b = operands(kind, 2, np.random.default_rng(10))
    rows = list(zip(numbers(kind, a), numbers(kind, b), strict=True))

    def holds(compare: str, x: float, y: float) -> bool:
        unordered = math.isnan(x) or math.isnan(y)
        if compare in ("num", "nan"):
            return unordered == (compare == "nan")
        return compare.endswith("u") if unordered else COMPARE[compare.removesuffix("u")](x, y)

    for compare in (*COMPARE, *(f"{c}u" for c in COMPARE), "num", "nan"):
        got = compute(f"setp.{compare}.{kind}", [a, b], np.uint8)
        assert got.tolist() == [int(holds(compare, x, y)) for x, y in rows], compare


@pytest.mark.parametrize("kind", INTEGERS)
def test_comparisons_combined_with_a_predicate(kind: str) -> None:
    rng = np.random.default_rng(11)
    a, b = operands(kind, 2, rng)
    c = rng.integers(0, 2, COUNT).astype(np.uint8)
    rows = list(zip(a.tolist(), b.tolist(), c.tolist(), strict=True))
    for boolean, join in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor)):
        got = compute(f"setp.lt.{boolean}.{kind}", [a, b, c], np.uint8)
        assert got.tolist() == [join(int(x < y), z) for x, y, z in rows]


def test_selections_copied_signs_and_classes() -> None:
    rng = np.random.default_rng(12)
    a, b = operands("f32", 2, rng)
    p = rng.integers(0, 2, COUNT).astype(np.uint8)
    np.testing.assert_array_equal(
        compute("selp.f32", [a, b, p], np.float32).view(np.uint32), np.where(p, a, b).view(np.uint32)
    )
    (c,) = operands("s32", 1, rng)
    got = compute("slct.f32.s32", [a, b, c], np.float32)
    np.testing.assert_array_equal(got.view(np.uint32), np.where(c >= 0, a, b).view(np.uint32))
    signs = [math.copysign(y, x) for x, y in zip(numbers("f32", a), numbers("f32", b), strict=True)]
    assert_floats("f32", compute("copysign.f32", [a, b], np.float32), signs)
    classes: dict[str, Callable[[float], bool]] = {
        "finite": math.isfinite, "infinite": math.isinf, "notanumber": math.isnan,
        "number": lambda x: not math.isnan(x),
        "subnormal": lambda x: 0 < abs(x) < 2.0**-126, "normal": lambda x: 2.0**-126 <= abs(x) < math.inf,
    }  # fmt: skip
    for name, holds in classes.items():
        got = compute(f"testp.{name}.f32", [a], np.uint8)
        assert got.tolist() == [int(holds(x)) for x in numbers("f32", a)], name


@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma", "min", "max", "neg", "abs"])
@pytest.mark.parametrize("kind", ["f16x2", "bf16x2"])
def test_a_packed_operation_is_two_of_its_halves(name: str, kind: str) -> None:
    count = {"fma": 3, "neg": 1, "abs": 1}.get(name, 2)
    mode = ".rn" if name in ("add", "sub", "mul", "fma") else ""
    rng = np.random.default_rng(13)
    halves = [operands(kind[:-2], count, rng) for _ in range(2)]
    packed = [
        np.stack([np.ascontiguousarray(x).view(np.uint16) for x in pair], axis=1).view(np.uint32).reshape(-1)
        for pair in zip(*halves, strict=True)
    ]
    got = compute(f"{name}{mode}.{kind}", packed, np.uint32).view(np.uint16).reshape(-1, 2)
    for i in range(2):
        want = compute(f"{name}{mode}.{kind[:-2]}", halves[i], dtype_of(kind[:-2]))
        assert_floats(kind[:-2], got[:, i].copy().view(dtype_of(kind[:-2])), numbers(kind[:-2], want))


@pytest.mark.parametrize("name", ["add", "sub", "mul", "fma"])
def test_two_floats_in_one_register(name: str) -> None:
    count, rng = 3 if name == "fma" else 2, np.random.default_rng(14)
    halves = [operands("f32", count, rng) for _ in range(2)]
    packed = [np.stack(pair, axis=1).view(np.uint64).reshape(-1) for pair in zip(*halves, strict=True)]
    got = compute(f"{name}.rn.f32x2", packed, np.uint64).view(np.float32).reshape(-1, 2)
    for i in range(2):
        want = compute(f"{name}.rn.f32", halves[i], np.float32)
        assert_floats("f32", got[:, i].copy(), numbers("f32", want))


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_sums_of_a_half_and_a_float(kind: str) -> None:
    rng = np.random.default_rng(15)
    (a, b), (c,) = operands(kind, 2, rng), operands("f32", 1, rng)
    x, y, z = numbers(kind, a), numbers(kind, b), numbers("f32", c)
    add, fma = exactly(operator.add), exactly(FUNCTIONS["fma"])
    got = compute(f"add.rn.f32.{kind}", [a, c], np.float32)
    assert_floats("f32", got, [add("f32", "rn", *row) for row in zip(x, z, strict=True)])
    got = compute(f"fma.rn.f32.{kind}", [a, b, c], np.float32)
    assert_floats("f32", got, [fma("f32", "rn", *row) for row in zip(x, y, z, strict=True)])

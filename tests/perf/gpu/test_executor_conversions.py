"""Conversions of the executor beside fractions, and 8-bit floats beside torch's."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from executor_ptx import compute
from test_executor_arithmetic import COUNT, FORMATS, INTEGERS, assert_floats, dtype_of, numbers, operands, rounded

from shardwise.perf.gpu.rounding import to_bf16, to_tf32

Array = np.ndarray[Any, Any]
LIMITS = {
    kind: (-(2 ** (int(kind[1:]) - 1)) * (kind[0] == "s"), 2 ** (int(kind[1:]) - (kind[0] == "s")) - 1)
    for kind in INTEGERS
}


@pytest.mark.parametrize("source", ["f16", "f32", "f64", "bf16"])
def test_floats_become_whole_numbers_within_the_limits(source: str) -> None:
    (a,) = operands(source, 1, np.random.default_rng(1))
    rounds = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}
    for target, (low, high) in LIMITS.items():
        for mode, function in rounds.items():
            unsure = 0 if source != "f64" and high < 2**40 else low or 2 ** int(target[1:]) >> 1
            want = [
                unsure
                if math.isnan(x)
                else (high if x > 0 else low)
                if math.isinf(x)
                else min(max(function(x), low), high)
                for x in numbers(source, a)
            ]
            assert compute(f"cvt.{mode}.{target}.{source}", [a], dtype_of(target)).tolist() == want, (target, mode)


@pytest.mark.parametrize("source", INTEGERS)
def test_whole_numbers_become_floats(source: str) -> None:
    (a,) = operands(source, 1, np.random.default_rng(2))
    for target in FORMATS:
        got = compute(f"cvt.rn.{target}.{source}", [a], dtype_of(target))
        assert_floats(target, got, [rounded(Fraction(x), target, "rn") for x in a.tolist()])


@pytest.mark.parametrize("source", INTEGERS)
def test_whole_numbers_of_other_widths(source: str) -> None:
    (a,) = operands(source, 1, np.random.default_rng(3))
    for target, (low, high) in LIMITS.items():
        width = int(target[1:])
        want = [(x - low) % 2**width + low for x in a.tolist()]
        assert compute(f"cvt.{target}.{source}", [a], dtype_of(target)).tolist() == want
        bounded = [min(max(x, low), high) for x in a.tolist()]
        assert compute(f"cvt.sat.{target}.{source}", [a], dtype_of(target)).tolist() == bounded


@pytest.mark.parametrize("source", ["f16", "bf16", "f32", "f64"])
def test_floats_of_other_formats(source: str) -> None:
    (a,) = operands(source, 1, np.random.default_rng(4))
    a[: COUNT // 2] = operands(source, 1, np.random.default_rng(5))[0][: COUNT // 2]
    precision = FORMATS[source][0]
    for target in FORMATS:
        if FORMATS[target][0] >= precision and not (source == "bf16" and target == "f16"):
            modes = [""] if target != source and FORMATS[target][0] > precision and source + target != "bf16f16" else []
        else:
            modes = [".rn", ".rz", ".rm", ".rp"] if target == "f32" else [".rn", ".rz"]
        if source in ("f16", "bf16") and target in ("f16", "bf16"):
            continue
        for mode in modes:
            got = compute(f"cvt{mode}.{target}.{source}", [a], dtype_of(target))
            want = [
                rounded(Fraction(x), target, mode[1:] or "rn", x) if math.isfinite(x) else x for x in numbers(source, a)
            ]
            assert_floats(target, got, want)


@pytest.mark.parametrize("mode", ["rn", "rz"])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_packed_halves_have_the_first_operand_above(kind: str, mode: str) -> None:
    a, b = operands("f32", 2, np.random.default_rng(6))
    got = compute(f"cvt.{mode}.{kind}x2.f32", [a, b], np.uint32).view(np.uint16).reshape(-1, 2)
    for i, data in enumerate((b, a)):
        want = [rounded(Fraction(x), kind, mode, x) if math.isfinite(x) else x for x in numbers("f32", data)]
        assert_floats(kind, got[:, i].copy().view(dtype_of(kind)), want)


def test_rounding_to_whole_floats() -> None:
    (a,) = operands("f32", 1, np.random.default_rng(7))
    for mode, function in {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}.items():
        want = [math.copysign(float(function(x)), x) if math.isfinite(x) else x for x in numbers("f32", a)]
        assert_floats("f32", compute(f"cvt.{mode}.f32.f32", [a], np.float32), want)


@pytest.mark.parametrize(
    ("kind", "dtype", "largest"), [("e4m3", torch.float8_e4m3fn, 448.0), ("e5m2", torch.float8_e5m2, 57344.0)]
)
def test_8_bit_floats(kind: str, dtype: torch.dtype, largest: float) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(dtype).float()
    packed = codes.numpy().repeat(2).view(np.uint16)
    halves = compute(f"cvt.rn.f16x2.{kind}x2", [packed], np.uint32).view(np.float16)
    np.testing.assert_array_equal(halves[::2].astype(np.float32), values.numpy())

    a, b = operands("f32", 2, np.random.default_rng(8))
    a[:256], b[:255] = values.numpy(), ((values[1:] + values[:-1]) / 2).numpy()
    got = compute(f"cvt.rn.satfinite.{kind}x2.f32", [a, b], np.uint16).view(np.uint8).reshape(-1, 2)
    for i, data in enumerate((b, a)):
        bounded = torch.from_numpy(data).clamp(-largest, largest)
        want = bounded.to(dtype).view(torch.uint8).numpy()
        # NaN is positive
        np.testing.assert_array_equal(got[:, i], np.where(np.isnan(data), 0x7F, want))


@pytest.mark.parametrize("mode", ["rn", "rna", "rz"])
def test_tf32_keeps_ten_bits(mode: str) -> None:
    (a,) = operands("f32", 1, np.random.default_rng(9))
    got = compute(f"cvt.{mode}.tf32.f32", [a], np.float32)
    want = []
    for x in numbers("f32", a):
        if not math.isfinite(x):
            want.append(x)
            continue
        unit = Fraction(2) ** (max(math.frexp(x)[1] - 1, -126) - 10)
        whole, rest = divmod(abs(Fraction(x)), unit)
        up = {"rn": rest * 2 > unit or (rest * 2 == unit and whole % 2 == 1), "rna": rest * 2 >= unit, "rz": False}[
            mode
        ]
        size = (whole + up) * unit
        want.append(math.copysign(math.inf if size >= Fraction(2) ** 128 else float(size), x))
    assert_floats("f32", got, want)


@pytest.mark.parametrize(("low", "kept"), [(16, "bf16"), (13, "tf32")])
def test_ties_go_to_even_and_neighbours_of_ties_to_the_nearest(low: int, kept: str) -> None:
    """Operands at random hold no ties: rounding them away from zero passed."""
    whole = np.arange(0x3F800000, 0x3F800000 + (9 << low), 1 << low, dtype=np.uint32)
    half = np.uint32(1 << (low - 1))
    bits = np.concatenate([whole + half - np.uint32(1), whole + half, whole + half + np.uint32(1)])
    x = np.concatenate([bits, bits | np.uint32(1 << 31)]).view(np.float32)
    unit = 2.0 ** (low - 23)
    # numpy rounds to even
    expected = np.round(x.astype(np.float64) / unit) * unit
    if kept == "tf32":
        assert to_tf32(x, "rn").astype(np.float64).tolist() == expected.tolist()
    else:
        got = torch.from_numpy(to_bf16(x).astype(np.int16)).view(torch.bfloat16)
        assert got.double().tolist() == expected.tolist()

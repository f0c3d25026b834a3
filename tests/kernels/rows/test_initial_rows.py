"""First values are those of (seed, row, column) alone, the same bits on every path, and distributed as asked."""

from __future__ import annotations

import re
from math import isclose
from statistics import NormalDist
from typing import Any

import pytest
import torch
from kernel_inputs import DEVICES, UPDATES, assert_same_bits, torch_device
from torch import Tensor

from shardwise.kernels import initial_rows
from shardwise.kernels.rows import initial_rows as op
from shardwise.kernels.rows.initial_rows import KINDS, UNIT, initial_rows_ref, normal_table

LOOPS = op, "loops"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
IDS = torch.tensor([0, 1, 2, 2**31, 2**32, 2**32 + 1, -1, 2**63 - 1, -(2**63), 77])


def seeded(seed: int, device: Any = "cpu") -> Tensor:
    return torch.tensor([seed], device=device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", UPDATES)
def test_every_path_gives_the_references_bits(where: torch.device, kind: str, dtype: torch.dtype) -> None:
    for seed, columns in ((0, 5), (-7, 16), (2**40 + 3, 1)):
        given = 3, columns, kind, -0.01, 0.02, dtype
        got = initial_rows(IDS.to(where), seeded(seed, where), *given)
        assert_same_bits(got.cpu(), initial_rows_ref(IDS, seeded(seed), *given))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", UPDATES)
def test_a_shard_of_columns_has_the_bits_of_the_whole(where: torch.device, kind: str) -> None:
    rows, seed, rest = IDS.to(where), seeded(5, where), (kind, -1.0, 1.0, torch.float32)
    whole = initial_rows(rows, seed, 0, 12, *rest)
    for first, columns in ((0, 4), (4, 7), (11, 1)):
        assert_same_bits(initial_rows(rows, seed, first, columns, *rest), whole[:, first : first + columns])
    # nor do the rows beside one matter
    assert_same_bits(initial_rows(rows[4:6], seed, 0, 12, *rest), whole[4:6])


def test_the_bits_are_these() -> None:
    """What was saved with a seed is to come again from it: a change here changes users' models."""
    rows = torch.tensor([0, 1, 2**40])
    assert initial_rows(rows, seeded(1), 0, 2, "uniform", 0.0, 1.0, torch.float32).mul(2**24).tolist() == UNIFORM
    got = initial_rows(rows, seeded(1), 0, 2, "normal", 0.0, 1.0, torch.float32)
    assert got.view(torch.int32).tolist() == NORMAL


UNIFORM = [[14595939, 5778276], [1437544, 16668843], [7714875, 849975]]
NORMAL = [[-1096159721, 1053624407], [1068438750, -1132157434], [1036943592, 1070709064]]


def test_uniform_values_fill_their_interval() -> None:
    x = initial_rows(torch.arange(20_000), seeded(3), 0, 20, "uniform", -0.25, 0.75, torch.float32).double()
    assert -0.25 <= float(x.min()) < -0.2499 and 0.7499 < float(x.max()) < 0.75
    assert isclose(float(x.mean()), 0.25, abs_tol=2e-3) and isclose(float(x.var()), 1 / 12, rel_tol=5e-3)
    counts = torch.histc(x, 100, -0.25, 0.75)
    # chi-squared of 99 degrees of freedom
    assert float(((counts - 4000) ** 2 / 4000).sum()) < 150


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rounding_does_not_leave_the_interval(dtype: torch.dtype) -> None:
    """2 ** -25 below 1 rounds to 1 in fp32, and every 512th number of [1/2, 1) in bf16."""
    rows = torch.arange(5000)
    for low, high in ((0.5, 1.0), (-1.0, -0.5), (0.1001, 0.1013), (-1e-3, 0.0), (0.0, 1e-3)):
        x = initial_rows(rows, seeded(0), 0, 8, "uniform", low, high, dtype).double()
        assert low <= float(x.min()) and float(x.max()) < high, (low, high)


def test_normal_values_are_the_inverse_of_their_distribution() -> None:
    x = initial_rows(torch.arange(20_000), seeded(3), 0, 20, "normal", 0.0, 1.0, torch.float32).double().flatten()
    assert isclose(float(x.mean()), 0, abs_tol=5e-3) and isclose(float(x.var()), 1, rel_tol=1e-2)
    assert isclose(float((x**3).mean()), 0, abs_tol=2e-2) and isclose(float((x**4).mean()), 3, rel_tol=2e-2)
    # Kolmogorov: 1.63 / sqrt(n) is passed by one in a hundred
    expected = torch.tensor([NormalDist().cdf(v) for v in x.sort().values[::100].tolist()])
    assert float((expected - torch.arange(0, 1, 100 / x.numel())).abs().max()) < 1.63 / x.numel() ** 0.5
    scaled = initial_rows(torch.arange(9), seeded(3), 0, 20, "normal", 2.0, 0.5, torch.float32).double().flatten()
    assert float((scaled - (x[:180] / 2 + 2)).abs().max()) < 1e-6


def test_the_table_of_the_normal_distribution_is_exact_and_between_its_places_nearly_so() -> None:
    """Machines whose logarithms differ in the last bits get the same integers: none is near to the next one."""
    inverse, table = NormalDist().inv_cdf, normal_table()[:-1].double() * UNIT
    places = [2.0 ** (i // 64 - 33) * (1 + i % 64 / 64) for i in range(2049)]
    values = torch.tensor([-inverse(place) for place in places], dtype=torch.float64)
    assert float((values - table).abs().max()) <= UNIT / 2
    assert float(((values / UNIT)[:-1] % 1 - 0.5).abs().min()) * UNIT > 1e-12
    between = [(places[i] + places[i + 1]) / 2 for i in range(2048)]
    true = torch.tensor([-inverse(place) for place in between], dtype=torch.float64)
    assert float((true - (table[:-1] + table[1:]) / 2).abs().max()) < 1.3e-5


def test_rows_that_differ_in_high_bits_differ() -> None:
    """Hashes of rows modulo 2 ** 32 would give ids that are 2 ** 32 apart the same row."""
    x = initial_rows(IDS, seeded(0), 0, 4, "uniform", 0.0, 1.0, torch.float32)
    assert len({tuple(row) for row in x.tolist()}) == len(IDS)
    assert not torch.equal(x, initial_rows(IDS, seeded(1 << 32), 0, 4, "uniform", 0.0, 1.0, torch.float32))


@pytest.mark.parametrize("device", UPDATES)
def test_no_rows_and_no_columns_are_ordinary(where: torch.device) -> None:
    for kind in KINDS:
        rest = kind, 0.0, 1.0, torch.float16
        assert initial_rows(IDS[:0].to(where), seeded(0, where), 0, 4, *rest).shape == (0, 4)
        assert initial_rows(IDS.to(where), seeded(0, where), 2, 0, *rest).shape == (10, 0)


GOOD: dict[str, Any] = {
    "rows": IDS, "seed": seeded(0), "first_column": 0, "columns": 4, "kind": "uniform", "low": 0.0, "high": 1.0,
    "dtype": torch.float32,
}  # fmt: skip
BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"rows": IDS.int()}, TypeError, "rows must be int64, got torch.int32"),
    ({"seed": torch.zeros(2, dtype=torch.int64)}, ValueError, "seed must have one number, got 2"),
    ({"seed": seeded(0, "meta")}, ValueError, "seed must be 1-D on cpu, got [1] on meta"),
    ({"columns": -1}, ValueError, "columns must not be negative, got -1 from 0"),
    ({"kind": "xavier"}, ValueError, "kind must be one of constant, uniform, normal, got 'xavier'"),
    ({"dtype": torch.int32}, TypeError, "dtype must be float32, float16 or bfloat16, got torch.int32"),
    ({"low": 1.0}, ValueError, "uniform values need low < high, a number of torch.float32 between, got 1.0, 1.0"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[message for _, _, message in BAD])
def test_bad_input_is_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        initial_rows(**{**GOOD, **change})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str, kind: str) -> None:
    there = torch_device(device)
    given = IDS.to(there), seeded(4, there), 1, 3, kind, 0.0, 1.0, torch.bfloat16
    torch.library.opcheck(torch.ops.shardwise.initial_rows.default, given)

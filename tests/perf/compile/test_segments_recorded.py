"""The segment ops' launches: no races, no bytes beyond the declared, and promises kept when compiled."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from kernel_inputs import assert_same_bits, torch_device
from test_recorded import assert_within
from torch import Tensor

from shardwise.kernels import (
    complete_cumsum,
    expand_into_jagged_permute,
    invert_permute,
    offsets_range,
    segment_sum,
)
from shardwise.perf.compile import cases as launched
from shardwise.perf.compile import compiled
from shardwise.perf.compile.checks import broken_promises
from shardwise.perf.compile.recorded import SECTOR, races, recorded
from shardwise.perf.suite import declared_jagged as declared
from shardwise.perf.suite.declared import Traffic

OPS = torch.ops.shardwise


class Call(NamedTuple):
    """What an op returned, the bytes it declares, where they lie, and how many more sectors a program may touch."""

    results: list[Tensor]
    traffic: Traffic
    memory: dict[str, Tensor]
    arrays: str = "O"
    ends: int = 2
    rest: int = 24


# 150 values in 5 segments, moved to 190 with one left out and one repeated
STARTS = torch.tensor([0, 40, 40, 100, 110, 150])
ORDER = torch.tensor([2, 0, 2, 1, 4, 3])
ENDS = torch.tensor([0, 60, 100, 160, 160, 200, 210])


def move_flat() -> Call:
    values = [torch.arange(150), torch.rand(150)]
    outs = OPS.move_segments(values, ORDER, STARTS, ENDS, 210)
    memory = {f"{letter}{i}": t for letter, some in (("V", values), ("Y", outs)) for i, t in enumerate(some)}
    # a program has the end of one segment and the start of another
    return Call(outs, declared.move_segments_bytes(values, 210, sector=SECTOR), memory, "V0 V1 Y0 Y1", 4)


def move_rows(dim: int) -> Callable[[], Call]:
    def call() -> Call:
        values = torch.rand(150, dim)
        (out,) = OPS.move_segments([values], ORDER, STARTS, ENDS, 210)
        traffic = declared.move_segments_bytes([values], 210, sector=SECTOR)
        return Call([out], traffic, {"V0": values, "Y0": out})

    return call


def collect(dim: int) -> Callable[[], Call]:
    def call() -> Call:
        grad = torch.rand(210, dim)
        (out,) = OPS.collect_segments([grad], ORDER, STARTS, ENDS, 150)
        return Call([out], declared.collect_segments_bytes(grad, 150, sector=SECTOR), {"G": grad, "Q": out})

    return call


def add(*columns: int) -> Callable[[], Call]:
    def call() -> Call:
        values = torch.rand(150, *columns)
        out = segment_sum(STARTS, values)
        traffic = declared.segment_sum_bytes(STARTS, values, sector=SECTOR)
        return Call([out], traffic, {"V": values, "Y": out, "O": STARTS}, "O" if columns else "OVY", 10)

    return call


def spread() -> Call:
    sums = torch.rand(5, 128)
    out = OPS.segment_spread(STARTS, sums, 150, 1)
    return Call([out], declared.segment_spread_bytes(sums, 150, sector=SECTOR), {"G": sums, "Y": out})


def invert() -> Call:
    permute = torch.arange(150).flip(0)
    out = invert_permute(permute)
    return Call([out], declared.invert_permute_bytes(permute), {"P": permute, "Q": out}, "PQ")


def cumsum() -> Call:
    lengths = torch.arange(1, 151).view(3, 50)
    out = complete_cumsum(lengths)
    return Call([out], declared.complete_cumsum_bytes(lengths), {"L": lengths, "O": out}, "LO")


def places() -> Call:
    out = offsets_range(STARTS, 150)
    return Call([out], declared.offsets_range_bytes(STARTS, 150), {"at": out}, "at")


def expand() -> Call:
    out = expand_into_jagged_permute(ORDER, STARTS, ENDS, 210)
    return Call([out], declared.offsets_range_bytes(ENDS, 210), {"at": out}, "at")


CALLS: dict[str, Callable[[], Call]] = {
    "move": move_flat, "move rows of 128": move_rows(128), "move rows of 5": move_rows(5),
    "collect rows of 128": collect(128), "collect rows of 5": collect(5), "sum": add(), "sum rows of 128": add(128),
    "sum rows of 5": add(5), "spread": spread, "invert": invert, "cumsum": cumsum, "places": places, "expand": expand,
}  # fmt: skip


@pytest.mark.interpreted
@pytest.mark.parametrize("name", CALLS)
def test_a_call_moves_the_declared_bytes_without_races_in_any_order(name: str) -> None:
    torch_device("interpreted")
    torch.manual_seed(0)
    with recorded() as launches:
        done = CALLS[name]()
    assert launches
    assert [race for launch in launches for race in races(launch)] == []
    assert_within(launches, done.traffic, done.memory, done.arrays, done.ends, done.rest)
    torch.manual_seed(0)
    with recorded(order=1):
        again = CALLS[name]()
    for one, other in zip(again.results, done.results, strict=True):
        assert_same_bits(one, other)


MATRIX = [
    *(("move segments i64", target) for target in compiled.TARGETS),
    *(("collect segments D=128 fp32", target) for target in ("sm_80", "gfx942")),
    *(("segment_rows segments D=128 fp32", target) for target in ("sm_100", "gfx942")),
    ("segment_sum segments D=1 fp32", "sm_90"), ("locate sources i32", "sm_90"), ("locate places i64", "gfx942"),
    ("collect segments D=1023 bf16", "sm_90"),
    *(("cumsum 1664 i64", target) for target in compiled.TARGETS),
]  # fmt: skip


@pytest.mark.compiled
@pytest.mark.parametrize(("name", "target"), MATRIX, ids=[f"{name} {target}" for name, target in MATRIX])
def test_a_case_keeps_its_promises(name: str, target: str) -> None:
    case = next(case for case in launched.cases() if case.name == name)
    assert broken_promises([(case, target, compiled.compile_case(case, target))]) == []

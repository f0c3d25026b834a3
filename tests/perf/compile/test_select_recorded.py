"""What the interpreter records of selects, adds and regroups: no races, one result in any order, the declared bytes.

And what compilers of GPUs that need not be here make of the same kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import pytest
import torch
from kernel_inputs import assert_same_bits, torch_device
from test_recorded import assert_within
from torch import Tensor

from shardwise.kernels import plan_pieces
from shardwise.kernels.jagged import regroup as regrouping
from shardwise.kernels.jagged.regroup_plan import Runs, transposed
from shardwise.perf.compile import cases as launched
from shardwise.perf.compile import compiled
from shardwise.perf.compile.cases import Case
from shardwise.perf.compile.checks import broken_promises
from shardwise.perf.compile.recorded import (
    SECTOR,
    Fault,
    Launch,
    races,
    recorded,
)
from shardwise.perf.suite import declared_jagged as declared
from shardwise.perf.suite.declared import Traffic

interpreted = pytest.mark.interpreted
OPS = torch.ops.shardwise
LENGTHS, SELECTED = torch.tensor([2, 0, 5, 1, 3, 4] * 4), torch.tensor([2, 0, 2, 5, 1, 23, 17, 2, 9])
OFFSETS = torch.cat([LENGTHS.new_zeros(1), LENGTHS.cumsum(0)])


class Call(NamedTuple):
    """What an op returned, what it declares, and where that lies."""

    results: list[Tensor]
    traffic: Traffic
    memory: dict[str, Tensor]
    arrays: str = ""
    ends: int = 2
    rest: int = 4


def values(*columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn((int(OFFSETS[-1]), *columns), generator=torch.Generator().manual_seed(0)).to(dtype)


def select(rows: Tensor, weights: Tensor | None = None, batch_size: int = 24) -> Call:
    chosen = SELECTED if batch_size == 24 else torch.tensor([3, 0, 3])
    out, _, picked, _ = OPS.jagged_index_select(rows, weights, OFFSETS, chosen, batch_size, torch.int64, None)
    traffic = declared.jagged_index_select_bytes(rows, OFFSETS, chosen, batch_size, weights, sector=SECTOR)
    memory = {"V": rows, "Y": out} | ({} if weights is None else {"P": weights, "Q": picked})
    arrays = "" if rows.dim() == 2 else "VPYQ"
    # of one-dimensional values each bag begins on a sector of its own, and a search looks at many bags
    return Call([out, picked], traffic, memory, arrays, 16, 60)


def add(*columns: int, dtype: torch.dtype = torch.float32) -> Call:
    copies = torch.cat([OFFSETS.new_zeros(1), LENGTHS[SELECTED].cumsum(0)])
    rows = torch.randn((int(copies[-1]), *columns), generator=torch.Generator().manual_seed(1)).to(dtype)
    out = OPS.jagged_index_add(rows, copies, SELECTED, OFFSETS, 24, int(OFFSETS[-1]))
    traffic = declared.jagged_index_add_bytes(rows, SELECTED, OFFSETS, sector=SECTOR)
    return Call([out], traffic, {"G": rows, "X": out}, "" if columns else "GX", 32, 80)


def regroup(unit: int, back: bool = False, dtype: torch.dtype = torch.float32) -> Call:
    widths = [12 * unit, 4 * unit, 2 * unit]
    pieces = [[(0, 4 * unit, 8 * unit), (1, 0, 4 * unit)], [(0, 0, 8 * unit), (1, unit, 2 * unit)]]
    runs: Runs = plan_pieces(widths, pieces).runs
    if back:
        runs, widths = transposed(runs, widths), list(runs.widths)
    tensors = [torch.randn(9, width, generator=torch.Generator().manual_seed(2)).to(dtype) for width in widths]
    outs = OPS.regroup_columns(tensors, list(runs.flat), runs.repeats, list(runs.widths))
    vector = min(16, unit * tensors[0].itemsize)
    align = vector // tensors[0].itemsize
    block_b, _ = regrouping.regroup_tile(sum(runs.widths) // align, vector)
    traffic = declared.regroup_bytes(tensors, runs, align, -(-9 // block_b), sector=SECTOR)
    # tables lie where the tuple's tensors do not: they are the other memory
    memory = {f"X{i}": tensor for i, tensor in enumerate(tensors)} | {f"Y{i}": out for i, out in enumerate(outs)}
    return Call(outs, traffic, memory, "", 0, 16)


CALLS: dict[str, Callable[[], Call]] = {
    "rows of 128": lambda: select(values(128)),
    "rows of 5": lambda: select(values(5)),
    "halves": lambda: select(values(8, dtype=torch.bfloat16)),
    "values": lambda: select(values()),
    "weighted": lambda: select(values(), values()),
    "four keys": lambda: select(values(), values(), 6),
    "add rows of 128": lambda: add(128),
    "add rows of 5": lambda: add(5),
    "add values": lambda: add(),
    "add halves": lambda: add(16, dtype=torch.float16),
    "regroup": lambda: regroup(4),
    "regroup odd": lambda: regroup(3),
    "regroup back": lambda: regroup(4, back=True),
    "regroup halves back": lambda: regroup(8, back=True, dtype=torch.float16),
}


@cache
def as_given(name: str) -> tuple[Call, list[Launch]]:
    torch_device("interpreted")
    with recorded() as launches:
        return CALLS[name](), launches


@interpreted
@pytest.mark.parametrize("name", CALLS)
def test_programs_do_not_race(name: str) -> None:
    _, launches = as_given(name)
    assert launches
    assert [race for launch in launches for race in races(launch)] == []


@interpreted
@pytest.mark.parametrize("name", CALLS)
def test_results_have_the_same_bits_in_any_order_of_programs(name: str) -> None:
    expected = as_given(name)[0].results
    with recorded(order=1):
        got = CALLS[name]().results
    for one, other in zip(got, expected, strict=True):
        assert_same_bits(one, other)


@interpreted
@pytest.mark.parametrize("name", CALLS)
def test_no_sector_moves_beyond_the_declared_bytes(name: str) -> None:
    done, launches = as_given(name)
    assert_within(launches, done.traffic, done.memory, done.arrays, done.ends, done.rest)


@interpreted
def test_an_alignment_that_a_launch_gets_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that do not begin on 16 bytes, taken for such that do."""
    shifted = torch.randn(4 * 8 + 1)[1:].view(4, 8)
    flat, repeats, widths = plan_pieces([8], [[(0, 4, 4), (0, 0, 4)]]).runs
    with recorded():
        OPS.regroup_columns([shifted], flat, repeats, widths)
    monkeypatch.setattr(regrouping, "_is_aligned", lambda tensor: True)
    with pytest.raises(Fault, match="a multiple of 16"), recorded():
        OPS.regroup_columns([shifted], flat, repeats, widths)


def test_a_call_declares_what_its_module_says() -> None:
    """Without rounding to sectors."""
    bags, rows = len(SELECTED), int(LENGTHS[SELECTED].sum())
    got = declared.jagged_index_select_bytes(values(5), OFFSETS, SELECTED, 24)
    assert got.bytes_moved == bags * (8 + 2 * 8 + 2 * 8 + 8) + 8 * (bags + 1) + rows * (2 * 5 * 4 + 16)
    runs = plan_pieces([8, 4], [[(1, 0, 4), (0, 0, 8)]]).runs
    moved = declared.regroup_bytes([torch.zeros(3, 8), torch.zeros(3, 4)], runs, 4, 2)
    assert moved.bytes_moved == 2 * 3 * 12 * 4 + 2 * 3 * 24


MATRIX = [
    *(("regroup fp32 by 4 from 10 to 2", target) for target in ("sm_80", "sm_90", "sm_100", "gfx942")),
    ("regroup fp32 by 1 from 2 to 2", "sm_90"), ("regroup bf16 by 8 from 2 to 2 3 times", "gfx942"),
    ("index_add D=128 fp32", "sm_90"), ("index_add D=3 fp32", "gfx942"), ("index_add D=1 fp32", "sm_90"),
    ("select select i64 weighted", "sm_90"), ("select select fp32", "gfx942"), ("sources select D=64 fp32", "sm_90"),
]  # fmt: skip


@cache
def cases() -> dict[str, Case]:
    return {case.name: case for case in launched.cases()}


@pytest.mark.compiled
@pytest.mark.parametrize(("name", "target"), MATRIX, ids=[f"{name} {target}" for name, target in MATRIX])
def test_a_case_keeps_its_promises(name: str, target: str) -> None:
    case = cases()[name]
    assert broken_promises([(case, target, compiled.compile_case(case, target))]) == []


@pytest.mark.compiled
def test_a_regroup_moves_16_bytes_at_a_time_and_waits_for_nothing() -> None:
    found = compiled.compile_case(cases()["regroup fp32 by 4 from 2 to 2"], "sm_90")
    assert found.accesses["load", 16] == found.accesses["store", 16] == 4
    assert (found.shared_bytes, found.barriers, found.atomics) == (0, 0, ())

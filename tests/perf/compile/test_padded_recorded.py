"""The launches of the padded ops: no races, no bytes beyond the declared, and what their compiled form promises."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from kernel_inputs import assert_same_bits, torch_device
from padded_inputs import CASES, Case
from torch import Tensor

from shardwise.kernels.jagged.padded import (
    ADD,
    MOVE,
    MULTIPLY,
    launch_to_jagged,
    launch_to_padded,
)
from shardwise.perf.compile import cases as launched
from shardwise.perf.compile import cases_jagged as launched_jagged
from shardwise.perf.compile import compiled
from shardwise.perf.compile.checks import broken_promises
from shardwise.perf.compile.recorded import (
    SECTOR,
    Launch,
    races,
    recorded,
    sectors,
)
from shardwise.perf.suite.declared import Traffic
from shardwise.perf.suite.declared_jagged import to_jagged_bytes, to_padded_bytes

NAMES = ("cut and filled", "numbers", "past the last offset", "dim 128", "3 jagged dims", "bf16")
SOME = [case for case in CASES if case.name in NAMES]
SOME.append(Case("30 bags", (tuple(i % 5 for i in range(30)),), (3,), row=(8,)))
interpreted = pytest.mark.interpreted
EVERY = pytest.mark.parametrize("case", SOME, ids=[case.name for case in SOME])
MODES = pytest.mark.parametrize("mode", [MOVE, ADD, MULTIPLY], ids=["move", "add", "multiply"])


def run(case: Case, mode: int, order: int | None = None) -> tuple[Tensor, Tensor, list[Launch]]:
    """Padded, jagged, and the launches."""
    torch_device("interpreted")
    values, dense, offsets = case.values(), case.dense(), case.offsets()
    other = {MOVE: None, ADD: dense, MULTIPLY: case.values(seed=2)}[mode]
    with recorded(order=order) as launches:
        padded = launch_to_padded(values, other, offsets, case.extents, mode=mode)
        jagged = launch_to_jagged(dense, None if mode == MOVE else values, offsets, case.total, mode)
    return padded, jagged, launches


@interpreted
@MODES
@EVERY
def test_programs_do_not_race_and_give_the_same_bits_in_any_order(case: Case, mode: int) -> None:
    *expected, launches = run(case, mode)
    assert launches and [race for launch in launches for race in races(launch)] == []
    for seed in (1, 2):
        for got, want in zip(run(case, mode, order=seed)[:2], expected, strict=True):
            assert_same_bits(got, want)


@interpreted
@MODES
@EVERY
def test_no_sector_of_rows_moves_beyond_the_declared_bytes(case: Case, mode: int) -> None:
    _, _, launches = run(case, mode)
    by_name = {launch.kernel: launch for launch in launches}
    declared = {
        "_to_padded_kernel": to_padded_bytes(case.values(), case.offsets(), case.extents, mode, sector=SECTOR),
        "_to_jagged_kernel": to_jagged_bytes(case.dense(), case.offsets(), case.total, mode, sector=SECTOR),
    }
    for kernel, traffic in declared.items():
        launch = by_name[kernel]
        rows = case.row and (torch.tensor(0, dtype=case.dtype).itemsize * case.row[0]) % SECTOR == 0
        for kind, parts in (("read", traffic.reads), ("write", traffic.writes)):
            for letter in {"V", "X", "Y", *(["OTHER"] if mode != MOVE else [])} & set(parts) & set(launch.tensors):
                counts = sectors(launch, kind, launch.tensors[letter])  # type: ignore[arg-type]
                # single numbers are read side by side, a sector for some of them; tiles share one where they meet
                moved = SECTOR * (counts.fetched if not rows else counts.requested)
                assert moved <= parts[letter], f"{kernel} {letter}: {moved} bytes to {kind}, {parts[letter]} declared"
                assert moved == parts[letter] or not rows


def test_calls_declare_what_their_module_says() -> None:
    case = Case("declared", ((3, 0, 2),), (2,), row=(5,))
    values, offsets, dense = case.values(), case.offsets(), case.dense()
    row = 5 * 4
    assert to_padded_bytes(values, offsets, [2]) == Traffic({"V": 4 * row, "OTHER": 0, "O": 2 * 3 * 8}, {"Y": 6 * row})
    jagged = to_jagged_bytes(dense, offsets, 5, MULTIPLY)
    assert jagged.bytes_moved == (4 + 4 + 5) * row + 16 * 5


@cache
def cases() -> dict[str, launched.Case]:
    found: dict[str, launched.Case] = {}
    for launch, label, rows in launched_jagged.launches():
        for case in launched.launches(launch, label, rows):
            found.setdefault(case.name, case)
    return found


MATRIX = [
    *(("to_padded D=128 fp32", target) for target in compiled.TARGETS),
    *(("to_jagged D=128 fp32", target) for target in compiled.TARGETS),
    ("to_padded D=3 fp32", "sm_90"), ("to_padded D=128 bf16 sum", "sm_90"),
    ("to_padded D=128 fp32 5 jagged dims", "sm_90"), ("to_jagged D=128 fp32 product", "sm_90"),
    ("places D=128 fp32 5 jagged dims", "sm_90"), ("to_padded D=1 i64", "sm_90"), ("to_jagged D=1 fp32", "sm_90"),
]  # fmt: skip


@pytest.mark.compiled
@pytest.mark.parametrize(("name", "target"), MATRIX, ids=[f"{name} {target}" for name, target in MATRIX])
def test_a_compiled_kernel_keeps_its_promises(name: str, target: str) -> None:
    """No spills, no atomics, rows by 16 bytes at a time."""
    report = compiled.compile_case(cases()[name], target)
    assert broken_promises([(cases()[name], target, report)]) == []
    assert (report.shared_bytes, report.barriers) == (0, 0)

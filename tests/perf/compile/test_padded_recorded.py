"""The launches of the padded ops: no races, and no bytes beyond the declared."""

from __future__ import annotations

import pytest
import torch
from kernel_inputs import torch_device
from padded_inputs import CASES, Case
from recorded_calls import Call, assert_sound, by_kind
from torch import Tensor

from shardwise.kernels.jagged.padded import (
    ADD,
    MOVE,
    MULTIPLY,
    launch_to_jagged,
    launch_to_padded,
)
from shardwise.perf.compile.recorded import (
    SECTOR,
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


def run(case: Case, mode: int) -> tuple[Tensor, Tensor]:
    """Padded and jagged."""
    values, dense, offsets = case.values(), case.dense(), case.offsets()
    other = {MOVE: None, ADD: dense, MULTIPLY: case.values(seed=2)}[mode]
    padded = launch_to_padded(values, other, offsets, case.extents, mode=mode)
    return padded, launch_to_jagged(dense, None if mode == MOVE else values, offsets, case.total, mode)


@interpreted
@MODES
@EVERY
def test_programs_do_not_race_and_give_the_same_bits_in_any_order(case: Case, mode: int) -> None:
    assert_sound(lambda: Call(run(case, mode)), orders=(1, 2))


@interpreted
@MODES
@EVERY
def test_no_sector_of_rows_moves_beyond_the_declared_bytes(case: Case, mode: int) -> None:
    torch_device("interpreted")
    with recorded() as launches:
        run(case, mode)
    by_name = {launch.kernel: launch for launch in launches}
    declared = {
        "_to_padded_kernel": to_padded_bytes(case.values(), case.offsets(), case.extents, mode, sector=SECTOR),
        "_to_jagged_kernel": to_jagged_bytes(case.dense(), case.offsets(), case.total, mode, sector=SECTOR),
    }
    for kernel, traffic in declared.items():
        launch = by_name[kernel]
        rows = case.row and (torch.tensor(0, dtype=case.dtype).itemsize * case.row[0]) % SECTOR == 0
        for kind, parts in by_kind(traffic):
            for letter in {"V", "X", "Y", *(["OTHER"] if mode != MOVE else [])} & set(parts) & set(launch.tensors):
                counts = sectors(launch, kind, launch.tensors[letter])
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

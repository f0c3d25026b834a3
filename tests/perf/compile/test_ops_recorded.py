"""What the interpreter records of segments, selects, regroups and lookups of quantized rows, and what they declare."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from quantized_inputs import Batch, Case, batch
from recorded_calls import Call, assert_sound
from torch import Tensor

from shardwise.kernels import (
    complete_cumsum,
    expand_into_jagged_permute,
    invert_permute,
    offsets_range,
    plan_pieces,
    quantize_rows,
    quantized_pooled_lookup,
    quantized_sequence_lookup,
    row_format,
    segment_sum,
)
from shardwise.kernels.jagged import regroup as regrouping
from shardwise.kernels.jagged.regroup_plan import Runs, transposed
from shardwise.kernels.quantized.row_numbers import paired
from shardwise.perf.compile.recorded import SECTOR, Fault, recorded
from shardwise.perf.suite import declared as of_lookups, declared_jagged as declared

OPS = torch.ops.shardwise

# 150 values in 5 segments, moved to 190 with one left out and one repeated
STARTS = torch.tensor([0, 40, 40, 100, 110, 150])
ORDER = torch.tensor([2, 0, 2, 1, 4, 3])
ENDS = torch.tensor([0, 60, 100, 160, 160, 200, 210])


def move_flat() -> Call:
    values = [torch.arange(150), torch.rand(150)]
    outs = OPS.move_segments(values, ORDER, STARTS, ENDS, 210)
    memory = {f"{letter}{i}": t for letter, some in (("V", values), ("Y", outs)) for i, t in enumerate(some)}
    # a program has the end of one segment and the start of another
    return Call(outs, declared.move_segments_bytes(values, 210, sector=SECTOR), memory, "V0 V1 Y0 Y1", 4, 24)


def move_rows(dim: int) -> Call:
    values = torch.rand(150, dim)
    (out,) = OPS.move_segments([values], ORDER, STARTS, ENDS, 210)
    traffic = declared.move_segments_bytes([values], 210, sector=SECTOR)
    return Call([out], traffic, {"V0": values, "Y0": out}, "O", rest=24)


def collect(dim: int) -> Call:
    grad = torch.rand(210, dim)
    (out,) = OPS.collect_segments([grad], ORDER, STARTS, ENDS, 150)
    traffic = declared.collect_segments_bytes(grad, 150, sector=SECTOR)
    return Call([out], traffic, {"G": grad, "Q": out}, "O", rest=24)


def sums(*columns: int) -> Call:
    values = torch.rand(150, *columns)
    out = segment_sum(STARTS, values)
    traffic = declared.segment_sum_bytes(STARTS, values, sector=SECTOR)
    return Call([out], traffic, {"V": values, "Y": out, "O": STARTS}, "O" if columns else "OVY", 10, 24)


def spread() -> Call:
    summed = torch.rand(5, 128)
    out = OPS.segment_spread(STARTS, summed, 150, 1)
    return Call([out], declared.segment_spread_bytes(summed, 150, sector=SECTOR), {"G": summed, "Y": out}, "O", rest=24)


def invert() -> Call:
    permute = torch.arange(150).flip(0)
    out = invert_permute(permute)
    return Call([out], declared.invert_permute_bytes(permute), {"P": permute, "Q": out}, "PQ", rest=24)


def cumsum() -> Call:
    lengths = torch.arange(1, 151).view(3, 50)
    out = complete_cumsum(lengths)
    return Call([out], declared.complete_cumsum_bytes(lengths), {"L": lengths, "O": out}, "LO", rest=24)


def places() -> Call:
    out = offsets_range(STARTS, 150)
    return Call([out], declared.offsets_range_bytes(STARTS, 150), {"at": out}, "at", rest=24)


def expand() -> Call:
    out = expand_into_jagged_permute(ORDER, STARTS, ENDS, 210)
    return Call([out], declared.offsets_range_bytes(ENDS, 210), {"at": out}, "at", rest=24)


LENGTHS, SELECTED = torch.tensor([2, 0, 5, 1, 3, 4] * 4), torch.tensor([2, 0, 2, 5, 1, 23, 17, 2, 9])
OFFSETS = torch.cat([LENGTHS.new_zeros(1), LENGTHS.cumsum(0)])


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


ALIKE = {"tables": ((9, 64), (5, 64)), "batch": 4}
QUANTIZED = {
    "int8": Case("", "int8", weighted=True, **ALIKE),  # type: ignore[arg-type]
    "int4": Case("", "int4", **ALIKE),  # type: ignore[arg-type]
    "fp8": Case("", "fp8", **ALIKE),  # type: ignore[arg-type]
    "bf16": Case("", "bf16", **ALIKE),  # type: ignore[arg-type]
    "int2 odd": Case("", "int2", tables=((9, 7), (5, 7)), batch=4),
}


def pooled(case: Case) -> Call:
    there = batch(case)
    out = quantized_pooled_lookup(*there.pooled)
    traffic = of_lookups.quantized_pooled_lookup_bytes(
        *read_by(there), there.per_id_weights, there.features, sector=SECTOR
    )
    return Call([out], traffic, {"Q": there.payload, "S": there.scales, "Y": out}, "S", 2, 40)


def in_sequence(case: Case) -> Call:
    there = batch(case)
    out = quantized_sequence_lookup(*there.sequence)
    traffic = of_lookups.quantized_sequence_lookup_bytes(*read_by(there), there.features, sector=SECTOR)
    return Call([out], traffic, {"Q": there.payload, "S": there.scales, "Y": out}, "S", 2, 40)


def read_by(there: Batch) -> tuple[Any, Any, Any, Any]:
    return row_format(there.case.format), there.scales, there.indices, there.offsets


CALLS: dict[str, Callable[[], Call]] = {
    "move": move_flat,
    **{f"move rows of {dim}": partial(move_rows, dim) for dim in (128, 5)},
    **{f"collect rows of {dim}": partial(collect, dim) for dim in (128, 5)},
    "sum": sums,
    **{f"sum rows of {dim}": partial(sums, dim) for dim in (128, 5)},
    "spread": spread, "invert": invert, "cumsum": cumsum, "places": places, "expand": expand,
    "select rows of 128": lambda: select(values(128)),
    "select rows of 5": lambda: select(values(5)),
    "select halves": lambda: select(values(8, dtype=torch.bfloat16)),
    "select values": lambda: select(values()),
    "select weighted": lambda: select(values(), values()),
    "select four keys": lambda: select(values(), values(), 6),
    "add rows of 128": lambda: add(128),
    "add rows of 5": lambda: add(5),
    "add values": lambda: add(),
    "add halves": lambda: add(16, dtype=torch.float16),
    "regroup": lambda: regroup(4),
    "regroup odd": lambda: regroup(3),
    "regroup back": lambda: regroup(4, back=True),
    "regroup halves back": lambda: regroup(8, back=True, dtype=torch.float16),
    **{f"pooled {name}": partial(pooled, case) for name, case in QUANTIZED.items()},
    **{f"sequence {name}": partial(in_sequence, case) for name, case in QUANTIZED.items()},
}  # fmt: skip


@pytest.mark.interpreted
@pytest.mark.parametrize("name", CALLS)
def test_programs_do_not_race_in_any_order_and_move_the_declared_bytes(name: str) -> None:
    assert_sound(CALLS[name])


@pytest.mark.interpreted
def test_an_alignment_that_a_launch_gets_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors that do not begin on 16 bytes, taken for such that do."""
    shifted = torch.randn(4 * 8 + 1)[1:].view(4, 8)
    flat, repeats, widths = plan_pieces([8], [[(0, 4, 4), (0, 0, 4)]]).runs
    with recorded():
        OPS.regroup_columns([shifted], flat, repeats, widths)
    monkeypatch.setattr(regrouping, "_is_aligned", lambda tensor: True)
    with pytest.raises(Fault, match="a multiple of 16"), recorded():
        OPS.regroup_columns([shifted], flat, repeats, widths)


def test_selects_and_regroups_declare_what_their_modules_say() -> None:
    """Without rounding to sectors."""
    bags, rows = len(SELECTED), int(LENGTHS[SELECTED].sum())
    got = declared.jagged_index_select_bytes(values(5), OFFSETS, SELECTED, 24)
    assert got.bytes_moved == bags * (8 + 2 * 8 + 2 * 8 + 8) + 8 * (bags + 1) + rows * (2 * 5 * 4 + 16)
    runs = plan_pieces([8, 4], [[(1, 0, 4), (0, 0, 8)]]).runs
    moved = declared.regroup_bytes([torch.zeros(3, 8), torch.zeros(3, 4)], runs, 4, 2)
    assert moved.bytes_moved == 2 * 3 * 12 * 4 + 2 * 3 * 24


def test_lookups_of_quantized_rows_declare_what_their_modules_say() -> None:
    there = batch(Case("", "int4", tables=((9, 7),), features=((0, False),), batch=3))
    n = len(there.indices)
    got = of_lookups.quantized_pooled_lookup_bytes(
        row_format("int4"), there.scales, there.indices, there.offsets, None, there.features, torch.float16
    )
    assert got.bytes_moved == n * (4 + 2 * 2 + 8) + 4 * 8 + 3 * 7 * 2
    got = of_lookups.quantized_sequence_lookup_bytes(
        row_format("int4"), there.scales, there.indices, there.offsets, there.features
    )
    assert got.bytes_moved == n * (4 + 2 * 2 + 8 + 7 * 4) + 32 * n


def test_scales_that_begin_between_two_are_copied_before_they_are_read_in_pairs() -> None:
    _, scales = quantize_rows(torch.randn(4, 8), "int8")
    odd = torch.cat([scales.new_zeros(1), scales.flatten()])[1:]
    assert paired(odd).data_ptr() % 4 == 0 and torch.equal(paired(odd), scales.flatten())
    assert paired(scales).data_ptr() == scales.data_ptr()

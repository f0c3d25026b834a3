"""Rows change places with records bit for bit, both ways in one call, whatever a row is made of."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kernel_inputs import DEVICES, UPDATES, assert_same_bits, ids_of, torch_device
from torch import Tensor

from shardwise.kernels import move_rows, record_layout
from shardwise.kernels.rows import move_rows as op
from shardwise.kernels.rows.move_rows import layout_of, move_rows_ref

LOOPS = op, "loops"
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@dataclass(frozen=True)
class Case:
    """What a row has: columns and dtype of each part, no columns for one number a row."""

    name: str
    parts: tuple[tuple[int | None, torch.dtype], ...]
    slots: int = 9
    records: int = 30
    moves: int = 7
    shifted: int = 0  # elements of its buffer before a part


CASES = [
    Case("weights alone", ((8, F32),)),
    Case("rowwise", ((128, F32), (None, F32))),
    Case("adam", ((16, F32), (16, F32), (16, F32)), moves=9),
    Case("row state before elements", ((4, F32), (None, F32), (4, F32), (None, F32))),
    Case("halves", ((8, F16), (8, F32))),
    Case("bf16 rowwise", ((12, BF16), (None, F32))),
    Case("odd halves", ((3, F16), (3, F32), (None, F32))),
    Case("one column", ((1, F32), (None, F32))),
    Case("one half", ((1, BF16),)),
    Case("odd columns", ((130, F32), (7, F32)), moves=3),
    Case("wide", ((1500, F32), (None, F32)), slots=4, records=7, moves=3),
    Case("shifted", ((8, F32), (None, F32)), shifted=1),
    Case("shifted halves", ((8, F16),), shifted=1),
    Case("no columns", ((0, F32), (None, F32))),
    Case("one slot", ((8, F32),), slots=1, records=2, moves=1),
    Case("no moves", ((8, F32),), moves=0),
    Case("many moves", ((4, F32), (None, F32)), slots=300, records=700, moves=290),
]


def inputs(case: Case, device: torch.device) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor]:
    """Random bits in parts and records; some moves have no slot, some no save, some no load."""
    generator = torch.Generator().manual_seed(0)

    def bits(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    parts = []
    for columns, dtype in case.parts:
        row = () if columns is None else (columns,)
        flat = bits((case.slots * (1 if columns is None else columns) + case.shifted) * dtype.itemsize).view(dtype)
        parts.append(flat.to(device)[case.shifted :].view(case.slots, *row))
    records = bits(case.records, layout_of(parts).nbytes)
    slots = torch.randperm(case.slots, generator=generator)[: case.moves]
    places = torch.randperm(case.records, generator=generator)
    saves, loads = places[: case.moves].clone(), places[case.moves : 2 * case.moves].clone()
    for numbers, every in ((slots, 5), (saves, 3), (loads, 4)):
        numbers[torch.arange(case.moves) % every == 2] = -1
    return parts, records.to(device), slots.to(device), saves.to(device), loads.to(device)


def bytes_of(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.view(torch.uint8) if tensor.dim() == 2 else tensor[:, None].view(torch.uint8) for tensor in tensors]


@pytest.mark.parametrize("case", CASES, ids=ids_of(CASES))  # type: ignore[arg-type]
@pytest.mark.parametrize("device", UPDATES)
def test_moves_are_those_of_the_reference(where: torch.device, case: Case) -> None:
    expected, got = inputs(case, torch.device("cpu")), inputs(case, where)
    move_rows_ref(*expected)
    move_rows(*got)
    assert_same_bits(got[1].cpu(), expected[1])
    assert_same_bits([part.cpu() for part in bytes_of(got[0])], bytes_of(expected[0]))


@pytest.mark.parametrize("device", UPDATES)
def test_a_victim_goes_out_before_the_newcomer_comes_in(where: torch.device) -> None:
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=where)
    state = torch.tensor([5.0, 6.0], device=where)
    layout = record_layout([(2,), ()], [F32, F32])
    assert layout == ((0, 8), 64)
    records = torch.zeros(3, layout.nbytes, dtype=torch.uint8, device=where)
    records.view(F32)[2, :3] = torch.tensor([7.0, 8.0, 9.0])
    slot, save, load = (torch.tensor([n], device=where) for n in (1, 0, 2))
    move_rows([weights, state], records, slot, save, load)
    assert records.view(F32)[:, :3].tolist() == [[3, 4, 6], [0, 0, 0], [7, 8, 9]]
    assert weights.tolist() == [[1, 2], [7, 8]] and state.tolist() == [5, 9]


@pytest.mark.parametrize("device", UPDATES)
def test_rows_that_leave_and_return_are_the_same_bits(where: torch.device) -> None:
    """NaN with a payload, infinities, zeros of both signs and subnormal numbers among them."""
    rows = torch.tensor([0x7FC12345, -0x400000, 0x7F800000, -(2**31), 0, 1], dtype=torch.int32).view(F32)
    weights = rows.repeat(4, 1).to(where)
    records = torch.zeros(4, 64, dtype=torch.uint8, device=where)
    every, nothing = torch.arange(4, device=where), torch.full((4,), -1, device=where)
    move_rows([weights], records, every, every, nothing)
    weights.zero_()
    move_rows([weights], records, every, nothing, every.flip(0))
    assert_same_bits(weights.view(torch.int32).cpu(), rows.view(torch.int32).repeat(4, 1))


def test_parts_lie_where_vectors_can_reach_them() -> None:
    """Elements on 16 bytes, numbers of a row behind them, whole records in lines of a cache."""
    assert record_layout([(3,), (3,), (), ()], [F16, F32, F32, F32]) == ((0, 16, 28, 32), 64)
    assert record_layout([(128,), ()], [F32, F32]) == ((0, 512), 576)
    assert record_layout([(3,), ()], [F16, F32]) == ((0, 8), 64)
    assert record_layout([(4,), (), (4,)], [F32, F32, F32]) == ((0, 32, 16), 64)
    assert record_layout([(128,)] * 3, [F32] * 3) == ((0, 512, 1024), 1536)


def test_bad_numbers_move_nothing_on_a_cpu() -> None:
    for place, name, count in ((2, "slots", 9), (3, "saves", 30), (4, "loads", 30)):
        given: list[Any] = [*inputs(CASES[1], torch.device("cpu"))]
        before = [given[1].clone(), *(part.clone() for part in bytes_of(given[0]))]
        given[place] = given[place].clone()
        given[place][0] = count
        with pytest.raises(IndexError, match=re.escape(f"move_rows: {name}[0] is {count}, there are {count}")):
            move_rows(*given)
        assert_same_bits([given[1], *bytes_of(given[0])], before)


def changed(place: int, change: Any) -> Any:
    given: list[Any] = [*inputs(CASES[1], torch.device("cpu"))]
    given[place] = change(given[place])
    return given


BAD = [
    (0, lambda parts: [], ValueError, "a row needs at least one part"),
    (0, lambda parts: [parts[0], parts[1][:3]], ValueError, "parts[1] must be [S, w] or [S], S = 9, got [3]"),
    (0, lambda parts: [parts[0].t().contiguous().t(), parts[1]], ValueError, "parts[0] must be contiguous"),
    (0, lambda parts: [parts[0], parts[1].to("meta")], ValueError, "parts[1] is on meta, parts[0] on cpu"),
    (1, lambda records: records.float(), TypeError, "records must be uint8, got torch.float32"),
    (1, lambda records: records[:, 64:], ValueError, "records must be contiguous [R, 576] for these parts"),
    (1, lambda records: records.to("meta"), ValueError, "records must be on cpu or pinned, got meta"),
    (2, lambda slots: slots.int(), TypeError, "slots must be int64, got torch.int32"),
    (3, lambda saves: saves[1:], ValueError, "saves must be [7] as slots are, got [6]"),
    (4, lambda loads: loads.to("meta"), ValueError, "loads must be on cpu as the parts are, got meta"),
]


@pytest.mark.parametrize(("place", "change", "error", "message"), BAD, ids=[message for *_, message in BAD])
def test_bad_input_is_named(place: int, change: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        move_rows(*changed(place, change))


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str) -> None:
    torch.library.opcheck(torch.ops.shardwise.move_rows.default, inputs(CASES[1], torch_device(device)))


def test_it_compiles() -> None:
    def step(parts: list[Tensor], records: Tensor, slots: Tensor, saves: Tensor, loads: Tensor) -> Tensor:
        move_rows(parts, records, slots, saves, loads)
        return parts[0] + 1

    expected, got = inputs(CASES[1], torch.device("cpu")), inputs(CASES[1], torch.device("cpu"))
    step(*expected)
    torch.compile(step, fullgraph=True, backend="aot_eager")(*got)
    assert_same_bits([got[1], *bytes_of(got[0])], [expected[1], *bytes_of(expected[0])])

"""Ops that FBGEMM's names ask for beside the modules: kernels give their references' bits, and torch knows the ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_inputs import DEVICES, torch_device

from shardwise.kernels import pieces
from shardwise.kernels.jagged import requests
from shardwise.kernels.quantized import fp8_rows, small_floats
from shardwise.perf.selftest.agreement import Tolerance, compare
from shardwise.perf.selftest.check import on
from shardwise.perf.selftest.served_checks import SERVED, Served, few_numbers
from shardwise.perf.selftest.tolerances import SAME

OPS = torch.ops.shardwise
FIRST = list({each.op: each for each in reversed(SERVED)}.values())
# the ops of FIRST, whose table says what opcheck calls
OPCHECKED = {
    "bound_ids", "float_to_bfloat16", "fp8_part_ends", "from_float8", "from_fp8_parts", "from_fused_rows",
    "from_fused_tables", "hashed_rows", "identity_slots", "inside_pieces", "masked_counts", "murmur_hash",
    "place_pieces", "remapped_rows", "reorder_request_lengths", "reorder_request_values", "restore_request_values",
    "share_exponents", "take_masked", "take_pieces", "to_float8", "to_fp8_parts", "to_fused_rows",
}  # fmt: skip
# the interpreter cuts fp32 off where a GPU rounds it to bf16
CUT = Tolerance("bf16", {torch.bfloat16: 8e-3}, "The interpreter cuts fp32 numbers off to bf16, a GPU rounds them.")


def name(served: Served) -> str:
    return f"{served.op}, {served.words}"


@pytest.mark.parametrize("served", SERVED, ids=name)
@pytest.mark.parametrize("device", DEVICES)
def test_a_call_gives_the_references_bits(device: str, served: Served) -> None:
    there = torch_device(device)
    got = _flat(served.call(*on(there, list(served.inputs()))))
    expected = _flat(served.call_reference(*served.inputs()))
    assert compare(got, expected, CUT if device == "interpreted" else SAME)[1] == []


def _flat(result: Any) -> list[Any]:
    return [each.cpu() for each in (result if isinstance(result, tuple) else [result])]


def test_the_table_has_every_op_that_is_checked_here() -> None:
    assert {each.op for each in FIRST} == OPCHECKED


@pytest.mark.parametrize("served", FIRST, ids=name)
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str, served: Served) -> None:
    given = on(torch_device(device), list(served.inputs()))
    if served.op in ("take_pieces", "place_pieces"):
        given[0].requires_grad_()
    torch.library.opcheck(getattr(OPS, served.op).default, tuple(given))


@pytest.mark.parametrize("device", DEVICES)
def test_sequences_of_requests_come_back_as_they_were(device: str) -> None:
    """The gradient of rows put into another order is put back, without a sum."""
    there = torch_device(device)
    served = next(each for each in SERVED if each.op == "reorder_request_values" and "(20,)" in each.words)
    values, *rest = on(there, list(served.inputs()))
    torch.library.opcheck(OPS.reorder_request_values.default, (values.requires_grad_(), *rest))
    moved = OPS.reorder_request_values(values, *rest)
    upstream = torch.arange(moved.numel(), dtype=torch.float32, device=there).view(moved.shape)
    (grad,) = torch.autograd.grad(moved, values, upstream)
    assert torch.equal(OPS.reorder_request_values(grad, *rest), upstream)


def test_values_of_several_bags_each_have_no_gradient() -> None:
    served = next(each for each in SERVED if each.op == "reorder_request_values" and "broadcast" in each.words)
    values, *rest = served.inputs()
    moved = OPS.reorder_request_values(values.double().requires_grad_(), *rest)
    with pytest.raises(RuntimeError, match="values that are broadcast or padded have no gradient"):
        moved.sum().backward()


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_with_a_nan_has_no_numbers_at_all(device: str) -> None:
    """Maxima pass over a NaN in a kernel: its row would have been scaled by the others."""
    x = torch.ones(3, 8, device=torch_device(device))
    x[1, 3] = float("nan")
    made = OPS.to_fp8_parts(x, 8, fp8_rows.EPSILON, 0, 0, True).cpu()
    assert bool((made[1, :8] & 0x7F == 0x7F).all())
    assert torch.equal(made[[0, 2]], fp8_rows.to_fp8_parts_ref(x.cpu()[[0, 2]], 8, fp8_rows.EPSILON, 0, 0, True))


@pytest.mark.parametrize("device", DEVICES)
def test_nothing_is_launched_for_nothing(device: str) -> None:
    """Rows, columns, bags or requests of which there are none."""
    there = torch_device(device)
    none, offsets = torch.zeros(0, device=there), torch.zeros(1, dtype=torch.int64, device=there)
    integers = none.long()
    assert OPS.to_fp8_parts(torch.zeros(0, 5, device=there), 8, 0.0, 0, 3, True).shape == (0, 16)
    assert OPS.share_exponents(torch.zeros(0, 5, device=there), 2, 3, 15, 1.0).shape == (0, 5)
    assert OPS.to_fused_rows(torch.zeros(0, 8, device=there), 8, True, None).shape == (0, 16)
    assert OPS.take_pieces(none, integers, offsets, None).shape == (0,)
    assert OPS.place_pieces(none, integers, offsets, 3).tolist() == [0, 0, 0]
    assert OPS.inside_pieces(integers, integers, 2).tolist() == [False, False]
    assert OPS.masked_counts(none.bool(), offsets).shape == (0,)
    assert OPS.reorder_request_lengths(integers, offsets, 3, 0, 0, False).shape == (0,)
    assert OPS.reorder_request_values(none, offsets, offsets, offsets, 0, 0, False, 0).shape == (0,)
    assert OPS.murmur_hash(integers, 0, 0).shape == (0,)
    assert OPS.bound_ids(integers, torch.ones(1, dtype=torch.int64, device=there), torch.zeros(
        2, dtype=torch.int64, device=there), True).tolist() == [0]  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
def test_ids_that_lie_apart_are_corrected_where_they_lie(device: str) -> None:
    there = torch_device(device)
    apart = torch.tensor([[3, 7], [99, 7], [-5, 7]], device=there)
    count = OPS.bound_ids(apart[:, 0], torch.tensor([9], device=there), torch.tensor([0, 3], device=there), True)
    assert count.tolist() == [2]
    assert apart.tolist() == [[3, 7], [0, 7], [0, 7]]


@pytest.mark.parametrize("device", DEVICES)
def test_functions_that_programs_call_give_what_the_ops_give(device: str) -> None:
    """On the CPU they go past torch's dispatcher."""
    x = few_numbers(7, 30, broken=False).to(torch_device(device))
    codes = small_floats.to_float8(x, 4, 7, 240.0)
    for got, expected in (
        (small_floats.float_to_bfloat16(x), OPS.float_to_bfloat16(x)),
        (codes, OPS.to_float8(x, 4, 7, 240.0)),
        (small_floats.from_float8(codes, 4, 7), OPS.from_float8(codes, 4, 7)),
        (fp8_rows.to_fp8_rows(x, 32, True), OPS.to_fp8_parts(x, 32, fp8_rows.EPSILON, 0, 0, True)),
    ):
        assert torch.equal(got, expected)


def test_references_of_pieces_are_loops_over_bags() -> None:
    values, begins, offsets = torch.arange(9), torch.tensor([1, 3, 7]), torch.tensor([0, 2, 2, 4])
    taken = [1, 2, 7, 8]
    assert pieces.take_pieces_ref(values, begins, offsets).tolist() == taken
    assert pieces.place_pieces_ref(torch.tensor(taken), begins, offsets, 9).tolist() == [0, 1, 2, 0, 0, 0, 0, 7, 8]
    mask = torch.tensor([True, False, True, True, False, True, False, False, True])
    assert pieces.masked_counts_ref(mask, torch.tensor([0, 3, 3, 8])).tolist() == [2, 0, 2]


def test_references_of_requests_are_loops_over_requests() -> None:
    """Two requests of 1 and 2 items, two features: bags 0, 1 and 2, 3, 4, 5."""
    where = torch.tensor([0, 1, 3])
    lengths = torch.tensor([10, 20, 30, 31, 40, 41])
    assert requests.reorder_lengths_ref(lengths, where, 2, 3, 3, False).tolist() == [10, 30, 31, 20, 40, 41]
    assert requests.reorder_lengths_ref(lengths, where, 2, 3, 4, False).tolist() == [10, 30, 31, 0, 20, 40, 41, 0]
    per_request = torch.tensor([1, 2, 3, 4])
    assert requests.reorder_lengths_ref(per_request, where, 2, 3, 3, True).tolist() == [1, 3, 3, 2, 4, 4]

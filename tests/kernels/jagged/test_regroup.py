"""Columns put together anew, and their gradients, against plain lists; and the plans by which it is done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from kernel_inputs import DEVICES, assert_close, assert_compiled_equals_eager, assert_same_bits, torch_device
from torch import Tensor

from shardwise.kernels import (
    RegroupPlan,
    permute_pooled,
    plan_pieces,
    plan_regroup,
    regroup,
)
from shardwise.kernels.jagged import regroup as regrouping
from shardwise.kernels.jagged.regroup import regroup_ref
from shardwise.kernels.jagged.regroup_plan import Piece, transposed

OPS = torch.ops.shardwise
Pieces = list[list[Piece]]
# columns of the inputs, pieces of the outputs
CASES: dict[str, tuple[list[int], Pieces]] = {
    "one to one": ([4], [[(0, 0, 4)]]),
    "swapped": ([8, 4], [[(1, 0, 4), (0, 4, 4), (0, 0, 4)]]),
    "odd columns": ([3, 5, 2], [[(2, 0, 1), (1, 1, 3)], [(0, 0, 3), (2, 1, 1)]]),
    "by two": ([6, 2], [[(1, 0, 2), (0, 2, 4)], [(0, 0, 2)]]),
    "left out": ([8, 4, 4], [[(0, 4, 4)], [(2, 0, 4)]]),
    "three times": ([8, 4], [[(0, 4, 4), (1, 0, 4), (0, 4, 4)], [(0, 0, 8)]]),
    "overlapping": ([12], [[(0, 0, 8), (0, 4, 8)], [(0, 3, 6)]]),
    "no pieces": ([4], [[], [(0, 0, 4)], []]),
    "no columns": ([0, 4], [[(0, 0, 0), (1, 0, 0), (1, 0, 4)]]),
    "no outputs": ([4], []),
    "wide": ([300, 72], [[(1, 0, 72), (0, 0, 150)], [(0, 150, 150)]]),
    "20 to 3": ([4] * 20, [[(i, 0, 4) for i in range(19, -1, -1)], [(3, 0, 4)], [(7, 0, 2), (3, 1, 3)]]),
    "2 to 20": ([16, 4], [[(i % 2, 0, 4)] for i in range(20)]),
}


def op_regroup(tensors: Sequence[Tensor], pieces: Pieces) -> list[Tensor]:
    """The registered op, which eager calls on the CPU go past."""
    flat, repeats, widths = plan_pieces([tensor.shape[1] for tensor in tensors], pieces).runs
    return OPS.regroup_columns(list(tensors), flat, repeats, widths)  # type: ignore[no-any-return]


WAYS: list[Callable[..., list[Tensor]]] = [regroup, op_regroup]


def inputs(
    widths: Sequence[int], device: torch.device, batch: int = 5, dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(batch, width, generator=generator, dtype=torch.float64) for width in widths]
    return [tensor.to(dtype).to(device).requires_grad_() for tensor in drawn]


def gradients(outs: list[Tensor], tensors: list[Tensor]) -> list[Tensor]:
    """By each of the tensors, given fixed gradients of those outputs that have one."""
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(out.shape, generator=generator).to(out) for out in outs]
    wanted = [(out, grad) for out, grad in zip(outs, upstream, strict=True) if out.requires_grad]
    if not wanted:
        return []
    outs, upstream = [list(each) for each in zip(*wanted, strict=True)]
    return list(torch.autograd.grad(outs, tensors, upstream, allow_unused=True, materialize_grads=True))


@pytest.mark.parametrize("batch", [0, 1, 5, 37])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_regroup_and_its_gradients_match_the_reference(device: str, case: str, batch: int) -> None:
    if device == "interpreted" and batch != 5 and case != "three times":
        pytest.skip("the interpreter is slow")
    widths, pieces = CASES[case]
    tensors = inputs(widths, torch_device(device), batch)
    want = regroup_ref(tensors, pieces)
    reference_grads = gradients(want, tensors)
    # where kernels run, both ways lead to them
    for way in WAYS if device == "cpu" else WAYS[:1]:
        got = way(tensors, pieces)
        assert len(got) == len(want)
        assert_same_bits(got, want)
        grads = gradients(got, tensors)
        assert len(grads) == len(reference_grads)
        assert_close(grads, reference_grads)
        assert_same_bits(grads, gradients(way(tensors, pieces), tensors))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8])
@pytest.mark.parametrize("device", DEVICES)
def test_regroup_of_every_dtype(where: torch.device, dtype: torch.dtype) -> None:
    widths, pieces = CASES["three times"]
    tensors = [torch.arange(3 * width).view(3, width).to(dtype).to(where) for width in widths]
    for way in WAYS:
        assert_same_bits(way(tensors, pieces), regroup_ref(tensors, pieces))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_halves_are_added_in_fp32(device: str, dtype: torch.dtype) -> None:
    """40 times 1/1024 on top of 4 is lost where each sum is rounded to a half."""
    x = torch.zeros(2, 8, dtype=dtype, device=torch_device(device), requires_grad=True)
    (out,) = regroup([x], [[(0, 0, 8)] * 41])
    upstream = torch.full_like(out, 1 / 1024)
    upstream[:, :8] = 4.0
    (grad,) = torch.autograd.grad(out, x, upstream)
    assert_same_bits(grad, torch.full((2, 8), 4 + 40 / 1024).to(dtype))


@pytest.mark.parametrize("device", DEVICES)
def test_inputs_are_read_where_they_lie(where: torch.device) -> None:
    """Columns of a wider tensor, and rows that do not begin on 16 bytes."""
    wide, shifted = torch.randn(3, 20, device=where), torch.randn(25, device=where)[1:].view(3, 8)
    tensors, pieces = [wide[:, 3:11], shifted], [[(1, 4, 4), (0, 0, 8)]]
    for way in WAYS:
        assert_same_bits(way(tensors, pieces)[0], regroup_ref(tensors, pieces)[0])


@st.composite
def regroupings(draw: Any) -> tuple[list[int], Pieces, int]:
    widths = draw(st.lists(st.integers(0, 6), min_size=1, max_size=4))

    def piece() -> Piece:
        tensor = draw(st.integers(0, len(widths) - 1))
        ends = sorted(draw(st.tuples(*[st.integers(0, widths[tensor])] * 2)))
        return tensor, ends[0], ends[1] - ends[0]

    pieces = [[piece() for _ in range(draw(st.integers(0, 4)))] for _ in range(draw(st.integers(0, 4)))]
    return widths, pieces, draw(st.integers(0, 3))


@settings(max_examples=60, deadline=None)
@given(regroupings())
def test_regroup_equals_lists(case: tuple[list[int], Pieces, int]) -> None:
    widths, pieces, batch = case
    rows = [[[100.0 * t + 10 * b + c for c in range(width)] for b in range(batch)] for t, width in enumerate(widths)]
    tensors = [torch.tensor(r).view(batch, w).requires_grad_() for r, w in zip(rows, widths, strict=True)]
    want = [
        [[number for t, first, n in listed for number in rows[t][b][first : first + n]] for b in range(batch)]
        for listed in pieces
    ]
    for way in WAYS:
        outs = way(tensors, pieces)
        assert [out.tolist() for out in outs] == want
        sums = sum(((g + 1) * out.sum() for g, out in enumerate(outs)), torch.zeros(()))
        if not sums.requires_grad:
            continue
        back = [[0.0] * width for width in widths]
        for g, listed in enumerate(pieces):
            for t, first, n in listed:
                for c in range(first, first + n):
                    back[t][c] += g + 1
        grads = torch.autograd.grad(sums, tensors, allow_unused=True, materialize_grads=True)
        assert [grad.tolist() for grad in grads] == [[value] * batch for value in back]


@pytest.mark.parametrize("case", ["odd columns", "three times"])
@pytest.mark.parametrize("device", ["cpu", DEVICES[2]])
def test_gradcheck(device: str, case: str) -> None:
    widths, pieces = CASES[case]
    tensors = inputs(widths, torch_device(device), 2, torch.float64)
    for way in WAYS:
        assert torch.autograd.gradcheck(lambda *xs, way=way: tuple(way(xs, pieces)), tensors)
    assert torch.autograd.gradgradcheck(lambda *xs: tuple(op_regroup(xs, pieces)), tensors)


@pytest.mark.parametrize("case", ["swapped", "odd columns", "three times", "left out"])
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str, case: str) -> None:
    widths, pieces = CASES[case]
    flat, repeats, columns = plan_pieces(widths, pieces).runs
    args = (inputs(widths, torch_device(device)), list(flat), repeats, list(columns))
    torch.library.opcheck(OPS.regroup_columns.default, args)


@pytest.mark.parametrize("device", DEVICES)
def test_compiled_forward_and_backward_equal_eager_for_any_batch(where: torch.device) -> None:
    widths, pieces = CASES["three times"]
    plan = plan_pieces(widths, pieces)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        first, second = regroup([x, y], plan)
        return torch.sin(first).sum() * torch.cos(permute_pooled(second, [4, 4], [1, 0, 1])).sum()

    assert_compiled_equals_eager(loss, (tuple(inputs(widths, where, batch)) for batch in (5, 9)), 1e-6)


@pytest.mark.parametrize("order", [[2, 0, 1], [1, 1, 0], [2], [], [3, 3, 3, 0]])
@pytest.mark.parametrize("device", DEVICES)
def test_permute_pooled_puts_tables_in_order(device: str, order: list[int]) -> None:
    dims = [4, 8, 4, 0]
    (pooled,) = inputs([16], torch_device(device))
    got = permute_pooled(pooled, dims, order)
    want = torch.cat([pooled[:, :0], *(pooled.split(dims, 1)[t] for t in order)], 1)
    assert_same_bits(got, want)
    assert_close(gradients([got], [pooled]), gradients([want], [pooled]))


def test_a_permutation_has_its_inverse_for_gradient() -> None:
    pooled, order = torch.randn(3, 12), [2, 0, 1]
    dims = [2, 4, 6]
    inverse = [order.index(t) for t in range(3)]
    there = permute_pooled(pooled, dims, order)
    assert_same_bits(permute_pooled(there, [dims[t] for t in order], inverse), pooled)


KEYS, DIMS = [["user", "age"], ["item"]], [[4, 8], [2]]


def test_a_plan_names_the_columns_of_keys_and_joins_neighbours() -> None:
    plan = plan_regroup(KEYS, DIMS, [["item", "user", "age"], ["age"], []])
    assert isinstance(plan, RegroupPlan)
    assert plan.widths == (12, 2)
    assert plan.pieces == (((1, 0, 2), (0, 0, 12)), ((0, 4, 8),), ())
    assert plan == plan_pieces([12, 2], [[(1, 0, 2), (0, 0, 4), (0, 4, 8)], [(0, 4, 8)], [(1, 0, 0)]])
    assert plan.output_widths == (14, 8, 0)
    assert plan.repeats
    assert not plan_regroup(KEYS, DIMS, [["user"], ["item"]]).repeats


def test_a_plan_is_made_once() -> None:
    assert plan_regroup(KEYS, DIMS, [["item"]]) is plan_regroup([list(k) for k in KEYS], DIMS, [["item"]])


@pytest.mark.parametrize("case", CASES)
def test_the_transposed_of_the_transposed_adds_the_same_columns(case: str) -> None:
    widths, pieces = CASES[case]
    runs = plan_pieces(widths, pieces).runs
    back = transposed(runs, widths)
    assert sum(row[2] for row in back.rows()) == sum(widths)
    again = transposed(back, runs.widths)
    x = [torch.randint(9, (2, width)) for width in widths]
    for actual, other in zip(
        OPS.regroup_columns(x, *runs), OPS.regroup_columns(x, *again), strict=True
    ):  # fmt: skip
        assert_same_bits(actual, other)


X, Y = torch.rand(3, 4), torch.rand(3, 2)
BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "unknown key": (lambda: plan_regroup(KEYS, DIMS, [["what"]]), KeyError,
                    r"unknown key 'what', keys are \['user', 'age', 'item'\]"),
    "key twice": (lambda: plan_regroup([["a"], ["b", "a"]], [[4], [2, 2]], [["a"]]), ValueError,
                  "key 'a' is in 2 of the KeyedTensors: rename it or leave all but one out"),
    "dims": (lambda: plan_regroup([["a"]], [[4, 2]], []), ValueError, r"1 keys \['a'\] but 2 dims"),
    "inputs": (lambda: plan_regroup([["a"]], [], []), ValueError, "keys of 1 inputs but dims of 0"),
    "piece": (lambda: regroup([X], [[(0, 2, 3)]]), ValueError, "columns 2 to 5 are outside tensor 0, which has 4"),
    "negative": (lambda: regroup([X], [[(0, -1, 3)]]), ValueError, "columns -1 to 2 are outside tensor 0"),
    "tensor": (lambda: regroup([X], [[(1, 0, 3)]]), ValueError, "output 0: there is no tensor 1, only 1"),
    "number of tensors": (lambda: regroup([X], plan_pieces([4, 2], [])), ValueError, "is for 2 tensors, got 1"),
    "no tensors": (lambda: regroup([], []), ValueError, "at least one tensor"),
    "width": (lambda: regroup([X], plan_pieces([5], [])), ValueError,
              r"tensor 0 must have shape \[B, 5\], got \[3, 4\]"),
    "batch": (lambda: regroup([X, Y[:2]], []), ValueError, r"one batch size, got 3 and 2 \(tensor 1\)"),
    "dtype": (lambda: regroup([X, Y.double()], []), TypeError, "one dtype, got torch.float32 and torch.float64"),
    "device": (lambda: regroup([X, Y.to("meta")], []), ValueError, "one device, got cpu and meta"),
    "dims of pooled": (lambda: permute_pooled(X, [4, 1], [0]), ValueError, r"must have shape \[B, 5\], got \[3, 4\]"),
    "order": (lambda: permute_pooled(X, [3, 1], [0, 2]), IndexError, "order: there is no table 2, only 2"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case: str) -> None:
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("device", DEVICES)
def test_the_same_bits_with_one_tensor_a_launch(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """More tensors than a launch takes are joined first, and more outputs are left to a further launch."""
    widths, pieces = CASES["three times"]
    tensors = inputs(widths, torch_device(device))
    once = op_regroup(tensors, pieces)
    grads = gradients(once, tensors)
    monkeypatch.setattr(regrouping, "_MOST", 1)
    again = op_regroup(tensors, pieces)
    assert_same_bits([*once, *grads], [*again, *gradients(again, tensors)])

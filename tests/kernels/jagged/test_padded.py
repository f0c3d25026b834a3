"""Jagged values go to a padded dense tensor and back as lists of lists do, on every path, with their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from kernel_inputs import UPDATES, assert_compiled_equals_eager, assert_same_bits, torch_device
from padded_inputs import CASES, Case, held, nested, offsets_of, padded
from torch import Tensor

from shardwise.kernels import (
    jagged_dense_add,
    jagged_dense_add_jagged,
    jagged_dense_mul,
    jagged_jagged_mul,
    jagged_to_padded_dense,
    padded_dense_to_jagged,
)
from shardwise.kernels.cpu import padded as cpu_padded
from shardwise.kernels.jagged import elementwise
from shardwise.kernels.jagged.padded import jagged_to_padded_dense_ref, padded_dense_to_jagged_ref

OPS = torch.ops.shardwise
LOOPS = cpu_padded, "_loops"
EVERY = pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
DEVICE = pytest.mark.parametrize("device", UPDATES)


def as_lists(tensor: Tensor, dims: int) -> Any:
    """The tensor's first dims as nested lists, rows as tuples (numbers as they are)."""
    if dims:
        return [as_lists(part, dims - 1) for part in tensor]
    return tuple(tensor.flatten().tolist()) if tensor.dim() else tensor.item()


@DEVICE
@EVERY
def test_padded_dense_equals_the_reference(device: str, case: Case) -> None:
    values, offsets = case.values(torch_device(device)), case.offsets(torch_device(device))
    for filling in (0.0, 3.0):
        expected = jagged_to_padded_dense_ref(values, offsets, case.extents, filling)
        assert_same_bits(jagged_to_padded_dense(values, offsets, case.extents, filling), expected)
        assert expected.dtype == case.dtype
        assert_same_bits(OPS.jagged_to_padded_dense(values, offsets, case.extents, filling), expected)


@DEVICE
@EVERY
def test_values_out_of_a_padded_dense_equal_the_reference(device: str, case: Case) -> None:
    dense, offsets = case.dense(torch_device(device)), case.offsets(torch_device(device))
    expected = padded_dense_to_jagged_ref(dense, offsets, case.total)
    assert_same_bits(padded_dense_to_jagged(dense, offsets, case.total), expected)
    assert_same_bits(OPS.padded_dense_to_jagged(dense, offsets, case.total), expected)
    assert_same_bits(padded_dense_to_jagged(dense, offsets), expected[: case.total - case.past])


@DEVICE
@EVERY
def test_sums_and_products_equal_their_references(device: str, case: Case) -> None:
    values, offsets, dense = (
        case.values(torch_device(device)),
        case.offsets(torch_device(device)),
        case.dense(torch_device(device)),
    )
    for name in ("jagged_dense_add", "jagged_dense_add_jagged", "jagged_dense_mul"):
        expected = getattr(elementwise, f"{name}_ref")(values, offsets, dense)
        assert_same_bits(getattr(elementwise, name)(values, offsets, dense), expected)
        assert_same_bits(getattr(OPS, name)(values, offsets, dense), expected)
    other = case.values(torch_device(device), seed=2)
    expected = elementwise.padded_jagged_product_ref(values, other, offsets, case.extents)
    assert_same_bits(OPS.padded_jagged_product(values, other, offsets, case.extents), expected)
    assert_same_bits(jagged_jagged_mul(values, other, offsets), values * other)


@st.composite
def jagged(draw: st.DrawFn) -> tuple[list[list[int]], list[int], bool, torch.dtype]:
    """Lengths of bags, extents, whether values are numbers, and the dtype of offsets."""
    num_rows, lengths, extents = draw(st.integers(0, 4)), [], []
    for _ in range(draw(st.integers(1, 3))):
        lengths.append(draw(st.lists(st.integers(0, 3), min_size=num_rows, max_size=num_rows)))
        extents.append(draw(st.integers(0, 4)))
        num_rows = sum(lengths[-1])
    return lengths, extents, draw(st.booleans()), draw(st.sampled_from([torch.int32, torch.int64]))


@settings(max_examples=50, deadline=None)
@given(jagged())
def test_any_bags_go_there_and_back_as_lists_do(
    path: str, drawn: tuple[list[list[int]], list[int], bool, torch.dtype]
) -> None:
    lengths, extents, numbers, ends = drawn
    case = Case("drawn", tuple(map(tuple, lengths)), tuple(extents), row=() if numbers else (3,), ends=ends)
    offsets, values, dense, dims = case.offsets(), case.values(), case.dense(), len(lengths)
    zero: Any = 0.0 if numbers else (0.0,) * 3
    bags = nested(as_lists(values, 1), lengths)
    got = jagged_to_padded_dense(values, offsets, extents)
    assert got.shape == dense.shape
    assert as_lists(got, dims + 1) == padded(bags, extents, zero)
    assert as_lists(padded_dense_to_jagged(dense, offsets), 1) == held(as_lists(dense, dims + 1), bags, dims + 1, zero)
    # what was neither cut nor filled comes back
    back = padded_dense_to_jagged(jagged_to_padded_dense(values, offsets, [4] * dims), offsets)
    assert torch.equal(back, values)


def calls(case: Case) -> dict[str, tuple[Callable[..., Tensor], list[Tensor]]]:
    """Each op as a function of its differentiable inputs, in float64."""
    offsets, extents = case.offsets(), case.extents
    values, other, dense = case.values().double(), case.values(seed=2).double(), case.dense().double()
    return {
        "to padded": (lambda v: jagged_to_padded_dense(v, offsets, extents, 1.5), [values]),
        "to jagged": (lambda d: padded_dense_to_jagged(d, offsets, case.total), [dense]),
        "add": (lambda v, d: jagged_dense_add(v, offsets, d), [values, dense]),
        "add jagged": (lambda v, d: jagged_dense_add_jagged(v, offsets, d), [values, dense]),
        "multiply": (lambda v, d: jagged_dense_mul(v, offsets, d), [values, dense]),
        "product": (lambda x, y: OPS.padded_jagged_product(x, y, offsets, extents), [values, other]),
        "jagged product": (lambda x, y: jagged_jagged_mul(x, y, offsets), [values, other]),
        "registered to padded": (lambda v: OPS.jagged_to_padded_dense(v, offsets, extents, 1.5), [values]),
        "registered to jagged": (lambda d: OPS.padded_dense_to_jagged(d, offsets, case.total), [dense]),
        "registered add": (lambda v, d: OPS.jagged_dense_add(v, offsets, d), [values, dense]),
        "registered add jagged": (lambda v, d: OPS.jagged_dense_add_jagged(v, offsets, d), [values, dense]),
        "registered multiply": (lambda v, d: OPS.jagged_dense_mul(v, offsets, d), [values, dense]),
    }


SMOOTH = [case for case in CASES if case.name in ("past the last offset", "2 jagged dims of numbers")]


@pytest.mark.parametrize("case", SMOOTH, ids=[case.name for case in SMOOTH])
@pytest.mark.parametrize("name", calls(SMOOTH[0]))
def test_gradients_of_first_and_second_order(path: str, name: str, case: Case) -> None:
    function, given_ = calls(case)[name]
    wanted = [tensor.clone().requires_grad_() for tensor in given_]
    assert torch.autograd.gradcheck(function, wanted)
    if path == "torch":
        assert torch.autograd.gradgradcheck(function, wanted)


@DEVICE
@pytest.mark.parametrize("case", SMOOTH, ids=[case.name for case in SMOOTH])
def test_gradients_equal_those_of_the_references(device: str, case: Case) -> None:
    offsets, extents = case.offsets(torch_device(device)), case.extents
    values, dense = (
        case.values(torch_device(device)).requires_grad_(),
        case.dense(torch_device(device)).requires_grad_(),
    )
    other = case.values(torch_device(device), seed=2).requires_grad_()
    for got, expected, wanted in (
        (jagged_to_padded_dense(values, offsets, extents), jagged_to_padded_dense_ref(values, offsets, extents),
         [values]),
        (padded_dense_to_jagged(dense, offsets, case.total), padded_dense_to_jagged_ref(dense, offsets, case.total),
         [dense]),
        *(
            (getattr(elementwise, name)(values, offsets, dense),
             getattr(elementwise, f"{name}_ref")(values, offsets, dense), [values, dense])
            for name in ("jagged_dense_add", "jagged_dense_add_jagged", "jagged_dense_mul")
        ),
        (OPS.padded_jagged_product(values, other, offsets, extents),
         elementwise.padded_jagged_product_ref(values, other, offsets, extents), [values, other]),
    ):  # fmt: skip
        upstream = torch.arange(1.0, got.numel() + 1, device=torch_device(device)).view_as(got)
        for grad, reference in zip(
            torch.autograd.grad(got, wanted, upstream), torch.autograd.grad(expected, wanted, upstream), strict=True
        ):
            assert_same_bits(grad, reference)


OPCHECKED = [case for case in CASES if case.name in ("past the last offset", "2 jagged dims of numbers", "fp16")]


@pytest.mark.parametrize("case", OPCHECKED, ids=[case.name for case in OPCHECKED])
@pytest.mark.parametrize("device", UPDATES[:-1])
def test_opcheck(device: str, case: Case) -> None:
    values, offsets = case.values(torch_device(device)).requires_grad_(), case.offsets(torch_device(device))
    dense, other = (
        case.dense(torch_device(device)).requires_grad_(),
        case.values(torch_device(device), seed=2).requires_grad_(),
    )
    extents = list(case.extents)
    for op, args in (
        (OPS.jagged_to_padded_dense, (values, offsets, extents, 1.5)),
        (OPS.padded_dense_to_jagged, (dense, offsets, case.total)),
        (OPS.padded_dense_to_jagged, (dense, offsets, None)),
        (OPS.jagged_dense_add, (values, offsets, dense)),
        (OPS.jagged_dense_add_jagged, (values, offsets, dense)),
        (OPS.jagged_dense_mul, (values, offsets, dense)),
        (OPS.padded_jagged_product, (values, other, offsets, extents)),
    ):
        torch.library.opcheck(op.default, args)


def everything(values: Tensor, dense: Tensor, offsets: Tensor) -> Tensor:
    """All ops in one number."""
    most = dense.shape[1]
    padded = jagged_to_padded_dense(values, offsets, most, 0.5) * dense
    padded_sum = padded_dense_to_jagged(jagged_dense_add(values, offsets, padded.sin()), offsets, values.shape[0])
    padded_sum = jagged_dense_mul(padded_sum, [offsets], padded) + jagged_dense_add_jagged(values, [offsets], dense)
    return jagged_jagged_mul(padded_sum, values, offsets).sum() + padded_dense_to_jagged(dense, offsets).sum()


@pytest.mark.parametrize("device", UPDATES[:-1])
def test_one_graph_of_all_ops_forward_and_backward_at_any_sizes(where: torch.device) -> None:
    cases = (Case("compiled", (lengths,), (most,), row=(4,)) for lengths, most in (((3, 0, 2), 2), ((1, 4, 2, 2), 3)))
    assert_compiled_equals_eager(
        everything,
        (
            (case.values(where).requires_grad_(), case.dense(where).requires_grad_(), case.offsets(where)[0])
            for case in cases
        ),
    )


def test_the_same_bits_twice_and_on_any_number_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case("many", (tuple(i % 7 for i in range(500)),), (5,), row=(8,))
    offsets, values, dense = case.offsets(), case.values(), case.dense()
    results: list[Sequence[Tensor]] = []
    for alone in (1 << 30, 1, 1):
        monkeypatch.setattr(cpu_padded, "_ALONE", alone)
        monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
        results.append(
            [
                jagged_to_padded_dense(values, offsets, 5, 1.0),
                padded_dense_to_jagged(dense, offsets),
                jagged_dense_mul(values, offsets, dense),
                jagged_dense_add_jagged(values, offsets, dense),
            ]
        )
    for got in results[1:]:
        assert_same_bits(got, results[0])


def test_a_product_of_what_was_cut_off_is_zero_even_where_it_is_infinite(path: str) -> None:
    values = torch.tensor([2.0, torch.inf, 3.0, torch.nan])
    got = jagged_dense_mul(values, torch.tensor([0, 2, 3]), torch.ones(2, 1))
    assert got.tolist() == [2.0, 0.0, 3.0, 0.0]


def test_transposed_tensors_and_bool_are_taken(path: str) -> None:
    offsets = torch.tensor([[0, 9], [2, 9], [3, 9]])[:, 0]
    values, dense = torch.arange(6.0).view(2, 3).t(), torch.arange(8.0).view(2, 2, 2).transpose(0, 2)
    assert jagged_to_padded_dense(values, offsets, 2).tolist() == [[[0, 3], [1, 4]], [[2, 5], [0, 0]]]
    assert padded_dense_to_jagged(dense, offsets).tolist() == [[0, 4], [2, 6], [1, 5]]
    flags = torch.tensor([True, False, True])
    assert jagged_to_padded_dense(flags, offsets, 2, 1).tolist() == [[True, False], [True, True]]


VALUES, DENSE = torch.ones(5, 2), torch.ones(2, 3, 2)
BAD_OFFSETS = [
    ([1, 2, 5], r"^offsets\[0\] must begin at 0, got 1$"),
    ([0, 6, 5], r"^offsets\[0\] must not fall, got 6 at position 1 and then 5$"),
    ([0, -1, 5], r"^offsets\[0\] must not fall, got 0 at position 0 and then -1$"),
    ([0, 2, 6], r"^offsets\[0\] end at 6, but there are 5 values$"),
    ([0, 2**62, -(2**62)], r"^offsets\[0\] must not fall, got 4611686018427387904 at position 1"),
]


@pytest.mark.parametrize(("numbers", "message"), BAD_OFFSETS)
def test_bad_offsets_are_refused_before_anything_is_read_through_them(
    path: str, numbers: list[int], message: str
) -> None:
    offsets = torch.tensor(numbers)
    for call in (
        lambda: jagged_to_padded_dense(VALUES, offsets, 3),
        lambda: jagged_to_padded_dense(VALUES, offsets, 0),
        lambda: padded_dense_to_jagged(DENSE, offsets, 5),
        lambda: jagged_dense_add(VALUES, offsets, DENSE),
        lambda: jagged_dense_add_jagged(VALUES, offsets, DENSE),
        lambda: jagged_dense_mul(VALUES, offsets, DENSE),
        lambda: OPS.jagged_to_padded_dense(VALUES, [offsets], [3], 0.0),
    ):
        with pytest.raises(ValueError, match=message):
            call()


ZERO, T = torch.tensor([0, 2, 5]), torch.tensor
REFUSED: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    # offsets of an outer dim
    (ValueError, r"^offsets\[0\] end at 3, but there are 2 bags in offsets\[1\]$",
     lambda: jagged_to_padded_dense(VALUES, [T([0, 1, 3]), ZERO], [2, 2])),
    (ValueError, r"^offsets\[1\] must not fall, got 7 at position 1 and then 5$",
     lambda: padded_dense_to_jagged(torch.ones(1, 1, 1), [T([0, 1]), T([0, 7, 5])])),
    (ValueError, r"^offsets\[0\] must not fall", lambda: padded_dense_to_jagged(DENSE, T([0, 2, -3]))),
    (ValueError, "offsets must be 1 to 5 tensors, one for each jagged dim, got 0",
     lambda: jagged_to_padded_dense(VALUES, [], [])),
    (ValueError, "got 6", lambda: jagged_to_padded_dense(VALUES, [ZERO] * 6, [1] * 6)),
    (TypeError, r"offsets\[0\] must be int32 or int64, got torch.float32",
     lambda: jagged_to_padded_dense(VALUES, ZERO.float(), 3)),
    (ValueError, r"offsets\[0\] must be \[bags \+ 1\], got shape \[1, 3\]",
     lambda: jagged_to_padded_dense(VALUES, ZERO[None], 3)),
    (ValueError, r"offsets\[0\] must be \[bags \+ 1\], got shape \[0\]",
     lambda: jagged_to_padded_dense(VALUES, ZERO[:0], 3)),
    (ValueError, r"offsets\[0\] are on cpu, values on meta",
     lambda: jagged_to_padded_dense(VALUES.to("meta"), ZERO, 3)),
    (ValueError, "values must have at least one dim, got a scalar",
     lambda: jagged_to_padded_dense(torch.tensor(1.0), ZERO, 3)),
    (ValueError, "max_lengths must be as many as offsets, got 2 for 1 offsets",
     lambda: jagged_to_padded_dense(VALUES, ZERO, [3, 3])),
    (ValueError, r"max_lengths must be >= 0, got \[-1\]", lambda: jagged_to_padded_dense(VALUES, ZERO, -1)),
    (ValueError, "total_length must be >= 0, got -5", lambda: padded_dense_to_jagged(DENSE, ZERO, -5)),
    (ValueError, r"dense must have a batch dim and 2 jagged dims, got shape \[2, 3\]",
     lambda: padded_dense_to_jagged(DENSE[:, :, 0], [ZERO, ZERO])),
    (ValueError, r"dense has a batch of 1, offsets\[0\] have 2 bags",
     lambda: padded_dense_to_jagged(DENSE[:1], ZERO)),
    (TypeError, "dense must have the dtype of values, torch.float32, got torch.float64",
     lambda: jagged_dense_add(VALUES, ZERO, DENSE.double())),
    (ValueError, r"dense is on meta, values on cpu", lambda: jagged_dense_mul(VALUES, ZERO, DENSE.to("meta"))),
    (ValueError, r"values have shape \[5, 2\], dense \[2, 3\]",
     lambda: jagged_dense_add_jagged(VALUES, ZERO, DENSE[..., 0])),
    (ValueError, r"y must have the shape of x, \[5, 2\], got \[4, 2\]",
     lambda: jagged_jagged_mul(VALUES, VALUES[:4], ZERO)),
    (TypeError, "y must have the dtype of x", lambda: jagged_jagged_mul(VALUES, VALUES.int(), ZERO)),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "call"), REFUSED)
def test_what_does_not_fit_is_refused_with_both_numbers(
    path: str, error: type[Exception], message: str, call: Callable[[], Any]
) -> None:
    with pytest.raises(error, match=message):
        call()


def test_one_offsets_and_its_length_need_no_lists() -> None:
    offsets = offsets_of([2, 3])
    assert torch.equal(jagged_to_padded_dense(VALUES, offsets, 3), jagged_to_padded_dense(VALUES, [offsets], [3]))

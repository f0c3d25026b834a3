"""Permuting segments is picking bags from a list of lists, and the gradient goes back the same way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from kernel_inputs import DEVICES, UPDATES, assert_compiled_equals_eager, assert_same_bits, torch_device
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from shardwise.kernels import (
    expand_into_jagged_permute,
    permute_1d,
    permute_2d,
    permute_segments,
)
from shardwise.kernels.cpu import segments as cpu_segments
from shardwise.kernels.jagged.segments import collect_segments_ref, move_segments_ref

OPS = torch.ops.shardwise
LOOPS = cpu_segments, "loops"
LOOSE = settings(max_examples=50, deadline=None)
Bags = list[list[int]]


@st.composite
def orders(draw: st.DrawFn, most: int = 9) -> tuple[int, list[int]]:
    """A number of segments and an order of them, with repeats and omissions."""
    count = draw(st.integers(0, most))
    order = draw(st.lists(st.integers(0, count - 1), max_size=12)) if count else []
    return count, order


def bags_of(draw: Callable[..., Any], count: int, longest: int = 20) -> Bags:
    return draw(st.lists(st.lists(st.integers(-9, 99), max_size=longest), min_size=count, max_size=count))


def flat(bags: Bags) -> list[int]:
    return [value for bag in bags for value in bag]


INDICES = st.sampled_from([torch.int32, torch.int64])
VALUES = st.sampled_from([torch.int64, torch.int32, torch.int16, torch.float32, torch.float16, torch.bfloat16])


@LOOSE
@given(st.data())
def test_permute_1d_picks_bags(path: str, data: st.DataObject) -> None:
    count, order = data.draw(orders())
    bags = bags_of(data.draw, count)
    lengths = torch.tensor([len(bag) for bag in bags], dtype=data.draw(INDICES))
    permute = torch.tensor(order, dtype=data.draw(INDICES))
    values = torch.tensor(flat(bags), dtype=data.draw(VALUES))
    # rows as weights
    weights = values.double()[:, None] * torch.tensor([1.0, -0.5, 3.0]) if data.draw(st.booleans()) else None
    total = sum(len(bags[p]) for p in order) if data.draw(st.booleans()) else None
    got = permute_1d(permute, lengths, values, weights, permuted_lengths_sum=total)
    picked = [bags[p] for p in order]
    assert got[0].tolist() == [len(bag) for bag in picked]
    assert got[0].dtype == lengths.dtype
    assert got[1].tolist() == flat(picked)
    assert got[1].dtype == values.dtype
    if weights is None:
        assert got[2] is None
    else:
        assert got[2] is not None
        assert got[2].tolist() == [[value, value * -0.5, value * 3.0] for value in flat(picked)]


@LOOSE
@given(st.data())
def test_permute_2d_picks_rows_of_bags(path: str, data: st.DataObject) -> None:
    count, order = data.draw(orders(5))
    batch = data.draw(st.integers(0, 4))
    rows = [bags_of(data.draw, batch, 5) for _ in range(count)]
    lengths = torch.tensor([[len(bag) for bag in row] for row in rows], dtype=data.draw(INDICES)).view(count, batch)
    values = torch.tensor([value for row in rows for value in flat(row)], dtype=data.draw(VALUES))
    weights = values.float() / 2 if data.draw(st.booleans()) else None
    got = permute_2d(torch.tensor(order, dtype=data.draw(INDICES)), lengths, values, weights)
    assert got[0].tolist() == [[len(bag) for bag in rows[p]] for p in order]
    assert got[0].shape == (len(order), batch)
    assert got[1].tolist() == [value for p in order for value in flat(rows[p])]
    assert (got[2] is None) == (weights is None)
    if got[2] is not None:
        assert got[2].tolist() == [value / 2 for value in got[1].tolist()]


@LOOSE
@given(st.data())
def test_permute_segments_picks_bags_of_every_tensor(path: str, data: st.DataObject) -> None:
    count, order = data.draw(orders(60))
    bags = bags_of(data.draw, count, 4)
    values = torch.tensor(flat(bags), dtype=data.draw(VALUES))
    got = permute_segments([values, values.double() / 2], [len(bag) for bag in bags], order)
    assert got[0].tolist() == flat([bags[p] for p in order])
    assert got[1].tolist() == [value / 2 for value in got[0].tolist()]
    assert permute_segments([], [1], [0]) == []


@LOOSE
@given(st.data())
def test_expand_names_the_place_of_each_value(path: str, data: st.DataObject) -> None:
    count, order = data.draw(orders())
    sizes = data.draw(st.lists(st.integers(0, 20), min_size=count, max_size=count))
    dtype = data.draw(INDICES)
    begins, ends = ([*accumulate(some, initial=0)] for some in (sizes, [sizes[p] for p in order]))
    permute, starts, outs = (torch.tensor(numbers, dtype=dtype) for numbers in (order, begins, ends))
    got = expand_into_jagged_permute(permute, starts, outs, ends[-1])
    assert got.tolist() == [begins[p] + i for p in order for i in range(sizes[p])]
    assert got.dtype == dtype


@LOOSE
@given(st.data())
def test_a_gradient_is_the_sum_over_the_copies(path: str, data: st.DataObject) -> None:
    count, order = data.draw(orders(6))
    sizes = data.draw(st.lists(st.integers(0, 5), min_size=count, max_size=count))
    columns = data.draw(st.sampled_from([0, 1, 3]))
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.float16]))
    total, moved = sum(sizes), sum(sizes[p] for p in order)
    shape = (columns,) if columns else ()
    values = torch.zeros(total, *shape, dtype=dtype, requires_grad=True)
    upstream = torch.arange(1, moved + 1, dtype=dtype).view(-1, *[1] * len(shape)).expand(moved, *shape)
    lengths, permute = torch.tensor(sizes, dtype=torch.int64), torch.tensor(order, dtype=torch.int64)
    expected, at = [0.0] * total, 0
    begins = [*accumulate(sizes, initial=0)]
    for p in order:
        for i in range(sizes[p]):
            at += 1
            expected[begins[p] + i] += at
    for moves in (
        lambda: permute_1d(permute, lengths, values)[1],
        lambda: permute_2d(permute, lengths[:, None], values)[1],
        lambda: permute_segments([values], sizes, order)[0],
    ):
        (grad,) = torch.autograd.grad(moves(), values, upstream)
        assert grad.dtype == dtype
        assert (grad[:, 0] if columns else grad).tolist() == expected


def test_gradients_of_values_and_weights_pass_gradcheck_twice(path: str) -> None:
    permute, lengths = torch.tensor([2, 0, 2, 3]), torch.tensor([1, 2, 3, 0])
    values = torch.randn(6, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    ways: list[Callable[..., Any]] = [
        lambda v, w: permute_1d(permute, lengths, v, w)[1:],
        lambda v, w: permute_2d(permute, lengths[:, None], v, w)[1:],
        lambda v, w: tuple(permute_segments([v, w], [1, 2, 3, 0], [2, 0, 2, 3])),
    ]
    for moves in ways:
        assert torch.autograd.gradcheck(moves, (values, weights))
        assert torch.autograd.gradgradcheck(moves, (values, weights))


def test_only_weights_may_want_a_gradient(path: str) -> None:
    weights = torch.ones(3, requires_grad=True)
    _, values, moved = permute_1d(torch.tensor([1, 1]), torch.tensor([1, 2]), torch.arange(3), weights)
    assert moved is not None
    assert not values.requires_grad
    assert torch.autograd.grad(moved.sum(), weights)[0].tolist() == [0, 2, 2]


def test_large_moves_are_divided_and_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments of many sizes, cut among threads at any place, moved by chunks and by whole copies."""
    if cpu_segments.loops() is None:
        pytest.skip("numba is not installed")
    generator = torch.Generator().manual_seed(0)
    for longest, dtype in ((3, torch.int64), (30, torch.int8), (300, torch.int16), (5, torch.int32)):
        lengths = torch.randint(0, longest, (999,), generator=generator)
        permute = torch.cat([torch.randint(0, 999, (500,), generator=generator), torch.arange(300)])
        values = torch.arange(int(lengths.sum())).to(dtype)
        grown = values.double().requires_grad_()
        results = []
        for alone in (0, 1 << 40):
            monkeypatch.setattr(cpu_segments, "_ALONE", alone)
            _, moved, _ = permute_1d(permute, lengths, values)
            _, weights, _ = permute_1d(permute, lengths, grown)
            (grad,) = torch.autograd.grad(weights, grown, torch.arange(len(weights)).double().sin())
            results.append((moved, weights.detach(), grad))
        monkeypatch.setattr(cpu_segments, "loops", lambda: None)
        expected = permute_1d(permute, lengths, values)[1]
        monkeypatch.undo()
        for first, second in zip(*results, strict=True):
            assert_same_bits(first, second)
        assert_same_bits(results[0][0], expected)


# What does not fit.

T = torch.tensor
VALUES_OF_3, TURN, NEGATIVE, SHORT, ENDS = torch.arange(3), T([1, 0]), T([4, -1]), T([1, 1]), T([0, 3])
NOTHING, ONE, THREE, STARTS = torch.zeros(0, dtype=torch.int64), T([0]), T([3]), T([0, 1, 3])


def of_index(index: int) -> list[Callable[[], Any]]:
    """What looks for a segment that there is not."""
    permute, lengths, values = T([0, index]), T([1, 2, 0]), VALUES_OF_3
    return [
        lambda: permute_1d(permute, lengths, values),
        lambda: permute_2d(permute, lengths[:, None], values),
        lambda: permute_segments([values], [1, 2, 0], [0, index]),
        lambda: expand_into_jagged_permute(permute, T([0, 1, 3, 3]), T([0, 1, 1]), 1),
    ]


def of_lengths(lengths: Tensor) -> list[Callable[[], Any]]:
    return [
        lambda: permute_1d(TURN, lengths, VALUES_OF_3),
        lambda: permute_2d(TURN, lengths[:, None], VALUES_OF_3),
        lambda: permute_segments([VALUES_OF_3], lengths.tolist(), [0]),
    ]


def to_offsets(*ends: int) -> Callable[[], Any]:
    return lambda: expand_into_jagged_permute(TURN, STARTS, T(ends), 3)


REFUSED: list[tuple[type[Exception], str, Callable[[], Any]]] = [
    *((IndexError, rf"permute\[1\] is {index}, out of range for 3 segments", call)
      for index in (3, -1, 2**40) for call in of_index(index)),
    (IndexError, "permute has 1 entries, there are 0 segments", lambda: permute_1d(ONE, NOTHING, NOTHING)),
    (IndexError, r"permute\[0\] is 0, out of range for 0 segments", lambda: permute_segments([NOTHING], [], [0])),
    *((ValueError, "lengths must be >= 0.*-1", call) for call in of_lengths(NEGATIVE)),
    *((ValueError, "lengths sum to 2, values has 3", call) for call in of_lengths(SHORT)),
    (ValueError, "permuted_lengths_sum is 5, the permuted lengths sum to 3",
     lambda: permute_1d(TURN, T([1, 2]), VALUES_OF_3, permuted_lengths_sum=5)),
    # four times 2**62 is 0 in 64 bits: so many values would have been copied from no values
    (ValueError, "lengths", lambda: permute_1d(ONE, torch.full((4,), 2**62), torch.zeros(0))),
    (ValueError, "must not decrease", to_offsets(0, 5, 3)),
    (ValueError, "must go from 0 to 3, got from 1 to 3", to_offsets(1, 2, 3)),
    (ValueError, "to 3, got", to_offsets(0, 2, 4)),
    (TypeError, "permute must be int32 or int64, got .*float32", lambda: permute_1d(ONE.float(), THREE, VALUES_OF_3)),
    (ValueError, r"lengths must be 1-D, got shape \[1, 1\]", lambda: permute_1d(ONE, THREE[None], VALUES_OF_3)),
    (ValueError, r"lengths must be 2-D, got shape \[1\]", lambda: permute_2d(ONE, THREE, VALUES_OF_3)),
    (TypeError, "lengths must be int32 or int64", lambda: permute_2d(ONE, THREE.short()[None], VALUES_OF_3)),
    (TypeError, "values must not be complex", lambda: permute_1d(ONE, THREE, VALUES_OF_3 + 1j)),
    (ValueError, "values must have a first dimension", lambda: permute_1d(ONE, THREE, VALUES_OF_3[0])),
    (ValueError, "weights has 2 entries, values has 3",
     lambda: permute_1d(ONE, THREE, VALUES_OF_3, VALUES_OF_3[:2])),
    (ValueError, "tensors must have one length, got 3 and 2",
     lambda: permute_segments([VALUES_OF_3, VALUES_OF_3[:2]], [3], [0])),
    (TypeError, "input_offsets must be", lambda: expand_into_jagged_permute(ONE, ENDS.int(), ENDS, 3)),
    (ValueError, "one entry more than permute has, 2",
     lambda: expand_into_jagged_permute(ONE, ENDS, ENDS[:1], 3)),
]  # fmt: skip


@pytest.mark.parametrize(("error", "message", "call"), REFUSED)
def test_what_does_not_fit_is_refused(path: str, error: type[Exception], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=message):
        call()


# The same on every device.


@dataclass(frozen=True)
class Case:
    """Segments of these sizes in this order, with values of a dtype and a shape behind the first dimension."""

    name: str
    sizes: tuple[int, ...] = (3, 0, 2, 5, 1)
    order: tuple[int, ...] = (3, 1, 0, 3, 2)
    dtype: torch.dtype = torch.float32
    shape: tuple[int, ...] = ()
    index: torch.dtype = torch.int64


CASES = [
    Case("floats"),
    Case("ids", dtype=torch.int64, index=torch.int32),
    Case("bytes", dtype=torch.bool),
    Case("fp16", dtype=torch.float16, index=torch.int32),
    Case("one segment", sizes=(70,), order=(0, 0)),
    Case("nothing picked", order=()),
    Case("nothing there", sizes=(0, 0), order=(1, 0, 1)),
    Case("no segments", sizes=(), order=()),
    Case("many", sizes=tuple(i % 4 for i in range(40)), order=tuple(39 - i // 2 for i in range(50))),
    *(Case(f"rows of {d}", shape=(d,)) for d in (1, 3, 20, 128)),
    Case("rows of 0", shape=(0,)),
    Case("matrices of fp16", shape=(2, 3), dtype=torch.float16),
]


def given_case(case: Case, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor, int]:
    """Values, permute and the offsets before and after, and how many values come out."""
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn(sum(case.sizes), *case.shape, generator=generator) * 9).to(case.dtype)
    ends = [*accumulate((case.sizes[p] for p in case.order), initial=0)]
    numbers = (list(case.order), [*accumulate(case.sizes, initial=0)], ends)
    permute, starts, outs = (torch.tensor(some, dtype=case.index, device=device) for some in numbers)
    return values.to(device), permute, starts, outs, ends[-1]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("device", UPDATES)
def test_every_way_moves_as_the_reference_does(device: str, case: Case) -> None:
    values, permute, starts, outs, total = given_case(case, torch_device(device))
    expected = move_segments_ref([values], permute, starts, outs, total)[0]
    assert expected.tolist() == [
        row for p in case.order for row in values[int(starts[p]) : int(starts[p + 1])].tolist()
    ]
    lengths = starts.diff()
    assert_same_bits(OPS.move_segments([values], permute, starts, outs, None)[0], expected)
    assert_same_bits(permute_segments([values], list(case.sizes), list(case.order))[0], expected)
    got = permute_1d(permute, lengths, values, values)
    assert_same_bits(got[0], outs.diff())
    assert_same_bits(got[1], expected)
    assert got[2] is not None
    assert_same_bits(got[2], expected)
    got = permute_2d(permute, lengths[:, None], values, permuted_lengths_sum=total)
    assert_same_bits(got[0], outs.diff()[:, None])
    assert_same_bits(got[1], expected)
    at = expand_into_jagged_permute(permute, starts, outs, total)
    assert_same_bits(values[at.long()], expected)


@pytest.mark.parametrize("case", [case for case in CASES if case.dtype.is_floating_point], ids=lambda case: case.name)
@pytest.mark.parametrize("device", UPDATES)
def test_every_way_collects_the_same_bits_as_the_reference(device: str, case: Case) -> None:
    values, permute, starts, outs, total = given_case(case, torch_device(device))
    values.requires_grad_()
    upstream = torch.randn(total, *case.shape, generator=torch.Generator().manual_seed(1)).to(values)
    expected = collect_segments_ref([upstream], permute, starts, outs, values.shape[0])[0]
    for moved in (
        OPS.move_segments([values], permute, starts, outs, total)[0],
        permute_segments([values], list(case.sizes), list(case.order))[0],
        permute_1d(permute, starts.diff(), values)[1],
    ):
        assert_same_bits(torch.autograd.grad(moved, values, upstream)[0], expected)


@pytest.mark.parametrize("device", DEVICES[1:])
def test_on_a_gpu_what_is_no_segment_moves_nothing(device: str, where: torch.device) -> None:
    """Nobody waits for a GPU to say so; memory is safe, and no device assert ends the process."""
    permute, lengths = torch.tensor([1, 7, -1, 0], device=where), torch.tensor([1, 2], device=where)
    values = torch.arange(3, device=where)
    got = permute_1d(permute, lengths, values)
    assert got[0].tolist() == [2, 0, 0, 1]
    assert got[1].tolist() == [1, 2, 0]
    assert permute_2d(permute, lengths[:, None], values)[0].tolist() == [[2], [0], [0], [1]]
    ends = torch.tensor([0, 2, 4, 5, 6], device=where)
    at = expand_into_jagged_permute(permute, torch.tensor([0, 1, 3], device=where), ends, 6)
    assert at.tolist() == [1, 2, -1, -1, -1, 0]
    # lengths that promise more than there is
    assert permute_1d(permute[:1], torch.tensor([2, 9], device=where), values)[1].tolist() == [2] + [0] * 8


def test_fake_tensors_show_that_nothing_waits_for_a_gpu_where_the_sum_is_known() -> None:
    with FakeTensorMode():
        values, lengths, permute = (torch.empty(n, dtype=torch.int64, device="cuda") for n in (6, 3, 2))
        assert [moved.shape for moved in permute_segments([values, values], [1, 2, 3], [2, 0])] == [(4,), (4,)]
        got = permute_1d(permute, lengths, values, permuted_lengths_sum=5)
        assert (got[0].shape, got[1].shape) == ((2,), (5,))
        got = permute_2d(permute, lengths.unsqueeze(1), values, values, permuted_lengths_sum=5)
        assert (got[0].shape, got[1].shape) == ((2, 1), (5,))


def op_calls(device: torch.device) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    values, permute, starts, outs, total = given_case(Case("ids", shape=(3,)), device)
    flat = values[:, 0].clone().requires_grad_()
    values.requires_grad_()
    grads = [torch.randn(total, device=device, requires_grad=True), torch.randn(total, 3, device=device)]
    ids = torch.arange(11, device=device)
    return {
        "move_segments": (OPS.move_segments.default, ([flat, values], permute, starts, outs, total)),
        "move_segments ids": (
            OPS.move_segments.default,
            ([ids], permute, starts, outs, None),
        ),
        "collect_segments": (OPS.collect_segments.default, (grads, permute, starts, outs, 11)),
        "expand_into_jagged_permute": (OPS.expand_into_jagged_permute.default, (permute, starts, outs, total)),
    }


@pytest.mark.parametrize("name", op_calls(torch.device("cpu")))
@pytest.mark.parametrize("device", UPDATES)
def test_opcheck(device: str, name: str) -> None:
    op, args = op_calls(torch_device(device))[name]
    torch.library.opcheck(op, args)


@pytest.mark.parametrize("device", UPDATES)
def test_compiled_forward_and_backward_equal_eager(where: torch.device) -> None:
    def loss(values: Tensor, weights: Tensor, permute: Tensor, lengths: Tensor, total: int) -> Tensor:
        _, permuted, scaled = permute_1d(permute, lengths, values, weights, permuted_lengths_sum=total)
        _, other, _ = permute_2d(permute, lengths[:, None], values, permuted_lengths_sum=total)
        (known,) = permute_segments([values], [3, values.shape[0] - 3], [1, 0])
        assert scaled is not None
        return (permuted * scaled).sin().sum() + other.cos().sum() + known[0]

    def batch(sizes: list[int]) -> tuple[Any, ...]:
        lengths, permute = torch.tensor(sizes, device=where), torch.tensor([2, 0, 2], device=where)
        values = torch.linspace(-1, 1, sum(sizes), device=where).requires_grad_()
        weights = torch.linspace(0, 3, sum(sizes), device=where).requires_grad_()
        return values, weights, permute, lengths, 2 * sizes[2] + sizes[0]

    assert_compiled_equals_eager(loss, map(batch, ([3, 0, 2], [3, 5, 1], [3, 1, 1, 4])))


@pytest.mark.parametrize("device", UPDATES)
def test_a_sum_that_nobody_gave_is_a_number_of_the_graph(where: torch.device) -> None:

    def moved(permute: Tensor, lengths: Tensor, values: Tensor) -> Tensor:
        return permute_1d(permute, lengths, values)[1] + 1

    torch._dynamo.reset()
    compiled = torch.compile(moved, fullgraph=True, dynamic=True, backend="aot_eager")
    permute, lengths = torch.tensor([1, 1], device=where), torch.tensor([1, 2], device=where)
    assert compiled(permute, lengths, torch.arange(3, device=where)).tolist() == [2, 3, 2, 3]

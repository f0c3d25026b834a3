"""Products, softmax, pooling by weights and unary lookups of bags of rows: beside lists, references, and themselves.

Takes half a minute: 50 drawn batches an op and path, and references that loop over bags.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from bag_rows import CASES, OPS, Bags, as_lists, exact, wanted
from hypothesis import given, settings, strategies as st
from kernel_inputs import DEVICES, UPDATES, assert_close, assert_same_bits, torch_device
from torch import Tensor

from shardwise.kernels import (
    batched_unary_embeddings,
    jagged_dense_bmm,
    jagged_jagged_bmm,
    jagged_softmax,
    jagged_vector_product,
)
from shardwise.kernels.cpu import products as cpu_rows

LOOPS = cpu_rows, "_loops"
EVERY_OP = pytest.mark.parametrize("op", OPS)
EVERYWHERE = pytest.mark.parametrize("device", UPDATES)
BY_NAME = {case.name: case for case in CASES}
# what the interpreter is spared: it needs seconds for what tells nothing else
INTERPRETED = ("usual", "no bags", "empty bags before rows", "cut", "bf16")
PAIRS = [
    pytest.param(*device.values, case, marks=device.marks, id=f"{device.values[0]}-{case.name}")
    for device in (pytest.param(d) if isinstance(d, str) else d for d in UPDATES)
    for case in CASES
    if device.values[0] != "interpreted" or case.name in INTERPRETED
]


def results(call: Callable[..., Tensor], arguments: tuple[Any, ...]) -> list[Tensor]:
    """The result and its gradients by all floating-point arguments, for a fixed upstream gradient."""
    arguments, inputs = wanted(arguments)
    out = call(*arguments)
    grad = torch.arange(out.numel(), dtype=torch.float64).mul(2.3).sin().view(out.shape).to(out)
    if not out.requires_grad:
        return [out, *map(torch.zeros_like, inputs)]
    return [out.detach(), *torch.autograd.grad(out, inputs, grad)]


@pytest.mark.sampled(3)
@EVERY_OP
@pytest.mark.parametrize(("device", "case"), PAIRS)
def test_results_and_gradients_are_those_of_the_reference(device: str, case: Bags, op: str) -> None:
    arguments = OPS[op].inputs(case, torch_device(device))
    wide = tuple(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments)
    expected = results(OPS[op].ref, wide)
    with torch.no_grad():
        assert_close(OPS[op].call(*arguments), expected[0].to(case.dtype), 5e-6 if case.dtype.itemsize >= 4 else 2e-2)
    for got, want in zip(results(OPS[op].call, arguments), expected, strict=True):
        assert got.dtype == case.dtype
        assert_close(got, want.to(case.dtype), 5e-6 if case.dtype.itemsize >= 4 else 2e-2)


@st.composite
def bags(draw: st.DrawFn) -> Bags:
    tables, most = draw(st.integers(1, 3)), draw(st.sampled_from([1, 4, 40]))
    batch = draw(st.integers(0, 5))
    return Bags(
        "drawn",
        lengths=tuple(draw(st.lists(st.integers(0, most), min_size=tables * batch, max_size=tables * batch))),
        rest=draw(st.sampled_from([0, 0, 2])),
        left=draw(st.integers(1, 5)),
        right=draw(st.integers(1, 5)),
        max_length=draw(st.sampled_from([None, None, 0, 1, 3, 50])),
        heads=draw(st.integers(1, 3)),
        vector=draw(st.integers(0, 5)),
        tables=tables,
        tasks=draw(st.integers(1, 3)),
        dtype=draw(st.sampled_from([torch.float32, torch.float64])),
        offset_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
    )


@pytest.mark.sampled(3)
@EVERY_OP
@pytest.mark.parametrize("device", ["cpu", "numba"])
@settings(max_examples=50, deadline=None)
@given(drawn=bags())
def test_results_are_those_of_plain_lists(device: str, op: str, drawn: Bags) -> None:
    arguments = OPS[op].inputs(drawn, torch_device(device))
    model = torch.tensor(OPS[op].model(*as_lists(arguments)), dtype=torch.float64)
    wide, positive = (
        tuple(to(a) if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments)
        for to in (Tensor.double, Tensor.abs)
    )
    # terms may cancel: what rounding leaves is of their size, not of the sum's
    terms = torch.tensor(OPS[op].model(*as_lists(positive)), dtype=torch.float64)
    largest = float(torch.cat([model.flatten(), terms.flatten(), torch.zeros(1)]).abs().max())
    for call, given_arguments, tolerance in ((OPS[op].ref, wide, 1e-12), (OPS[op].call, arguments, 5e-6)):
        got = call(*given_arguments)
        # lists without rows do not tell how long these would be
        want = model.reshape(got.shape) if model.numel() else torch.zeros_like(got, dtype=torch.float64)
        torch.testing.assert_close(got.detach().double().cpu(), want.cpu(), rtol=0, atol=tolerance * largest)


@EVERY_OP
@pytest.mark.parametrize("name", ["usual", "cut", "empty bags before rows"])
def test_gradients_are_those_of_small_differences(op: str, name: str) -> None:
    arguments, _ = wanted(OPS[op].inputs(exact(BY_NAME[name]), torch.device("cpu")))
    assert torch.autograd.gradcheck(OPS[op].call, arguments, fast_mode=True)


def op_calls(device: torch.device, case: Bags) -> dict[str, tuple[Any, ...]]:
    """Every registered op of these files and its arguments."""
    given = {op: wanted(OPS[op].inputs(case, device))[0] for op in OPS}
    values, offsets, dense, most = given["dense_bmm"]
    vectors, rows, _ = given["vector_product"]
    weight, *index = given["unary"]
    soft, grad = values.detach(), vectors.new_ones(vectors.shape[0], case.left)
    upstream = weight.new_ones(case.tasks, len(case.lengths) // case.tables, case.tables)
    turned = dense.detach().mT.contiguous().requires_grad_()
    return {
        "jagged_dense_bmm": (values, offsets, dense, most, False),
        "jagged_dense_bmm transposed": (values, offsets, turned, most, True),
        "jagged_jagged_bmm": given["jagged_bmm"],
        "jagged_softmax": given["softmax"],
        "jagged_softmax_gradient": (soft, soft, offsets, most),
        "jagged_vector_product": given["vector_product"],
        "jagged_vector_product_by_rows": (grad, vectors.detach(), offsets, case.rows),
        "jagged_vector_product_by_vectors": (grad, rows.detach(), offsets, case.vector),
        "batched_unary_embeddings": given["unary"],
        "batched_unary_embeddings_gradient": (upstream, *index, weight.shape[1]),
    }


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", op_calls(torch.device("cpu"), BY_NAME["usual"]))
@EVERYWHERE
def test_opcheck(device: str, name: str) -> None:
    arguments = op_calls(torch_device(device), replace(BY_NAME["usual"], rest=1))[name]
    torch.library.opcheck(getattr(torch.ops.shardwise, name.split()[0]).default, arguments)


@EVERY_OP
@pytest.mark.parametrize("device", DEVICES)
def test_one_graph_serves_batches_of_any_size(device: str, op: str) -> None:
    torch._dynamo.reset()

    def step(*arguments: Any) -> Tensor:
        return torch.tanh(OPS[op].call(*arguments))

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=True)
    first = replace(BY_NAME["usual"], rest=2, left=6, right=7)
    for case in (first, replace(first, lengths=(4, 2, 2, 0, 3, 3))):
        arguments = OPS[op].inputs(case, torch_device(device))
        expected = results(step, arguments)
        with torch._dynamo.config.patch(error_on_recompile=True):
            compiled_results = results(compiled, arguments)
        assert_same_bits(compiled_results, expected)


@EVERY_OP
@EVERYWHERE
def test_the_same_bits_twice_and_from_strided_tensors(device: str, op: str) -> None:
    case = replace(BY_NAME["uneven" if device != "interpreted" else "usual"], rest=1)
    arguments = OPS[op].inputs(case, torch_device(device))
    strided = tuple(
        torch.stack([a, a], -1).flatten(-2)[..., ::2] if isinstance(a, Tensor) and a.dim() < 3 else a for a in arguments
    )
    assert any(isinstance(a, Tensor) and not a.is_contiguous() for a in strided)
    once = results(OPS[op].call, arguments)
    for again in (results(OPS[op].call, arguments), results(OPS[op].call, strided)):
        assert_same_bits(again, once)


@cache
def large(op: str) -> tuple[tuple[Any, ...], list[Tensor]]:
    """Arguments of many bags, two of them long, and what the reference makes of them in fp64."""
    torch.manual_seed(3)
    lengths = torch.randint(0, 9, (1200,))
    lengths[[5, 700]] = torch.tensor([900, 2000])
    case = Bags(
        "large", lengths=tuple(lengths.tolist()), rest=7, left=32, right=48, tables=8, max_length=1500, vector=6
    )
    arguments = OPS[op].inputs(case, torch.device("cpu"))
    wide = tuple(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in arguments)
    return arguments, results(OPS[op].ref, wide)


@pytest.mark.full
@EVERY_OP
@pytest.mark.parametrize("device", ["cpu", "numba"])
def test_large_batches_are_cut_into_blocks_and_shared_among_threads(device: str, op: str) -> None:
    arguments, expected = large(op)
    for got, want in zip(results(OPS[op].call, arguments), expected, strict=True):
        assert_close(got, want.float(), 2e-5)


@EVERYWHERE
def test_softmax_of_infinite_rows_is_what_torch_makes_of_them(device: str) -> None:
    inf = math.inf
    columns = [[-inf, 1.0, -inf], [-inf, -inf, -inf], [0.0, inf, 1.0], [0.0, math.nan, 1.0], [1e30, -1e30, 1e30]]
    values = torch.tensor(columns, device=torch_device(device)).t().contiguous()
    values = torch.cat([values, torch.ones(2, 5, device=values.device)])
    got = jagged_softmax(values, torch.tensor([0, 3, 5], device=values.device))
    expected = torch.cat([values[:3].softmax(0), values[3:].softmax(0)])
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=0, equal_nan=True)


@EVERYWHERE
def test_rows_that_take_no_part_may_hold_anything(device: str) -> None:
    """NaN in a row past max_length or past the last offset came through where it was multiplied by 0."""
    case = replace(BY_NAME["usual"], max_length=2, vector=2, rest=2)
    spoilt = torch.tensor([2, 5, 6, 7, 9, 10])
    for op in ("dense_bmm", "jagged_bmm", "softmax", "vector_product"):
        arguments = OPS[op].inputs(case, torch_device(device))
        clean = tuple(
            a.index_fill(0, spoilt.to(a.device), 0.0) if isinstance(a, Tensor) and a.shape[:1] == (11,) else a
            for a in arguments
        )
        dirty = tuple(
            a.index_fill(0, spoilt.to(a.device), math.nan) if isinstance(a, Tensor) and a.shape[:1] == (11,) else a
            for a in arguments
        )
        assert_same_bits(results(OPS[op].call, dirty), results(OPS[op].call, clean))


@pytest.mark.parametrize("device", DEVICES)
def test_a_row_hit_many_times_gets_the_exact_sum(device: str, where: torch.device) -> None:
    n = 5000 if device != "interpreted" else 1500
    weight = torch.zeros(1, 3, 1, device=where, requires_grad=True)
    ids = torch.ones(n, dtype=torch.int64, device=where)
    out = batched_unary_embeddings(weight, torch.tensor([0, 3], device=where), torch.arange(n + 1, device=where), ids)
    out.backward(torch.full_like(out, 0.25))
    assert weight.grad is not None and weight.grad.flatten().tolist() == [0, n / 4, 0]


X, W, O = torch.ones(4, 2), torch.ones(2, 2, 3), torch.tensor([0, 1, 4])
IDS, TABLES = torch.tensor([0, 1, 0, 1]), torch.tensor([0, 2])
UNARY = torch.ones(1, 2, 1)
BAD: list[tuple[Callable[[], Any], type[Exception], str]] = [
    (lambda: jagged_dense_bmm(X[0], O, W), ValueError, r"values must be 2-D, .* got shape \[2\]"),
    (lambda: jagged_dense_bmm(X.int(), O, W), TypeError, "values must be float32, .* got torch.int32"),
    (lambda: jagged_dense_bmm(X, O.float(), W), TypeError, "offsets must be int32 or int64, got torch.float32"),
    (lambda: jagged_dense_bmm(X, O[:0], W), ValueError, "offsets must be 1-D with at least 1 entries, got"),
    (lambda: jagged_dense_bmm(X, O, W[:1]), ValueError, r"dense must be \[2, 2, K\], .* got \[1, 2, 3\]"),
    (lambda: jagged_dense_bmm(X, O, W[:, :1]), ValueError, r"dense must be \[2, 2, K\], .* got \[2, 1, 3\]"),
    (lambda: jagged_dense_bmm(X, O, W.half()), TypeError, "dense must have the dtype of values, torch.float32, got"),
    (lambda: jagged_dense_bmm(X, O, W, -1), ValueError, "max_length must not be negative, got -1"),
    (lambda: jagged_dense_bmm(X, O.to("meta"), W), ValueError, "offsets must be on cpu as the rows, got meta"),
    (lambda: jagged_jagged_bmm(X, X[:3], O), ValueError, r"y must be \[4, K\] with the rows of x, got \[3, 2\]"),
    (lambda: jagged_jagged_bmm(X, X.to("meta"), O), ValueError, "y must be on cpu as x, got meta"),
    (lambda: jagged_vector_product(X[:3], X, O), ValueError, r"must be B\*H for the 2 bags, got 3"),
    (lambda: jagged_vector_product(X[:0], X, O), ValueError, r"must be B\*H for the 2 bags, got 0"),
    (lambda: jagged_vector_product(torch.ones(6, 3), X, O), ValueError, "must divide among 3 heads, got 2"),
    (lambda: jagged_vector_product(X[0], X, O), ValueError, r"vectors must be \[B\*H, L\], got shape \[2\]"),
    (lambda: batched_unary_embeddings(X[0], TABLES, O, IDS), ValueError, r"weight must be \[tasks, rows, 1\], got"),
    (lambda: batched_unary_embeddings(UNARY.int(), TABLES, O, IDS), TypeError, "weight must be float32, .* got"),
    (lambda: batched_unary_embeddings(UNARY, TABLES, O, IDS.float()), TypeError, "ids must be int32 or int64"),
    (lambda: batched_unary_embeddings(UNARY, torch.tensor([0, 1, 1, 2]), O, IDS), ValueError, "among 3 tables"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=[message for _, _, message in BAD])
def test_arguments_that_do_not_fit_are_named(call: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()


WRONG_OFFSETS = [
    ([1, 2, 4], "{name} must begin with 0, got 1"),
    ([0, 3, 2], r"{name} must not decrease, but {name}\[1\] = 3, {name}\[2\] = 2"),
    ([0, 2**40, 2**40], r"the last of {name} must be at most 4, the number of \w+, got 1099511627776"),
    ([0, -5, 4], r"{name} must not decrease, but {name}\[0\] = 0, {name}\[1\] = -5"),
]


@pytest.mark.parametrize(("numbers", "message"), WRONG_OFFSETS, ids=[str(numbers) for numbers, _ in WRONG_OFFSETS])
@pytest.mark.parametrize("device", ["cpu", "numba"])
def test_offsets_out_of_order_are_never_followed(device: str, numbers: list[int], message: str) -> None:
    offsets, lanes = torch.tensor(numbers), torch.ones(2, 2)
    for call in (
        lambda x: jagged_dense_bmm(x, offsets, W.to(x.dtype)),
        lambda x: jagged_jagged_bmm(x, x, offsets),
        lambda x: jagged_softmax(x, offsets),
        lambda x: jagged_vector_product(lanes.to(x.dtype), x, offsets),
        lambda x: batched_unary_embeddings(x.t()[:1, :2, None] * 1, TABLES, offsets, IDS),
    ):
        for x in (X, X.double(), X.clone().requires_grad_()):
            with pytest.raises(ValueError, match=message.format(name="offsets")):
                call(x)
    for bad, error in (([0, 3], "the last of table_offsets must be at most 2"), ([1, 2], "table_offsets must begin")):
        with pytest.raises(ValueError, match=error):
            batched_unary_embeddings(UNARY, torch.tensor(bad), O, IDS)


@pytest.mark.parametrize("bad", [-1, 2, 2**62, -(2**63)])
@pytest.mark.parametrize("device", ["cpu", "numba"])
def test_an_id_outside_its_table_is_named(device: str, bad: int) -> None:
    ids = torch.tensor([0, 1, bad, 1])
    weight = torch.ones(1, 5, 1)
    with pytest.raises(IndexError, match=rf"ids\[2\] is {bad}, but table 0 has 2 rows"):
        batched_unary_embeddings(weight, torch.tensor([0, 2, 5]), torch.tensor([0, 3, 4]), ids)
    with pytest.raises(IndexError, match=rf"ids\[2\] is {bad}, but table 0 has 2 rows"):
        torch.ops.shardwise.batched_unary_embeddings_gradient(
            torch.ones(1, 1, 2), torch.tensor([0, 2, 5]), torch.tensor([0, 3, 4]), ids, 5
        )

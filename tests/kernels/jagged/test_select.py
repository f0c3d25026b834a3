"""Bags selected by index, of one key and of several, and added back: values and gradients against plain lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from kernel_inputs import DEVICES, assert_close, assert_compiled_equals_eager, assert_same_bits, torch_device
from torch import Tensor

from shardwise.kernels import jagged_index_add, jagged_index_select, keyed_jagged_index_select
from shardwise.kernels.jagged.index_add import jagged_index_add_ref
from shardwise.kernels.jagged.index_select import jagged_index_select_ref, keyed_jagged_index_select_ref, offsets_of

OPS = torch.ops.shardwise
INTEGERS = (torch.int32, torch.int64)
# lengths of the bags, the bags to select, shape of a value
CASES: dict[str, tuple[list[int], list[int], tuple[int, ...]]] = {
    "no bags": ([], [], ()),
    "nothing selected": ([2, 1], [], (3,)),
    "empty bags": ([0, 0, 0], [1, 1], ()),
    "repeats": ([1, 0, 3, 2], [2, 0, 2, 1, 2], ()),
    "rows of one": ([1, 0, 3, 2], [2, 0, 2, 1], (1,)),
    "rows of no columns": ([1, 2], [1, 1], (0,)),
    "rows of three": ([4, 0, 1], [0, 2, 0], (3,)),
    "rows of 128": ([2, 0, 3], [2, 0, 2], (128,)),
    "rows of 20": ([2, 5, 3] * 4, [11, 0, 2, 5, 5, 5], (20,)),
    "one bag many times": ([3, 2], [0] * 40, (4,)),
    "many bags": ([0, 1, 2, 3] * 30, list(range(119, -1, -3)), ()),
}


def bags_of(values: list[Any], lengths: list[int]) -> list[list[Any]]:
    """The model: a list per bag."""
    rest = iter(values)
    return [[next(rest) for _ in range(n)] for n in lengths]


def added(bags: list[list[float]], indices: list[int], lengths: list[int]) -> list[float]:
    """Bags, each added to the bag of its index, one after another."""
    out = [[0.0] * n for n in lengths]
    for bag, i in zip(bags, indices, strict=True):
        out[i] = [a + b for a, b in zip(out[i], bag, strict=True)]
    return [number for bag in out for number in bag]


def drawn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def tensors(
    case: str, device: torch.device, dtype: torch.dtype = torch.float32, ids: torch.dtype = torch.int64
) -> tuple[Tensor, Tensor, Tensor]:
    lengths, indices, shape = CASES[case]
    values = drawn(sum(lengths), *shape, dtype=dtype).to(device)
    return values, torch.tensor(lengths, dtype=ids, device=device), torch.tensor(indices, dtype=ids, device=device)


def op_select(values: Tensor, lengths: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The registered op, which eager calls on the CPU go past."""
    selected = OPS.jagged_index_select(
        values, None, offsets_of(lengths), indices, lengths.shape[0], lengths.dtype, None
    )  # fmt: skip
    return selected[0], selected[1]


WAYS: list[Callable[..., tuple[Tensor, Tensor]]] = [jagged_index_select, op_select]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_select_and_its_gradient_match_the_reference(device: str, case: str) -> None:
    values, lengths, indices = tensors(case, torch_device(device))
    values.requires_grad_()
    want = jagged_index_select_ref(values, lengths, indices)
    upstream = drawn(*want[0].shape, seed=1).to(values.device)
    expected = torch.autograd.grad(want[0], values, upstream)[0]
    # where kernels run, both ways lead to them
    for way in WAYS if device == "cpu" else WAYS[:1]:
        got = way(values, lengths, indices)
        assert_same_bits(got[0], want[0])
        assert_same_bits(got[1], want[1])
        grad = torch.autograd.grad(got[0], values, upstream)[0]
        assert_close(grad, expected)
        assert_same_bits(grad, torch.autograd.grad(way(values, lengths, indices)[0], values, upstream)[0])


@pytest.mark.parametrize("ids", INTEGERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32])
@pytest.mark.parametrize("device", DEVICES)
def test_select_of_every_dtype(device: str, dtype: torch.dtype, ids: torch.dtype) -> None:
    values, lengths, indices = tensors("repeats", torch_device(device), torch.float32, ids)
    values = (10 * values).to(dtype)
    for way in WAYS:
        got, want = way(values, lengths, indices), jagged_index_select_ref(values, lengths, indices)
        assert_same_bits(got[0], want[0])
        assert_same_bits(got[1], want[1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", DEVICES)
def test_gradients_of_halves_are_added_in_fp32(device: str, dtype: torch.dtype) -> None:
    """40 times 1/1024 on top of 1 is lost where each sum is rounded to a half."""
    values, lengths, indices = tensors("one bag many times", torch_device(device), dtype)
    values.requires_grad_()
    out, _ = jagged_index_select(values, lengths, indices)
    upstream = torch.full_like(out, 1 / 1024)
    upstream[:3] = 4.0
    (grad,) = torch.autograd.grad(out, values, upstream)
    assert_same_bits(grad[:3], torch.full((3, 4), 4 + 39 / 1024).to(dtype))
    assert_same_bits(grad[3:], torch.zeros(2, 4, dtype=dtype))


@pytest.mark.parametrize("device", DEVICES)
def test_a_column_slice_of_values_is_read_where_it_lies(where: torch.device) -> None:
    """Neither contiguous nor aligned to 16 bytes."""
    whole, lengths, indices = tensors("rows of 20", where)
    for values in (whole[:, 3:11], whole.flatten()[1 : 1 + whole.shape[0]]):
        for way in WAYS:
            assert_same_bits(way(values, lengths, indices)[0], jagged_index_select_ref(values, lengths, indices)[0])


def ragged(draw: Any, bags: int) -> list[int]:
    return draw(st.lists(st.integers(0, 4), min_size=bags, max_size=bags))  # type: ignore[no-any-return]


@st.composite
def selections(draw: Any) -> tuple[list[int], list[int], torch.dtype]:
    bags = draw(st.integers(0, 6))
    indices = draw(st.lists(st.integers(0, bags - 1), max_size=8)) if bags else []
    return ragged(draw, bags), indices, draw(st.sampled_from(INTEGERS))


@settings(max_examples=50, deadline=None)
@given(selections())
def test_select_and_add_equal_lists(selection: tuple[list[int], list[int], torch.dtype]) -> None:
    lengths, indices, dtype = selection
    n = sum(lengths)
    values = torch.arange(1.0, n + 1).requires_grad_()
    sizes, chosen = torch.tensor(lengths, dtype=dtype), torch.tensor(indices, dtype=dtype)
    bags = bags_of(values.tolist(), lengths)
    picked = [bags[i] for i in indices]
    for way in WAYS:
        out, out_lengths = way(values, sizes, chosen)
        assert out.tolist() == [number for bag in picked for number in bag]
        assert out_lengths.tolist() == [lengths[i] for i in indices]
        assert out_lengths.dtype == dtype
        # eight of these add up exactly in fp32
        upstream = 2.0 ** (torch.arange(out.shape[0]) % 20)
        (grad,) = torch.autograd.grad(out, values, upstream)
        want = added(bags_of(upstream.tolist(), [lengths[i] for i in indices]), indices, lengths)
        assert grad.tolist() == want
        assert jagged_index_add(upstream, out_lengths, chosen, sizes).tolist() == want


@st.composite
def keyed(draw: Any) -> tuple[int, int, list[int], list[int], bool, torch.dtype]:
    keys, batch = draw(st.integers(0, 4)), draw(st.integers(0, 4))
    samples = draw(st.lists(st.integers(0, batch - 1), max_size=6)) if batch else []
    return keys, batch, ragged(draw, keys * batch), samples, draw(st.booleans()), draw(st.sampled_from(INTEGERS))


@settings(max_examples=50, deadline=None)
@given(keyed())
def test_keyed_select_equals_lists(batch: tuple[int, int, list[int], list[int], bool, torch.dtype]) -> None:
    keys, size, lengths, samples, weighted, dtype = batch
    n = sum(lengths)
    values = torch.arange(1.0, n + 1).requires_grad_()
    weights = (torch.arange(n) / 8).requires_grad_() if weighted else None
    sizes, chosen = torch.tensor(lengths, dtype=dtype), torch.tensor(samples, dtype=dtype)
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0).to(dtype)])
    bags = bags_of(values.tolist(), lengths)
    order = [k * size + s for k in range(keys if size else 0) for s in samples]
    args = (values, sizes, offsets, chosen, size, weights)
    want = [number for i in order for number in bags[i]]
    for known in (None, len(want)):
        out, out_lengths, out_weights = keyed_jagged_index_select(*args, selected_lengths_sum=known)
        assert out.tolist() == want
        assert out_lengths.tolist() == [lengths[i] for i in order]
        assert (out_weights is None) == (weights is None)
    upstream = 2.0 ** torch.arange(len(want))
    back = added(bags_of(upstream.tolist(), [lengths[i] for i in order]), order, lengths)
    assert torch.autograd.grad(out, values, upstream)[0].tolist() == back
    if weights is not None:
        assert out_weights is not None
        assert out_weights.tolist() == [(number - 1) / 8 for number in want]
        assert torch.autograd.grad(out_weights, weights, upstream)[0].tolist() == back


KEYED = {
    "two keys": (2, [1, 0, 2, 1, 1, 0], [2, 0, 2]),
    "no keys": (0, [], [0]),
    "empty key": (3, [0, 0, 1, 2, 0, 0], [1, 1, 0]),
    "no samples": (2, [1, 2], []),
}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("case", KEYED)
@pytest.mark.parametrize("device", DEVICES)
def test_keyed_select_and_its_gradients_match_the_reference(where: torch.device, case: str, weighted: bool) -> None:
    keys, lengths, samples = KEYED[case]
    size = len(lengths) // keys if keys else 2
    sizes, chosen = torch.tensor(lengths, dtype=torch.int64, device=where), torch.tensor(samples, device=where).long()
    offsets = offsets_of(sizes)
    # two values lie past the last offset
    values = drawn(sum(lengths) + 2).to(where).requires_grad_()
    weights = drawn(sum(lengths) + 2, seed=2).to(where).requires_grad_() if weighted else None
    args = (values, sizes, offsets, chosen, size, weights)
    want = keyed_jagged_index_select_ref(*args)
    op = OPS.jagged_index_select(values, weights, offsets, chosen, size, torch.int64, None)
    for got in (keyed_jagged_index_select(*args), (op[0], op[1], op[2] if weighted else None)):
        for actual, reference in zip(got, want, strict=True):
            assert (actual is None) == (reference is None)
            if actual is not None and reference is not None:
                assert_same_bits(actual, reference)
        pairs = [(values, got[0], want[0])]
        if weights is not None and got[2] is not None and want[2] is not None:
            pairs.append((weights, got[2], want[2]))
        for leaf, out, expected in pairs:
            upstream = drawn(out.shape[0], seed=1).to(where)
            grads = [torch.autograd.grad(o, leaf, upstream, retain_graph=True)[0] for o in (out, expected)]
            assert_close(grads[0], grads[1])


@pytest.mark.parametrize("case", ["repeats", "rows of 20", "one bag many times", "nothing selected", "empty bags"])
@pytest.mark.parametrize("device", DEVICES)
def test_add_and_its_gradient_match_the_reference(device: str, case: str) -> None:
    _, lengths, indices = tensors(case, torch_device(device), ids=torch.int32)
    rows = int(lengths[indices.long()].sum())
    values = drawn(rows, *CASES[case][2], seed=3).to(lengths.device).requires_grad_()
    args = (values, lengths[indices.long()], indices, lengths)
    want = jagged_index_add_ref(*args)
    for out in (jagged_index_add(*args), jagged_index_add(*args, num_rows=int(lengths.sum()))):
        assert_close(out, want)
        upstream = drawn(*want.shape, seed=4).to(lengths.device)
        assert_same_bits(*(torch.autograd.grad(o, values, upstream, retain_graph=True)[0] for o in (out, want)))


@pytest.mark.parametrize("device", ["cpu", DEVICES[2]])
def test_gradcheck(device: str) -> None:
    values, lengths, indices = tensors("rows of three", torch_device(device), torch.float64)
    values.requires_grad_()
    for way in WAYS:
        assert torch.autograd.gradcheck(lambda v, way=way: way(v, lengths, indices)[0], values)
    selected = lengths[indices]
    copies = drawn(int(selected.sum()), 3, dtype=torch.float64).to(values.device).requires_grad_()
    offsets = [offsets_of(n) for n in (selected, lengths)]
    op: list[Callable[[Tensor], Tensor]] = [
        lambda v: jagged_index_add(v, selected, indices, lengths),
        lambda v: OPS.jagged_index_add(v, offsets[0], indices, offsets[1], lengths.shape[0], values.shape[0]),
    ]
    for add in op:
        assert torch.autograd.gradcheck(add, copies)
    assert torch.autograd.gradgradcheck(lambda v: op_select(v, lengths, indices)[0], values)


@pytest.mark.parametrize("name", ["values", "weighted", "rows", "add"])
@pytest.mark.parametrize("device", DEVICES)
def test_opcheck(device: str, name: str) -> None:
    values, lengths, indices = tensors("rows of three" if name == "rows" else "repeats", torch_device(device))
    offsets = offsets_of(lengths)
    if name == "add":
        selected = offsets_of(lengths[indices])
        copies = drawn(int(selected[-1]), 3).to(values.device).requires_grad_()
        args: tuple[Any, ...] = (copies, selected, indices, offsets, lengths.shape[0], values.shape[0])
        torch.library.opcheck(OPS.jagged_index_add.default, args)
        return
    weights = drawn(values.shape[0]).to(values.device).requires_grad_() if name == "weighted" else None
    args = (values.requires_grad_(), weights, offsets, indices, lengths.shape[0], torch.int32, None)
    torch.library.opcheck(OPS.jagged_index_select.default, args)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_compiled_forward_and_backward_equal_eager_for_any_size(where: torch.device, known: bool) -> None:
    def loss(values: Tensor, lengths: Tensor, indices: Tensor, total: int | None) -> Tensor:
        out, chosen = jagged_index_select(values, lengths, indices, selected_lengths_sum=total)
        return torch.sin(out).sum() + chosen.sum()

    def batch(case: str) -> tuple[Any, ...]:
        values, lengths, indices = tensors(case, where)
        return values.requires_grad_(), lengths, indices, int(lengths[indices].sum()) if known else None

    assert_compiled_equals_eager(loss, map(batch, ("rows of three", "rows of 20")), 1e-6)


def keyed_call(**changed: Any) -> Any:
    """A correct call but for what is changed."""
    args = {
        "values": torch.arange(5), "lengths": torch.tensor([1, 0, 2, 1, 1, 0]),
        "offsets": torch.tensor([0, 1, 1, 3, 4, 5, 5]), "indices": torch.tensor([2, 0]), "batch_size": 3, **changed,
    }  # fmt: skip
    return keyed_jagged_index_select(**args)


L, I, V = torch.tensor([1, 0, 2]), torch.tensor([2, 0]), torch.rand(3)
BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "index": (lambda: jagged_index_select(V, L, torch.tensor([0, 3])), IndexError,
              r"indices: 3 is outside \[0, 3\), the bags that there are"),
    "negative index": (lambda: jagged_index_select(V, L, torch.tensor([-1])), IndexError, "indices: -1 is outside"),
    "index of no bags": (lambda: jagged_index_select(V[:0], L[:0], I), IndexError, r"2 is outside \[0, 0\)"),
    "negative length": (lambda: jagged_index_select(V, torch.tensor([4, -1]), I[1:]), ValueError,
                        "lengths must be >= 0, bag 1 has -1"),
    "sum": (lambda: jagged_index_select(V, torch.tensor([4, 1]), I[1:]), ValueError,
            "lengths sum to 5, values has 3 rows"),
    "known sum": (lambda: jagged_index_select(V, L, I, selected_lengths_sum=9), ValueError,
                  "selected_lengths_sum is 9, but the selected lengths sum to 3"),
    "dims": (lambda: jagged_index_select(V.view(3, 1, 1), L, I), ValueError, r"\[N\] or \[N, D\], got \[3, 1, 1\]"),
    "index dtype": (lambda: jagged_index_select(V, L, I.float()), TypeError, "indices must be int32 or int64, got"),
    "length dims": (lambda: jagged_index_select(V, L[None], I), ValueError, r"one dim, got shape \[1, 3\]"),
    "device": (lambda: jagged_index_select(V, L, I.to("meta")), ValueError, "indices must be on the device of values"),
    "add ints": (lambda: jagged_index_add(I, L, L, L), TypeError, "values must be floating, got torch.int64"),
    "add count": (lambda: jagged_index_add(V, L, I, L), ValueError, "3 lengths but 2 indices"),
    "add lengths": (lambda: jagged_index_add(V, L[[0, 2]], I, L), ValueError,
                    "bag 0 of length 1 cannot be added to bag 2 of length 2"),
    "add sum": (lambda: jagged_index_add(torch.rand(4), L[I], I, L), ValueError, "lengths sum to 3, values has 4"),
    "add rows": (lambda: jagged_index_add(V, L[I], I, L, num_rows=7), ValueError,
                 "num_rows is 7, but output_lengths sum to 3"),
    "add negative": (lambda: jagged_index_add(V, L[I], I, torch.tensor([4, -1, 0])), ValueError,
                     "output_lengths must be >= 0, bag 1 has -1"),
    "add index": (lambda: jagged_index_add(V, L[I], I + 3, L), IndexError, r"5 is outside \[0, 3\)"),
    "sample": (lambda: keyed_call(indices=torch.tensor([1, 3])), IndexError, r"3 is outside \[0, 3\)"),
    "decreasing offsets": (lambda: keyed_call(offsets=torch.tensor([0, 1, 0, 3, 4, 5, 5])), ValueError,
                           "offsets must not decrease: bag 1 goes from 1 to 0"),
    "offsets past values": (lambda: keyed_call(values=torch.arange(4)), ValueError, "offsets end at 5, values has 4"),
    "first offset": (lambda: keyed_call(offsets=torch.tensor([1, 1, 1, 3, 4, 5, 5])), ValueError, "begin with 0, got"),
    "contradiction": (lambda: keyed_call(lengths=torch.tensor([1, 0, 3, 1, 1, 0])), ValueError,
                      "bag 2 has length 3, but its offsets go from 1 to 3"),
    "offset count": (lambda: keyed_call(offsets=torch.tensor([0, 1])), ValueError, "6 lengths need 7 offsets, got 2"),
    "batch size": (lambda: keyed_call(batch_size=4), ValueError, "6 lengths do not divide among keys of batch_size 4"),
    "no batch size": (lambda: keyed_call(batch_size=0), ValueError, "do not divide among keys of batch_size 0"),
    "weights": (lambda: keyed_call(weights=torch.rand(4)), ValueError, r"the shape of values, \[5\], got \[4\]"),
    "rows": (lambda: keyed_call(values=torch.rand(5, 2)), ValueError, r"values must have one dim, got shape \[5, 2\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case: str) -> None:
    call, error, message = BAD[case]
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("device", DEVICES[1:])
def test_kernels_take_bags_that_do_not_exist_for_empty_and_stay_in_memory(where: torch.device) -> None:
    values, offsets = torch.arange(1.0, 4.0, device=where), torch.tensor([0, 1, 1, 3], device=where)
    out, lengths, _, _ = OPS.jagged_index_select(
        values, None, offsets, torch.tensor([5, 2, -1], device=where), 3, torch.int64, None
    )
    assert out.tolist() == [2, 3]
    assert lengths.tolist() == [0, 2, 0]
    # offsets that leave the values
    wild = torch.tensor([0, 2, 1, 9], device=where)
    for rows in (values, values[:, None].expand(3, 4)):
        out, lengths, _, _ = OPS.jagged_index_select(rows, None, wild, offsets[:3], 3, torch.int64, 12)
        assert out.shape[0] == 12
        assert set(out.flatten().tolist()) <= {0.0, 1.0, 2.0, 3.0}
    added = OPS.jagged_index_add(values, wild, torch.tensor([0, 7, 1], device=where), offsets, 3, 5)
    assert added.shape[0] == 5

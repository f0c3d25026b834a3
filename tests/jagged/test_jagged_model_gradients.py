"""Gradients through operations of the jagged types: where the lists say an item went, its gradient comes from.

Each test takes a linear functional of the result with coefficients that differ, so that no two places can be mixed up.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from jagged_model import (
    BAGS,
    KEYS,
    Bags,
    Batch,
    Form,
    any_batches,
    batches,
    build,
    by_position,
    concat,
    deduplicated,
    forms,
    from_bags,
    gradient,
    padded,
    pick,
    split,
    starts,
)
from torch import Tensor

from shardwise.jagged import JaggedTensor, KeyedJaggedTensor

same = settings(max_examples=40, deadline=None)


def tracked(batch: Batch, form: Form, through: str) -> tuple[KeyedJaggedTensor, Tensor]:
    """The batch, and the tensor whose gradient is asked for: its weights, or float values, padding included."""
    size = len(batch.items) + (form.padding or 0)
    leaf = torch.arange(float(size)).requires_grad_()
    if through == "values":
        return build(batch, form, values=leaf), leaf
    kjt = build(Batch(batch.features, batch.stride, False, batch.ranks, batch.inverse), form)
    given: dict[str, Any] = {"stride_per_key_per_rank": batch.ranks} if batch.ranks else {"stride": batch.stride}
    if batch.inverse is not None:
        given["inverse_indices"] = kjt.inverse_indices()
    kept = KeyedJaggedTensor(
        kjt.keys(), kjt.values(), leaf, kjt.lengths_or_none(), kjt.offsets_or_none(), capacity=kjt.capacity(), **given
    )
    return kept, leaf


def held(kjt: KeyedJaggedTensor | JaggedTensor, through: str) -> Tensor:
    return kjt.values() if through == "values" else kjt.weights()


def compare(results: list[Tensor], moved: list[list[int]], leaf: Tensor) -> None:
    """`moved` are the positions of the leaf that each result shows, in its order; -1 for what is no item."""
    assert [result.numel() for result in results] == list(map(len, moved))
    flat = [position for row in moved for position in row]
    upstream = [1.0 + 0.5 * i for i in range(len(flat))]
    total = torch.cat([result.flatten() for result in results]) if results else leaf[:0]
    (total * torch.tensor(upstream)).sum().backward()
    kept = [(position, factor) for position, factor in zip(flat, upstream, strict=True) if position >= 0]
    wanted = gradient([position for position, _ in kept], [factor for _, factor in kept], leaf.numel())
    grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
    assert grad.flatten().tolist() == wanted


THROUGH = st.sampled_from(["values", "weights"])


@given(any_batches(), forms(), THROUGH, st.data())
@same
def test_of_permute(batch: Batch, form: Form, through: str, data: st.DataObject) -> None:
    kjt, leaf = tracked(batch, form, through)
    count = len(batch.features)
    order = data.draw(st.lists(st.integers(0, count - 1), max_size=5)) if count else []
    compare([held(kjt.permute(order), through)], [pick(by_position(batch), order).ids], leaf)


@given(any_batches(), forms(), THROUGH, st.data())
@same
def test_of_split_and_concat(batch: Batch, form: Form, through: str, data: st.DataObject) -> None:
    kjt, leaf = tracked(batch, form, through)
    # one piece of all keys is the batch itself, padding and all
    cut = data.draw(st.integers(1, len(batch.features) - 1)) if len(batch.features) > 1 else None
    if cut is None:
        return
    pieces = kjt.split([cut, len(batch.features) - cut])
    first, second = split(by_position(batch), [cut, len(batch.features) - cut])
    joined = KeyedJaggedTensor.concat([pieces[1], pieces[0]])
    results = [held(pieces[0], through), held(joined, through)]
    compare(results, [first.ids, concat([second, first]).ids], leaf)


@given(st.data(), forms(), forms(), THROUGH, st.integers(0, 3))
@same
def test_of_concat(data: st.DataObject, form: Form, other: Form, through: str, samples: int) -> None:
    """Two leaves: each gets its own."""
    drawn = [
        data.draw(batches(keys=keys, samples=samples, variable=False, weighted=False)) for keys in (KEYS[:2], KEYS[2:])
    ]
    made = [tracked(batch, its_form, through) for batch, its_form in zip(drawn, (form, other), strict=True)]
    joined = held(KeyedJaggedTensor.concat([kjt for kjt, _ in made]), through)
    upstream = torch.arange(1.0, joined.numel() + 1)
    (joined * upstream).sum().backward()
    begin = 0
    for batch, (_, leaf) in zip(drawn, made, strict=True):
        size = len(batch.items)
        grad = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        assert grad[:size].tolist() == upstream[begin : begin + size].tolist()
        assert not grad[size:].any()
        begin += size


@given(any_batches(), forms(), THROUGH)
@same
def test_of_to_dict_getitem_and_back(batch: Batch, form: Form, through: str) -> None:
    kjt, leaf = tracked(batch, form, through)
    jts = kjt.to_dict()
    results = [held(jts[key], through) for key in batch.keys]
    moved = [pick(by_position(batch), [i]).ids for i in range(len(batch.features))]
    results += [held(kjt[key], through) for key in batch.keys]
    moved += moved
    if batch.features:
        results.append(held(KeyedJaggedTensor.from_jt_dict(jts), through))
        moved = [*moved, from_bags(dict(by_position(batch).features)).ids]
    compare(results, moved, leaf)


@given(deduplicated(), forms(), THROUGH)
@same
def test_of_copies(batch: Batch, form: Form, through: str) -> None:
    """A move, a change of lengths and the dtype of weights are no ends of the graph."""
    kjt, leaf = tracked(batch, form, through)
    copied = [kjt.to("cpu"), kjt.flatten_lengths(), kjt.sync().unsync()]
    own = len(batch.items)
    compare([held(kjt_copy, through)[:own] for kjt_copy in copied], [by_position(batch).ids] * 3, leaf)


@given(st.lists(BAGS, max_size=4), st.integers(1, 2), st.none() | st.integers(0, 4), st.booleans())
@same
def test_of_padded_rows(bags: Bags, inner: int, width: int | None, offsets: bool) -> None:
    """Of values of one and of two dims, and of weights; what is cut off gets none."""
    lengths = [len(bag) for bag in bags]
    size, columns = sum(lengths), max(lengths, default=0) if width is None else width
    positions = iter(range(size))
    rows = padded([[next(positions) for _ in bag] for bag in bags], columns, -1)
    moved = [position for row in rows for position in row]
    bounds = (
        {"offsets": torch.tensor(starts(lengths))} if offsets else {"lengths": torch.tensor(lengths, dtype=torch.int64)}
    )
    values = torch.arange(float(size * inner)).view(size, inner).requires_grad_()
    wide = [-1 if position < 0 else position * inner + i for position in moved for i in range(inner)]
    compare([JaggedTensor(values, **bounds).to_padded_dense(width, 3.0)], [wide], values)
    flat, weights = (torch.arange(float(size)).requires_grad_() for _ in range(2))
    jt = JaggedTensor(flat, weights, **bounds)
    compare([jt.to_padded_dense(width, -2.0)], [moved], flat)
    dense = jt.to_padded_dense_weights(width, 5.0)
    assert dense is not None
    compare([dense], [moved], weights)


@given(st.lists(BAGS, max_size=4))
@same
def test_of_dense_samples(bags: Bags) -> None:
    lengths = [len(bag) for bag in bags]
    leaf, weights = (torch.arange(float(sum(lengths))).requires_grad_() for _ in range(2))
    jt = JaggedTensor(leaf, weights, torch.tensor(lengths, dtype=torch.int64))
    edges = starts(lengths)
    moved = [list(range(a, b)) for a, b in zip(edges, edges[1:], strict=False)]
    compare(jt.to_dense(), moved, leaf)
    compare(jt.to_dense_weights() or [], moved, weights)
    leaf.grad = None
    if bags:
        back = JaggedTensor.from_dense(list(torch.split(leaf, lengths)))
        compare([back.values()], [list(range(sum(lengths)))], leaf)
    leaf.grad = None
    rows = jt.to_padded_dense().detach().requires_grad_()
    width = rows.shape[1]
    made = JaggedTensor.from_dense_lengths(rows, torch.tensor(lengths, dtype=torch.int64))
    compare([made.values()], [[i * width + j for i, n in enumerate(lengths) for j in range(n)]], rows)


OPERATIONS: dict[str, Callable[[KeyedJaggedTensor], Tensor]] = {
    "permute": lambda kjt: kjt.permute([1, 0, 1]).weights(),
    "split": lambda kjt: torch.cat([piece.weights() * (i + 1) for i, piece in enumerate(kjt.split([1, 1]))]),
    "concat": lambda kjt: KeyedJaggedTensor.concat(kjt.split([1, 1])[::-1]).weights(),
    "to_dict": lambda kjt: torch.cat([jt.weights() for jt in kjt.to_dict().values()]),
    "padded": lambda kjt: kjt["a"].to_padded_dense_weights(2, 1.0),  # type: ignore[dict-item, return-value]
}


@pytest.mark.parametrize("name", OPERATIONS)
def test_twice_differentiable(name: str) -> None:
    """The bags [1, 2], [] of a and [3], [4, 5] of b; the functional is quadratic, so that the second order is seen."""

    def apply(weights: Tensor) -> Tensor:
        kjt = KeyedJaggedTensor(["a", "b"], torch.arange(5), weights, torch.tensor([2, 0, 1, 2]))
        return OPERATIONS[name](kjt).square()

    leaf = torch.arange(1.0, 6.0, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(apply, (leaf,))
    assert torch.autograd.gradgradcheck(apply, (leaf,))

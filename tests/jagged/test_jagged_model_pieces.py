"""JaggedTensor and KeyedTensor against lists of lists, and how all three types become others and come back."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree
from hypothesis import given, settings, strategies as st
from jagged_model import (
    BAGS,
    WEIGHTS,
    Bags,
    Batch,
    Form,
    any_batches,
    batches,
    build,
    check,
    check_bags,
    check_dict,
    forms,
    from_bags,
    padded,
    pick,
    starts,
)

from shardwise.jagged import (
    ComputeJTDictToKJT,
    ComputeKJTToJTDict,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
)

same = settings(max_examples=40, deadline=None)
SAMPLES = st.lists(BAGS, max_size=4)
DTYPES = st.sampled_from([torch.int32, torch.int64])


def ids_of(bags: Bags) -> list[list[int]]:
    return [[number for number, _ in bag] for bag in bags]


def weights_of(bags: Bags) -> list[list[float]]:
    return [[weight for _, weight in bag] for bag in bags]


def jagged(bags: Bags, weighted: bool = True, given: str = "lengths", dtype: torch.dtype = torch.int64) -> JaggedTensor:
    lengths = [len(bag) for bag in bags]
    return JaggedTensor(
        torch.tensor([number for bag in bags for number, _ in bag], dtype=torch.int64),
        torch.tensor([weight for bag in bags for _, weight in bag]) if weighted else None,
        torch.tensor(lengths, dtype=dtype) if given != "offsets" else None,
        torch.tensor(starts(lengths), dtype=dtype) if given != "lengths" else None,
    )


GIVEN = st.sampled_from(["lengths", "offsets", "both"])

# JaggedTensor.


@given(SAMPLES, st.booleans(), GIVEN, DTYPES, st.integers(0, 4), WEIGHTS)
@same
def test_bags_become_rows_of_any_width(
    bags: Bags, weighted: bool, given: str, dtype: torch.dtype, width: int, fill: float
) -> None:
    jt = jagged(bags, weighted, given, dtype)
    check_bags(jt, bags, weighted)
    longest = max(map(len, bags), default=0)
    for wanted in (width, None):
        columns = longest if wanted is None else wanted
        assert jt.to_padded_dense(wanted, 9).tolist() == padded(ids_of(bags), columns, 9)
        dense = jt.to_padded_dense_weights(wanted, fill)
        assert (dense is not None) == weighted
        if dense is not None:
            assert dense.tolist() == padded(weights_of(bags), columns, fill)
    assert [bag.tolist() for bag in jt.to_dense()] == ids_of(bags)
    parts = jt.to_dense_weights()
    assert (parts is not None) == weighted
    if parts is not None:
        assert [part.tolist() for part in parts] == weights_of(bags)


@given(SAMPLES, st.booleans())
@same
def test_bags_come_from_dense_samples(bags: Bags, weighted: bool) -> None:
    values = [torch.tensor(row, dtype=torch.int64) for row in ids_of(bags)]
    weights = [torch.tensor(row) for row in weights_of(bags)]
    check_bags(JaggedTensor.from_dense(values, weights if weighted else None), bags, weighted)


@given(SAMPLES, st.booleans(), DTYPES, st.integers(0, 2))
@same
def test_bags_come_from_rows_and_their_lengths(bags: Bags, weighted: bool, dtype: torch.dtype, extra: int) -> None:
    width = max(map(len, bags), default=0) + extra
    values = torch.tensor(padded(ids_of(bags), width, -1), dtype=torch.int64).view(len(bags), width)
    weights = torch.tensor(padded(weights_of(bags), width, 7.0)).view(len(bags), width)
    lengths = torch.tensor([len(bag) for bag in bags], dtype=dtype)
    check_bags(JaggedTensor.from_dense_lengths(values, lengths, weights if weighted else None), bags, weighted)


def unflattened(value: Any) -> Any:
    return pytree.tree_unflatten(*pytree.tree_flatten(value))


def filled(jt: JaggedTensor) -> JaggedTensor:
    return JaggedTensor.empty_like(jt, jt.device()).copy_(jt)


COPIES: dict[str, Callable[[Any], Any]] = {
    "to": lambda jt: jt.to("cpu"),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda jt: pickle.loads(pickle.dumps(jt)),
    "pytree": unflattened,
}


@pytest.mark.parametrize("how", [*COPIES, "empty_like and copy_"])
@given(SAMPLES, st.booleans(), GIVEN)
@same
def test_a_copy_has_the_same_bags(how: str, bags: Bags, weighted: bool, given: str) -> None:
    jt = jagged(bags, weighted, given)
    check_bags(COPIES.get(how, filled)(jt), bags, weighted)
    jt.lengths()
    jt.offsets()
    check_bags(COPIES.get(how, filled)(jt), bags, weighted)


@given(SAMPLES, st.booleans(), GIVEN, st.data())
@same
def test_copying_into_a_batch_replaces_what_it_had_computed(
    bags: Bags, weighted: bool, given: str, data: st.DataObject
) -> None:
    """Lengths computed from the offsets that it had before are not those of the batch it has now."""
    items = [(number + 1, weight) for bag in bags for number, weight in bag]
    other = [[items.pop(0) for _ in range(n)] for n in data.draw(st.permutations([len(bag) for bag in bags]))]
    jt = jagged(bags, weighted, given)
    jt.lengths()
    jt.offsets()
    jt.copy_(jagged(other, weighted, data.draw(GIVEN)))
    check_bags(jt, other, weighted)


def test_empty_has_no_bags_of_the_dtypes_asked_for() -> None:
    for made in (JaggedTensor.empty(), JaggedTensor.empty_like(jagged([[(1, 1.0)]], weighted=False))):
        check_bags(made, [], weighted=False)
    assert made.values().dtype == torch.int64
    assert JaggedTensor.empty().lengths().dtype == torch.int32
    made = JaggedTensor.empty(True, torch.device("cpu"), torch.int32, torch.half, torch.int64)
    assert (made.values().dtype, made.weights().dtype, made.lengths().dtype) == (torch.int32, torch.half, torch.int64)
    rows = JaggedTensor(torch.ones(2, 3), torch.ones(2), torch.tensor([2]))
    assert JaggedTensor.empty_like(rows, torch.device("meta")).values().shape == (2, 3)
    check_bags(JaggedTensor.empty_like(rows), [], weighted=True)


# Between the types.


@given(any_batches(), forms())
@same
def test_modules_take_a_batch_apart_and_make_one(batch: Batch, form: Form) -> None:
    jts = ComputeKJTToJTDict()(build(batch, form))
    check_dict(jts, batch)
    check(ComputeJTDictToKJT()(jts), from_bags(dict(batch.features), batch.weighted))


@given(batches(), DTYPES, st.booleans())
@same
def test_nested_tensors_of_each_key_and_back(batch: Batch, dtype: torch.dtype, offsets: bool) -> None:
    """torch's jagged layout: its rows are the bags."""
    kjt = build(batch, Form(ids=dtype, given="offsets" if offsets else "lengths"))
    nested = kjt.to_nested()
    assert list(nested) == batch.keys
    for (key, bags), nested_ids in zip(batch.features, nested.values(), strict=True):
        assert (nested_ids.is_nested, nested_ids.layout, nested_ids.dtype) == (True, torch.jagged, dtype), key
        assert [row.tolist() for row in nested_ids.unbind()] == ids_of(bags)
    check(KeyedJaggedTensor.from_nested(nested), from_bags(dict(batch.features), False))


@given(batches(fewest=1, variable=False), forms())
@same
def test_arrow_lists_of_each_key_and_back(batch: Batch, form: Form) -> None:
    """Weights are a column of their own beside the key's."""
    pytest.importorskip("pyarrow")
    table = build(batch, form).to_arrow()
    wanted: dict[str, Any] = {}
    for key, bags in batch.features:
        wanted[key] = ids_of(bags)
        if batch.weighted:
            wanted[f"{key}.weights"] = weights_of(bags)
    assert {name: table[name].to_pylist() for name in table.column_names} == wanted
    check(KeyedJaggedTensor.from_arrow(table), from_bags(dict(batch.features), batch.weighted))
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    check(KeyedJaggedTensor.from_arrow(columns), from_bags(dict(batch.features), batch.weighted))
    last = pick(batch, [len(batch.features) - 1])
    check(KeyedJaggedTensor.from_arrow(table, last.keys), last)


def test_arrow_tables_have_one_number_of_rows() -> None:
    pytest.importorskip("pyarrow")
    uneven = build(from_bags({"a": [], "b": [[(1, 1.0)]]}))
    with pytest.raises(ValueError, match=r"one number of rows, but batch sizes are \[0, 1\] for \['a', 'b'\]"):
        uneven.to_arrow()


@given(st.lists(st.none() | BAGS, max_size=6), st.integers(0, 6), st.integers(0, 6), st.sampled_from([32, 64]))
@same
def test_arrow_lists_in_chunks_cut_out_of_others(rows: list[Any], cut: int, start: int, bits: int) -> None:
    """What a file reader hands over: chunks of any size, slices that begin within a chunk, lists that are missing."""
    pyarrow = pytest.importorskip("pyarrow")
    kind = {32: pyarrow.list_, 64: pyarrow.large_list}[bits]

    def column(dtype: Any, numbers: Callable[[Bags], Any]) -> Any:
        lists = [None if row is None else numbers([row])[0] for row in rows]
        return pyarrow.chunked_array([lists[:cut], lists[cut:]], type=kind(dtype))

    table = pyarrow.table(
        {"a": column(pyarrow.int64(), ids_of), "a.weights": column(pyarrow.float32(), weights_of)}
    ).slice(start)
    bags = [row or [] for row in rows[start:]]
    check(KeyedJaggedTensor.from_arrow(table), from_bags({"a": bags}, weighted=True))


# KeyedTensor: the columns of each key, as one list of rows.


@st.composite
def tables(draw: st.DrawFn) -> tuple[list[dict[str, list[list[float]]]], int]:
    """Up to three inputs of up to three keys, no key twice; rows of 0 to 3 numbers a key."""
    rows = draw(st.integers(0, 3))
    row = st.lists(WEIGHTS, min_size=3, max_size=3)
    inputs = []
    for i in range(draw(st.integers(1, 3))):
        widths = draw(st.lists(st.integers(0, 3), min_size=1, max_size=3))
        inputs.append({f"{i}.{k}": [draw(row)[:w] for _ in range(rows)] for k, w in enumerate(widths)})
    return inputs, rows


@given(tables(), st.integers(0, 1), st.data())
@same
def test_groups_are_columns_side_by_side(
    drawn: tuple[list[dict[str, list[list[float]]]], int], key_dim: int, data: st.DataObject
) -> None:
    inputs, rows = drawn
    columns = {key: table for kt_columns in inputs for key, table in kt_columns.items()}
    # a table of no rows does not say how wide it is
    widths = {key: len(table[0]) if table else 2 for key, table in columns.items()}

    def beside(keys: list[str]) -> torch.Tensor:
        flat = torch.tensor([[n for key in keys for n in columns[key][row]] for row in range(rows)])
        wide = flat.view(rows, sum(widths[key] for key in keys)).float()
        return wide if key_dim == 1 else wide.t().contiguous()

    kts = [
        KeyedTensor(list(kt_columns), [widths[key] for key in kt_columns], beside(list(kt_columns)), key_dim)
        for kt_columns in inputs
    ]
    for kt, kt_columns in zip(kts, inputs, strict=True):
        assert (kt.keys(), kt.length_per_key()) == (list(kt_columns), [widths[key] for key in kt_columns])
        assert kt.offset_per_key() == starts([widths[key] for key in kt_columns])
        assert all(torch.equal(part, beside([key])) for key, part in kt.to_dict().items())
        assert all(torch.equal(kt[key], beside([key])) for key in kt_columns)
        for how, make in COPIES.items():
            copied = make(kt)
            copied_facts = (copied.keys(), copied.length_per_key(), copied.key_dim())
            assert copied_facts == (list(kt_columns), kt.length_per_key(), key_dim), how
            assert torch.equal(copied.values(), kt.values())
    groups = data.draw(st.lists(st.lists(st.sampled_from(sorted(columns)), max_size=4), max_size=3))
    regrouped = KeyedTensor.regroup(kts, groups)
    assert [part.shape for part in regrouped] == [beside(group).shape for group in groups]
    assert all(torch.equal(part, beside(group)) for part, group in zip(regrouped, groups, strict=True))
    named = KeyedTensor.regroup_as_dict(kts, groups, [str(i) for i in range(len(groups))])
    assert all(torch.equal(part, beside(group)) for part, group in zip(named.values(), groups, strict=True))


@given(st.data())
@same
def test_a_module_regroups_inputs_whose_order_changes(data: st.DataObject) -> None:
    """TorchRec's KTRegroupAsDict remembers the order of its first call and mixes the columns of the second."""
    from shardwise.jagged import KTRegroupAsDict

    groups, names = [["b", "c"], ["a", "b"]], ["x", "y"]
    module = KTRegroupAsDict(groups, names)
    widths = {"a": 1, "b": 2, "c": 3}
    for _ in range(3):
        order = data.draw(st.permutations(["a", "b", "c"]))
        parts = {key: torch.randn(2, widths[key]) for key in order}
        cut = data.draw(st.integers(0, 2))
        inputs = [
            KeyedTensor.from_tensor_list(keys, [parts[key] for key in keys])
            for keys in (order[:cut], order[cut:])
            if keys
        ]
        regrouped = module(inputs)
        assert list(regrouped) == names
        for group, part in zip(groups, regrouped.values(), strict=True):
            assert torch.equal(part, torch.cat([parts[key] for key in group], 1))

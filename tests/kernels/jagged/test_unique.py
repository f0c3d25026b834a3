"""`unique_ids` and `jagged_unique` number distinct ids as sorted sets in Python would, on every path."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from bucket_inputs import CPU_PATHS, running_on
from hypothesis import given, settings, strategies as st
from kernel_inputs import UPDATES, assert_same_bits
from torch import Tensor

from shardwise.kernels import jagged_unique, unique_ids
from shardwise.kernels.cpu import buckets as cpu_buckets
from shardwise.kernels.jagged.unique import jagged_unique_ref

LOOPS = cpu_buckets, "loops"
INTEGERS = [torch.int32, torch.int64]
LISTS = {
    "some": [5, 3, 5, 5, 0, 3],
    "one": [7],
    "none": [],
    "equal": [4] * 100,
    "negative": [-3, 2**31 - 1, -(2**31), -3, 0],
    "sparse": [10**9, 1, 10**9, 500_000_000, 77, 1],
    "three digits": [i * 1_234_567 % 2**31 for i in range(300)],
}
LARGE = {"whole range": [2**63 - 1, -(2**63), 0, 2**63 - 1], "wide": [2**55, 3, 2**55, 2**40]}


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("name", [*LISTS, *LARGE])
@pytest.mark.parametrize("device", UPDATES)
def test_ids_are_numbered_in_their_order(where: torch.device, name: str, dtype: torch.dtype) -> None:
    ids = {**LISTS, **LARGE}[name]
    if name in LARGE and dtype == torch.int32:
        pytest.skip("int32 does not hold these ids")
    unique = unique_ids(torch.tensor(ids, dtype=dtype, device=where), return_counts=True)
    plain = unique_ids(torch.tensor(ids, dtype=dtype, device=where))
    distinct = sorted(set(ids))
    assert unique.counts is not None and plain.counts is None
    assert unique.ids.tolist() == plain.ids.tolist() == distinct and unique.ids.dtype == dtype
    assert unique.inverse.tolist() == plain.inverse.tolist() == [distinct.index(id) for id in ids]
    assert unique.counts.tolist() == [ids.count(id) for id in distinct]
    assert unique.inverse.dtype == unique.counts.dtype == torch.int64


def jagged_model(bags: list[list[list[int]]], tables: list[int], count: int) -> tuple[list[int], list[int], list[int]]:
    """Lengths, ids and inverse."""
    lengths, distinct_ids, inverse = [], [], []
    for table in range(count):
        table_bags = [bag for f, feature in enumerate(bags) if tables[f] == table for bag in feature]
        distinct = sorted({id for bag in table_bags for id in bag})
        lengths += [
            len(distinct) // len(table_bags) + (i < len(distinct) % len(table_bags)) for i in range(len(table_bags))
        ]
        inverse += [len(distinct_ids) + distinct.index(id) for bag in table_bags for id in bag]
        distinct_ids += distinct
    return lengths, distinct_ids, inverse


def batch_tensors(
    bags: list[list[list[int]]], ids: torch.dtype, offsets: torch.dtype, device: Any
) -> tuple[Tensor, Tensor]:
    lengths = torch.tensor([len(bag) for feature in bags for bag in feature], dtype=torch.int64)
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    flat = [id for feature in bags for bag in feature for id in bag]
    return torch.tensor(flat, dtype=ids, device=device), ends.to(device, offsets)


def assert_numbered(result: Any, bags: list[list[list[int]]], tables: list[int], count: int) -> None:
    lengths, distinct_ids, inverse = jagged_model(bags, tables, count)
    assert result.lengths.tolist() == lengths
    assert result.offsets.tolist() == [0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()]
    assert result.ids.tolist() == distinct_ids
    assert result.inverse.tolist() == inverse


BAGS = [[[5, 1, 5], [], [2]], [[1, 1, 7], [0], [5]], [[], [], []], [[3], [3, 2, 3], [9]]]
SHARED = [0, 0, 1, 2]


@pytest.mark.parametrize("rows", [10, 1000, 2**40])
@pytest.mark.parametrize("device", UPDATES)
def test_the_ids_of_each_table_are_numbered(where: torch.device, rows: int) -> None:
    for ids, offsets in ((torch.int32, torch.int64), (torch.int64, torch.int32)):
        args = batch_tensors(BAGS, ids, offsets, where)
        result = jagged_unique(*args, [rows] * 3, SHARED)
        assert_numbered(result, BAGS, SHARED, 3)
        assert (result.ids.dtype, result.lengths.dtype, result.offsets.dtype) == (ids, offsets, offsets)
        alone = jagged_unique(*args, [rows] * 4)
        assert_numbered(alone, BAGS, [0, 1, 2, 3], 4)
        assert_same_bits(alone, jagged_unique_ref(*args, [rows] * 4))


@pytest.mark.parametrize("device", UPDATES)
def test_no_ids_no_batch_and_no_tables_are_ordinary(where: torch.device) -> None:
    for bags in ([[[], []], [[], []]], [[], []]):
        args = batch_tensors(bags, torch.int64, torch.int64, where)
        result = jagged_unique(*args, [5, 0])
        assert result.lengths.tolist() == [0] * (len(args[1]) - 1)
        assert result.offsets.tolist() == [0] * len(args[1])
        assert result.ids.tolist() == result.inverse.tolist() == []
    none = jagged_unique(args[0], torch.zeros(1, dtype=torch.int64, device=where), [])
    assert [len(tensor) for tensor in none] == [0, 1, 0, 0]


@pytest.mark.parametrize("device", CPU_PATHS)
@settings(max_examples=50, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_batch_is_numbered_as_sets_are(device: str, data: Any) -> None:
    tables = sorted(data.draw(st.lists(st.integers(0, 2), max_size=4)))
    tables = [sorted(set(tables)).index(table) for table in tables]
    batch, rows = data.draw(st.integers(1, 4)), data.draw(st.sampled_from([3, 40, 2**31 - 1]))
    bag = st.lists(st.integers(0, rows - 1), max_size=4)
    bags = [[data.draw(bag) for _ in range(batch)] for _ in tables]
    args = batch_tensors(bags, data.draw(st.sampled_from(INTEGERS)), torch.int64, "cpu")
    count = len(set(tables))
    assert_numbered(jagged_unique(*args, [rows] * count, tables), bags, tables, count)
    assert unique_ids(args[0]).ids.tolist() == sorted(set(args[0].tolist()))


def test_threads_number_as_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), torch.randint(0, 9, (200,)).cumsum(0)])
    ids = torch.randint(0, 1000, (int(offsets[-1]),))
    with running_on("numba"):
        alone = jagged_unique(ids, offsets, [1000] * 10)
        monkeypatch.setattr(cpu_buckets, "parts_of", lambda ids, most: min(4, most))
        assert_same_bits(jagged_unique(ids, offsets, [1000] * 10), alone)
        ids[600] = 1000
        with pytest.raises(ValueError, match=re.escape("ids[600] of feature")):
            jagged_unique(ids, offsets, [1000] * 10)


@pytest.mark.parametrize("device", UPDATES)
def test_rows_fetched_once_are_handed_out_to_all_ids(where: torch.device) -> None:
    ids, offsets = batch_tensors(BAGS[:2], torch.int64, torch.int64, where)
    result = jagged_unique(ids, offsets, [10], [0, 0])
    rows = torch.randn(10, 3, device=where)
    assert_same_bits(rows[result.ids][result.inverse], rows[ids])


def test_they_compile() -> None:
    def both(ids: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        unique, per_table = unique_ids(ids), jagged_unique(ids, offsets, [10, 10, 10], SHARED)
        return unique.ids[unique.inverse], per_table.ids[per_table.inverse]

    with running_on("cpu") as device, torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(both, fullgraph=True, dynamic=True, backend="aot_eager")
        for bags in (BAGS, [feature[:2] for feature in BAGS]):
            ids, offsets = batch_tensors(bags, torch.int64, torch.int64, device)
            for got in compiled(ids, offsets):
                assert_same_bits(got, ids)


T = torch.tensor
BAD: list[tuple[tuple[Any, ...], type[Exception], str]] = [
    ((T([1.0]), T([0, 1]), [5]), TypeError, "ids must be int32 or int64, got float32"),
    ((T([1]), T([0.0, 1.0]), [5]), TypeError, "offsets must be int32 or int64, got float32"),
    ((T([[1]]), T([0, 1]), [5]), ValueError, "ids must have one dimension, got shape (1, 1)"),
    ((T([1]), T([0, 1], device="meta"), [5]), ValueError, "offsets is on meta, ids on cpu"),
    ((T([1]), T([0, 1]), [5, 5]), ValueError, "2 offsets do not divide among 2 features"),
    ((T([1]), T([0, 1]), [5, 5], [0]), ValueError, "feature_to_table must name tables 0 to 1 in order, got [0]"),
    ((T([1]), T([0, 1, 1, 1]), [5, 5], [0, 1, 0]), ValueError, "must name tables 0 to 1 in order, got [0, 1, 0]"),
    ((T([1]), T([0, 1]), [-5]), ValueError, "hash_sizes[0] must not be negative, got -5"),
    ((T([1]), T([0, 0, 1]), [2**62, 2**62]), ValueError, "hash_sizes add up to 9223372036854775808"),
    ((T([1]), T([0]), []), ValueError, "1 ids and 1 offsets of no tables: expected 0 and 1"),
    ((T([1, 9]), T([0, 1, 2]), [5, 5]), ValueError, "ids[1] of feature 1 is 9, outside table 1 of 5 rows"),
    ((T([1, -1]), T([0, 1, 2]), [5, 5]), ValueError, "ids[1] of feature 1 is -1, outside table 1 of 5 rows"),
    ((T([1, 2]), T([0, 1]), [5]), ValueError, "offsets must go from 0 to 2 ids, got 0 to 1"),
    ((T([1, 2]), T([1, 2]), [5]), ValueError, "offsets must go from 0 to 2 ids, got 1 to 2"),
    ((T([1, 2]), T([0, 9, 2]), [5]), ValueError, "offsets[2] is 2 after 9"),
    ((T([1, 2]), T([0, 9, 2]), [5, 5]), ValueError, "offsets[2] is 2 after 9"),
]


@pytest.mark.parametrize(("args", "error", "message"), BAD, ids=[message for _, _, message in BAD])
@pytest.mark.parametrize("device", CPU_PATHS)
def test_bad_input_is_named(device: str, args: tuple[Any, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        jagged_unique(*args)


@pytest.mark.parametrize("device", UPDATES[1:-1])
def test_an_id_outside_its_table_is_named_where_kernels_run(where: torch.device) -> None:
    """The size of the result waits for the where anyhow, and what is wrong comes along."""
    ids, offsets = T([1, 9], device=where), T([0, 1, 2], device=where)
    with pytest.raises(ValueError, match=re.escape("ids[1] of feature 1 is 9, outside table 1 of 5 rows")):
        jagged_unique(ids, offsets, [5, 5])
    with pytest.raises(ValueError, match="offsets must go from 0 to 2 ids, got 0 to 1"):
        jagged_unique(ids, offsets - offsets // 2, [5, 5])

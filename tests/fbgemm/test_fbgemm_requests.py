"""Ops of requests, ids and pruned tables where FBGEMM gives no result to compare with, and what bad arguments raise."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardwise.fbgemm import register_ops

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def _registered() -> None:
    register_ops()


def ints(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def served(name: str) -> Any:
    return getattr(torch.ops.fbgemm, name)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: torch.ops.fbgemm.merge_pooled_embeddings([x, y], 2, CPU),
        lambda x, y: torch.cat(torch.ops.fbgemm.all_to_one_device([x, y], CPU)),
        lambda x, y: torch.ops.fbgemm.sum_reduce_to_one([x, y], CPU),
        lambda x, y: torch.ops.fbgemm.reorder_batched_sequence_embeddings(
            ints(0, 1, 2), x * y, ints(0, 1, 2), ints(0, 1, 2), 2
        ),
    ],
)
def test_gradients_reach_what_was_brought_together(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    x, y = (torch.rand(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(function, (x, y))


def test_copies_on_one_device_have_memory_of_their_own() -> None:
    x = torch.zeros(2)
    torch.ops.fbgemm.all_to_one_device([x], CPU)[0].add_(1)
    torch.ops.fbgemm.sum_reduce_to_one([x], CPU).add_(1)
    assert x.tolist() == [0, 0]


def test_padding_of_a_feature_without_indices_goes_to_the_end() -> None:
    """FBGEMM leaves it before the next feature, whose offsets then name it."""
    indices, offsets, weights = torch.ops.fbgemm.tbe_input_combine(
        [ints(8, 9), ints(1, 2, 7)],
        [ints(0, 0), ints(0, 1, 2)],
        [torch.rand(0), torch.tensor([3.0, 4, 5])],
        torch.tensor([True, True]),
    )
    assert indices.tolist() == [1, 2, 8, 9, 7]
    assert offsets.tolist() == [0, 0, 1, 2]
    assert weights.tolist() == [3, 4, 1, 1, 1]


@pytest.mark.filterwarnings("ignore:bounds_check_indices")
@pytest.mark.parametrize("mode", [1, 2, 4, 5])
def test_ids_and_offsets_are_put_inside(mode: int) -> None:
    """Offsets too where they have another dtype than ids; FBGEMM corrects a copy of them then."""
    indices, warning = ints(4, 5, -1, -7), ints(9)
    offsets = ints(-1, 3, 2, dtype=torch.int32)
    torch.ops.fbgemm.bounds_check_indices(ints(5, 3), indices, offsets, mode, warning)
    assert (indices.tolist(), offsets.tolist()) == ([4, 0, -1, 0], [0, 3, 4])
    # two ids, the first offset and the last one
    assert warning.item() == (4 if mode in (1, 5) else 9)


@pytest.mark.parametrize("mode", [0, 6])
def test_a_fatal_check_names_the_id_and_changes_nothing(mode: int) -> None:
    indices, offsets = ints(4, 5, 0), ints(0, 2, 3)
    with pytest.raises(IndexError, match=r"indices\[1\] is 5, outside its table of 5 rows"):
        torch.ops.fbgemm.bounds_check_indices(ints(5, 3), indices, offsets, mode, ints(0))
    with pytest.raises(ValueError, match=r"without falling, got offsets\[1\] = 7"):
        torch.ops.fbgemm.bounds_check_indices(ints(5, 3), indices, ints(0, 7, 3), mode, ints(0))
    assert indices.tolist() == [4, 5, 0]


@pytest.mark.parametrize("kept", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_insertion_is_that_of_one_id_after_another(dtype: torch.dtype, kept: torch.dtype) -> None:
    """In nearly full tables, in which most ids do not get the slots of their hashes."""
    numbers = random.Random(0)
    for _ in range(10):
        count = numbers.randrange(1, 60)
        # ids that come twice take one slot: that of the first, with the row of the last
        ids = [numbers.randrange(40) for _ in range(count)]
        rows = [numbers.randrange(-1, 99) for _ in range(count)]
        slots = len(set(ids)) + 1
        at_once, in_turn = (torch.full((slots, 2), -1, dtype=kept) for _ in range(2))
        insert = torch.ops.fbgemm.pruned_hashmap_insert
        given = torch.tensor(ids, dtype=dtype), torch.tensor(rows, dtype=dtype)
        insert(*given, ints(0, count, dtype=dtype), at_once, ints(0, slots))
        for place in range(count):
            one = [each[place : place + 1] for each in given]
            insert(*one, ints(0, 1, dtype=dtype), in_turn, ints(0, slots))
        assert torch.equal(at_once, in_turn)
        places = torch.ops.fbgemm.pruned_hashmap_lookup(given[0], ints(0, count, dtype=dtype), at_once, ints(0, slots))
        last = {id: row for id, row in zip(ids, rows, strict=True) if row != -1}
        assert places.tolist() == [last.get(id, -1) for id in ids]


def test_a_full_hash_table_ends_a_search_and_refuses_more() -> None:
    """FBGEMM goes round for ever in both."""
    table = ints(5, 0, 6, 1, 7, 2).view(3, 2)
    found = torch.ops.fbgemm.pruned_hashmap_lookup(ints(7, 8), ints(0, 2), table, ints(0, 3))
    assert found.tolist() == [2, -1]
    before = table.clone()
    with pytest.raises(ValueError, match="no slot left for id 8 among its 3"):
        torch.ops.fbgemm.pruned_hashmap_insert(ints(7, 8), ints(9, 9), ints(0, 2), table, ints(0, 3))
    assert torch.equal(table, before)


_SLOTS = (ints(1), torch.zeros(3, 1, dtype=torch.int64), 1)


@pytest.mark.parametrize(
    ("name", "args", "error", "text"),
    [
        ("reorder_batched_ad_lengths", (ints(1, 2), ints(0, 1), 2), ValueError, "batch_offsets must go from 0 to 2"),
        ("reorder_batched_ad_lengths", (ints(1, 2, 3), ints(0, 2), 2), ValueError, "a multiple of num_ads_in_batch, 2"),
        ("reorder_batched_ad_lengths", (ints(1, 2), ints(0, 2), 2, False, 1), ValueError, "at least num_ads_in_batch"),
        (
            "reorder_batched_ad_indices",
            (ints(0, 1), ints(1), ints(0, 2), ints(0, 1), 1, True),
            ValueError,
            "num_indices_after_broadcast must be given",
        ),
        (
            "padding_fused_tbe_input_combine_with_length",
            ([ints(1)], [ints(0, 1)], [torch.rand(0)], 1),
            ValueError,
            r"lengths_list\[0\] must be of at most batch_size, 1, bags, got 2",
        ),
        (
            "tbe_input_combine_with_length",
            ([ints(1)], [ints(1)], [torch.rand(2)]),
            ValueError,
            r"per_sample_weights\[0\] must have a number for each of 1",
        ),
        ("bounds_check_indices", (ints(3), ints(1), ints(0, 1), 9, ints(0)), ValueError, "bounds_check_mode .* got 9"),
        ("murmur_hash3", (ints(1, 2), 0, 0), ValueError, r"input must be one id, got shape \[2\]"),
        ("zero_collision_hash", _SLOTS, ValueError, "circular_probe must be true"),
        ("zero_collision_hash", (*_SLOTS, True, 4), ValueError, "exp_hours must be -1"),
        ("zero_collision_hash", (*_SLOTS, True, -1, True, ints(3)), ValueError, "must be given together"),
        ("zero_collision_hash", (*_SLOTS, True, -1, True, ints(9), ints(0)), ValueError, "of 3 slots for each id"),
        ("pruned_array_lookup", (ints(4), ints(0, 1), ints(1), ints(0, 1)), IndexError, r"indices\[0\] is 4, outside"),
        (
            "pruned_hashmap_insert",
            (ints(2**40), ints(1), ints(0, 1), torch.full((3, 2), -1, dtype=torch.int32), ints(0, 3)),
            ValueError,
            "hash_table is int32",
        ),
        (
            "embedding_bag_rowwise_prune",
            (torch.rand(2, 2), torch.rand(3), 0.5, torch.int32),
            ValueError,
            "indicator must have a number for each of 2 rows, got 3",
        ),
    ],
)
def test_bad_arguments_are_named(name: str, args: tuple[Any, ...], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        served(name)(*args)

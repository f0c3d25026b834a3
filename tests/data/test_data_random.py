"""Random batches keep their bounds and their seed; splits part a stream in two without loss."""

from __future__ import annotations

import pickle
from itertools import islice
from typing import Any

import pytest
import torch

from shardwise.data import Batch, RandomRecDataset, idx_split_train_val, rand_split_train_val


def same(a: Batch, b: Batch) -> bool:
    pairs = [
        (batch.dense_features, batch.labels, batch.sparse_features.values(), batch.sparse_features.lengths())
        for batch in (a, b)
    ]
    return all(torch.equal(x, y) for x, y in zip(*pairs, strict=True))


# arguments -> bounds of the lengths and of the ids of features x and y
CASES: list[tuple[dict[str, Any], list[tuple[int, int]], list[int]]] = [
    ({}, [(0, 2), (0, 2)], [100, 100]),
    ({"hash_size": 3, "ids_per_feature": 4}, [(4, 4), (4, 4)], [3, 3]),
    ({"hash_sizes": [1, 7], "ids_per_features": [0, 5]}, [(0, 0), (0, 5)], [1, 7]),
    ({"ids_per_feature": 4, "min_ids_per_feature": 2}, [(2, 4), (2, 4)], [100, 100]),
    ({"ids_per_features": [3, 3], "min_ids_per_features": [3, 1]}, [(3, 3), (1, 3)], [100, 100]),
]  # fmt: skip


@pytest.mark.parametrize(("given", "lengths", "rows"), CASES)
def test_batches_keep_their_bounds(given: dict[str, Any], lengths: list[tuple[int, int]], rows: list[int]) -> None:
    for batch in RandomRecDataset(["x", "y"], 200, manual_seed=0, num_batches=2, num_dense=3, **given):
        assert batch.dense_features.shape == (200, 3) and batch.labels.unique().tolist() == [0, 1]
        assert abs(float(batch.dense_features.mean())) < 0.2
        for key, (low, high), most in zip(("x", "y"), lengths, rows, strict=True):
            bags = batch.sparse_features[key]
            assert bags.lengths().unique().tolist() == list(range(low, high + 1))
            assert bool((bags.values() >= 0).all()) and bool((bags.values() < most).all())


def test_a_seed_gives_the_same_batches_and_made_ones_come_again() -> None:
    one, again = (RandomRecDataset(["x"], 4, manual_seed=3, num_generated_batches=2) for _ in range(2))
    first = list(islice(one, 5))
    assert all(same(a, b) for a, b in zip(first, islice(again, 5), strict=True))
    assert first[0] is first[2] is first[4] and not same(first[0], first[1])
    # a second reading begins with the first batch
    assert next(iter(one)) is first[0]
    other = RandomRecDataset(["x"], 4, manual_seed=4)
    assert not same(next(iter(other)), first[0])


def test_batches_can_be_made_anew_each_time() -> None:
    batches = list(RandomRecDataset(["x"], 4, manual_seed=3, num_generated_batches=-1, num_batches=3))
    assert len(batches) == 3 and not same(batches[0], batches[1]) and not same(batches[0], batches[2])


def test_without_an_end_there_is_no_length() -> None:
    assert len(RandomRecDataset(["x"], 1, num_batches=7)) == 7
    with pytest.raises(TypeError, match="num_batches"):
        len(RandomRecDataset(["x"], 1))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"hash_sizes": [5]}, "hash_sizes must have a number for each of 2 keys, got 1"),
        ({"hash_sizes": [5, 0]}, "feature 'y': hash size must be positive, got 0"),
        ({"ids_per_features": [1, 2], "min_ids_per_features": [1, 3]}, "feature 'y': need 0 <= 3 .* <= 2"),
        ({"num_generated_batches": 0}, "num_generated_batches must not be 0"),
        ({"num_dense": -1}, "num_dense must not be negative, got -1"),
    ],
)
def test_mistakes_are_refused_by_name(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RandomRecDataset(["x", "y"], 2, **given)


def twice(number: int) -> int:
    return 2 * number


@pytest.mark.parametrize(
    ("split", "wanted"),
    [
        (lambda stream: idx_split_train_val(stream, 0.7, 1), [n for n in range(30) if n % 10 < 7]),
        (lambda stream: idx_split_train_val(stream, 0.1), list(range(10))),
        (lambda stream: idx_split_train_val(stream, 0.5, 1, twice), [n for n in range(30) if 2 * n % 10 < 5]),
        (lambda stream: rand_split_train_val(stream, 0.5, 1), None),
    ],
    ids=["of ten", "of a hundred", "by a key", "by chance"],
)
def test_splits_part_a_stream_without_loss(split: Any, wanted: list[int] | None) -> None:
    stream = list(range(30))
    train, validation = split(stream)
    taken, left = list(train), list(validation)
    assert sorted(taken + left) == stream and taken == sorted(taken) and taken and left
    assert wanted is None or taken == wanted
    # the same again, and in another process
    assert list(train) == taken and list(pickle.loads(pickle.dumps(validation))) == left


def test_shares_are_kept_and_seeds_differ() -> None:
    stream = range(2000)
    taken = [list(rand_split_train_val(stream, 0.8, seed)[0]) for seed in (0, 0, 1)]
    assert taken[0] == taken[1] != taken[2] and 0.75 < len(taken[0]) / 2000 < 0.85
    for share in (0.0, 1.0):
        with pytest.raises(ValueError, match=f"train_perc must be between 0 and 1, got {share}"):
            idx_split_train_val(stream, share)

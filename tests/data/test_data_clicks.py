"""Batches, and those that are made up: generated clicks and random ones; reproducible, bounded, split without loss."""

from __future__ import annotations

import pickle
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from shardwise import Batch, KeyedJaggedTensor
from shardwise.data import ClickFeature, Clicks, RandomRecDataset, idx_split_train_val, rand_split_train_val
from shardwise.models import auc

SMALL = Clicks(3, train_samples=100, evaluate_samples=50)


def same(a: Batch, b: Batch) -> bool:
    return (
        torch.equal(a.dense_features, b.dense_features)
        and torch.equal(a.labels, b.labels)
        and a.sparse_features.keys() == b.sparse_features.keys()
        and torch.equal(a.sparse_features.values(), b.sparse_features.values())
        and torch.equal(a.sparse_features.lengths(), b.sparse_features.lengths())
    )


def joined(parts: list[Batch]) -> list[list[object]]:
    """Per sample: dense, label and the bags of all features."""
    rows: list[list[object]] = []
    for part in parts:
        bags = [bag.to_dense() for bag in part.sparse_features.to_dict().values()]
        for b in range(part.batch_size):
            ids = [bag[b].tolist() for bag in bags]
            rows.append([part.dense_features[b].tolist(), float(part.labels[b]), ids])
    return rows


def test_a_sample_depends_on_seed_and_number_alone() -> None:
    index = np.array([7, 3, 60, 3])
    one_by_one = [Clicks(3).samples(index[n : n + 1]) for n in range(4)]
    assert joined([Clicks(3).samples(index)]) == joined(one_by_one)
    assert not same(Clicks(3).samples(index), Clicks(4).samples(index))


@pytest.mark.parametrize("split", ["train", "evaluate"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_take_disjoint_slices_of_the_same_global_batches(split: str, world_size: int) -> None:
    batches = getattr(SMALL, split)
    whole = list(batches(16))
    slices = [list(batches(16, rank=rank, world_size=world_size)) for rank in range(world_size)]
    assert [len(batches) for batches in slices] == [len(whole)] * world_size
    for step, batch in enumerate(whole):
        assert joined([batch]) == joined([batches[step] for batches in slices])


def test_training_drops_the_rest_and_evaluation_keeps_it() -> None:
    assert [batch.batch_size for batch in SMALL.train(32)] == [32, 32, 32]
    assert [batch.batch_size for batch in SMALL.evaluate(32)] == [32, 18]


def test_epochs_and_splits_share_no_sample() -> None:
    dense = [
        next(SMALL.train(32)).dense_features,
        next(SMALL.train(32, epoch=1)).dense_features,
        next(SMALL.evaluate(32)).dense_features,
    ]
    assert len(torch.unique(torch.cat(dense), dim=0)) == 96


def test_ids_follow_zipf_and_lie_in_their_tables() -> None:
    feature = ClickFeature("ad", rows=1000, skew=1.0)
    clicks = Clicks(0, features=[feature], dense=1)
    ids = clicks.samples(np.arange(200_000)).sparse_features["ad"].values()
    assert int(ids.min()) >= 0
    assert int(ids.max()) < 1000
    counts = torch.bincount(ids, minlength=1000).sort(descending=True).values / 200_000
    # the integral of 1/x over [k, k + 1), over that over [1, rows + 1)
    rank = torch.arange(1, 1001, dtype=torch.float64)
    expected = torch.log1p(1 / rank) / np.log(1001)
    torch.testing.assert_close(counts[:20].double(), expected[:20], rtol=0.05, atol=0.0)
    assert (counts > 0).double().mean() > 0.95


def test_bags_have_every_length_between_their_bounds() -> None:
    clicks = Clicks(0, features=[ClickFeature("words", rows=10, min_ids=0, max_ids=3)], dense=1)
    lengths = clicks.samples(np.arange(4000)).sparse_features.lengths()
    np.testing.assert_allclose(np.bincount(lengths) / 4000, [0.25] * 4, atol=0.03)


def test_the_mean_number_of_ids_is_known_before_training() -> None:
    source = Clicks()
    (batch,) = source.train(source.train_samples)
    counts = dict(zip(batch.sparse_features.keys(), batch.sparse_features.length_per_key(), strict=True))
    assert source.ids_per_sample["words"] == 6.5 and source.ids_per_sample["history"] == 15
    for name, mean in source.ids_per_sample.items():
        assert counts[name] / source.train_samples == pytest.approx(mean, rel=0.01)


def test_labels_are_drawn_from_the_planted_logits() -> None:
    clicks = Clicks(1, click_bias=-2.0)
    index = np.arange(40_000)
    logits = clicks.planted_logits(index)
    labels = clicks.samples(index).labels.numpy()
    assert abs(logits.mean() + 2.0) < 0.05
    for low, high in ((-3.0, -2.0), (-1.0, 0.0), (0.0, 1.0)):
        chosen = (logits > low) & (logits < high)
        expected = (1 / (1 + np.exp(-logits[chosen]))).mean()
        assert abs(labels[chosen].mean() - expected) < 4 * (0.25 / chosen.sum()) ** 0.5


def test_the_bayes_auc_is_what_the_planted_logits_score() -> None:
    clicks = Clicks(2, evaluate_samples=20_000)
    labels = torch.cat([batch.labels for batch in clicks.evaluate(5000)])
    logits = torch.from_numpy(clicks.planted_logits((1 << 48) + np.arange(20_000)))
    assert abs(auc(logits, labels) - clicks.bayes_auc()) < 0.01
    assert 0.75 < clicks.bayes_auc() < 0.9


def test_a_feature_keeps_its_hidden_weights_whatever_the_sample() -> None:
    feature = ClickFeature("a", rows=3)
    clicks = Clicks(5, features=[feature], dense=1)
    index = np.arange(50)
    ids = clicks.samples(index).sparse_features.values().numpy()
    without_dense = clicks.planted_logits(index) - clicks.samples(index).dense_features.double().numpy()[:, 0] * float(
        clicks._dense_weights[0]
    )
    for row in range(3):
        assert np.ptp(without_dense[ids == row]) < 1e-6


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ClickFeature("a", rows=0), "feature 'a': rows and skew must be positive, got 0"),
        (lambda: ClickFeature("a", rows=2, min_ids=3, max_ids=2), "feature 'a': need 0 <= min_ids"),
        (lambda: Clicks(features=[]), "distinct names and be at least one"),
        (lambda: Clicks(features=[ClickFeature("a", rows=2)] * 2), r"distinct names .* \['a', 'a'\]"),
        (lambda: Clicks(dense=0), "dense must be positive"),
        (lambda: next(SMALL.train(15, world_size=2)), "multiple of world_size 2, got 15"),
        (lambda: next(SMALL.train(0)), "batch_size must be a positive multiple"),
        (lambda: next(SMALL.evaluate(8, rank=2, world_size=2)), "got rank 2 of world_size 2"),
    ],
)
def test_settings_without_a_meaning_are_refused(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        make()


def batch() -> Batch:
    sparse = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 0, 1, 1]))
    return Batch(torch.tensor([[0.5], [1.5]]), sparse, torch.tensor([1.0, 0.0]))


def test_fields_come_in_torchrecs_order() -> None:
    assert list(vars(batch())) == ["dense_features", "sparse_features", "labels"]
    assert batch().batch_size == 2


def test_to_moves_every_part() -> None:
    moved = batch().to("meta", non_blocking=True)
    devices = {t.device.type for t in (moved.dense_features, moved.sparse_features.values(), moved.labels)}
    assert devices == {"meta"}
    same = batch().to(torch.device("cpu"))
    assert same.sparse_features.values().tolist() == [1, 2, 3]
    assert same.labels.tolist() == [1.0, 0.0]


@pytest.mark.gpu
def test_pinned_batches_move_on_a_side_stream() -> None:
    stream = torch.cuda.Stream()
    pinned = batch().pin_memory()
    assert pinned.labels.is_pinned() and pinned.sparse_features.values().is_pinned()
    with torch.cuda.stream(stream):
        moved = pinned.to("cuda", non_blocking=True)
    torch.cuda.current_stream().wait_stream(stream)
    moved.record_stream(torch.cuda.current_stream())
    assert moved.dense_features.tolist() == [[0.5], [1.5]]


@pytest.mark.parametrize(("dense", "labels"), [(3, 2), (2, 3)])
def test_parts_of_different_sizes_are_refused(dense: int, labels: int) -> None:
    with pytest.raises(ValueError, match=f"same number of samples, got {dense}, 2 and {labels}"):
        Batch(torch.zeros(dense, 1), batch().sparse_features, torch.zeros(labels))


def test_features_without_keys_fit_any_number_of_samples_but_not_a_wrong_one() -> None:
    dense, labels, ids = torch.zeros(2, 1), torch.zeros(2), torch.empty(0, dtype=torch.int64)
    features = KeyedJaggedTensor([], ids, lengths=ids)
    assert Batch(dense, features, labels).to("cpu").batch_size == 2
    with pytest.raises(ValueError, match="same number of samples, got 2, 0 and 3"):
        Batch(dense, features, torch.zeros(3))
    with pytest.raises(ValueError, match="same number of samples, got 2, 3 and 2"):
        Batch(dense, KeyedJaggedTensor([], ids, lengths=ids, stride=3), labels)


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
    dataset, again = (RandomRecDataset(["x"], 4, manual_seed=3, num_generated_batches=2) for _ in range(2))
    first = list(islice(dataset, 5))
    assert all(same(a, b) for a, b in zip(first, islice(again, 5), strict=True))
    assert first[0] is first[2] is first[4] and not same(first[0], first[1])
    # a second reading begins with the first batch
    assert next(iter(dataset)) is first[0]
    other = RandomRecDataset(["x"], 4, manual_seed=4)
    assert not same(next(iter(other)), first[0])


def test_batches_without_keys_have_dense_features_and_labels() -> None:
    (batch,) = RandomRecDataset([], 4, num_dense=3, num_batches=1)
    assert batch.dense_features.shape == (4, 3) and batch.labels.shape == (4,)
    assert batch.sparse_features.keys() == [] and batch.sparse_features.stride() == 4


def test_batches_can_be_made_anew_each_time() -> None:
    batches = list(RandomRecDataset(["x"], 4, manual_seed=3, num_generated_batches=-1, num_batches=3))
    assert len(batches) == 3 and not same(batches[0], batches[1]) and not same(batches[0], batches[2])


def test_without_an_end_there_is_no_length() -> None:
    assert len(RandomRecDataset(["x"], 1, num_batches=7)) == 7
    with pytest.raises(TypeError, match="num_batches"):
        len(RandomRecDataset(["x"], 1))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"hash_sizes": [5]}, "hash_sizes must have a number for each of 2 keys, got 1"),
        ({"hash_sizes": [5, 0]}, "feature 'y': hash size must be positive, got 0"),
        ({"ids_per_features": [1, 2], "min_ids_per_features": [1, 3]}, "feature 'y': need 0 <= 3 .* <= 2"),
        ({"num_generated_batches": 0}, "num_generated_batches must not be 0"),
        ({"num_dense": -1}, "num_dense must not be negative, got -1"),
    ],
)
def test_mistakes_are_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
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
    # the same_batch again, and in another process
    assert list(train) == taken and list(pickle.loads(pickle.dumps(validation))) == left


def test_shares_are_kept_and_seeds_differ() -> None:
    stream = range(2000)
    taken = [list(rand_split_train_val(stream, 0.8, seed)[0]) for seed in (0, 0, 1)]
    assert taken[0] == taken[1] != taken[2] and 0.75 < len(taken[0]) / 2000 < 0.85
    for share in (0.0, 1.0):
        with pytest.raises(ValueError, match=f"train_perc must be between 0 and 1, got {share}"):
            idx_split_train_val(stream, share)

"""Generated clicks: reproducible sample by sample, Zipf-distributed, learnable up to a known ceiling."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from shardwise.data import Batch, ClickFeature, Clicks
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
    found = dict(zip(batch.sparse_features.keys(), batch.sparse_features.length_per_key(), strict=True))
    assert source.ids_per_sample["words"] == 6.5 and source.ids_per_sample["history"] == 15
    for name, mean in source.ids_per_sample.items():
        assert found[name] / source.train_samples == pytest.approx(mean, rel=0.01)


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

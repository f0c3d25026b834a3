"""Generated clicks with a planted signal: the data of a demo that needs no download.

Sample i is a function of (seed, i) alone, by counter-based hashing, and so is every id's hidden weight: nothing is
stored, any rank can make any sample, and tables may have any number of rows. A sample's ids follow Zipf's law; its
label is a coin thrown with probability sigmoid(planted logit), where

    planted logit = bias + u . dense + sum over features of (mean of w_feature[id] over the ids of the bag)

with hidden normal weights u and w. No model can rank better than the planted logit: its AUC is the ceiling.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd

import numpy as np
import numpy.typing as npt
import torch

from .batch import Batch
from .ragged import Bags, Ints, keyed_jagged, spread
from .source import check_split, check_start, rank_slice

Floats = npt.NDArray[np.float64]
# evaluation samples lie so far out in the stream that no training reaches them
_EVALUATE_FROM = 1 << 48
_PROBE = 16_384
# streams of the hash; features use _FEATURE + 4 f .. _FEATURE + 4 f + 3
_DENSE, _DENSE_WEIGHT, _COIN, _FEATURE = 0, 1, 2, 16


@dataclass(frozen=True)
class ClickFeature:
    """One sparse feature: `rows` ids of Zipf exponent `skew`, bags of `min_ids` to `max_ids` ids, uniformly long.

    `strength` is the standard deviation of the hidden weights of its ids.

    Raises:
        ValueError: a number is out of its range; names it.
    """

    name: str
    rows: int
    skew: float = 1.05
    min_ids: int = 1
    max_ids: int = 1
    strength: float = 1.0

    def __post_init__(self) -> None:
        if self.rows <= 0 or self.skew <= 0.0:
            raise ValueError(f"feature {self.name!r}: rows and skew must be positive, got {self.rows} and {self.skew}")
        if not 0 <= self.min_ids <= self.max_ids or self.max_ids == 0:
            raise ValueError(
                f"feature {self.name!r}: need 0 <= min_ids <= max_ids and max_ids > 0, "
                f"got {self.min_ids} and {self.max_ids}"
            )


DEFAULT_FEATURES = (
    ClickFeature("user", rows=20_000, skew=0.8, strength=0.7),
    ClickFeature("ad", rows=5_000, skew=1.05, strength=0.7),
    ClickFeature("site", rows=500, skew=1.2, strength=0.5),
    ClickFeature("country", rows=50, skew=1.0, strength=0.3),
    ClickFeature("words", rows=10_000, skew=1.1, min_ids=1, max_ids=12),
    ClickFeature("history", rows=5_000, skew=1.05, min_ids=0, max_ids=30),
)


class Clicks:
    """Batches of generated clicks, the same for the same `seed`.

    Epoch e of training is samples [e * train_samples, (e + 1) * train_samples) of an endless stream, so no sample comes
    twice; evaluation has `evaluate_samples` of its own. `dense` is the number of dense columns, standard normal;
    `click_bias` the planted logit of an average sample.

    Raises:
        ValueError: names of features repeat, there are none, or a number is out of its range.
    """

    def __init__(
        self,
        seed: int = 0,
        *,
        features: Sequence[ClickFeature] = DEFAULT_FEATURES,
        dense: int = 8,
        train_samples: int = 131_072,
        evaluate_samples: int = 16_384,
        click_bias: float = -1.0,
    ) -> None:
        if len({feature.name for feature in features}) != len(features) or not features:
            raise ValueError(f"features must have distinct names and be at least one, got {[f.name for f in features]}")
        if dense <= 0 or train_samples < 0 or evaluate_samples < 0:
            raise ValueError(
                "dense must be positive, train_samples and evaluate_samples not negative, "
                f"got {dense}, {train_samples} and {evaluate_samples}"
            )
        self.seed = seed
        self.features = tuple(features)
        self.train_samples = train_samples
        self.evaluate_samples = evaluate_samples
        self._click_bias = click_bias
        columns = np.arange(dense, dtype=np.int64)
        # together the dense columns are worth one feature of strength 1
        self._dense_weights = self._normal(_DENSE_WEIGHT, columns) / np.sqrt(dense)
        self.dense_names = tuple(f"dense_{column}" for column in columns)
        self.feature_rows: Mapping[str, int] = {feature.name: feature.rows for feature in features}
        self.ids_per_sample: Mapping[str, float] = {
            feature.name: (feature.min_ids + feature.max_ids) / 2 for feature in features
        }
        self.skipped: Mapping[str, int] = {}
        # popular ids move the mean by their weights' luck; samples from before the stream's start measure by how much
        self._bias = 0.0
        self._bias = click_bias - float(self.planted_logits(-1 - np.arange(_PROBE)).mean())

    @property
    def identity(self) -> Mapping[str, str | int | float]:
        return {
            "source": "generated clicks",
            "order": "sequential",
            "seed": self.seed,
            "train_samples": self.train_samples,
            "dense_columns": len(self.dense_names),
            "click_bias": self._click_bias,
            "features": "; ".join(str(feature) for feature in self.features),
        }

    def train(
        self, batch_size: int, *, epoch: int = 0, start_step: int = 0, rank: int = 0, world_size: int = 1
    ) -> Iterator[Batch]:
        check_split(batch_size, rank, world_size)
        steps = self.train_samples // batch_size
        check_start(epoch, start_step, steps)
        part = rank_slice(batch_size, rank, world_size)
        for step in range(start_step, steps):
            start = epoch * self.train_samples + step * batch_size
            yield self.samples(np.arange(start + part.start, start + part.stop))

    def evaluate(self, batch_size: int, *, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        check_split(batch_size, rank, world_size)
        for start in range(0, self.evaluate_samples, batch_size):
            part = rank_slice(min(batch_size, self.evaluate_samples - start), rank, world_size)
            yield self.samples(_EVALUATE_FROM + np.arange(start + part.start, start + part.stop))

    def samples(self, index: Ints) -> Batch:
        """The samples with these numbers, in this order."""
        dense, bags = self._inputs(index)
        clicked = self._uniform(_COIN, index) < _sigmoid(self._planted(dense, bags))
        return Batch(
            torch.from_numpy(dense.astype(np.float32)),
            keyed_jagged(bags),
            torch.from_numpy(clicked.astype(np.float32)),
        )

    def planted_logits(self, index: Ints) -> Floats:
        """The logits that the labels of these samples were drawn from."""
        return self._planted(*self._inputs(index))

    def bayes_auc(self) -> float:
        """The expected AUC of the planted logits on the evaluation samples: what a perfect model would score."""
        probability = np.sort(_sigmoid(self.planted_logits(_EVALUATE_FROM + np.arange(self.evaluate_samples))))
        # pairs (i, j), i ranked below j: in order when j is clicked and i is not, out of order the other way round
        clicked_above = probability.sum() - np.cumsum(probability)  # [N] clicks expected above each
        unclicked_above = (1.0 - probability).sum() - np.cumsum(1.0 - probability)
        in_order = float(((1.0 - probability) * clicked_above).sum())
        out_of_order = float((probability * unclicked_above).sum())
        return in_order / (in_order + out_of_order) if in_order > 0.0 else float("nan")

    def _inputs(self, index: Ints) -> tuple[Floats, dict[str, Bags]]:
        columns = len(self.dense_names)
        dense = self._normal(_DENSE, index[:, None] * columns + np.arange(columns))  # [B, columns]
        return dense, {feature.name: self._bags(number, index) for number, feature in enumerate(self.features)}

    def _bags(self, number: int, index: Ints) -> Bags:
        feature, stream = self.features[number], _FEATURE + 4 * number
        choices = feature.max_ids - feature.min_ids + 1
        lengths = feature.min_ids + (self._uniform(stream, index) * choices).astype(np.int64)  # [B]
        counter = np.repeat(index * feature.max_ids, lengths) + spread(lengths)  # [N], a number of its own for each id
        popularity = _zipf(self._uniform(stream + 1, counter), feature.rows, feature.skew)  # [N]
        return _scatter(popularity, feature.rows), lengths

    def _planted(self, dense: Floats, bags: Mapping[str, Bags]) -> Floats:
        logits: Floats = self._bias + dense @ self._dense_weights  # [B]
        for number, feature in enumerate(self.features):
            ids, lengths = bags[feature.name]
            weights = self._normal(_FEATURE + 4 * number + 2, ids) * feature.strength  # [N]
            bag = np.repeat(np.arange(len(lengths)), lengths)  # [N]
            logits += np.bincount(bag, weights, minlength=len(lengths)) / np.maximum(lengths, 1)
        return logits

    def _hash(self, stream: int, counter: Ints) -> npt.NDArray[np.uint64]:
        """64 random bits for each counter: splitmix64's finalizer over a Weyl sequence, keyed by (seed, stream)."""
        key = _mix(_mix(np.array([self.seed & (2**64 - 1)], dtype=np.uint64)) + np.uint64(stream))
        return _mix(counter.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key)

    def _uniform(self, stream: int, counter: Ints) -> Floats:
        """In [0, 1), 53 bits."""
        return np.asarray((self._hash(stream, counter) >> np.uint64(11)) * 2.0**-53, dtype=np.float64)

    def _normal(self, stream: int, counter: Ints) -> Floats:
        """Standard normal, by Box and Muller, from the two halves of one hash."""
        bits = self._hash(stream, counter)
        high = ((bits >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
        low = (bits & np.uint64(0xFFFFFFFF)).astype(np.float64) * 2.0**-32
        return np.asarray(np.sqrt(-2.0 * np.log(high)) * np.cos(2.0 * np.pi * low))


def _mix(bits: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finalizer of splitmix64 (Steele, Lea and Flood, OOPSLA 2014); products wrap at 2^64."""
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _zipf(uniform: Floats, rows: int, skew: float) -> Ints:
    """Ranks 0 .. rows - 1, rank k with weight close to (k + 1) ** -skew: the inverse of the power law's integral."""
    place: Floats
    if abs(skew - 1.0) < 1e-6:
        place = np.exp(uniform * np.log(rows + 1.0))
    else:
        place = (1.0 + uniform * ((rows + 1.0) ** (1.0 - skew) - 1.0)) ** (1.0 / (1.0 - skew))
    return np.minimum(place.astype(np.int64), rows) - 1


def _scatter(ranks: Ints, rows: int) -> Ints:
    """A fixed permutation of the rows, so that popular ids are not neighbours and row shards share the load."""
    # near the golden ratio of rows, and coprime to it
    step = int(rows * 0.6180339887) | 1
    while gcd(step, rows) > 1:
        step += 2
    return np.asarray((ranks * step) % rows, dtype=np.int64)


def _sigmoid(logits: Floats) -> Floats:
    return np.asarray(1.0 / (1.0 + np.exp(-logits)))

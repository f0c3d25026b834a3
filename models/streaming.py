"""Metrics of click models that are added up sample by sample, in memory that does not grow: AUC, normalized entropy.

A metric's state is one tensor of integers [S] to which each sample adds some, so states of batches, processes and days
are added in any order and give the same bits. `shardwise.reduce_metrics` adds those of all ranks; what travels does not
depend on the number of samples.
Shapes: logits [N] or scores [N], labels [N] of 0 and 1, weights [N]. Nothing here waits for a GPU but `compute` and its
like: what is wrong with values is counted, and `compute` tells it, on all ranks alike once they are reduced.
"""

from __future__ import annotations

import math
from copy import deepcopy
from fractions import Fraction
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

M = TypeVar("M", bound="StreamingMetric")

# what is counted before the sums: samples that count, undefined scores, labels besides 0 and 1, weights out of range
_COUNTS = 4
# the largest weight of a sample
MAX_WEIGHT = 2.0**20
# octaves of scores that have bins of their own: magnitudes of [2**-32, 2**32)
_LOWEST, _OCTAVES = -32, 64
# exponents of float64, from the smallest subnormal number on, and how a mantissa of 53 bits is halved
_MIN_EXPONENT, _EXPONENTS, _LOW_BITS = -1073, 2098, 27
# logits beyond it count as infinite: times the largest weight their loss still is a float64
_MAX_LOGIT = 2.0**1000
_RAN_OVER = "a sum of weights left int64: reset the metric earlier, or take smaller weights"


class StreamingMetric(nn.Module):
    """A metric whose state is the buffer `state`, int64 [S], a sum over samples; a state dict saves and resumes it."""

    state: Tensor
    # of more samples a sum that left int64 could look like one that did not
    _most_samples = 2**63 - 1

    def __init__(self, size: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.register_buffer("state", torch.zeros(_COUNTS + size, dtype=torch.int64, device=device))

    def update(self, scores: Tensor, labels: Tensor, weights: Tensor | None = None, /) -> None:
        """Add a batch."""
        raise NotImplementedError

    def compute(self) -> float:
        """The value over all samples so far."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget all samples."""
        self.state.zero_()

    def merge(self: M, other: M) -> M:
        """Add the samples of another metric of the same settings, and return this one.

        Raises:
            ValueError: the other one is of another class or has other settings.
        """
        if type(self) is not type(other) or self.extra_repr() != other.extra_repr():
            raise ValueError(f"{self} cannot take the samples of {other}: their states mean different things")
        self.state += other.state.to(self.state.device)
        return self

    @property
    def samples(self) -> int:
        """How many samples count. A host sync on CUDA."""
        return int(self.state[0])

    def get_extra_state(self) -> str:
        return self.extra_repr()

    def set_extra_state(self, state: str) -> None:
        """What a state dict says of the settings.

        Raises:
            ValueError: they are other ones: its sums mean something else.
        """
        if state != self.extra_repr():
            raise ValueError(f"a state of ({state}) means other things in {self}")

    def _accepted(
        self, scores: Tensor, labels: Tensor, weights: Tensor | None, undefined: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Which samples count [N], which are positive [N], and weights [N] in float64; the rest is counted as wrong."""
        positive = labels == 1
        wrong_label = ~(positive | (labels == 0))
        if weights is None:
            weight, wrong_weight = torch.ones_like(scores, dtype=torch.float64), torch.zeros_like(positive)
        else:
            weight = weights.detach().double()
            # a nan is in no range
            wrong_weight = ~((weight >= 0) & (weight <= MAX_WEIGHT))
        valid = ~(undefined | wrong_label | wrong_weight)
        self.state[:_COUNTS] += torch.stack([valid, undefined, wrong_label, wrong_weight]).sum(1)
        return valid, positive, torch.where(valid, weight, 0.0)

    def _check(self, scores: Tensor, labels: Tensor, weights: Tensor | None) -> Tensor:
        """The scores, without their gradient."""
        parts = {"scores": scores, "labels": labels} | ({} if weights is None else {"weights": weights})
        if scores.dim() != 1 or any(part.shape != scores.shape for part in parts.values()):
            shapes = ", ".join(f"{name} {list(part.shape)}" for name, part in parts.items())
            raise ValueError(f"all must be [N], got {shapes}")
        for name, part in parts.items():
            if part.device != self.state.device:
                raise ValueError(
                    f"{name} are on {part.device}, the metric is on {self.state.device}: move one with .to"
                )
        return scores.detach()

    def _sums(self) -> tuple[Tensor, bool]:
        """The sums on the CPU, and whether a value is defined; a host sync, as the value is wanted.

        Raises:
            ValueError: labels or weights were wrong.
            OverflowError: a sum left int64, or may have, of so many samples.
        """
        state = self.state.cpu()
        valid, undefined, labels, weights = state[:_COUNTS].tolist()
        if labels:
            raise ValueError(f"{labels} labels are neither 0 nor 1, beside {valid} samples that are well")
        if weights:
            raise ValueError(f"{weights} weights are not in [0, 2**20], beside {valid} samples that are well")
        if bool((state < 0).any()):
            raise OverflowError(_RAN_OVER)
        if valid > self._most_samples:
            raise OverflowError(f"{valid} samples are more than the sums hold, {self._most_samples}: reset it earlier")
        return state[_COUNTS:], valid > 0 and not undefined


class StreamingAUC(StreamingMetric):
    """Area under the ROC curve: the chance that a positive scores above a negative, ties counting half.

    Scores are counted in bins, positives p_b and negatives n_b of each bin b from the lowest on; with P and N of all

        AUC = sum_b p_b (n_0 + ... + n_(b-1) + n_b / 2) / (P N)

    (Mann and Whitney, 1947), where pairs of one bin count half, so it is off by at most `error_bound` =
    sum_b p_b n_b / (2 P N). A bin is a float32 to `mantissa_bits` bits behind the leading one, so each octave has
    2**mantissa_bits bins and no range of scores is assumed: logits and probabilities do alike. Magnitudes below
    2**-32, and from 2**32 on, share bins. With 10 bits fp16 and bf16 scores of that range have bins of their own:
    theirs is the exact value.

    The state is 16 * (128 * 2**mantissa_bits + 1) + 40 bytes: 2.1 MB with 10 bits, 0.26 MB with 7.

    Args:
        mantissa_bits: 0 to 16.
        weight_unit: weights are rounded to multiples of this power of two. A bin holds 2**63 of them, and the metric
            2**53 samples times the root of the unit, 2**43 with that of the default: OverflowError tells of more.

    Raises:
        ValueError: a setting is out of range.

    Example:
        >>> metric = StreamingAUC()
        >>> for logits, labels in [([0.5, 2.0], [0, 1]), ([-1.0, 1.0], [1, 0])]:
        ...     metric.update(torch.tensor(logits), torch.tensor(labels))
        >>> metric.compute(), metric.error_bound()
        (0.5, 0.0)
    """

    def __init__(
        self,
        mantissa_bits: int = 10,
        *,
        weight_unit: float = 2.0**-20,
        device: torch.device | str | None = None,
    ) -> None:
        if mantissa_bits not in range(17):
            raise ValueError(f"mantissa_bits must be 0 to 16, got {mantissa_bits}")
        if not (2.0**-40 <= weight_unit <= 1.0 and math.frexp(weight_unit)[0] == 0.5):
            raise ValueError(f"weight_unit must be a power of two of 2**-40 to 1, got {weight_unit}")
        # of one spelling, as they are compared by it
        self.mantissa_bits, self.weight_unit = int(mantissa_bits), float(weight_unit)
        self.bins = 2 * (_OCTAVES << self.mantissa_bits) + 1
        # the largest weight has twice as many bits
        self._coarse_bits = math.ceil(math.log2(MAX_WEIGHT / weight_unit) / 2)
        self._most_samples = 1 << (63 - self._coarse_bits)
        # the bins, and the sum of all weights without their last bits, by which a bin that ran over is seen
        super().__init__(2 * self.bins + 1, device)

    def extra_repr(self) -> str:
        return f"mantissa_bits={self.mantissa_bits}, weight_unit={self.weight_unit}"

    def update(self, scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Add a batch; scores may be logits or probabilities of any real dtype, infinite ones are the outermost.

        Raises:
            ValueError: shapes or devices differ.
        """
        scores = self._check(scores, labels, weights).float()
        valid, positive, weight = self._accepted(scores, labels, weights, scores.isnan())
        index = 2 * self._bin_of(torch.where(valid, scores, 0.0)) + positive
        units = (weight / self.weight_unit).round().long()
        self.state[_COUNTS:].index_add_(0, index, units)
        self.state[-1] += (units >> self._coarse_bits).sum()

    def _bin_of(self, scores: Tensor) -> Tensor:
        """The bin of each score [N]: bits of a float32 are in the order of its magnitude."""
        magnitude = (scores.view(torch.int32) & 0x7FFFFFFF).long() >> (23 - self.mantissa_bits)
        # 0 is what lies below the lowest octave
        octaves = _OCTAVES << self.mantissa_bits
        number = (magnitude - ((127 + _LOWEST) << self.mantissa_bits) + 1).clamp(0, octaves)
        return torch.where(scores < 0, octaves - number, octaves + number)

    def compute(self) -> float:
        """The AUC; nan without samples, with labels of one kind only, or with a nan among the scores.

        Raises:
            ValueError: labels besides 0 and 1, or weights out of [0, 2**20], were among the samples.
        """
        pairs, _, all_pairs = self._pairs()
        return pairs / all_pairs if all_pairs else math.nan

    def error_bound(self) -> float:
        """How far `compute` may be from the AUC of the scores themselves, at most, besides the rounding of weights."""
        _, within, all_pairs = self._pairs()
        return within / all_pairs if all_pairs else math.nan

    def _pairs(self) -> tuple[int, int, int]:
        """Twice the pairs in order, pairs within bins, and twice all pairs, in squared units of weight."""
        sums, defined = self._sums()
        if not defined:
            return 0, 0, 0
        counts, coarse = sums[:-1].view(self.bins, 2), int(sums[-1])
        # a sum that left int64 is off by 2**64 times something, and so is the sum of all
        total = sum(counts[counts.any(1)].flatten().tolist())
        if not coarse << self._coarse_bits <= total <= (coarse + self.samples) << self._coarse_bits:
            raise OverflowError(_RAN_OVER)
        pairs = within = below = positives = 0
        # integers of any size: products of two sums leave int64
        for negative, positive in counts[counts.any(1)].tolist():
            pairs += positive * (2 * below + negative)
            within += positive * negative
            below, positives = below + negative, positives + positive
        return pairs, within, 2 * positives * below


class StreamingNE(StreamingMetric):
    """Normalized entropy, log loss and calibration, from sums that no rounding touches.

    With weights w_i, labels y_i, probabilities p_i = sigmoid(logit_i) and the mean label m = sum w_i y_i / sum w_i

        log loss = -sum_i w_i (y_i log p_i + (1 - y_i) log(1 - p_i)) / sum_i w_i
        NE = log loss / -(m log m + (1 - m) log(1 - m))
        calibration = sum_i w_i p_i / sum_i w_i y_i

    NE is equation 1 of He et al., "Practical Lessons from Predicting Clicks on Ads at Facebook", ADKDD 2014: 1 is what
    predicting m scores, lower is better. Each term is a float64, and terms are added exactly: by exponent, the halves
    of their mantissas as integers, up to 2**36 samples. So a value is that of `math.fsum` over all samples, in
    whatever order and on however many ranks they come.

    The state is 134,304 bytes.
    """

    _most_samples = 2**36
    # rows of the sums
    _LOSS, _PREDICTED, _POSITIVE, _NEGATIVE = range(4)

    def __init__(self, *, device: torch.device | str | None = None) -> None:
        super().__init__(4 * _EXPONENTS * 2, device)

    def update(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Add a batch: logits, labels of 0 and 1, and weights of one shape, [N] say.

        Raises:
            ValueError: shapes or devices differ.
        """
        logits = self._check(logits, labels, weights).double()
        # what is infinite has no loss: 0 times infinity is among its terms; a nan is in no range
        valid, positive, weight = self._accepted(logits, labels, weights, ~(logits.abs() <= _MAX_LOGIT))
        x = torch.where(valid, logits, 0.0)
        y = positive.double()
        # not torch's sigmoid, whose last bit depends on where in the batch a sample stands
        small = torch.exp(-x.abs())
        loss = x.clamp(min=0.0) - x * y + torch.log1p(small)
        predicted = torch.where(x < 0, small, 1.0) / (1.0 + small)
        self._add(torch.stack([weight * loss, weight * predicted, weight * y, weight * (1.0 - y)]))

    def _add(self, terms: Tensor) -> None:
        """Add terms [4, N] of at least 0, by their exponents."""
        mantissa, exponent = torch.frexp(terms)
        whole = (mantissa * 2.0**53).long()
        row = torch.arange(4, device=terms.device)[:, None]
        index = 2 * (row * _EXPONENTS + exponent - _MIN_EXPONENT).flatten()
        sums = self.state[_COUNTS:]
        sums.index_add_(0, index, (whole >> _LOW_BITS).flatten())
        sums.index_add_(0, index + 1, (whole & ((1 << _LOW_BITS) - 1)).flatten())

    def _totals(self) -> list[Fraction]:
        """The four sums, exactly; none where the metric has no value."""
        sums, defined = self._sums()
        if not defined:
            return []
        totals = []
        for row in sums.view(4, _EXPONENTS, 2).tolist():
            units = sum(((high << _LOW_BITS) + low) << place for place, (high, low) in enumerate(row) if high or low)
            totals.append(Fraction(units, 1 << (53 - _MIN_EXPONENT)))
        return totals

    def compute(self) -> float:
        """NE; nan without samples, with labels of one kind only, or with a logit that is nan or beyond 2**1000.

        Raises:
            ValueError: labels besides 0 and 1, or weights out of [0, 2**20], were among the samples.
        """
        totals = self._totals()
        if not totals or not totals[self._POSITIVE] or not totals[self._NEGATIVE]:
            return math.nan
        positive, negative = totals[self._POSITIVE], totals[self._NEGATIVE]
        # of the rarer kind, as 1 - m of a rate near 1 is lost in rounding
        mean = float(min(positive, negative) / (positive + negative))
        return self.log_loss() / -(mean * math.log(mean) + (1.0 - mean) * math.log1p(-mean)) if mean else math.nan

    def log_loss(self) -> float:
        """Mean cross-entropy in nats; nan where nothing counts."""
        totals = self._totals()
        weight = totals[self._POSITIVE] + totals[self._NEGATIVE] if totals else 0
        return float(totals[self._LOSS] / weight) if weight else math.nan

    def calibration(self) -> float:
        """Clicks that are predicted over clicks that there are; nan where there are none."""
        totals = self._totals()
        if not totals or not totals[self._POSITIVE]:
            return math.nan
        try:
            return float(totals[self._PREDICTED] / totals[self._POSITIVE])
        except OverflowError:
            # beyond float64: the clicks that there are weigh next to nothing
            return math.inf


class MetricWindow(nn.Module, Generic[M]):
    """A metric over the last samples alone, in `pieces` states: the oldest is forgotten when a newer one begins.

    Args:
        metric: its settings are taken, its samples are not.
        samples: of this process. A window has at most as many; when a new piece begins, a piece fewer.
        pieces: states that are kept. A batch is part of one of them, so none is larger than samples / pieces.

    Raises:
        ValueError: a piece would have no sample.

    Example:
        >>> window = MetricWindow(StreamingAUC(), samples=4, pieces=2)
        >>> for labels in ([1, 0], [0, 1], [0, 1]):
        ...     window.update(torch.tensor([0.0, 1.0]), torch.tensor(labels))
        >>> window.latest().compute()  # the first two samples are out
        1.0
    """

    def __init__(self, metric: M, *, samples: int, pieces: int = 8) -> None:
        super().__init__()
        if pieces < 2 or samples < pieces:
            raise ValueError(f"a window needs 2 pieces and a sample in each, got {pieces} pieces of {samples} samples")
        self.piece_samples = samples // pieces
        self.pieces = nn.ModuleList(deepcopy(metric) for _ in range(pieces))
        # of the newest piece
        self._newest, self._in_newest = 0, 0
        for piece in self._metrics():
            piece.reset()

    def _metrics(self) -> list[M]:
        return list(self.pieces)  # type: ignore[arg-type]

    def update(self, scores: Tensor, labels: Tensor, weights: Tensor | None = None) -> None:
        """Add a batch, and forget a piece if the newest is full.

        Raises:
            ValueError: the batch is larger than a piece, or as the metric's.
        """
        if scores.numel() > self.piece_samples:
            raise ValueError(
                f"a batch of {scores.numel()} samples is larger than a piece of {self.piece_samples}: fewer pieces, or"
                " a window of more samples"
            )
        # a batch that is refused costs no piece
        self._metrics()[self._newest]._check(scores, labels, weights)
        if self._in_newest and self._in_newest + scores.numel() > self.piece_samples:
            self._newest = (self._newest + 1) % len(self.pieces)
            self._in_newest = 0
            self._metrics()[self._newest].reset()
        self._metrics()[self._newest].update(scores, labels, weights)
        self._in_newest += scores.numel()

    def latest(self) -> M:
        """A metric of the samples in the window."""
        first, *others = self._metrics()
        whole = deepcopy(first)
        for other in others:
            whole.merge(other)
        return whole

    def get_extra_state(self) -> Any:
        return {"window": self._settings(), "newest": self._newest, "in_newest": self._in_newest}

    def set_extra_state(self, state: Any) -> None:
        """What a state dict says of the window.

        Raises:
            ValueError: it is of another size.
        """
        if state["window"] != self._settings():
            raise ValueError(f"a state of a window of {state['window']} does not fit one of {self._settings()}")
        self._newest, self._in_newest = state["newest"], state["in_newest"]

    def _settings(self) -> str:
        return f"{len(self.pieces)} pieces of {self.piece_samples} samples"

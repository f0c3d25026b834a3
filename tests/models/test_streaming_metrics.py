"""Streaming AUC and NE against the exact ones, torchmetrics and math.fsum: same bits in any order."""

from __future__ import annotations

import io
import itertools
import math
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

from shardwise.models import MetricWindow, StreamingAUC, StreamingNE, auc, log_loss, normalized_entropy


def samples(n: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels that go with them, and weights of which some are 0."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, generator=generator) - 1
    labels = (torch.rand(n, generator=generator) < logits.sigmoid()).float()
    return logits, labels, torch.randint(0, 5, (n,), generator=generator) / 4


def weighted_auc(scores: Tensor, labels: Tensor, weights: Tensor) -> float:
    """Over all pairs."""
    hit, miss = labels == 1, labels == 0
    pairs = weights[hit].double()[:, None] * weights[miss].double()
    apart = scores[hit].double()[:, None] - scores[miss].double()
    return float((pairs * ((apart > 0).double() + 0.5 * (apart == 0))).sum() / pairs.sum())


FLOATS = st.one_of(
    st.floats(width=32, allow_nan=False),
    st.floats(-8, 8, width=16),
    st.sampled_from([0.0, -0.0, math.inf, -math.inf, 1e-45, -1e-45, 2.0**-33, 2.0**-32, 2.0**32, 3.4e38, 1e300]),
)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(FLOATS, st.integers(0, 1), st.integers(0, 3)), min_size=1, max_size=40),
    st.sampled_from([0, 3, 10]),
)
def test_auc_of_any_scores_is_within_its_bound(rows: list[tuple[float, int, int]], bits: int) -> None:
    scores, labels, weights = torch.tensor(rows, dtype=torch.float64).unbind(1)
    metric = StreamingAUC(bits)
    metric.update(scores, labels, weights)
    exact = weighted_auc(scores, labels, weights)
    assert math.isnan(exact) == math.isnan(metric.compute()) == math.isnan(metric.error_bound())
    if not math.isnan(exact):
        assert abs(metric.compute() - exact) <= metric.error_bound() + 1e-12


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(FLOATS, FLOATS)), st.integers(0, 12))
def test_bins_are_in_the_order_of_scores(pairs: list[tuple[float, float]], bits: int) -> None:
    metric = StreamingAUC(bits)
    low, high = torch.tensor(pairs).reshape(-1, 2).float().sort(1).values.unbind(1)
    assert bool((metric._bin_of(low) <= metric._bin_of(high)).all())
    assert bool(((metric._bin_of(low) >= 0) & (metric._bin_of(high) < metric.bins)).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_auc_of_half_precision_scores_is_exact(dtype: torch.dtype) -> None:
    # every number of it in the range that has bins
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    scores = every[(every.abs() >= 2.0**-32) & (every.abs() < 2.0**32)]
    bins = StreamingAUC()._bin_of(scores.float())
    assert torch.unique(bins).numel() == torch.unique(scores).numel() > 16_000
    labels = (torch.rand(scores.numel()) < scores.float().sigmoid()).float()
    metric = StreamingAUC()
    metric.update(scores, labels)
    assert metric.compute() == pytest.approx(auc(scores, labels), rel=1e-14)


@pytest.mark.parametrize("as_probability", [False, True])
def test_auc_agrees_with_torchmetrics(as_probability: bool) -> None:
    logits, labels, _ = samples(20_000)
    scores = logits.sigmoid() if as_probability else logits
    metric = StreamingAUC()
    metric.update(scores, labels)
    assert metric.error_bound() < 2e-4
    assert abs(metric.compute() - float(binary_auroc(scores, labels.long()))) < 5e-6


def test_ne_is_what_fsum_gives_over_all_samples() -> None:
    logits, labels, weights = samples(3_000)
    metric = StreamingNE()
    for part in zip(*(tensor.split(700) for tensor in (logits, labels, weights)), strict=True):
        metric.update(*part)
    rows = list(zip(logits.double().tolist(), labels.tolist(), weights.tolist(), strict=True))
    loss = math.fsum(w * (max(x, 0.0) - x * y + math.log1p(math.exp(-abs(x)))) for x, y, w in rows)
    total, clicks = math.fsum(w for *_, w in rows), math.fsum(w * y for _, y, w in rows)
    predicted = math.fsum(w / (1.0 + math.exp(-x)) for x, _, w in rows)
    assert metric.log_loss() == pytest.approx(loss / total, rel=1e-15)
    assert metric.calibration() == pytest.approx(predicted / clicks, rel=1e-15)
    mean = clicks / total
    assert metric.compute() == pytest.approx(
        loss / total / -(mean * math.log(mean) + (1 - mean) * math.log(1 - mean)), rel=1e-15
    )
    assert metric.samples == 3_000


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(0, 2.0**40), min_size=1, max_size=50))
def test_sums_of_ne_are_exact(values: list[float]) -> None:
    metric = StreamingNE()
    metric.state[0] = len(values)
    metric._add(torch.tensor([values] * 4, dtype=torch.float64))
    assert [float(total) for total in metric._totals()] == [math.fsum(values)] * 4


@settings(deadline=None, max_examples=25)
@given(st.randoms(use_true_random=False), st.integers(1, 6), st.booleans())
def test_no_order_and_no_cut_changes_a_bit(random, parts: int, weigh: bool) -> None:  # type: ignore[no-untyped-def]
    logits, labels, weights = samples(257, random.randrange(1000))
    given_weights = weights if weigh else None
    order = torch.tensor(random.sample(range(257), 257))
    cuts = sorted(random.choices(range(258), k=parts))
    kinds: list[Callable[[], Any]] = [StreamingAUC, StreamingNE]
    for kind in kinds:
        whole, total = kind(), kind()
        whole.update(logits, labels, given_weights)
        for first, last in itertools.pairwise([0, *cuts, 257]):
            # every other one of a wider tensor, as strides change what torch's loops do
            rows = order[first:last]
            wide = torch.stack([logits[rows], labels[rows], weights[rows]], 1)
            part = kind()
            part.update(wide[:, 0], wide[:, 1], wide[:, 2] if weigh else None)
            total.merge(part)
        assert torch.equal(total.state, whole.state)


def test_values_are_those_of_the_exact_functions() -> None:
    logits, labels, _ = samples(5_000)
    ranked, entropy = StreamingAUC(), StreamingNE()
    ranked.update(logits, labels)
    entropy.update(logits, labels)
    assert ranked.compute() == pytest.approx(auc(logits, labels), abs=5e-6)
    assert entropy.compute() == pytest.approx(normalized_entropy(logits, labels), rel=1e-13)
    assert entropy.log_loss() == pytest.approx(log_loss(logits, labels), rel=1e-13)


def windowed() -> MetricWindow[StreamingAUC]:
    return MetricWindow(StreamingAUC(7), samples=240, pieces=4)


@pytest.mark.parametrize("make", [StreamingAUC, StreamingNE, windowed])
def test_a_state_dict_resumes_and_reset_forgets(make: Callable[[], Any]) -> None:
    whole, other = make(), make()
    parts = list(zip(*(tensor.split(50) for tensor in samples(400)), strict=True))
    for part in parts[:3]:
        whole.update(*part)
    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    other.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    for part, metric in itertools.product(parts[3:], (whole, other)):
        metric.update(*part)
    values = [metric.latest() if make is windowed else metric for metric in (whole, other)]
    assert torch.equal(values[0].state, values[1].state) and values[0].compute() == values[1].compute()
    values[0].reset()
    assert math.isnan(values[0].compute()) and values[0].samples == 0


def test_a_window_has_the_last_samples_alone() -> None:
    logits, labels, _ = samples(1_000)
    window = MetricWindow(StreamingNE(), samples=300, pieces=3)
    for start in range(0, 1_000, 50):
        window.update(logits[start : start + 50], labels[start : start + 50])
        last = window.latest().samples
        assert last == start + 50 if start < 300 else 200 < last <= 300
        wanted = StreamingNE()
        wanted.update(logits[start + 50 - last : start + 50], labels[start + 50 - last : start + 50])
        assert torch.equal(window.latest().state, wanted.state)


def test_memory_does_not_grow_with_samples() -> None:
    logits, labels, _ = samples(100_000)
    for metric, expected in ((StreamingAUC(), 2_097_208), (StreamingAUC(7), 262_200), (StreamingNE(), 134_304)):
        storage = metric.state.untyped_storage().data_ptr()
        for part in zip(logits.split(10_000), labels.split(10_000), strict=True):
            metric.update(*part)
        assert sum(buffer.nbytes for buffer in metric.buffers()) == expected
        assert metric.state.untyped_storage().data_ptr() == storage


Kind = type[StreamingAUC] | type[StreamingNE]
METRICS = pytest.mark.parametrize("kind", [StreamingAUC, StreamingNE])


@METRICS
@pytest.mark.parametrize("labels", [[1.0, 1.0], [0.0, 0.0], []])
def test_labels_of_one_kind_have_no_value(kind: Kind, labels: list[float]) -> None:
    metric = kind()
    metric.update(torch.zeros(len(labels)), torch.tensor(labels))
    assert math.isnan(metric.compute()) and math.isnan(kind().compute())


@METRICS
def test_weights_of_zero_have_no_value(kind: Kind) -> None:
    metric = kind()
    metric.update(torch.zeros(2), torch.tensor([0, 1]), torch.zeros(2))
    assert math.isnan(metric.compute())


@METRICS
def test_a_nan_among_the_scores_gives_nan(kind: Kind) -> None:
    metric = kind()
    metric.update(torch.tensor([0.0, math.nan, 1.0]), torch.tensor([0, 1, 1]))
    metric.update(torch.tensor([0.0, 1.0]), torch.tensor([False, True]))
    assert math.isnan(metric.compute()) and metric.samples == 4


@METRICS
@pytest.mark.parametrize(
    ("labels", "weights", "error"),
    [
        ([0.0, 0.5, math.nan], None, "2 labels are neither 0 nor 1, beside 1 samples that are well"),
        ([0.0, 1.0, 1.0], [1.0, -1.0, math.nan], r"2 weights are not in \[0, 2\*\*20\], beside 1 samples"),
        ([0.0, 1.0, 1.0], [1.0, 2.0**20, 2.0**21], "1 weights are not in"),
    ],
)
def test_wrong_values_are_told_by_compute(
    kind: Kind, labels: list[float], weights: list[float] | None, error: str
) -> None:
    metric = kind()
    metric.update(torch.zeros(3), torch.tensor(labels), None if weights is None else torch.tensor(weights))
    with pytest.raises(ValueError, match=error):
        metric.compute()


@METRICS
@pytest.mark.parametrize("shapes", [([2], [3]), ([2, 1], [2, 1]), ([2], [2], [1])])
def test_shapes_that_differ_are_refused(kind: Kind, shapes: tuple[list[int], ...]) -> None:
    with pytest.raises(ValueError, match=r"all must be \[N\], got scores \[2"):
        kind().update(*map(torch.zeros, shapes))


def test_settings_out_of_range_and_metrics_that_differ_are_refused() -> None:
    with pytest.raises(ValueError, match="mantissa_bits must be 0 to 16, got 17"):
        StreamingAUC(17)
    with pytest.raises(ValueError, match="weight_unit must be a power of two of 2\\*\\*-40 to 1, got 0.3"):
        StreamingAUC(weight_unit=0.3)
    with pytest.raises(ValueError, match="mantissa_bits=10.*cannot take the samples of .*mantissa_bits=7"):
        StreamingAUC().merge(StreamingAUC(7))
    with pytest.raises(ValueError, match="cannot take the samples of StreamingNE"):
        StreamingAUC().merge(StreamingNE())  # type: ignore[type-var]
    with pytest.raises(ValueError, match="got 4 pieces of 3 samples"):
        MetricWindow(StreamingNE(), samples=3, pieces=4)
    with pytest.raises(ValueError, match="a batch of 5 samples is larger than a piece of 4: fewer pieces"):
        MetricWindow(StreamingNE(), samples=16, pieces=4).update(torch.zeros(5), torch.zeros(5))
    with pytest.raises(ValueError, match="scores are on meta, the metric is on cpu"):
        StreamingNE().update(torch.zeros(1, device="meta"), torch.zeros(1))


def test_a_sum_that_left_int64_is_told() -> None:
    metric = StreamingAUC(0, weight_unit=2.0**-40)
    for _ in range(8):
        metric.update(torch.zeros(2), torch.tensor([0, 1]), torch.full((2,), 2.0**20))
    with pytest.raises(OverflowError, match="left int64: reset the metric earlier"):
        metric.compute()


def test_a_sum_that_went_once_around_is_told() -> None:
    """16 weights of 2**20 in units of 2**-40 are 2**64, which is 0 in a bin."""
    metric = StreamingAUC(weight_unit=2.0**-40)
    metric.update(torch.zeros(16), torch.ones(16), torch.full((16,), 2.0**20))
    metric.update(torch.zeros(1), torch.zeros(1))
    with pytest.raises(OverflowError, match="left int64"):
        metric.compute()


@pytest.mark.parametrize("rare", [0, 1])
def test_ne_of_a_rate_that_rounds_to_an_end_is_the_exact_one(rare: int) -> None:
    """log(1 - m) was asked of a mean label m of 1."""
    metric = StreamingNE()
    metric.update(torch.zeros(2), torch.tensor([1.0 - rare, rare]), torch.tensor([1.0, 1e-17], dtype=torch.float64))
    entropy = 1e-17 * (1.0 - math.log(1e-17))
    assert metric.compute() == pytest.approx(math.log(2.0) / entropy, rel=1e-9)


def test_a_batch_that_is_refused_costs_a_window_no_piece() -> None:
    window = MetricWindow(StreamingAUC(), samples=4, pieces=2)
    for _ in range(2):
        window.update(torch.tensor([0.0, 1.0]), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"all must be \[N\]"):
        window.update(torch.zeros(2), torch.zeros(3))
    assert window.latest().samples == 4


def test_a_state_of_other_units_is_refused() -> None:
    state = StreamingAUC(weight_unit=2.0**-10).state_dict()
    with pytest.raises(ValueError, match=r"weight_unit=0.0009765625\) means other things in StreamingAUC"):
        StreamingAUC().load_state_dict(state)


def test_a_loss_that_leaves_float64_is_that_of_an_infinite_logit() -> None:
    """A finite logit of 1e308 times a weight is infinite: `compute` spoke of a sum of weights that left int64."""
    metric = StreamingNE()
    logits = torch.tensor([1e308, -1e308, 1e300, 0.0], dtype=torch.float64)
    metric.update(logits, torch.tensor([0, 1, 0, 1]), torch.full((4,), 2.0**20))
    assert math.isnan(metric.compute()) and metric.samples == 2
    metric.reset()
    metric.update(logits[2:], torch.tensor([0, 1]), torch.full((2,), 2.0**20))
    assert metric.log_loss() == pytest.approx(5e299)


def test_calibration_beyond_float64_is_infinite() -> None:
    """A click that weighs next to nothing: OverflowError of a division of integers."""
    metric = StreamingNE()
    metric.update(torch.zeros(2), torch.tensor([1, 0]), torch.tensor([1e-320, 1.0], dtype=torch.float64))
    assert metric.calibration() == math.inf and metric.log_loss() == pytest.approx(math.log(2.0))


@METRICS
def test_so_many_samples_that_a_sum_could_go_around_unseen_are_told(kind: Kind) -> None:
    """2**44 samples without weights made each bin 2**64, which is 0: AUC was nan, in other numbers any value."""
    metric: Any = kind()
    metric.update(torch.tensor([0.0, 1.0]), torch.tensor([1, 0]))
    exact = metric.compute()
    limit = {StreamingAUC: 43, StreamingNE: 36}[kind]
    for doubled in range(1, 61):
        metric.merge(deepcopy(metric))
        if doubled < limit:
            assert metric.compute() == exact and metric.samples == 2 ** (doubled + 1)
        else:
            with pytest.raises(OverflowError, match="reset"):
                metric.compute()


def test_a_setting_has_one_spelling() -> None:
    """A unit of 1 and one of 1.0 had states that mean other things."""
    metric = StreamingAUC(3, weight_unit=1)
    metric.merge(StreamingAUC(3, weight_unit=1.0)).load_state_dict(StreamingAUC(3, weight_unit=1.0).state_dict())
    with pytest.raises(ValueError, match="mantissa_bits must be 0 to 16, got 2.5"):
        StreamingAUC(2.5)  # type: ignore[arg-type]


def test_a_state_of_a_window_of_another_size_is_refused() -> None:
    """A window of 8 samples took the state of one of 240, and gave 240 as the last 8."""
    window = windowed()
    window.update(torch.zeros(60), torch.zeros(60))
    other = MetricWindow(StreamingAUC(7), samples=8, pieces=4)
    with pytest.raises(ValueError, match="of 4 pieces of 60 samples does not fit one of 4 pieces of 2 samples"):
        other.load_state_dict(window.state_dict())

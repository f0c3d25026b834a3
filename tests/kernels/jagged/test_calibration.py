"""Histogram binning calibrates as a loop in Python does, on every path."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from bucket_inputs import CPU_PATHS, running_on
from hypothesis import given, settings, strategies as st
from kernel_inputs import UPDATES, assert_compiled_equals_eager
from torch import Tensor

from shardwise.kernels import (
    generic_histogram_binning_calibration_by_feature,
    histogram_binning_calibration,
    histogram_binning_calibration_by_feature,
)
from shardwise.kernels.cpu import buckets as cpu_buckets

LOOPS = cpu_buckets, "loops"
BINS, SEGMENTS = 16, 3
# bins whose borders no logit of the tests comes near
LOGITS = [-30.0, -3.1, -0.7, 0.05, 0.9, 2.3, 30.0]
PER_LOGIT, VALUES = [1, 0, 2, 1, 1, 1, 1], [2, 0, 1, -4, 3, 1, 0]
OPTIONS: dict[str, Any] = {"positive_weight": 0.4, "bin_ctr_in_use_after": 3, "bin_ctr_weight_value": 0.75}
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12, torch.float16: 1e-3, torch.bfloat16: 8e-3}


def model(logits: list[float], examples: list[float], positives: list[float], segments: list[int], borders: list[float] | None, lower: float, upper: float) -> tuple[list[float], list[int]]:  # fmt: skip  # noqa: E501
    """Predictions and bins; `segments` are 0 for logits without a known value, else the value + 1."""
    predictions, bins = [], []
    for logit, segment in zip(logits, segments, strict=True):
        p = 1 / (1 + math.exp(-(logit + math.log(OPTIONS["positive_weight"]))))
        if borders is None:
            place = math.ceil((p - lower) / ((upper - lower) / BINS)) - 1
        else:
            place = sum(border < p for border in borders)
        bin = min(max(place, 0), BINS - 1) + segment * BINS
        if examples[bin] > OPTIONS["bin_ctr_in_use_after"]:
            share, weight = positives[bin] / examples[bin], OPTIONS["bin_ctr_weight_value"]
            p = share * weight + p * (1 - weight)
        predictions.append(p)
        bins.append(bin)
    return predictions, bins


def known_segments(lengths: list[int], values: list[int]) -> list[int]:
    segments, at = [], 0
    for length in lengths:
        segments.append(values[at] + 1 if length == 1 and 0 <= values[at] < SEGMENTS else 0)
        at += length
    return segments


def seen(segments: int, device: torch.device) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    examples = torch.randint(0, 9, (segments * BINS,), generator=generator).double()
    return examples.to(device), (examples * torch.rand(len(examples), generator=generator)).floor().to(device)


def assert_calibrated(got: Any, expected: tuple[list[float], list[int]], logit: Tensor) -> None:
    assert got.bin_ids.tolist() == expected[1] and got.bin_ids.dtype == torch.int64
    assert got.predictions.shape == logit.shape and got.predictions.dtype == logit.dtype
    worst = (
        (got.predictions.flatten().double().cpu() - torch.tensor(expected[0], dtype=torch.float64)).abs().max().item()
    )
    assert worst <= TOLERANCE[logit.dtype]


@pytest.mark.parametrize("bounds", [(0.0, 1.0), (0.25, 0.5)])
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("device", UPDATES)
def test_bins_of_equal_width(where: torch.device, dtype: torch.dtype, bounds: tuple[float, float]) -> None:
    logit = torch.tensor(LOGITS, device=where).to(dtype)[:, None]
    bins = seen(1, where)
    got = histogram_binning_calibration(logit, *bins, lower_bound=bounds[0], upper_bound=bounds[1], **OPTIONS)
    lists = [bin.tolist() for bin in bins]
    values = logit.flatten().tolist()
    assert_calibrated(got, model(values, lists[0], lists[1], [0] * len(values), None, *bounds), logit)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("given_borders", [False, True])
@pytest.mark.parametrize("device", UPDATES)
def test_bins_of_each_value_of_a_feature(where: torch.device, given_borders: bool, dtype: torch.dtype) -> None:
    logit, bins = torch.tensor(LOGITS, device=where), seen(SEGMENTS + 1, where)
    value = torch.tensor(VALUES, dtype=dtype, device=where)
    lengths = torch.tensor(PER_LOGIT, dtype=dtype, device=where)
    borders = [(i / BINS) ** 2 for i in range(1, BINS)] if given_borders else None
    args = (logit, value, lengths, SEGMENTS, *bins)
    if borders is not None:
        limits = torch.tensor(borders, dtype=torch.float64, device=where)
        got = generic_histogram_binning_calibration_by_feature(*args, limits, **OPTIONS)
    else:
        got = histogram_binning_calibration_by_feature(*args, BINS, **OPTIONS)
    values, segments = logit.tolist(), known_segments(PER_LOGIT, VALUES)
    assert segments == [3, 0, 0, 0, 0, 2, 1]
    assert_calibrated(got, model(values, bins[0].tolist(), bins[1].tolist(), segments, borders, 0.0, 1.0), logit)


@pytest.mark.parametrize("device", CPU_PATHS)
@settings(max_examples=50, deadline=None, derandomize=True)
@given(logits=st.lists(st.floats(-40, 40), max_size=9))
def test_any_logits_are_calibrated_as_a_loop_does(device: str, logits: list[float]) -> None:
    logit, bins = torch.tensor(logits, dtype=torch.float64), seen(1, torch.device("cpu"))
    got = histogram_binning_calibration(logit, *bins, **OPTIONS)
    expected = model(logits, bins[0].tolist(), bins[1].tolist(), [0] * len(logits), None, 0.0, 1.0)
    assert (got.predictions - torch.tensor(expected[0], dtype=torch.float64)).abs().sum() < 1e-9
    assert got.bin_ids.tolist() == expected[1]


@pytest.mark.parametrize("device", UPDATES)
def test_no_prediction_leaves_the_bins(where: torch.device) -> None:
    """Probability 0 was in bin -1 and read what lies before the bins."""
    logit = torch.tensor([-math.inf, math.inf, math.nan, -200.0], device=where)
    got = histogram_binning_calibration(logit, *seen(1, where), positive_weight=1.0, bin_ctr_in_use_after=100)
    assert got.bin_ids.tolist() == [0, BINS - 1, 0, 0]
    assert got.predictions.tolist()[:2] == [0.0, 1.0]
    assert got.predictions[2].isnan() and got.predictions[3] == 0


@pytest.mark.parametrize("device", UPDATES)
def test_no_logits_are_ordinary_and_bins_may_be_fp32(where: torch.device) -> None:
    bins = seen(1, where)
    none = histogram_binning_calibration(torch.empty(0, 1, device=where), *bins, positive_weight=1.0)
    assert none.predictions.shape == (0, 1) and none.bin_ids.shape == (0,)
    logit = torch.tensor(LOGITS, device=where, requires_grad=True)
    wide = histogram_binning_calibration(logit, *bins, **OPTIONS)
    narrow = histogram_binning_calibration(logit, bins[0].float(), bins[1].float(), **OPTIONS)
    assert torch.equal(wide.predictions, narrow.predictions) and not wide.predictions.requires_grad


def test_threads_calibrate_as_one_does(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    logit = torch.randn(501)
    with running_on("numba") as device:
        alone = histogram_binning_calibration(logit, *seen(1, device), **OPTIONS)
        monkeypatch.setattr(cpu_buckets, "parts_of", lambda ids, most: 8)
        threads = histogram_binning_calibration(logit, *seen(1, device), **OPTIONS)
    assert all(torch.equal(single, other) for single, other in zip(alone, threads, strict=True))


def test_it_compiles() -> None:
    with running_on("cpu") as device:
        bins = seen(1, device)

        def calibrate(logit: Tensor) -> Tensor:
            return histogram_binning_calibration(logit, *bins, **OPTIONS).predictions

        assert_compiled_equals_eager(calibrate, ((torch.tensor(LOGITS[:n]),) for n in (5, 7)), 0.0)


T = torch.tensor
D = torch.ones(4, dtype=torch.float64)
PLAIN, BY_FEATURE = histogram_binning_calibration, histogram_binning_calibration_by_feature
GENERIC = generic_histogram_binning_calibration_by_feature
BAD: list[tuple[Any, tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
    (PLAIN, (T([1]), D, D), {}, TypeError, "logit must be a float, got torch.int64"),
    (PLAIN, (D, D.long(), D), {}, TypeError, "bin_num_examples must be floats, got torch.int64"),
    (PLAIN, (D, D, D[:3]), {}, ValueError, "bin_num_positives must have 4 numbers, 4 bins of 1 segments, got 3"),
    (PLAIN, (D, D[:0], D[:0]), {}, ValueError, "there must be a bin, got 0"),
    (PLAIN, (D, D, D), {"positive_weight": 0.0}, ValueError, "positive_weight must be positive, got 0.0"),
    (PLAIN, (D, D, D), {"lower_bound": 1.0}, ValueError, "lower_bound 1.0 must be less than upper_bound 1.0"),
    (PLAIN, (D, D.to("meta"), D), {}, ValueError, "bin_num_examples is on meta, logit on cpu"),
    (BY_FEATURE, (D[:2], T([1.0]), T([1, 0]), 1, D, D, 2), {}, TypeError, "segment_value must be int32 or int64"),
    (BY_FEATURE, (D[:2], T([1]), T([1]), 1, D, D, 2), {}, ValueError, "segment_lengths must be of 2 logits, got 1"),
    (BY_FEATURE, (D[:2], T([1]), T([1, 1]), 1, D, D, 2), {}, ValueError, "add up to 2, but there are 1 values"),
    (BY_FEATURE, (D[:2], T([1]), T([2, -1]), 1, D, D, 2), {}, ValueError, "segment_lengths[1] is -1"),
    (GENERIC, (D[:2], T([1]), T([1, 0]), 1, D, D, D[:2]), {}, ValueError, "must have 6 numbers, 3 bins of 2 segments"),
    (GENERIC, (D[:2], T([1]), T([1, 0]), 1, D, D, T([1])), {}, ValueError, "bin_boundaries must be floats"),
]


@pytest.mark.parametrize(("op", "args", "options", "error", "message"), BAD, ids=[bad[-1] for bad in BAD])
@pytest.mark.parametrize("device", CPU_PATHS)
def test_bad_input_is_named(
    device: str, op: Any, args: Any, options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=re.escape(message)):
        op(*args, **{"positive_weight": 1.0, **options})

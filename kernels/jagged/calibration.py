"""Histogram binning: a prediction is replaced by the share of positive examples seen among predictions like it.

The method is B. Zadrozny and C. Elkan, "Obtaining calibrated probability estimates from decision trees and naive
Bayesian classifiers" (ICML 2001); their weight of what the bin says against the prediction is `bin_ctr_weight_value`.

Shapes: X [N] logits (of any shape), E, H [bins] examples seen and positives among them, fp64; with segments (values of
a feature) V [M] values and L [N] how many of them a logit has, then E, H [(segments + 1) * bins].
Bytes moved: N * (2 itemsize(X) + 8) and N * 16 for the bins that are looked up; with segments N * (8 + itemsize(L) +
itemsize(V)) besides, with given borders of bins a search over them.
"""

from __future__ import annotations

from math import log
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._op import (
    INTERPRETED,
    direct,
    launch_options,
    register,
    runs_kernel,
    tl,
    triton,
)
from ..cpu import buckets as cpu_buckets
from ..cpu.buckets import Bins

# a number for each thread: what is read and written one after another then uses its sectors (perf/compile/sectors.py)
_BLOCK = 64 if INTERPRETED else 128
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


class Calibrated(NamedTuple):
    """Predictions in the logits' shape and type, and the bin of each, [N] int64."""

    predictions: Tensor
    bin_ids: Tensor


def histogram_binning_ref(
    logit: Tensor,
    segment_value: Tensor | None,
    segment_lengths: Tensor | None,
    num_segments: int,
    examples: Tensor,
    positives: Tensor,
    boundaries: Tensor | None,
    num_bins: int,
    shift: float,
    lower: float,
    step: float,
    after: int,
    weight: float,
) -> tuple[Tensor, Tensor]:
    """All three calibrations: bin (i * step, (i + 1) * step] above `lower`, or between `boundaries`, of a segment."""
    x = (logit.flatten().double() + shift).to(torch.promote_types(logit.dtype, torch.float32))
    p = 1 / (1 + torch.exp(-x).double())
    even = torch.ceil((p - lower) / step).nan_to_num(0) - 1
    bins = even if boundaries is None else torch.searchsorted(boundaries, p.where(p.isfinite(), 0))
    bins = bins.clamp(0, num_bins - 1).long()
    if segment_value is not None and segment_lengths is not None:
        # the value of a logit that has one; segment 0 is of all others, and of values that are none
        starts = segment_lengths.cumsum(0) - segment_lengths
        padded = torch.cat([segment_value, segment_value.new_zeros(1)]).long()
        value = padded[starts.clamp(0, segment_value.shape[0])]
        known = (segment_lengths == 1) & (value >= 0) & (value < num_segments)
        bins = bins + torch.where(known, value + 1, 0) * num_bins
    share = positives[bins] / examples[bins] * weight + p * (1 - weight)
    return torch.where(examples[bins] > after, share, p).to(logit.dtype).view(logit.shape), bins


@triton.jit(do_not_specialize=["N", "M"], do_not_specialize_on_alignment=["X", "V", "L"])
def _histogram_binning_kernel(  # type: ignore[no-untyped-def]
    X,
    V,
    L,
    starts,
    E,
    H,
    borders,
    Y,
    bin_ids,
    N,
    M,
    segments,
    bins,
    SHIFT: tl.constexpr,
    LOWER: tl.constexpr,
    STEP: tl.constexpr,
    AFTER: tl.constexpr,
    WEIGHT: tl.constexpr,
    STEPS: tl.constexpr,
    HAS_SEGMENTS: tl.constexpr,
    HAS_BORDERS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < N
    one = tl.full((BLOCK,), 1.0, tl.float64)
    x = tl.load(X + i, mask=here, other=0.0).to(tl.float64) + tl.full((BLOCK,), SHIFT, tl.float64)
    e = tl.exp(-x) if X.dtype.element_ty == tl.float64 else tl.exp(-x.to(tl.float32)).to(tl.float64)
    p = one / (one + e)
    if HAS_BORDERS:
        low = i * 0
        high = low + bins - 1
        for _ in tl.static_range(STEPS):
            middle = (low + high) // 2
            going = middle < high
            right = going & (tl.load(borders + middle, mask=going, other=0.0) < p)
            low = tl.where(right, middle + 1, low)
            high = tl.where(going & (right == 0), middle, high)
        b = low
    else:
        scaled = (p - tl.full((BLOCK,), LOWER, tl.float64)) / tl.full((BLOCK,), STEP, tl.float64)
        # where it is no number of a bin it may be none of an int64 either
        scaled = tl.minimum(scaled, bins.to(tl.float64))
        b = scaled.to(tl.int64)
        # bins contain their upper end
        b = tl.where(b.to(tl.float64) == scaled, b - 1, b)
    # a NaN has no bin
    b = tl.where(p == p, b, 0)
    b = tl.minimum(tl.maximum(b, 0), bins - 1)
    if HAS_SEGMENTS:
        start = tl.load(starts + i, mask=here, other=0)
        single = here & (tl.load(L + i, mask=here, other=0) == 1) & (start >= 0) & (start < M)
        value = tl.load(V + start, mask=single, other=-1).to(tl.int64)
        b += tl.where((value >= 0) & (value < segments), value + 1, 0) * bins
    examples = tl.load(E + b, mask=here, other=0.0)
    positives = tl.load(H + b, mask=here, other=0.0)
    weight = tl.full((BLOCK,), WEIGHT, tl.float64)
    used = examples > tl.full((BLOCK,), AFTER, tl.float64)
    share = positives / tl.where(used, examples, one) * weight + p * (one - weight)
    y = tl.where(used, share, p)
    if Y.dtype.element_ty != tl.float64:
        # the interpreter takes no fp64 to bf16
        y = y.to(tl.float32)
    tl.store(Y + i, y.to(Y.dtype.element_ty), mask=here)
    tl.store(bin_ids + i, b, mask=here)


def histogram_binning_calibration(
    logit: Tensor,
    bin_num_examples: Tensor,
    bin_num_positives: Tensor,
    *,
    positive_weight: float,
    lower_bound: float = 0.0,
    upper_bound: float = 1.0,
    bin_ctr_in_use_after: int = 0,
    bin_ctr_weight_value: float = 1.0,
) -> Calibrated:
    """Predictions sigmoid(logit + log(positive_weight)), calibrated by bins of equal width (Zadrozny and Elkan, 2001).

    The bin of a prediction p is (i, i + 1] steps of (upper_bound - lower_bound) / bins above lower_bound, the first or
    the last one where p lies outside. Where it has seen more than `bin_ctr_in_use_after` examples, the result is
    `bin_ctr_weight_value * positives / examples + (1 - bin_ctr_weight_value) * p`, else p. NaN stays NaN, in bin 0.
    Everything but the exponential is fp64. Not differentiable.

    Shapes: logit any, fp32, fp64, fp16 or bf16; bin_num_examples and bin_num_positives [bins].

    Raises:
        ValueError: shapes that do not fit, no bins, a positive_weight that is not positive, an empty range.
        TypeError: logits or bins that are no floats.
    """
    num_bins = bin_num_examples.numel()
    step = _step(lower_bound, upper_bound, num_bins)
    bins = Bins(
        None, None, 0, bin_num_examples, bin_num_positives, None, num_bins, 0.0, lower_bound, step,
        bin_ctr_in_use_after, bin_ctr_weight_value,
    )  # fmt: skip
    return _calibrate(logit, bins, positive_weight)


def histogram_binning_calibration_by_feature(
    logit: Tensor,
    segment_value: Tensor,
    segment_lengths: Tensor,
    num_segments: int,
    bin_num_examples: Tensor,
    bin_num_positives: Tensor,
    num_bins: int,
    *,
    positive_weight: float,
    lower_bound: float = 0.0,
    upper_bound: float = 1.0,
    bin_ctr_in_use_after: int = 0,
    bin_ctr_weight_value: float = 1.0,
) -> Calibrated:
    """`histogram_binning_calibration` with bins for each value of a feature.

    A logit with one value v in 0 ... num_segments - 1 uses bins [(v + 1) * num_bins, (v + 2) * num_bins), all others
    the first num_bins.

    Shapes: segment_value [M] and segment_lengths [N] int32 or int64: how many of the values each logit has;
    bin_num_examples and bin_num_positives [(num_segments + 1) * num_bins].

    Raises:
        ValueError: as there, and on the CPU lengths that are negative or add up to more than M.
        TypeError: as there, and segments that are not integers.
    """
    step = _step(lower_bound, upper_bound, num_bins)
    bins = Bins(
        segment_value, segment_lengths, num_segments, bin_num_examples, bin_num_positives, None, num_bins, 0.0,
        lower_bound, step, bin_ctr_in_use_after, bin_ctr_weight_value,
    )  # fmt: skip
    return _calibrate(logit, bins, positive_weight)


def generic_histogram_binning_calibration_by_feature(
    logit: Tensor,
    segment_value: Tensor,
    segment_lengths: Tensor,
    num_segments: int,
    bin_num_examples: Tensor,
    bin_num_positives: Tensor,
    bin_boundaries: Tensor,
    *,
    positive_weight: float,
    bin_ctr_in_use_after: int = 0,
    bin_ctr_weight_value: float = 1.0,
) -> Calibrated:
    """`histogram_binning_calibration_by_feature` with bins between given borders: bin_boundaries
    [num_bins - 1], sorted.

    The bin of a prediction is the number of borders that are less than it.

    Raises:
        ValueError: `bin_boundaries` are not floats of one dimension.
    """
    if bin_boundaries.dim() != 1 or not bin_boundaries.is_floating_point():
        raise ValueError(
            f"bin_boundaries must be floats of one dimension, got {bin_boundaries.dtype} {tuple(bin_boundaries.shape)}"
        )
    bins = Bins(
        segment_value, segment_lengths, num_segments, bin_num_examples, bin_num_positives,
        bin_boundaries.double(), bin_boundaries.shape[0] + 1, 0.0, 0.0, 1.0, bin_ctr_in_use_after,
        bin_ctr_weight_value,
    )  # fmt: skip
    return _calibrate(logit, bins, positive_weight)


def _step(lower: float, upper: float, bins: int) -> float:
    if bins < 1:
        raise ValueError(f"there must be a bin, got {bins}")
    if not lower < upper:
        raise ValueError(f"lower_bound {lower} must be less than upper_bound {upper}")
    return (upper - lower) / bins


def _calibrate(logit: Tensor, bins: Bins, positive_weight: float) -> Calibrated:
    if logit.dtype not in _FLOATS:
        raise TypeError(f"logit must be a float, got {logit.dtype}")
    if not positive_weight > 0:
        raise ValueError(f"positive_weight must be positive, got {positive_weight}")
    total = (bins.num_segments + 1) * bins.num_bins
    for name, tensor in (("bin_num_examples", bins.examples), ("bin_num_positives", bins.positives)):
        if not tensor.is_floating_point():
            raise TypeError(f"{name} must be floats, got {tensor.dtype}")
        if tensor.numel() != total:
            raise ValueError(
                f"{name} must have {total} numbers, {bins.num_bins} bins of {bins.num_segments + 1} segments,"
                f" got {tensor.numel()}"
            )
        if tensor.device != logit.device:
            raise ValueError(f"{name} is on {tensor.device}, logit on {logit.device}")
    if bins.segment_value is not None and bins.segment_lengths is not None:
        _check_segments(logit, bins.segment_value, bins.segment_lengths)
    logit = logit.detach()
    call = _histogram_binning
    if not direct(logit, bins.examples, bins.positives, bins.segment_value, bins.segment_lengths, bins.boundaries):
        call = torch.ops.shardwise.histogram_binning
    return Calibrated(*call(logit, *bins._replace(shift=log(positive_weight))))


def _check_segments(logit: Tensor, value: Tensor, lengths: Tensor) -> None:
    for name, tensor in (("segment_value", value), ("segment_lengths", lengths)):
        if tensor.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64, got {tensor.dtype}")
        if tensor.dim() != 1:
            raise ValueError(f"{name} must have one dimension, got shape {tuple(tensor.shape)}")
        if tensor.device != logit.device:
            raise ValueError(f"{name} is on {tensor.device}, logit on {logit.device}")
    if lengths.shape[0] != logit.numel():
        raise ValueError(f"segment_lengths must be of {logit.numel()} logits, got {lengths.shape[0]}")


def _histogram_binning(
    logit: Tensor,
    segment_value: Tensor | None,
    segment_lengths: Tensor | None,
    num_segments: int,
    examples: Tensor,
    positives: Tensor,
    boundaries: Tensor | None,
    num_bins: int,
    shift: float,
    lower: float,
    step: float,
    after: int,
    weight: float,
) -> tuple[Tensor, Tensor]:
    n = logit.numel()
    logit = logit.contiguous()
    examples, positives = examples.contiguous().double(), positives.contiguous().double()
    boundaries = None if boundaries is None else boundaries.contiguous()
    numbers = (num_bins, shift, lower, step, after, weight)
    if not runs_kernel(logit):
        loop = cpu_buckets.loops() if logit.is_cpu else None
        if loop is not None:
            done = cpu_buckets.calibrate(
                loop,
                logit,
                Bins(segment_value, segment_lengths, num_segments, examples, positives, boundaries, *numbers),
            )
            if done is not None:
                return done
        if logit.is_cpu and segment_value is not None and segment_lengths is not None:
            _raise_bad_lengths(segment_value, segment_lengths)
        return histogram_binning_ref(
            logit, segment_value, segment_lengths, num_segments, examples, positives, boundaries, *numbers
        )
    out, bin_ids = torch.empty_like(logit), torch.empty(n, dtype=torch.int64, device=logit.device)
    if n == 0:
        return out, bin_ids
    value = lengths = starts = bin_ids[:0]
    if segment_value is not None and segment_lengths is not None:
        value, lengths = segment_value.contiguous(), segment_lengths.contiguous()
        starts = lengths.cumsum(0) - lengths
    grid = (triton.cdiv(n, _BLOCK),)
    _histogram_binning_kernel[grid](
        logit, value, lengths, starts, examples, positives, examples if boundaries is None else boundaries,
        out, bin_ids, n, value.shape[0], num_segments, num_bins, shift, lower, step, after, weight,
        num_bins.bit_length() + 1, segment_value is not None, boundaries is not None, _BLOCK,
        **launch_options(4, 96),
    )  # fmt: skip
    return out, bin_ids


def _raise_bad_lengths(value: Tensor, lengths: Tensor) -> None:
    """ValueError for lengths that the values cannot have, on the CPU."""
    if lengths.shape[0] and int(lengths.min()) < 0:
        at = int((lengths < 0).nonzero()[0])
        raise ValueError(f"segment_lengths[{at}] is {int(lengths[at])}, lengths must not be negative")
    if int(lengths.sum()) > value.shape[0]:
        raise ValueError(f"segment_lengths add up to {int(lengths.sum())}, but there are {value.shape[0]} values")


def _fake(logit: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return torch.empty_like(logit, memory_format=torch.contiguous_format), logit.new_empty(
        logit.numel(), dtype=torch.int64
    )


register(
    "histogram_binning(Tensor logit, Tensor? segment_value, Tensor? segment_lengths, int num_segments,"
    " Tensor examples, Tensor positives, Tensor? boundaries, int num_bins, float shift, float lower, float step,"
    " int after, float weight) -> (Tensor, Tensor)",
    _histogram_binning,
    _fake,
)

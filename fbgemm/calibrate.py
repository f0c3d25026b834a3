"""Histogram binning: predictions calibrated by what was seen among predictions like them.

Shapes: logit [N], bins' numbers [bins] fp64, or [(segments + 1) * bins]; segment_lengths [N] of segment_value [M].
"""

from __future__ import annotations

from torch import Tensor

from shardwise import kernels

from .registry import op


@op(
    "histogram_binning_calibration(Tensor logit, Tensor bin_num_examples, Tensor bin_num_positives, float"
    " positive_weight, float lower_bound, float upper_bound, SymInt bin_ctr_in_use_after, float bin_ctr_weight_value)"
    " -> (Tensor, Tensor)",
    words={"there must be a bin": "bin_num_examples must have a bin"},
)
def histogram_binning_calibration(
    logit: Tensor,
    bin_num_examples: Tensor,
    bin_num_positives: Tensor,
    positive_weight: float,
    lower_bound: float,
    upper_bound: float,
    bin_ctr_in_use_after: int,
    bin_ctr_weight_value: float,
) -> tuple[Tensor, Tensor]:
    """Predictions of bins of equal width, and the bin of each [N] int64."""
    return kernels.histogram_binning_calibration(
        logit,
        bin_num_examples,
        bin_num_positives,
        positive_weight=positive_weight,
        lower_bound=lower_bound,
        upper_bound=upper_bound,
        bin_ctr_in_use_after=bin_ctr_in_use_after,
        bin_ctr_weight_value=bin_ctr_weight_value,
    )


@op(
    "histogram_binning_calibration_by_feature(Tensor logit, Tensor segment_value, Tensor segment_lengths, SymInt"
    " num_segments, Tensor bin_num_examples, Tensor bin_num_positives, SymInt num_bins, float positive_weight, float"
    " lower_bound, float upper_bound, SymInt bin_ctr_in_use_after, float bin_ctr_weight_value) -> (Tensor, Tensor)",
    words={"there must be a bin": "num_bins must be positive"},
)
def histogram_binning_calibration_by_feature(
    logit: Tensor,
    segment_value: Tensor,
    segment_lengths: Tensor,
    num_segments: int,
    bin_num_examples: Tensor,
    bin_num_positives: Tensor,
    num_bins: int,
    positive_weight: float,
    lower_bound: float,
    upper_bound: float,
    bin_ctr_in_use_after: int,
    bin_ctr_weight_value: float,
) -> tuple[Tensor, Tensor]:
    """As `histogram_binning_calibration`, with bins for each value of a feature."""
    return kernels.histogram_binning_calibration_by_feature(
        logit,
        segment_value,
        segment_lengths,
        num_segments,
        bin_num_examples,
        bin_num_positives,
        num_bins,
        positive_weight=positive_weight,
        lower_bound=lower_bound,
        upper_bound=upper_bound,
        bin_ctr_in_use_after=bin_ctr_in_use_after,
        bin_ctr_weight_value=bin_ctr_weight_value,
    )


@op(
    "generic_histogram_binning_calibration_by_feature(Tensor logit, Tensor segment_value, Tensor segment_lengths,"
    " SymInt num_segments, Tensor bin_num_examples, Tensor bin_num_positives, Tensor bin_boundaries, float"
    " positive_weight, SymInt bin_ctr_in_use_after, float bin_ctr_weight_value) -> (Tensor, Tensor)"
)
def generic_histogram_binning_calibration_by_feature(
    logit: Tensor,
    segment_value: Tensor,
    segment_lengths: Tensor,
    num_segments: int,
    bin_num_examples: Tensor,
    bin_num_positives: Tensor,
    bin_boundaries: Tensor,
    positive_weight: float,
    bin_ctr_in_use_after: int,
    bin_ctr_weight_value: float,
) -> tuple[Tensor, Tensor]:
    """As `histogram_binning_calibration_by_feature`, with bins between `bin_boundaries` [bins - 1]."""
    return kernels.generic_histogram_binning_calibration_by_feature(
        logit,
        segment_value,
        segment_lengths,
        num_segments,
        bin_num_examples,
        bin_num_positives,
        bin_boundaries,
        positive_weight=positive_weight,
        bin_ctr_in_use_after=bin_ctr_in_use_after,
        bin_ctr_weight_value=bin_ctr_weight_value,
    )

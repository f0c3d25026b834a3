"""Metrics of click models: log loss, normalized entropy, area under the ROC curve.

Shapes: logits [N] or scores [N], labels [N] of 0 and 1. Values are computed in float64 and returned as floats; where
one is undefined (no samples, labels of one kind only, a nan among the scores) it is nan.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def log_loss(logits: Tensor, labels: Tensor) -> float:
    """Mean binary cross-entropy in nats, of logits [N] and labels [N] of 0 and 1; nan without samples."""
    _check(logits, labels)
    # one number per evaluation is what the caller wants: a host sync
    return float(F.binary_cross_entropy_with_logits(logits.double(), labels.double()))


def normalized_entropy(logits: Tensor, labels: Tensor) -> float:
    """Cross-entropy over the entropy of the mean label: 1 is what predicting that mean scores, lower is better.

    Of logits [N] and labels [N] of 0 and 1; nan where labels are of one kind only. He et al., "Practical Lessons from
    Predicting Clicks on Ads at Facebook", ADKDD 2014, equation 1.
    """
    _check(logits, labels)
    mean = float(labels.double().mean())
    if not 0.0 < mean < 1.0:
        return math.nan
    return log_loss(logits, labels) / -(mean * math.log(mean) + (1.0 - mean) * math.log1p(-mean))


def auc(scores: Tensor, labels: Tensor) -> float:
    """The chance that a positive scores above a negative, ties counting half (Mann-Whitney U over all pairs), exact.

    Of scores [N] and labels [N] of 0 and 1; nan where labels are of one kind only, or a score is nan.
    """
    _check(scores, labels)
    _, tie, count = torch.unique(scores, return_inverse=True, return_counts=True)
    positive = labels.double()
    positives = float(positive.sum())
    negatives = labels.numel() - positives
    if positives == 0.0 or negatives == 0.0 or bool(scores.isnan().any()):
        return math.nan
    # ranks start at 1; equal scores share the mean of their ranks
    last = count.cumsum(0).double()  # [distinct scores]
    rank = last - (count.double() - 1.0) / 2.0  # [distinct scores]
    u = float((rank[tie] * positive).sum()) - positives * (positives + 1.0) / 2.0
    return u / (positives * negatives)


def _check(scores: Tensor, labels: Tensor) -> None:
    if scores.dim() != 1 or scores.shape != labels.shape:
        raise ValueError(f"scores and labels must be [N] both, got {list(scores.shape)} and {list(labels.shape)}")

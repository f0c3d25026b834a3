"""AUC, normalized entropy and log loss against their definitions and against torchmetrics."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor
from torchmetrics.functional.classification import binary_auroc

from shardwise.models import auc, log_loss, normalized_entropy


def pairwise_auc(scores: Tensor, labels: Tensor) -> float:
    positive, negative = scores[labels == 1][:, None], scores[labels == 0]
    return float(((positive > negative).double() + 0.5 * (positive == negative)).mean())


@given(st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 1)), min_size=1, max_size=60))
def test_auc_counts_pairs_and_ties_count_half(samples: list[tuple[int, int]]) -> None:
    scores, labels = torch.tensor(samples).unbind(1)
    if labels.min() == labels.max():
        assert math.isnan(auc(scores, labels))
    else:
        assert math.isclose(auc(scores, labels), pairwise_auc(scores, labels), rel_tol=1e-12)


def test_auc_agrees_with_torchmetrics() -> None:
    labels = torch.randint(0, 2, (5000,))
    # rounded, so that there are ties
    logits = (torch.randn(5000) + labels).mul(8).round() / 8
    assert math.isclose(auc(logits, labels), float(binary_auroc(logits.sigmoid(), labels)), rel_tol=1e-5)


def test_log_loss_and_normalized_entropy_are_their_definitions() -> None:
    logits, labels = torch.tensor([0.0, 2.0, -1.0, 0.5]), torch.tensor([1.0, 1.0, 0.0, 0.0])
    p = logits.double().sigmoid()
    expected = -float((labels * p.log() + (1 - labels) * (1 - p).log()).mean())
    assert math.isclose(log_loss(logits, labels), expected, rel_tol=1e-9)
    assert math.isclose(normalized_entropy(logits, labels), expected / math.log(2), rel_tol=1e-9)


def test_predicting_the_mean_label_has_normalized_entropy_one() -> None:
    labels = torch.tensor([1.0, 0.0, 0.0, 0.0])
    logits = torch.full((4,), math.log(0.25 / 0.75), dtype=torch.float64)
    assert math.isclose(normalized_entropy(logits, labels), 1.0, rel_tol=1e-12)


@pytest.mark.parametrize("metric", [auc, normalized_entropy])
@pytest.mark.parametrize("labels", [[1.0, 1.0], [0.0, 0.0], []])
def test_labels_of_one_kind_have_no_value(metric, labels: list[float]) -> None:  # type: ignore[no-untyped-def]
    assert math.isnan(metric(torch.zeros(len(labels)), torch.tensor(labels)))


def test_a_nan_among_the_scores_gives_nan() -> None:
    assert math.isnan(auc(torch.tensor([0.0, math.nan, 1.0]), torch.tensor([0, 1, 1])))
    assert math.isnan(log_loss(torch.tensor([0.0, math.nan]), torch.tensor([0.0, 1.0])))


@pytest.mark.parametrize("metric", [auc, log_loss, normalized_entropy])
def test_shapes_that_differ_are_refused(metric) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=r"must be \[N\] both, got \[2\] and \[3\]"):
        metric(torch.zeros(2), torch.zeros(3))

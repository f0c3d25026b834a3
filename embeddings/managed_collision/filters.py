"""Which ids of an interval may ask for a slot, by how often they came: thresholds for eviction policies.

Each takes counts [U] of distinct ids and returns a mask [U] of those that pass and the threshold that it used.
"""

from __future__ import annotations

import torch
from torch import Tensor


@torch.no_grad()
def dynamic_threshold_filter(id_counts: Tensor, threshold_skew_multiplier: float = 10.0) -> tuple[Tensor, Tensor]:
    """Ids that came more than `threshold_skew_multiplier` times as often as the average id."""
    share = 1 / max(id_counts.numel(), 1)
    threshold = share * threshold_skew_multiplier * id_counts.sum()
    return id_counts > threshold, threshold


@torch.no_grad()
def average_threshold_filter(id_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Ids that came more often than the average id."""
    counts = id_counts.float()
    threshold = counts.mean()
    return counts > threshold, threshold


@torch.no_grad()
def probabilistic_threshold_filter(id_counts: Tensor, per_id_probability: float = 0.01) -> tuple[Tensor, Tensor]:
    """Each occurrence of an id has `per_id_probability` to let it pass, drawn from torch's global generator.

    An id that came n times passes with probability 1 - (1 - p)^n: 63 % for n = 100 and p = 0.01.
    """
    missed = torch.full_like(id_counts, 1 - per_id_probability, dtype=torch.float)
    threshold = torch.rand(id_counts.size(), device=id_counts.device)
    return 1 - torch.pow(missed, id_counts) > threshold, threshold

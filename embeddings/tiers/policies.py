"""Which rows of a cache go first of those that no known batch needs: a score for each slot, the lowest go.

A policy is a function of the scores [n] int64 of slots that a batch uses, 0 of rows that have just come, and the number
of the batch, counted from 1; it gives their new scores, integers from 0. Scores of other slots stay as they are. Those
that lie 2^29 or more below the highest may count alike, so that scores may rise without end.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from shardwise.kernels.rows import AGED_LFU, LFU, LRU, UNIT, Scoring

Policy: TypeAlias = Callable[[Tensor, int], Tensor]
"""From scores of rows and the number of the batch to scores anew; the lowest row goes first."""


def lru(scores: Tensor, batch: int) -> Tensor:
    """Rows that were used longest ago go first: scores [n] -> scores [n]."""
    return torch.full_like(scores, batch)


def lfu(scores: Tensor, batch: int) -> Tensor:
    """Rows that were used least often since they came go first: scores [n] -> scores [n]."""
    return scores + 1


class AgedLfu:
    """Rows that were used least go first, where a use of `half_life` batches ago counts a half.

    A score is the binary logarithm of sum 2^(b / half_life) over the batches b that used the row, in parts of 1 / 1024
    rounded down: as all uses lose weight alike, scores need no change while a row is not used ("forward decay", Cormode
    et al. 2009). Integers alone: the same everywhere.
    """

    def __init__(self, half_life: int = 64) -> None:
        self.half_life = half_life
        # log2(1 + 2^-d) for d parts
        gain = [round(UNIT * math.log2(1 + 2 ** (-d / UNIT))) for d in range(12 * UNIT)]
        self.gain = torch.tensor(gain, dtype=torch.int32, device="cpu")

    def __call__(self, scores: Tensor, batch: int) -> Tensor:
        now = torch.full_like(scores, UNIT * batch // self.half_life + 1)
        high, low = torch.maximum(scores, now), torch.minimum(scores, now)
        gain = self.gain.to(scores.device)[(high - low).clamp(max=len(self.gain) - 1)]
        return torch.where(scores > 0, high + gain, now)


def scoring_of(policy: Policy, batch: int, base: int) -> tuple[Scoring, int | None]:
    """How the loops score by a policy, and a bound of the scores so far; neither is known of a function of users."""
    if policy is lru:
        return Scoring(LRU, batch, base), batch
    if policy is lfu:
        return Scoring(LFU, batch, base), batch
    if isinstance(policy, AgedLfu):
        # as if a row had been used 2^63 times in this batch
        bound = UNIT * batch // policy.half_life + 1 + 63 * UNIT
        return Scoring(AGED_LFU, batch, base, policy.half_life, policy.gain), bound
    return Scoring(0, batch, base), None


def policy_named(policy: str | Policy, half_life: int = 64) -> Policy:
    """The policy of a name, or a function as it is; `half_life`, of "aged_lfu", is in batches.

    Raises:
        ValueError: there is no such policy.
    """
    if callable(policy):
        return policy
    if policy == "aged_lfu":
        return AgedLfu(half_life)
    named: dict[str, Policy] = {"lru": lru, "lfu": lfu}
    if policy not in named:
        raise ValueError(f"unknown cache policy {policy!r}: expected aged_lfu, lru, lfu or a function")
    return named[policy]

"""Whether gradients of tables wait for their optimizer's step, and how large those are that wait."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class Accumulation:
    """The state that the groups of a collection share: while it `waits`, a backward adds gradients up and writes none.

    Attributes:
        on: every gradient waits.
        begun: some wait; those that come wait too, until the step that applies them.
        is_whole: the last came while `on` was not set: the step is due.
    """

    def __init__(self) -> None:
        self.on = self.begun = self.is_whole = False

    @property
    def waits(self) -> bool:
        """Whether a gradient that comes now waits."""
        return self.on or self.begun

    def begin(self) -> None:
        """A gradient came that waits."""
        self.begun, self.is_whole = True, not self.on

    def end(self) -> None:
        """None waits any more."""
        self.begun = self.is_whole = False


def power_of(gradients: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The sum of |g|^p of all numbers, fp64 [1]; for p = inf the largest |g|."""
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=torch.float64) for g in gradients if g.numel()]
    if not norms:
        return torch.zeros(1, dtype=torch.float64, device=device)
    found = torch.stack(norms)
    return add_powers(found if norm_type == math.inf else found**norm_type, norm_type)


def add_powers(powers: Tensor, norm_type: float) -> Tensor:
    """What `power_of` gives for all gradients together, from what it gave for each, fp64 [n]."""
    return powers.amax(0, keepdim=True) if norm_type == math.inf else powers.sum(0, keepdim=True)


def root_of(power: Tensor, norm_type: float) -> Tensor:
    """The norm of what `power_of` gave: 0-dim, fp32."""
    return (power if norm_type == math.inf else power ** (1.0 / norm_type)).float().squeeze(0)

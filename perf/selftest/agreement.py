"""Agreement of a kernel with its reference: how far apart two results are, and how far they may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tolerance:
    """How far a result may be from its reference: `ratio` of the largest value of the tensor, by its dtype, and why."""

    name: str
    ratios: dict[torch.dtype, float]
    reason: str

    def of(self, tensor: Tensor) -> float:
        """The largest difference allowed, as a part of the tensor's largest value."""
        return self.ratios.get(tensor.dtype, 0.0)


def compare(got: Sequence[Any], expected: Sequence[Any], tolerance: Tolerance) -> tuple[float, list[str]]:
    """The largest difference as a part of the largest value, and a sentence for each part that differs too much."""
    if len(got) != len(expected):
        return float("inf"), [f"{len(got)} results, expected {len(expected)}"]
    worst, wrong = 0.0, []
    for place, (result, reference) in enumerate(zip(got, expected, strict=True)):
        if not isinstance(reference, Tensor):
            if result != reference:
                worst = float("inf")
                wrong.append(f"result {place} is {result!r}, expected {reference!r}")
            continue
        ratio = difference_of(result, reference)
        allowed = tolerance.of(reference)
        worst = max(worst, ratio)
        if ratio > allowed:
            wrong.append(f"result {place} differs by {ratio:.3g} of its largest value, allowed {allowed:.3g}")
    return worst, wrong


def difference_of(result: Tensor, reference: Tensor) -> float:
    """max |result - reference| / max |reference|: 0 where all bits agree, infinite if one has a NaN or other shapes."""
    if not isinstance(result, Tensor) or result.shape != reference.shape or result.dtype != reference.dtype:
        return float("inf")
    result, reference = result.detach(), reference.detach()
    if _bits(result).equal(_bits(reference)):
        return 0.0
    x, y = result.double(), reference.double()
    if not bool((x.isnan() == y.isnan()).all()):
        return float("inf")
    # what is infinite in both agrees
    apart = torch.where((x == y) | x.isnan(), 0.0, (x - y).abs()).max().item()
    largest = y.nan_to_num(0.0, 0.0, 0.0).abs().max().item()
    return apart / largest if largest else (float("inf") if apart else 0.0)


def _bits(tensor: Tensor) -> Tensor:
    if not tensor.dtype.is_floating_point:
        return tensor
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize])

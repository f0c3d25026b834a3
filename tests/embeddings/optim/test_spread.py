"""The norm of a parameter that is spread over ranks, of which this process sees its own part."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import GradientClipping, GradientClippingOptimizer, KeyedOptimizerWrapper

# what the other rank has of the parameter
ELSEWHERE = torch.tensor([3.0, -7.0, 2.0])


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_the_norm_of_a_spread_parameter_is_that_of_all_its_parts(norm_type: float) -> None:
    """With norm_type inf the maximum over ranks was taken to the power 0, and another parameter's norm hid it."""

    def reduce_norm(number: Tensor, group: Any, largest: bool) -> Tensor:
        there = torch.linalg.vector_norm(ELSEWHERE, norm_type)
        return torch.maximum(number, there) if largest else number + there**norm_type

    part = nn.Parameter(torch.zeros(2))
    part.grad = torch.tensor([-4.0, 1.0])
    optimizer = GradientClippingOptimizer(
        KeyedOptimizerWrapper({"part": part}, lambda p: torch.optim.SGD(p, lr=0.0)),
        GradientClipping.NORM, 0.5, norm_type, True, {part: ["a group"]}, reduce_norm=reduce_norm,
    )  # fmt: skip
    whole = torch.cat([part.grad, ELSEWHERE])
    optimizer.step()
    norm = torch.linalg.vector_norm(whole, norm_type)
    torch.testing.assert_close(optimizer.last_total_grad_norm, norm)
    torch.testing.assert_close(part.grad, whole[:2] * (0.5 / norm))

"""Activations that torch does not have."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn


class SwishLayerNorm(nn.Module):
    """`x * sigmoid(LayerNorm(x))`: the gate is the sigmoid of the normalised input, not SiLU of it.

    `input_dims` is the shape of the trailing dimensions to normalise. State keys are `norm.0.weight` and `norm.0.bias`.
    """

    def __init__(self, input_dims: int | list[int] | torch.Size, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(input_dims, device=device), nn.Sigmoid())

    def forward(self, input: Tensor) -> Tensor:
        return input * cast(Tensor, self.norm(input))

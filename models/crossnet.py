"""Cross networks: layers that multiply what comes in by a function of what the layer before made.

x_0 is the input, x_l what layer l gets, and * multiplies elementwise:

    CrossNet                 x_{l+1} = x_0 * (W x_l + b) + x_l                      W [N, N]
    LowRankCrossNet          x_{l+1} = x_0 * (W (V x_l) + b) + x_l                  W [N, r], V [r, N]
    VectorCrossNet           x_{l+1} = x_0 (w . x_l) + b + x_l                      w [N]
    LowRankMixtureCrossNet   x_{l+1} = sum over experts k of p_k E_k(x_l) + x_l,    p = softmax of G_k . x_l over k
                             E_k(x) = x_0 * (U_k g(C_k g(V_k x)) + b)               U [N, r], C [r, r], V [r, N]

Wang et al., "Deep & Cross Network for Ad Click Predictions", 2017, arXiv:1708.05123 (the vector form), and "DCN V2",
2020, arXiv:2008.13535 (the others). Parameters are named and initialised as TorchRec's, whose state dicts fit.

Shapes: input and output [B, N].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise.errors import RefusedValueError


def _weights(layers: int, *shape: int) -> nn.ParameterList:
    """A matrix, or a stack of them, for each layer."""
    return nn.ParameterList([nn.Parameter(nn.init.xavier_normal_(torch.empty(shape))) for _ in range(layers)])


def _biases(layers: int, *shape: int) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.zeros(shape)) for _ in range(layers)])


def _require_positive(who: str, **sizes: int) -> None:
    for name, size in sizes.items():
        if size < 1:
            words = "Low rank" if name == "low_rank" else name
            raise RefusedValueError(f"{words} must be larger or equal to 1: {name} of {who} is {size}")


class CrossNet(nn.Module):
    """Cross layers with a full matrix each: [B, in_features] -> [B, in_features]."""

    def __init__(self, in_features: int, num_layers: int) -> None:
        super().__init__()
        _require_positive("CrossNet", in_features=in_features)
        self.kernels = _weights(num_layers, in_features, in_features)
        self.bias = _biases(num_layers, in_features, 1)

    def forward(self, input: Tensor) -> Tensor:
        x = input
        for kernel, bias in zip(self.kernels, self.bias, strict=True):
            x = input * F.linear(x, kernel, bias.squeeze(1)) + x
        return x


class LowRankCrossNet(nn.Module):
    """Cross layers whose matrix is a product of two thin ones: [B, N] -> [B, N], N = in_features.

    They are of rank `low_rank`; a quarter of N serves as well.
    """

    def __init__(self, in_features: int, num_layers: int, low_rank: int = 1) -> None:
        super().__init__()
        _require_positive("LowRankCrossNet", in_features=in_features, low_rank=low_rank)
        self.W_kernels = _weights(num_layers, in_features, low_rank)
        self.V_kernels = _weights(num_layers, low_rank, in_features)
        self.bias = _biases(num_layers, in_features)

    def forward(self, input: Tensor) -> Tensor:
        x = input
        for outer, inner, bias in zip(self.W_kernels, self.V_kernels, self.bias, strict=True):
            x = input * F.linear(F.linear(x, inner), outer, bias) + x
        return x


class VectorCrossNet(nn.Module):
    """Cross layers with one vector each, the first form of the network: [B, in_features] -> [B, in_features].

    The bias is not multiplied by the input.
    """

    def __init__(self, in_features: int, num_layers: int) -> None:
        super().__init__()
        _require_positive("VectorCrossNet", in_features=in_features)
        self.kernels = _weights(num_layers, in_features, 1)
        self.bias = _biases(num_layers, in_features, 1)

    def forward(self, input: Tensor) -> Tensor:
        x = input
        for kernel, bias in zip(self.kernels, self.bias, strict=True):
            x = input * (x @ kernel) + bias.squeeze(1) + x
        return x


class LowRankMixtureCrossNet(nn.Module):
    """Cross layers of several low-rank experts each, mixed by a gate that all layers share; one expert has no gate.

    [B, in_features] -> [B, in_features]. `activation` is g: a module or a function of one tensor.
    """

    def __init__(
        self,
        in_features: int,
        num_layers: int,
        num_experts: int = 1,
        low_rank: int = 1,
        activation: nn.Module | Callable[[Tensor], Tensor] = torch.relu,
    ) -> None:
        super().__init__()
        _require_positive("LowRankMixtureCrossNet", in_features=in_features, num_experts=num_experts, low_rank=low_rank)
        self.U_kernels = _weights(num_layers, num_experts, in_features, low_rank)
        self.V_kernels = _weights(num_layers, num_experts, low_rank, in_features)
        self.bias = _biases(num_layers, in_features, 1)
        self.gates: nn.ModuleList | None = None
        if num_experts > 1:
            self.gates = nn.ModuleList([nn.Linear(in_features, 1, bias=False) for _ in range(num_experts)])
        self._activation = activation
        self.C_kernels = _weights(num_layers, num_experts, low_rank, low_rank)

    def forward(self, input: Tensor) -> Tensor:
        x = input
        for up, down, middle, bias in zip(self.U_kernels, self.V_kernels, self.C_kernels, self.bias, strict=True):
            # all experts at once: [K, r, N] on [B, N], and so on
            hidden = self._activation(torch.einsum("krn,bn->bkr", down, x))  # [B, K, r]
            hidden = self._activation(torch.einsum("kqr,bkr->bkq", middle, hidden))
            experts = input[:, None] * (torch.einsum("knr,bkr->bkn", up, hidden) + bias.squeeze(1))  # [B, K, N]
            if self.gates is None:
                x = experts[:, 0] + x
            else:
                shares = torch.cat([gate(x) for gate in self.gates], dim=1).softmax(dim=1)  # [B, K]
                x = torch.einsum("bkn,bk->bn", experts, shares) + x
        return x

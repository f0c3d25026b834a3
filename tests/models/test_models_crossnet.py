"""Cross networks against their formulas, written out sample by sample; gradients against finite differences."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from shardwise.models import CrossNet, LowRankCrossNet, LowRankMixtureCrossNet, VectorCrossNet


def full(net: CrossNet, x0: Tensor) -> Tensor:
    x = x0
    for w, b in zip(net.kernels, net.bias, strict=True):
        x = x0 * (w @ x + b[:, 0]) + x
    return x


def low_rank(net: LowRankCrossNet, x0: Tensor) -> Tensor:
    x = x0
    for w, v, b in zip(net.W_kernels, net.V_kernels, net.bias, strict=True):
        x = x0 * (w @ (v @ x) + b) + x
    return x


def vector(net: VectorCrossNet, x0: Tensor) -> Tensor:
    x = x0
    for w, b in zip(net.kernels, net.bias, strict=True):
        x = x0 * torch.dot(w[:, 0], x) + b[:, 0] + x
    return x


def mixture(net: LowRankMixtureCrossNet, x0: Tensor) -> Tensor:
    x = x0
    for u, v, c, b in zip(net.U_kernels, net.V_kernels, net.C_kernels, net.bias, strict=True):
        g = net._activation
        experts = [x0 * (u[k] @ g(c[k] @ g(v[k] @ x)) + b[:, 0]) for k in range(len(u))]
        shares = [1.0] if net.gates is None else torch.cat([gate(x) for gate in net.gates]).softmax(0)
        x = sum((share * expert for share, expert in zip(shares, experts, strict=True)), x)
    return x


# name -> network, its formula for one sample, and its parameters by name
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[..., Tensor], dict[str, list[int]]]] = {
    "full": (lambda: CrossNet(6, 2), full, {"kernels.1": [6, 6], "bias.1": [6, 1]}),
    "no layers": (lambda: CrossNet(6, 0), full, {}),
    "low rank": (
        lambda: LowRankCrossNet(6, 3),
        low_rank,
        {"W_kernels.2": [6, 1], "V_kernels.2": [1, 6], "bias.2": [6]},
    ),
    "rank 4": (lambda: LowRankCrossNet(6, 1, 4), low_rank, {"W_kernels.0": [6, 4], "V_kernels.0": [4, 6]}),
    "vector": (lambda: VectorCrossNet(6, 2), vector, {"kernels.0": [6, 1], "bias.0": [6, 1]}),
    "one expert": (lambda: LowRankMixtureCrossNet(6, 2), mixture, {"U_kernels.1": [1, 6, 1], "C_kernels.1": [1, 1, 1]}),
    "experts": (
        lambda: LowRankMixtureCrossNet(6, 2, num_experts=3, low_rank=2, activation=torch.tanh),
        mixture,
        {"U_kernels.1": [3, 6, 2], "V_kernels.0": [3, 2, 6], "C_kernels.1": [3, 2, 2], "gates.2.weight": [1, 6]},
    ),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    net = CASES[name][0]()
    for parameter in net.parameters():
        # biases begin at 0, where mistakes with them would not show
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    return net


@pytest.mark.parametrize("name", CASES)
def test_layers_follow_their_formula(name: str) -> None:
    net, x = made(name), torch.randn(5, 6)
    wanted = torch.stack([CASES[name][1](net, row) for row in x])
    torch.testing.assert_close(net(x), wanted)
    assert net(x[:0]).shape == (0, 6)
    shapes = {key: list(value.shape) for key, value in net.state_dict().items()}
    assert CASES[name][2].items() <= shapes.items()


@pytest.mark.parametrize("name", [name for name in CASES if name != "one expert"])
def test_gradients_are_those_of_the_values(name: str) -> None:
    net, x = made(name).double(), torch.randn(2, 6, dtype=torch.float64, requires_grad=True)
    names, parameters = [*dict(net.named_parameters())], [*net.parameters()]

    def run(given: Tensor, *weights: Tensor) -> Tensor:
        out: Tensor = torch.func.functional_call(net, dict(zip(names, weights, strict=True)), (given,))
        return out

    assert torch.autograd.gradcheck(run, (x, *parameters))


def test_biases_begin_at_zero_and_impossible_sizes_are_refused() -> None:
    assert not any(bias.any() for bias in LowRankCrossNet(4, 2).bias)
    with pytest.raises(ValueError, match="LowRankCrossNet: low_rank must be at least 1, got 0"):
        LowRankCrossNet(4, 2, 0)
    with pytest.raises(ValueError, match="LowRankMixtureCrossNet: num_experts must be at least 1, got 0"):
        LowRankMixtureCrossNet(4, 2, num_experts=0)

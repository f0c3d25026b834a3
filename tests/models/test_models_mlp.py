"""Perceptron, MLP and SwishLayerNorm: formulas, state keys, and what may be an activation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise.models import MLP, Perceptron, SwishLayerNorm


def linear(layer: nn.Module, x: Tensor) -> Tensor:
    state = layer.state_dict()
    return x @ state["_linear.weight"].T + state.get("_linear.bias", torch.zeros(()))


ACTIVATIONS: list[Any] = [
    pytest.param(torch.relu, torch.relu, id="function"),
    pytest.param("relu", torch.relu, id="relu"),
    pytest.param("sigmoid", torch.sigmoid, id="sigmoid"),
    pytest.param("swish_layernorm", lambda x: x * torch.sigmoid(nn.functional.layer_norm(x, x.shape[-1:])), id="swish"),
    pytest.param(nn.Tanh(), torch.tanh, id="module"),
    pytest.param(nn.Tanh, torch.tanh, id="module class"),
    pytest.param(lambda: nn.LeakyReLU(0.3), lambda x: torch.where(x > 0, x, 0.3 * x), id="factory"),
    pytest.param(lambda x: x**2, lambda x: x**2, id="lambda"),
]


@pytest.mark.parametrize(("activation", "formula"), ACTIVATIONS)
@pytest.mark.parametrize("on_last", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_mlp_is_its_formula(activation: Any, formula: Callable[[Tensor], Tensor], on_last: bool, bias: bool) -> None:
    mlp = MLP(3, [4, 5], bias=bias, activation=activation, activation_on_last=on_last)
    x = torch.randn(7, 3)
    y = linear(mlp._mlp[1], formula(linear(mlp._mlp[0], x)))
    torch.testing.assert_close(mlp(x), formula(y) if on_last else y)


def test_perceptron_is_its_formula() -> None:
    perceptron = Perceptron(3, 4, activation=torch.sigmoid)
    x = torch.randn(2, 3)
    torch.testing.assert_close(perceptron(x), torch.sigmoid(linear(perceptron, x)))
    assert perceptron(torch.randn(2, 5, 3)).shape == (2, 5, 4)


def test_swish_layer_norm_gates_with_the_sigmoid_of_the_norm() -> None:
    swish = SwishLayerNorm(4)
    x = torch.randn(3, 4)
    swish.load_state_dict({"norm.0.weight": torch.tensor([1.0, 2.0, 3.0, 4.0]), "norm.0.bias": torch.zeros(4)})
    normed = (x - x.mean(1, keepdim=True)) / (x.var(1, unbiased=False, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(swish(x), x * torch.sigmoid(normed * torch.tensor([1.0, 2.0, 3.0, 4.0])))
    assert set(swish.state_dict()) == {"norm.0.weight", "norm.0.bias"}


def test_state_keys_are_torchrecs() -> None:
    assert list(MLP(3, [4, 5]).state_dict()) == [
        "_mlp.0._linear.weight",
        "_mlp.0._linear.bias",
        "_mlp.1._linear.weight",
        "_mlp.1._linear.bias",
    ]
    assert list(MLP(3, [4], bias=False, activation="swish_layernorm").state_dict()) == [
        "_mlp.0._linear.weight",
        "_mlp.0._activation_fn.norm.0.weight",
        "_mlp.0._activation_fn.norm.0.bias",
    ]


def test_a_module_is_shared_by_the_layers_and_a_class_is_not() -> None:
    one = nn.PReLU()
    shared, own = MLP(2, [2, 2], activation=one), MLP(2, [2, 2], activation=nn.PReLU)
    assert shared._mlp[0]._activation_fn is shared._mlp[1]._activation_fn is one
    assert own._mlp[0]._activation_fn is not own._mlp[1]._activation_fn


def test_no_layers_is_the_identity() -> None:
    x = torch.randn(2, 3)
    assert torch.equal(MLP(3, [])(x), x)


def test_device_and_dtype_reach_every_layer() -> None:
    mlp = MLP(3, [4, 5], activation="swish_layernorm", device="meta", dtype=torch.float64)
    assert {parameter.device.type for parameter in mlp.parameters()} == {"meta"}
    assert mlp.get_parameter("_mlp.1._linear.weight").dtype == torch.float64


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: MLP(3, [4], activation="gelu"),
            "unknown activation 'gelu', expected one of 'relu', 'sigmoid', 'swish",
        ),
        (lambda: MLP(3, [], activation="gelu"), "unknown activation 'gelu'"),
        (lambda: MLP(3, [4, 0]), "out_size must be positive, got 0"),
        (lambda: MLP(0, [4]), "in_size must be positive, got 0"),
        (lambda: MLP(3, [4], activation=lambda: 3), "must return a module, got int"),  # type: ignore[arg-type,return-value]
    ],
)
def test_settings_without_a_meaning_are_refused(make: Callable[[], MLP], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()

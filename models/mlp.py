"""Perceptron and MLP: the dense layers of recommender models.

Shapes: input [..., in_size], output [..., layer_sizes[-1]].

`torch.jit.script` takes these modules, so a `forward` has annotated variables where it would have `cast`, which
TorchScript does not know.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn


class SwishLayerNorm(nn.Module):
    """`x * sigmoid(LayerNorm(x))`: the gate is the sigmoid of the normalised input, not SiLU of it.

    [..., *input_dims] -> the same shape: `input_dims` are the trailing dimensions to normalise. State keys are
    `norm.0.weight` and `norm.0.bias`.
    """

    def __init__(self, input_dims: int | list[int] | torch.Size, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.norm = nn.Sequential(nn.LayerNorm(input_dims, device=device), nn.Sigmoid())

    def forward(self, input: Tensor) -> Tensor:
        gate: Tensor = self.norm(input)
        return input * gate


TensorFunction: TypeAlias = Callable[[Tensor], Tensor]
ModuleFactory: TypeAlias = Callable[[], nn.Module]

# a named activation is made anew for every layer, from that layer's width
_BY_NAME: dict[str, Callable[[int, torch.device | str | None], TensorFunction]] = {
    "relu": lambda size, device: torch.relu,
    "sigmoid": lambda size, device: torch.sigmoid,
    "swish_layernorm": lambda size, device: SwishLayerNorm(size, device=device),
}


class Perceptron(nn.Module):
    """One linear layer and its activation: `activation(x W^T + b)`, [..., in_size] -> [..., out_size].

    `activation` is a module or a function of one tensor.

    Raises:
        ValueError: a size is not positive.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        bias: bool = True,
        activation: nn.Module | TensorFunction = torch.relu,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        for name, size in (("in_size", in_size), ("out_size", out_size)):
            if size <= 0:
                raise ValueError(f"Perceptron: {name} must be positive, got {size}")
        self._linear = nn.Linear(in_size, out_size, bias=bias, device=device, dtype=dtype)
        self._activation_fn = activation

    def forward(self, input: Tensor) -> Tensor:
        activated: Tensor = self._activation_fn(self._linear(input))
        return activated


class MLP(nn.Module):
    """A stack of Perceptrons of `layer_sizes`, [..., in_size] -> [..., layer_sizes[-1]]; no layers is the identity.

    `activation` is "relu", "sigmoid" or "swish_layernorm", a function of one tensor, a module, which all layers then
    share, or a class or function without arguments that makes a module, called once a layer. It follows the last layer
    too, unless `activation_on_last` is False.

    Raises:
        ValueError: a name is unknown, a size is not positive, or a factory makes no module.
    """

    def __init__(
        self,
        in_size: int,
        layer_sizes: Sequence[int],
        bias: bool = True,
        activation: str | ModuleFactory | nn.Module | TensorFunction = torch.relu,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        activation_on_last: bool = True,
    ) -> None:
        super().__init__()
        if isinstance(activation, str) and activation not in _BY_NAME:
            raise ValueError(
                f"MLP: unknown activation {activation!r}, expected one of {', '.join(map(repr, _BY_NAME))}"
            )
        widths = [in_size, *layer_sizes]
        last = len(layer_sizes) - 1
        self._mlp = nn.Sequential(
            *(
                Perceptron(
                    widths[layer],
                    widths[layer + 1],
                    bias=bias,
                    activation=(
                        _activation(activation, widths[layer + 1], device)
                        if layer < last or activation_on_last
                        else nn.Identity()
                    ),
                    device=device,
                    dtype=dtype,
                )
                for layer in range(len(layer_sizes))
            )
        )

    def forward(self, input: Tensor) -> Tensor:
        output: Tensor = self._mlp(input)
        return output


def _activation(
    activation: str | ModuleFactory | nn.Module | TensorFunction, size: int, device: torch.device | str | None
) -> nn.Module | TensorFunction:
    if isinstance(activation, str):
        return _BY_NAME[activation](size, device)
    if isinstance(activation, nn.Module) or not _takes_nothing(activation):
        return cast("nn.Module | TensorFunction", activation)
    made = cast(ModuleFactory, activation)()
    if not isinstance(made, nn.Module):
        raise ValueError(f"MLP: the activation factory {activation!r} must return a module, got {type(made).__name__}")
    return made


def _takes_nothing(function: Callable[..., Any]) -> bool:
    """Whether a call without arguments is possible; False for builtins such as torch.relu, which show no signature."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:
        return False
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)

"""The layers of a model that are not sharded: memory and values for what is on meta, and their move to a device."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

# what these hold is initialised by the module that has them
_HOLDERS = (nn.ParameterDict, nn.ParameterList)


@torch.no_grad()
def materialize(module: nn.Module, device: torch.device, stacklevel: int = 2) -> None:
    """Give what is on meta memory and its initial values; what exists is kept, and collections have theirs already.

    Values come from the module's `reset_parameters`; without one they are zeros, and a warning says so. Parameters of
    lazy modules wait for their first forward.
    """
    made: dict[int, Tensor] = {}
    zeros = []
    for path, child in module.named_modules():
        if isinstance(child, _HOLDERS) and path:
            continue
        owners = {"": child}
        owners.update({f"{name}.": one for name, one in child._modules.items() if isinstance(one, _HOLDERS)})
        own: list[tuple[str, dict[str, Any]]] = [
            (prefix, tensors) for prefix, one in owners.items() for tensors in (one._parameters, one._buffers)
        ]
        there = [(prefix + name, t) for prefix, tensors in own for name, t in tensors.items() if t is not None]
        kept = [t for _, t in there if not is_lazy(t) and not t.is_meta]
        names = [name for name, t in there if not is_lazy(t) and t.is_meta]
        for prefix, tensors in own:
            # tied tensors stay tied
            tensors.update(
                {
                    name: made.setdefault(id(t), _like(t, device))
                    for name, t in tensors.items()
                    if prefix + name in names
                }
            )
        reset: Any = getattr(child, "reset_parameters", None)
        if names and reset is not None:
            values = [t.clone() for t in kept]
            reset()
            for tensor, value in zip(kept, values, strict=True):
                tensor.copy_(value)
        else:
            zeros += [f"{path}.{name}" if path else name for name in names]
    if zeros:
        warnings.warn(
            f"{zeros} were on meta and their modules have no reset_parameters: they are zeros",
            stacklevel=stacklevel + 1,
        )


def on_meta(module: nn.Module) -> list[str]:
    """Names of parameters and buffers that have no memory yet."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return [name for name, tensor in named if not is_lazy(tensor) and tensor.is_meta]


def move(module: nn.Module, device: torch.device) -> None:
    """`module.to(device)`, but what is on meta stays there."""
    if on_meta(module):
        module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))  # type: ignore[no-untyped-call]
    else:
        module.to(device)


def _like(meta: Tensor, device: torch.device) -> Tensor:
    """Zeros in the shape of a tensor on meta, a parameter with the marks of that one if it was one."""
    zeros = torch.zeros_like(meta, device=device)
    if isinstance(meta, nn.Parameter):
        zeros = nn.Parameter(zeros, meta.requires_grad)
        vars(zeros).update(vars(meta))
    return zeros

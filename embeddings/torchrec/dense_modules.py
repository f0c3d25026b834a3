"""Dense modules from what programs give in their place: a class, a function, one module for many.

TorchRec's are in `torchrec.modules.utils`, for its multi-task models.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.errors import RefusedValueError


def extract_module_or_tensor_callable(
    module_or_callable: Callable[[], nn.Module] | nn.Module | Callable[[Tensor], Tensor],
) -> nn.Module | Callable[[Tensor], Tensor]:
    """What a function without arguments makes, if that is a module; a function of a tensor, or a module, as it is.

    Raises:
        ValueError: the function makes something else.
    """
    try:
        module: Any = module_or_callable()  # type: ignore[call-arg]
    except TypeError as error:
        if "required positional argument" in str(error):
            return module_or_callable  # type: ignore[return-value]
        raise
    if isinstance(module, nn.Module):
        return module
    raise ValueError(f"Expected callable that takes no input to return a torch.nn.Module, but got: {type(module)}")


def get_module_output_dimension(module: Callable[[Tensor], Tensor] | nn.Module, in_features: int) -> int:
    """The size of the last dim that `module` makes of [1, in_features]; it is called to find out."""
    size: int = module(torch.zeros(1, in_features)).size(-1)
    return size


def check_module_output_dimension(module: Iterable[nn.Module] | nn.Module, in_features: int, out_features: int) -> bool:
    """Whether a module, or each of a list or ModuleList of them, makes [1, out_features] of [1, in_features]."""
    if isinstance(module, (list, nn.ModuleList)):
        return all(check_module_output_dimension(each, in_features, out_features) for each in module)
    return get_module_output_dimension(module, in_features) == out_features  # type: ignore[arg-type]


def init_mlp_weights_xavier_uniform(m: nn.Module) -> None:
    """Give a Linear, and no other module, new weights by Xavier's uniform rule, and a bias of 0 if it has one."""
    if isinstance(m, nn.Linear):
        nn.init.xavier_uniform_(m.weight)
        # None without a bias, which torch's types do not say
        bias: nn.Parameter | None = m.bias
        if bias is not None:
            nn.init.zeros_(bias)


def construct_modulelist_from_single_module(module: nn.Module, sizes: Sequence[int]) -> nn.ModuleList:
    """ModuleLists nested to `sizes`, of copies of `module` whose Linears have new weights each."""
    if len(sizes) == 1:
        return nn.ModuleList(copy.deepcopy(module).apply(init_mlp_weights_xavier_uniform) for _ in range(sizes[0]))
    return nn.ModuleList(construct_modulelist_from_single_module(module, sizes[1:]) for _ in range(sizes[0]))


def convert_list_of_modules_to_modulelist(modules: Any, sizes: Sequence[int]) -> nn.ModuleList:
    """ModuleLists nested to `sizes`, of modules in lists that are nested so.

    Raises:
        AssertionError, a ValueError: a list is not of its size.
    """
    if len(modules) != sizes[0]:
        raise RefusedValueError(
            f"the counts of modules ({len(modules)}) do not match with the required counts {tuple(sizes)}"
        )
    if len(sizes) == 1:
        return nn.ModuleList(modules)
    return nn.ModuleList(convert_list_of_modules_to_modulelist(each, sizes[1:]) for each in modules)

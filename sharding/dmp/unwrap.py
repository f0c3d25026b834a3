"""Models without their wrappers: the module inside, names of what is sharded, and copies."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_DMP, _FSDP = "_dmp_wrapped_module", "_fsdp_wrapped_module"


def get_unwrapped_module(module: nn.Module) -> nn.Module:
    """The module inside DistributedModelParallel, DistributedDataParallel and FullyShardedDataParallel wrappers."""
    while True:
        if isinstance(module, DistributedDataParallel):
            inner = module.module
        else:
            inner = module._modules.get(_DMP, module._modules.get(_FSDP))
        if inner is None:
            return module
        module = inner


def get_module(module: nn.Module) -> nn.Module:
    """The module inside DistributedModelParallel, its data-parallel wrapper included."""
    while True:
        inner = module._modules.get(_DMP)
        if inner is None:
            return module
        module = inner


def sharded_parameter_names(module: nn.Module) -> Iterator[str]:
    """Parameters that the backward trains or that other ranks hold, by their names in the unsharded model.

    A module of a sharder of yours names its own by a method `sharded_parameter_names(prefix="")`.
    """
    for path, child in get_unwrapped_module(module).named_modules(remove_duplicate=False):
        names: Callable[[str], Iterator[str]] | None = getattr(child, "sharded_parameter_names", None)
        if callable(names):
            yield from names(path)


def get_unsharded_module_names(model: nn.Module) -> list[str]:
    """Paths of the outermost modules in which nothing is sharded, wrappers included; none if nothing is at all."""
    paths: list[str] = []
    _find_unsharded(model, "", paths)
    return paths


def _find_unsharded(module: nn.Module, prefix: str, paths: list[str]) -> bool:
    """Whether something in the module is sharded; paths of its unsharded children go to `paths`."""
    # a collection, or a module that is sharded as a whole, say with its feature processors
    if callable(getattr(module, "sharded_parameter_names", None)):
        return True
    children = dict(module.named_children())
    below: list[str] = []
    sharded = {name: _find_unsharded(child, f"{prefix}{name}.", below) for name, child in children.items()}
    if any(sharded.values()):
        paths += below
        paths += [prefix + name for name, is_sharded in sharded.items() if not is_sharded]
    return any(sharded.values())


class sharded_model_copy:  # noqa: N801  a name of TorchRec's
    """Inside `with sharded_model_copy(device):` `copy.deepcopy` copies sharded models, their tensors to `device`.

    Process groups, which cannot be copied, are shared with the original; with device None tensors are too.
    """

    def __init__(self, device: torch.device | str | int | None) -> None:
        self.device = device
        self._saved: list[tuple[type, str, Any]] = []

    def __enter__(self) -> None:
        copied = _copied_to(None if self.device is None else torch.device(self.device))

        def parameter(param: nn.Parameter, memo: dict[Any, Any]) -> nn.Parameter:
            new = nn.Parameter(copied(param.detach(), memo), param.requires_grad)
            vars(new).update(vars(param))
            return new

        for owner, method in ((Tensor, copied), (nn.Parameter, parameter), (dist.ProcessGroup, _itself)):
            self._saved.append((owner, "__deepcopy__", owner.__dict__.get("__deepcopy__")))
            setattr(owner, "__deepcopy__", method)  # noqa: B010  types have no such attribute to assign

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for owner, name, before in self._saved:
            if before is None:
                delattr(owner, name)
            else:
                setattr(owner, name, before)
        self._saved.clear()


class CopyMixIn:
    """A module that `copy_to_device` does not move: it asks for its copy on the device by `copy`."""

    @abstractmethod
    def copy(self, device: torch.device) -> nn.Module:
        """What stands for this module in the copy of a model; it may be the module, which is a copy already."""


class ModuleCopyMixin(CopyMixIn):
    """A module that moves as a whole to the device of a copy, from whatever device."""

    def copy(self, device: torch.device) -> nn.Module:
        """This module, moved."""
        assert isinstance(self, nn.Module)
        return self.to(device)


class ModuleNoCopyMixin(CopyMixIn):
    """A module that stays where it is in a copy of its model."""

    def copy(self, device: torch.device) -> nn.Module:
        """This module, as it is."""
        assert isinstance(self, nn.Module)
        return self


def copy_to_device(module: nn.Module, current_device: torch.device, to_device: torch.device) -> nn.Module:
    """A copy of a model whose tensors on `current_device` are moved to `to_device`; it shares the others.

    A `CopyMixIn` in it says itself what its copy is.
    """
    with sharded_model_copy(device=None):
        copied = copy.deepcopy(module)
    return _moved(copied, lambda tensor: tensor.to(to_device) if tensor.device == current_device else tensor, to_device)


def _moved(module: nn.Module, move: Callable[[Tensor], Tensor], device: torch.device) -> nn.Module:
    if isinstance(module, CopyMixIn):
        return module.copy(device)
    if not any(isinstance(child, CopyMixIn) for child in module.modules()):
        return module._apply(move)  # type: ignore[no-untyped-call, no-any-return]
    children = {name: _moved(child, move, device) for name, child in module.named_children()}
    module._apply(move, recurse=False)  # type: ignore[no-untyped-call]
    for name, child in children.items():
        setattr(module, name, child)
    return module


class CopyableMixin(nn.Module):
    """A module that copies itself to a device: derive from it in the place of nn.Module."""

    def copy(self, device: torch.device) -> nn.Module:
        """A copy whose tensors on the CPU are moved to `device`; it shares those of other devices."""
        return copy_to_device(self, torch.device("cpu"), device)


def _copied_to(device: torch.device | None) -> Callable[[Tensor, dict[Any, Any]], Tensor]:
    """How a tensor is copied: views of one memory stay views of one."""

    def copied(tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
        if device is None:
            return tensor
        if tensor.is_meta or device.type == "meta" or tensor.layout is not torch.strided:
            return tensor.detach().to(device, copy=True).requires_grad_(tensor.requires_grad)
        storage = tensor.untyped_storage()
        key = "storage", storage._cdata
        if key not in memo:
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            memo[key] = whole.to(device, copy=True)
        new = torch.empty(0, dtype=tensor.dtype, device=device)
        new.set_(memo[key].untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        return new.requires_grad_(tensor.requires_grad)

    return copied


def _itself(group: dist.ProcessGroup, memo: object) -> dist.ProcessGroup:
    return group

"""`ModuleSharder`: what shards one class of modules, and the checks that every one makes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from ...planner.layout import CAPABILITIES, TIERED_KERNELS
from ..comms.env import ShardingEnv
from .plan import SERVED_KERNELS, EmbeddingComputeKernel, ParameterSharding, ShardingType

M = TypeVar("M", bound=nn.Module)


class ModuleSharder(ABC, Generic[M]):
    """The ways to shard the tables of modules of class `module_type`.

    Args:
        qcomm_codecs_registry: codecs of the exchanges, as `get_qcomm_codecs_registry` makes them.
    """

    def __init__(self, qcomm_codecs_registry: Mapping[str, Any] | None = None) -> None:
        self._qcomm_codecs_registry = qcomm_codecs_registry

    @abstractmethod
    def shard(
        self,
        module: M,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> nn.Module:
        """The sharded form of `module` by a plan of its tables; all ranks call this together."""

    @property
    @abstractmethod
    def module_type(self) -> type[M]:
        """The class of module that this sharder is for."""

    @property
    def qcomm_codecs_registry(self) -> Mapping[str, Any] | None:
        """Codecs of the exchanges, or None."""
        return self._qcomm_codecs_registry

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """Parameters that a plan places, by their names in it."""
        return dict(module.named_parameters())

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Sharding types that a plan may use."""
        return [ShardingType.DATA_PARALLEL.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Kernels that a plan may use for a table of this type."""
        return [EmbeddingComputeKernel.DENSE.value]

    def storage_usage(self, tensor: Tensor, compute_device_type: str, compute_kernel: str) -> dict[str, int]:
        """Bytes of a table [R, D] by where they lie: "hbm" on a GPU, "ddr" on the CPU and below a GPU, "ssd" in files.

        Optimizer states and caches are not counted.

        Raises:
            ValueError: the device type or the kernel is not served.
        """
        require_device_type(compute_device_type)
        if compute_kernel not in SERVED_KERNELS:
            raise ValueError(f"compute_kernel {compute_kernel!r} is not one of {list(SERVED_KERNELS)}")
        below = "ssd" if compute_kernel == "key_value" else "ddr" if compute_kernel in TIERED_KERNELS else None
        where = below or ("ddr" if compute_device_type == "cpu" else "hbm")
        return {where: tensor.element_size() * tensor.numel()}


def require_type(sharder: ModuleSharder[Any], module: nn.Module) -> None:
    """Raise TypeError unless the module is of the class that the sharder is for."""
    if not isinstance(module, sharder.module_type):
        names = type(sharder).__name__, sharder.module_type.__name__, type(module).__name__
        raise TypeError("{} shards {}, got {}".format(*names))


def require_tables(params: Collection[str], tables: Collection[str], module_fqn: str | None = None) -> None:
    """Raise ValueError unless a plan has the tables of the module, and no others."""
    where = f" of module {module_fqn!r}" if module_fqn else ""
    if set(params) != set(tables):
        raise ValueError(f"the plan{where} has tables {sorted(params)}, the module {sorted(tables)}")


def require_device_type(device_type: str) -> None:
    if device_type not in CAPABILITIES:
        raise ValueError(f"compute_device_type must be {' or '.join(map(repr, CAPABILITIES))}, got {device_type!r}")

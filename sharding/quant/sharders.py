"""Sharders of quantized collections: how a plan may cut their tables, and the sharded module of a plan.

Unlike sharders of trained collections these need no process group: one process holds all pieces, on several devices.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shardwise.embeddings import DataType
from shardwise.embeddings.quant import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    FeatureProcessedEmbeddingBagCollection,
    QuantizedCollection,
)
from shardwise.planner.layout import SERVING
from shardwise.sharding.plan.module_sharder import ModuleSharder, require_tables, require_type
from shardwise.sharding.plan.plan import ParameterSharding, ShardingType

from .collection import Envs, ShardedQuantizedCollection
from .fused_params import check_fused_params
from .modules import (
    ShardedQuantEmbeddingBagCollection,
    ShardedQuantEmbeddingCollection,
    ShardedQuantFeatureProcessedEmbeddingBagCollection,
)

M = TypeVar("M", bound=QuantizedCollection)

# what stands for a column of a table where plans ask for tensors; several columns of int4 rows share a byte
_DTYPES = {
    DataType.FP32: torch.float32, DataType.FP16: torch.float16, DataType.BF16: torch.bfloat16,
    DataType.NFP8: torch.float8_e4m3fn,
}  # fmt: skip


class BaseQuantEmbeddingSharder(ModuleSharder[M]):
    """A sharder of quantized collections: every type on every device.

    Args:
        fused_params: settings by the names of `fused_params`; the bounds check mode is the one that changes results,
            by default that of the collection.
        shardable_params: the only tables that are sharded, by default all; all of a module or none.

    Raises:
        ValueError: a setting is no good.
    """

    _module_type: type[M]
    _sharded_type: type[ShardedQuantizedCollection]

    def __init__(self, fused_params: dict[str, Any] | None = None, shardable_params: list[str] | None = None) -> None:
        super().__init__()
        check_fused_params(fused_params, type(self).__name__)
        self._fused_params, self._shardable_params = copy.deepcopy(fused_params), list(shardable_params or ())

    @property
    def module_type(self) -> type[M]:
        """What it shards."""
        return self._module_type

    @property
    def fused_params(self) -> dict[str, Any] | None:
        """As given."""
        return self._fused_params

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """All of them, on the CPU as on a GPU."""
        return [kind.value for kind in ShardingType if kind.value in SERVING.get(compute_device_type, {})]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """ "quant"; on a GPU also those whose rows stay in the memory of the host."""
        return list(SERVING.get(compute_device_type, {}).get(sharding_type, ()))

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """Tables by name, rows and columns of each as a parameter on meta.

        Raises:
            ValueError: `shardable_params` names some tables of the module and not others.
        """
        every = {config.name: config for config in module._configs}
        chosen = [name for name in every if not self._shardable_params or name in self._shardable_params]
        if chosen and len(chosen) != len(every):
            left = sorted(set(every) - set(chosen))
            raise ValueError(
                f"shardable_params names tables {chosen} of a {type(module).__name__} and not {left}: a module is"
                " sharded as a whole"
            )
        homes = module._homes()
        found = {}
        for t, (name, config) in enumerate(every.items()):
            table, dtype = homes[t].group.tables[homes[t].number], _DTYPES.get(config.data_type, torch.uint8)
            if name in chosen:
                rows = torch.empty(table.rows, table.dim, dtype=dtype, device="meta")
                found[name] = nn.Parameter(rows, requires_grad=False)
        return found

    def storage_usage(self, tensor: Tensor, compute_device_type: str, compute_kernel: str) -> dict[str, int]:
        """Bytes of a table `tensor` [R, D] by where they lie, four of each row for its scales.

        Raises:
            ValueError: the device type or the kernel is not served.
        """
        kernels = {kernel for served in SERVING.get(compute_device_type, {}).values() for kernel in served}
        if compute_kernel not in kernels:
            raise ValueError(f"kernel {compute_kernel!r} on {compute_device_type!r} is not one of {sorted(kernels)}")
        where = "hbm" if compute_device_type == "cuda" and compute_kernel == "quant" else "ddr"
        return {where: tensor.element_size() * tensor.numel() + 4 * tensor.shape[0]}

    def shard(
        self,
        module: M,
        params: Mapping[str, ParameterSharding],
        env: Envs,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> nn.Module:
        """The sharded form of a quantized collection; `module` itself stays as it is.

        Args:
            params: where its tables go: the placement of each shard has its device.
            env: `ShardingEnv.from_local(world_size, 0)`, or one for each type of device.
            device: where outputs are, by default the first device of the plan; "meta" leaves tables without memory.

        Raises:
            TypeError: the module is not of class `module_type`, or has a forward of its own.
            ValueError: the plan does not fit the module.
        """
        require_type(self, module)
        if type(module).forward is not self.module_type.forward:
            raise TypeError(
                f"{type(module).__name__} has a forward of its own, which {type(self).__name__} would lose: give it a"
                " sharder whose module_type it is"
            )
        tables = self.shardable_parameters(module)
        require_tables(params, tables, module_fqn)
        if not tables:
            return module
        sharded: Any = self._make(module, params, env, device)
        sharded._module_fqn = module_fqn
        return sharded.train(module.training)  # type: ignore[no-any-return]

    def _make(
        self, module: M, params: Mapping[str, ParameterSharding], env: Envs, device: torch.device | str | None
    ) -> nn.Module:
        return self._sharded_type(module, params, env, self._fused_params, device)


class QuantEmbeddingBagCollectionSharder(BaseQuantEmbeddingSharder[EmbeddingBagCollection]):
    """The sharder of the quantized `EmbeddingBagCollection`."""

    _module_type = EmbeddingBagCollection

    _sharded_type = ShardedQuantEmbeddingBagCollection


class QuantEmbeddingCollectionSharder(BaseQuantEmbeddingSharder[EmbeddingCollection]):
    """The sharder of the quantized `EmbeddingCollection`."""

    _module_type = EmbeddingCollection

    _sharded_type = ShardedQuantEmbeddingCollection


class QuantFeatureProcessedEmbeddingBagCollectionSharder(
    BaseQuantEmbeddingSharder[FeatureProcessedEmbeddingBagCollection]
):
    """The sharder of the quantized `FeatureProcessedEmbeddingBagCollection`."""

    _module_type = FeatureProcessedEmbeddingBagCollection

    _sharded_type = ShardedQuantFeatureProcessedEmbeddingBagCollection

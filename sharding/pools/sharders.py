"""Sharders of pools: `TensorPoolSharder` and `KeyedJaggedTensorPoolSharder`."""

from __future__ import annotations

import torch

from shardwise.embeddings.pools import KeyedJaggedTensorPool, TensorPool

from ..comms.env import ShardingEnv
from ..plan.module_sharder import ModuleSharder, require_type
from .inference import ShardedInferenceKeyedJaggedTensorPool, ShardedInferenceTensorPool
from .keyed_jagged_tensor_pool import ShardedKeyedJaggedTensorPool
from .plan import ObjectPoolShardingPlan
from .tensor_pool import ShardedTensorPool


class TensorPoolSharder(ModuleSharder[TensorPool]):
    """Cuts a `TensorPool` by rows: over ranks, or, by a plan of inference, over the devices of one process."""

    def __init__(self) -> None:
        super().__init__()

    @property
    def module_type(self) -> type[TensorPool]:
        """`TensorPool`."""
        return TensorPool

    def shard(  # type: ignore[override]
        self,
        module: TensorPool,
        plan: ObjectPoolShardingPlan,
        env: ShardingEnv,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> ShardedTensorPool | ShardedInferenceTensorPool:
        """The sharded pool, which begins with the module's rows; all ranks call this together.

        Raises:
            TypeError: the module is no `TensorPool`.
            RefusedValueError: the plan does not fit.
        """
        require_type(self, module)
        size = module.pool_size, module.dim, module.dtype
        if plan.inference:
            return ShardedInferenceTensorPool(env, *size, plan, module, device)
        return ShardedTensorPool(env, *size, plan, device, module=module)


class KeyedJaggedTensorPoolSharder(ModuleSharder[KeyedJaggedTensorPool]):
    """Cuts a `KeyedJaggedTensorPool` by rows: over ranks, or, by a plan of inference, over devices of one process."""

    def __init__(self) -> None:
        super().__init__()

    @property
    def module_type(self) -> type[KeyedJaggedTensorPool]:
        """`KeyedJaggedTensorPool`."""
        return KeyedJaggedTensorPool

    def shard(  # type: ignore[override]
        self,
        module: KeyedJaggedTensorPool,
        plan: ObjectPoolShardingPlan,
        env: ShardingEnv,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> ShardedKeyedJaggedTensorPool | ShardedInferenceKeyedJaggedTensorPool:
        """The sharded pool, which begins with the module's rows; all ranks call this together.

        Raises:
            TypeError: the module is no `KeyedJaggedTensorPool`.
            RefusedValueError: the plan does not fit.
        """
        require_type(self, module)
        made = module.pool_size, module.feature_max_lengths, module.values_dtype, module.is_weighted, env, plan
        if plan.inference:
            return ShardedInferenceKeyedJaggedTensorPool(*made, module, device)
        return ShardedKeyedJaggedTensorPool(*made, device, module=module)

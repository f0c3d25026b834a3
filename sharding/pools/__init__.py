"""Pools cut by rows: over ranks, which exchange ids and rows, and over the devices of one process."""

from .inference import LocalShardPool, ShardedInferenceKeyedJaggedTensorPool, ShardedInferenceTensorPool
from .keyed_jagged_tensor_pool import KeyedJaggedTensorPoolAwaitable, ShardedKeyedJaggedTensorPool
from .plan import ObjectPoolShardingPlan, ObjectPoolShardingType
from .sharded_pool import ShardedObjectPool
from .sharders import KeyedJaggedTensorPoolSharder, TensorPoolSharder
from .tensor_pool import ShardedTensorPool, TensorPoolAwaitable

__all__ = [
    "KeyedJaggedTensorPoolAwaitable",
    "KeyedJaggedTensorPoolSharder",
    "LocalShardPool",
    "ObjectPoolShardingPlan",
    "ObjectPoolShardingType",
    "ShardedInferenceKeyedJaggedTensorPool",
    "ShardedInferenceTensorPool",
    "ShardedKeyedJaggedTensorPool",
    "ShardedObjectPool",
    "ShardedTensorPool",
    "TensorPoolAwaitable",
    "TensorPoolSharder",
]

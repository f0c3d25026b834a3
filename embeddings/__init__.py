"""Single-device modules: table configs, collections, and the optimizers that run in their backward."""

from .bag_collection import EmbeddingBagCollection
from .config import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    data_type_to_dtype,
    dtype_to_data_type,
)
from .fused import FusedEmbeddingBagCollection, FusedEmbeddingCollection, fuse_embedding_optimizer
from .keyed_optimizer import (
    CombinedOptimizer,
    FusedOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    in_backward_optimizer_filter,
)
from .optimizers import RowWiseAdagrad, apply_optimizer_in_backward
from .sequence_collection import EmbeddingCollection

__all__ = [
    "BaseEmbeddingConfig",
    "CombinedOptimizer",
    "DataType",
    "EmbeddingBagCollection",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingConfig",
    "FusedEmbeddingBagCollection",
    "FusedEmbeddingCollection",
    "FusedOptimizer",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "PoolingType",
    "RowWiseAdagrad",
    "apply_optimizer_in_backward",
    "data_type_to_dtype",
    "dtype_to_data_type",
    "fuse_embedding_optimizer",
    "in_backward_optimizer_filter",
]

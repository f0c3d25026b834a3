"""Single-device modules: table configs, collections, and the optimizers that run in their backward."""

if __name__ == "embeddings":
    raise ImportError("import shardwise.embeddings: 'embeddings' alone would be a second copy of it")

from .collections.bag_collection import EmbeddingBagCollection
from .collections.feature_processors import (
    FeatureProcessedEmbeddingBagCollection,
    FeatureProcessor,
    FeatureProcessorDictWrapper,
    FeatureProcessorsCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from .collections.fused import FusedEmbeddingBagCollection, FusedEmbeddingCollection, fuse_embedding_optimizer
from .collections.position_weights import PositionWeightedProcessor
from .collections.sequence_collection import EmbeddingCollection
from .collections.towers import EmbeddingTower, EmbeddingTowerCollection, tower_input_params
from .config import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
    data_type_to_dtype,
    dtype_to_data_type,
    embedding_names_by_table,
)
from .interfaces import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
from .optim.clipping import GradientClipping, GradientClippingOptimizer
from .optim.fused_optimizer import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule
from .optim.keyed_optimizer import (
    CombinedOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    OptimizerWrapper,
    in_backward_optimizer_filter,
)
from .optim.optimizers import (
    RowWiseAdagrad,
    WeightDecayMode,
    apply_optimizer_in_backward,
    optimizer_of,
    optimizer_spec,
)
from .optim.rule_optimizer import (
    FTRL,
    LAMB,
    LarsSGD,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RuleOptimizer,
    define_optimizer,
)
from .optim.semi_sync import SemisyncOptimizer
from .optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage
from .policy import GradientCheckMode, LookupPolicy
from .tables.grouped import pick_features
from .tables.table_group import (
    NoFreeSlots,
    ResidentRows,
    RowStore,
    TableGroup,
)
from .tables.table_layout import LookupFeature, OptimizerSpec, TableShape

__all__ = [
    "FTRL",
    "LAMB",
    "BaseEmbeddingConfig",
    "CombinedOptimizer",
    "DataType",
    "EmbeddingBagCollection",
    "EmbeddingBagCollectionInterface",
    "EmbeddingBagConfig",
    "EmbeddingCollection",
    "EmbeddingCollectionInterface",
    "EmbeddingConfig",
    "EmbeddingTower",
    "EmbeddingTowerCollection",
    "EmptyFusedOptimizer",
    "FeatureProcessedEmbeddingBagCollection",
    "FeatureProcessor",
    "FeatureProcessorDictWrapper",
    "FeatureProcessorsCollection",
    "FusedEmbeddingBagCollection",
    "FusedEmbeddingCollection",
    "FusedOptimizer",
    "FusedOptimizerModule",
    "GradientCheckMode",
    "GradientClipping",
    "GradientClippingOptimizer",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "LarsSGD",
    "LookupFeature",
    "LookupPolicy",
    "NoFreeSlots",
    "OptimizerSpec",
    "OptimizerWrapper",
    "PartialRowWiseAdam",
    "PartialRowWiseLAMB",
    "PoolingType",
    "PositionWeightedModule",
    "PositionWeightedModuleCollection",
    "PositionWeightedProcessor",
    "ResidentRows",
    "RowStore",
    "RowWiseAdagrad",
    "RuleOptimizer",
    "SemisyncOptimizer",
    "TableGroup",
    "TableShape",
    "WarmupOptimizer",
    "WarmupPolicy",
    "WarmupStage",
    "WeightDecayMode",
    "apply_optimizer_in_backward",
    "data_type_to_dtype",
    "define_optimizer",
    "dtype_to_data_type",
    "embedding_names_by_table",
    "fuse_embedding_optimizer",
    "in_backward_optimizer_filter",
    "optimizer_of",
    "optimizer_spec",
    "pick_features",
    "tower_input_params",
]

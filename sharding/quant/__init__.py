"""Quantized tables over the devices of one process: sharders, sharded modules, and what of a table each buffer is."""

from .fused_params import (
    FUSED_PARAM_BOUNDS_CHECK_MODE,
    FUSED_PARAM_LENGTHS_TO_OFFSETS_LOOKUP,
    FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS,
    FUSED_PARAM_REGISTER_TBE_BOOL,
    FUSED_PARAM_TBE_ROW_ALIGNMENT,
)
from .inspect import (
    WeightSpec,
    get_all_torchrec_modules,
    get_path_device_tuples,
    get_tbe_specs_from_sharded_module,
    get_tbes_from_sharded_module,
    sharded_tbes_weights_spec,
)
from .modules import (
    ShardedQuantEmbeddingBagCollection,
    ShardedQuantEmbeddingCollection,
    ShardedQuantFeatureProcessedEmbeddingBagCollection,
)
from .sharders import (
    BaseQuantEmbeddingSharder,
    QuantEmbeddingBagCollectionSharder,
    QuantEmbeddingCollectionSharder,
    QuantFeatureProcessedEmbeddingBagCollectionSharder,
)

__all__ = [
    "FUSED_PARAM_BOUNDS_CHECK_MODE",
    "FUSED_PARAM_LENGTHS_TO_OFFSETS_LOOKUP",
    "FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS",
    "FUSED_PARAM_REGISTER_TBE_BOOL",
    "FUSED_PARAM_TBE_ROW_ALIGNMENT",
    "BaseQuantEmbeddingSharder",
    "QuantEmbeddingBagCollectionSharder",
    "QuantEmbeddingCollectionSharder",
    "QuantFeatureProcessedEmbeddingBagCollectionSharder",
    "ShardedQuantEmbeddingBagCollection",
    "ShardedQuantEmbeddingCollection",
    "ShardedQuantFeatureProcessedEmbeddingBagCollection",
    "WeightSpec",
    "get_all_torchrec_modules",
    "get_path_device_tuples",
    "get_tbe_specs_from_sharded_module",
    "get_tbes_from_sharded_module",
    "sharded_tbes_weights_spec",
]

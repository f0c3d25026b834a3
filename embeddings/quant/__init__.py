"""Quantized tables for inference: collections that look like the trained ones and hold a quarter of their bytes."""

from .bag_collection import EmbeddingBagCollection, FeatureProcessedEmbeddingBagCollection
from .collection import QuantizedCollection, QuantizedRows
from .formats import QuantConfig, quantized_data_type, table_format
from .from_float import set_pruning_data
from .managed_collision import (
    QuantManagedCollisionEmbeddingBagCollection,
    QuantManagedCollisionEmbeddingCollection,
)
from .prepare import (
    for_each_module_of_type_do,
    meta_to_cpu_placement,
    quant_prep_customize_row_alignment,
    quant_prep_enable_cache_features_order,
    quant_prep_enable_quant_state_dict_split_scale_bias,
    quant_prep_enable_quant_state_dict_split_scale_bias_for_types,
    quant_prep_enable_register_tbes,
    quantize_state_dict,
)
from .sequence_collection import EmbeddingCollection
from .tables import QuantizedTable, QuantizedTables, TableWeights, quantized_rows
from .torchrec_state import (
    FUSED_8BIT,
    FUSED_NBIT,
    INFERENCE,
    FusedLayout,
    fuse_rows,
    inference_layout,
    load_torchrec_state_dict,
    split_rows,
    torchrec_state_dict,
)

__all__ = [
    "FUSED_8BIT",
    "FUSED_NBIT",
    "INFERENCE",
    "EmbeddingBagCollection",
    "EmbeddingCollection",
    "FeatureProcessedEmbeddingBagCollection",
    "FusedLayout",
    "QuantConfig",
    "QuantManagedCollisionEmbeddingBagCollection",
    "QuantManagedCollisionEmbeddingCollection",
    "QuantizedCollection",
    "QuantizedRows",
    "QuantizedTable",
    "QuantizedTables",
    "TableWeights",
    "for_each_module_of_type_do",
    "fuse_rows",
    "inference_layout",
    "load_torchrec_state_dict",
    "meta_to_cpu_placement",
    "quant_prep_customize_row_alignment",
    "quant_prep_enable_cache_features_order",
    "quant_prep_enable_quant_state_dict_split_scale_bias",
    "quant_prep_enable_quant_state_dict_split_scale_bias_for_types",
    "quant_prep_enable_register_tbes",
    "quantize_state_dict",
    "quantized_data_type",
    "quantized_rows",
    "set_pruning_data",
    "split_rows",
    "table_format",
    "torchrec_state_dict",
]

"""FBGEMM's modules of tables, and of what is pooled from them, over our lookups and updates.

Constructors, methods and state dicts are upstream's.
"""

from .dense import DenseTableBatchedEmbeddingBagsCodegen
from .inference import IntNBitTableBatchedEmbeddingBagsCodegen
from .inference_layout import (
    align_to_cacheline,
    nbit_construct_split_state,
    rounded_row_size_in_bytes,
    unpadded_row_size_in_bytes,
)
from .optimizer_settings import (
    CounterBasedRegularizationDefinition,
    CounterWeightDecayMode,
    CowClipDefinition,
    DoesNotHavePrefix,
    EmainplaceModeDefinition,
    EnsembleModeDefinition,
    GlobalWeightDecayDefinition,
    GradSumDecay,
    LearningRateMode,
    StepMode,
    TailIdThreshold,
    UserEnabledConfigDefinition,
)
from .pooled_order import PermutePooledEmbeddings, PermutePooledEmbeddingsSplit
from .requests import (
    TBERequest,
    b_indices,
    generate_requests,
    get_device,
    get_offsets_from_dense,
    get_table_batched_offsets_from_dense,
    round_up,
    tensor_to_device,
    to_device,
)
from .training import SplitTableBatchedEmbeddingBagsCodegen
from .unary import BatchedUnaryEmbeddingBag, wrap_weight_to_parameter

__all__ = [
    "BatchedUnaryEmbeddingBag",
    "CounterBasedRegularizationDefinition",
    "CounterWeightDecayMode",
    "CowClipDefinition",
    "DenseTableBatchedEmbeddingBagsCodegen",
    "DoesNotHavePrefix",
    "EmainplaceModeDefinition",
    "EnsembleModeDefinition",
    "GlobalWeightDecayDefinition",
    "GradSumDecay",
    "IntNBitTableBatchedEmbeddingBagsCodegen",
    "LearningRateMode",
    "PermutePooledEmbeddings",
    "PermutePooledEmbeddingsSplit",
    "SplitTableBatchedEmbeddingBagsCodegen",
    "StepMode",
    "TBERequest",
    "TailIdThreshold",
    "UserEnabledConfigDefinition",
    "align_to_cacheline",
    "b_indices",
    "generate_requests",
    "get_device",
    "get_offsets_from_dense",
    "get_table_batched_offsets_from_dense",
    "nbit_construct_split_state",
    "round_up",
    "rounded_row_size_in_bytes",
    "tensor_to_device",
    "to_device",
    "unpadded_row_size_in_bytes",
    "wrap_weight_to_parameter",
]

"""FBGEMM's modules of tables, with upstream's constructors, methods and state dicts, over our lookups and updates."""

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

__all__ = [
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
]

"""FBGEMM's modules of tables by name, over shardwise's table groups and fused optimizers."""

from .dense import DenseTableBatchedEmbeddingBagsCodegen
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
    "LearningRateMode",
    "SplitTableBatchedEmbeddingBagsCodegen",
    "StepMode",
    "TBERequest",
    "TailIdThreshold",
    "UserEnabledConfigDefinition",
    "b_indices",
    "generate_requests",
    "get_device",
    "get_offsets_from_dense",
    "get_table_batched_offsets_from_dense",
    "round_up",
    "tensor_to_device",
    "to_device",
]

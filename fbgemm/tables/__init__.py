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
    "TailIdThreshold",
    "UserEnabledConfigDefinition",
    "align_to_cacheline",
    "nbit_construct_split_state",
    "rounded_row_size_in_bytes",
    "unpadded_row_size_in_bytes",
]

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
    "TailIdThreshold",
    "UserEnabledConfigDefinition",
]

"""Models over embedding collections: DLRM and DeepFM, their parts, and the metrics to judge them by."""

if __name__ == "models":
    raise ImportError("import shardwise.models: 'models' alone would be a second copy of it")

from .crossnet import CrossNet, LowRankCrossNet, LowRankMixtureCrossNet, VectorCrossNet
from .deepfm import DeepFM, FactorizationMachine, FMInteractionArch, SimpleDeepFMNN, SimpleDeepFMNNWrapper
from .dlrm import DLRM, DenseArch, DLRMTrain, InteractionArch, OverArch, SparseArch
from .dlrm_interactions import (
    DLRM_DCN,
    DLRM_Projection,
    DLRMWrapper,
    InteractionDCNArch,
    InteractionProjectionArch,
    choose,
)
from .lazy import LazyModuleExtensionMixin, lazy_apply
from .metrics import auc, log_loss, normalized_entropy
from .mlp import MLP, Perceptron, SwishLayerNorm
from .streaming import MetricWindow, StreamingAUC, StreamingMetric, StreamingNE
from .transformer import DLRM_Transformer, InteractionTransformerArch

__all__ = [
    "DLRM",
    "DLRM_DCN",
    "MLP",
    "CrossNet",
    "DLRMTrain",
    "DLRMWrapper",
    "DLRM_Projection",
    "DLRM_Transformer",
    "DeepFM",
    "DenseArch",
    "FMInteractionArch",
    "FactorizationMachine",
    "InteractionArch",
    "InteractionDCNArch",
    "InteractionProjectionArch",
    "InteractionTransformerArch",
    "LazyModuleExtensionMixin",
    "LowRankCrossNet",
    "LowRankMixtureCrossNet",
    "MetricWindow",
    "OverArch",
    "Perceptron",
    "SimpleDeepFMNN",
    "SimpleDeepFMNNWrapper",
    "SparseArch",
    "StreamingAUC",
    "StreamingMetric",
    "StreamingNE",
    "SwishLayerNorm",
    "VectorCrossNet",
    "auc",
    "choose",
    "lazy_apply",
    "log_loss",
    "normalized_entropy",
]

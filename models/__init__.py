"""Models over embedding collections: DLRM, its parts, and the metrics to judge it by."""

from .activation import SwishLayerNorm
from .dlrm import DLRM, DenseArch, DLRMTrain, InteractionArch, OverArch, SparseArch
from .metrics import auc, log_loss, normalized_entropy
from .mlp import MLP, Perceptron

__all__ = [
    "DLRM",
    "MLP",
    "DLRMTrain",
    "DenseArch",
    "InteractionArch",
    "OverArch",
    "Perceptron",
    "SparseArch",
    "SwishLayerNorm",
    "auc",
    "log_loss",
    "normalized_entropy",
]

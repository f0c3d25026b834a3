"""Training loops in which the work of several batches overlaps, with the bits of a plain loop."""

from .base import TrainPipeline, TrainPipelineBase
from .compiled import TorchCompileConfig, TrainPipelinePT2, TrainPipelineSparseDistCompAutograd
from .fused_sparse_dist import EvalPipelineFusedSparseDist, TrainPipelineFusedSparseDist
from .loading import DataLoadingThread
from .semi_sync import TrainPipelineSemiSync
from .sparse_dist import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineSparseDist,
    TrainPipelineSparseDistLite,
)
from .staged import PipelineStage, SparseDataDistUtil, StagedTrainPipeline

__all__ = [
    "DataLoadingThread",
    "EvalPipelineFusedSparseDist",
    "EvalPipelineSparseDist",
    "PipelineStage",
    "PrefetchTrainPipelineSparseDist",
    "SparseDataDistUtil",
    "StagedTrainPipeline",
    "TorchCompileConfig",
    "TrainPipeline",
    "TrainPipelineBase",
    "TrainPipelineFusedSparseDist",
    "TrainPipelinePT2",
    "TrainPipelineSemiSync",
    "TrainPipelineSparseDist",
    "TrainPipelineSparseDistCompAutograd",
    "TrainPipelineSparseDistLite",
]

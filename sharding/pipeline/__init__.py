"""Training loops in which the work of several batches overlaps, with the bits of a plain loop."""

from .base import TrainPipeline, TrainPipelineBase
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
    "TrainPipeline",
    "TrainPipelineBase",
    "TrainPipelineFusedSparseDist",
    "TrainPipelineSemiSync",
    "TrainPipelineSparseDist",
    "TrainPipelineSparseDistLite",
]

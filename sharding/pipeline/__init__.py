"""Training loops in which the work of several batches overlaps, with the bits of a plain loop."""

from .base import TrainPipeline, TrainPipelineBase
from .loading import DataLoadingThread
from .sparse_dist import EvalPipelineSparseDist, PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist
from .staged import PipelineStage, SparseDataDistUtil, StagedTrainPipeline

__all__ = [
    "DataLoadingThread",
    "EvalPipelineSparseDist",
    "PipelineStage",
    "PrefetchTrainPipelineSparseDist",
    "SparseDataDistUtil",
    "StagedTrainPipeline",
    "TrainPipeline",
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
]

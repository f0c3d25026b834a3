"""Training loops in which the work of several batches overlaps, with the bits of a plain loop."""

from .base import TrainPipeline, TrainPipelineBase
from .sparse_dist import EvalPipelineSparseDist, PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist

__all__ = [
    "EvalPipelineSparseDist",
    "PrefetchTrainPipelineSparseDist",
    "TrainPipeline",
    "TrainPipelineBase",
    "TrainPipelineSparseDist",
]

"""Readers of click data, each an iterator of `Batch`: generated clicks, MovieLens, Criteo, random batches; splits."""

if __name__ == "data":
    raise ImportError("import shardwise.data: 'data' alone would be a second copy of it")

from .batch import Batch
from .clicks import ClickFeature, Clicks
from .criteo import Criteo
from .folder import open_folder
from .movielens import MovieLens
from .random_batches import RandomRecDataset
from .record import LookedUp, record_trace, tables_in
from .source import Position, Source, rank_slice, restore_position
from .splits import idx_split_train_val, rand_split_train_val
from .traces import Trace, TracedBatch, TracedTable, TraceWriter

__all__ = [
    "Batch",
    "ClickFeature",
    "Clicks",
    "Criteo",
    "LookedUp",
    "MovieLens",
    "Position",
    "RandomRecDataset",
    "Source",
    "Trace",
    "TraceWriter",
    "TracedBatch",
    "TracedTable",
    "idx_split_train_val",
    "open_folder",
    "rand_split_train_val",
    "rank_slice",
    "record_trace",
    "restore_position",
    "tables_in",
]

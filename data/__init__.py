"""Readers of click data, each an iterator of `Batch`: generated clicks, MovieLens, Criteo, random batches; splits."""

from .batch import Batch
from .clicks import ClickFeature, Clicks
from .criteo import Criteo
from .folder import open_folder
from .movielens import MovieLens
from .position import Position, restore_position
from .random_batches import RandomRecDataset
from .source import Source, rank_slice
from .splits import idx_split_train_val, rand_split_train_val

__all__ = [
    "Batch",
    "ClickFeature",
    "Clicks",
    "Criteo",
    "MovieLens",
    "Position",
    "RandomRecDataset",
    "Source",
    "idx_split_train_val",
    "open_folder",
    "rand_split_train_val",
    "rank_slice",
    "restore_position",
]

"""Readers of click data, each an iterator of `Batch`: generated clicks, MovieLens, Criteo."""

from .batch import Batch
from .clicks import ClickFeature, Clicks
from .criteo import Criteo
from .folder import open_folder
from .movielens import MovieLens
from .position import Position, restore_position
from .source import Source, rank_slice

__all__ = [
    "Batch",
    "ClickFeature",
    "Clicks",
    "Criteo",
    "MovieLens",
    "Position",
    "Source",
    "open_folder",
    "rank_slice",
    "restore_position",
]

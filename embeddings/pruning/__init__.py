"""Embedding pruning in training: tables with fewer rows than ids, whose rows go to the ids that are used most."""

from .address_lookup import (
    check_addresses,
    counts_at,
    first_addresses,
    id_counts,
    prune_rows,
    prunes_at,
)
from .itep_embedding_modules import ITEPEmbeddingBagCollection, ITEPEmbeddingCollection
from .itep_modules import GenericITEPModule
from .pruning_logger import PruningLogBase, PruningLogger, PruningLoggerDefault

__all__ = [
    "GenericITEPModule",
    "ITEPEmbeddingBagCollection",
    "ITEPEmbeddingCollection",
    "PruningLogBase",
    "PruningLogger",
    "PruningLoggerDefault",
    "check_addresses",
    "counts_at",
    "first_addresses",
    "id_counts",
    "prune_rows",
    "prunes_at",
]

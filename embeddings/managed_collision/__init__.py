"""Managed collision: tables that give their rows to the ids that are worth them, out of a range of any size.

`MCHManagedCollisionModule` maps the ids of a table to its rows, an eviction policy says which ids have one, and the
collections here are those of embeddings/ behind such maps. Names are TorchRec's.
"""

from .behind_maps import BehindFixedMaps, BehindMaps, require_tables_of_maps
from .collection import ManagedCollisionCollection, apply_mc_method_to_jt_dict, change_ids
from .embedding import (
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    fresh_rows,
)
from .mch import MCHManagedCollisionModule
from .modules import ManagedCollisionModule
from .policies import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    MCHEvictionPolicy,
    MCHEvictionPolicyMetadataInfo,
    average_threshold_filter,
    dynamic_threshold_filter,
    probabilistic_threshold_filter,
)

__all__ = [
    "BaseManagedCollisionEmbeddingCollection",
    "BehindFixedMaps",
    "BehindMaps",
    "DistanceLFU_EvictionPolicy",
    "LFU_EvictionPolicy",
    "LRU_EvictionPolicy",
    "MCHEvictionPolicy",
    "MCHEvictionPolicyMetadataInfo",
    "MCHManagedCollisionModule",
    "ManagedCollisionCollection",
    "ManagedCollisionEmbeddingBagCollection",
    "ManagedCollisionEmbeddingCollection",
    "ManagedCollisionModule",
    "apply_mc_method_to_jt_dict",
    "average_threshold_filter",
    "change_ids",
    "dynamic_threshold_filter",
    "fresh_rows",
    "probabilistic_threshold_filter",
    "require_tables_of_maps",
]

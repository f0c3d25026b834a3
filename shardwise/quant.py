"""Quantized collections under the names of the trained ones: `shardwise.quant.EmbeddingBagCollection`."""

from __future__ import annotations

from .embeddings.quant import (
    FUSED_8BIT,
    FUSED_NBIT,
    INFERENCE,
    EmbeddingBagCollection,
    EmbeddingCollection,
    FeatureProcessedEmbeddingBagCollection,
    FusedLayout,
    QuantConfig,
    fuse_rows,
    inference_layout,
    load_torchrec_state_dict,
    split_rows,
    torchrec_state_dict,
)

__all__ = [
    "FUSED_8BIT",
    "FUSED_NBIT",
    "INFERENCE",
    "EmbeddingBagCollection",
    "EmbeddingCollection",
    "FeatureProcessedEmbeddingBagCollection",
    "FusedLayout",
    "QuantConfig",
    "fuse_rows",
    "inference_layout",
    "load_torchrec_state_dict",
    "split_rows",
    "torchrec_state_dict",
]

"""Values of rows that begin anew: those of `init_fn`, by a seed made of what is known everywhere.

So a run that goes on from a checkpoint, and every rank that holds columns of a table, makes the same rows.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from shardwise.embeddings.config import BaseEmbeddingConfig


def fresh_rows(config: BaseEmbeddingConfig, rows: int, step: int, *, first_row: int = 0) -> Tensor:
    """New values [rows, D] fp32 on the CPU, for slots of the shard that begins with `first_row`, in batch `step`.

    The global random generator is left as it was.
    """
    text = f"{config.name}:{first_row}:{step}"
    seed = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
    generator = torch.default_generator
    state = generator.get_state()
    generator.manual_seed(seed % 2**63)
    try:
        values = torch.empty(rows, config.embedding_dim, device="cpu")
        assert config.init_fn is not None
        # a function that fills in place may return None
        made = config.init_fn(values)
    finally:
        generator.set_state(state)
    return values if made is None else made

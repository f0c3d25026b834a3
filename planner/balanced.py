"""A first planner: whole tables on ranks, largest first, each to the rank with the least so far.

The slowest rank decides a step, so the load is what a rank must do for a table in one step: rows read and written, of
`dim` columns for each feature that looks it up. Memory breaks ties. (Graham 1969, longest processing time first: at
most 4/3 - 1/(3W) of the best.)
"""

from __future__ import annotations

from collections.abc import Sequence

from shardwise.embeddings.config import BaseEmbeddingConfig
from shardwise.sharding.layout import Shard, table_wise


def balanced_table_wise(tables: Sequence[BaseEmbeddingConfig], world_size: int) -> list[Shard]:
    """Place each table whole on one of `world_size` ranks. Equal inputs give equal plans on every rank.

    Raises:
        ValueError: there are no ranks.
    """
    if world_size < 1:
        raise ValueError(f"a plan needs at least one rank, got {world_size}")
    work, memory = [0] * world_size, [0] * world_size
    placed: dict[str, int] = {}
    for table in sorted(tables, key=lambda t: (-_work(t), -_elements(t), t.name)):
        rank = min(range(world_size), key=lambda r: (work[r], memory[r], r))
        placed[table.name] = rank
        work[rank] += _work(table)
        memory[rank] += _elements(table)
    return [
        shard
        for table in tables
        for shard in table_wise(table.name, table.num_embeddings, table.embedding_dim, placed[table.name])
    ]


def _work(table: BaseEmbeddingConfig) -> int:
    return table.embedding_dim * max(1, table.num_features())


def _elements(table: BaseEmbeddingConfig) -> int:
    return table.num_embeddings * table.embedding_dim

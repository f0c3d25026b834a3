"""The balanced planner: every table once, never far from the best, the same on every rank."""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwise import EmbeddingBagConfig
from shardwise.planner import balanced_table_wise
from shardwise.sharding.layout import Shard, validate

SETS = Path(os.environ.get("SHARDWISE_TABLES", Path(__file__).parents[2] / "shared" / "tables"))


def config(name: str, rows: int, dim: int, features: int = 1) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(rows, dim, name, feature_names=[f"{name}_{n}" for n in range(features)])


def work(table: EmbeddingBagConfig) -> int:
    return table.embedding_dim * table.num_features()


def loads(tables: list[EmbeddingBagConfig], shards: list[Shard], world: int) -> list[int]:
    """Columns that each rank looks up."""
    rank_of = {shard.table: shard.rank for shard in shards}
    return [sum(work(t) for t in tables if rank_of[t.name] == rank) for rank in range(world)]


def best_load(tables: list[EmbeddingBagConfig], world: int) -> int:
    """The smallest possible load of the slowest rank, by trying all placements."""
    return min(
        max(sum(work(t) for t, at in zip(tables, places, strict=True) if at == rank) for rank in range(world))
        for places in itertools.product(range(world), repeat=len(tables))
    )


TABLES = st.lists(st.tuples(st.integers(1, 99), st.integers(1, 64), st.integers(1, 3)), min_size=1, max_size=6)


@settings(deadline=None)
@given(TABLES, st.integers(1, 4))
def test_a_plan_covers_every_table_and_is_within_four_thirds_of_the_best(
    sizes: list[tuple[int, int, int]], world: int
) -> None:
    tables = [config(f"t{n}", *size) for n, size in enumerate(sizes)]
    shards = balanced_table_wise(tables, world)
    validate(shards, {t.name: (t.num_embeddings, t.embedding_dim) for t in tables}, world)
    assert [shard.table for shard in shards] == [t.name for t in tables]
    # Graham's bound, in integers
    assert max(loads(tables, shards, world)) * 3 * world <= best_load(tables, world) * (4 * world - 1)


@settings(deadline=None)
@given(TABLES, st.integers(1, 4), st.randoms(use_true_random=False))
def test_a_plan_depends_on_the_tables_and_not_on_their_order(
    sizes: list[tuple[int, int, int]], world: int, shuffler: random.Random
) -> None:
    tables = [config(f"t{n}", *size) for n, size in enumerate(sizes)]
    shuffled = list(tables)
    shuffler.shuffle(shuffled)
    assert balanced_table_wise(tables, world) == balanced_table_wise(tables, world)
    assert set(balanced_table_wise(tables, world)) == set(balanced_table_wise(shuffled, world))


def test_one_rank_gets_everything_and_spare_ranks_nothing() -> None:
    tables = [config("a", 9, 8), config("b", 7, 4), config("c", 5, 2)]
    assert {shard.rank for shard in balanced_table_wise(tables, 1)} == {0}
    assert [shard.rank for shard in balanced_table_wise(tables, 5)] == [0, 1, 2]
    assert balanced_table_wise([], 3) == []
    with pytest.raises(ValueError, match="at least one rank, got 0"):
        balanced_table_wise(tables, 0)


def test_memory_breaks_ties_of_work() -> None:
    tables = [config("huge", 10**6, 8), config("big", 10**5, 8), config("small", 10, 8), config("tiny", 1, 8)]
    by_name = {shard.table: shard.rank for shard in balanced_table_wise(tables, 2)}
    # equal work: the smallest tables join the rank whose table is smaller first
    assert by_name == {"huge": 0, "big": 1, "small": 1, "tiny": 0}


@pytest.mark.skipif(not SETS.is_dir(), reason="no $SHARDWISE_TABLES or ../shared/tables")
@pytest.mark.parametrize("path", sorted(set(SETS.glob("*.json")) - {SETS / "INDEX.json"}), ids=lambda path: path.stem)
def test_published_table_sets_are_balanced(path: Path) -> None:
    described = json.loads(path.read_text())
    tables = [
        config(f"{t['name']}/{n}", t["num_embeddings"], t["embedding_dim"]) for n, t in enumerate(described["tables"])
    ]
    for world in (1, 8, 64):
        shards = balanced_table_wise(tables, world)
        validate(shards, {t.name: (t.num_embeddings, t.embedding_dim) for t in tables}, world)
        bound = max(sum(map(work, tables)) / world, max(map(work, tables)))
        assert max(loads(tables, shards, world)) <= bound * (4 / 3) + max(map(work, tables)) / 3

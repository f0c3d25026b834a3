"""What the tests of tiers share: mixes with tiers, tables in small chunks, and what two sharded collections hold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import sharding_mixes as mixes
from sharding_mixes import Mix
from torch import Tensor

from shardwise.embeddings.tiers import cached_rows
from shardwise.planner.layout import Tier
from shardwise.sharding.engine import reshard


def with_tier(mix: Mix, tier: Tier | None) -> Mix:
    """The same tables with a tier, or without."""
    tables = tuple(replace(table, options=replace(table.options, tier=tier)) for table in mix.tables)
    return replace(mix, tables=tables)


def with_strategy(mix: Mix, strategy: str) -> Mix:
    """The same tables cut otherwise."""
    return replace(mix, tables=tuple(replace(table, strategy=strategy) for table in mix.tables))


@contextmanager
def small_chunks() -> Iterator[None]:
    """A block in which tables of some rows have several chunks."""
    with patch.object(cached_rows, "_CHUNK_BYTES", 64 * 5), patch.object(reshard, "_CHUNK_BYTES", 64 * 5):
        yield


def held_of(model: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """`mixes.held` of a collection whose tables may have tiers."""
    with model.shards.whole():
        return mixes.held(model)


def expect_equal(one: Any, other: Any) -> None:
    """Two sharded collections hold the same numbers, in whatever tier."""
    for mine, theirs in zip(held_of(one), held_of(other), strict=True):
        assert mixes.same_tensors(mine, theirs)


def misses(model: Any) -> int:
    """Rows that came to slots of this rank."""
    return sum(counts.misses for store in model._tables.stores() for counts in store.counts)

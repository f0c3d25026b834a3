"""Tables of which some rows lie below the device: the bits of tables that lie there whole, whatever the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sharding_mixes as mixes
from ranks import run_ranks
from torch import Tensor

from shardwise.embeddings.tiers import Backing, HostRecords
from shardwise.planner.layout import Tier

pytestmark = pytest.mark.ranks


def tiered(mix: mixes.Mix, tier: Tier) -> mixes.Mix:
    """The same tables with few rows on the device."""
    tables = tuple(replace(table, options=replace(table.options, tier=tier)) for table in mix.tables)
    return replace(mix, tables=tables)


def same_as_whole(seed: int, optimizer: str, tier: Tier) -> int:
    """Rows that came to this rank's slots."""
    mix, env = mixes.mix_of(seed, pooled=seed % 2 == 0), mixes.environment()
    expected = mixes.train_sharded(mix, optimizer, 6, env)
    cached = tiered(mix, tier)
    model = mixes.shard(cached, mixes.build(cached, optimizer), env)
    run = mixes.train(cached, model, mixes.batches_of_rank(cached, range(6)), False)
    with model.shards.whole():
        run.weights, run.states = mixes.held(model)
    mixes.expect_same_runs(expected, run)
    return sum(counts.misses for group in model._tables.all_groups() for counts in group.store.counts)


def rows_that_moving_reads() -> int:
    """What comes from below a table that is moved to where it is."""
    read = 0

    class Counted(HostRecords):
        @property
        def records(self) -> Any:
            # rows come and go by calls
            return None

        def read(self, rows: Tensor, out: Tensor) -> None:
            nonlocal read
            read += rows.numel()
            super().read(rows, out)

    def below(table: str, rows: int, record_bytes: int) -> Backing:
        return Counted(rows, record_bytes)

    mix = tiered(mixes.mix_of(0, pooled=True), Tier(2, below, max_slots=1.0))
    model = mixes.shard(mix, mixes.build(mix, "adagrad"), mixes.environment())
    read = 0
    model.to("cpu")
    return read


def test_a_table_that_stays_where_it_is_brings_no_rows() -> None:
    """`DistributedModelParallel` moves every model to its device: the rows of all ranks' tables came for that, twice,
    into memory that a table larger than the device does not have."""
    assert run_ranks(1, rows_that_moving_reads) == [0]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("below", ["ram", "file"])
def test_cached_tables_train_to_the_bits_of_whole_ones(world: int, below: str, tmp_path: Path) -> None:
    folder = str(tmp_path) if below == "file" else None
    for seed in range(6):
        ram_rows = 3 if folder and seed % 2 else None
        tier = Tier(2, below, folder, max_slots=0.9, ram_rows=ram_rows)
        assert sum(run_ranks(world, same_as_whole, seed, list(mixes.RULES)[seed], tier)) > 0

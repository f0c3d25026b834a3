"""On a GPU a step of tables with rows in memory waits for no more than one of resident tables; what more it launches.

There is none here: kernels are counted, and references decide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
from ranks import run_ranks
from sharding_mixes import environment

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    ShardingEnv,
    ShardingPlan,
    Tier,
    apply_optimizer_in_backward,
    construct_module_sharding_plan,
    shard_modules,
)
from shardwise.embeddings.tiers import Residency, Span, backing
from shardwise.embeddings.tiers.policies import AgedLfu, Policy, lfu, lru
from shardwise.kernels import Feature, pack_features
from shardwise.kernels._op import HAS_TRITON, INTERPRETED
from shardwise.kernels.rows import Lookups
from shardwise.perf.counts.launches import CUDA, Counted, use_fake_cuda
from shardwise.planner import layout
from shardwise.planner.layout import TableOptions
from shardwise.sharding import table_wise
from shardwise.sharding.engine import tables as sharded
from shardwise.sharding.modules.sharded_collections import ShardedEmbeddingBagCollection

pytestmark = pytest.mark.skipif(not HAS_TRITON or INTERPRETED, reason="needs triton, not its interpreter")
TABLES, ROWS = 3, 1000
# of a batch: rows found, listed, victims picked by four digits, taken, places; moves of all tables; its release
OF_BATCH = Counter({"count_digits": 4})
OF_BATCH.update(["claim_rows", "list_rows", "pick", "take_slots", "place_rows", "move_rows", "release_slots"])


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    """Memory is not filled: that would be more launches."""
    yield


class Stream:
    """One of a device that has done all it was given."""

    def record_event(self) -> Stream:
        return self

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        raise AssertionError("nobody waits for what is not here")


@contextmanager
def gpu(counts: Counted) -> Iterator[None]:
    """A device that is not there, with streams, and memory that is pinned for it."""
    stream = Stream()
    with (
        use_fake_cuda(counts),
        patch.object(torch.cuda, "current_stream", lambda device=None: stream),
        patch.object(torch.Tensor, "record_stream", lambda tensor, stream: None),
        patch.object(torch.Tensor, "is_pinned", lambda tensor: not tensor.is_cuda),
        patch.object(backing, "_pin", lambda records: None),
    ):
        yield


def step_of(
    tier: Tier | None, dims: Sequence[int] = (8,) * TABLES, *, lazily: bool = False
) -> tuple[Counter[str], Counter[str]]:
    """Launches and waits of the third step; rows are there from the start, or made when they are needed."""
    tables = [EmbeddingBagConfig(ROWS, dims[n], f"t{n}", feature_names=[f"f{n}"]) for n in range(TABLES)]
    # there are no meta tensors beside those of a device that is not there
    with gpu(counts := Counted()), patch.object(sharded, "is_lazy", lambda config, weight: lazily):
        module: Any = EmbeddingBagCollection(tables, device=CUDA)
        apply_optimizer_in_backward(RowWiseAdagrad, module.parameters(), {"lr": 0.1})
        plan = construct_module_sharding_plan(
            module, {table.name: table_wise(rank=0) for table in tables}, local_size=1, world_size=1, device_type="cuda"
        )
        for each in plan.values():
            each.tier = tier
        module = shard_modules(module, ShardingEnv.from_local(1, 0), CUDA, ShardingPlan({"": plan}))
        for number in range(3):
            ids = torch.arange(60) * 7 % 50 + torch.arange(60) // 20 + 90 * number
            batch = KeyedJaggedTensor(
                [f"f{n}" for n in range(TABLES)], ids.to(CUDA), offsets=(torch.arange(31) * 2).to(CUDA)
            )
            counts.clear()
            module(batch).values().sum().backward()
        found = Counter(counts.kernels), Counter(counts.syncs)
        del module
        return found


def test_a_step_waits_for_nothing_more_than_one_of_resident_tables() -> None:
    (resident, waits), (cached, cached_waits) = step_of(None), step_of(Tier(300))
    assert cached_waits == waits
    assert cached - resident == OF_BATCH
    assert not resident - cached


def test_tables_of_other_dims_have_moves_of_their_own() -> None:
    dims = 8, 16, 16
    (resident, waits), (cached, cached_waits) = step_of(None, dims), step_of(Tier(300), dims)
    assert cached_waits == waits
    assert cached - resident == OF_BATCH + Counter(["move_rows"])


def test_rows_that_are_made_when_they_are_needed_wait_for_nothing() -> None:
    (resident, waits), (cached, cached_waits) = step_of(None), step_of(Tier(300), lazily=True)
    assert cached_waits == waits
    # which of the rows that come have no record, and the rows of each table
    made = Counter({"make_rows": TABLES, "torch where": 1, "torch fill_": 1})
    assert cached - resident == OF_BATCH + made


def waits_of_rank() -> list[Counter[str]]:
    """Of a step over two ranks: without a tier, with room for sure, and where a batch might find none."""
    found = []
    for tier in (None, Tier(300), Tier(60)):
        with gpu(counts := Counted()):
            tables = [EmbeddingBagConfig(ROWS, 8, f"t{n}", feature_names=[f"f{n}"]) for n in range(TABLES)]
            module: Any = EmbeddingBagCollection(tables, device=CUDA)
            apply_optimizer_in_backward(RowWiseAdagrad, module.parameters(), {"lr": 0.1})
            shards = [
                *layout.table_wise("t0", ROWS, 8, 0), *layout.table_wise("t1", ROWS, 8, 1),
                *layout.row_wise("t2", ROWS, 8, range(2)),
            ]  # fmt: skip
            module = ShardedEmbeddingBagCollection(
                module, shards, environment(), CUDA, default_optimizer=(torch.optim.SGD, {"lr": 0.01}),
                options={table.name: TableOptions(tier=tier) for table in tables},
            )  # fmt: skip
            for number in range(3):
                ids = torch.arange(60) * 7 % 20 + 90 * number
                keys = [f"f{n}" for n in range(TABLES)]
                batch = KeyedJaggedTensor(keys, ids.to(CUDA), offsets=(torch.arange(31) * 2).to(CUDA))
                counts.clear()
                module(batch).values().sum().backward()
            found.append(Counter(counts.syncs))
            del module
    return found


@pytest.mark.ranks
def test_a_step_over_several_ranks_waits_for_nothing_more_than_one_of_resident_tables() -> None:
    """It waited for what comes from other ranks: each told all in every step that it had slots for the batch."""
    for resident, cached, unsure in run_ranks(2, waits_of_rank):
        assert resident and cached == resident
        # what is counted, and what ranks tell each other then
        more = unsure - resident
        assert all(any(place in where for where in more) for place in ("count_wanted", "comms/exchange.py read")), more


@pytest.mark.parametrize("policy", [lru, lfu, AgedLfu(9)])
def test_a_window_of_announced_batches_waits_for_nothing(policy: Policy) -> None:
    with gpu(counts := Counted()):
        residency = Residency([Span("t", 0, ROWS, 0, 40), Span("u", ROWS, ROWS, 40, 90)], policy, CUDA)
        features = pack_features([Feature(0, ROWS, 1, 0), Feature(0, ROWS, 1, ROWS)])
        lookups = Lookups(*(some.to(CUDA) for some in (features, torch.tensor([0, 40]), torch.tensor([0, 1]))))
        offsets = torch.tensor([0, 10, 20]).to(CUDA)
        batches = [(torch.arange(20) * 3 + 5 * n).to(CUDA) for n in range(6)]
        # the table of logarithms comes to the device once
        residency.release(residency.want_ids(batches[0], offsets, lookups)[1], changed=True)
        announced = [residency.announce_ids(ids, offsets, lookups) for ids in batches]
        held: list[Any] = []
        counts.clear()
        for ids, one in zip(batches, announced, strict=True):
            if len(held) == 2:
                residency.release(held.pop(0), changed=True)
            held.append(residency.want_ids(ids, offsets, lookups, one)[1])
            residency.announce_ids(ids + 7, offsets, lookups)
    assert not counts.syncs
    assert counts.kernels["link_rows"] == counts.kernels["expect_rows"] == counts.kernels["claim_rows"] == 6


def test_a_batch_that_might_not_fit_is_counted_which_waits_once() -> None:
    with gpu(counts := Counted()):
        residency = Residency([Span("t", 0, ROWS, 0, 15)], lru, CUDA)
        lookups = Lookups(
            *(some.to(CUDA) for some in (pack_features([Feature(0, ROWS, 1, 0)]), *torch.zeros(2, 1).long()))
        )
        ids, offsets = (torch.arange(20) % 9).to(CUDA), torch.tensor([0, 20]).to(CUDA)
        residency.want_ids(ids, offsets, lookups)
    assert sum(count for where, count in counts.syncs.items() if "count_wanted" in where) == 1
    assert counts.kernels["claim_rows"] == 2

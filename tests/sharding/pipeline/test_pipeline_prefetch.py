"""Rows of the next batch are brought to their slots while a batch trains, and every bit stays.

The store is a toy cache: a row that is not held is poisoned on the device, and comes back from memory of the host with
its optimizer states. A slot has the number of its row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_zoo import ROWS, Net, batch_of, dense_optimizer, drain, plain_loop, same
from ranks import run_ranks
from sharding_mixes import held
from torch import Tensor

from shardwise import RowWiseAdagrad, ShardingEnv, apply_optimizer_in_backward
from shardwise.embeddings import NoFreeSlots, TableGroup, TableShape
from shardwise.planner import layout
from shardwise.planner.layout import Shard
from shardwise.sharding.modules.sharded_collections import ShardedEmbeddingBagCollection
from shardwise.sharding.pipeline import (
    EvalPipelineSparseDist,
    PrefetchTrainPipelineSparseDist,
    TrainPipelineSparseDist,
)

pytestmark = pytest.mark.ranks


class Cache:
    """Room for `room` rows of a group's tables; the rows that were asked for longest ago go first."""

    room = 0

    def __init__(self, tables: Sequence[TableShape]) -> None:
        self.group: TableGroup | None = None
        # (table, row) -> leases that hold it, in the order of their last use
        self.held: dict[tuple[int, int], int] = {}
        self.away: dict[tuple[int, int], list[Tensor]] = {}
        self.leases: dict[int, set[tuple[int, int]]] = {}
        self.log: list[str] = []
        self.loads = self.number = self.most = 0

    @torch.no_grad()
    def follow(self, group: TableGroup) -> None:
        """Serve a group: at first all of its rows are away."""
        self.group = group
        for table, shape in enumerate(group.tables):
            for row in range(shape.rows):
                self._evict((table, row))

    def resolve(self, ids: Tensor, offsets: Tensor, step: Tensor) -> tuple[Tensor, int]:
        assert self.group is not None
        lookups = self.group.lookups
        samples, wanted = (offsets.shape[0] - 1) // len(lookups), dict[tuple[int, int], None]()
        for f, lookup in enumerate(lookups):
            mine = ids[int(offsets[f * samples]) : int(offsets[(f + 1) * samples])].tolist()
            wanted.update(((lookup.table, row), None) for row in mine)
        free = [row for row, leases in self.held.items() if not leases and row not in wanted]
        missing = [row for row in wanted if row not in self.held]
        spare = len(self.held) + len(missing) - self.room
        if spare > len(free):
            self.log.append(f"full {int(step)}")
            raise NoFreeSlots(f"{len(wanted)} rows, room for {self.room}")
        for row in free[: max(0, spare)]:
            del self.held[row]
            self._evict(row)
        for row in missing:
            for view, value in zip(self._views(row), self.away.pop(row), strict=True):
                view.copy_(value)
        self.loads += len(missing)
        for row in wanted:
            self.held[row] = self.held.pop(row, 0) + 1
        self.number += 1
        self.leases[self.number] = set(wanted)
        self.most = max(self.most, len(self.leases))
        self.log.append(f"resolve {int(step)}")
        return ids, self.number

    def release(self, lease: int) -> None:
        for row in self.leases.pop(lease):
            self.held[row] -= 1
        self.log.append("release")

    @torch.no_grad()
    def bring_home(self) -> None:
        """All rows are on the device again."""
        for row in list(self.away):
            for view, value in zip(self._views(row), self.away.pop(row), strict=True):
                view.copy_(value)

    def _evict(self, row: tuple[int, int]) -> None:
        self.away[row] = [view.clone() for view in self._views(row)]
        for view in self._views(row):
            view.fill_(float("nan"))

    def _views(self, row: tuple[int, int]) -> list[Tensor]:
        assert self.group is not None
        table, number = row
        states = [value for name, value in self.group.state_views(table).items() if name != "step"]
        return [self.group.view(table)[number], *(state[number] for state in states)]


def model_of(room: int | None) -> Net:
    """A model whose pooled tables are behind caches, or whole for None."""
    Cache.room = room or 0
    model = Net("p")
    apply_optimizer_in_backward(RowWiseAdagrad, model.pooled.parameters(), {"lr": 0.1})
    assert dist.group.WORLD is not None
    env, ranks = ShardingEnv.from_process_group(dist.group.WORLD), list(range(dist.get_world_size()))
    shards: list[Shard] = [*layout.table_wise("t0", ROWS, 8, ranks[-1]), *layout.row_wise("t1", ROWS, 8, ranks)]
    shards += layout.column_wise("t2", ROWS, 8, [0, ranks[-1]], [4, 4])
    shards += layout.data_parallel("t3", ROWS, 8, len(ranks))
    sharded: Any = ShardedEmbeddingBagCollection(
        model.pooled, shards, env, torch.device("cpu"), default_optimizer=(torch.optim.SGD, {"lr": 0.1}),
        stores=None if room is None else Cache,
    )  # fmt: skip
    model.pooled = sharded
    for group in sharded._held.all_groups() if room is not None else ():
        group.store.follow(group)
    return model


def behind_a_cache(kind: str, room: int) -> tuple[bool, list[tuple[int, list[str]]]]:
    """Whether all is as without a cache and no lease is left; of each cache its most leases at a time, and its log."""
    plain: Any = model_of(None)
    cached: Any = model_of(room)
    expected = plain_loop(plain, (batch_of(n) for n in range(10)))
    of_kind: Any = {"sparse_dist": TrainPipelineSparseDist, "prefetch": PrefetchTrainPipelineSparseDist}[kind]
    pipeline = of_kind(cached, dense_optimizer(cached), torch.device("cpu"))
    outputs = drain(pipeline.progress, (batch_of(n) for n in range(10)))
    evaluate: Any = EvalPipelineSparseDist(cached, dense_optimizer(cached), torch.device("cpu"))
    outputs += drain(evaluate.progress, (batch_of(n) for n in range(4)))
    expected += [plain(batch_of(n))[1].detach() for n in range(4)]
    # batches that were prefetched and never trained give their rows back
    batches = iter([batch_of(n) for n in range(6)])
    with torch.no_grad():
        cached.eval()
        left: Any = PrefetchTrainPipelineSparseDist(cached, dense_optimizer(cached), torch.device("cpu"))
        left.progress(batches)
        left.progress(batches)
        left.reset()
    stores = [group.store for group in cached.pooled._held.all_groups()]
    for store in stores:
        store.bring_home()
    # replicas are looked up a second time, at home
    members = zip(stores, cached.pooled._held.members, strict=True)
    stores = [store for store, part in members if not part.is_replica and part.slots]
    (weights, states), (there, states_there) = held(plain.pooled), held(cached.pooled)
    good = all(torch.equal(value, there[key]) for key, value in weights.items())
    good &= all(torch.equal(value, states_there[key]) for key, value in states.items())
    good &= all(not store.leases for store in stores)
    return good and same(expected, outputs), [(s.most, s.log) for s in stores]


def test_rows_come_before_the_update_of_the_batch_before() -> None:
    """Two leases hold them at a time: that of the batch before, whose update is still to come, and their own."""
    for good, stores in run_ranks(2, behind_a_cache, "prefetch", 4 * ROWS):
        assert good
        for most, log in stores:
            assert most == 2
            # the second batch is resolved before the first update
            assert log[:5] == ["resolve 0", "resolve 0", "release", "resolve 1", "release"]
            assert not any("full" in said for said in log)


def test_without_prefetch_rows_come_after_the_update() -> None:
    for good, stores in run_ranks(2, behind_a_cache, "sparse_dist", 4 * ROWS):
        assert good
        assert all(log[:4] == ["resolve 0", "release", "resolve 1", "release"] for _, log in stores)


def test_a_cache_without_room_for_two_batches_serves_one_after_the_other() -> None:
    """Fault 47, of a cache that one batch's rows just fit: the lookup brings what the prefetch could not."""
    found = run_ranks(2, behind_a_cache, "prefetch", 48)
    assert all(good for good, _ in found)
    assert any("full" in said for _, stores in found for _, log in stores for said in log)


def too_small(room: int) -> str:
    model = model_of(room)
    pipeline: Any = PrefetchTrainPipelineSparseDist(model, dense_optimizer(model), torch.device("cpu"))
    with pytest.raises(NoFreeSlots) as caught:
        drain(pipeline.progress, (batch_of(n) for n in range(4)))
    return str(caught.value)


def test_a_cache_without_room_for_one_batch_says_so() -> None:
    (said,) = run_ranks(1, too_small, 3)
    assert said.endswith("room for 3")

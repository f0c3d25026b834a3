"""A user's store of rows, as docs/concepts/engine.md says: few slots, rows brought there and taken away."""

import pytest
import sharding_mixes as mixes
from ranks import run_ranks
from torch import Tensor

from shardwise.embeddings import NoFreeSlots, TableGroup, TableShape

pytestmark = pytest.mark.ranks
MIX, SLOTS = mixes.Mix((mixes.TableCase("t", 80, 8, ("f",), "column_wise", seed=3),)), 30
made: list["FewSlots"] = []


class FewSlots:
    """Of a group with one table: rows and states lie at home, the first rows of its storage are slots."""

    def __init__(self, tables: list[TableShape]) -> None:
        self.slots, self.leases, self.evicted = dict[int, int](), list[set[int]](), 0
        made.append(self)

    def attach(self, group: TableGroup) -> None:
        self.views = [group.view(0), *(v for name, v in group.state_views(0).items() if name != "step")]
        self.home = [view.clone() for view in self.views]

    def resolve(self, ids: Tensor, offsets: Tensor, step: Tensor) -> tuple[Tensor, set[int]]:
        lease = set(ids[: int(offsets[-1])].tolist())
        free = [row for row in self.slots if row not in lease.union(*self.leases)]
        if len(missing := lease - self.slots.keys()) > len(free) + SLOTS - len(self.slots):
            raise NoFreeSlots
        for row in missing:
            slot = self.slots[row] = len(self.slots) if len(self.slots) < SLOTS else self.evict(free.pop())
            [view[slot].copy_(home[row]) for view, home in zip(self.views, self.home, strict=True)]
        self.leases.append(lease)
        return ids.clone().apply_(lambda row: self.slots.get(row, -1)), lease

    def evict(self, row: int) -> int:
        self.evicted, slot = self.evicted + 1, self.slots.pop(row)
        [home[row].copy_(view[slot]) for view, home in zip(self.views, self.home, strict=True)]
        return slot

    def release(self, lease: set[int]) -> None:
        self.leases.remove(lease)


def behind_few_slots() -> None:
    env = mixes.environment()
    model = mixes.shard(MIX, mixes.build(MIX, "adam"), env, stores=FewSlots)
    run, (store,) = mixes.train(MIX, model, mixes.batches_of_rank(MIX, range(5)), False), made
    assert store.evicted and not store.leases
    list(map(store.evict, list(store.slots)))
    list(map(Tensor.copy_, store.views, store.home))
    run.weights, run.states = mixes.held(model)
    mixes.expect_same_runs(mixes.train_sharded(MIX, "adam", 5, env), run)


def test_rows_behind_few_slots_train_to_the_same_bits() -> None:
    run_ranks(2, behind_few_slots)

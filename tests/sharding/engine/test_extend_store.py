"""A user's store of rows, as docs/engine.md says: few slots, to which rows are brought and from which they go."""

import pytest
import sharding_mixes as mixes
from ranks import run_ranks
from torch import Tensor

from shardwise import KeyedJaggedTensor
from shardwise.embeddings import NoFreeSlots, TableGroup, TableShape

pytestmark = pytest.mark.ranks
MIX, SLOTS = mixes.Mix((mixes.TableCase("t", 80, 8, ("f",), "column_wise", seed=3),)), 30


class FewSlots:
    """Of a group with one table: rows and states lie at home, the first rows of its storage are slots."""

    def __init__(self, tables: list[TableShape]) -> None:
        self.slots, self.leases, self.evicted = dict[int, int](), list[set[int]](), 0

    def attach(self, group: TableGroup) -> None:
        self.views = [group.view(0), *(v for name, v in group.state_views(0).items() if name != "step")]
        self.home = [view.clone() for view in self.views]

    def resolve(self, ids: Tensor, offsets: Tensor, step: Tensor) -> tuple[Tensor, set[int]]:
        lease = set(ids[: int(offsets[-1])].tolist())
        free = [row for row in self.slots if row not in lease.union(*self.leases)]
        if len(missing := lease - self.slots.keys()) > len(free) + SLOTS - len(self.slots):
            raise NoFreeSlots
        for row in missing:
            slot = len(self.slots) if len(self.slots) < SLOTS else self.evict(free.pop())
            self.slots[row] = slot
            [view[slot].copy_(home[row]) for view, home in zip(self.views, self.home, strict=True)]
        self.leases.append(lease)
        return ids.clone().apply_(lambda row: self.slots.get(row, -1)), lease

    def evict(self, row: int) -> int:
        self.evicted, slot = self.evicted + 1, self.slots.pop(row)
        [home[row].copy_(view[slot]) for view, home in zip(self.views, self.home, strict=True)]
        return slot

    def release(self, lease: set[int]) -> None:
        self.leases.remove(lease)


def behind_few_slots() -> tuple[mixes.Run, mixes.Run, list[bool], int, int]:
    env, had_room, batches = mixes.environment(), list[bool](), mixes.batches_of_rank(MIX, range(6))
    plain = mixes.train_sharded(MIX, "adam", 5, env)
    model = mixes.shard(MIX, mixes.build(MIX, "adam"), env, stores=FewSlots)
    (group,) = model._tables.all_groups()
    group.store.attach(group)

    def forward(batch: KeyedJaggedTensor) -> Tensor:
        # the next batch asks for its rows before this one's update
        output, step = model(batch), model.begin(batches[len(had_room) + 1][0])
        had_room.append(model.prefetch(step))
        model.routed_ahead.append(step)
        return output

    run = mixes.train(MIX, forward, batches[:5], False)
    model.drop(model.routed_ahead.pop())
    evicted = group.store.evicted
    list(map(group.store.evict, list(group.store.slots)))
    list(map(Tensor.copy_, group.store.views, group.store.home))
    run.weights, run.states = mixes.held(model)
    return plain, run, had_room, evicted, len(group.store.leases)


def test_rows_behind_few_slots_train_to_the_same_bits() -> None:
    """Prefetches have room or not, rows are evicted, no lease is left."""
    for plain, run, had_room, evicted, leases in run_ranks(2, behind_few_slots):
        mixes.expect_same_runs(plain, run)
        assert set(had_room) == {True, False} and evicted and not leases

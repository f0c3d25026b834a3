"""What later work plugs into the engine, with toys: a row store, an id map, overlapping steps, a mesh of hosts.

A toy store keeps every row in a slot of its own choice, a toy id map is a dictionary; both must change nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jagged_batches import tables_of
from ranks import error_of, run_ranks
from sharding_mixes import (
    STRATEGIES,
    Mix,
    Run,
    TableCase,
    address,
    backward,
    batch_of,
    batches_of_rank,
    build,
    by_lookup,
    environment,
    expect_same_runs,
    held,
    mix_for,
    mix_of,
    rows_of_rank,
    shard,
    span_of,
    train,
    train_sharded,
    upstream_of,
)
from torch import Tensor

from shardwise import KeyedJaggedTensor, ShardingEnv
from shardwise.embeddings import TableGroup, TableShape

pytestmark = pytest.mark.ranks


class Shuffled:
    """A store whose slots are in an order of its own, on every rank and after each step another one."""

    made = 0

    def __init__(self, tables: Sequence[TableShape]) -> None:
        Shuffled.made += 1
        self.generator = torch.Generator().manual_seed(100 * Shuffled.made + dist.get_rank())
        self.slots = [torch.arange(table.rows) for table in tables]
        self.leases: set[int] = set()
        self.resolved = self.most = 0
        self.group: TableGroup | None = None

    def attach(self, group: TableGroup) -> None:
        pass

    @torch.no_grad()
    def shuffle(self, group: TableGroup | None, *, home: bool = False) -> None:
        """Bring rows and their states to other slots, or to those of their numbers."""
        self.group = group
        for table, slots in enumerate(self.slots if group is not None else ()):
            assert group is not None
            self.slots[table] = torch.arange(len(slots))
            if not home:
                self.slots[table] = torch.randperm(len(slots), generator=self.generator)
            for view in (group.view(table), *(v for k, v in group.state_views(table).items() if k != "step")):
                moved = view[slots]
                view[self.slots[table]] = moved

    def resolve(self, ids: Tensor, offsets: Tensor, step: Tensor) -> tuple[Tensor, int]:
        assert self.group is not None
        lookups = self.group.lookups
        samples, rows = (offsets.shape[0] - 1) // len(lookups), ids.clone()
        for f, lookup in enumerate(lookups):
            part, slots = slice(int(offsets[f * samples]), int(offsets[(f + 1) * samples])), self.slots[lookup.table]
            raw = ids[part].long()
            good = (raw >= 0) & (raw < len(slots))
            rows[part] = torch.where(good, slots[torch.where(good, raw, 0)], raw).to(ids.dtype) if len(slots) else -1
        self.resolved += 1
        self.leases.add(self.resolved)
        self.most = max(self.most, len(self.leases))
        return rows, self.resolved

    def release(self, lease: int) -> None:
        self.leases.remove(lease)
        if not self.leases:
            # nobody may read or write the rows where they were
            self.shuffle(self.group)


def behind_stores(mixes: Sequence[Mix], optimizer: str, learned: bool) -> list[tuple[Run, Run, list[tuple[int, int]]]]:
    """Runs with rows in their own slots and in shuffled ones; of each store how often it resolved, and its leases."""
    env, runs = environment(), []
    for mix in mixes:
        plain = train_sharded(mix, optimizer, 3, env, learned=learned)
        model = shard(mix, build(mix, optimizer), env, stores=Shuffled)
        groups = model._tables.all_groups()
        [group.store.shuffle(group) for group in groups]
        batches = batches_of_rank(mix, range(3))
        run = train(mix, model, batches, learned)
        run.weight_gradients = [gradient / env.world_size for gradient in run.weight_gradients]
        with torch.no_grad():
            model(batches[0][0]).wait()
        [group.store.shuffle(group, home=True) for group in groups]
        run.weights, run.states = held(model)
        runs.append((plain, run, [(g.store.resolved, len(g.store.leases)) for g in groups]))
    return runs


@pytest.mark.full
@pytest.mark.parametrize(
    ("kind", "optimizer"),
    [("pooled", "rowwise_adagrad"), ("learned weights", "adam"), ("sequence", "rowwise_adagrad")],
)
def test_rows_behind_a_store_train_to_the_same_bits(kind: str, optimizer: str) -> None:
    """Gradients of weights of replicated tables took ids for slots; shards that share a row's state met slot by slot,
    and wrote when their leases were over.
    """
    pooled, learned = kind != "sequence", kind == "learned weights"
    mixes = [mix_for(strategy, pooled=pooled, weighted=learned) for strategy in STRATEGIES]
    mixes += [replace(mix_of(seed, pooled=pooled), weighted=learned) for seed in range(3)]
    # rows of fp16 and bf16 are rounded by their own numbers, wherever they lie
    mixes = [replace(mix, settings=()) for mix in mixes]
    for runs in run_ranks(4, behind_stores, mixes, optimizer, learned):
        for plain, shuffled, stores in runs:
            expect_same_runs(plain, shuffled)
            # every lease is released: after the update, or after a lookup without gradients
            assert all(leases == 0 for _, leases in stores)
        assert sum(resolved for _, _, stores in runs for resolved, _ in stores) > 4 * len(mixes)


class Dictionary:
    """Rows are given out as ids are first seen."""

    def __init__(self) -> None:
        self.rows: dict[int, int] = {}
        self.steps: list[int] = []

    def translate(self, table: str, ids: Tensor, step: Tensor) -> Tensor:
        self.steps.append(int(step))
        return torch.tensor([self.rows.setdefault(i, len(self.rows)) for i in ids.tolist()], dtype=torch.int64)


# t0 and t1 take any ids; f0 and f1 are looked up in one of them
MAPPED = Mix(
    (
        TableCase("t0", 64, 8, ("f0", "f1"), "table_wise", seed=1),
        TableCase("t1", 64, 8, ("f2",), "column_wise", seed=3),
        TableCase("t2", 23, 8, ("f3",), "row_wise", seed=3),
        TableCase("t3", 23, 8, ("f4",), "data_parallel"),
    )
)


def with_any_ids(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The features that are mapped name users by hashes."""
    hashed = ("f0", "f1", "f2")
    values = [kjt[key].values() * (2**40 + 7 if key in hashed else 1) for key in kjt.keys()]  # noqa: SIM118
    return KeyedJaggedTensor(kjt.keys(), torch.cat(values), None, kjt.lengths())


def behind_maps(pooled: bool) -> tuple[list[list[Tensor]], dict[str, Tensor], dict[str, dict[int, int]], list[int]]:
    """Three steps of a rank; what its maps know, and the steps at which they were asked."""
    mix, env = replace(MAPPED, pooled=pooled), environment()
    maps = {"t0": Dictionary(), "t1": Dictionary()}
    model = shard(mix, build(mix, "adam"), env, id_maps=maps)
    batches = batches_of_rank(mix, range(3))
    run = train(mix, model, [(with_any_ids(batch), upstream) for batch, upstream in batches], False)
    return (
        run.outputs,
        held(model)[0],
        {name: id_map.rows for name, id_map in maps.items()},
        sorted(set(maps["t1"].steps)),
    )


@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
def test_an_id_map_turns_any_ids_into_rows_on_the_ranks_that_hold_them(pooled: bool) -> None:
    mix, maps = replace(MAPPED, pooled=pooled), {"t0": Dictionary(), "t1": Dictionary()}
    ranks = run_ranks(2, behind_maps, pooled)
    module = build(mix, "adam")
    for step in range(3):
        batch = batch_of(mix, step)
        values = {key: batch[key].values() for key in batch.keys()}  # noqa: SIM118
        for table, feature in (("t0", "f0"), ("t0", "f1"), ("t1", "f2")):
            values[feature] = maps[table].translate(table, with_any_ids(batch)[feature].values(), torch.zeros(1))
        mapped = KeyedJaggedTensor(batch.keys(), torch.cat(list(values.values())), None, batch.lengths())
        outputs = by_lookup(mix, module(mapped))
        for rank, (rank_outputs, *_) in enumerate(ranks):
            expected = rows_of_rank(mix, batch, [output.detach() for output in outputs], *span_of(mix, rank, 2))
            # all but the sums of row shards are the bits of one process
            for n, (output, value) in enumerate(zip(rank_outputs[step], expected, strict=True)):
                assert torch.equal(output, value) if n != 3 or not pooled else torch.allclose(output, value, atol=1e-6)
        backward(outputs, upstream_of(mix, batch, step))
    weights = tables_of(module)
    for _, shards, known, steps in ranks:
        for key, value in shards.items():
            table, rows, cols = address(key)
            assert torch.equal(value, weights[table][rows, cols])
        # a map sees the ids of what its rank holds, and no others
        for name, rows_of in known.items():
            assert rows_of in ({}, maps[name].rows)
        assert steps in ([], [0, 1, 2])
    assert any(known["t0"] for _, _, known, _ in ranks)


def refused_maps() -> list[str]:
    env, errors = environment(), []
    for strategy in ("row_wise", "data_parallel"):
        mix = Mix((TableCase("t", 20, 8, ("f",), strategy),))
        errors.append(error_of(shard, mix, build(mix, "sgd"), env, id_maps={"t": Dictionary()}))
    return errors


def test_an_id_map_needs_a_table_whose_rows_are_on_one_rank() -> None:
    """Ids of any size were divided by the rows of row shards, and replicas looked ids up that nobody translated."""
    for rank, errors in enumerate(run_ranks(2, refused_maps)):
        assert errors == [
            f"ValueError: rank 0: table 't': an id map gives out rows of one rank, but {how}; cut the table by columns"
            " or leave it whole"
            for how in ("the plan cuts them over several", "every rank holds them")
        ], rank


def overlapping(mixes: Sequence[Mix]) -> list[Any]:
    """Of each mix outputs, weights and states after two steps that were under way at a time, and one more."""
    env, runs = environment(), []
    for mix in mixes:
        model = shard(mix, build(mix, "adam"), env, stores=Shuffled)
        groups = model._tables.all_groups()
        [group.store.shuffle(group) for group in groups]
        batches, upstreams = zip(*batches_of_rank(mix, range(3)), strict=True)
        first, second = model.begin(batches[0]), model.begin(batches[1])
        model.look_up(first)
        model.look_up(second)
        outputs = [by_lookup(mix, model.finish(flight)) for flight in (first, second)]
        kept = [[value.detach().clone() for value in of_step] for of_step in outputs]
        for of_step, upstream in zip(outputs, upstreams[:2], strict=True):
            backward(of_step, upstream)
        third = by_lookup(mix, model(batches[2]))
        kept.append([value.detach().clone() for value in third])
        # memory of one step is not that of another
        same = all(
            torch.equal(a, b)
            for now, then in zip([*outputs, third], kept, strict=True)
            for a, b in zip(now, then, strict=True)
        )
        [group.store.shuffle(group, home=True) for group in groups]
        runs.append((kept, same, *held(model), max(group.store.most for group in groups)))
    return runs


@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
def test_two_overlapping_steps_are_those_of_a_loop_that_overlaps_them(pooled: bool) -> None:
    mixes = [mix_for(strategy, pooled=pooled) for strategy in STRATEGIES]
    # enough numbers for memory to be kept and used again
    mixes += [replace(mix_for(strategy, pooled=pooled), batches=(800, 0, 900, 0)) for strategy in STRATEGIES]
    ranks = run_ranks(2, overlapping, mixes)
    for number, mix in enumerate(mixes):
        module = build(mix, "adam")
        batches = [batch_of(mix, step) for step in range(3)]
        outputs = [by_lookup(mix, module(batch)) for batch in batches[:2]]
        for step, of_step in enumerate(outputs):
            backward(of_step, upstream_of(mix, batches[step], step))
        outputs.append(by_lookup(mix, module(batches[2])))
        weights_alone = tables_of(module)
        for rank, runs in enumerate(ranks):
            kept, same, weights, _, most = runs[number]
            assert same
            assert most >= 2
            for step, rank_outputs in enumerate(kept):
                whole = [value.detach() for value in outputs[step]]
                expected = rows_of_rank(mix, batches[step], whole, *span_of(mix, rank, 2))
                for value, wanted in zip(rank_outputs, expected, strict=True):
                    tolerance = 0.02 if pooled else 0.0
                    assert value.shape == wanted.shape
                    if value.numel():
                        assert (value - wanted).abs().max() <= tolerance * wanted.abs().max()
            for key, value in weights.items():
                table, rows, cols = address(key)
                wanted = weights_alone[table][rows, cols]
                if pooled and table == "t2":
                    # an average of partial sums, in bf16
                    assert value.numel() == 0 or (value - wanted).abs().max() <= 0.02
                else:
                    assert torch.equal(value, wanted), (mix, key)


def on_a_mesh(mixes: Sequence[Mix]) -> list[tuple[Run, Run]]:
    from torch.distributed.device_mesh import init_device_mesh

    env = ShardingEnv.from_mesh(init_device_mesh("cpu", (2, 2), mesh_dim_names=("host", "local")))
    plain = environment(2)
    return [(train_sharded(mix, "adam", 2, env), train_sharded(mix, "adam", 2, plain)) for mix in mixes]


def test_a_mesh_of_two_hosts_of_two_ranks_is_a_world_of_four() -> None:
    mixes = [mix_for(strategy, pooled=True) for strategy in STRATEGIES]
    for runs in run_ranks(4, on_a_mesh, mixes):
        for mesh_run, plain_run in runs:
            expect_same_runs(mesh_run, plain_run)
            assert mesh_run.collectives == plain_run.collectives

"""Tables with tiers go over to other plans and tiers, are moved, copied and pickled, and begin without being stored.

Takes half a minute: each claim trains models on up to four processes.
"""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sharding_mixes as mixes
import torch
import torch.distributed as dist
from ranks import error_of, run_ranks
from tier_mixes import expect_equal, held_of, misses, small_chunks, with_tier
from torch import nn

from shardwise import EmbeddingBagCollection, EmbeddingBagConfig, ShardingEnv, apply_optimizer_in_backward, checkpoint
from shardwise.embeddings.tiers import CachedRows
from shardwise.planner.layout import TableOptions, Tier
from shardwise.sharding.dmp.unwrap import copy_to_device, sharded_model_copy
from shardwise.sharding.engine.tiers import UniformRows

pytestmark = pytest.mark.ranks

EXACT = TableOptions("ordered", "table")
RAM = Tier(3, max_slots=1.0)


def mix_by(strategies: tuple[str, ...], tiers: tuple[Tier | None, ...]) -> mixes.Mix:
    tables = [
        mixes.TableCase(f"t{n}", (5, 23, 17)[n], 8, (f"f{n}",), cut, options=replace(EXACT, tier=tier), seed=n)
        for n, (cut, tier) in enumerate(zip(strategies, tiers, strict=True))
    ]
    return mixes.Mix(tuple(tables), settings=())


def go_over(model: Any, mix: mixes.Mix) -> None:
    world = dist.get_world_size()
    shards = [shard for table in mix.tables for shard in mixes.shards_of(table, world, min(2, world))]
    model.reshard(shards, {table.name: table.options for table in mix.tables})


def train(mix: mixes.Mix, model: Any, steps: range) -> Any:
    return mixes.train(mix, model, mixes.batches_of_rank(mix, steps), False).outputs


def reshard_through(folder: Path, optimizer: str) -> None:
    """A tier appears, has its slots and backing changed, and disappears, while tables are cut anew."""
    file = Tier(2, "file", str(folder), max_slots=1.0)
    tiers = [(None, RAM, None), (RAM, file, None), (file, None, RAM), (None, None, None), (RAM, RAM, RAM)]
    cuts = [
        ("table_wise", "row_wise", "column_wise"), ("row_wise", "column_wise", "row_wise"),
        ("column_wise", "data_parallel", "table_wise"), ("data_parallel", "table_wise", "row_wise"),
        ("row_wise", "row_wise", "row_wise"),
    ]  # fmt: skip
    plans = [mix_by(*plan) for plan in zip(cuts, tiers, strict=True)]
    resident = [with_tier(mix, None) for mix in plans]
    cached, whole = (mixes.shard(m[0], mixes.build(m[0], optimizer), mixes.environment()) for m in (plans, resident))
    for number, (mix, other) in enumerate(zip(plans, resident, strict=True)):
        if number:
            with small_chunks():
                go_over(cached, mix)
            go_over(whole, other)
        wanted = {table.name for table in mix.tables if table.options.tier is not None}
        assert {name for name in cached.states.tables if cached.shards.is_away(name)} <= wanted
        assert {shape.name for store in cached._tables.stores() for shape in store.group.tables} <= wanted
        expect_equal(whole, cached)
        steps = range(2 * number, 2 * number + 2)
        for mine, theirs in zip(train(mix, cached, steps), train(other, whole, steps), strict=True):
            assert all(map(torch.equal, mine, theirs))
        expect_equal(whole, cached)
    assert not list(folder.glob("*.lock"))


@pytest.mark.parametrize(("world", "optimizer"), [(1, "adam"), (2, "rowwise_adagrad"), (4, "adam")])
def test_tiers_come_change_and_go_in_the_middle_of_training(world: int, optimizer: str, tmp_path: Path) -> None:
    run_ranks(world, reshard_through, tmp_path, optimizer)


def reshard_under_way(below: str, folder: Path) -> None:
    """A batch that left, was announced and has its rows in slots is looked up under the plan that came after."""
    tier = Tier(3, below, str(folder) if below == "file" else None, max_slots=1.0)
    plans = [mix_by((cut,) * 3, (tier,) * 3) for cut in ("row_wise", "table_wise")]
    plans.append(mix_by(("column_wise",) * 3, (None,) * 3))
    resident = [with_tier(mix, None) for mix in plans]
    cached, whole = (mixes.shard(m[0], mixes.build(m[0], "adam"), mixes.environment()) for m in (plans, resident))
    for number, (mix, other) in enumerate(zip(plans, resident, strict=True)):
        if number:
            features, upstream = mixes.batches_of_rank(mix, range(number, number + 1))[0]
            step = cached.start(features)
            cached.send_ids(step)
            cached.receive_ids(step)
            cached.shards.announce(step)
            cached.prefetch(step)
            cached.routed_ahead.append(step)
            go_over(cached, mix)
            go_over(whole, other)
            outputs = [mixes.by_lookup(mix, model(features)) for model in (cached, whole)]
            assert not cached.routed_ahead and all(map(torch.equal, *outputs))
            for of_model in outputs:
                mixes.backward(of_model, upstream)
        expect_equal(whole, cached)
        for mine, theirs in zip(train(mix, cached, range(9, 11)), train(other, whole, range(9, 11)), strict=True):
            assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("below", ["ram", "file"])
def test_a_batch_that_left_under_another_plan_leaves_again(below: str, tmp_path: Path) -> None:
    run_ranks(2, reshard_under_way, below, tmp_path)


def refuse_dense() -> str:
    mix = mix_by(("row_wise",) * 3, (None,) * 3)
    table = replace(mix.tables[0], options=TableOptions(dense=True))
    mix = replace(mix, tables=(table, *mix.tables[1:]))
    model = mixes.shard(mix, mixes.build(mix, "adam"), mixes.environment())
    shards = [shard for table in mix.tables for shard in mixes.shards_of(table, 1, 1)]
    return error_of(model.reshard, shards, {"t0": TableOptions(dense=True, tier=RAM)})


def test_no_tier_comes_to_a_table_that_is_trained_by_its_gradient() -> None:
    (said,) = run_ranks(1, refuse_dense)
    assert "tables ['t0']: what trains by its gradient has all rows on the device, no tier" in said


def alone(mix: mixes.Mix, optimizer: str = "adam") -> Any:
    """The collection of one process, without a process group."""
    return mixes.shard(mix, mixes.build(mix, optimizer), ShardingEnv.from_local(1, 0))


def one_process(tier: Tier) -> tuple[mixes.Mix, Any]:
    """A collection after some steps."""
    mix = with_tier(mix_by(("table_wise", "row_wise", "column_wise"), (None,) * 3), tier)
    model = alone(mix)
    mixes.train(mix, model, mixes.batches_of_rank(mix, range(3), 0, 1), False)
    assert misses(model) > 0
    return mix, model


def outputs(mix: mixes.Mix, model: Any, steps: range) -> list[Any]:
    return mixes.train(mix, model, mixes.batches_of_rank(mix, steps, 0, 1), False).outputs


@pytest.mark.parametrize("below", ["ram", "file", "ram over file"])
def test_a_copy_has_rows_of_its_own(below: str, tmp_path: Path) -> None:
    kind, folder = below.split(" ")[-1], str(tmp_path) if below != "ram" else None
    tier = Tier(3, kind, folder, max_slots=1.0, ram_rows=4 if below == "ram over file" else None)
    mix, model = one_process(tier)
    other = copy.deepcopy(model)
    # a copy shows what the original shows, in as little memory
    for param in other.parameters():
        assert param.untyped_storage().nbytes() <= 8 and bool(param.isnan().all())
    before = held_of(model)
    first = outputs(mix, other, range(3, 5))
    for mine, theirs in zip(held_of(model), before, strict=True):
        assert mixes.same_tensors(mine, theirs)
    for mine, theirs in zip(outputs(mix, model, range(3, 5)), first, strict=True):
        assert all(map(torch.equal, mine, theirs))
    expect_equal(model, other)
    # who looked at all rows left nothing of them behind
    for param in other.parameters():
        assert param.untyped_storage().nbytes() <= 8 and bool(param.isnan().all())


def test_a_copy_holds_no_rows_for_batches_of_the_original() -> None:
    """A batch that was prefetched held slots of the copy for ever."""
    mix, model = one_process(RAM)
    step = model.start(mixes.batches_of_rank(mix, range(3, 4), 0, 1)[0][0])
    model.send_ids(step)
    model.receive_ids(step)
    assert model.prefetch(step)
    other = copy.deepcopy(model)
    for store, original in zip(other._tables.stores(), model._tables.stores(), strict=True):
        assert int(store.residency.held.sum()) == 0 and not store.residency.leases
        assert int(original.residency.held.sum()) > 0
    model.drop(step)
    expect_equal(model, other)


def test_a_pickled_model_has_its_rows(tmp_path: Path) -> None:
    mix, model = one_process(RAM)
    other = pickle.loads(pickle.dumps(model))
    for mine, theirs in zip(outputs(mix, model, range(3, 5)), outputs(mix, other, range(3, 5)), strict=True):
        assert all(map(torch.equal, mine, theirs))
    expect_equal(model, other)
    _, filed = one_process(Tier(3, "file", str(tmp_path), max_slots=1.0))
    with pytest.raises(TypeError, match="table 't0.0.*in a scratch file.*cannot be pickled: save a checkpoint"):
        pickle.dumps(filed)


def test_moves_that_rows_below_cannot_follow_are_refused_by_name() -> None:
    mix, model = one_process(RAM)
    before = held_of(model)
    for refused, match in (
        (lambda: model.half(), "have a tier, whose records are torch.float32: they cannot become torch.float16"),
        (lambda: model.to("meta"), "have a tier: rows below a device cannot be on meta"),
        (lambda: model.to_empty(device="meta"), "have a tier: rows below a device cannot be on meta"),
    ):
        with pytest.raises(ValueError, match=match):
            refused()
    # what changes nothing passes, and keeps rows that are here, too
    assert model.cpu() is model and model.float() is model and model.to_empty(device="cpu") is model
    for mine, theirs in zip(held_of(model), before, strict=True):
        assert mixes.same_tensors(mine, theirs)
    with pytest.raises(ValueError, match=r"tables \['t0', 't1', 't2'\]: rows below a device cannot be on meta"):
        mixes.shard(mix, mixes.build(mix, "adam"), ShardingEnv.from_local(1, 0), "meta")


def test_a_store_follows_its_group_to_another_device() -> None:
    """The CPU stands for it: everything that knows a device is made anew there, and goes on with the same bits."""
    mix, model = one_process(RAM)
    _, other = one_process(RAM)
    for group in model._tables.all_groups():
        group.flat = group.flat.clone()
        group._place(group.device, fresh=False)
        group.store.follow(group.device)
    for mine, theirs in zip(outputs(mix, model, range(3, 5)), outputs(mix, other, range(3, 5)), strict=True):
        assert all(map(torch.equal, mine, theirs))
    step = model.start(mixes.batches_of_rank(mix, range(3, 4), 0, 1)[0][0])
    model.send_ids(step)
    model.receive_ids(step)
    model.prefetch(step)
    assert any(group.store.is_in_use() for group in model._tables.all_groups())
    model.drop(step)


# ---- first values

ROWS, DIM = 23, 8


def on_meta(init_fn: Any = None) -> EmbeddingBagCollection:
    config = EmbeddingBagConfig(ROWS, DIM, "t", feature_names=["f"], init_fn=init_fn)
    module = EmbeddingBagCollection([config], device="meta")
    apply_optimizer_in_backward(torch.optim.Adam, module.parameters(), mixes.RULES["adam"][1])
    return module


def lazy_mix(strategy: str, tier: Tier) -> mixes.Mix:
    options = replace(EXACT, tier=tier)
    return mixes.Mix((mixes.TableCase("t", ROWS, DIM, ("f",), strategy, options=options, seed=2),), settings=())


def first_rows(strategy: str, tier: Tier, folder: Path, seed: int) -> tuple[Any, int]:
    """All rows of a table that nobody touched, and how many were written below to have them."""
    torch.manual_seed(seed + 7 * dist.get_rank())
    with small_chunks():
        model = mixes.shard(lazy_mix(strategy, tier), on_meta(), mixes.environment())
        stored = sum(int((store.residency.slot_of != -2).sum()) for store in model._tables.stores())
        path = checkpoint.save(folder, model, step=1).path
        rows = checkpoint.full_state_dict(model)
        dist.barrier()
        assert all(torch.equal(value, rows[name]) for name, value in checkpoint.full_state_dict(path).items())
    return rows, stored


def test_first_values_hang_on_the_seed_alone_and_are_stored_nowhere(tmp_path: Path) -> None:
    """They are the same for every plan, tier and number of ranks."""
    results = []
    for number, (world, strategy, tier) in enumerate(
        [
            (1, "table_wise", RAM), (2, "row_wise", Tier(0.5)), (2, "column_wise", RAM), (2, "data_parallel", RAM),
            (4, "grid", Tier(2, "file", str(tmp_path / "scratch"))),
        ]
    ):  # fmt: skip
        results += run_ranks(world, first_rows, strategy, tier, tmp_path / str(number), 5)
    others = run_ranks(1, first_rows, "table_wise", RAM, tmp_path / "other", 6)[0][0]
    (name,) = others
    wanted = results[0][0][name]
    for rows, stored in results:
        assert torch.equal(rows[name], wanted) and stored == 0
    assert not torch.equal(others[name], wanted)
    bound = ROWS**-0.5
    assert bool((wanted.abs() <= bound).all()) and wanted.unique().numel() > ROWS * DIM // 2
    assert abs(float(wanted.mean())) < bound / 4 and float(wanted.abs().max()) > 0.9 * bound


def train_lazily(tier: Tier, strategy: str, folder: Path) -> int:
    """Training from first values has the bits of a table that has them on the device."""
    torch.manual_seed(5)
    mix = lazy_mix(strategy, tier)
    model = mixes.shard(mix, on_meta(), mixes.environment())
    resident = with_tier(mix, None)
    whole = mixes.shard(resident, mixes.build(resident, "adam"), mixes.environment())
    whole.load_state_dict(checkpoint.full_state_dict(model))
    for mine, theirs in zip(train(mix, model, range(4)), train(resident, whole, range(4)), strict=True):
        assert all(map(torch.equal, mine, theirs))
    expect_equal(whole, model)
    return sum(counts.fresh for store in model._tables.stores() for counts in store.counts)


@pytest.mark.parametrize("world", [1, 2])
def test_fresh_rows_train_to_the_bits_of_rows_on_the_device(world: int, tmp_path: Path) -> None:
    assert sum(run_ranks(world, train_lazily, Tier(2, max_slots=1.0), "row_wise", tmp_path)) > 0
    assert sum(run_ranks(world, train_lazily, Tier(2, max_slots=1.0), "column_wise", tmp_path)) > 0


def test_an_init_fn_of_ones_own_sees_chunks_of_rows() -> None:
    seen: list[tuple[int, ...]] = []

    def fill(rows: torch.Tensor) -> None:
        seen.append(tuple(rows.shape))
        rows.fill_(len(seen))

    mix = lazy_mix("table_wise", RAM)
    with small_chunks():
        model = mixes.shard(mix, on_meta(fill), ShardingEnv.from_local(1, 0))
    assert sum(rows for rows, _ in seen) == ROWS and len(seen) > 1
    rows = checkpoint.full_state_dict(model)["embedding_bags.t.weight"]
    assert torch.equal(rows, torch.cat([torch.full(shape, n + 1.0) for n, shape in enumerate(seen)]))


def test_a_table_that_says_where_its_values_lie_begins_so() -> None:
    """Bounds of the config, also where they are one number; half precision."""
    for low, high, dtype in ((0.25, 0.5, torch.float16), (2.0, 2.0, torch.float32)):
        fresh = UniformRows(3, 10, 4, 6, low, high, dtype)
        rows = fresh(torch.arange(5))
        assert rows.dtype == dtype and rows.shape == (5, 6)
        assert bool((rows >= low).all()) and bool((rows <= high).all())
        assert torch.equal(UniformRows(3, 12, 5, 2, low, high, dtype)(torch.arange(2)), rows[2:4, 1:3])


def test_rows_of_one_group_are_copied_into_another_in_chunks() -> None:
    """`TableGroup.copy_from` from and to a tier: weights, states, steps."""
    mix, cached = one_process(RAM)
    resident = alone(with_tier(mix, None))
    again = alone(mix)
    with small_chunks():
        for source, target in ((cached, resident), (resident, again)):
            for (_, group, number), (_, other, place) in zip(source._tables.homes, target._tables.homes, strict=True):
                assert isinstance(group, type(other))
                other.copy_from(place, group, number)
    expect_equal(cached, resident)
    expect_equal(cached, again)


def test_a_group_without_an_optimizer_of_the_same_kind_gets_weights_alone() -> None:
    mix, cached = one_process(RAM)
    other = alone(mix, "sgd")
    for (_, group, number), (_, target, place) in zip(cached._tables.homes, other._tables.homes, strict=True):
        assert isinstance(target.store, CachedRows)
        target.copy_from(place, group, number)
    assert mixes.same_tensors(held_of(cached)[0], held_of(other)[0])


def test_a_parameter_in_the_place_of_one_with_a_tier_gives_it_its_rows() -> None:
    mix, model = one_process(RAM)
    rows = torch.randn(23, 8, generator=torch.Generator().manual_seed(1))
    states = held_of(model)[1]
    child = model.embedding_bags["t1"]
    child.weight = nn.Parameter(rows.clone())
    outputs(mix, model, range(3, 4))
    # what was looked up was updated: the rest of the rows are those that were given
    weights, after = held_of(model)
    found = weights["t1|0:23|0:8"]
    touched = (found != rows).any(1)
    assert 0 < int(touched.sum()) < 23
    assert not torch.equal(states["t1|0:23|0:8/momentum1"], after["t1|0:23|0:8/momentum1"])
    assert torch.equal(states["t1|0:23|0:8/momentum1"][~touched], after["t1|0:23|0:8/momentum1"][~touched])
    assert bool(child.weight.isnan().all()) and child.weight is model.parameter("t1")


def copied_over_ranks(folder: Path) -> str:
    mix = with_tier(mix_by(("row_wise", "column_wise", "data_parallel"), (None,) * 3), Tier(3, max_slots=1.0))
    model = mixes.shard(mix, mixes.build(mix, "adam"), mixes.environment())
    train(mix, model, range(2))
    with sharded_model_copy("cpu"):
        other = copy.deepcopy(model)
    expect_equal(model, other)
    for mine, theirs in zip(train(mix, model, range(2, 4)), train(mix, other, range(2, 4)), strict=True):
        assert all(map(torch.equal, mine, theirs))
    expect_equal(model, other)
    return error_of(copy_to_device, model, torch.device("cpu"), torch.device("cpu"))


def test_copies_over_ranks_have_rows_of_their_own_and_cannot_share_them(tmp_path: Path) -> None:
    for said in run_ranks(2, copied_over_ranks, tmp_path):
        assert said.startswith("TypeError: tables ['t") and "have tiers: two models cannot share the rows" in said

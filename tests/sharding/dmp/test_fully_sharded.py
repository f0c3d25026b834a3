"""FULLY_SHARDED 2D parallelism beside DEFAULT with a sync after every step: two replicas of two ranks."""

from __future__ import annotations

import filecmp
import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sharding_mixes
import torch
import torch.distributed as dist
import torch.distributed.checkpoint
from jagged_batches import random_kjt
from model_zoo import bag_tables, row_tables
from ranks import error_of, run_ranks, world_group
from sharding_steps import local_tensors
from torch import Tensor, nn

from shardwise import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingCollection,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    ShardingPlan,
    apply_optimizer_in_backward,
    checkpoint,
)
from shardwise.embeddings import GradientCheckMode, LookupPolicy
from shardwise.sharding import (
    TrainPipelineSparseDist,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_row_wise,
    table_wise,
)
from shardwise.sharding.comms.env import ShardingStrategy
from shardwise.sharding.comms.failures import RankFailure
from shardwise.sharding.dmp.dmp_collection import DMPCollection, DMPCollectionConfig
from shardwise.sharding.engine.fully_sharded import FullyShardedShards

pytestmark = pytest.mark.ranks

# no number of elements of a shard is even by its rows alone
ROWS = {"a": 13, "b": 11, "c": 7, "d": 5, "e": 5, "f": 9}
WEIGHTED, SEQUENCES = {"a": 13, "b": 11}, {"a": 13, "f": 9}
WORLD, GROUP, SAMPLES, DIM = 4, 2, 4, 8
FULLY, DEFAULT = ShardingStrategy.FULLY_SHARDED, ShardingStrategy.DEFAULT
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.2, "weight_decay": 0.01}),
    "rowwise adagrad": (RowWiseAdagrad, {"lr": 0.1}),
    "adam": (torch.optim.Adam, {"lr": 0.05}),
}


class Net(nn.Module):
    """Pooled tables (one of fp16, `te` without an optimizer), weighted bags, sequences, and dense layers around them.

    Weights of ids are learned, so the backward of a weighted bag looks at the rows once more.
    """

    def __init__(self, optimizer: str = "sgd", policy: LookupPolicy | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        tables = bag_tables(ROWS)
        tables[2].data_type = DataType.FP16
        more: dict[str, Any] = {} if policy is None else {"policy": policy}
        self.ebc = EmbeddingBagCollection(tables, **more)
        self.web = EmbeddingBagCollection(bag_tables(WEIGHTED), is_weighted=True)
        self.ec = EmbeddingCollection(row_tables(SEQUENCES))
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM * (len(ROWS) + len(WEIGHTED) + 1), 3)
        self.importance = nn.Parameter(torch.rand(3))
        self.seen: list[Callable[[], None]] = []
        kind, kwargs = OPTIMIZERS[optimizer]
        for name, param in self.named_parameters():
            if "embedding" in name and "te" not in name:
                apply_optimizer_in_backward(kind, [param], {**kwargs, "stochastic_rounding": False})

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        before = self.first(torch.ones(SAMPLES // 2, DIM)).tanh()
        weighted = KeyedJaggedTensor(
            features.keys(), features.values(), self.importance[features.values() % 3], features.lengths()
        )
        pooled = torch.cat([before, self.ebc(features).values(), self.web(weighted).values()], 1)
        rows = self.ec(features)["f"].to_padded_dense(1).flatten(1).sum(1)
        for look in self.seen:
            look()
        output = self.last(pooled).tanh().sum(1) + rows.sin()
        return output.square().mean(), output.detach()


def batch_of(step: int) -> KeyedJaggedTensor:
    """This rank's two samples."""
    rank = dist.get_rank()
    return random_kjt(ROWS, SAMPLES * 2, seed=step, of=[2 * rank, 2 * rank + 1])


def plan_for(model: Net, size: int = GROUP, turned: bool = False) -> ShardingPlan:
    """For the ranks of a sharding group; `turned` cuts every table otherwise."""
    last = size - 1
    bags = {
        "ta": row_wise(), "tb": column_wise([last, 0]), "tc": table_wise(last), "td": data_parallel(),
        "te": data_parallel(), "tf": table_row_wise(0),
    }  # fmt: skip
    if turned:
        bags |= {"ta": column_wise([0, last]), "tb": row_wise(), "tc": table_wise(0), "tf": table_wise(last)}
    some: dict[str, Any] = {"world_size": size, "local_size": size, "device_type": "cpu"}
    weighted = {"ta": row_wise(), "tb": data_parallel()}
    rows = {"ta": column_wise([0, last]), "tf": row_wise()}
    return ShardingPlan({
        "ebc": construct_module_sharding_plan(model.ebc, bags, **some),
        "web": construct_module_sharding_plan(model.web, weighted, **some),
        "ec": construct_module_sharding_plan(model.ec, rows, **some),
    })  # fmt: skip


def build(strategy: ShardingStrategy, optimizer: str = "sgd", size: int = GROUP, **settings: Any) -> DMPCollection:
    model, turned = settings.pop("model", None) or Net(optimizer), settings.pop("turned", False)
    options: dict[str, Any] = {"global_pg": world_group(), "sharding_strategy": strategy, **settings}
    return DMPCollection(model, "cpu", plan_for(model, size, turned), dist.get_world_size(), size, **options)


def dense_of(model: DMPCollection) -> torch.optim.Optimizer:
    names = ("first", "last", "te.", "importance")
    return torch.optim.SGD([param for name, param in model.named_parameters() if name.startswith(names)], lr=0.1)


def step_of(model: DMPCollection, optimizer: torch.optim.Optimizer, batch: KeyedJaggedTensor) -> list[Tensor]:
    """Loss and output of a training step, with a sync where replicas are whole."""
    optimizer.zero_grad()
    loss, output = model(batch)
    loss.backward()
    optimizer.step()
    model.sync()
    return [loss.detach(), output]


def state_of(model: DMPCollection) -> dict[str, Tensor]:
    """Weights, and optimizer states of tables, that this rank publishes."""
    state = local_tensors(model.state_dict())
    for name, states in model.fused_optimizer.state_dict()["state"].items():
        state |= {f"{name} {key}": value for key, value in local_tensors(states).items()}
    return {name: value.clone() for name, value in state.items()}


def expect_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    differ = [name for name, value in one.items() if not torch.equal(value, other[name])]
    assert not differ, differ
    assert {value.dtype for value in one.values()} == {value.dtype for value in other.values()}


def tables_of(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What is of tables that are trained in their backward."""
    return {name: value for name, value in state.items() if "embedding" in name and "te." not in name}


def table_bytes(model: DMPCollection) -> int:
    """Bytes of this rank's tables and their states, whatever part of them is here."""
    with model.whole_tables():
        groups = [group for sharded in model._sharded.values() for group in sharded._tables.groups]
    return sum(t.numel() * t.itemsize for group in groups for t in (group.flat, *group.states))


def memory_of(model: DMPCollection) -> int:
    """Bytes of memory behind them, and behind what else has their parts."""
    groups = [group for sharded in model._sharded.values() for group in sharded._tables.groups]
    whole = [t for group in groups for t in (group.flat, *group.states, *group.parameters) if 0 not in t.stride()]
    parts = [part.piece for shards in model._parts() for part in (*shards._weights, *shards._states)]
    return sum({t.data_ptr(): t.untyped_storage().nbytes() for t in (*whole, *parts) if t.numel()}.values())


def live_bytes() -> int:
    """Bytes of all tensors of this process."""
    gc.collect()
    tensors = [thing for thing in gc.get_objects() if type(thing) in (Tensor, nn.Parameter)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def steps_beside(optimizer: str) -> None:
    whole, spread = build(DEFAULT, optimizer), build(FULLY, optimizer)
    assert all(isinstance(sharded.shards, FullyShardedShards) for sharded in spread._sharded.values())
    optimizers = [dense_of(whole), dense_of(spread)]
    for step in range(4):
        of_both = [step_of(m, o, batch_of(step)) for m, o in zip((whole, spread), optimizers, strict=True)]
        assert all(map(torch.equal, *of_both)), step
        if step == 1:
            whole.eval(), spread.eval()
            with torch.no_grad():
                assert torch.equal(whole(batch_of(9))[1], spread(batch_of(9))[1])
            # a backward of a module in eval() reaches weights of ids and leaves tables alone
            of_both = [[m(batch_of(9))[0], *(p for n, p in m.named_parameters() if n == "importance")]
                       for m in (whole, spread)]  # fmt: skip
            assert torch.equal(*(torch.autograd.grad(loss, param)[0] for loss, param in of_both))
            whole.train(), spread.train()
    expect_equal(state_of(whole), state_of(spread))
    # gradients of two batches in one step of the tables
    for model, dense in zip((whole, spread), optimizers, strict=True):
        dense.zero_grad()
        fused = [sharded.fused_optimizer for sharded in model._sharded.values()]
        for of_tables in fused:
            of_tables.accumulate_gradients()
        for step in (4, 5):
            model(batch_of(step))[0].backward()
        for of_tables in fused:
            of_tables.step()
            of_tables.accumulate_gradients(False)
        dense.step()
        model.sync()
    expect_equal(state_of(whole), state_of(spread))


@pytest.mark.filterwarnings("ignore:.*in eval")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_steps_are_those_of_default_with_a_sync_after_each(optimizer: str) -> None:
    """Losses, outputs, weights and optimizer states, bit for bit; in evaluation and with gradients that wait, too."""
    run_ranks(WORLD, steps_beside, optimizer)


def steps_in_a_block(keep: bool) -> None:
    """A step and an evaluation inside of `whole_tables`, and with `keep` a write between them."""
    whole, spread = build(DEFAULT, "adam", 1), build(FULLY, "adam", 1)
    (wide, other), name = (dense_of(whole), dense_of(spread)), "ebc.embedding_bags.tf.weight"
    step_of(whole, wide, batch_of(0)), step_of(spread, other, batch_of(0))
    with spread.whole_tables(keep=keep), torch.no_grad():
        for model, dense in ((whole, wide), (spread, other)):
            with torch.enable_grad():
                step_of(model, dense, batch_of(1))
            if keep:
                model.get_parameter(f"module.{name}").mul_(0.5)
        for (name, one), other_param in zip(whole.named_parameters(), spread.parameters(), strict=True):
            assert torch.equal(one, other_param), name
        whole.eval(), spread.eval()
        assert torch.equal(whole(batch_of(9))[1], spread(batch_of(9))[1])
        whole.train(), spread.train()
    assert all(map(torch.equal, step_of(whole, wide, batch_of(2)), step_of(spread, other, batch_of(2))))
    expect_equal(state_of(whole), state_of(spread))


@pytest.mark.parametrize("keep", [True, False])
def test_a_step_inside_of_whole_tables_is_a_step_like_any_other(keep: bool) -> None:
    """With keep=True such a step left NaNs in all tables, without a word, since its end let the whole tables go; and
    a lookup after a write in the block was refused as one of tables that are away."""
    run_ranks(2, steps_in_a_block, keep)


def refused_writes() -> list[str]:
    spread, errors = build(FULLY, size=1), []
    param = spread.get_parameter("module.ebc.embedding_bags.ta.weight")
    for write in (lambda: param.data.fill_(0.0), lambda: setattr(param, "data", torch.zeros(param.shape))):
        write()
        errors.append(error_of(spread.state_dict))
        # told once: what was written is gone
        spread.load_state_dict(spread.state_dict())
    return errors


def test_writes_to_data_of_parameters_that_are_away_are_refused() -> None:
    """`param.data = ...` and `param.data.fill_(...)` change no version of the parameter, so they were taken for
    nothing: the program went on with the tables as they were, without a word."""
    for errors in run_ranks(2, refused_writes):
        assert len(errors) == 2 and all("'ta': its parameter was written" in error for error in errors), errors


def memory() -> None:
    spread, named = build(FULLY, "adam"), build(FULLY, "adam", rs_awaitable_hook_module="first")
    # a part of each tensor may have been made longer by the padding of one element
    tensors = sum(1 + len(g.states) for sharded in spread._sharded.values() for g in sharded._tables.groups)
    half, whole = table_bytes(spread) / 2, table_bytes(spread)
    counted: list[int] = []
    for model in (spread, named):
        seen: Any = model.module
        seen.seen.append(lambda model=model: counted.append(memory_of(model)))
        seen.first.register_forward_hook(lambda *_, model=model: counted.append(memory_of(model)))
        dense = dense_of(model)
        for step in range(2):
            step_of(model, dense, batch_of(step))
        counted.append(memory_of(model))
    # after the bottom layer, and after lookups, of both steps; then between steps
    assert all(half <= bytes_held <= half + 4 * tensors for bytes_held in [*counted[:5], *counted[5:9]])
    # until the named module has run, the means of the last step are on their way
    assert counted[9] >= 1.5 * whole
    named.ensure_reduce_scatter_complete()
    assert memory_of(named) == memory_of(spread)
    assert sum(shards.held_bytes() for shards in named._parts()) == memory_of(named)
    named.ensure_reduce_scatter_complete()
    expect_equal(state_of(spread), state_of(named))
    with pytest.warns(UserWarning, match="custom_all_reduce has no effect"):
        spread.set_all_reduce_hook(list.clear)
    spread.sync()
    # what is not here shows NaNs, which cannot be written
    params = {name: param for name, param in spread.named_parameters() if "td." in name or "ta." in name}
    assert list(params["ebc.embedding_bags.td.weight"].shape) == [ROWS["d"], DIM]
    assert all(param.isnan().all() for param in params.values())
    with pytest.raises(RuntimeError, match="single memory location"), torch.no_grad():
        params["ebc.embedding_bags.td.weight"].normal_()
    published = local_tensors(spread.state_dict())
    with spread.whole_tables(keep=True), torch.no_grad():
        assert all(torch.equal(param, published[name]) for name, param in params.items())
        params["ebc.embedding_bags.td.weight"].fill_(1)
    assert bool((local_tensors(spread.state_dict())["ebc.embedding_bags.td.weight"] == 1).all())
    with torch.no_grad():
        params["ebc.embedding_bags.td.weight"].fill_(2)
    with pytest.raises(RuntimeError, match="table 'td': its parameter was written while its rows were away"):
        spread.state_dict()


def large() -> int:
    before = live_bytes()
    ebc = EmbeddingBagCollection(bag_tables({"a": 6001}, dim=32))
    apply_optimizer_in_backward(torch.optim.Adam, ebc.parameters(), {"lr": 0.1})
    some: dict[str, Any] = {"world_size": 1, "local_size": 1, "device_type": "cpu"}
    plan = ShardingPlan({"": construct_module_sharding_plan(ebc, {"ta": table_wise(0)}, **some)})
    model = DMPCollection(ebc, "cpu", plan, 2, 1, world_group(), sharding_strategy=FULLY)
    del ebc
    batch = random_kjt({"a": 6001}, 4, seed=dist.get_rank())
    for _ in range(2):
        model(batch).values().sum().backward()
    model.eval()
    with torch.no_grad():
        model(batch).values()
    model.fused_optimizer.state_dict(), model.state_dict()
    return live_bytes() - before


def test_no_tensor_keeps_the_memory_of_whole_tables() -> None:
    half = 3 * 4 * 6001 * 32 / 2
    assert all(half < held < 1.05 * half for held in run_ranks(2, large))


def test_between_steps_a_replica_holds_its_part_of_weights_and_states() -> None:
    """Half of them at two replicas, also after a lookup; with a hook's module named, from the end of its forward on."""
    run_ranks(WORLD, memory)


def checkpoints(folder: str) -> dict[str, Tensor]:
    whole, spread = build(DEFAULT, "adam"), build(FULLY, "adam")
    optimizers = [dense_of(whole), dense_of(spread)]
    for model, dense in zip((whole, spread), optimizers, strict=True):
        for step in range(2):
            step_of(model, dense, batch_of(step))
    paths = [
        checkpoint.save(f"{folder}/{name}", model, dense, step=2).path
        for name, model, dense in zip(("whole", "spread"), (whole, spread), optimizers, strict=True)
    ]
    names = [str(file.relative_to(paths[0])) for file in paths[0].rglob("*.safetensors")]
    assert names and filecmp.cmpfiles(paths[0], paths[1], names, shallow=False) == (names, [], [])
    saved = checkpoint.full_state_dict(spread)
    expect_equal(checkpoint.full_state_dict(whole), saved)
    # each in each, and under another plan and number of replicas
    for path, size, turned in ((paths[0], GROUP, False), (paths[1], GROUP, True), (paths[1], 1, False)):
        other = build(FULLY, "adam", size, turned=turned)
        checkpoint.load(path, other, dense_of(other))
        expect_equal(checkpoint.full_state_dict(other), saved)
    fresh = build(DEFAULT, "adam")
    checkpoint.load(paths[1], fresh, dense_of(fresh))
    expect_equal(state_of(fresh), state_of(whole))
    # by state dicts, which are copies: they stay as they are when training goes on
    published, states = spread.state_dict(), spread.fused_optimizer.state_dict()
    before = {name: value.clone() for name, value in local_tensors(published).items()}
    kept = state_of(spread)
    step_of(spread, optimizers[1], batch_of(5))
    expect_equal(tables_of(local_tensors(published)), tables_of(before))
    restored = build(FULLY, "adam")
    restored.load_state_dict(published)
    restored.fused_optimizer.load_state_dict(states)
    expect_equal(tables_of(kept), tables_of(state_of(restored)))
    # by torch.distributed.checkpoint
    torch.distributed.checkpoint.save(restored.state_dict(), checkpoint_id=f"{folder}/dcp")
    plain: Any = Net("adam")
    state = plain.state_dict()
    torch.distributed.checkpoint.load(state, checkpoint_id=f"{folder}/dcp", no_dist=True)
    expect_equal(tables_of(state), tables_of(saved))
    # another plan in the middle of training moves rows and states; the steps after it are those of whole replicas
    moved = {"ta": plan_for(plain, turned=True).plan["ebc"]["ta"]}
    for model in (whole, restored):
        model.load_state_dict(published)
        model.fused_optimizer.load_state_dict(states)
        model.reshard(moved, "ebc", resplit="mean")
    both = [step_of(model, dense_of(model), batch_of(7)) for model in (whole, restored)]
    assert all(map(torch.equal, *both))
    expect_equal(tables_of(state_of(whole)), tables_of(state_of(restored)))
    # as does a move of the whole model
    restored.to("cpu")
    expect_equal(tables_of(state_of(whole)), tables_of(state_of(restored)))
    return saved


def two_ranks(path: str) -> dict[str, Tensor]:
    model = build(FULLY, "adam", 1)
    checkpoint.load(path, model, dense_of(model))
    return checkpoint.full_state_dict(model)


def test_checkpoints_are_those_of_whole_replicas(tmp_path: Path) -> None:
    """Files and state dicts are equal byte for byte, and load under other plans, strategies and numbers of ranks."""
    ranks = run_ranks(WORLD, checkpoints, str(tmp_path))
    path = checkpoint.latest(tmp_path / "spread")
    for saved in run_ranks(2, two_ranks, str(path)):
        expect_equal(saved, ranks[0])


class Flat(nn.Module):
    """A model as pipelines want it."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.ebc, self.ec, self.last = net.ebc, net.ec, net.last

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        pooled, rows = self.ebc(features).values(), self.ec(features)["f"].values()
        return pooled.square().mean() + rows.sin().sum(), pooled.detach()


def mixed_and_piped() -> None:
    """Each part of this is a model beside one of DEFAULT."""
    net = Net()
    plan = plan_for(net)
    of_rows = DMPCollectionConfig(EmbeddingCollection, ShardingPlan({"ec": plan.plan["ec"]}), GROUP,
                                  sharding_strategy=FULLY)  # fmt: skip
    some: dict[str, Any] = {"world_size": 4, "local_size": 4, "device_type": "cpu"}
    everywhere = construct_module_sharding_plan(net.ec, {"ta": row_wise(), "tf": row_wise()}, **some)
    of_all = DMPCollectionConfig(EmbeddingCollection, ShardingPlan({"ec": everywhere}), 4)
    for strategy, config, wanted in ((ShardingStrategy.PER_MODULE, of_rows, [0, 0, 1]), (FULLY, of_all, [1, 1, 0])):
        plain = DMPCollectionConfig(EmbeddingCollection, config.plan, config.sharding_group_size)
        whole = build(DEFAULT, submodule_configs=[plain])
        mixed = build(strategy, submodule_configs=[config])
        assert [sharded.shards.fully_sharded for sharded in mixed._sharded.values()] == list(map(bool, wanted))
        for step in range(2):
            both = [step_of(model, dense_of(model), batch_of(step)) for model in (whole, mixed)]
            assert all(map(torch.equal, *both))
        expect_equal(state_of(whole), state_of(mixed))

    def piped(strategy: ShardingStrategy) -> tuple[list[Tensor], dict[str, Tensor]]:
        model: Any = Flat(Net("rowwise adagrad"))
        where = ShardingPlan({path: plan.plan[path] for path in ("ebc", "ec")})
        dmp = DMPCollection(model, "cpu", where, WORLD, GROUP, world_group(), sharding_strategy=strategy)
        trained = [param for name, param in dmp.named_parameters() if "te." in name or "last" in name]
        pipeline: Any = TrainPipelineSparseDist(dmp, torch.optim.SGD(trained, lr=0.1), torch.device("cpu"))
        batches = iter([batch_of(step) for step in range(5)])
        return [pipeline.progress(batches) for _ in range(5)], state_of(dmp)

    (outputs, state), (others, other) = piped(DEFAULT), piped(FULLY)
    assert all(map(torch.equal, outputs, others))
    expect_equal(state, other)
    # rows in a store lie in other slots on other replicas
    mix = sharding_mixes.mix_for("row_wise", pooled=True)
    with pytest.raises(ValueError, match="FULLY_SHARDED: tables whose rows are in a row store"):
        sharding_mixes.shard(mix, sharding_mixes.build(mix, "sgd"), build(FULLY)._env, stores=dict)
    # four replicas: the mean is added in another order, and is the same on all of them
    whole, spread = build(DEFAULT, size=1), build(FULLY, size=1)
    for step in range(2):
        both = [step_of(model, dense_of(model), batch_of(step)) for model in (whole, spread)]
        torch.testing.assert_close(*both)
    torch.testing.assert_close(state_of(whole), state_of(spread), rtol=1e-3, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*find_unused")
def test_modules_may_differ_in_it_and_pipelines_serve_it() -> None:
    run_ranks(WORLD, mixed_and_piped)


def failing() -> None:
    rank, policy = dist.get_rank(), LookupPolicy(gradient_check=GradientCheckMode.RAISE)
    for fault in ("dense layer", "bad id", "gradient"):
        # a group of its own, which the failure closes
        group: Any = dist.new_group(list(range(WORLD)))
        model = build(FULLY, model=Net("sgd", policy), global_pg=group, timeout_s=20)
        net: Any = model.module
        dense = dense_of(model)
        step_of(model, dense, batch_of(0))
        batch, wanted = batch_of(1), RankFailure
        if fault == "dense layer" and rank == 3:
            net.seen.append(lambda: 1 // 0)
            wanted = ZeroDivisionError
        if fault == "bad id":
            if rank == 3:
                batch.values()[0] = 99
            # the sharding group of the rank agrees on what it raises
            wanted = IndexError if rank % 2 else RankFailure
        if fault == "gradient":
            if rank == 3:
                net.last.register_full_backward_hook(lambda module, of_input, of_output: (of_input[0] * math.nan,))
            wanted = FloatingPointError if rank % 2 else RankFailure
        with pytest.raises(wanted) as error:
            step_of(model, dense, batch)
        if wanted is RankFailure:
            raised: Any = error.value
            assert set(raised.ranks) <= {1, 3}, fault
        # the group is closed on all ranks: nothing is begun that would wait
        with pytest.raises(RankFailure):
            model.state_dict()
        del model, net, dense
        gc.collect()


def test_a_rank_that_fails_is_a_failure_of_all_replicas() -> None:
    """In its own code, or together with its sharding group alone: the other replicas do not wait for its part."""
    run_ranks(WORLD, failing, timeout=90)

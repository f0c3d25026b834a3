"""Tables go over to another plan in the middle of training, and train on as if they had begun with it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jagged_batches import random_kjt
from model_zoo import fused
from ranks import error_of, run_ranks
from sharding_mixes import (
    OPTIMIZERS,
    STRATEGIES,
    Mix,
    TableCase,
    address,
    build,
    environment,
    held,
    mix_of,
    same_tensors,
    shard,
    shards_of,
    train_alone,
)
from sharding_steps import expect_held, expect_outputs, train_on
from torch import Tensor, nn

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    ShardingPlan,
)
from shardwise.embeddings import RowWiseAdagrad
from shardwise.planner.layout import (
    Shard,
    TableOptions,
    column_wise,
    data_parallel,
    row_wise,
    table_wise,
)
from shardwise.sharding import (
    EmbeddingModuleShardingPlan,
    ShardedEmbeddingBagCollection,
    construct_module_sharding_plan,
)
from shardwise.sharding.modules import generators

pytestmark = pytest.mark.ranks

EXACT = TableOptions(reduction="ordered", row_state="table")


def mix_by(strategies: tuple[str, ...], *, pooled: bool = True, options: TableOptions = EXACT) -> Mix:
    tables = [
        TableCase(f"t{n}", (5, 12, 7)[n], 8, (f"f{n}",), strategy, options=options, seed=n)
        for n, strategy in enumerate(strategies)
    ]
    return Mix(tuple(tables), pooled=pooled, settings=())


def go_over(model: Any, mix: Mix, **more: Any) -> None:
    world = dist.get_world_size()
    shards = [shard for table in mix.tables for shard in shards_of(table, world, min(2, world))]
    model.reshard(shards, {table.name: table.options for table in mix.tables}, **more)


def train_through(plans: list[Mix], optimizer: str, steps_per_plan: int) -> tuple[list[list[Tensor]], Any]:
    """Some steps under each plan; outputs, what this rank holds at the end, and what its parameters are."""
    model = shard(plans[0], build(plans[0], optimizer), environment())
    before = [id(param) for param in model.parameters()]
    outputs = []
    for number, mix in enumerate(plans):
        if number:
            go_over(model, mix)
        outputs += train_on(mix, model, range(number * steps_per_plan, (number + 1) * steps_per_plan))
    assert [id(param) for param in model.parameters()] == before
    last = plans[-1]
    fresh = shard(last, build(last, optimizer), environment())
    # the same shards in the same places as a model that was sharded by this plan from the start
    assert [p.shape for p in fresh.parameters()] == [p.shape for p in model.parameters()]
    assert list(model.state_dict()) == list(fresh.state_dict())
    return outputs, held(model)


def expect_one_process(plans: list[Mix], optimizer: str, steps_per_plan: int, world: int) -> None:
    steps = range(steps_per_plan * len(plans))
    run = train_alone(plans[0], optimizer, len(steps))
    ranks = run_ranks(world, train_through, plans, optimizer, steps_per_plan)
    expect_outputs(plans[0], run, [outputs for outputs, _ in ranks], steps)
    for _, (weights, states) in ranks:
        expect_held(run, weights, states)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("pooled", [True, False], ids=["bags", "rows"])
def test_whole_tables_then_rows_then_columns_train_as_one_process(pooled: bool, optimizer: str) -> None:
    plans = [mix_by((strategy,) * 3, pooled=pooled) for strategy in ("table_wise", "row_wise", "column_wise")]
    expect_one_process(plans, optimizer, 2, 2)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("world", [1, 2, 4])
def test_any_mix_goes_over_to_any_other(seed: int, world: int) -> None:
    """Replicas too, shards without rows, several column blocks on a rank; half precision tables, rounded by chance."""
    drawn = mix_of(seed, pooled=seed % 3 != 0)
    first = replace(drawn, tables=tuple(replace(table, options=EXACT) for table in drawn.tables), settings=())
    tables = [
        replace(table, strategy=STRATEGIES[(STRATEGIES.index(table.strategy) + seed + n + 1) % 7], seed=table.seed + 1)
        for n, table in enumerate(first.tables)
    ]
    plans = [first, replace(first, tables=tuple(tables)), first]
    expect_one_process(plans, ("adam", "rowwise_adagrad", "sgd")[seed % 3], 1, world)


def resplit(plan: str) -> tuple[str, Any, Any]:
    """Numbers per row of a table that goes over to other column blocks."""
    module = fused(EmbeddingBagCollection([table("t", "f", 4)]), RowWiseAdagrad)
    model = sharded(module, column_wise("t", 4, 8, [0, 1, 0], [2, 4, 2]))
    for part, group, number in model.states.homes("t"):
        group.state_views(number)["momentum1"].copy_(torch.arange(4.0) + 10 * part.cols[0])
    cuts = {
        "halves": column_wise("t", 4, 8, [1, 0]),
        "whole": table_wise("t", 4, 8, 1),
        "rows": row_wise("t", 4, 8, [1, 0]),
    }
    error = error_of(model.reshard, cuts[plan])
    unchanged = held(model)[1]
    model.reshard(cuts[plan], resplit="mean")
    return error, unchanged, held(model)[1]


def sharded(module: EmbeddingBagCollection, shards: list[Shard]) -> ShardedEmbeddingBagCollection:
    default = (torch.optim.SGD, {"lr": 0.01})
    return ShardedEmbeddingBagCollection(module, shards, environment(), torch.device("cpu"), default_optimizer=default)


@pytest.mark.parametrize("plan", ["halves", "whole", "rows"])
def test_numbers_per_row_of_other_column_blocks_are_averaged_only_on_request(plan: str) -> None:
    """Blocks of 2, 4 and 2 columns have 0, 20 and 60 more than the row's number."""
    wanted = {
        # [0, 4) is half of the first and half of the second; [4, 8) of the second and the third
        "halves": {"t|0:4|0:4": 10.0, "t|0:4|4:8": 40.0},
        "whole": {"t|0:4|0:8": 25.0},
        "rows": {"t|0:2|0:8": 25.0, "t|2:4|0:8": 25.0},
    }[plan]
    averages: dict[str, Tensor] = {}
    for error, unchanged, states in run_ranks(2, resplit, plan):
        assert re.search(
            r"^ValueError: rank 0: table 't': .*of columns \[\(0, 2\), \(2, 6\), \(6, 8\)\].*resplit='mean'", error
        ), error
        assert set(unchanged) <= {"t|0:4|0:2/momentum1", "t|0:4|2:6/momentum1", "t|0:4|6:8/momentum1"}
        averages.update(states)
    assert averages.keys() == {f"{key}/momentum1" for key in wanted}
    for key, extra in wanted.items():
        assert torch.equal(averages[f"{key}/momentum1"], torch.arange(4.0)[address(key)[1]] + extra)


def refusals() -> dict[str, str]:
    mix = mix_by(("table_wise", "data_parallel", "row_wise"))
    model = shard(mix, build(mix, "adam"), environment())
    before = held(model)
    good = [shard for table in mix.tables for shard in shards_of(table, 2, 2)]
    own_table = table_wise("t0", 5, 8, dist.get_rank())
    attempts: dict[str, Any] = {
        "cells missing": lambda: model.reshard(good[:-1]),
        "unknown table": lambda: model.reshard(good, {"x": TableOptions()}),
        "unknown rule": lambda: model.reshard(good, resplit="sum"),
        "one rank alone": lambda: model.reshard(good[:-1] if dist.get_rank() == 1 else good),
        "another plan": lambda: model.reshard([*own_table, *good[1:]]),
    }
    errors = {}
    for case, attempt in attempts.items():
        errors[case] = error_of(attempt)
        assert all(map(same_tensors, before, held(model)))
    train_on(mix, model, range(1))
    return errors


def test_what_cannot_be_is_refused_on_all_ranks_and_changes_nothing() -> None:
    for errors in run_ranks(2, refusals):
        expected = {
            "cells missing": r"^ValueError: rank 0: table 't2': shards hold 16 of 56 cells",
            "unknown table": r"^ValueError: rank 0: options are given for tables \['x'\]",
            "unknown rule": r"^ValueError: rank 0: resplit must be 'mean' or None, got 'sum'",
            "one rank alone": r"^ValueError: rank 1: table 't2'",
            "another plan": r"^RuntimeError: ranks differ in what all must share: place of table",
        }
        assert errors.keys() == expected.keys()
        for case, pattern in expected.items():
            assert re.search(pattern, errors[case]), errors[case]


def rates() -> list[float]:
    mix, other = mix_by(("table_wise",) * 3), mix_by(("row_wise",) * 3)
    model = shard(mix, build(mix, "adam"), environment())
    fused = model.fused_optimizer
    schedule = torch.optim.lr_scheduler.ExponentialLR(fused, 0.5)
    fused.step()
    schedule.step()
    # not yet with the tables
    go_over(model, other)
    lrs = [group.lr for group in model._tables.groups]
    fused.step()
    return lrs + [group.lr for group in model._tables.groups]


def test_learning_rates_and_schedules_stay() -> None:
    for lrs in run_ranks(2, rates):
        half = len(lrs) // 2
        assert lrs == [0.05] * half + [0.025] * half


def table(name: str, feature: str, rows: int = 9) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(rows, 8, name, feature_names=[feature])


class Net(nn.Module):
    """Two collections, a dense layer and a sparse one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.ebc = fused(EmbeddingBagCollection([table("a", "a"), table("b", "b")]), torch.optim.Adam)
        self.other = fused(EmbeddingBagCollection([table("c", "a")]), torch.optim.Adam)
        self.sparse = nn.Embedding(3, 8, sparse=True)
        # unused, and DDP refuses sparse gradients that it never sees
        self.sparse.weight.requires_grad_(False)
        self.over = nn.Linear(24, 1)

    def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
        pooled = torch.cat([self.ebc(kjt).values(), self.other(kjt).values()], dim=1)
        return self.over(pooled).square().mean()  # type: ignore[no-any-return]


def plan_by(net: Net, cut: Any) -> ShardingPlan:
    world = dist.get_world_size()
    tables = construct_module_sharding_plan(net.ebc, {"a": cut, "b": generators.table_wise(0)}, world_size=world)
    other = construct_module_sharding_plan(net.other, {"c": generators.table_wise(1)}, world_size=world)
    return ShardingPlan({"ebc": tables, "other": other})


def losses(dmp: DistributedModelParallel, steps: range) -> list[float]:
    history = []
    for step in steps:
        loss = dmp(random_kjt({"a": 9, "b": 9}, 3, seed=step + 10 * dist.get_rank()))
        loss.backward()
        history.append(float(loss.detach()))
    return history


def go_over_model(form: str) -> tuple[list[float], list[float], float, str, list[str]]:
    net = Net()
    rows, columns = generators.row_wise(), generators.column_wise([1, 0])
    dmp = DistributedModelParallel(net, plan=plan_by(net, generators.table_wise(1)))
    fused = dmp.fused_optimizer
    history = losses(dmp, range(2))
    volume = -1.0
    for cut, steps in ((rows, range(2, 4)), (columns, range(4, 6))):
        plan = plan_by(Net(), cut).plan["ebc"]
        delta = EmbeddingModuleShardingPlan({"a": plan["a"]})
        forms: dict[str, tuple[Any, str | None]] = {
            "delta": ({"ebc": (1.5, delta)}, None), "named": ({"ebc": (1.5, delta), "other": (2.0, {})}, "ebc"),
            "plan": (plan, "ebc"),
        }  # fmt: skip
        volume = dmp.reshard(*forms[form])
        history += losses(dmp, steps)
        assert dmp.plan.plan["ebc"]["a"] == plan["a"]
    # optimizers made before see the tables where they are now
    names = [key for values in fused.state_dict()["state"].values() for key in values if key.startswith("a.")]
    fresh = DistributedModelParallel(Net(), plan=plan_by(Net(), generators.table_wise(1)))
    unknown: list[dict[str, Any]] = [{"x": (0.0, {})}, {"ebc": (0.0, {"x": plan["a"]})}, dict(plan)]
    for argument, message in zip(unknown, ("'x'", "tables .'x'", "sharded_module_fqn"), strict=True):
        with pytest.raises(ValueError, match=message):
            dmp.reshard(argument)
    assert dmp.sparse_grad_parameter_names() == ["sparse.weight"]
    assert [name for name, _ in dmp.bare_named_parameters()] == [name for name, _ in Net().named_parameters()]
    return history, losses(fresh, range(6)), volume, str(dmp.plan), names


@pytest.mark.parametrize("form, volume", [("delta", 1.5), ("named", 1.5), ("plan", 2 * 9 * 8 * 4 / 2**20)])
def test_a_model_is_resharded_by_a_plan_of_what_changes(form: str, volume: float) -> None:
    for history, wanted, reshard_volume, plan, names in run_ranks(2, go_over_model, form):
        assert history == pytest.approx(wanted, abs=1e-6)
        assert reshard_volume == volume
        assert "column_wise" in plan
        assert names == ["a.momentum1", "a.momentum2", "a.step"]


def counts() -> tuple[str, str]:
    apart, rows = (("table_wise",) * 3, ("row_wise",) * 3)
    mix, other = (mix_by(plan, options=TableOptions()) for plan in (apart, rows))
    model = shard(mix, build(mix, "adam"), environment())
    if dist.get_rank() == 1:
        model.fused_optimizer.set_optimizer_step(5)
    together = error_of(go_over, model, other)
    # replicated tables without an optimizer are trained by their gradient
    dense = sharded(EmbeddingBagCollection([table("t", "f", 4)]), data_parallel("t", 4, 8, 2))
    dense.reshard(data_parallel("t", 4, 8, 2))
    return together, error_of(dense.reshard, table_wise("t", 4, 8, 0))


def test_tables_that_would_count_updates_together_must_agree_on_them() -> None:
    """Adam reads the number, and tables that share a group share it."""
    for message, dense in run_ranks(2, counts):
        match = re.search(r"^ValueError: tables \['t0', 't1', 't2'\] have seen .*, (\[.*\]), and", message)
        assert match and set(match[1]) == set("[0, 5]"), message
        assert dense.startswith("ValueError: rank 0: table 't' is trained by its gradient, which has the shape")

"""Every plan that the planner returns for a model is accepted and trains as one process; if it fails, all ranks do."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jagged_batches import random_kjt
from ranks import run_ranks
from torch import Tensor, nn

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
    ShardingType,
    apply_optimizer_in_backward,
    get_default_sharders,
)
from shardwise.planner.constraints import ParameterConstraints
from shardwise.planner.errors import PlannerError, PlannerErrorType
from shardwise.planner.topology import Topology
from shardwise.sharding.planning.planners import EmbeddingShardingPlanner

pytestmark = pytest.mark.ranks

TYPES = [kind.value for kind in ShardingType]
KINDS = ("pooled", "weighted", "sequence")
COSTS = ("shardwise", "torchrec")
# samples of all ranks
BATCH = 8
# hosts of two ranks, where there are as many
LOCAL = {1: 1, 2: 2, 4: 2}
# a table of this many samples' step: partial sums are added in another order
TOLERANCE = 1e-5


@dataclass(frozen=True)
class TableSpec:
    """A table of a model, its optimizer (None: the one of a sharded table that has none) and its constraint."""

    name: str
    kind: str
    rows: int
    dim: int
    features: tuple[str, ...]
    optimizer: type[torch.optim.Optimizer] | None = torch.optim.SGD
    mean: bool = False
    constraint: ParameterConstraints | None = field(default=None, hash=False)


def random_model(seed: int) -> tuple[TableSpec, ...]:
    """Tables in collections of one to three kinds, about half of them with constraints."""
    rng = random.Random(seed)
    kinds = rng.sample(KINDS, rng.randint(1, 3))
    tables = []
    for n in range(rng.randint(2, 6)):
        kind = rng.choice(kinds)
        features = tuple(f"{kind}{n}_{k}" for k in range(rng.randint(1, 2)))
        optimizer = rng.choice([torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, None])
        # rows of a sequence collection have one width
        dim = 8 if kind == "sequence" else rng.choice([4, 8, 16, 64])
        rows = rng.choice([1, 3, 17, 64, 500])
        constraint = random_constraint(rng, len(features)) if rng.random() < 0.6 else None
        tables.append(TableSpec(f"t{n}", kind, rows, dim, features, optimizer, rng.random() < 0.3, constraint))
    return tuple(tables)


def random_constraint(rng: random.Random, features: int) -> ParameterConstraints:
    types = rng.sample(TYPES, rng.randint(1, 3)) if rng.random() < 0.8 else None
    whole = types is None or "table_wise" in types
    return ParameterConstraints(
        sharding_types=types,
        min_partition=rng.choice([None, 4, 8]),
        pooling_factors=[rng.choice([0.5, 1.0, 20.0]) for _ in range(features)],
        same_rank="together" if whole and rng.random() < 0.3 else None,
        not_on=[0] if whole and rng.random() < 0.2 else None,
    )


def model_of_every_type() -> tuple[TableSpec, ...]:
    """A table for each sharding type in each kind of collection."""
    return tuple(
        TableSpec(
            f"{kind}_{sharding_type}", kind, 37, 8, (f"{kind}_{sharding_type}",),
            constraint=ParameterConstraints(sharding_types=[sharding_type], min_partition=4),
        )
        for kind in KINDS
        for sharding_type in TYPES
    )  # fmt: skip


class Net(nn.Module):
    """The collections of some tables, all their rows side by side, and a dense layer on top."""

    def __init__(self, tables: Sequence[TableSpec]) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.parts = nn.ModuleDict()
        for kind in KINDS:
            of_kind = [table for table in tables if table.kind == kind]
            if not of_kind:
                continue
            if kind == "sequence":
                self.parts[kind] = EmbeddingCollection(
                    [EmbeddingConfig(t.rows, t.dim, t.name, feature_names=list(t.features)) for t in of_kind]
                )
            else:
                configs = [
                    EmbeddingBagConfig(
                        t.rows, t.dim, t.name, feature_names=list(t.features),
                        pooling=PoolingType.MEAN if t.mean else PoolingType.SUM,
                    )
                    for t in of_kind
                ]  # fmt: skip
                self.parts[kind] = EmbeddingBagCollection(configs, is_weighted=kind == "weighted")
        params = {name.split(".")[-2]: param for name, param in self.named_parameters()}
        for table in tables:
            if table.optimizer is not None:
                apply_optimizer_in_backward(table.optimizer, [params[table.name]], {"lr": 0.1})
        # dense layers are not what is compared here: this one only has to be there
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, batches: dict[str, KeyedJaggedTensor]) -> Tensor:
        """[B, columns]."""
        outputs = []
        for kind, part in self.parts.items():
            output = part(batches[kind])
            if kind == "sequence":
                outputs += [jagged.to_padded_dense(4).flatten(1) for jagged in output.values()]
            else:
                outputs.append(output.values())
        return torch.cat(outputs, dim=1) * self.scale


def batches_of(tables: Sequence[TableSpec], begin: int = 0, end: int = BATCH) -> dict[str, KeyedJaggedTensor]:
    """Samples [begin, end) of the batch, by kind of collection."""
    batches = {}
    for seed, kind in enumerate(KINDS):
        rows = {feature: t.rows for t in tables if t.kind == kind for feature in t.features}
        if rows:
            batches[kind] = random_kjt(rows, BATCH, seed=seed, weighted=kind == "weighted", of=range(begin, end))
    return batches


def two_steps(model: nn.Module, batches: dict[str, KeyedJaggedTensor]) -> list[Tensor]:
    """Outputs before and after a step on a batch: the second have its gradients in them.

    What has a gradient afterwards, replicas without an optimizer, is trained as other tables without one.
    """
    before = model(batches)
    before.sin().sum(1).mean().backward()
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param -= 0.01 * param.grad
        return [before.detach().clone(), model(batches).clone()]


@cache
def alone(tables: tuple[TableSpec, ...]) -> list[Tensor]:
    return two_steps(Net(tables), batches_of(tables))


def constraints_of(tables: Sequence[TableSpec]) -> dict[str, ParameterConstraints]:
    return {table.name: table.constraint for table in tables if table.constraint is not None}


Job = tuple[tuple[TableSpec, ...], str | None]


def planned(jobs: Sequence[Job]) -> list[tuple[str, list[Tensor]] | None]:
    """One rank's plan and outputs for each model under each cost, or as DMP plans it; None where there is no plan."""
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ["LOCAL_WORLD_SIZE"] = str(LOCAL[world])
    per_rank, results = BATCH // world, []
    for tables, cost in jobs:
        model, plan = Net(tables), None
        if cost is not None:
            planner = EmbeddingShardingPlanner(batch_size=per_rank, constraints=constraints_of(tables), cost=cost)
            try:
                plan = planner.collective_plan(model)
            except PlannerError as error:
                assert error.error_type is PlannerErrorType.STRICT_CONSTRAINTS, error
                results.append(None)
                continue
        with warnings.catch_warnings():
            # tables without an optimizer, which this test has on purpose
            warnings.filterwarnings("ignore", message=".* have no optimizer")
            dmp = DistributedModelParallel(model, plan=plan)
        text = f"{dmp.plan._serialize()}\n{dmp.plan.explanation}"
        results.append((text, two_steps(dmp, batches_of(tables, rank * per_rank, (rank + 1) * per_rank))))
    return results


def expect_as_alone(world: int, jobs: Sequence[Job]) -> list[str]:
    """Check all jobs over so many ranks; the plans that there were."""
    ranks, plans = run_ranks(world, planned, jobs), []
    for n, (tables, cost) in enumerate(jobs):
        results = [result for rank in ranks if (result := rank[n]) is not None]
        if not results:
            continue
        plans.append(results[0][0])
        assert len(results) == world and len({text for text, _ in results}) == 1, f"{tables} {cost}: ranks differ"
        for step, wanted in enumerate(alone(tables)):
            output = torch.cat([outputs[step] for _, outputs in results])
            worst = float((output - wanted).abs().max()) / max(1.0, float(wanted.abs().max()))
            assert worst <= TOLERANCE, f"{tables}\n{results[0][0]}"
    return plans


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_plan_is_accepted_and_trains_as_one_process(world: int) -> None:
    """By our planner under each cost; and a model without a plan gets the planner's."""
    jobs: list[Job] = [(random_model(seed), cost) for seed in range(15) for cost in COSTS]
    *plans, default_plan = expect_as_alone(world, [*jobs, (random_model(3), None)])
    assert len(plans) >= len(jobs) // 2
    assert "slowest rank" in default_plan


@pytest.mark.parametrize("world", [1, 2, 4])
def test_tables_go_by_the_sharding_type_that_is_asked_for(world: int) -> None:
    # TorchRec's formulas are for fewer types
    (plan_text,) = expect_as_alone(world, [(model_of_every_type(), "shardwise")])
    for kind in KINDS:
        for sharding_type in TYPES:
            assert f"'{kind}_{sharding_type}': {{'sharding_type': '{sharding_type}'" in plan_text


class Broken(nn.Module):
    """Not even its parameters can be asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection([EmbeddingBagConfig(10**6, 128, "wide", feature_names=["f"])], device="meta")


def failures() -> list[tuple[str, str, str]]:
    """What a rank raises where rank 0 cannot plan, and where its planner breaks."""
    world, errors = dist.get_world_size(), []
    # other ranks have room: theirs is not asked
    small = Topology(world, "cpu", ddr_cap=(2**20 if dist.get_rank() == 0 else 2**40))
    breaks = Breaks(TypeError("a bug") if dist.get_rank() == 0 else None)
    odd = Breaks(Odd("unheard of") if dist.get_rank() == 0 else None)
    for planner in (
        EmbeddingShardingPlanner(small),
        EmbeddingShardingPlanner(Topology(world, "cpu"), callbacks=[breaks]),
        EmbeddingShardingPlanner(Topology(world, "cpu"), callbacks=[odd]),
    ):
        with pytest.raises(Exception) as raised:
            planner.collective_plan(Broken(), get_default_sharders(), dist.group.WORLD)
        kind = getattr(raised.value, "error_type", None)
        errors.append((type(raised.value).__name__, str(raised.value), str(kind)))
    # nobody is left waiting: the group goes on
    plan = EmbeddingShardingPlanner(Topology(world, "cpu")).collective_plan(Broken())
    assert "wide" in plan.plan["ebc"]
    return errors


class Odd(Exception):
    """No class that other ranks could know."""


class Breaks:
    """A callback that raises what it is given."""

    def __init__(self, error: Exception | None) -> None:
        self.error = error

    def __call__(self, options: list[Any]) -> list[Any]:
        if self.error is not None:
            raise self.error
        return options


def test_a_rank_that_cannot_plan_says_so_on_all_ranks() -> None:
    first, second = run_ranks(2, failures)
    for (_, text, kind), other in zip(first, second, strict=True):
        assert text in other[1] and kind == other[2]
    assert "INSUFFICIENT_STORAGE" in first[0][2] and "wide" in first[0][1]
    assert [name for name, *_ in second[1:]] == ["TypeError", "RuntimeError"]

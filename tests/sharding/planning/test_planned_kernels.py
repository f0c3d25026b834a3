"""Plans with kernel "dense", of narrow columns, and for other devices and more ranks than the process group's."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jagged_batches import random_kjt
from ranks import error_of, run_ranks
from torch import Tensor, nn

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    ShardingType,
)
from shardwise.planner.constraints import ParameterConstraints
from shardwise.planner.cost.shardwise import ShardwiseCost
from shardwise.planner.errors import PlannerError
from shardwise.planner.search.problem import PARTS
from shardwise.planner.tables import Feature, Table
from shardwise.planner.topology import Topology
from shardwise.sharding import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder, get_default_sharders
from shardwise.sharding.planning.planners import EmbeddingShardingPlanner

TYPES = [kind.value for kind in ShardingType]
ROWS, DIM = 40, 64


def model(dim: int = DIM, device: str = "meta") -> nn.ModuleDict:
    """A pooled and a sequence collection, of a table each that has no optimizer."""
    torch.manual_seed(2)
    bags = [EmbeddingBagConfig(ROWS, dim, "bags", feature_names=["f"])]
    rows = [EmbeddingConfig(ROWS, dim, "rows", feature_names=["f"])]
    place: Any = torch.device(device)
    return nn.ModuleDict(
        {"ebc": EmbeddingBagCollection(bags, device=place), "ec": EmbeddingCollection(rows, device=place)}
    )


class BagSharder(EmbeddingBagCollectionSharder):
    """A sharder that offers one type and kernel, as those of many tests do."""

    kind, kernel = "table_wise", "dense"

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [self.kind]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [self.kernel]


class RowSharder(EmbeddingCollectionSharder):
    """The same for sequences."""

    kind, kernel = "table_wise", "dense"
    sharding_types, compute_kernels = BagSharder.sharding_types, BagSharder.compute_kernels


def planned(topology: Topology, *, sharders: Any = None, dim: int = DIM, **constraint: Any) -> dict[str, Any]:
    asked = {name: ParameterConstraints(**constraint) for name in ("bags", "rows")} if constraint else None
    planner = EmbeddingShardingPlanner(topology, batch_size=4, constraints=asked)
    plan = planner.plan(model(dim), sharders or get_default_sharders())
    return {name: sharding for of_module in plan.plan.values() for name, sharding in of_module.items()}


@pytest.mark.parametrize("device", ["cpu", "cuda", "mtia"])
@pytest.mark.parametrize("kind", TYPES)
def test_dense_is_planned_under_every_sharding_type(kind: str, device: str) -> None:
    """By a constraint, and of a sharder that offers nothing else: there was no way to place the tables."""
    topology, sharders = Topology(4, device, local_world_size=2), [BagSharder(), RowSharder()]
    for sharder in sharders:
        sharder.kind = kind  # type: ignore[misc]
    by_constraint = planned(topology, sharding_types=[kind], compute_kernels=["dense"], min_partition=16)
    by_sharder = planned(topology, sharders=sharders, min_partition=16)
    for plan in (by_constraint, by_sharder):
        for sharding in plan.values():
            assert (sharding.sharding_type, sharding.compute_kernel) == (kind, "dense")
            cuts = [] if sharding.sharding_spec is None else sharding.sharding_spec.shards
            assert all(cut.placement.device().type == device for cut in cuts)
            assert sum(cut.shard_sizes[0] * cut.shard_sizes[1] for cut in cuts) == (ROWS * DIM if cuts else 0)


@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind != "data_parallel"])
@pytest.mark.parametrize(("dim", "ranks", "local"), [(8, 2, 2), (64, 2, 2), (8, 4, 2), (64, 1, 1)])
def test_a_sharder_of_one_type_has_its_tables_planned(kind: str, dim: int, ranks: int, local: int) -> None:
    """No way was known to place 8 columns column_wise where the sharder offers that alone,

    nor any table by a type that says "host" on one host; a constraint placed them.
    """
    sharders = [BagSharder(), RowSharder()]
    for sharder in sharders:
        sharder.kind, sharder.kernel = kind, "fused"  # type: ignore[misc]
    by_sharder = planned(Topology(ranks, "cpu", local_world_size=local), sharders=sharders, dim=dim)
    by_constraint = planned(Topology(ranks, "cpu", local_world_size=local), dim=dim, sharding_types=[kind])
    for name, sharding in by_sharder.items():
        assert (sharding.sharding_type, sharding.compute_kernel) == (kind, "fused")
        assert sharding.sharding_spec.shards == by_constraint[name].sharding_spec.shards
    with pytest.raises(PlannerError, match="leaves no way to place it"):
        other = "table_wise" if kind == "row_wise" else "row_wise"
        planned(Topology(ranks, "cpu", local_world_size=local), sharders=sharders, dim=dim, sharding_types=[other])


@pytest.mark.parametrize("device", ["cpu", "cuda", "mtia"])
def test_dense_alone_means_replicas_as_torchrecs_sharders_offer_it(device: str) -> None:
    for sharding in planned(Topology(4, device), compute_kernels=["dense"]).values():
        assert (sharding.sharding_type, sharding.compute_kernel) == ("data_parallel", "dense")
    for sharding in planned(Topology(4, device)).values():
        assert sharding.compute_kernel == "fused"


def test_a_dense_table_is_counted_with_its_gradient() -> None:
    """As many bytes as rows, and the time to fill it and to step all rows."""
    cost, table = ShardwiseCost(Topology(4, "cuda"), 64), Table("t", 10**6, DIM, features=(Feature("f"),))
    for kind in ("table_wise", "row_wise", "column_wise"):
        of_kernel = {}
        for kernel in ("fused", "dense"):
            asked = ParameterConstraints(sharding_types=[kind], compute_kernels=[kernel])
            of_kernel[kernel] = cost.price(table, cost.ways(table, asked)[0])
        fused, dense = of_kernel["fused"], of_kernel["dense"]
        assert int((dense.hbm - fused.hbm).sum()) == 4 * 10**6 * DIM
        more = {part: dense.parts_ms[n].sum() - fused.parts_ms[n].sum() for n, part in enumerate(PARTS)}
        assert [part for part, ms in more.items() if ms] == ["bwd_compute"]
        assert more["bwd_compute"] == pytest.approx(4 * 4 * 10**6 * DIM / cost.constants.copy_gb_s * 1e-6)


@pytest.mark.parametrize("dim", [4, 8, 10, 24, 48, 64, 128])
@pytest.mark.parametrize("narrowest", [1, 4, 6, 8, 16, 20])
@pytest.mark.parametrize("kind", ["column_wise", "table_column_wise", "grid_shard"])
def test_columns_narrower_than_the_default_are_planned(kind: str, narrowest: int, dim: int) -> None:
    """Of widths that TorchRec's planner may choose: equal ones of `min_partition` or more, multiples of 4, or all."""
    for topology in (Topology(8, "cuda", local_world_size=2), Topology(2, "cpu")):
        for sharding in planned(topology, dim=dim, sharding_types=[kind], min_partition=narrowest).values():
            widths = {cut.shard_sizes[1] for cut in sharding.sharding_spec.shards}
            assert len(widths) == 1 and dim % min(widths) == 0
            assert widths == {dim} or (min(widths) >= narrowest and min(widths) % 4 == 0)


def trained(net: Any, of: range, samples: int = 4) -> Tensor:
    """Outputs after a step of SGD over all parameters."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    batch = random_kjt({"f": ROWS}, samples, of=of)

    def outputs() -> Tensor:
        rows = net["ec"](batch)["f"].to_padded_dense(3).flatten(1)
        return torch.cat([net["ebc"](batch).values(), rows], dim=1)

    outputs().sin().sum(1).mean().backward()
    optimizer.step()
    return outputs().detach()


def elsewhere(device: str) -> tuple[list[str], Tensor, str]:
    """A plan for other devices trains here; one for more ranks is refused."""
    rank, world = dist.get_rank(), dist.get_world_size()
    net = model(8, "cpu")
    asked = {
        "bags": ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["dense"]),
        "rows": ParameterConstraints(sharding_types=["column_wise"], compute_kernels=["dense"], min_partition=4),
    }
    plan = EmbeddingShardingPlanner(Topology(world, device), constraints=asked).collective_plan(net)
    shardings: list[Any] = [sharding for of_module in plan.plan.values() for sharding in of_module.values()]
    placed = [str(cut.placement) for sharding in shardings for cut in sharding.sharding_spec.shards]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the plan places tables on")
        dmp = DistributedModelParallel(net, plan=plan, device=torch.device("cpu"))
    each = 4 // world
    outputs = trained(dmp.module, range(rank * each, (rank + 1) * each))
    larger = EmbeddingShardingPlanner(Topology(8, device), constraints=asked).collective_plan(model(8, "cpu"))
    return placed, outputs, error_of(DistributedModelParallel, model(8, "cpu"), plan=larger, device=torch.device("cpu"))


@pytest.mark.ranks
@pytest.mark.parametrize("device", ["cuda", "mtia"])
def test_a_plan_for_other_devices_trains_as_one_process_here(device: str) -> None:
    alone, ranks = trained(model(8, "cpu"), range(4)), run_ranks(2, elsewhere, device)
    torch.testing.assert_close(torch.cat([outputs for _, outputs, _ in ranks]), alone, rtol=1e-5, atol=1e-6)
    for placed, _, text in ranks:
        assert placed == [f"rank:{rank}/{device}:{rank}" for rank in (0, 1)] * 2
        assert "the plan is for 8 ranks" in text and "sharded over 2: plan again" in text

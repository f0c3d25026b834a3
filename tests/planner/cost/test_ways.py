"""The ways to cut a table: what the engine really runs, whole covers, and what constraints leave."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    ShardingEnv,
    apply_optimizer_in_backward,
    construct_module_sharding_plan,
)
from shardwise.planner.constraints import ParameterConstraints
from shardwise.planner.cost.ways import Way, split_widths, ways_of
from shardwise.planner.layout import CAPABILITIES, MIN_COLUMNS, TIERED_KERNELS, Tier, validate
from shardwise.planner.tables import Feature, Table
from shardwise.planner.topology import Topology
from shardwise.sharding import (
    CacheParams,
    column_wise,
    data_parallel,
    grid_shard,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from shardwise.sharding.calibration.trial import Placed
from shardwise.sharding.modules.default_sharders import require_sharder
from shardwise.sharding.plan.plan import (
    EmbeddingComputeKernel,
    ParameterSharding,
    ShardingType,
    shards_of,
)

# 1 rank is one host: every type has a cut there
GENERATORS = {
    "data_parallel": data_parallel(), "table_wise": table_wise(0), "column_wise": column_wise([0, 0]),
    "row_wise": row_wise(), "table_row_wise": table_row_wise(0), "table_column_wise": table_column_wise(0),
    "grid_shard": grid_shard([0]),
}  # fmt: skip


def _table(rows: int = 1000, dim: int = 128) -> Table:
    return Table("t", rows, dim, features=(Feature("f"),))


def _collection(pooled: bool) -> EmbeddingBagCollection | EmbeddingCollection:
    cpu, sizes = torch.device("cpu"), {"name": "t", "num_embeddings": 20, "embedding_dim": 8, "feature_names": ["f"]}
    if pooled:
        return EmbeddingBagCollection([EmbeddingBagConfig(**sizes)], device=cpu)  # type: ignore[arg-type]
    return EmbeddingCollection([EmbeddingConfig(**sizes)], device=cpu)  # type: ignore[arg-type]


def _plan(module: torch.nn.Module, kind: str, kernel: str) -> dict[str, ParameterSharding]:
    plan = construct_module_sharding_plan(
        module, {"t": GENERATORS[kind]}, local_size=1, world_size=1, device_type="cpu"
    )
    plan["t"].compute_kernel = kernel
    return dict(plan)


def _rows(made: Any) -> list[torch.Tensor]:
    """The rows of a sharded table, those below the device as well."""
    with made.shards.whole():
        return [parameter.detach().clone() for parameter in made.parameters()]


@pytest.mark.parametrize("pooled", [True, False])
@pytest.mark.parametrize(
    ("kind", "kernel"), [(kind, kernel) for kind, kernels in CAPABILITIES["cpu"].items() for kernel in kernels]
)
def test_what_the_table_lists_trains(kind: str, kernel: str, pooled: bool) -> None:
    module = _collection(pooled)
    if kernel in TIERED_KERNELS:
        # of replicas nobody else says it
        apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.5})
    made: Any = require_sharder(module).shard(module, _plan(module, kind, kernel), ShardingEnv.from_local(1, 0))
    before = _rows(made)
    embeddings = made(KeyedJaggedTensor(["f"], torch.tensor([3, 4, 3]), lengths=torch.tensor([2, 1])))
    out = embeddings.values() if pooled else dict(embeddings)["f"].values()
    out.sum().backward()
    changed = [not torch.equal(a, b) for a, b in zip(_rows(made), before, strict=True)]
    assert changed and all(changed) or all(parameter.grad is not None for parameter in made.parameters())
    assert (made.states.tables["t"].options.tier is not None) == (kernel in TIERED_KERNELS)


@pytest.mark.parametrize("kind", [kind.value for kind in ShardingType])
@pytest.mark.parametrize("kernel", [kernel.value for kernel in EmbeddingComputeKernel])
def test_what_the_table_does_not_list_is_refused(kind: str, kernel: str) -> None:
    module = _collection(True)
    plan = _plan(module, kind, kernel)
    if kernel in CAPABILITIES["cpu"][kind]:
        assert shards_of("t", plan["t"], 20, 8, 1)
    else:
        with pytest.raises(ValueError, match="table 't'"):
            shards_of("t", plan["t"], 20, 8, 1)


@pytest.mark.parametrize(
    ("world", "local", "rows", "dim"),
    [(1, 1, 10, 8), (2, 2, 1000, 64), (8, 8, 1000, 128), (8, 4, 7, 96), (16, 8, 10**6, 512), (256, 8, 3, 768)],
)
def test_every_way_covers_the_table_once(world: int, local: int, rows: int, dim: int) -> None:
    ways = ways_of(_table(rows, dim), Topology(world, "cuda", local_world_size=local))
    for way in ways:
        room = local if way.one_host else world
        starts = tuple(block * way.span % room for block in range(len(way.widths)))
        shards = Placed(_table(rows, dim), way, starts).shards(world)
        validate(shards, {"t": (rows, dim)}, world)
        assert len(way.widths) == 1 or (min(way.widths) >= MIN_COLUMNS and all(w % 4 == 0 for w in way.widths))
    assert len(ways) == len(set(ways)) <= 25


def _names(ways: list[Way]) -> set[str]:
    return {way.sharding_type for way in ways}


@pytest.mark.parametrize(
    ("topology", "names"),
    [
        (Topology(8, "cuda"), {"data_parallel", "table_wise", "column_wise", "row_wise"}),
        (Topology(16, "cuda", local_world_size=8), set(CAPABILITIES["cuda"])),
        (Topology(1, "cpu"), {"table_wise"}),
    ],
    ids=["one host has no ways by host", "two hosts have all seven types", "one rank has nothing to cut"],
)
def test_the_types_that_machines_have(topology: Topology, names: set[str]) -> None:
    assert _names(ways_of(_table(), topology)) == names


@pytest.mark.parametrize(
    ("constraint", "found"),
    [
        (ParameterConstraints(sharding_types=["row_wise"]), {("row_wise", (128,))}),
        (ParameterConstraints(compute_kernels=["dense"]), {("data_parallel", (128,))}),
        (ParameterConstraints(sharding_types=["column_wise"], min_partition=64), {("column_wise", (64, 64))}),
        # as `layout.split_columns` leaves a table whole that has too few columns
        (ParameterConstraints(sharding_types=["column_wise"], min_partition=100), {("column_wise", (128,))}),
        (ParameterConstraints(sharding_types=["table_row_wise"]), {("table_row_wise", (128,))}),
        (ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["dense"]), {("row_wise", (128,))}),
        (ParameterConstraints(compute_kernels=["ssd_virtual_table"]), set()),
    ],
)
def test_a_constraint_leaves_what_it_allows(
    constraint: ParameterConstraints, found: set[tuple[str, tuple[int, ...]]]
) -> None:
    ways = ways_of(_table(), Topology(4, "cpu"), constraint)
    assert {(way.sharding_type, way.widths) for way in ways} == found


def test_a_cut_table_is_dense_where_type_and_kernel_are_named() -> None:
    """The kernel alone means replicas, and a type alone the optimizer in the backward."""
    for kind in ("table_wise", "row_wise", "column_wise"):
        for kernels, expected in ((None, "fused"), (["dense"], "dense"), (["dense", "fused"], "fused")):
            asked = ParameterConstraints(sharding_types=[kind], compute_kernels=kernels)
            assert {way.compute_kernel for way in ways_of(_table(), Topology(4, "cpu"), asked)} == {expected}


@pytest.mark.parametrize(
    ("given", "tiers"),
    [
        ({}, {("fused", None)}),
        ({"compute_kernels": ["fused_uvm"]}, {("fused_uvm", Tier())}),
        (
            {"compute_kernels": ["fused", "fused_uvm_caching"], "cache_params": CacheParams(load_factor=0.25)},
            {("fused", None), ("fused_uvm_caching", Tier(0.25, max_slots=1.0))},
        ),
        ({"tier": Tier(7)}, {("fused", Tier(7))}),
    ],
)
def test_rows_are_below_the_device_only_where_a_constraint_says_so(
    given: dict[str, Any], tiers: set[tuple[str, Tier | None]]
) -> None:
    for kind in ("table_wise", "column_wise", "row_wise"):
        ways = ways_of(_table(), Topology(4, "cpu"), ParameterConstraints(sharding_types=[kind], **given))
        assert {(way.compute_kernel, way.tier) for way in ways} == tiers
    free = ways_of(_table(), Topology(4, "cpu"), ParameterConstraints(**given))
    assert {(way.compute_kernel, way.tier) for way in free if not way.replica} == tiers
    # replicas, each with a cache of its own, are not offered but by name
    assert not [way for way in free if way.replica and way.tier]


def test_a_constraint_on_kernels_chooses_among_those_of_a_type() -> None:
    ways = ways_of(_table(), Topology(4, "cpu"), ParameterConstraints(compute_kernels=["fused"]))
    assert {way.compute_kernel for way in ways} == {"fused"}
    assert _names(ways) == {"data_parallel", "table_wise", "column_wise", "row_wise"}


@pytest.mark.parametrize(
    ("dim", "narrowest", "most", "widths"),
    [
        (128, 32, 8, [(64, 64), (32,) * 4]),
        (128, 32, 2, [(64, 64)]),
        (96, 32, 8, [(48, 48), (32,) * 3]),
        # widths are multiples of 4
        (60, 12, 8, [(20,) * 3, (12,) * 5]),
        (30, 4, 8, [(30,)]),
    ],
)
def test_columns_are_cut_at_every_width_that_divides(
    dim: int, narrowest: int, most: int, widths: list[tuple[int, ...]]
) -> None:
    assert split_widths(dim, narrowest, most) == widths

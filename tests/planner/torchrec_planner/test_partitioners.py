"""Partitioners: which rank every shard gets; `GOLDEN` is where TorchRec places the same proposals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from checkout import golden

from shardwise.perf.evidence.planner_cases import (
    MIB,
    PARTITIONERS,
    PROPOSERS,
    Instance,
    Module,
    Weight,
    instance,
)
from shardwise.planner.torchrec import (
    partitioners,
    perf_models,
    proposers,
    types,
)
from shardwise.planner.torchrec.types import (
    Perf,
    PlannerError,
    PlannerErrorType,
    Shard,
    ShardingOption,
    Storage,
    Topology,
)

GOLDEN: Any = golden("planner_props")
BY = {"table_wise": "device", "column_wise": "device", "row_wise": "uniform", "table_row_wise": "host",
      "table_column_wise": "host", "grid_shard": "multi_host"}  # fmt: skip


def option(
    table: str, kind: str, shards: Sequence[tuple[int, float]], *, kernel: str = "fused", tower: str | None = None
) -> ShardingOption:
    """A shard for each (bytes on the device, milliseconds)."""
    made = [Shard([1, 1], [0, 0], Storage(hbm, 0), Perf(ms, 0, 0, 0)) for hbm, ms in shards]
    path = table.split(".")[0]
    return ShardingOption(
        table, Weight((8, 8)), (path, Module()), [1.0], 8, kind, BY[kind], kernel, made, dependency=tower
    )


def ranks(proposal: Sequence[ShardingOption]) -> list[list[int | None]]:
    return [sharding_option.get_shards_assignment() for sharding_option in proposal]


def place(partitioner: Any, topology: Topology, *proposal: ShardingOption) -> list[list[int | None]]:
    return ranks(partitioner.partition(list(proposal), topology))


def outcome(partitioner: Any, given: Instance, numbers: Sequence[int]) -> object:
    """Ranks of all shards in one list, or the error and, where it is TorchRec's, its text."""
    proposal = [given.options[k] for k in numbers]
    try:
        partitioner.partition(proposal, given.topology)
    except PlannerError as error:
        assert error.error_type == PlannerErrorType.PARTITION
        text = str(error)
        return ["PlannerError", text if text.startswith("Device partition failed") else ""]
    return [rank for option_ranks in ranks(proposal) for rank in option_ranks]


@pytest.mark.parametrize("seed", GOLDEN)
@pytest.mark.parametrize("name", PARTITIONERS)
def test_shards_get_the_ranks_that_torchrec_gives_them(name: str, seed: str) -> None:
    expected = GOLDEN[seed]
    given = instance(int(seed), types)
    outcomes = [
        outcome(PARTITIONERS[name](partitioners), given, numbers)
        for numbers, _ in zip(expected["proposals"]["greedy"], expected["ranks"][name], strict=False)
    ]
    assert outcomes == expected["ranks"][name]


@pytest.mark.parametrize("name", PARTITIONERS)
def test_no_rank_holds_more_than_it_may(name: str) -> None:
    """Hosts that were tried and had no room must be as before."""
    placed = 0
    for seed in range(40):
        given = instance(seed, types)
        capacity = [device.storage for device in given.topology.devices]
        for proposal in proposers.proposers_to_proposals_list([PROPOSERS["greedy"](proposers)], given.options)[:6]:
            try:
                PARTITIONERS[name](partitioners).partition(proposal, given.topology)
            except PlannerError:
                continue
            used = [Storage(0, 0, 0) for _ in capacity]
            for shard in (shard for sharding_option in proposal for shard in sharding_option.shards):
                assert shard.rank is not None and shard.storage is not None
                used[shard.rank] += shard.storage
            assert all(storage.fits_in(room) for storage, room in zip(used, capacity, strict=True))
            assert [device.storage for device in given.topology.devices] == capacity
            placed += 1
    assert placed > 100


@pytest.mark.parametrize("name", PARTITIONERS)
def test_each_sharding_type_lies_where_its_engine_looks_for_it(name: str) -> None:
    """Row-wise on all ranks in order, table-row-wise on a host in order, table-column-wise within a host."""
    seen = set()
    for seed in range(40):
        given = instance(seed, types)
        local, world = given.topology.local_world_size, given.topology.world_size
        for proposal in proposers.proposers_to_proposals_list([PROPOSERS["greedy"](proposers)], given.options):
            try:
                PARTITIONERS[name](partitioners).partition(proposal, given.topology)
            except PlannerError:
                continue
            for sharding_option in proposal:
                at = [rank for rank in sharding_option.get_shards_assignment() if rank is not None]
                seen.add(sharding_option.sharding_type)
                if sharding_option.partition_by == "uniform":
                    assert at == list(range(world))
                elif sharding_option.sharding_type == "table_row_wise":
                    assert at == list(range(at[0], at[0] + local)) and at[0] % local == 0
                elif sharding_option.sharding_type == "table_column_wise":
                    assert len({rank // local for rank in at}) == 1
                elif sharding_option.sharding_type == "grid_shard":
                    firsts = at[::local]
                    assert at == [first + k for first in firsts for k in range(local)]
    assert seen == {"data_parallel", "row_wise", "table_wise", "column_wise", *list(BY)[3:]}


def test_the_largest_go_first_each_to_the_rank_with_least_time() -> None:
    small, large, middle = (option(name, "table_wise", [(hbm, ms)]) for name, hbm, ms in (
        ("small", 1, 5.0), ("large", 9, 2.0), ("middle", 5, 1.0)))  # fmt: skip
    placed = place(partitioners.GreedyPerfPartitioner(), Topology(2, "cuda"), small, large, middle)
    # large to 0, middle to 1, small to 1, which has less time
    assert placed == [[1], [0], [1]]
    by_time = partitioners.GreedyPerfPartitioner(sort_by=partitioners.SortBy.PERF)
    # small (5 ms) to 0, large (2 ms) and middle (1 ms) to 1
    assert place(by_time, Topology(2, "cuda"), small, large, middle) == [[0], [1], [1]]


TWO_HOSTS = Topology(4, "cuda", hbm_cap=10, local_world_size=2)
THREE_HOSTS = Topology(6, "cuda", local_world_size=2)
BUSY = option("busy", "table_wise", [(9, 9.0)])
ON_DISK = [option("busiest", "table_wise", [(9, 100.0)]), option("second", "table_wise", [(8, 50.0)])]
# what is placed on which machines, where it goes, and what is special about the partitioner
PLACED: dict[str, tuple[list[ShardingOption], Topology, list[list[int]], dict[str, Any]]] = {
    "ranks with equal time are filled across hosts": (
        [option(f"t{k}", "table_wise", [(1, 1.0)]) for k in range(6)], THREE_HOSTS,
        [[0], [2], [4], [1], [3], [5]], {},
    ),
    # c does not fit beside a, which has less time; d does
    "a rank without room is passed over and used again for smaller shards": (
        [option(name, "table_wise", [(hbm, ms)]) for name, hbm, ms in (
            ("a", 8, 1.0), ("b", 7, 9.0), ("c", 3, 1.0), ("d", 2, 1.0))],
        Topology(2, "cuda", hbm_cap=10), [[0], [1], [1], [0]], {},
    ),
    "small modules come first when modules are balanced": (
        [
            *(option(f"many.{k}", "table_wise", [(9, 1.0)]) for k in range(2)),
            option("lone.0", "table_wise", [(1, 4.0)]),
        ],
        Topology(2, "cuda"), [[1], [1], [0]], {"balance_modules": True},
    ),
    "dependent tables lie on one host": (
        [
            *(option(f"t{k}", "table_row_wise", [(4, 1.0)] * 2, tower="x") for k in range(2)),
            option("o", "table_row_wise", [(6, 5.0)] * 2),
        ],
        TWO_HOSTS, [[0, 1], [0, 1], [2, 3]], {},
    ),
    "column shards of a table may lie on one rank": (
        [*ON_DISK, option("t", "column_wise", [(1, 1.0)] * 3)], Topology(3, "cuda"), [[0], [1], [2, 2, 2]], {},
    ),
    "column shards of a table on disk lie on different ranks": (
        [*ON_DISK, option("t", "column_wise", [(1, 1.0)] * 3, kernel="key_value")],
        Topology(3, "cuda"), [[0], [1], [2, 1, 0]], {},
    ),
    "grid takes neighbours in the order of time": (
        [BUSY, option("grid", "grid_shard", [(1, 1.0)] * 4)], THREE_HOSTS, [[0], [2, 3, 4, 5]], {},
    ),
    "grid with more columns than hosts uses hosts again": (
        [option("grid", "grid_shard", [(1, 1.0)] * 6)], Topology(4, "cuda", local_world_size=2),
        [[0, 1, 2, 3, 0, 1]], {},
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", PLACED)
def test_shards_are_placed(what: str) -> None:
    proposal, topology, expected, settings = PLACED[what]
    assert place(partitioners.GreedyPerfPartitioner(**settings), topology, *proposal) == expected


ERRORS = {
    "no rank has room": (
        [option("big", "table_wise", [(11, 1.0)])],
        r"Device partition failed. Couldn't find a rank for shard .*hbm=11.* of table big, largest device storage: "
        r"Storage\(hbm=10",
    ),
    "a row shard has no room": ([option("rows", "row_wise", [(11, 1.0)] * 4)], "rows.*does not fit on rank 0"),
    "not a shard for every rank": ([option("rows", "row_wise", [(1, 1.0)] * 3)], "rows has 3 shards for 4 devices"),
    "no host has room": ([option("twrw", "table_row_wise", [(11, 1.0)] * 2)], "can't find a host .* twrw"),
    "no hosts have room": ([option("grid", "grid_shard", [(11, 1.0)] * 4)], "can't find hosts .* grid"),
    "grid does not fill hosts": ([option("grid", "grid_shard", [(1, 1.0)] * 3)], "3 shards are no multiple of 2"),
    "too many columns on disk": (
        [option("disk", "column_wise", [(1, 1.0)] * 5, kernel="key_value")],
        "disk: 5 column shards need as many ranks, there are 4",
    ),
    "columns on disk find no other rank": (
        [option("disk", "column_wise", [(6, 1.0), (11, 1.0)], kernel="key_value")],
        "disk: no rank that has no column shard of it yet has room",
    ),
    "dependent tables on single ranks": (
        [option(name, "table_wise", [(1, 1.0)], tower="x") for name in "ab"],
        "tables a, b depend on each other",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_what_cannot_be_placed_says_why(case: str) -> None:
    proposal, text = ERRORS[case]
    with pytest.raises(PlannerError, match=text) as caught:
        partitioners.GreedyPerfPartitioner().partition(proposal, TWO_HOSTS)
    assert caught.value.error_type == PlannerErrorType.PARTITION


def test_less_memory_is_used_where_that_costs_hardly_any_time() -> None:
    """By time alone, ranks 0 and 1 hold 400 and 100 MiB; the same time is possible with less on the fuller one."""
    tables = [
        option("a", "table_wise", [(200 * MIB, 4.0)]),
        option("b", "table_wise", [(50 * MIB, 4.0)]),
        option("c", "table_wise", [(200 * MIB, 1.0)]),
        option("d", "table_wise", [(50 * MIB, 1.0)]),
    ]
    topology = Topology(2, "cuda")
    rating, size = perf_models.NoopPerfModel(topology), perf_models.NoopStorageModel(topology)
    by_time = partitioners.GreedyPerfPartitioner(sort_by=partitioners.SortBy.PERF).partition(tables, topology)
    before = rating.rate(by_time), size.rate(by_time)
    balanced = partitioners.MemoryBalancedPartitioner().partition(tables, topology)
    assert before == (5.0, 400 * MIB)
    assert (rating.rate(balanced), size.rate(balanced)) == (5.0, 250 * MIB)


@pytest.mark.parametrize("tolerance, expected_ms", [(0.02, 8.0), (1.0, 9.0)])
def test_a_plan_slower_than_the_tolerance_is_not_taken(tolerance: float, expected_ms: float) -> None:
    tables = [
        option("a", "table_wise", [(10 * MIB, 8.0)]),
        option("b", "table_wise", [(150 * MIB, 4.0)]),
        option("c", "table_wise", [(150 * MIB, 1.0)]),
    ]
    topology = Topology(2, "cuda")
    plan = partitioners.MemoryBalancedPartitioner(tolerance=tolerance).partition(tables, topology)
    assert perf_models.NoopPerfModel(topology).rate(plan) == expected_ms


def test_ratings_are_of_the_worst_rank() -> None:
    topology = Topology(2, "cuda")
    plan = [option("a", "column_wise", [(5, 1.0), (3, 2.5)]), option("b", "table_wise", [(1, 0.25)])]
    for shard, rank in zip(
        (shard for sharding_option in plan for shard in sharding_option.shards), (0, 1, 0), strict=True
    ):
        shard.rank = rank
    assert perf_models.NoopPerfModel(topology).rate(plan) == 2.5
    assert perf_models.NoopStorageModel(topology).rate(plan) == 6

"""Generators: the shards, ranks and devices that torchrec 1.8.0 gives for the same calls, and where ours differ."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as torchs_apply

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    FusedEmbeddingBagCollection,
    apply_optimizer_in_backward,
)
from shardwise.planner import layout
from shardwise.sharding import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    ParameterSharding,
    ShardingType,
    TableOptions,
    apply_to_all,
    calculate_shard_sizes_and_offsets,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    get_module_to_default_sharders,
    get_sharding_constructor_from_type,
    grid_shard,
    placement,
    placement_helper,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from shardwise.sharding.modules import generators
from shardwise.sharding.plan.plan import options_of, shards_of

Cut = tuple[list[int], list[int], str]


def collection(rows: int, dim: int) -> EmbeddingBagCollection:
    return EmbeddingBagCollection([EmbeddingBagConfig(rows, dim, "t")], device="meta")


def plan(
    generator: Any, rows: int, dim: int, *, local: int = 2, world: int = 4, device: str = "cpu"
) -> ParameterSharding:
    module_plan = construct_module_sharding_plan(collection(rows, dim), {"t": generator}, None, local, world, device)
    assert list(module_plan) == ["t"]
    return module_plan["t"]


def cuts(sharding: ParameterSharding) -> list[Cut]:
    assert sharding.sharding_spec is not None
    return [(s.shard_offsets, s.shard_sizes, str(s.placement)) for s in sharding.sharding_spec.shards]


# as torchrec 1.8.0 makes them on the CPU, 2 hosts of 2 ranks: generator, rows, dim, type, ranks, offsets and sizes
THEIRS: dict[str, tuple[Any, int, int, str, list[tuple[int, list[int], list[int]]]]] = {
    "table_wise": (table_wise(rank=1), 7, 12, "table_wise", [(1, [0, 0], [7, 12])]),
    "row_wise": (
        row_wise(), 7, 12, "row_wise",
        [(0, [0, 0], [2, 12]), (1, [2, 0], [2, 12]), (2, [4, 0], [2, 12]), (3, [6, 0], [1, 12])],
    ),
    "row_wise, an empty shard": (
        row_wise(), 5, 4, "row_wise",
        [(0, [0, 0], [2, 4]), (1, [2, 0], [2, 4]), (2, [4, 0], [1, 4]), (3, [5, 0], [0, 4])],
    ),
    "row_wise, one row": (
        row_wise(), 1, 128, "row_wise",
        [(0, [0, 0], [1, 128]), (1, [1, 0], [0, 128]), (2, [1, 0], [0, 128]), (3, [1, 0], [0, 128])],
    ),
    "row_wise, buckets": (
        row_wise(num_buckets=5), 10, 8, "row_wise",
        [(0, [0, 0], [4, 8]), (1, [4, 0], [2, 8]), (2, [6, 0], [2, 8]), (3, [8, 0], [2, 8])],
    ),
    "column_wise": (
        column_wise(ranks=[3, 1]), 4096, 64, "column_wise", [(3, [0, 0], [4096, 32]), (1, [0, 32], [4096, 32])],
    ),
    "column_wise, a rank twice": (
        column_wise(ranks=[0, 0]), 10, 8, "column_wise", [(0, [0, 0], [10, 4]), (0, [0, 4], [10, 4])],
    ),
    "column_wise, sizes, the last cut off": (
        column_wise(size_per_rank=[4, 3, 1000]), 7, 12, "column_wise",
        [(0, [0, 0], [7, 4]), (1, [0, 4], [7, 3]), (2, [0, 7], [7, 5])],
    ),
    "table_row_wise": (
        table_row_wise(host_index=1), 7, 12, "table_row_wise", [(2, [0, 0], [4, 12]), (3, [4, 0], [3, 12])],
    ),
    "grid_shard": (
        grid_shard(host_indexes=[1, 0]), 3, 256, "grid_shard",
        [(2, [0, 0], [2, 128]), (3, [2, 0], [1, 128]), (0, [0, 128], [2, 128]), (1, [2, 128], [1, 128])],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("generator", "rows", "dim", "kind", "expected"), THEIRS.values(), ids=THEIRS)
def test_a_generator_cuts_as_torchrec(generator: Any, rows: int, dim: int, kind: str, expected: list[Any]) -> None:
    sharding = plan(generator, rows, dim)
    assert (sharding.sharding_type, sharding.ranks) == (kind, [rank for rank, _, _ in expected])
    assert cuts(sharding) == [(offsets, sizes, f"rank:{rank}/cpu") for rank, offsets, sizes in expected]
    on_gpus = plan(generator, rows, dim, device="cuda")
    assert cuts(on_gpus) == [(offsets, sizes, f"rank:{rank}/cuda:{rank % 2}") for rank, offsets, sizes in expected]
    shards = shards_of("t", sharding, rows, dim, 4)
    layout.validate(shards, {"t": (rows, dim)}, 4)
    assert [
        (s.rank, [s.rows[0], s.cols[0]], [s.rows[1] - s.rows[0], s.cols[1] - s.cols[0]]) for s in shards
    ] == expected


def test_every_rank_has_a_replica() -> None:
    sharding = plan(data_parallel(), 7, 12)
    assert (sharding.sharding_type, sharding.compute_kernel, sharding.ranks, sharding.sharding_spec) == (
        "data_parallel", "dense", [0, 1, 2, 3], None,
    )  # fmt: skip


MARKS: dict[str, Any] = {
    "none": lambda module: None,
    "ours": lambda module: apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1}),
    "torch's": lambda module: torchs_apply(torch.optim.SGD, module.parameters(), {"lr": 0.1}),
    # as TorchRec marks parameters of sharded modules
    "the attribute": lambda module: [vars(param).update(_in_backward_optimizers=[]) for param in module.parameters()],
}
CUTS = {
    "table_wise": table_wise, "row_wise": row_wise, "column_wise": column_wise, "table_row_wise": table_row_wise,
    "table_column_wise": table_column_wise, "grid_shard": grid_shard,
}  # fmt: skip
WHERE: dict[str, Any] = {
    "table_wise": {"rank": 1}, "row_wise": {}, "column_wise": {"ranks": [0, 1]}, "table_row_wise": {"host_index": 0},
    "table_column_wise": {"host_index": 0}, "grid_shard": {"host_indexes": [0, 1]},
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("kind", CUTS)
def test_a_cut_table_is_dense_unless_an_optimizer_says_fused(kind: str, mark: str, device: str) -> None:
    """As torchrec 1.8.0, which passes `fused_params` over: here they say it as well."""
    module = collection(8, 64)
    MARKS[mark](module)
    for given, fused in (
        (None, False), ({}, False), ({"output_dtype": torch.float16}, False), ({"learning_rate": 0.1}, True),
    ):  # fmt: skip
        sharder = EmbeddingBagCollectionSharder(fused_params=given)
        everywhere = apply_to_all(module, CUTS[kind](**WHERE[kind]), sharder)
        of_table = construct_module_sharding_plan(module, everywhere, sharder, 2, 4, device)["t"]
        assert of_table.compute_kernel == ("fused" if mark != "none" or fused else "dense")
        replicas = construct_module_sharding_plan(module, {"t": data_parallel()}, sharder, 2, 4, device)["t"]
        assert replicas.compute_kernel == "dense"


def test_a_generator_takes_the_kernel_that_is_asked_for() -> None:
    module = collection(7, 12)
    apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.1})
    asked = construct_module_sharding_plan(module, {"t": row_wise(compute_kernel="dense")}, None, 2, 4, "cpu")
    assert asked["t"].compute_kernel == "dense"
    assert plan(row_wise(compute_kernel="fused"), 7, 12).compute_kernel == "fused"
    assert plan(row_wise(compute_kernel="fused_triton"), 7, 12).compute_kernel == "fused_triton"
    assert plan(table_wise(0, compute_kernel="batched_dense"), 7, 12).compute_kernel == "dense"
    assert plan(column_wise([0], None, "fused_uvm"), 7, 12).compute_kernel == "fused_uvm"


def test_quantized_tables_are_placed_in_one_process_as_torchrec_does() -> None:
    """For inference: GPUs are counted, the CPU is rank 0's, and there may be more shards than ranks."""
    rows = plan(row_wise(([1, 2, 0, 100], ["cuda", "cuda", "cpu", "cuda"])), 7, 12, local=1, world=1)
    assert (rows.compute_kernel, rows.ranks) == ("quant", [0, 1, 2, 3])
    assert cuts(rows) == [
        ([0, 0], [1, 12], "rank:0/cuda:0"), ([1, 0], [2, 12], "rank:1/cuda:1"), ([3, 0], [0, 12], "rank:0/cpu"),
        ([3, 0], [4, 12], "rank:3/cuda:2"),
    ]  # fmt: skip
    columns = plan(column_wise(None, [4, 3, 1000], "quant", ["cuda", "cpu", "cuda"]), 7, 12)
    assert [where for _, _, where in cuts(columns)] == ["rank:0/cuda:0", "rank:0/cpu", "rank:1/cuda:1"]
    assert cuts(plan(table_wise(3, "cpu", "quant"), 7, 12))[0][2] == "rank:0/cpu"


def test_a_device_type_of_a_shard_that_trains_is_that_of_its_own_rank() -> None:
    """torchrec 1.8.0 counts devices and puts the CPU on rank 0, whatever the shard's rank."""
    assert cuts(plan(table_wise(3, "cpu"), 7, 12, device="cuda"))[0][2] == "rank:3/cpu"
    rows = plan(row_wise(([1, 2, 0, 100], "cuda"), "fused"), 7, 12)
    assert [where for _, _, where in cuts(rows)] == ["rank:0/cuda:0", "rank:1/cuda:1", "rank:2/cuda:0", "rank:3/cuda:1"]
    columns = plan(column_wise([3, 0], device_types=["cuda", "cpu"]), 7, 12)
    assert [where for _, _, where in cuts(columns)] == ["rank:3/cuda:1", "rank:0/cpu"]


@pytest.mark.parametrize(("dim", "ranks", "widths"), [(12, [0, 1], [6, 6]), (8, [3, 2, 1, 0], [2, 2, 2, 2])])
def test_columns_go_to_all_ranks_that_were_named(dim: int, ranks: list[int], widths: list[int]) -> None:
    """torchrec 1.8.0 widens shards to a multiple of 4 and leaves the last ranks out without a word."""
    sharding = plan(column_wise(ranks), 7, dim)
    assert sharding.ranks == ranks
    assert [sizes for _, sizes, _ in cuts(sharding)] == [[7, width] for width in widths]


def test_ranks_are_kept_where_sizes_are_given_too() -> None:
    """torchrec 1.8.0 passes over them: sizes go to ranks 0, 1, ..."""
    assert plan(column_wise([2, 3, 1], [4, 3, 5]), 7, 12).ranks == [2, 3, 1]


def test_a_grid_holds_all_columns() -> None:
    """torchrec 1.8.0 left out the second half of a 256-wide table on one host, and fell over for one of 64 on two."""
    assert cuts(plan(grid_shard([0]), 3, 256)) == [([0, 0], [2, 256], "rank:0/cpu"), ([2, 0], [1, 256], "rank:1/cpu")]
    assert [sizes for _, sizes, _ in cuts(plan(grid_shard([0, 1]), 4096, 64))] == [[2048, 32]] * 4


def test_a_table_goes_by_columns_to_one_host() -> None:
    sharding = plan(table_column_wise(1), 7, 12)
    assert (sharding.sharding_type, sharding.ranks) == ("table_column_wise", [2, 3])
    assert cuts(sharding) == [([0, 0], [7, 6], "rank:2/cpu"), ([0, 6], [7, 6], "rank:3/cpu")]
    sized = plan(table_column_wise(0, size_per_rank=[4, 2, 6]), 7, 12)
    assert (sized.ranks, [sizes for _, sizes, _ in cuts(sized)]) == ([0, 1, 0], [[7, 4], [7, 2], [7, 6]])


@pytest.mark.parametrize(
    ("generator", "options"),
    [
        (row_wise(reduction="ordered"), TableOptions("ordered")),
        (table_row_wise(0, reduction="partial"), TableOptions()),
        (column_wise([0, 1], row_state="table"), TableOptions(row_state="table")),
        (table_column_wise(0, row_state="table"), TableOptions(row_state="table")),
        (grid_shard([0, 1], reduction="ordered", row_state="table"), TableOptions("ordered", "table")),
        (row_wise(), TableOptions()),
        (data_parallel(), TableOptions()),
    ],
)
def test_a_generator_says_how_shards_work_together(generator: Any, options: TableOptions) -> None:
    sharding = plan(generator, 7, 12)
    assert options_of(sharding) == replace(options, dense=sharding.sharding_spec is not None)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: plan(table_wise(4), 7, 12), "table 't': table_wise: rank 4 is not one of 4"),
        (lambda: plan(column_wise([0, -1]), 7, 12), "table 't': column_wise: rank -1 is not one of 4"),
        (lambda: plan(table_row_wise(2), 7, 12), "table 't': host 2 is not one of 2 of 2 ranks each"),
        (lambda: plan(table_column_wise(-1), 7, 12), "table 't': host -1 is not one of 2 of 2 ranks each"),
        (lambda: plan(grid_shard([0, 2]), 7, 12), "table 't': host 2 is not one of 2 of 2 ranks each"),
        (lambda: plan(grid_shard([0, 1]), 7, 3), "table 't': 3 columns do not divide by 2: say the width"),
        (lambda: plan(grid_shard([]), 7, 3), "table 't': there are no ranks for its columns"),
        (lambda: plan(column_wise([0, 1, 2, 3]), 7, 6), "table 't': 6 columns do not divide by 4"),
        (lambda: plan(column_wise(None, [4, 4]), 7, 12), r"column_wise: size_per_rank \[4, 4\] hold 8 of 12 columns"),
        (lambda: plan(row_wise(([1, 2], "cuda")), 7, 12), r"row_wise: sizes_placement \[1, 2\] hold 3 of 7 rows"),
        (lambda: plan(row_wise(num_buckets=5), 7, 12), "row_wise: 5 buckets do not divide 7 rows"),
        (lambda: plan(row_wise(num_buckets=2), 10, 12), "row_wise: 2 buckets are fewer than 4 ranks"),
        (lambda: plan(row_wise(num_buckets=0), 10, 12), "row_wise: 0 buckets do not divide 10 rows"),
        (lambda: plan(row_wise(), 7, 12, local=3), "hosts of local_size 3 do not make up a world_size of 4"),
        (lambda: plan(row_wise(reduction="sum"), 7, 12), "table 't': reduction must be one of .* got 'sum'"),
        (lambda: row_wise(([7], "cpu"), num_buckets=7), "row_wise: sizes_placement and num_buckets both say"),
        (lambda: row_wise(([7], ["cpu", "cpu"])), "row_wise: 1 sizes need as many device types, got 2"),
        (lambda: column_wise(), "column_wise: give ranks, size_per_rank or both"),
        (lambda: column_wise([0, 1], [4]), "column_wise: 2 ranks need as many size_per_rank, got 1"),
        (lambda: column_wise([0, 1], device_types=["cpu"]), "column_wise: 2 ranks need as many device_types, got 1"),
    ],
)
def test_a_cut_that_cannot_be_is_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_generator_written_for_torchrec_works() -> None:
    """Ours took (rows, dim, world_size, device_type): generators that people had written fell over."""
    calls: list[Any] = []

    def custom_generator(
        param: nn.Parameter, local_size: int, world_size: int, device_type: str, sharder: Any
    ) -> ParameterSharding:
        calls.append((param.shape, local_size, world_size, device_type, type(sharder)))
        return ParameterSharding("data_parallel", "dense", [0, 1, 2, 3])

    plan(custom_generator, 7, 12, device="cuda")
    assert calls == [(torch.Size([7, 12]), 2, 4, "cuda", EmbeddingBagCollectionSharder)]


def test_one_generator_for_all_tables() -> None:
    ec = EmbeddingCollection([EmbeddingConfig(9, 8, name) for name in "ab"], device="meta")
    for sharder in (None, EmbeddingCollectionSharder()):
        where = apply_to_all(ec, row_wise(), sharder)
        plans = construct_module_sharding_plan(ec, where, sharder, world_size=2, device_type="cpu")
        assert {name: sharding.sharding_type for name, sharding in plans.items()} == {"a": "row_wise", "b": "row_wise"}
    with pytest.raises(
        TypeError, match="EmbeddingBagCollectionSharder shards EmbeddingBagCollection, got EmbeddingColl"
    ):
        apply_to_all(ec, row_wise(), EmbeddingBagCollectionSharder())


def test_hosts_come_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, size in (("2", 2), ("3", 4), ("", 4), ("0", 4), ("x", 4), ("4", 4)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
        assert generators.get_local_size(4) == size
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    plans = construct_module_sharding_plan(collection(7, 12), {"t": table_row_wise(1)}, world_size=4, device_type="cpu")
    assert plans["t"].ranks == [2, 3]


def test_a_type_names_its_constructor() -> None:
    assert {kind: get_sharding_constructor_from_type(kind).__name__ for kind in ShardingType} == {
        kind: kind.value for kind in ShardingType
    }
    by_class = get_module_to_default_sharders()
    assert isinstance(by_class[EmbeddingBagCollection], EmbeddingBagCollectionSharder)
    assert type(by_class[FusedEmbeddingBagCollection]).__name__ == "FusedEmbeddingBagCollectionSharder"


def test_devices_are_numbered_within_a_host() -> None:
    assert [placement("cuda", rank, 2) for rank in (0, 1, 2, 5)] == [
        "rank:0/cuda:0", "rank:1/cuda:1", "rank:2/cuda:0", "rank:5/cuda:1",
    ]  # fmt: skip
    assert placement("cpu", 3, 2) == "rank:3/cpu"
    assert (placement_helper("cpu", 2, 3), placement_helper("cuda", 2, 3)) == ("rank:0/cpu", "rank:3/cuda:2")


# sizes and offsets by torchrec 1.8.0 for 4 ranks, 2 a host; its default for col_wise_shard_dim is 128, ours 32
@pytest.mark.parametrize(
    ("kind", "rows", "dim", "arguments", "sizes", "offsets"),
    [
        ("data_parallel", 7, 12, {}, [[7, 12]] * 4, [[0, 0]] * 4),
        ("table_wise", 7, 12, {}, [[7, 12]], [[0, 0]]),
        ("row_wise", 5, 4, {}, [[2, 4], [2, 4], [1, 4], [0, 4]], [[0, 0], [2, 0], [4, 0], [5, 0]]),
        (
            "row_wise", 10, 8, {"device_memory_sizes": [1, 2, 3, 4]},
            [[1, 8], [2, 8], [3, 8], [4, 8]], [[0, 0], [1, 0], [3, 0], [6, 0]],
        ),
        ("row_wise", 10, 8, {"num_buckets": 5}, [[4, 8]] + [[2, 8]] * 3, [[0, 0], [4, 0], [6, 0], [8, 0]]),
        ("table_row_wise", 7, 12, {}, [[4, 12], [3, 12]], [[0, 0], [4, 0]]),
        ("column_wise", 3, 256, {"col_wise_shard_dim": 128}, [[3, 128]] * 2, [[0, 0], [0, 128]]),
        ("column_wise", 7, 12, {"col_wise_shard_dim": 4}, [[7, 4]] * 3, [[0, 0], [0, 4], [0, 8]]),
        ("column_wise", 10, 24, {"col_wise_shard_dim": 5}, [[10, 8]] * 3, [[0, 0], [0, 8], [0, 16]]),
        ("table_column_wise", 7, 64, {}, [[7, 32]] * 2, [[0, 0], [0, 32]]),
        (
            "grid_shard", 3, 256, {"col_wise_shard_dim": 128},
            [[2, 128], [1, 128]] * 2, [[0, 0], [2, 0], [0, 128], [2, 128]],
        ),
    ],
)  # fmt: skip
def test_a_planner_enumerates_the_cuts_of_torchrec(
    kind: str, rows: int, dim: int, arguments: Any, sizes: list[list[int]], offsets: list[list[int]]
) -> None:
    tensor = torch.empty(rows, dim, device="meta")
    assert calculate_shard_sizes_and_offsets(tensor, 4, 2, kind, **arguments) == (sizes, offsets)


def test_an_unknown_type_has_no_cut() -> None:
    with pytest.raises(ValueError, match="sharding_type 'diagonal' is not one of"):
        calculate_shard_sizes_and_offsets(torch.empty(2, 2), 4, 2, "diagonal")

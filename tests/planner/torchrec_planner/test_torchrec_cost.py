"""`cost="torchrec"`: TorchRec's enumerator, its options as a problem for our search, its estimates number for number.

`python -m shardwise.perf.evidence.compare_planner golden` prints the numbers anew where torchrec is installed, and `...
formulas` compares thousands of options.
"""

from __future__ import annotations

import copy
import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from checkout import golden
from torch import nn

from shardwise.embeddings import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
)
from shardwise.perf.evidence.planner_cases import estimate, random_cases
from shardwise.perf.suite.libraries import PLANNER, ours
from shardwise.planner.cost.torchrec import TorchRecCost
from shardwise.planner.plan.planning import plan_tables
from shardwise.planner.search.problem import Assignment, faults, loads
from shardwise.planner.tables import Feature, Table
from shardwise.planner.torchrec import enumerators, storage_estimators as shard_estimators, types
from shardwise.planner.torchrec.enumerators import EmbeddingEnumerator, get_partition_by_type
from shardwise.planner.torchrec.options import placed_options, problem_of
from shardwise.planner.torchrec.storage_estimators import EmbeddingOffloadStats
from shardwise.planner.torchrec.types import (
    CustomTopologyData,
    ParameterConstraints,
    Shard,
    ShardingOption,
    Topology,
)
from shardwise.sharding.modules.sharders import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from shardwise.sharding.plan.plan import CacheParams

DIMS = (8, 128, 384, 512)
TWO_HOSTS = Topology(8, "cuda", local_world_size=4)
UNEVEN = Topology(3, "cuda", custom_topology_data=CustomTopologyData({"hbm_cap": [10**9, 2 * 10**9, 10**9]}, 3))


class Offers:
    """What TorchRec's sharders offer."""

    pooled: bool

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return enumerators.sharding_types(self.pooled, compute_device_type)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return enumerators.compute_kernels(sharding_type, compute_device_type)


class BagSharder(Offers, EmbeddingBagCollectionSharder):
    pooled = True


class RowSharder(Offers, EmbeddingCollectionSharder):
    pooled = False


def model() -> nn.Module:
    bags = [
        EmbeddingBagConfig(name=f"t{i}", embedding_dim=dim, num_embeddings=1000 + 37 * i, feature_names=[f"f{i}"])
        for i, dim in enumerate(DIMS)
    ]
    rows = [EmbeddingConfig(name="s", embedding_dim=256, num_embeddings=2037, feature_names=["g"])]
    made = nn.Module()
    made.bags = EmbeddingBagCollection(device=torch.device("meta"), tables=bags)
    made.inner = nn.Module()
    made.inner.rows = EmbeddingCollection(device=torch.device("meta"), tables=rows)
    return made


def tables(pooling_factors: dict[str, float] | None = None) -> list[Table]:
    """Those of `model`."""
    factors = pooling_factors or {}
    bags = [
        Table(f"t{i}", 1000 + 37 * i, dim, features=(Feature(f"f{i}", factors.get(f"t{i}", 1.0)),), module="bags")
        for i, dim in enumerate(DIMS)
    ]
    return [*bags, Table("s", 2037, 256, features=(Feature("g"),), pooled=False, module="inner.rows")]


def enumerated(topology: Topology, constraints: dict[str, ParameterConstraints] | None = None) -> list[ShardingOption]:
    return EmbeddingEnumerator(topology, 512, constraints).enumerate(model(), [BagSharder(), RowSharder()])


@pytest.mark.parametrize(
    ("topology", "constraints"),
    [
        (TWO_HOSTS, {}),
        (Topology(4, "cpu"), {}),
        (UNEVEN, {}),
        (Topology(8, "cuda", local_world_size=2, pod_size=2), {}),
        (
            TWO_HOSTS,
            {
                "t3": ParameterConstraints(
                    ["grid_shard", "column_wise"], ["fused", "key_value"], 32, pooling_factors=[7.5]
                ),
                "s": ParameterConstraints(compute_kernels=["fused_uvm_caching"]),
            },
        ),
        (
            TWO_HOSTS,
            {
                "t2": ParameterConstraints(
                    cache_params=CacheParams(load_factor=0.3, stats=EmbeddingOffloadStats(0.5, 77, [5, 2, 1, 1], 1074)),
                    output_dtype=DataType.FP16,
                ),
                "s": ParameterConstraints(cache_params=CacheParams(load_factor=0.5, prefetch_pipeline=True)),
            },
        ),
    ],
    ids=["two hosts", "cpu", "uneven memory", "pods", "constraints", "caches"],
)
def test_a_way_costs_what_the_estimators_say_of_its_shards(
    topology: Topology, constraints: dict[str, ParameterConstraints]
) -> None:
    cost = TorchRecCost(topology, 512, constraints=constraints)
    options = enumerated(topology, constraints or None)
    seen = 0
    for table in tables({name: constraint.pooling_factors[0] for name, constraint in constraints.items()}):
        ways = cost.ways(table, constraints.get(table.name))
        options_by_way = {(o.sharding_type, o.compute_kernel): o for o in options if o.fqn == table.path}
        assert {(way.sharding_type, way.compute_kernel) for way in ways} == set(options_by_way)
        for way in ways:
            choice, option = cost.price(table, way), options_by_way[way.sharding_type, way.compute_kernel]
            perfs, storages = [s.perf for s in option.shards], [s.storage for s in option.shards]
            np.testing.assert_allclose(choice.time_ms.ravel(), [p.total for p in perfs if p], rtol=1e-13)
            assert choice.hbm.ravel().tolist() == [s.hbm for s in storages if s]
            assert choice.ddr.ravel().tolist() == [s.ddr for s in storages if s]
            seen += 1
    assert seen == len(options) > 0


def test_tables_are_listed_last_child_first_or_as_they_stand() -> None:
    def names(exact: bool) -> list[str]:
        enumerator = EmbeddingEnumerator(TWO_HOSTS, 512, use_exact_enumerate_order=exact)
        return list(dict.fromkeys(o.fqn for o in enumerator.enumerate(model(), [BagSharder(), RowSharder()])))

    bags = [f"bags.t{i}" for i in range(len(DIMS))]
    assert names(True) == [*bags, "inner.rows.s"] and names(False) == ["inner.rows.s", *bags]


def test_types_and_kernels_are_torchrecs_unless_the_sharder_says_otherwise() -> None:
    all_of_t3 = {(o.sharding_type, o.compute_kernel) for o in enumerated(TWO_HOSTS) if o.name == "t3"}
    on_a_gpu = ("fused", "fused_uvm", "fused_uvm_caching")
    types = ("table_wise", "column_wise", "table_column_wise", "row_wise", "table_row_wise")
    assert all_of_t3 == {("data_parallel", "dense"), *itertools.product(types, on_a_gpu)}
    options = EmbeddingEnumerator(TWO_HOSTS, 512).enumerate(model(), [EmbeddingBagCollectionSharder()])
    assert {o.compute_kernel for o in options} == {"dense", "fused"} and {o.fqn for o in options} == {
        f"bags.t{i}" for i in range(len(DIMS))
    }


def test_nothing_left_is_an_error_that_names_the_table_and_what_there_was() -> None:
    with pytest.raises(RuntimeError, match=r"No available .* for 't1'.*table_wise.*compute_kernels=\['quant'\]"):
        enumerated(TWO_HOSTS, {"t1": ParameterConstraints(compute_kernels=["quant"])})


def test_tables_of_another_device_group_are_left_out() -> None:
    options = enumerated(TWO_HOSTS, {"t1": ParameterConstraints(device_group="cpu")})
    assert {o.name for o in options} == {"t0", "t2", "t3", "s"}


def test_the_same_module_is_not_enumerated_twice_and_copies_are_given() -> None:
    class Counting:
        calls = 0

        def estimate(self, sharding_options: list[ShardingOption], sharder_data_map: Any) -> None:
            self.calls += 1

    module, sharders, estimator = model(), [BagSharder(), RowSharder()], Counting()
    enumerator = EmbeddingEnumerator(TWO_HOSTS, 512, estimator=estimator)  # type: ignore[arg-type]
    first = enumerator.enumerate(module, sharders)
    first[0].shards[0].rank = 5
    second = enumerator.enumerate(module, sharders)
    assert estimator.calls == 1 and second[0].shards[0].rank is None
    assert [str(o) for o in second] == [str(o) for o in enumerator.last_stored_search_space or []]


@pytest.mark.parametrize(
    ("columns", "min_partition", "width"),
    [(512, None, 128), (384, None, 128), (320, None, 160), (128, None, 128), (96, 32, 32), (100, 20, 20), (6, 2, 6)],
)
def test_column_shards_are_the_narrowest_that_may_be(columns: int, min_partition: int | None, width: int) -> None:
    assert enumerators.column_width(columns, min_partition) == width


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ((10, 4), [3, 3, 3, 1]),
        ((5, 4), [2, 2, 1, 0]),
        ((10, 3, [1, 2, 1]), [2, 5, 3]),
        ((10, 4, None, 5), [4, 2, 2, 2]),
        ((12, 3, [1, 2, 3], 6), [2, 4, 6]),
    ],
)
def test_rows_are_cut_as_torchrec_cuts_them(arguments: tuple[Any, ...], parts: list[int]) -> None:
    assert enumerators.row_cuts(*arguments) == parts


def test_unknown_types_and_uncuttable_buckets_are_refused() -> None:
    with pytest.raises(ValueError, match="'diagonal' is not one of table_wise"):
        get_partition_by_type("diagonal")
    with pytest.raises(ValueError, match="10 rows in 3 buckets"):
        enumerators.row_cuts(10, 2, buckets=3)


def test_more_column_widths_are_more_ways() -> None:
    table = Table("t", 1000, 128)
    for widths, cut in (((128,), {1}), ((128, 32), {1, 4})):
        ways = TorchRecCost(TWO_HOSTS, 512, column_widths=widths).ways(table)
        assert {len(way.widths) for way in ways if way.sharding_type == "column_wise"} == cut


def test_our_search_plans_with_torchrecs_model() -> None:
    planned = plan_tables(tables(), TWO_HOSTS, 512, cost=TorchRecCost(TWO_HOSTS, 512))
    assert planned.cost == "torchrec" and faults(planned.problem, planned.solution.assignment) == []


def test_options_go_into_a_problem_and_come_back_with_ranks() -> None:
    constraints = {"t3": ParameterConstraints(["grid_shard", "column_wise"]), "t1": ParameterConstraints(["row_wise"])}
    options = enumerated(TWO_HOSTS, constraints)
    problem, choices = problem_of(options, TWO_HOSTS)
    assert [item.names[0] for item in problem.items] == list(dict.fromkeys(o.fqn for o in options))
    wanted = {
        "inner.rows.s": ("data_parallel", (0,)),
        "bags.t0": ("table_wise", (5,)),
        "bags.t1": ("row_wise", (0,)),
        "bags.t2": ("table_row_wise", (4,)),
        "bags.t3": ("grid_shard", (4, 0, 4, 0)),
    }
    numbers = [
        next(n for n, choice in enumerate(item.choices) if choice.sharding_type == wanted[item.names[0]][0])
        for item in problem.items
    ]
    assignment = Assignment(tuple(numbers), tuple(wanted[item.names[0]][1] for item in problem.items))
    plan = placed_options(problem, choices, assignment)
    ranks = {option.fqn: option.get_shards_assignment() for option in plan}
    everywhere = list(range(8))
    assert ranks == {
        "inner.rows.s": everywhere,
        "bags.t0": [5],
        "bags.t1": everywhere,
        "bags.t2": [4, 5, 6, 7],
        "bags.t3": [4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3],
    }
    # what TorchRec's rating adds up is what the problem says
    times, hbm = np.zeros(8), np.zeros(8)
    for option in plan:
        for shard in option.shards:
            assert shard.rank is not None and shard.perf and shard.storage
            times[shard.rank] += shard.perf.total
            hbm[shard.rank] += shard.storage.hbm
    rank_loads = loads(problem, assignment)
    np.testing.assert_allclose(rank_loads.time_ms, times, rtol=1e-12)
    assert rank_loads.hbm.tolist() == hbm.tolist()
    assert all(shard.rank is None for option in options for shard in option.shards)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"dependency": "tower"}, "must share a host with the rest of 'tower'"),
        ({"partition_by": "uniform"}, "1 shards of a table_wise table do not fill 8 ranks"),
        ({"shards": [Shard([1000, 8], [0, 0])]}, "has no estimates"),
    ],
)
def test_options_that_cannot_be_placed_are_refused(changed: dict[str, Any], text: str) -> None:
    option = copy.deepcopy(next(o for o in enumerated(TWO_HOSTS) if o.sharding_type == "table_wise"))
    for name, value in changed.items():
        setattr(option, name, value)
    with pytest.raises(ValueError, match=text):
        problem_of([option], TWO_HOSTS)


def test_the_memory_of_a_topology_is_what_its_devices_have_left() -> None:
    left = copy.deepcopy(TWO_HOSTS)
    left.devices[3].storage.hbm = 7
    problem, _ = problem_of(enumerated(left), left)
    assert problem.hbm.tolist()[2:5] == [32 * 1024**3, 7, 32 * 1024**3] and problem.local_size == 4


def test_a_tower_keeps_its_tables_together() -> None:
    class EmbeddingTower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.t = nn.EmbeddingBag(10, 8)

    sharder = SimpleNamespace(
        module_type=EmbeddingTower,
        shardable_parameters=lambda module: {"t": module.t.weight},
        sharding_types=lambda device: ["table_row_wise"],
        compute_kernels=lambda kind, device: ["fused"],
    )
    outer = nn.Module()
    outer.tower = EmbeddingTower()
    options = EmbeddingEnumerator(TWO_HOSTS, 512).enumerate(outer, [sharder])
    assert [(o.dependency, o.partition_by, o.num_shards) for o in options] == [("tower", "host", 4)]


# shards of the option, `Perf` of the first by field, `Storage` of the first
GOLDEN = golden("planner_estimates")
CASES = random_cases(len(GOLDEN))


@pytest.mark.parametrize(
    ("case", "expected"),
    list(zip(CASES, GOLDEN, strict=True)),
    ids=[f"{case['sharding_type']}-{case['kernel']}-{case['device']}" for case in CASES],
)
def test_estimates_are_torchrecs(case: dict[str, Any], expected: tuple[int, list[float], list[int]]) -> None:
    count, perf, storage = expected
    _, perfs, storages = estimate(case, ours(PLANNER))
    assert len(perfs) == count and storages[0] == tuple(storage)
    np.testing.assert_allclose(perfs[0], perf, rtol=1e-12)


def test_inference_has_no_backward_no_states_and_no_batches() -> None:
    trained = {
        **CASES[0],
        "inference": False,
        "optimizer": "Adam",
        "kernel": "fused",
        "usage": "BASE",
        "virtual": False,
    }
    _, perfs, storages = estimate({**trained, "sharding_type": "table_wise", "device": "cuda"}, ours(PLANNER))
    _, quiet, bare = estimate(
        {**trained, "sharding_type": "table_wise", "device": "cuda", "inference": True}, ours(PLANNER)
    )
    assert quiet[0][:2] == perfs[0][:2] and quiet[0][2:4] == (0, 0) and perfs[0][2] > 0
    element = 2 if trained["half"] else 4
    assert bare[0] == (trained["rows"] * trained["columns"] * element, 0, 0) and storages[0][0] > 3 * bare[0][0]


def test_estimates_do_not_share_what_partitioners_change() -> None:
    case = {**CASES[0], "sharding_type": "row_wise", "kernel": "fused", "device": "cuda", "world": 4, "local": 4}
    option, _, _ = estimate({**case, "pod": None, "rows": 4000}, ours(PLANNER))
    option.shards[0].storage.hbm += 1
    option.shards[0].perf.fwd_compute += 1
    assert option.shards[0].storage != option.shards[1].storage and option.shards[0].perf != option.shards[1].perf


def test_storages_from_numbers_alone_are_those_of_the_estimator() -> None:
    case = next(c for c in CASES if c["sharding_type"] == "row_wise")
    case = {**case, "kernel": "fused", "device": "cuda", "virtual": False, "pod": None, "half_output": False}
    option, _, storages = estimate(case, ours(PLANNER))
    computed = shard_estimators.calculate_shard_storages(
        types.SharderData({}, {}, types.StorageUsageType[case["usage"]]), "row_wise", option.tensor, "cuda", "fused",
        [shard.size for shard in option.shards], case["batch_sizes"] or [case["batch_size"]] * option.num_inputs,
        case["world"], case["local"], case["pooling_factors"], case["num_poolings"] or [1.0] * option.num_inputs,
        0.2, case["pooled"], 8, option.tensor.element_size(), types.PipelineType[case["pipeline"]], case["at_peak"],
        case["inference"],
    )  # fmt: skip
    assert [(s.hbm, s.ddr, s.ssd) for s in computed] == storages


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            {"kernel": "ssd_virtual_table", "device": "cpu"},
            "'t': compute_kernel 'ssd_virtual_table' has no known bandwidth on cpu",
        ),
        ({"batch_sizes": [1] * 9}, "'t': pooling_factors, num_poolings and batch_sizes must have one number for each"),
    ],
)
def test_what_cannot_be_estimated_is_an_error_that_names_the_table(changed: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        estimate({**CASES[0], **changed}, ours(PLANNER))


@pytest.mark.parametrize(
    ("counts", "rates"),
    [
        # at load factors 0, 0.1, 0.5, 0.999 and 1, by torchrec 1.8.0
        ([6, 3, 0, 1], (1.0, 0.3999999761581421, 0.10000002384185791, 0.0, 0.0)),
        ([0, 0], (0.0, 0.0, 0.0, 0.0, 0.0)),
        ([5], (1.0, 0.0, 0.0, 0.0, 0.0)),
    ],
)
def test_a_larger_cache_misses_less(counts: list[int], rates: tuple[float, ...]) -> None:
    stats = EmbeddingOffloadStats(0.3, 77, torch.tensor(counts), 1000)
    miss_rates = [stats.expected_miss_rate(share) for share in (0, 0.1, 0.5, 0.999, 1)]
    assert miss_rates == pytest.approx(rates, rel=1e-6)
    assert (stats.expected_lookups, stats.cacheability, stats.height) == (77, 0.3, 1000)


@pytest.mark.parametrize("counts", [[], [[1, 2]]])
def test_a_histogram_must_be_a_list_of_numbers(counts: Any) -> None:
    with pytest.raises(ValueError, match="mrc_hist_counts"):
        EmbeddingOffloadStats(0.3, 77, counts, 1000)


def test_prefetched_bytes_are_what_misses_the_cache() -> None:
    case = {
        **CASES[0], "sharding_type": "table_wise", "kernel": "fused_uvm_caching", "device": "cuda", "rows": 1000,
        "columns": 64, "half": False, "load_factor": 0.35, "histogram": [6, 3, 0, 1],
    }  # fmt: skip
    _, perfs, _ = estimate(case, ours(PLANNER))
    missed = EmbeddingOffloadStats(0.5, 12345, np.array([6, 3, 0, 1]), 1000).expected_miss_rate(0.35) * 12345
    assert perfs[0][5] == pytest.approx(missed * 64 * 4 / (32 * 1024**3 / 1000))


def test_exchanged_elements_have_the_size_of_their_codec() -> None:
    from shardwise.planner.torchrec.utils import build_sharder_data

    codec = SimpleNamespace(
        forward=SimpleNamespace(quantized_dtype=torch.float16), backward=SimpleNamespace(quantized_dtype=torch.bfloat16)
    )
    sharder = SimpleNamespace(
        qcomm_codecs_registry={"POOLED_EMBEDDINGS_ALL_TO_ALL": codec, "OTHER": codec},
        fused_params={"cache_load_factor": 0.4},
    )
    data = build_sharder_data(sharder)
    assert data.qcomm_dtype_sizes == {"POOLED_EMBEDDINGS_ALL_TO_ALL": (2, 2)}
    assert data.fused_params == {"cache_load_factor": 0.4}
    assert data.storage_usage_type == types.StorageUsageType.DEFAULT

"""Plans as people read, write and check them, as TorchRec's text and as files, with errors that name the table."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from lines_run import lines_run
from ranks import run_ranks
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from shardwise import (
    BoundsCheckMode,
    DataType,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    EmbeddingModuleShardingPlan,
    ParameterConstraints,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
    apply_optimizer_in_backward,
    construct_module_sharding_plan,
    get_default_sharders,
)
from shardwise.embeddings.optim.fbgemm_types import CacheAlgorithm, MultiPassPrefetchConfig
from shardwise.planner import layout
from shardwise.planner.cost.shardwise import ShardwiseCost
from shardwise.planner.layout import TIERED_KERNELS, Tier
from shardwise.planner.plan.plan_files import load_planned, save_planned
from shardwise.planner.plan.planning import plan_tables
from shardwise.planner.tables import Feature, Table
from shardwise.planner.topology import Topology
from shardwise.sharding import (
    CacheParams,
    EmbeddingComputeKernel,
    Shard,
    TableOptions,
    apply_to_all,
    column_wise,
    data_parallel,
    grid_shard,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from shardwise.sharding.plan.caches import KeyValueParams
from shardwise.sharding.plan.plan import options_of, shards_of
from shardwise.sharding.planning.planners import EmbeddingShardingPlanner

EBC = EmbeddingBagCollection(
    [
        EmbeddingBagConfig(rows, dim, name)
        for name, rows, dim in (("product_table", 4096, 64), ("user", 10, 8), ("t", 7, 4))
    ],
    device="meta",
)
apply_optimizer_in_backward(torch.optim.SGD, EBC.parameters(), {"lr": 0.1})
MIXED: dict[str, Any] = {"product_table": table_wise(rank=1), "user": data_parallel(), "t": table_wise(rank=0)}

# printed by torchrec 1.8.0 for the same plans
WHERE = """

    param     | sharding type | compute kernel | ranks\N{SPACE}
------------- | ------------- | -------------- | ------
product_table | table_wise    | fused          | [1]  \N{SPACE}
user          | data_parallel | dense          | [0, 1]
t             | table_wise    | fused          | [0]  \N{SPACE}"""
ON_CPU = """

    param     | shard offsets | shard sizes | placement\N{SPACE}
------------- | ------------- | ----------- | ----------
product_table | [0, 0]        | [4096, 64]  | rank:1/cpu
t             | [0, 0]        | [7, 4]      | rank:0/cpu"""
ON_CUDA = """

    param     | shard offsets | shard sizes |   placement \N{SPACE}
------------- | ------------- | ----------- | -------------
product_table | [0, 0]        | [4096, 64]  | rank:1/cuda:1
t             | [0, 0]        | [7, 4]      | rank:0/cuda:0"""
# without a cut shard the second table has a title and a rule of no width
REPLICATED = """

    param     | sharding type | compute kernel | ranks\N{SPACE}
------------- | ------------- | -------------- | ------
product_table | data_parallel | dense          | [0, 1]
user          | data_parallel | dense          | [0, 1]
t             | data_parallel | dense          | [0, 1]


"""


def plan(where: dict[str, Any], device_type: str = "cpu") -> EmbeddingModuleShardingPlan:
    return construct_module_sharding_plan(EBC, where, world_size=2, device_type=device_type)


def test_plans_print_as_torchrec_prints_them() -> None:
    mixed, replicated = plan(MIXED), plan(dict.fromkeys(MIXED, data_parallel()))
    assert str(mixed) == WHERE + ON_CPU
    assert str(plan(MIXED, "cuda")) == WHERE + ON_CUDA
    assert str(replicated) == REPLICATED
    assert str(EmbeddingModuleShardingPlan()) == "\n\n\n\n\n\n"
    assert str(ShardingPlan({"": mixed})) == "module: " + WHERE + ON_CPU
    both = ShardingPlan({"": mixed, "model.ec": replicated})
    assert str(both) == "module: " + WHERE + ON_CPU + "\n\nmodule: model.ec" + REPLICATED
    assert str(ShardingPlan({})) == ""


def test_plans_show_their_parts_as_a_dict_and_survive_pickling() -> None:
    mixed = plan(MIXED)
    # printed by torchrec 1.8.0
    defaults = (
        "cache_params=None, enforce_hbm=None, stochastic_rounding=None, bounds_check_mode=None, output_dtype=None, "
        "key_value_params=None"
    )
    product = (
        "ParameterSharding(sharding_type='table_wise', compute_kernel='fused', ranks=[1], sharding_spec="
        "EnumerableShardingSpec(shards=[ShardMetadata(shard_offsets=[0, 0], shard_sizes=[4096, 64], "
        f"placement=rank:1/cpu)]), {defaults})"
    )
    user = (
        "ParameterSharding(sharding_type='data_parallel', compute_kernel='dense', ranks=[0, 1], sharding_spec=None, "
        f"{defaults})"
    )
    two = EmbeddingModuleShardingPlan({name: mixed[name] for name in ("product_table", "user")})
    assert repr(two) == f"{{'product_table': {product}, 'user': {user}}}"
    assert repr(ShardingPlan({"": two})) == f"ShardingPlan(plan={{'': {two!r}}})"
    restored = pickle.loads(pickle.dumps(ShardingPlan({"ebc": mixed})))
    assert restored == ShardingPlan({"ebc": mixed})
    assert restored.get_plan_for_module("ebc")["t"].ranks == [0]
    assert restored.get_plan_for_module("elsewhere") is None


def test_what_torchrec_does_not_have_shows_where_it_says_something() -> None:
    sharding = construct_module_sharding_plan(
        EBC, {**MIXED, "t": grid_shard([0], reduction="ordered", row_state="table")}, None, 2, 2, "cpu"
    )["t"]
    assert repr(sharding).endswith("key_value_params=None, reduction='ordered', row_state='table')")
    assert options_of(sharding) == TableOptions("ordered", "table")


def test_a_plan_is_plain_data() -> None:
    """As torchrec 1.8.0's, and with our own options where they are set."""
    shards = [{"shard_offsets": [0, 0], "shard_sizes": [4096, 64], "placement": "rank:1/cpu"}]
    mixed = plan({**MIXED, "t": row_wise(reduction="ordered")})
    assert ShardingPlan({"a.b": mixed})._serialize() == {
        "plan": {
            "a.b": {
                "product_table": {
                    "sharding_type": "table_wise", "compute_kernel": "fused", "ranks": [1], "shards": shards,
                },
                "user": {"sharding_type": "data_parallel", "compute_kernel": "dense", "ranks": [0, 1]},
                "t": {
                    "sharding_type": "row_wise", "compute_kernel": "fused", "ranks": [0, 1],
                    "shards": [
                        {"shard_offsets": [0, 0], "shard_sizes": [4, 4], "placement": "rank:0/cpu"},
                        {"shard_offsets": [4, 0], "shard_sizes": [3, 4], "placement": "rank:1/cpu"},
                    ],
                    "reduction": "ordered",
                },
            }
        }
    }  # fmt: skip
    assert json.loads(json.dumps(mixed._serialize())) == mixed._serialize()


@pytest.mark.parametrize(
    ("spelling", "kernel"),
    [("batched_fused", "fused"), ("batched_dense", "dense"), ("fused", "fused"), ("dense", "dense")],
)
def test_kernels_have_old_spellings(spelling: str, kernel: str) -> None:
    assert ParameterSharding("data_parallel", spelling).compute_kernel == kernel


def spec(placement: str | None = "rank:0/cpu") -> EnumerableShardingSpec:
    return EnumerableShardingSpec([ShardMetadata([0, 0], [7, 4], placement)])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("row_by_row", "fused"),
            r"sharding_type 'row_by_row' is not one of \['data_parallel', 'table_wise', 'column_",
        ),
        (("table_wise", "quick", [0], spec()), r"compute_kernel 'quick' is not one of \['dense', 'fused', 'fused_uvm'"),
        (("table_wise", "fused", [0]), "a table_wise table needs a sharding_spec"),
        (("data_parallel", "dense", [0], spec()), "a data_parallel table has no cut: its sharding_spec is None"),
        (("row_wise", "fused", [0], spec(), {"reduction": "sum"}), r"reduction must be one of .*, got 'sum'"),
        (
            ("row_wise", "fused", [0], spec(), {"row_state": "shard"}),
            "row_state='shard' is for column_wise, table_c",
        ),
        (("column_wise", "fused", [0], spec(), {"reduction": "ordered"}), ".* this table is column_wise"),
        (
            ("data_parallel", "dense", [0], None, {"reduction": "partial"}),
            "reduction='partial' is for row_wise, ta",
        ),
    ],
)
def test_a_parameter_sharding_that_means_nothing_is_refused(arguments: Any, message: str) -> None:
    options = arguments[4] if len(arguments) > 4 else {}
    with pytest.raises(ValueError, match=message):
        ParameterSharding(*arguments[:4], **options)


def test_names_of_torchrec_that_we_do_not_serve_can_be_written_and_not_used() -> None:
    assert {kind.value for kind in EmbeddingComputeKernel} >= {"quant", "key_value", "dram_ssd_virtual_table"}
    for kernel in EmbeddingComputeKernel:
        sharding = ParameterSharding("table_wise", kernel.value, [0], spec())
        if kernel.value in ("fused", "fused_triton", "dense", *TIERED_KERNELS):
            assert shards_of("t", sharding, 7, 4, 2) == [Shard("t", 0, (0, 7), (0, 4))]
            assert options_of(sharding).dense == (kernel.value == "dense")
        else:
            with pytest.raises(
                ValueError, match=f"table 't': compute_kernel '{kernel.value}' is not served: a plan to"
            ):
                shards_of("t", sharding, 7, 4, 2)
    with pytest.raises(ValueError, match="table 't': compute_kernel 'quant' is not served"):
        shards_of("t", ParameterSharding("data_parallel", "quant"), 7, 4, 2)


@pytest.mark.parametrize(
    ("setting", "value", "instead"),
    [
        ("bounds_check_mode", "sometimes", "give the BoundsCheckMode FATAL, WARNING or IGNORE"),
        ("output_dtype", DataType.INT8, "give the DataType FP32, FP16 or BF16"),
        ("stochastic_rounding", "no", "give the value True or False"),
    ],
)
def test_a_setting_that_a_plan_does_not_make_is_refused_where_shards_are_made(
    setting: str, value: object, instead: str
) -> None:
    sharding = ParameterSharding("table_wise", "fused", [0], spec())
    setattr(sharding, setting, value)
    with pytest.raises(ValueError, match=f"table 't': a plan does not set {setting} .*{instead}"):
        shards_of("t", sharding, 7, 4, 2)


def test_settings_of_storage_are_said_to_have_no_effect() -> None:
    sharding = ParameterSharding("table_wise", "fused", [0], spec(), CacheParams(load_factor=0.1))
    with pytest.warns(UserWarning, match=r"the plan's cache_params \(table 't'\) has no effect: the compute kern"):
        shards_of("t", sharding, 7, 4, 2)
    with pytest.warns(UserWarning, match="key_value_params"):
        shards_of("t", replace(sharding, cache_params=None, key_value_params=object()), 7, 4, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # what they ask for is so
        sharding = replace(sharding, cache_params=None, enforce_hbm=True, stochastic_rounding=True)
        assert len(shards_of("t", sharding, 7, 4, 2)) == 1
        # and a kernel that reads them
        cached = ParameterSharding("table_wise", "key_value", [0], spec(), CacheParams(), key_value_params=object())
        assert len(shards_of("t", cached, 7, 4, 2)) == 1
    with pytest.warns(UserWarning, match=r"cache_params \(table 't'\) has no effect: tier=0.5 of the rows"):
        shards_of("t", replace(cached, key_value_params=None, tier=Tier(0.5)), 7, 4, 2)
    with pytest.raises(ValueError, match="table 't': enforce_hbm=True keeps all rows on the device, tier=7 slots over"):
        shards_of("t", replace(sharding, tier=Tier(7)), 7, 4, 2)
    with pytest.raises(ValueError, match="tier=7 slots over ram is for tables with an optimizer in the backward"):
        replace(sharding, compute_kernel="dense", tier=Tier(7))
    assert hash(CacheParams(load_factor=0.1, stats={})) == hash(CacheParams(load_factor=0.1))


def test_a_plan_of_hundreds_of_ranks_is_made_at_once() -> None:
    names = [f"t{n}" for n in range(26)]
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(10**6, 64, name) for name in names], device="meta")

    def make() -> list[Shard]:
        module_plan = construct_module_sharding_plan(ebc, apply_to_all(ebc, row_wise()), None, 8, 512, "cuda")
        return [shard for name in names for shard in shards_of(name, module_plan[name], 10**6, 64, 512)]

    shards, lines = lines_run(make)
    assert len(shards) == 26 * 512
    assert lines < 150 * len(shards)
    layout.validate(shards, dict.fromkeys(names, (10**6, 64)), 512)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"t": table_wise(0)}, r"misses tables \['product_table', 'user'\] and names unknown tables \[\]"),
        ({**MIXED, "x": data_parallel()}, r"misses tables \[\] and names unknown tables \['x'\]"),
        ({**MIXED, "t": table_wise(2)}, "rank 2 is not one of 2"),
        ({**MIXED, "t": table_wise(-1)}, "rank -1 is not one of 2"),
    ],
)
def test_a_plan_that_does_not_fit_the_module_is_refused(where: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(where)


def test_only_collections_have_plans() -> None:
    with pytest.raises(TypeError, match="Linear holds no tables"):
        construct_module_sharding_plan(nn.Linear(2, 2), {}, world_size=1)
    ec = EmbeddingCollection([EmbeddingConfig(5, 4, "u")], device="meta")
    module_plan = construct_module_sharding_plan(ec, {"u": table_wise(0, "cpu", "batched_fused")}, world_size=1)
    assert module_plan["u"].compute_kernel == "fused"


def test_a_parameter_sharding_becomes_shards() -> None:
    mixed = plan(MIXED)
    assert shards_of("product_table", mixed["product_table"], 4096, 64, 2) == [
        Shard("product_table", 1, (0, 4096), (0, 64))
    ]
    assert shards_of("user", mixed["user"], 10, 8, 2) == [
        Shard("user", rank, (0, 10), (0, 8), replica=True) for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("placement", "message"),
    [
        ("cpu", "table 't': a shard's placement names no rank: cpu"),
        (None, "table 't': a shard's placement names no rank: None"),
    ],
)
def test_a_parameter_sharding_that_cannot_be_placed_is_refused(placement: str | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shards_of("t", ParameterSharding("table_wise", "fused", [0], spec(placement)), 7, 4, 2)


def test_a_plan_without_a_process_group_needs_a_world_size() -> None:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "t")])
    with pytest.raises(ValueError, match="world_size is missing: there is no process group"):
        construct_module_sharding_plan(ebc, {"t": data_parallel()})
    assert construct_module_sharding_plan(ebc, {"t": data_parallel()}, world_size=2)["t"].ranks == [0, 1]


def test_ranks_that_contradict_the_cut_are_refused() -> None:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "t")])
    sharding = construct_module_sharding_plan(ebc, {"t": table_wise(0)}, world_size=2)["t"]
    sharding.ranks = [1]
    with pytest.raises(ValueError, match=r"table 't': the plan says ranks \[1\], its shards are on \[0\]"):
        shards_of("t", sharding, 9, 4, 2)


GENERATORS: dict[str, Any] = {
    "everywhere": data_parallel(),
    "whole": table_wise(3),
    "rows": row_wise(reduction="ordered"),
    "columns": column_wise([1, 0, 1], [4, 8, 4], row_state="table"),
    "rows_of_host": table_row_wise(1),
    "columns_of_host": table_column_wise(0, [8, 8]),
    "grid": grid_shard([0, 1]),
}


def tables() -> EmbeddingBagCollection:
    # fewer rows than ranks: some shards are empty
    return EmbeddingBagCollection(
        [EmbeddingBagConfig(3 if name == "rows" else 50, 16, name, feature_names=[name]) for name in GENERATORS],
        device="meta",
    )


def every_strategy() -> ShardingPlan:
    module_plan = construct_module_sharding_plan(tables(), GENERATORS, local_size=2, world_size=4, device_type="cpu")
    return ShardingPlan({"": module_plan})


def test_every_strategy_comes_back_as_it_was(tmp_path: Path) -> None:
    plan = every_strategy()
    sharding = plan.plan[""]["whole"]
    sharding.enforce_hbm, sharding.stochastic_rounding = True, True
    sharding.output_dtype, sharding.bounds_check_mode = DataType.FP16, BoundsCheckMode.WARNING
    plan.save(tmp_path / "plan.json", world_size=4, local_world_size=2)
    loaded = ShardingPlan.load(tmp_path / "plan.json")
    assert loaded == plan and str(loaded) == str(plan)
    assert (loaded.world_size, loaded.local_world_size) == (4, 2)
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "plan.json").read_text()


def test_settings_of_rows_below_the_device_come_back_as_they_were(tmp_path: Path) -> None:
    """A file had none of them: a table larger than the device was loaded as one that lies there."""
    plan, file = every_strategy(), tmp_path / "plan.json"
    of_module = plan.plan[""]
    names = list(of_module)
    of_module[names[0]].tier = Tier(1000, "file", "/nvme", max_slots=0.5, ram_rows=0.25, policy="lru", half_life=8)
    of_module[names[1]].compute_kernel, of_module[names[1]].tier = "fused", Tier()
    cached, stored = of_module[names[2]], of_module[names[3]]
    cached.compute_kernel = "fused_uvm_caching"
    cached.cache_params = CacheParams(
        CacheAlgorithm.LFU, 0.25, 2.0**30, DataType.FP16, True, None, MultiPassPrefetchConfig(3)
    )
    stored.compute_kernel, stored.cache_params = "key_value", CacheParams(load_factor=1.0)
    stored.key_value_params = KeyValueParams("/nvme", 7, l2_cache_size=4, max_l1_cache_size=64, ps_hosts=(("host", 1),))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan.save(file, world_size=4, local_world_size=2)
    loaded = ShardingPlan.load(file)
    assert loaded == plan and str(loaded) == str(plan)
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert type(loaded.plan[""][names[0]].tier.max_slots) is float  # type: ignore[union-attr]
    text = str(plan)
    assert "1000 slots over file" in text and "as few slots as needed over ram" in text
    assert "0.25 of the rows over ram" in text
    assert "1 of the rows over file, 64 MiB of each shard at most, 4 GiB of each shard in ram" in text


def test_what_a_file_cannot_have_is_named(tmp_path: Path) -> None:
    plan = every_strategy()
    everywhere, whole = list(plan.plan[""].values())[:2]
    whole.compute_kernel, whole.tier = "fused", Tier(5, policy=lambda scores, batch: scores)
    everywhere.compute_kernel, everywhere.cache_params = "key_value", CacheParams(load_factor=0.2, stats=object())
    everywhere.key_value_params = {"any": 1}
    with pytest.warns(UserWarning) as caught:
        plan.save(tmp_path / "plan.json", world_size=4)
    first, second = list(plan.plan[""])[:2]
    assert [str(warning.message) for warning in caught] == [
        f"table {first!r}: the file of a plan has no cache_params.stats and no key_value_params",
        f"table {second!r}: the file of a plan has no tier",
    ]
    loaded = ShardingPlan.load(tmp_path / "plan.json").plan[""]
    assert loaded[first].cache_params == CacheParams(load_factor=0.2) and loaded[first].key_value_params is None
    with pytest.raises(ValueError, match="how many ranks"):
        every_strategy().save(tmp_path / "plan.json")
    with pytest.raises(ValueError, match=r"a plan for 3 ranks: table 'everywhere'.*ranks must be numbers below 3"):
        every_strategy().save(tmp_path / "plan.json", world_size=3)


def change(path: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Set what lies at a path; a value of None takes it away."""

    def apply(data: dict[str, Any]) -> None:
        *parents, last = path.split("/")
        place: Any = data
        for name in parents:
            place = place[int(name) if isinstance(place, list) else name]
        if value is None:
            del place[last]
        else:
            place[last] = value

    return apply


BROKEN = [
    ("format", "other", "no plan"),
    ("version", 2, "version 2"),
    ("world_size", 0, "world_size must be a positive number"),
    ("local_world_size", 3, "local_world_size 3 does not divide 4"),
    ("plan", [], "plan must be an object"),
    ("more", 1, r"has unknown \['more'\]"),
    ("world_size", None, r"misses \['world_size'\]"),
    ("plan//whole/sharding_type", "by_magic", "table 'whole'.*'by_magic'"),
    ("plan//whole/compute_kernel", 7, "table 'whole'.*compute_kernel must be a string"),
    ("plan//whole/compute_kernel", None, r"table 'whole'.*misses \['compute_kernel'\]"),
    ("plan//whole/ranks", [4], "table 'whole'.*ranks must be numbers below 4"),
    ("plan//whole/ranks", [2], r"table 'whole'.*ranks are \[2\]"),
    ("plan//whole/shards", [], "table 'whole'.*no shards"),
    ("plan//whole/shards/0/placement", "here", "table 'whole'.*'here/cpu'"),
    ("plan//whole/shards/0/placement", "rank:9/cpu", "table 'whole'.*ranks are"),
    ("plan//whole/shards/0/shard_sizes", [50], "table 'whole'.*two numbers"),
    ("plan//whole/shards/0/color", "red", r"table 'whole'.*has unknown \['color'\]"),
    ("plan//columns/shards/1/shard_sizes", [40, 8], "table 'columns'"),
    ("plan//columns/row_state", "both", "table 'columns'.*row_state"),
    ("plan//whole/output_dtype", "FP7", "table 'whole'.*output_dtype 'FP7'"),
    ("plan//everywhere/ranks", [0, 1], "table 'everywhere'.*all 4 ranks"),
    ("plan//whole/tier", {"slots": -1}, "table 'whole'.*Tier: slots must be a positive number of rows"),
    ("plan//whole/tier", {"place": "ram"}, "table 'whole'.*tier .* must be an object of slots, below, folder"),
    ("plan//whole/tier", 7, "table 'whole'.*tier 7 is unknown"),
    ("plan//whole/cache_params", {"algorithm": "MRU"}, "table 'whole'.*cache_params .* is unknown: 'MRU'"),
    ("plan//whole/key_value_params", {"l3_cache_size": 1}, "table 'whole'.*has other fields than KeyValueParams"),
]


@pytest.mark.parametrize(("path", "value", "words"), BROKEN)
def test_a_broken_file_says_where(path: str, value: Any, words: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    every_strategy().save(file, world_size=4, local_world_size=2)
    data = json.loads(file.read_text())
    change(path, value)(data)
    file.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=rf"plan\.json: .*{words}"):
        ShardingPlan.load(file)


def test_what_is_no_json_is_no_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text("module: ")
    with pytest.raises(ValueError, match=r"plan\.json: no plan"):
        ShardingPlan.load(file)


def test_what_shardwise_plan_writes_loads(tmp_path: Path) -> None:
    tables = [Table(f"t{n}", 5000 * (n + 1), 64, features=(Feature(f"f{n}", 10.0),), module="ebc") for n in range(5)]
    machines = Topology(4, "cuda", local_world_size=2)
    tier = Tier(0.25, "file", "/nvme", max_slots=100)
    rules = {"t1": ParameterConstraints(tier=tier)}
    planned = plan_tables(tables, machines, 64, cost=ShardwiseCost(machines, 64), constraints=rules)
    save_planned(planned, tmp_path / "plan.json")
    plan = ShardingPlan.load(tmp_path / "plan.json")
    assert {name: sharding.tier for name, sharding in plan.plan["ebc"].items() if sharding.tier} == {"t1": tier}
    assert load_planned(tmp_path / "plan.json").request.constraints["t1"].tier == tier  # type: ignore[union-attr]
    assert plan.world_size == 4 and set(plan.plan["ebc"]) == {table.name for table in tables}
    for table, choice, starts in planned.placed():
        sharding = plan.plan["ebc"][table.name]
        shards = planned.shards(table, choice, starts)
        assert (sharding.sharding_type, sharding.ranks) == (choice.sharding_type, [shard.rank for shard in shards])


def test_shardwise_plan_reads_what_training_saved(tmp_path: Path) -> None:
    model = nn.Sequential(EmbeddingBagCollection([EmbeddingBagConfig(500, 64, "t", feature_names=["f"])]))
    planner = EmbeddingShardingPlanner(Topology(2, "cpu"), batch_size=64)
    plan = planner.plan(model, get_default_sharders())
    plan.save(tmp_path / "plan.json")
    loaded = ShardingPlan.load(tmp_path / "plan.json")
    assert loaded == plan and str(loaded) == str(plan) and "slowest rank" in str(loaded)
    assert planner.last_plan is not None
    planned = load_planned(tmp_path / "plan.json")
    for (_, choice, starts), (_, wanted, where) in zip(planned.placed(), planner.last_plan.placed(), strict=True):
        assert (choice.sharding_type, choice.widths, starts) == (wanted.sharding_type, wanted.widths, where)


def test_a_plan_for_other_ranks_is_refused(tmp_path: Path) -> None:
    every_strategy().save(tmp_path / "plan.json", world_size=4, local_world_size=2)
    plan = ShardingPlan.load(tmp_path / "plan.json")
    with pytest.raises(ValueError, match="plan is for 4 ranks, and module '' is sharded over 1: plan again"):
        DistributedModelParallel(tables(), ShardingEnv.from_local(1, 0), plan=plan)


def loaded(file: Path) -> bool:
    torch.manual_seed(1)
    dmp = DistributedModelParallel(tables(), plan=ShardingPlan.load(file))
    return isinstance(dmp.plan.plan[""], EmbeddingModuleShardingPlan) and dmp.plan == every_strategy()


@pytest.mark.ranks
@pytest.mark.filterwarnings("ignore:tables")
def test_a_model_is_sharded_by_a_loaded_plan(tmp_path: Path) -> None:
    every_strategy().save(tmp_path / "plan.json", world_size=4, local_world_size=2)
    assert all(run_ranks(4, loaded, tmp_path / "plan.json"))

"""Plans as people read, write and check them: TorchRec's text, its spellings, and errors that name the table."""

from __future__ import annotations

import json
import pickle
import warnings
from dataclasses import replace
from typing import Any

import pytest
from lines_run import lines_run
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from shardwise import (
    BoundsCheckMode,
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    construct_module_sharding_plan,
)
from shardwise.planner import layout
from shardwise.sharding import (
    CacheParams,
    EmbeddingComputeKernel,
    Shard,
    TableOptions,
    apply_to_all,
    data_parallel,
    grid_shard,
    row_wise,
    table_wise,
)
from shardwise.sharding.plan.plan import options_of, shards_of

EBC = EmbeddingBagCollection(
    [
        EmbeddingBagConfig(rows, dim, name)
        for name, rows, dim in (("product_table", 4096, 64), ("user", 10, 8), ("t", 7, 4))
    ],
    device="meta",
)
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
    nothing = (
        "cache_params=None, enforce_hbm=None, stochastic_rounding=None, bounds_check_mode=None, output_dtype=None, "
        "key_value_params=None"
    )
    product = (
        "ParameterSharding(sharding_type='table_wise', compute_kernel='fused', ranks=[1], sharding_spec="
        "EnumerableShardingSpec(shards=[ShardMetadata(shard_offsets=[0, 0], shard_sizes=[4096, 64], "
        f"placement=rank:1/cpu)]), {nothing})"
    )
    user = (
        "ParameterSharding(sharding_type='data_parallel', compute_kernel='dense', ranks=[0, 1], sharding_spec=None, "
        f"{nothing})"
    )
    two = EmbeddingModuleShardingPlan({name: mixed[name] for name in ("product_table", "user")})
    assert repr(two) == f"{{'product_table': {product}, 'user': {user}}}"
    assert repr(ShardingPlan({"": two})) == f"ShardingPlan(plan={{'': {two!r}}})"
    again = pickle.loads(pickle.dumps(ShardingPlan({"ebc": mixed})))
    assert again == ShardingPlan({"ebc": mixed})
    assert again.get_plan_for_module("ebc")["t"].ranks == [0]
    assert again.get_plan_for_module("elsewhere") is None


def test_what_torchrec_does_not_have_shows_where_it_says_something() -> None:
    one = construct_module_sharding_plan(
        EBC, {**MIXED, "t": grid_shard([0], reduction="ordered", row_state="table")}, None, 2, 2, "cpu"
    )["t"]
    assert repr(one).endswith("key_value_params=None, reduction='ordered', row_state='table')")
    assert options_of(one) == TableOptions("ordered", "table")


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
        one = ParameterSharding("table_wise", kernel.value, [0], spec())
        if kernel.value in ("fused", "fused_triton"):
            assert shards_of("t", one, 7, 4, 2) == [Shard("t", 0, (0, 7), (0, 4))]
        elif kernel.value != "dense":
            with pytest.raises(
                ValueError, match=f"table 't': compute_kernel '{kernel.value}' is not served: a plan to"
            ):
                shards_of("t", one, 7, 4, 2)
    with pytest.raises(ValueError, match="table 't': compute_kernel 'quant' is not served"):
        shards_of("t", ParameterSharding("data_parallel", "quant"), 7, 4, 2)


@pytest.mark.parametrize(
    ("what", "value", "instead"),
    [
        ("bounds_check_mode", BoundsCheckMode.WARNING, r"give the collection policy=LookupPolicy\(bounds_check=...\)"),
        ("output_dtype", DataType.FP16, r"give the collection policy=LookupPolicy\(output_dtype=...\)"),
        ("stochastic_rounding", False, "give the table's optimizer stochastic_rounding=False"),
    ],
)
def test_a_setting_that_a_plan_does_not_make_is_refused_where_shards_are_made(
    what: str, value: object, instead: str
) -> None:
    one = ParameterSharding("table_wise", "fused", [0], spec())
    setattr(one, what, value)
    with pytest.raises(ValueError, match=f"table 't': a plan does not set {what} .*{instead}"):
        shards_of("t", one, 7, 4, 2)


def test_settings_of_storage_are_said_to_have_no_effect() -> None:
    one = ParameterSharding("table_wise", "fused", [0], spec(), CacheParams(load_factor=0.1))
    with pytest.warns(UserWarning, match=r"the plan's cache_params \(table 't'\) has no effect: rows are kept in"):
        shards_of("t", one, 7, 4, 2)
    with pytest.warns(UserWarning, match="key_value_params"):
        shards_of("t", replace(one, cache_params=None, key_value_params=object()), 7, 4, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # what they ask for is so
        one = replace(one, cache_params=None, enforce_hbm=True, stochastic_rounding=True)
        assert len(shards_of("t", one, 7, 4, 2)) == 1
    assert hash(CacheParams(load_factor=0.1, stats={})) == hash(CacheParams(load_factor=0.1))


def test_a_plan_of_hundreds_of_ranks_is_made_at_once() -> None:
    names = [f"t{n}" for n in range(26)]
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(10**6, 64, name) for name in names], device="meta")

    def make() -> list[Shard]:
        made = construct_module_sharding_plan(ebc, apply_to_all(ebc, row_wise()), None, 8, 512, "cuda")
        return [shard for name in names for shard in shards_of(name, made[name], 10**6, 64, 512)]

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
    found = construct_module_sharding_plan(ec, {"u": table_wise(0, "cpu", "batched_fused")}, world_size=1)
    assert found["u"].compute_kernel == "fused"


def test_a_parameter_sharding_becomes_shards() -> None:
    mixed = plan(MIXED)
    assert shards_of("product_table", mixed["product_table"], 4096, 64, 2) == [
        Shard("product_table", 1, (0, 4096), (0, 64))
    ]
    assert shards_of("user", mixed["user"], 10, 8, 2) == [
        Shard("user", rank, (0, 10), (0, 8), replica=True) for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("kernel", "placement", "message"),
    [
        ("fused", "cpu", "table 't': a shard's placement names no rank: cpu"),
        ("fused", None, "table 't': a shard's placement names no rank: None"),
        ("batched_dense", "rank:0/cpu", "table 't': only data_parallel tables have a dense gradient"),
    ],
)
def test_a_parameter_sharding_that_cannot_be_placed_is_refused(
    kernel: str, placement: str | None, message: str
) -> None:
    """The dense kernel of a table on one rank was passed over: the table trained by the fused default instead."""
    with pytest.raises(ValueError, match=message):
        shards_of("t", ParameterSharding("table_wise", kernel, [0], spec(placement)), 7, 4, 2)


def test_a_plan_without_a_process_group_needs_a_world_size() -> None:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "t")])
    with pytest.raises(ValueError, match="world_size is missing: there is no process group"):
        construct_module_sharding_plan(ebc, {"t": data_parallel()})
    assert construct_module_sharding_plan(ebc, {"t": data_parallel()}, world_size=2)["t"].ranks == [0, 1]


def test_ranks_that_contradict_the_cut_are_refused() -> None:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "t")])
    one = construct_module_sharding_plan(ebc, {"t": table_wise(0)}, world_size=2)["t"]
    one.ranks = [1]
    with pytest.raises(ValueError, match=r"table 't': the plan says ranks \[1\], its shards are on \[0\]"):
        shards_of("t", one, 9, 4, 2)

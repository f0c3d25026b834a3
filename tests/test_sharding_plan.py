"""Plans as people read, write and check them: TorchRec's text, its spellings, and errors that name the table."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
from torch import nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingPlan,
    construct_module_sharding_plan,
)
from shardwise.sharding import Shard, data_parallel, table_wise
from shardwise.sharding.plan import shards_of

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
    assert repr(mixed).startswith(
        "{'product_table': ParameterSharding(sharding_type='table_wise', compute_kernel='fused', ranks=[1], "
        "sharding_spec=EnumerableShardingSpec(shards=[ShardMetadata(shard_offsets=[0, 0], shard_sizes=[4096, 64], "
        "placement=rank:1/cpu)])"
    )
    again = pickle.loads(pickle.dumps(ShardingPlan({"ebc": mixed})))
    assert again == ShardingPlan({"ebc": mixed})
    assert again.get_plan_for_module("ebc")["t"].ranks == [0]
    assert again.get_plan_for_module("elsewhere") is None


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
    ],
)
def test_a_parameter_sharding_that_means_nothing_is_refused(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParameterSharding(*arguments)


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

"""Plans as people read, write and check them: TorchRec's text, its spellings, and errors that name the table."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
from shardwise.sharding import Shard, data_parallel, layout, table_wise
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
        (("row_by_row", "fused"), r"sharding_type 'row_by_row' is not one of \['data_parallel', 'table_wise'\]"),
        (("table_wise", "quick", [0], spec()), r"compute_kernel 'quick' is not one of \['dense', 'fused'\]"),
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


WHOLE = Shard("t", 0, (0, 7), (0, 4))


@pytest.mark.parametrize(
    ("shards", "message"),
    [
        ([], "table 't': shards hold 0 of 28 cells$"),
        ([Shard("t", 0, (0, 5), (0, 4))], "table 't': shards hold 20 of 28 cells$"),
        ([WHOLE, Shard("t", 1, (6, 7), (3, 4))], "table 't': shards hold 29 of 28 cells, some twice"),
        ([Shard("t", 0, (0, 4), (0, 4)), Shard("t", 1, (3, 6), (0, 4))], "28 of 28 cells, some twice"),
        ([WHOLE, Shard("u", 0, (0, 7), (0, 4))], r"the plan places table 'u', the module has \['t'\]"),
        ([Shard("t", 2, (0, 7), (0, 4))], "table 't': rank 2 is not one of 2"),
        ([Shard("t", -1, (0, 7), (0, 4))], "table 't': rank -1 is not one of 2"),
        ([Shard("t", 0, (0, 8), (0, 4))], r"table 't': rows \[0, 8\) leave the table's 7"),
        ([Shard("t", 0, (0, 7), (-1, 4))], r"table 't': columns \[-1, 4\) leave the table's 4"),
        (
            layout.data_parallel("t", 7, 4, 1),
            "a replicated table needs one whole replica on each of 2 ranks",
        ),
        ([*layout.data_parallel("t", 7, 4, 2), WHOLE], "table 't': a replicated table needs one whole replica"),
        (layout.data_parallel("t", 5, 4, 2), "table 't': a replicated table needs one whole replica"),
    ],
)
def test_a_layout_with_gaps_overlaps_or_strangers_is_refused(shards: list[Shard], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout.validate(shards, {"t": (7, 4)}, 2)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.data())
def test_a_table_cut_anywhere_is_covered_until_one_part_is_missing(rows: int, dim: int, data: st.DataObject) -> None:
    row_cuts = [0, *sorted(data.draw(st.sets(st.integers(1, rows)))), rows]
    col_cuts = [0, *sorted(data.draw(st.sets(st.integers(1, dim)))), dim]
    shards = [
        Shard("t", (r + c) % 3, rows_span, cols_span)
        for r, rows_span in enumerate(zip(row_cuts, row_cuts[1:], strict=False))
        for c, cols_span in enumerate(zip(col_cuts, col_cuts[1:], strict=False))
    ]
    layout.validate(shards, {"t": (rows, dim)}, 3)
    full = [s for s in shards if s.rows[0] < s.rows[1] and s.cols[0] < s.cols[1]]
    lost = data.draw(st.sampled_from(full))
    with pytest.raises(ValueError, match="table 't': shards hold"):
        layout.validate([shard for shard in shards if shard is not lost], {"t": (rows, dim)}, 3)


def test_a_fingerprint_is_stable_over_processes_and_orders_and_tells_plans_apart() -> None:
    shards = [WHOLE, Shard("u", 1, (0, 5), (0, 4))]
    mine = layout.fingerprint(shards, ["a", 1])
    code = (
        "from shardwise.sharding.layout import Shard, fingerprint\n"
        "print(fingerprint([Shard('u', 1, (0, 5), (0, 4)), Shard('t', 0, (0, 7), (0, 4))], ['a', 1]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) == mine
    assert 0 <= mine < 2**63
    others = [
        layout.fingerprint(shards, [1, "a"]),
        layout.fingerprint(shards, ["a"]),
        layout.fingerprint(shards[:1], ["a", 1]),
        layout.fingerprint([WHOLE, Shard("u", 0, (0, 5), (0, 4))], ["a", 1]),
        layout.fingerprint([WHOLE, Shard("u", 1, (0, 5), (0, 4), replica=True)], ["a", 1]),
    ]
    assert len({mine, *others}) == 6


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

"""Files of tables, constraints and plans: what is written comes back, and what cannot be is named by file and field."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkout import SHARED

from shardwise.embeddings.config import DataType
from shardwise.planner.constants_measured import CARDS
from shardwise.planner.constraints import ParameterConstraints
from shardwise.planner.cost.shardwise import ShardwiseCost
from shardwise.planner.plan.explanation import explain
from shardwise.planner.plan.files import (
    constraint_to,
    constraints_from,
    read_constraints,
    read_tables,
    table_from,
    table_to,
)
from shardwise.planner.plan.plan_files import (
    CutDifference,
    load_planned,
    planned_to_json,
    read_plan,
    save_planned,
)
from shardwise.planner.plan.planned import Planned
from shardwise.planner.plan.planning import plan_request, plan_tables
from shardwise.planner.plan.whatif import (
    with_batch_size,
    with_card,
    with_hbm,
    with_reserved,
    with_world,
)
from shardwise.planner.reports.difference import diff
from shardwise.planner.tables import Feature, Skew, Table
from shardwise.planner.topology import GIB, BasicCommsBandwidths, Topology

SETS = SHARED / "tables"
FULL = Table(
    "item", 3_000_000, 64, DataType.FP16, (Feature("seen", 30.0, 2.0, 100), Feature("bought", 4.0)), False, True,
    "Adam", "towers.ebc", Skew(1.05, 2.0, True),
)  # fmt: skip
TABLES = [
    replace(FULL, data_type=DataType.FP32),
    Table("user", 500_000, 128, features=(Feature("u"),), optimizer="RowWiseAdagrad"),
    *(Table(f"t{n}", 10_000 * (n + 1), 32, features=(Feature(f"f{n}", 3.0),), optimizer="SGD") for n in range(5)),
]
RULES = {
    "item": ParameterConstraints(sharding_types=["column_wise", "row_wise"], not_on=[1], skew=Skew(1.2)),
    "t1": ParameterConstraints(same_rank="pair"),
    "t2": ParameterConstraints(same_rank="pair"),
    "t3": ParameterConstraints(sharding_types=["data_parallel"]),
    "t4": ParameterConstraints(device_group="cpu"),
}


def made(cost: str = "shardwise", topology: Topology | None = None) -> Planned:
    chosen = topology or Topology(4, "cuda", 8 * GIB, local_world_size=2, card="a100-40")
    return plan_tables(TABLES, chosen, 256, cost=cost, constraints=RULES, reserved=(GIB,) * 4, settings={"a": "b"})


def write(path: Path, data: Any) -> Path:
    path.write_text(data if isinstance(data, str) else json.dumps(data))
    return path


def test_a_table_comes_back_from_its_file(tmp_path: Path) -> None:
    assert read_tables(write(tmp_path / "t.json", [table_to(FULL), table_to(Table("x", 1, 4))]))[0] == FULL
    bare = table_from({"name": "x", "num_embeddings": 7, "embedding_dim": 4}, "here")
    assert bare == Table("x", 7, 4, features=(Feature("x"),))


def test_tables_are_read_from_toml(tmp_path: Path) -> None:
    file = write(
        tmp_path / "t.toml",
        '[[tables]]\nname = "a"\nnum_embeddings = 10\nembedding_dim = 8\npooling_factor = 2.5\nfeatures = ["x", "y"]\n'
        '[[tables]]\nname = "b"\nnum_embeddings = 10\nembedding_dim = 8\npooling_kind = "sequence"\n'
        'data_type = "bf16"\n',
    )
    assert read_tables(file) == [
        Table("a", 10, 8, features=(Feature("x", 2.5), Feature("y", 2.5))),
        Table("b", 10, 8, DataType.BF16, (Feature("b"),), pooled=False),
    ]


ONE = {"name": "a", "num_embeddings": 10, "embedding_dim": 8}
BAD_TABLES = {
    "not JSON": ("{", "not JSON: Expecting property name"),
    "no tables": ({"sets": []}, 'no tables: expected a list of them, or an object that has one as "tables"'),
    "a table that is none": ([3], "table number 1: must be an object, got 3"),
    "no name": ([{"num_embeddings": 1, "embedding_dim": 1}], "table number 1: name is missing"),
    "no rows": ([{**ONE, "num_embeddings": 0}], "table 'a': num_embeddings must be a positive whole number, got 0"),
    "a text": ([{**ONE, "embedding_dim": "8"}], "table 'a': embedding_dim must be a positive whole number, got '8'"),
    "a slip": (
        [{**ONE, "poling_factor": 2}],
        "table 'a': unknown field 'poling_factor': did you mean 'pooling_factor'?",
    ),
    "a type": ([{**ONE, "data_type": "fp8"}], "table 'a': data_type must be one of FP32, FP16, BF16"),
    "lengths": ([{**ONE, "features": ["x", "y"], "feature_pooling": [1]}], "table 'a': feature_pooling must have one"),
    "negative": ([{**ONE, "pooling_factor": -1}], "table 'a': pooling_factor must be a number of 0 or more, got -1"),
    "truth": ([{**ONE, "weighted": 1}], "table 'a': weighted must be true or false, got 1"),
    "skew": ([{**ONE, "skew": {"beta": 1}}], "table 'a': skew must be an object of alpha, shift, sorted_ids"),
    "twice": ([ONE, ONE], "table 'a' is there twice"),
}


def test_constraints_are_read_from_toml_and_json_alike(tmp_path: Path) -> None:
    toml = write(
        tmp_path / "c.toml",
        '["*"]\nsharding_types = ["table_wise", "row_wise"]\nnot_on = [3]\n'
        '[item]\nsharding_types = ["column_wise"]\nmin_partition = 64\nskew = { alpha = 1.1 }\noutput_dtype = "fp16"\n',
    )
    expected = {
        "*": ParameterConstraints(sharding_types=["table_wise", "row_wise"], not_on=[3]),
        "item": ParameterConstraints(
            sharding_types=["column_wise"], min_partition=64, not_on=[3], skew=Skew(1.1), output_dtype=DataType.FP16
        ),
    }
    assert read_constraints(toml) == expected
    plain = {name: constraint_to(constraint) for name, constraint in expected.items()}
    assert read_constraints(write(tmp_path / "c.json", plain)) == expected


@pytest.mark.parametrize("constraint", RULES.values())
def test_a_constraint_comes_back_from_its_file(constraint: ParameterConstraints) -> None:
    assert constraints_from({"x": constraint_to(constraint)}, "here") == {"x": constraint}


BAD_CONSTRAINTS = {
    "a list": ([], "constraints must be an object with one for each table, got []"),
    "no object": ({"a": 3}, "table 'a': its constraint must be an object, got 3"),
    "a slip": (
        {"a": {"sharding_type": []}},
        "table 'a': unknown field 'sharding_type': did you mean 'sharding_types'?",
    ),
    "a text": ({"a": {"sharding_types": "row_wise"}}, "table 'a': sharding_types must be a list, got 'row_wise'"),
    "a rank": ({"a": {"ranks": [-1]}}, "table 'a': ranks must be ranks, numbers from 0, got -1"),
    "an object of Python": ({"a": {"cache_params": {}}}, "table 'a': cache_params cannot be said in a file"),
}


OTHER_TOPOLOGY = Topology(
    4, "cuda", 8 * GIB, local_world_size=1, pod_size=2, hbm_mem_bw=3e9, uneven_sharding_perf_multiplier=1.5,
    generalized_comms_bandwidths=BasicCommsBandwidths(2e7, 3e8),
)  # fmt: skip


@pytest.mark.parametrize(
    ("cost", "topology"),
    [("shardwise", None), ("torchrec", None), ("shardwise", OTHER_TOPOLOGY), ("torchrec", OTHER_TOPOLOGY)],
)
def test_a_plan_comes_back_with_all_its_numbers(cost: str, topology: Topology | None, tmp_path: Path) -> None:
    plan = made(cost, topology)
    save_planned(plan, tmp_path / "plan.json")
    again = load_planned(tmp_path / "plan.json")
    assert again.solution == plan.certified and again.tables == plan.tables and again.settings == plan.settings
    assert (again.cost, again.batch_size, again.seconds) == (plan.cost, plan.batch_size, plan.seconds)
    assert repr(again.topology) == repr(plan.topology)
    for field in ("parts_ms", "hbm", "ddr"):
        assert np.array_equal(getattr(again.loads, field), getattr(plan.loads, field))
    assert explain(again) == explain(plan)
    assert not diff(plan, again)
    assert again.request is not None and plan.request is not None
    assert (again.request.constraints, again.request.reserved) == (RULES, (GIB,) * 4)
    assert planned_to_json(again) == planned_to_json(plan)


def test_a_plan_from_a_file_can_be_made_again_with_changes(tmp_path: Path) -> None:
    plan = made()
    save_planned(plan, tmp_path / "plan.json")
    request, here = load_planned(tmp_path / "plan.json").request, plan.request
    assert request is not None and here is not None
    for change in (
        lambda r: r,
        lambda r: with_world(r, 8),
        lambda r: with_card(r, "h200"),
        lambda r: with_reserved(r, 0.5),
        lambda r: with_batch_size(r, 1000),
    ):
        first, second = plan_request(change(request)), plan_request(change(here))
        assert first.solution == second.solution and np.array_equal(first.loads.time_ms, second.loads.time_ms)


@pytest.mark.parametrize(
    ("world", "local", "expected"), [(8, None, (8, 2)), (6, 3, (6, 3)), (3, None, (3, 3)), (2, None, (2, 2))]
)
def test_another_world_keeps_its_hosts_where_they_divide_it(
    world: int, local: int | None, expected: tuple[int, int]
) -> None:
    request = made().request
    assert request is not None
    changed = with_world(request, world, local_world_size=local)
    assert (changed.topology.world_size, changed.topology.local_world_size) == expected
    assert changed.topology.hbm == [8 * GIB] * world and changed.reserved == (GIB,) * world


def test_a_changed_request_is_priced_for_its_own_machines() -> None:
    request = made().request
    assert request is not None
    changed = with_batch_size(with_world(with_card(request, "h200"), 8), 512)
    assert changed.topology.hbm[0] == CARDS["h200"].memory_gib // 1 * GIB - changed.reserved[0]
    assert changed.reserved[0] / (139 * GIB) == pytest.approx(1 / 9)
    fresh = ShardwiseCost(changed.topology, 512, CARDS["h200"].constants)
    assert isinstance(changed.cost, ShardwiseCost) and changed.cost.constants == fresh.constants
    for way in fresh.ways(TABLES[1]):
        assert np.array_equal(changed.cost.price(TABLES[1], way).parts_ms, fresh.price(TABLES[1], way).parts_ms)
    # a ninth is reserved as before
    assert with_hbm(request, 18 * GIB).reserved == (2 * GIB,) * 4


def test_the_file_of_a_plan_is_one_that_training_reads(tmp_path: Path) -> None:
    plan = made()
    save_planned(plan, tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    assert (document["format"], document["version"]) == ("shardwise-plan", 1)
    assert (document["world_size"], document["local_world_size"]) == (4, 2)
    assert set(document["plan"]) == {"towers.ebc", ""} and "t4" not in document["plan"][""]
    assert document["plan"][""]["t3"] == {
        "sharding_type": "data_parallel", "compute_kernel": "dense", "ranks": [0, 1, 2, 3], "shards": [],
    }  # fmt: skip
    item = document["plan"]["towers.ebc"]["item"]
    assert item["ranks"] == [int(shard["placement"].split("/")[0].removeprefix("rank:")) for shard in item["shards"]]
    for shard in item["shards"]:
        rank = int(shard["placement"].split("/")[0].removeprefix("rank:"))
        assert shard["placement"] == f"rank:{rank}/cuda:{rank % 2}"
    assert sum(h * w for h, w in (shard["shard_sizes"] for shard in item["shards"])) == 3_000_000 * 64


def without_about(plan: Planned) -> dict[str, Any]:
    return {key: value for key, value in planned_to_json(plan).items() if key != "about"}


BROKEN: dict[str, tuple[Any, str]] = {
    "no plan": (lambda document: [], 'no plan: expected an object with "format": "shardwise-plan"'),
    "a version to come": (lambda document: {**document, "version": 2}, "version 2 of the format; this version reads 1"),
    "nothing about it": (
        lambda document: {key: value for key, value in document.items() if key != "about"},
        "this plan says nothing about how it was made",
    ),
    "half of it": (
        lambda document: {
            **document,
            "about": {key: value for key, value in document["about"].items() if key != "batch_size"},
        },
        "what it says about how it was made is not whole: KeyError('batch_size')",
    ),
    "changed by hand": (
        lambda document: {**document, "plan": {**document["plan"], "": {}}},
        "table 'user' is not placed as the planner chose: the plan was changed",
    ),
}


REFUSED: dict[str, tuple[Callable[[Path], object], Any, str]] = {
    **{f"tables: {case}": (read_tables, *bad) for case, bad in BAD_TABLES.items()},
    **{f"constraints: {case}": (read_constraints, *bad) for case, bad in BAD_CONSTRAINTS.items()},
    **{f"plan: {case}": (load_planned, *bad) for case, bad in BROKEN.items()},
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_named_with_its_file_and_field(case: str, tmp_path: Path) -> None:
    read, data, text = REFUSED[case]
    file = write(tmp_path / "file.json", data(planned_to_json(made())) if callable(data) else data)
    with pytest.raises(ValueError) as caught:
        read(file)
    assert str(caught.value).startswith(f"{file}: {text}")


def test_what_training_adds_to_a_plan_is_no_change_of_it(tmp_path: Path) -> None:
    document = planned_to_json(made())
    document["plan"]["over"] = {"weight": {"sharding_type": "data_parallel", "compute_kernel": "dense", "ranks": [0]}}
    document["plan"][""]["user"]["stochastic_rounding"] = True
    assert load_planned(write(tmp_path / "plan.json", document)).solution == made().certified


def test_prices_that_changed_since_are_told(tmp_path: Path) -> None:
    document = planned_to_json(made())
    document["about"]["cost"]["constants"]["row_gb_s"] /= 2
    file = write(tmp_path / "plan.json", document)
    with pytest.warns(UserWarning, match="its cost model said .* when it was made, now it says"):
        load_planned(file)


def test_files_without_more_are_compared_by_their_shards(tmp_path: Path) -> None:
    plan = without_about(made())
    assert not CutDifference.between(plan, plan)
    other = json.loads(json.dumps(plan))
    other["plan"][""]["user"]["compute_kernel"] = "fused_triton"
    del other["plan"][""]["t3"]
    difference = CutDifference.between(read_plan(write(tmp_path / "a.json", plan)), other)
    assert list(difference.tables) == ["user", "t3"] and difference
    assert difference.tables["t3"] == ("data_parallel dense on ranks [0, 1, 2, 3]", None)
    assert "t3: data_parallel dense on ranks [0, 1, 2, 3] -> is not there" in str(difference)


@pytest.mark.skipif(not SETS.is_dir(), reason="the sets of tables are not here")
def test_every_set_of_tables_is_read() -> None:
    for file in sorted(SETS.glob("*.json")):
        if file.name == "INDEX.json":
            continue
        document = json.loads(file.read_text())
        tables = read_tables(file)
        assert len(tables) == document["summary"]["num_tables"]
        assert sum(table.num_embeddings for table in tables) == document["summary"]["total_rows"]
        if all("feature_pooling" in table or "features" not in table for table in document["tables"]):
            assert sum(table.ids(1) for table in tables) == pytest.approx(
                document["summary"]["ids_per_sample"], rel=1e-3
            )

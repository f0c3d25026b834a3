"""From tables and constraints to a plan: constraints hold, contradictions are named, suggestions fit if followed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from checkout import SHARED

from shardwise.embeddings.config import DataType
from shardwise.planner.constraints import ParameterConstraints
from shardwise.planner.cost.shardwise import ShardwiseCost
from shardwise.planner.cost.ways import Way
from shardwise.planner.errors import PlannerError, PlannerErrorType
from shardwise.planner.layout import Tier
from shardwise.planner.plan.advice import NoRoomError
from shardwise.planner.plan.files import read_tables
from shardwise.planner.plan.planned import Planned, Request
from shardwise.planner.plan.planning import build_problem, plan_request, plan_tables
from shardwise.planner.search.problem import faults
from shardwise.planner.tables import Feature, Skew, Table
from shardwise.planner.topology import GIB, Topology

SETS = SHARED / "tables"
TOPOLOGY = Topology(8, "cuda", card="h100", local_world_size=4)
TABLES = [
    Table("user", 4_000_000, 128, features=(Feature("u", 2.0),), optimizer="Adam"),
    Table("item", 2_000_000, 128, features=(Feature("seen", 40.0), Feature("bought", 5.0)), optimizer="Adam"),
    *(Table(f"t{n}", 100_000, 64, features=(Feature(f"f{n}"),), optimizer="SGD") for n in range(8)),
]


def planned(constraints: Mapping[str, ParameterConstraints], cost: str = "shardwise") -> Planned:
    made = plan_tables(TABLES, TOPOLOGY, 1024, cost=cost, constraints=constraints)
    assert faults(made.problem, made.solution.assignment) == []
    return made


def held(made: Planned) -> dict[str, tuple[str, list[int]]]:
    """Sharding type and ranks of every table."""
    return {
        table.path: (choice.sharding_type, sorted({shard.rank for shard in made.shards(table, choice, starts)}))
        for table, choice, starts in made.placed()
    }


@pytest.mark.parametrize("cost", ["shardwise", "torchrec"])
@pytest.mark.parametrize(
    "kind",
    ["data_parallel", "table_wise", "row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard"],
)
def test_a_table_is_cut_as_its_sharding_types_say(kind: str, cost: str) -> None:
    assert held(planned({"item": ParameterConstraints(sharding_types=[kind])}, cost))["item"][0] == kind


@pytest.mark.parametrize(
    ("constraint", "widths", "kernel"),
    [
        (ParameterConstraints(sharding_types=["column_wise"], min_partition=64), (64, 64), "fused"),
        (ParameterConstraints(sharding_types=["data_parallel"], compute_kernels=["fused"]), (128,), "fused"),
    ],
    ids=["min_partition", "compute_kernels"],
)
def test_shards_are_as_wide_and_kernels_are_as_a_constraint_says(
    constraint: ParameterConstraints, widths: tuple[int, ...], kernel: str
) -> None:
    choice = next(choice for table, choice, _ in planned({"item": constraint}).placed() if table.name == "item")
    assert (choice.widths, choice.compute_kernel) == (widths, kernel)


def test_a_table_stays_on_its_ranks_and_off_those_it_may_not_use() -> None:
    rules = {
        "item": ParameterConstraints(ranks=[2, 5]),
        "user": ParameterConstraints(not_on=[0, 1, 2, 3]),
        "t0": ParameterConstraints(ranks=[3, 6], not_on=[3]),
    }
    where = held(planned(rules))
    assert set(where["item"][1]) <= {2, 5}
    assert set(where["user"][1]) <= {4, 5, 6, 7}
    assert where["t0"] == ("table_wise", [6])


def test_a_row_shard_on_each_rank_of_a_host_may_use_a_host_that_is_wholly_allowed() -> None:
    rules = {"item": ParameterConstraints(sharding_types=["row_wise", "table_row_wise"], not_on=[1])}
    assert held(planned(rules))["item"] == ("table_row_wise", [4, 5, 6, 7])


def test_tables_of_one_group_lie_whole_on_one_rank() -> None:
    rules = {name: ParameterConstraints(same_rank="a") for name in ("t1", "item", "t4")}
    rules["t4"] = replace(rules["t4"], not_on=[0, 1, 2])
    rules["t2"] = rules["t3"] = ParameterConstraints(same_rank="b")
    made = planned(rules)
    where = held(made)
    assert where["t1"] == where["item"] == where["t4"] and where["t2"] == where["t3"]
    assert where["item"][0] == where["t2"][0] == "table_wise"
    assert set(where["t4"][1]) <= {3, 4, 5, 6, 7}
    # what a group costs and holds is what its tables do
    group = next(item for item in made.problem.items if "item" in item.names)
    assert group.names == ("item", "t1", "t4")
    alone = build_problem(TABLES, TOPOLOGY, ShardwiseCost(TOPOLOGY, 1024), {})
    whole = [
        next(choice for choice in item.choices if choice.sharding_type == "table_wise")
        for item in alone.items
        if item.names[0] in group.names
    ]
    assert int(group.choices[0].hbm[0, 0]) == sum(int(choice.hbm[0, 0]) for choice in whole)
    assert group.choices[0].work_ms == pytest.approx(sum(choice.work_ms for choice in whole), rel=1e-12)


def test_a_table_of_another_device_group_is_left_to_another_plan() -> None:
    made = planned({"t5": ParameterConstraints(device_group="cpu"), "t6": ParameterConstraints(device_group="cuda")})
    assert "t5" not in held(made) and "t6" in held(made)


def test_the_constraint_of_a_star_holds_for_tables_without_their_own() -> None:
    rules = {"*": ParameterConstraints(sharding_types=["table_wise"]), "item": ParameterConstraints()}
    where = held(planned(rules))
    assert {kind for name, (kind, _) in where.items() if name != "item"} == {"table_wise"}
    assert where["item"][0] != "table_wise"


def test_what_a_constraint_says_of_ids_is_what_is_priced() -> None:
    item_constraint = ParameterConstraints(
        pooling_factors=[3.0, 7.0], num_poolings=[2.0, 1.0], batch_sizes=[10, 20], is_weighted=True, skew=Skew(1.1)
    )
    made = planned({"item": item_constraint, "user": ParameterConstraints(sharding_types=["table_wise"])})
    by_name = {table.name: table for table in made.tables}
    assert by_name["item"] == replace(
        TABLES[1],
        weighted=True,
        skew=Skew(1.1),
        features=(Feature("seen", 3.0, 2.0, 10), Feature("bought", 7.0, 1.0, 20)),
    )
    # the default of pooling_factors, [1.0], says nothing
    assert by_name["user"] == TABLES[0]


WRONG = {
    "an unknown table": (
        {"itm": ParameterConstraints()},
        PlannerErrorType.INPUT_VALIDATION,
        "constraints name table 'itm', which the model does not have: did you mean 'item'?",
    ),
    "an unknown type": (
        {"item": ParameterConstraints(sharding_types=["rowwise"])},
        PlannerErrorType.INPUT_VALIDATION,
        "table 'item': sharding_types has 'rowwise': did you mean 'row_wise'?",
    ),
    "an unknown kernel": (
        {"item": ParameterConstraints(compute_kernels=["fusd"])},
        PlannerErrorType.INVALID_COMPUTE_KERNEL,
        "table 'item': compute_kernels has 'fusd': did you mean 'fused'?",
    ),
    "a rank that there is not": (
        {"item": ParameterConstraints(not_on=[8])},
        PlannerErrorType.INPUT_VALIDATION,
        "table 'item': not_on has rank 8: ranks are 0 to 7",
    ),
    "no rank": (
        {"item": ParameterConstraints(ranks=[1], not_on=[1])},
        PlannerErrorType.STRICT_CONSTRAINTS,
        "table 'item': ranks=[1], not_on=[1] leave no rank",
    ),
    "ranks too few for the type": (
        {"item": ParameterConstraints(sharding_types=["row_wise"], ranks=[0, 1])},
        PlannerErrorType.STRICT_CONSTRAINTS,
        "table 'item': ranks=[0, 1] leaves ranks [0, 1], and sharding_types=['row_wise'] leaves row_wise",
    ),
    "a kernel that the type has not": (
        {"item": ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["ssd_virtual_table"])},
        PlannerErrorType.STRICT_CONSTRAINTS,
        "table 'item': sharding_types=['row_wise'], compute_kernels=['ssd_virtual_table'] leaves no way to place it:"
        " without compute_kernels there would be row_wise (fused)",
    ),
    "a tier of a table that trains by its gradient": (
        {"item": ParameterConstraints(compute_kernels=["dense"], tier=Tier(5))},
        PlannerErrorType.INPUT_VALIDATION,
        "table 'item': tier=5 slots over ram is for an optimizer in the backward, and compute_kernels are ['dense']",
    ),
    "a cache larger than its table": (
        {
            "item": ParameterConstraints(
                compute_kernels=["fused_uvm_caching"], cache_params=SimpleNamespace(load_factor=2)
            )
        },
        PlannerErrorType.INPUT_VALIDATION,
        "cache_params.load_factor must be a share of the rows, from 0 to 1, got 2",
    ),
    "a group with a table that is cut": (
        {
            "item": ParameterConstraints(same_rank="a"),
            "t0": ParameterConstraints(same_rank="a", sharding_types=["row_wise"]),
        },
        PlannerErrorType.STRICT_CONSTRAINTS,
        "table 't0' has same_rank='a', so it lies whole on one rank, but it may not be table_wise"
        " (sharding_types=['row_wise'])",
    ),
    "a group without a rank": (
        {"item": ParameterConstraints(same_rank="a", ranks=[1]), "t0": ParameterConstraints(same_rank="a", ranks=[2])},
        PlannerErrorType.STRICT_CONSTRAINTS,
        "tables 'item', 't0' have same_rank='a', and their ranks and not_on leave none in common",
    ),
    "numbers for other features": (
        {"item": ParameterConstraints(pooling_factors=[2.0, 3.0, 4.0])},
        PlannerErrorType.INPUT_VALIDATION,
        "table 'item': pooling_factors must have one number for each of its 2 features (seen, bought)",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_contradictions_name_the_table_and_the_constraint(case: str) -> None:
    constraints, kind, text = WRONG[case]
    with pytest.raises(PlannerError) as caught:
        planned(constraints)
    assert caught.value.error_type == kind
    assert str(caught.value).startswith(text)


class Counted:
    """A cost model that counts what it is asked."""

    name = "counted"

    def __init__(self) -> None:
        self.cost, self.asked = ShardwiseCost(TOPOLOGY, 64), 0

    def ways(self, table: Table, constraint: ParameterConstraints | None = None) -> Sequence[Way]:
        return self.cost.ways(table, constraint)

    def price(self, table: Table, way: Way):  # type: ignore[no-untyped-def]
        self.asked += 1
        return self.cost.price(table, way)

    def base_ms(self, tables: Sequence[Table]) -> float:
        return self.cost.base_ms(tables)


def test_tables_that_differ_in_names_alone_are_priced_once() -> None:
    original = Table("a", 1000, 64, features=(Feature("x", 3.0),), module="m")
    alike = [replace(original, name=f"a{n}", features=(Feature(f"x{n}", 3.0),)) for n in range(50)]
    other = replace(original, name="b", features=(Feature("y", 4.0),))
    limited = ParameterConstraints(sharding_types=["table_wise"])
    cost = Counted()
    problem = build_problem([*alike, other], TOPOLOGY, cost, {"a7": limited})
    ways = len(cost.ways(original))
    assert cost.asked == 2 * ways + 1
    assert problem.items[0].choices is problem.items[1].choices
    assert len(problem.items[7].choices) == 1 and len(problem.items[50].choices) == ways


def test_the_same_request_gives_the_same_plan() -> None:
    rules = {"item": ParameterConstraints(not_on=[2]), "t1": ParameterConstraints(same_rank="a")}
    first, second = planned(rules), planned(rules)
    assert first.solution == second.solution


def test_no_tables_are_a_plan_too() -> None:
    made = plan_tables([], TOPOLOGY, 64)
    assert list(made.placed()) == []


@pytest.mark.skipif(not SETS.is_dir(), reason="the sets of tables are not here")
def test_a_thousand_tables_have_few_prices() -> None:
    tables = read_tables(SETS / "nv_synthetic_jumbo_v3.json")
    topology = Topology(256, "cuda", card="h100", local_world_size=8)
    cost = ShardwiseCost(topology, 256)
    problem = build_problem(tables, topology, cost, {})
    assert len(problem.items) == 1022 and len({id(item.choices) for item in problem.items}) < 20
    assert np.isfinite([choice.work_ms for item in problem.items for choice in item.choices]).all()


def table(name: str, gib: float, optimizer: str = "SGD", dim: int = 128) -> Table:
    """A table of so many GiB."""
    return Table(name, int(gib * GIB) // (4 * dim), dim, features=(Feature(name),), optimizer=optimizer)


def refused(
    tables: list[Table],
    topology: Topology,
    constraints: Mapping[str, ParameterConstraints] | None = None,
    reserved: tuple[int, ...] = (),
    batch_size: int = 64,
) -> NoRoomError:
    with pytest.raises(NoRoomError) as caught:
        plan_tables(tables, topology, batch_size, constraints=constraints, reserved=reserved)
    error = caught.value
    # the whole point: each suggestion has a plan
    for suggestion in error.suggestions:
        made = plan_request(suggestion.request)
        assert faults(made.problem, made.solution.assignment) == [], suggestion.text
    return error


def gpus(count: int, gib: float, local: int | None = None) -> Topology:
    return Topology(count, "cuda", int(gib * GIB), local_world_size=local)


def test_the_error_says_where_by_how_much_and_what_weighs_most() -> None:
    error = refused([table("big", 30), table("small", 4), table("tiny", 1)], gpus(2, 16))
    assert error.error_type == PlannerErrorType.INSUFFICIENT_STORAGE
    assert [path for path, _ in error.heaviest] == ["big", "small", "tiny"]
    assert error.heaviest[0][1] == pytest.approx(30 * GIB, rel=1e-3)
    # 35 GiB have 32: the nearest plan lacks at least the difference, and every rank's numbers add up
    assert sum(overload.over_bytes for overload in error.overloads) >= 3 * GIB
    for overload in error.overloads:
        assert overload.limit_bytes == 16 * GIB and overload.used_bytes == overload.limit_bytes + overload.over_bytes
    worst = error.overloads[0]
    assert f"{worst.over_bytes / GIB:.4g} GiB over on rank {worst.rank}" in str(error)
    assert "'big' 30" in str(error) and "2 ranks together have 32 GiB" in str(error)


def test_weights_count_the_state_of_the_optimizer() -> None:
    error = refused([table("a", 4, "Adam"), table("b", 7, "RowWiseAdagrad")], gpus(1, 8))
    weights = dict(error.heaviest)
    assert weights["a"] == pytest.approx(12 * GIB, rel=1e-2)
    assert weights["b"] == pytest.approx(7 * GIB * (1 + 1 / 128), rel=1e-2)
    assert list(weights) == ["a", "b"]


BIG = [table("big", 20), *(table(f"t{n}", 2) for n in range(7))]
TENS = [table(f"t{n}", 10) for n in range(7)]
STRICT = {"wide": ParameterConstraints(sharding_types=["table_wise"]), "other": ParameterConstraints(not_on=[0])}
# tables, devices, what else is asked; the kind of a suggestion, its text, and what the request that it makes has
SUGGESTIONS: dict[str, tuple[list[Table], Topology, dict[str, Any], str, str, Callable[[Request], bool]]] = {
    "half the bytes of one table, where they are enough": (
        BIG, gpus(2, 16), {}, "dtype", "fp16 for 'big'",
        lambda r: [t.data_type for t in r.tables] == [DataType.FP16, *[DataType.FP32] * 7],
    ),
    "as few tables as possible, where one is not enough": (
        TENS[:4], gpus(1, 32), {}, "dtype", "fp16 for 't0', 't1'", lambda r: True,
    ),
    "more devices one by one": (
        TENS, gpus(4, 16), {}, "devices", "one more device (5 ranks instead of 4)",
        lambda r: r.topology.world_size == 5,
    ),
    "more devices by hosts": (
        TENS, gpus(4, 16, local=2), {}, "devices", "one more host (6 ranks instead of 4)",
        lambda r: (r.topology.world_size, r.topology.hosts) == (6, 3),
    ),
    "the next larger card that is enough": (
        [table("a", 50)], gpus(1, 32), {"batch_size": 8}, "card",
        "cards of 79 GiB (h100 or a100-80) instead of 32 GiB",
        lambda r: r.topology.hbm == [79 * GIB] and r.topology.card == "h100",
    ),
    "another optimizer for the table whose state is too much": (
        [table("a", 8, "Adam"), table("b", 1, "Adam")], gpus(1, 16), {}, "optimizer",
        "RowWiseAdagrad instead of Adam for 'a'",
        lambda r: [t.optimizer for t in r.tables] == ["RowWiseAdagrad", "Adam"],
    ),
    "less of a reservation": (
        [table("a", 27)], gpus(1, 24), {"reserved": (8 * GIB,)}, "reservation",
        "reserve 12.5 % of each device's memory instead of 25 %",
        lambda r: r.topology.hbm == [28 * GIB] and r.reserved == (4 * GIB,),
    ),
    "a laxer constraint": (
        [table("wide", 20), table("other", 2)], gpus(4, 16), {"constraints": STRICT}, "constraint",
        "allow column_wise for 'wide'",
        lambda r: r.constraints["wide"].sharding_types == ["table_wise", "column_wise"]
        and r.constraints["other"] == STRICT["other"],
    ),
    "tables that share a rank apart": (
        [table("a", 10), table("b", 10)], gpus(2, 16),
        {"constraints": dict.fromkeys("ab", ParameterConstraints(same_rank="g"))}, "constraint",
        "no same_rank for 'a'", lambda r: True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", SUGGESTIONS)
def test_what_would_be_enough_is_suggested(what: str) -> None:
    tables, topology, more, kind, text, asks = SUGGESTIONS[what]
    error = refused(tables, topology, **more)
    (suggestion, *others) = (suggestion for suggestion in error.suggestions if suggestion.kind == kind)
    assert suggestion.text == text and asks(suggestion.request)
    # as little as possible: one suggestion of its kind, of one element type
    assert kind != "dtype" or not others
    strict = "because of the strict constraints." if "constraints" in more else "because of insufficient storage."
    assert str(error).startswith(f"Unable to find a plan for this model {strict}")


def test_what_no_change_can_help_has_no_suggestion() -> None:
    # a table of an element type that is small already, alone on a rank of the largest card there is
    huge = replace(table("a", 4000), data_type=DataType.FP16)
    error = refused([huge], Topology(1, "cuda", 139 * GIB), {"a": ParameterConstraints(ranks=[0])})
    assert error.suggestions == ()
    assert "No single change" in str(error)


def test_the_error_is_plain_data_for_programs() -> None:
    error = refused([table("big", 30), table("small", 4)], gpus(2, 16))
    error_data = error.as_dict()
    assert error_data["error_type"] == "insufficient_storage"
    assert [entry["text"] for entry in error_data["suggestions"]] == [
        suggestion.text for suggestion in error.suggestions
    ]
    assert error_data["heaviest"][0] == {"table": "big", "bytes": error.heaviest[0][1]}
    assert error_data["overloads"][0]["over_bytes"] == error.overloads[0].over_bytes


def test_advice_is_the_same_each_time() -> None:
    tables = [table(f"t{n}", 3 + n % 4, "Adam") for n in range(12)]
    assert str(refused(tables, gpus(4, 16))) == str(refused(tables, gpus(4, 16)))


def test_memory_of_the_host_is_what_a_cpu_lacks() -> None:
    topology = Topology(2, "cpu", ddr_cap=4 * GIB)
    error = refused([table("a", 9)], topology)
    assert {overload.memory for overload in error.overloads} == {"DDR"}
    assert not any(suggestion.kind == "card" for suggestion in error.suggestions)
    assert np.isclose(dict(error.heaviest)["a"] / GIB, 9, rtol=1e-2)

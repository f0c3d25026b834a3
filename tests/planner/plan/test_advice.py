"""What is said when tables do not fit: the numbers are right, and every suggestion fits when it is followed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from shardwise.embeddings.config import DataType
from shardwise.planner.constraints import ParameterConstraints
from shardwise.planner.errors import PlannerErrorType
from shardwise.planner.plan.advice import NoRoomError, Suggestion
from shardwise.planner.plan.planning import plan_request, plan_tables
from shardwise.planner.search.problem import faults
from shardwise.planner.tables import Feature, Table
from shardwise.planner.topology import GIB, Topology


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
    for one in error.suggestions:
        made = plan_request(one.request)
        assert faults(made.problem, made.solution.assignment) == [], one.text
    return error


def of_kind(error: NoRoomError, kind: str) -> Suggestion:
    return next(one for one in error.suggestions if one.kind == kind)


def gpus(count: int, gib: float, local: int | None = None) -> Topology:
    return Topology(count, "cuda", int(gib * GIB), local_world_size=local)


def test_the_error_says_where_by_how_much_and_what_weighs_most() -> None:
    error = refused([table("big", 30), table("small", 4), table("tiny", 1)], gpus(2, 16))
    assert error.error_type == PlannerErrorType.INSUFFICIENT_STORAGE
    assert str(error).startswith("Unable to find a plan for this model because of insufficient storage.")
    assert [path for path, _ in error.heaviest] == ["big", "small", "tiny"]
    assert error.heaviest[0][1] == pytest.approx(30 * GIB, rel=1e-3)
    # 35 GiB have 32: the nearest plan lacks at least the difference, and every rank's numbers add up
    assert sum(one.over_bytes for one in error.overloads) >= 3 * GIB
    for one in error.overloads:
        assert one.limit_bytes == 16 * GIB and one.used_bytes == one.limit_bytes + one.over_bytes
    worst = error.overloads[0]
    assert f"{worst.over_bytes / GIB:.4g} GiB over on rank {worst.rank}" in str(error)
    assert "'big' 30" in str(error) and "2 ranks together have 32 GiB" in str(error)


def test_weights_count_the_state_of_the_optimizer() -> None:
    error = refused([table("a", 4, "Adam"), table("b", 7, "RowWiseAdagrad")], gpus(1, 8))
    weights = dict(error.heaviest)
    assert weights["a"] == pytest.approx(12 * GIB, rel=1e-2)
    assert weights["b"] == pytest.approx(7 * GIB * (1 + 1 / 128), rel=1e-2)
    assert list(weights) == ["a", "b"]


def test_half_the_bytes_of_one_table_are_suggested_where_they_are_enough() -> None:
    error = refused([table("big", 20), *(table(f"t{n}", 2) for n in range(7))], gpus(2, 16))
    one = of_kind(error, "dtype")
    assert one.text == "fp16 for 'big'"
    assert [other.kind for other in error.suggestions].count("dtype") == 1
    kinds = {made.name: made.data_type for made in one.request.tables}
    assert kinds.pop("big") == DataType.FP16 and set(kinds.values()) == {DataType.FP32}


def test_where_one_table_is_not_enough_as_few_as_possible_are_suggested() -> None:
    error = refused([table(f"t{n}", 10) for n in range(4)], gpus(1, 32))
    assert of_kind(error, "dtype").text == "fp16 for 't0', 't1'"


def test_more_devices_are_suggested_one_by_one_and_by_hosts() -> None:
    tables = [table(f"t{n}", 10) for n in range(7)]
    assert of_kind(refused(tables, gpus(4, 16)), "devices").text == "one more device (5 ranks instead of 4)"
    more = of_kind(refused(tables, gpus(4, 16, local=2)), "devices")
    assert more.text == "one more host (6 ranks instead of 4)"
    assert (more.request.topology.world_size, more.request.topology.hosts) == (6, 3)


def test_the_next_larger_card_that_is_enough_is_suggested() -> None:
    error = refused([table("a", 50)], gpus(1, 32), batch_size=8)
    one = of_kind(error, "card")
    assert one.text == "cards of 79 GiB (h100 or a100-80) instead of 32 GiB"
    assert one.request.topology.hbm == [79 * GIB] and one.request.topology.card == "h100"


def test_another_optimizer_is_suggested_for_the_table_whose_state_is_too_much() -> None:
    error = refused([table("a", 8, "Adam"), table("b", 1, "Adam")], gpus(1, 16))
    one = of_kind(error, "optimizer")
    assert one.text == "RowWiseAdagrad instead of Adam for 'a'"
    assert [made.optimizer for made in one.request.tables] == ["RowWiseAdagrad", "Adam"]


def test_less_of_a_reservation_is_suggested() -> None:
    kept = 8 * GIB
    error = refused([table("a", 27)], gpus(1, 24), reserved=(kept,))
    one = of_kind(error, "reservation")
    assert one.text.startswith("reserve 12.5 % of each device's memory instead of 25 %")
    assert one.request.topology.hbm == [28 * GIB] and one.request.reserved == (4 * GIB,)


def test_a_laxer_constraint_is_suggested_and_the_constraints_are_blamed() -> None:
    rules = {"wide": ParameterConstraints(sharding_types=["table_wise"]), "other": ParameterConstraints(not_on=[0])}
    error = refused([table("wide", 20), table("other", 2)], gpus(4, 16), rules)
    assert error.error_type == PlannerErrorType.STRICT_CONSTRAINTS
    assert str(error).startswith("Unable to find a plan for this model because of the strict constraints.")
    one = of_kind(error, "constraint")
    assert one.text == "allow column_wise for 'wide'"
    assert one.request.constraints["wide"].sharding_types == ["table_wise", "column_wise"]
    assert one.request.constraints["other"] == rules["other"]


def test_tables_that_share_a_rank_are_told_apart() -> None:
    together = {name: ParameterConstraints(same_rank="g") for name in ("a", "b")}
    error = refused([table("a", 10), table("b", 10)], gpus(2, 16), together)
    assert of_kind(error, "constraint").text == "no same_rank for 'a'"


def test_what_no_change_can_help_has_no_suggestion() -> None:
    # a table of an element type that is small already, alone on a rank of the largest card there is
    huge = replace(table("a", 4000), data_type=DataType.FP16)
    error = refused([huge], Topology(1, "cuda", 139 * GIB), {"a": ParameterConstraints(ranks=[0])})
    assert error.suggestions == ()
    assert "No single change" in str(error)


def test_the_error_is_plain_data_for_programs() -> None:
    error = refused([table("big", 30), table("small", 4)], gpus(2, 16))
    said = error.as_dict()
    assert said["error_type"] == "insufficient_storage"
    assert [one["text"] for one in said["suggestions"]] == [one.text for one in error.suggestions]
    assert said["heaviest"][0] == {"table": "big", "bytes": error.heaviest[0][1]}
    assert said["overloads"][0]["over_bytes"] == error.overloads[0].over_bytes


def test_advice_is_the_same_each_time() -> None:
    tables = [table(f"t{n}", 3 + n % 4, "Adam") for n in range(12)]
    texts = {str(refused(tables, gpus(4, 16))) for _ in range(2)}
    assert len(texts) == 1


def test_memory_of_the_host_is_what_a_cpu_lacks() -> None:
    topology = Topology(2, "cpu", ddr_cap=4 * GIB)
    error = refused([table("a", 9)], topology)
    assert {one.memory for one in error.overloads} == {"DDR"}
    assert not any(one.kind == "card" for one in error.suggestions)
    assert np.isclose(dict(error.heaviest)["a"] / GIB, 9, rtol=1e-2)

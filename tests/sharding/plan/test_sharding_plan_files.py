"""Plans as files: what is written is read again, what does not hold together is refused with the table and the file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from torch import nn

from shardwise import (
    BoundsCheckMode,
    DataType,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingModuleShardingPlan,
    ShardingEnv,
    ShardingPlan,
    construct_module_sharding_plan,
    get_default_sharders,
)
from shardwise.planner.cost.shardwise import ShardwiseCost
from shardwise.planner.plan.plan_files import load_planned, save_planned
from shardwise.planner.plan.planning import plan_tables
from shardwise.planner.tables import Feature, Table
from shardwise.planner.topology import Topology
from shardwise.sharding import (
    CacheParams,
    column_wise,
    data_parallel,
    grid_shard,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)
from shardwise.sharding.planning.planners import EmbeddingShardingPlanner

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
    made = construct_module_sharding_plan(tables(), GENERATORS, local_size=2, world_size=4, device_type="cpu")
    return ShardingPlan({"": made})


def test_every_strategy_comes_back_as_it_was(tmp_path: Path) -> None:
    plan = every_strategy()
    one = plan.plan[""]["whole"]
    one.enforce_hbm, one.stochastic_rounding = True, True
    one.output_dtype, one.bounds_check_mode = DataType.FP16, BoundsCheckMode.WARNING
    plan.save(tmp_path / "plan.json", world_size=4, local_world_size=2)
    found = ShardingPlan.load(tmp_path / "plan.json")
    assert found == plan and str(found) == str(plan)
    assert (found.world_size, found.local_world_size) == (4, 2)
    found.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "plan.json").read_text()


def test_what_a_file_cannot_have_is_named(tmp_path: Path) -> None:
    plan = every_strategy()
    plan.plan[""]["whole"].cache_params = CacheParams(load_factor=0.2)
    with pytest.warns(UserWarning, match="table 'whole'.*cache_params"):
        plan.save(tmp_path / "plan.json", world_size=4)
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
    planned = plan_tables(tables, machines, 64, cost=ShardwiseCost(machines, 64))
    save_planned(planned, tmp_path / "plan.json")
    plan = ShardingPlan.load(tmp_path / "plan.json")
    assert plan.world_size == 4 and set(plan.plan["ebc"]) == {table.name for table in tables}
    for table, choice, starts in planned.placed():
        one = plan.plan["ebc"][table.name]
        shards = planned.shards(table, choice, starts)
        assert (one.sharding_type, one.ranks) == (choice.sharding_type, [shard.rank for shard in shards])


def test_shardwise_plan_reads_what_training_saved(tmp_path: Path) -> None:
    model = nn.Sequential(EmbeddingBagCollection([EmbeddingBagConfig(500, 64, "t", feature_names=["f"])]))
    planner = EmbeddingShardingPlanner(Topology(2, "cpu"), batch_size=64)
    plan = planner.plan(model, get_default_sharders())
    plan.save(tmp_path / "plan.json")
    found = ShardingPlan.load(tmp_path / "plan.json")
    assert found == plan and str(found) == str(plan) and "slowest rank" in str(found)
    assert planner.last_plan is not None
    again = load_planned(tmp_path / "plan.json")
    for (_, choice, starts), (_, wanted, where) in zip(again.placed(), planner.last_plan.placed(), strict=True):
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

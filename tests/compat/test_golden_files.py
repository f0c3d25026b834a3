"""Files of every release are read by this version: into the plan that wrote them, another, and one process; same bits.

`write_golden.py` wrote them; what is expected was put together from the files by json and safetensors, without us.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import golden_nets
import pytest
import torch
from ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor
from write_golden import GOLDEN, MOST_BYTES, TRACE_IDS, assembled, served_batch, step_of

from shardwise import checkpoint
from shardwise.checkpoint import CheckpointDamaged
from shardwise.data import Trace
from shardwise.inference import ModelDamaged, load_program, read_tables
from shardwise.inference.folder import CHECKSUM, facts_checksum
from shardwise.kernels import _op, configs
from shardwise.planner.constants_measured import CARDS, Constants
from shardwise.planner.plan.plan_files import load_planned
from shardwise.sharding.plan.plan import load_plan

FOLDERS = sorted(GOLDEN.glob("*.*.*"))
every_release = pytest.mark.parametrize("golden", FOLDERS, ids=lambda folder: folder.name)


def expected(golden: Path, what: str) -> dict[str, Tensor]:
    values = load_file(golden / "expected.safetensors")
    return {key.removeprefix(f"{what}/"): value for key, value in values.items() if key.startswith(f"{what}/")}


def differing(wanted: dict[str, Tensor], found: dict[str, Tensor]) -> list[str]:
    """Names that only one has, or whose bits differ."""
    return sorted(
        name
        for name in wanted.keys() | found.keys()
        if name not in wanted
        or name not in found
        or wanted[name].dtype != found[name].dtype
        or not torch.equal(wanted[name], found[name])
    )


@pytest.fixture(autouse=True)
def _no_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is read of a file is the same with and without loops, which take half a minute of a core to compile."""
    monkeypatch.setattr(_op, "NUMBA", False)


def load_and_save(golden: str, plan: str, folder: str) -> None:
    """On each rank: a model that learned something else takes the checkpoint, and is saved anew."""
    with patch.object(_op, "NUMBA", False):
        model, optimizer = golden_nets.net(plan)
        golden_nets.train(model, optimizer, range(7, 9))
        loaded = checkpoint.load(step_of(Path(golden) / "ranks"), model, optimizer)
        assert loaded.extra == {"epoch": 1} and loaded.step == 3
        checkpoint.save(folder, model, optimizer, step=3).wait()


def test_there_is_a_release_to_read() -> None:
    assert FOLDERS
    for folder in FOLDERS:
        assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < MOST_BYTES


@every_release
@pytest.mark.ranks
@pytest.mark.parametrize("plan", ["mixed", "rows"])
def test_a_checkpoint_of_two_ranks_loads_into_two(golden: Path, plan: str, tmp_path: Path) -> None:
    run_ranks(2, load_and_save, str(golden), plan, str(tmp_path))
    assert differing(expected(golden, "ranks"), assembled(step_of(tmp_path))) == []


@every_release
def test_a_checkpoint_of_two_ranks_loads_into_one_process(golden: Path, tmp_path: Path) -> None:
    wanted = expected(golden, "ranks")
    load_and_save(str(golden), "alone", str(tmp_path))
    assert differing(wanted, assembled(step_of(tmp_path))) == []
    # its lookups are sums of two rows of what is expected
    module, features = golden_nets.GoldenNet(), golden_nets.batch(5)
    whole = checkpoint.full_state_dict(step_of(golden / "ranks"))
    module.load_state_dict(whole)
    for name in ("adagrad", "adam"):
        pooled = getattr(module, name)(features)
        for key in pooled.keys():  # noqa: SIM118
            rows = wanted[f"table/{name}.embedding_bags.{key}.weight/weight"][features[key].values()].float()
            assert torch.equal(pooled[key].float(), (rows[::2] + rows[1::2]).to(pooled[key].dtype).float())


@every_release
def test_maps_of_managed_collision_are_as_they_were(golden: Path, tmp_path: Path) -> None:
    model = golden_nets.collisions()
    checkpoint.load(step_of(golden / "collisions"), model)
    checkpoint.save(tmp_path, model, step=4).wait()
    assert differing(expected(golden, "collisions"), assembled(step_of(tmp_path))) == []


@every_release
def test_an_exported_model_gives_what_it_gave(golden: Path) -> None:
    wanted = expected(golden, "served")
    assert len(wanted) == 3 and differing(wanted, load_program(golden / "served")(*served_batch())) == []
    assert {*read_tables(golden / "served")} == {"q8", "q4", "q16"}


@every_release
def test_plans_traces_constants_and_tuned_configs_are_read(golden: Path) -> None:
    document: Any = json.loads((golden / "plan.json").read_text())
    placed = {table.name: choice.sharding_type for table, choice, _ in load_planned(golden / "plan.json").placed()}
    assert placed == {name: entry["sharding_type"] for name, entry in document["plan"][""].items()}
    assert load_plan(golden / "plan.json").plan[""].keys() == placed.keys()
    assert [batch.rows["t"].tolist() for batch in Trace(golden / "trace.npz")] == [sorted({*ids}) for ids in TRACE_IDS]
    assert Constants.load(golden / "constants.json") == CARDS["h100"].constants
    tuned = configs.read(golden / "tuned.json")
    assert [*tuned.entries.values()] == [{"rows": 4, "columns": 64, "warps": 2}] and tuned.device == "NVIDIA H100"


def copied(golden: Path, name: str, folder: Path, change: Any) -> Path:
    """A JSON file of the golden ones, changed."""
    content = json.loads((golden / name).read_text())
    change(content)
    path = folder / Path(name).name
    path.write_text(json.dumps(content))
    return path


def test_a_file_of_a_later_version_is_refused_by_name(tmp_path: Path) -> None:
    golden, later = FOLDERS[-1], {"format": 99, "tables": {}}
    (tmp_path / "manifest.json").write_text(json.dumps(later))
    with pytest.raises(CheckpointDamaged, match=r"format 99, this version reads formats 1 and 2"):
        checkpoint.read_manifest(tmp_path)

    def newer(content: Any) -> None:
        content["format_version"] = 99
        content[CHECKSUM] = facts_checksum(content)

    copied(golden, "served/model.json", tmp_path, newer)
    with pytest.raises(ModelDamaged, match="has format version 99, this shardwise reads up to 1"):
        load_program(tmp_path)
    plan = copied(golden, "plan.json", tmp_path, lambda content: content.update(version=99))
    for load in (load_planned, load_plan):
        with pytest.raises(ValueError, match=r"version 99 of the format; this version.* reads 1"):
            load(plan)
    tuned = copied(golden, "tuned.json", tmp_path, lambda content: content.update(shardwise_tuned=99))
    with pytest.raises(ValueError, match="no file of tuned configs of format 1"):
        configs.read(tuned)

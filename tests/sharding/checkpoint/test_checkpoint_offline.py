"""Checkpoints without a model: cut anew, side by side, as a plain file, and by `shardwise ckpt`."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_nets import EXTRA, A, B, Net, loaded, net, saved, train, trained
from ranks import run_ranks
from safetensors.torch import load_file

from shardwise import cli
from shardwise.checkpoint import (
    CheckpointDamaged,
    Values,
    diff,
    export,
    full_state_dict,
    load,
    read_manifest,
    reshard,
    save,
    verify,
)
from shardwise.planner.layout import Shard
from shardwise.sharding.checkpoint.difference import Difference


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-2] ^= 4
    file.write_bytes(bytes(data))


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "rowwise_adagrad"])
@pytest.mark.parametrize(
    "world, plan",
    [(1, "row_wise"), (2, "table_wise"), (3, "row_wise"), (4, "row_wise"), (2, "data_parallel"), (4, None)],
)
def test_only_the_plan_changes(optimizer: str, world: int, plan: str | None, tmp_path: Path) -> None:
    source = saved(tmp_path / "a", optimizer)
    resharded = reshard(source, tmp_path / "b", world_size=world, plan=plan)
    assert resharded == tmp_path / "b" / source.name
    assert verify(resharded) == []
    assert diff(source, resharded).same_content
    assert read_manifest(resharded).world_size == world


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_columns_are_cut_where_states_are_of_elements(optimizer: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "a", optimizer)
    resharded = reshard(source, tmp_path / "b", world_size=4, plan="column_wise")
    assert [shard.cols for shard in read_manifest(resharded).tables[A].shards] == [(0, 2), (2, 4), (4, 6), (6, 8)]
    assert diff(source, resharded).same_content
    back = reshard(resharded, tmp_path / "c", world_size=1, plan="table_wise")
    assert not diff(source, back)


def test_numbers_per_row_of_column_blocks_are_not_split_silently(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", "rowwise_adagrad", "columns")
    with pytest.raises(ValueError, match=rf"{A}: momentum1 is a number a row of each of the column blocks"):
        reshard(source, tmp_path / "b", plan="table_wise")
    assert not list((tmp_path / "b").glob("step-*"))
    with pytest.raises(ValueError, match="resplit must be 'mean' or None, got 'sum'"):
        reshard(source, tmp_path / "b", plan="table_wise", resplit="sum")


def test_a_mean_over_columns_is_what_a_load_makes_of_them(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", "rowwise_adagrad", "columns")
    resharded = reshard(source, tmp_path / "b", plan="table_wise", resplit="mean")
    whole, optimizers = net("rowwise_adagrad", "first")
    load(source, whole, optimizers, resplit="mean")
    wanted = save(tmp_path / "c", whole, optimizers, step=5, extra=EXTRA).path
    assert diff(resharded, wanted).same_content


def test_blocks_that_stay_keep_their_numbers_under_other_rows(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", "rowwise_adagrad", "columns")
    cut = [Shard("a", rank, rows, cols) for rank, (rows, cols) in enumerate(
        (((0, 4), (0, 4)), ((4, 9), (0, 4)), ((0, 7), (4, 8)), ((7, 9), (4, 8)))
    )]  # fmt: skip
    resharded = reshard(source, tmp_path / "b", world_size=4, plan={A: cut})
    assert diff(source, resharded).same_content
    assert list(read_manifest(resharded).tables[A].shards) == cut


def test_a_plan_of_whole_tables_gives_each_to_the_rank_that_has_least(tmp_path: Path) -> None:
    resharded = reshard(saved(tmp_path / "a", "sgd"), tmp_path / "b", plan="table_wise", world_size=2)
    tables = read_manifest(resharded).tables
    assert sorted(shard.rank for name in (A, B) for shard in tables[name].shards) == [0, 1]


def test_tables_that_the_plan_leaves_out_keep_their_cut(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", "adam")
    resharded = reshard(source, tmp_path / "b", plan={B: "row_wise"}, world_size=2)
    tables = read_manifest(resharded).tables
    assert [shard.rows for shard in tables[A].shards] == [(0, 9)]
    assert [shard.rows for shard in tables[B].shards] == [(0, 3), (3, 6)]


def test_a_plan_object_places_tables(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", "adam")
    model, _ = net("adam", "columns")
    resharded = reshard(source, tmp_path / "b", plan=model.plan)
    assert [shard.cols for shard in read_manifest(resharded).tables[A].shards] == [(0, 4), (4, 8)]
    assert diff(source, resharded).same_content


@pytest.mark.parametrize(
    "world, plan, message",
    [
        (0, None, "world_size must be at least 1, got 0"),
        (2, "diagonal", r"strategies \['diagonal'\] are none of"),
        (2, {"c": "row_wise"}, r"the plan places \['c'\], the checkpoint has"),
        (3, "column_wise", "table 'a': 8 columns do not divide by 3"),
        (1, {A: [Shard("a", 0, (0, 8), (0, 8))]}, "shards hold 64 of 72 cells"),
        (1, {A: [Shard("a", 1, (0, 9), (0, 8))]}, "rank 1 is not one of 1"),
    ],
)
def test_plans_that_do_not_fit_are_refused(world: int, plan: object, message: str, tmp_path: Path) -> None:
    source = saved(tmp_path / "a", "adam")
    with pytest.raises(ValueError, match=message):
        reshard(source, tmp_path / "b", world_size=world, plan=plan)  # type: ignore[arg-type]
    assert not (tmp_path / "b").exists()


def test_neither_itself_nor_damage_is_written_under_a_fresh_checksum(tmp_path: Path) -> None:
    source = saved(tmp_path / "a", "adam")
    with pytest.raises(ValueError, match="has the checkpoint itself: give another folder"):
        reshard(source, tmp_path / "a", plan="row_wise")
    flip(source / "rank-00000.safetensors")
    with pytest.raises(CheckpointDamaged, match="rank-00000.safetensors has other bytes than were saved"):
        reshard(source, tmp_path / "b", world_size=2)
    assert not (tmp_path / "b").exists()


def test_the_newest_of_a_folder_is_taken(tmp_path: Path) -> None:
    for step in (5, 12):
        saved(tmp_path / "a", "sgd", step=step)
    assert reshard(tmp_path / "a", tmp_path / "b").name == "step-000000000012"
    with pytest.raises(FileNotFoundError, match="is no checkpoint, and no folder that has a good one"):
        reshard(tmp_path, tmp_path / "b")


def test_blocks_are_read_and_written_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table is never in memory as a whole: with blocks of 64 bytes each piece comes in many."""
    from shardwise.sharding.checkpoint import files
    from shardwise.sharding.checkpoint.offline import Source

    source = saved(tmp_path / "a", "adam", "columns")
    monkeypatch.setattr(files, "BLOCK_BYTES", 64)
    with Source(source) as opened:
        piece = opened.manifest.by_address["table", A, "weight"][0]
        blocks = list(opened.blocks(piece))
    assert [len(block) for block in blocks] == [4, 4, 1]
    assert torch.cat(blocks).shape == (9, 4)
    assert diff(source, reshard(source, tmp_path / "b", world_size=3, plan="row_wise")).same_content


def save_on_ranks(folder: str, optimizer: str, plan: str) -> list[float]:
    model, optimizers = trained(optimizer, plan)
    save(folder, model, optimizers, step=2)
    return train(model, optimizers, range(2, 5))


def load_on_ranks(path: str, optimizer: str, plan: str) -> list[float]:
    return train(*loaded(path, optimizer, plan), range(2, 5))


@pytest.mark.ranks
@pytest.mark.parametrize("optimizer, plan", [("rowwise_adagrad", "columns"), ("adam", "rows")])
def test_training_goes_on_from_a_checkpoint_cut_anew(optimizer: str, plan: str, tmp_path: Path) -> None:
    wanted = run_ranks(2, save_on_ranks, str(tmp_path / "a"), optimizer, plan)
    resharded = reshard(tmp_path / "a", tmp_path / "b", world_size=3, plan=None)
    assert diff(tmp_path / "a", resharded).same_content
    for losses in run_ranks(2, load_on_ranks, str(resharded), optimizer, plan):
        assert losses == wanted[0]


def test_the_same_training_makes_no_difference_and_another_plan_none_in_content(tmp_path: Path) -> None:
    first, second = (diff(saved(tmp_path / "a"), saved(tmp_path / plan, plan=plan)) for plan in ("first", "columns"))
    assert not first and first.same_content
    assert first.lines() == []
    assert first == Difference()
    assert second and second.same_content
    assert second.plans == {
        A: (
            "rank 0: rows [0, 9] columns [0, 8]",
            "rank 0: rows [0, 9] columns [0, 4], rank 0: rows [0, 9] columns [4, 8]",
        )
    }


def test_changed_elements_are_counted_and_measured(tmp_path: Path) -> None:
    model, optimizers = trained("adam")
    a = save(tmp_path / "a", model, optimizers, step=5).path
    with torch.no_grad():
        model.module.ebc.state_dict()["embedding_bags.a.weight"][3:5, 2] += torch.tensor([0.5, -2.0])
    for group in model.fused_optimizer.param_groups:
        group["lr"] = 0.25
    difference = diff(a, save(tmp_path / "b", model, optimizers, step=6, extra={"epoch": 1}).path)
    assert set(difference.values) == {A}
    assert difference.values[A].different == 2 and difference.values[A].elements == 72
    assert difference.values[A].largest == pytest.approx(2.0, abs=1e-6)
    assert difference.facts["step"] == (5, 6)
    assert difference.facts["extra: epoch"] == (None, 1)
    assert [group["lr"] for group in difference.facts[f"{A}: fused param_group"]] == [0.1, 0.25]
    assert not difference.same_content
    assert f"values: {A} differs in 2 of 72 elements, by up to 2" in difference.lines()


def test_nan_equals_nan_and_no_number(tmp_path: Path) -> None:
    model, optimizers = net("sgd")
    table = model.module.over.weight
    with torch.no_grad():
        table[0, 3] = math.nan
    a = save(tmp_path / "a", model, optimizers, step=5).path
    assert not diff(a, save(tmp_path / "b", model, optimizers, step=5).path)
    with torch.no_grad():
        table[0, 4] = math.nan
    difference = diff(a, save(tmp_path / "c", model, optimizers, step=5).path)
    values = difference.values["over.weight"]
    assert (values.different, values.elements) == (1, 16) and math.isnan(values.largest)
    assert json.loads(json.dumps(difference.as_json(), allow_nan=False))["values"]["over.weight"]["largest"] is None


def test_other_tables_states_shapes_and_dtypes_are_named(tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a", "adam"), saved(tmp_path / "b", "rowwise_adagrad")
    difference = diff(a, b)
    assert difference.only_a == [f"{A}: momentum2", f"{B}: momentum2"] and difference.only_b == []
    assert difference.shapes[f"{A}: momentum1"] == ([9, 8], [9])
    assert difference.facts[f"{A}: rule"] == ("adam", "rowwise_adagrad")
    small = torch.nn.Linear(16, 1, dtype=torch.bfloat16)
    large = torch.nn.Linear(16, 2)
    c, d = (save(tmp_path / name, module, step=5).path for name, module in (("c", small), ("d", large)))
    difference = diff(c, d)
    assert difference.shapes == {"weight": ([1, 16], [2, 16]), "bias": ([1], [2])}
    assert difference.dtypes == {"weight": ("bfloat16", "float32"), "bias": ("bfloat16", "float32")}


def test_numbers_per_row_of_other_column_blocks_differ_in_shape(tmp_path: Path) -> None:
    a, b = saved(tmp_path / "a", "rowwise_adagrad"), saved(tmp_path / "b", "rowwise_adagrad", "columns")
    assert diff(a, b).shapes == {f"{A}: momentum1": ([9], [9, 2])}


def test_whole_numbers_and_truth_are_compared_too(tmp_path: Path) -> None:
    def module(count: int, on: bool) -> torch.nn.Module:
        container = torch.nn.Module()
        container.register_buffer("count", torch.tensor([2**62 + count, 3]))
        container.register_buffer("on", torch.tensor(on))
        return container

    a, b = (save(tmp_path / name, module(n, bool(n)), step=5).path for n, name in enumerate("ab"))
    difference = diff(a, b)
    # float64 has no numbers between these two
    assert difference.values["count"] == Values(1, 2, 1.0)
    assert difference.values["on"] == Values(1, 1, 1.0)


@pytest.mark.parametrize("plan", ["first", "columns"])
def test_an_exported_file_loads_into_the_unsharded_model(plan: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "a", plan=plan)
    whole = load_file(export(path, tmp_path / "model.safetensors"))
    wanted = full_state_dict(path)
    assert set(whole) == set(wanted) and all(torch.equal(whole[name], wanted[name]) for name in wanted)
    plain = Net("adam")
    plain.load_state_dict(whole)
    bag = torch.nn.EmbeddingBag.from_pretrained(whole[A])
    assert torch.equal(bag.weight, plain.ebc.state_dict()["embedding_bags.a.weight"])


def test_states_are_exported_on_request(tmp_path: Path) -> None:
    path = saved(tmp_path / "a", "rowwise_adagrad", "columns")
    whole = load_file(export(path, tmp_path / "all.safetensors", states=True))
    sums = {name: tensor.shape for name, tensor in whole.items() if "momentum1" in name}
    assert sums == {f"{A}/momentum1/0:4": (9,), f"{A}/momentum1/4:8": (9,), f"{B}/momentum1": (6,)}
    assert whole["over.weight/exp_avg"].shape == (1, 16)
    assert float(whole["over.weight/step"]) == 2


def test_a_parameter_of_two_names_is_exported_under_both(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"one": torch.nn.Linear(3, 3), "two": torch.nn.Linear(3, 3)})
    model["two"].weight = model["one"].weight
    whole = load_file(export(save(tmp_path / "a", model, step=1).path, tmp_path / "model.safetensors"))
    assert torch.equal(whole["one.weight"], whole["two.weight"])
    model.load_state_dict(whole)


def test_a_file_is_replaced_at_once_or_not_at_all(tmp_path: Path) -> None:
    path, target = saved(tmp_path / "a"), tmp_path / "model.safetensors"
    target.write_text("before")
    with open(path / "rank-00000.safetensors", "r+b") as file:
        file.truncate(100)
    with pytest.raises(CheckpointDamaged, match="rank-00000.safetensors has 100 bytes"):
        export(path, target)
    assert target.read_text() == "before"
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a", "model.safetensors"]


def run(*arguments: str | Path) -> Any:
    testing = pytest.importorskip("click.testing")
    pytest.importorskip("rich")
    return testing.CliRunner().invoke(cli.commands(), ["ckpt", *map(str, arguments)])


def json_of(*arguments: str | Path) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two steps of one training."""
    model, optimizers = net("rowwise_adagrad", "columns")
    for step in (5, 12):
        train(model, optimizers, range(step, step + 2))
        save(tmp_path / "run", model, optimizers, step=step, extra={"epoch": step})
    return tmp_path / "run"


def test_show_prints_a_line_for_each_table(folder: Path) -> None:
    result = run("show", folder / "step-000000000005")
    assert result.exit_code == 0, result.output
    assert "step 5 of 1 ranks" in result.stdout
    line = next(line for line in result.stdout.splitlines() if A in line)
    assert line.split()[1:3] == ["9", "8"]
    assert "rowwise_adagrad" in line and "momentum1" in line and "1 x 2 on rank 0" in line
    assert "2 dense tensors, 17 elements" in result.stdout
    assert "extra: epoch" in result.stdout


def test_of_a_folder_the_newest_good_one_is_taken_and_named(folder: Path) -> None:
    result = run("show", folder)
    assert "step 12 of 1 ranks" in result.stdout
    assert result.stderr == f"step-000000000012 is the newest good checkpoint of {folder}\n"
    (folder / "step-000000000012" / "manifest.json").unlink()
    assert "step 5 of 1 ranks" in run("show", folder).stdout


def test_show_as_json_has_the_manifest(folder: Path) -> None:
    shown = json_of("show", folder)
    manifest = read_manifest(folder / "step-000000000012")
    assert (shown["step"], shown["world_size"], shown["extra"]) == (12, 1, {"epoch": 12})
    assert shown["versions"] == dict(manifest.versions)
    assert shown["tables"][A] == {
        "rows": 9, "dim": 8, "dtype": "float32", "optimizer": "rowwise_adagrad", "updates": 4, "states": ["momentum1"],
        "bytes": 4 * (9 * 8 + 2 * 9),
        "shards": [
            {"rank": 0, "rows": [0, 9], "columns": [0, 4], "replica": False},
            {"rank": 0, "rows": [0, 9], "columns": [4, 8], "replica": False},
        ],
    }  # fmt: skip
    assert shown["dense"]["over.weight"] == {"shape": [1, 16], "dtype": "float32"}
    assert shown["files"] == {file.name: file.bytes for file in manifest.files}


def test_verify_reads_every_step_and_names_what_is_wrong(folder: Path) -> None:
    result = run("verify", folder)
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [f"{folder}/step-{n:012d}: good" for n in (5, 12)]
    bad = folder / "step-000000000012" / "rank-00000.safetensors"
    flip(bad)
    result = run("verify", folder)
    assert result.exit_code == 1
    assert [line.split(" has ")[0] for line in result.stdout.splitlines()] == [
        f"{folder}/step-000000000005: good", str(bad),
    ]  # fmt: skip
    report = json_of("verify", folder)
    assert [entry["good"] for entry in report.values()] == [True, False]
    assert run("verify", folder / "step-000000000005").exit_code == 0


def test_diff_ends_with_status_1_where_there_is_a_difference(folder: Path) -> None:
    a, b = folder / "step-000000000005", folder / "step-000000000012"
    same, other = run("diff", a, a), run("diff", a, b)
    assert (same.exit_code, same.stdout) == (0, "no difference\n")
    assert other.exit_code == 1
    assert other.stdout.splitlines() == diff(a, b).lines()
    difference = json_of("diff", a, b)
    assert difference["same"] is False and difference["facts"]["step"] == [5, 12]
    assert difference["values"][A]["elements"] == 72


def test_reshard_prints_where_it_is_and_any_plan_passes_over_it(folder: Path, tmp_path: Path) -> None:
    a = folder / "step-000000000005"
    refused = run("reshard", a, tmp_path / "cut", "--world-size", "3", "--plan", "row_wise")
    assert refused.exit_code == 2 and refused.stderr.startswith(f"Error: {A}: momentum1 is a number a row of each")
    result = run("reshard", a, tmp_path / "cut", "--world-size", "3")
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path}/cut/step-000000000005\n")
    resharded = Path(result.stdout.strip())
    assert read_manifest(resharded).world_size == 3
    assert run("diff", a, resharded).exit_code == 1
    passed = run("diff", a, resharded, "--any-plan")
    assert passed.exit_code == 0 and passed.stdout.endswith("a model loads the same from both\n")
    mean = json_of("reshard", a, tmp_path / "mean", "--plan", "row_wise", "--resplit", "mean")
    assert read_manifest(mean["path"]).tables[A].shards[0].cols == (0, 8)


def test_export_writes_a_file(folder: Path, tmp_path: Path) -> None:
    result = run("export", folder, tmp_path / "model.safetensors", "--states")
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path}/model.safetensors\n")
    whole, wanted = load_file(tmp_path / "model.safetensors"), full_state_dict(folder / "step-000000000012")
    assert set(wanted) < set(whole)
    assert json_of("export", folder, tmp_path / "b")["path"] == str(tmp_path / "b")


@pytest.mark.parametrize("command", ["show", "verify", "diff", "reshard", "export"])
def test_what_is_no_checkpoint_is_one_line_and_status_2(command: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    more = {"diff": [tmp_path / "empty"], "reshard": [tmp_path / "b"], "export": [tmp_path / "b"]}.get(command, [])
    result = run(command, tmp_path / "empty", *more)
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"Error: {tmp_path}/empty is no checkpoint, and no folder that has")


def test_a_manifest_that_is_none_is_one_line(folder: Path) -> None:
    (folder / "step-000000000012" / "manifest.json").write_text("[1, 2")
    result = run("show", folder / "step-000000000012")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1 and "manifest.json: JSONDecodeError" in result.stderr


def test_the_module_runs_it(folder: Path) -> None:
    command = [sys.executable, "-m", "shardwise", "ckpt", "show", str(folder), "--json"]
    process = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(process.stdout)["step"] == 12

"""`shardwise ckpt`: what it prints, as text and as JSON, and how it ends."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("click")
pytest.importorskip("rich")

from checkpoint_nets import net, train
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from shardwise import cli
from shardwise.checkpoint import diff, full_state_dict, read_manifest, save

A, B = "ebc.embedding_bags.a.weight", "ebc.embedding_bags.b.weight"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.commands(), ["ckpt", *map(str, arguments)])


def json_of(*arguments: str | Path) -> Any:
    return json.loads(run(*arguments, "--json").stdout)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two steps of one training."""
    model, every = net("rowwise_adagrad", "columns")
    for step in (5, 12):
        train(model, every, range(step, step + 2))
        save(tmp_path / "run", model, every, step=step, extra={"epoch": step})
    return tmp_path / "run"


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-2] ^= 4
    file.write_bytes(bytes(data))


def test_show_prints_a_line_for_each_table(folder: Path) -> None:
    result = run("show", folder / "step-000000000005")
    assert result.exit_code == 0, result.output
    assert "step 5 of 1 ranks" in result.stdout
    line = next(line for line in result.stdout.splitlines() if A in line)
    assert "9 x 8" in line and "rowwise_adagrad" in line and "momentum1" in line and "1 x 2 on rank 0" in line
    assert "2 dense tensors, 17 elements" in result.stdout
    assert "extra: epoch" in result.stdout


def test_of_a_folder_the_newest_good_one_is_taken_and_named(folder: Path) -> None:
    result = run("show", folder)
    assert "step 12 of 1 ranks" in result.stdout
    assert result.stderr == f"step-000000000012 is the newest good checkpoint of {folder}\n"
    (folder / "step-000000000012" / "manifest.json").unlink()
    assert "step 5 of 1 ranks" in run("show", folder).stdout


def test_show_as_json_has_the_manifest(folder: Path) -> None:
    found = json_of("show", folder)
    manifest = read_manifest(folder / "step-000000000012")
    assert (found["step"], found["world_size"], found["extra"]) == (12, 1, {"epoch": 12})
    assert found["versions"] == dict(manifest.versions)
    assert found["tables"][A] == {
        "rows": 9, "dim": 8, "dtype": "float32", "optimizer": "rowwise_adagrad", "updates": 4, "states": ["momentum1"],
        "bytes": 4 * (9 * 8 + 2 * 9),
        "shards": [
            {"rank": 0, "rows": [0, 9], "columns": [0, 4], "replica": False},
            {"rank": 0, "rows": [0, 9], "columns": [4, 8], "replica": False},
        ],
    }  # fmt: skip
    assert found["dense"]["over.weight"] == {"shape": [1, 16], "dtype": "float32"}
    assert found["files"] == {one.name: one.bytes for one in manifest.files}


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
    found = json_of("verify", folder)
    assert [one["good"] for one in found.values()] == [True, False]
    assert run("verify", folder / "step-000000000005").exit_code == 0


def test_diff_ends_with_status_1_where_there_is_a_difference(folder: Path) -> None:
    a, b = folder / "step-000000000005", folder / "step-000000000012"
    same, other = run("diff", a, a), run("diff", a, b)
    assert (same.exit_code, same.stdout) == (0, "no difference\n")
    assert other.exit_code == 1
    assert other.stdout.splitlines() == diff(a, b).lines()
    found = json_of("diff", a, b)
    assert found["same"] is False and found["facts"]["step"] == [5, 12]
    assert found["values"][A]["elements"] == 72


def test_reshard_prints_where_it_is_and_any_plan_passes_over_it(folder: Path, tmp_path: Path) -> None:
    a = folder / "step-000000000005"
    refused = run("reshard", a, tmp_path / "cut", "--world-size", "3", "--plan", "row_wise")
    assert refused.exit_code == 1 and refused.stderr.startswith(f"Error: {A}: momentum1 is a number a row of each")
    result = run("reshard", a, tmp_path / "cut", "--world-size", "3")
    assert (result.exit_code, result.stdout) == (0, f"{tmp_path}/cut/step-000000000005\n")
    made = Path(result.stdout.strip())
    assert read_manifest(made).world_size == 3
    assert run("diff", a, made).exit_code == 1
    passed = run("diff", a, made, "--any-plan")
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
def test_what_is_no_checkpoint_is_one_line_and_status_1(command: str, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    more = {"diff": [tmp_path / "empty"], "reshard": [tmp_path / "b"], "export": [tmp_path / "b"]}.get(command, [])
    result = run(command, tmp_path / "empty", *more)
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith(f"Error: {tmp_path}/empty is no checkpoint, and no folder that has")


def test_a_manifest_that_is_none_is_one_line(folder: Path) -> None:
    (folder / "step-000000000012" / "manifest.json").write_text("[1, 2")
    result = run("show", folder / "step-000000000012")
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1 and "manifest.json: JSONDecodeError" in result.stderr


def test_the_module_runs_it(folder: Path) -> None:
    command = [sys.executable, "-m", "shardwise", "ckpt", "show", str(folder), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout)["step"] == 12

"""`shardwise export`: the folder it writes, the table it prints, and how it ends."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("click")
pytest.importorskip("rich")

from click.testing import CliRunner, Result
from inference_models import CASES, DENSE, FEATURES, dlrm
from test_inference_predict import Factory

from shardwise import checkpoint, cli
from shardwise.checkpoint import Manifest
from shardwise.inference import Signature, load_program, quantize_inference_model, read_tables
from shardwise.inference.folder import read_facts

HERE = "test_cli_export"


def of_the_checkpoint(manifest: Manifest) -> tuple[torch.nn.Module, Signature]:
    assert manifest.extra == {"dense": DENSE}
    model = dlrm()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    return model, Signature(FEATURES, manifest.extra["dense"], outputs=["logit"])


def alone() -> tuple[torch.nn.Module, Signature]:
    return dlrm(), Signature(FEATURES, DENSE)


def nothing() -> torch.nn.Module:
    return dlrm()


def quantized() -> tuple[torch.nn.Module, Signature]:
    return quantize_inference_model(dlrm()), Signature(FEATURES, DENSE)


def misnamed() -> tuple[torch.nn.Module, Signature]:
    return dlrm(), Signature(["a"], DENSE)


def narrow() -> tuple[torch.nn.Module, Signature]:
    return dlrm(), Signature(FEATURES, ["age"])


def broken() -> tuple[torch.nn.Module, Signature]:
    raise KeyError("dense")


def factory() -> Factory:
    return Factory()


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.commands(), ["export", *map(str, arguments)])


@pytest.fixture(autouse=True)
def _own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command puts the folder of a factory on the path, as `python FILE.py` does; other tests shall not see it."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_a_checkpoint_becomes_a_folder_that_serves(tmp_path: Path) -> None:
    saved = tmp_path / "run"
    checkpoint.save(saved, dlrm(), step=3, extra={"dense": DENSE}).wait()
    result = run(
        tmp_path / "out", "--model", f"{HERE}:of_the_checkpoint", "--checkpoint", saved, "--table-dtype", "b=int4"
    )
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["table", "rows", "x", "columns", "rows", "are", "before", "now", "smaller"]
    assert lines[1].split() == ["a", "50", "x", "8", "int8", "1.6", "kB", "600", "bytes", "2.67x"]
    assert next(line.split()[4] for line in lines if line.startswith("b ")) == "int4"
    assert lines[4].split() == ["all", "tables", "4.9", "kB", "1.6", "kB", "3.00x"]
    assert lines[-1] == "takes 2 dense columns and ids of a, b, c; gives logit"
    assert "step-000000000003 is the newest good checkpoint" in result.stderr

    batch = CASES["dlrm"].batch(4)
    wanted = CASES["dlrm"].wanted(quantize_inference_model(dlrm(), per_table_weight_dtype={"b": torch.quint4x2}), batch)
    assert torch.equal(load_program(tmp_path / "out")(**batch)["logit"], wanted["output"])
    assert {name: table.facts.format for name, table in read_tables(tmp_path / "out").items()} == {
        "a": "int8", "b": "int4", "c": "int8",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "options", "formats"), [("alone", ["--dtype", "fp16"], {"fp16"}), ("factory", [], {"int8"})]
)
def test_a_model_without_a_checkpoint_is_exported(
    tmp_path: Path, name: str, options: list[str], formats: set[str]
) -> None:
    result = run(tmp_path / "out", "--model", f"{HERE}:{name}", *options)
    assert result.exit_code == 0, result.output
    # the factory quantizes its tables itself
    assert {table.format for table in read_facts(tmp_path / "out").tables} == formats


def test_a_factory_is_found_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "a_model_in_a_file.py"
    file.write_text(f"from {HERE} import alone as make\nnumber = 3\n")
    result = run(tmp_path / "out", "--model", f"{file}:make")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "out" / "program.pt2").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "x"], "--model x: write MODULE:FACTORY or FILE.py:FACTORY"),
        (["--model", "no_such_module:f"], "--model no_such_module:f: No module named 'no_such_module'"),
        (["--model", "no/such.py:f"], "there is no file no/such.py"),
        (["--model", f"{HERE}:f"], f"{HERE} has no function f"),
        (["--model", f"{HERE}:of_the_checkpoint"], "takes the manifest of a checkpoint: pass --checkpoint"),
        (["--model", f"{HERE}:nothing"], "returned DLRM: it must return (model, signature)"),
        (["--model", f"{HERE}:misnamed"], "features ['b', 'c'] are not in the batch, which has ['a']"),
        (["--model", f"{HERE}:narrow"], "cannot be multiplied"),
        (["--model", f"{HERE}:broken"], f"{HERE}:broken: KeyError: 'dense' ({__file__}:"),
        (
            ["--model", f"{HERE}:quantized", "--dtype", "int4"],
            "has no float tables to quantize: --dtype",
        ),
        (["--model", f"{HERE}:quantized", "--table-dtype", "a=int8"], "has no float tables to quantize"),
        (["--model", f"{HERE}:alone", "--table-dtype", "x=int8"], "names 'x', which is no table; the tables are"),
        (["--model", f"{HERE}:alone", "--table-dtype", "a=int3"], "write TABLE=DTYPE, DTYPE one of int8, int4"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_2(tmp_path: Path, arguments: list[str], message: str) -> None:
    result = run(tmp_path / "out", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_model_that_is_there_is_replaced_on_demand_only(tmp_path: Path) -> None:
    asked = (tmp_path / "out", "--model", f"{HERE}:alone")
    assert run(*asked).exit_code == 0
    again = run(*asked, "--dtype", "int4")
    assert (again.exit_code, "pass force=True (--force)" in again.stderr) == (2, True)
    assert run(*asked, "--dtype", "int4", "--force").exit_code == 0
    assert {table.format for table in read_facts(tmp_path / "out").tables} == {"int4"}


def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "run", torch.nn.Linear(2, 2), step=1).wait()
    result = run(tmp_path / "out", "--model", f"{HERE}:alone", "--checkpoint", tmp_path / "run")
    assert result.exit_code == 2
    assert "the checkpoint does not fit the model" in result.stderr


def test_a_file_that_is_no_python_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "no_python.py").write_text("def (")
    result = run(tmp_path / "out", "--model", f"{tmp_path}/no_python.py:f")
    assert result.exit_code == 2
    assert "no_python.py:f: SyntaxError: invalid syntax (no_python.py, line 1)" in result.stderr.splitlines()[-1]


def test_a_file_may_have_the_name_of_another_module(tmp_path: Path) -> None:
    """`serving.py:factory` was looked for in another `serving`, which had been imported before."""
    (tmp_path / "inference_models.py").write_text(f"from {HERE} import alone\n")
    result = run(tmp_path / "out", "--model", f"{tmp_path}/inference_models.py:alone")
    assert result.exit_code == 0, result.output

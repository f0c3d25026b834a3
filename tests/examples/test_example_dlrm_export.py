"""The DLRM example with int8 tables: as good, a quarter of the size, and served by a process that cannot train."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from ranks import run_ranks
from test_example_dlrm import example, train

from shardwise import checkpoint
from shardwise.data import Clicks
from shardwise.inference import load_program, quantize_inference_model, read_tables
from shardwise.models import auc

SMALL = ("--epochs", "1", "--steps", "60", "--batch-size", "512")
FRESH = """
import sys, torch
from shardwise.inference import load_program
program = load_program(sys.argv[1])
torch.save([program(**batch) for batch in torch.load(sys.argv[2])], sys.argv[3])
print(*sorted({name.split(".")[1] for name in sys.modules if name.startswith("shardwise.")}))
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What a run on two ranks says, and the folder with `model` and `checkpoints`."""
    folder = tmp_path_factory.mktemp("dlrm")
    options = ("--export", str(folder / "model"), "--checkpoint-dir", str(folder / "checkpoints"))
    first, second = run_ranks(2, train, *SMALL, *options)
    assert first["int8"] == second["int8"]
    return first, folder


@pytest.mark.ranks
def test_int8_tables_are_a_quarter_of_the_size_and_as_good(trained: tuple[dict[str, Any], Path]) -> None:
    result, _ = trained
    assert result["epochs"][-1]["test_auc"] > 0.6
    assert abs(result["int8"]["test_auc"] - result["epochs"][-1]["test_auc"]) < 0.002
    assert result["int8"]["fp32_table_bytes"] == 4 * 32 * sum(Clicks().feature_rows.values())
    assert result["int8"]["ratio"] > 3.5


@pytest.mark.ranks
def test_the_exported_model_is_served_without_the_training_parts(
    trained: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    result, folder = trained
    batches = list(Clicks().evaluate(4096))
    inputs = [
        {
            "values": batch.sparse_features.values(),
            "lengths": batch.sparse_features.lengths(),
            "dense": batch.dense_features,
        }
        for batch in batches
    ]
    torch.save(inputs, tmp_path / "batches")
    arguments = [str(folder / "model"), str(tmp_path / "batches"), str(tmp_path / "found")]
    done = subprocess.run([sys.executable, "-c", FRESH, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["_version", "inference", "kernels", "untrusted"]

    found = torch.load(tmp_path / "found")
    logits = torch.cat([one["logit"] for one in found])
    labels = torch.cat([batch.labels for batch in batches])
    assert auc(logits, labels) == pytest.approx(result["int8"]["test_auc"], abs=1e-6)
    model = of_the_checkpoint(folder / "checkpoints")
    with torch.no_grad():
        wanted = torch.cat([model(batch)[1][1] for batch in batches])
    assert torch.equal(logits, wanted)
    assert torch.equal(torch.cat([one["click_probability"] for one in found]), torch.sigmoid(wanted))


def of_the_checkpoint(folder: Path) -> torch.nn.Module:
    """The model that `shardwise export` would make of the newest checkpoint, int8."""
    example()
    path = checkpoint.latest(folder)
    assert path is not None
    model, _, _ = importlib.import_module("serving").from_checkpoint(checkpoint.read_manifest(path))
    model.load_state_dict(checkpoint.full_state_dict(path))
    return quantize_inference_model(model)


@pytest.mark.ranks
def test_a_checkpoint_exports_to_the_same_files(trained: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    pytest.importorskip("rich")
    from click.testing import CliRunner

    from shardwise import cli

    _, folder = trained
    factory = ROOT / "examples" / "dlrm" / "serving.py"
    arguments = [str(tmp_path / "out"), "--model", f"{factory}:from_checkpoint", "--checkpoint"]
    result = CliRunner().invoke(cli.commands(), ["export", *arguments, str(folder / "checkpoints")])
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-3].split()[-1] == "3.56x"
    mine, theirs = (path / "tables.safetensors" for path in (tmp_path / "out", folder / "model"))
    assert mine.read_bytes() == theirs.read_bytes()
    assert load_program(tmp_path / "out").facts.features == load_program(folder / "model").facts.features


@pytest.mark.ranks
def test_numpy_alone_finds_the_rows_of_the_checkpoint(trained: tuple[dict[str, Any], Path]) -> None:
    _, folder = trained
    path = checkpoint.latest(folder / "checkpoints")
    assert path is not None
    weights = checkpoint.full_state_dict(path)
    for name, table in read_tables(folder / "model").items():
        whole = weights[f"model.sparse_arch.embedding_bag_collection.embedding_bags.{name}.weight"]
        # half a step of the row's 255, and what fp16 scales lose
        bound = (whole.amax(1) - whole.amin(1)).max() / 255 * 0.75
        assert (torch.from_numpy(table.rows(range(len(whole)))) - whole).abs().max() < bound


def test_a_folder_that_may_not_be_replaced_is_refused_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(SystemExit):
        train(*SMALL, "--export", str(tmp_path))
    assert f"--export: {tmp_path} is there and is no exported model" in capsys.readouterr().err

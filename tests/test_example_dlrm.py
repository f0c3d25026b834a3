"""The DLRM example learns, writes its results, trains the same at one rank and at two, and explains itself."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks

import shardwise

ROOT = Path(__file__).parents[1]
DATA = Path(os.environ.get("SHARDWISE_DATA", ROOT.parent / "shared" / "data")) / "ml_latest_small"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="no ml_latest_small below $SHARDWISE_DATA or ../shared/data")
pytestmark = pytest.mark.skipif(
    "DistributedModelParallel" not in shardwise.__all__, reason="shardwise has no DistributedModelParallel yet"
)


def example() -> Any:
    spec = importlib.util.spec_from_file_location("dlrm_train", ROOT / "examples" / "dlrm" / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def train(*argv: str) -> dict[str, Any]:
    result: dict[str, Any] = example().main([*argv, "--device", "cpu"])
    return result


def measured(result: dict[str, Any]) -> list[float]:
    return [epoch[name] for epoch in result["epochs"] for name in ("train_loss", "test_auc", "test_ne")]


CLICKS = ("--epochs", "2", "--steps", "30", "--batch-size", "256", "--dim", "8")


@pytest.mark.parametrize(
    ("optimizer", "lr"), [("sgd", "0.5"), ("adagrad", "0.05"), ("rowwise_adagrad", "0.05"), ("adam", "0.01")]
)
def test_training_on_generated_clicks_learns_and_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], optimizer: str, lr: str
) -> None:
    result = train(*CLICKS, "--optimizer", optimizer, "--lr", lr, "--json", str(tmp_path / "result.json"))
    epochs = result["epochs"]
    assert [epoch["steps"] for epoch in epochs] == [30, 30]
    assert 0.6 < epochs[-1]["test_auc"] < result["ceiling_auc"] + 0.01
    assert epochs[-1]["test_ne"] < 1.0
    written = json.loads((tmp_path / "result.json").read_text())
    assert written["config"]["optimizer"] == optimizer
    assert written["epochs"] == epochs
    assert written["versions"]["shardwise"] == shardwise.__version__
    printed = capsys.readouterr().out
    # the plan, the table, the ceiling
    assert "t_user" in printed
    assert f"{epochs[1]['test_auc']:.4f}" in printed
    assert f"{result['ceiling_auc']:.4f}" in printed


@pytest.mark.ranks
def test_two_ranks_train_as_one_does() -> None:
    first, second = run_ranks(2, train, *CLICKS)
    assert measured(first) == measured(second)
    (alone,) = run_ranks(1, train, *CLICKS)
    assert measured(first) == pytest.approx(measured(alone), abs=2e-4)


@pytest.mark.ranks
@needs_data
@pytest.mark.parametrize("world_size", [1, 2])
def test_movielens_reaches_an_auc_of_79_in_an_epoch(world_size: int) -> None:
    result = run_ranks(world_size, train, "--data", str(DATA), "--epochs", "1")[0]
    assert result["epochs"][0]["test_auc"] > 0.79


def test_bad_rows_are_skipped_and_counted_on_demand(tmp_path: Path) -> None:
    good = "\t".join(["1", *map(str, range(13)), *(f"{n:08x}" for n in range(26))])
    (tmp_path / "day_0.tsv").write_text("\n".join([good, "bad", *[good] * 18]) + "\n")
    argv = ("--data", str(tmp_path), "--epochs", "1", "--batch-size", "6", "--dim", "4")
    with pytest.raises(ValueError, match=r"day_0\.tsv:2: 1 columns, expected 40"):
        train(*argv)
    assert train(*argv, "--on-bad-row", "skip")["skipped_rows"] == {"wrong number of columns": 1}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--data", "{}"], "no data that shardwise reads"),
        (["--data", "{}/nowhere"], "no such folder"),
        (["--batch-size", "0"], "--batch-size must be positive, got 0"),
        (["--batch-size", "1000000"], "do not fill a batch of 1000000"),
    ],
)
def test_what_cannot_be_done_is_said_in_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as stopped:
        train(*(part.format(tmp_path) for part in argv))
    assert message in str(stopped.value) + capsys.readouterr().err


def test_a_batch_that_the_ranks_cannot_share_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(SystemExit):
        example().parse(["--batch-size", "512"])
    assert "--batch-size 512 cannot be shared equally by 3 ranks" in capsys.readouterr().err

"""A run of the DLRM example whose losses are no numbers ends with a sentence, on time, and is resumed as it was."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from optional import need
from test_example_dlrm import example
from test_example_dlrm_resume import Kept

SMALL = ("--epochs", "3", "--steps", "2", "--batch-size", "64", "--dim", "4", "--log-every", "1", "--device", "cpu")
DIVERGES = ("--lr", "1e30", "--optimizer", "sgd")


def test_a_run_that_diverged_saves_resumes_and_ends_with_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first save after a nan ended it with a traceback of JSON, and without checkpoints int8 did at the end."""
    argv = [*SMALL, *DIVERGES, "--checkpoint-dir", str(tmp_path / "ck"), "--metrics", str(tmp_path / "m.jsonl")]
    for more in ((), ("--resume", "--epochs", "4")):
        with pytest.raises(SystemExit, match=r"train.py: training diverged, try a smaller --lr: table 't_user': row 0"):
            example().main([*argv, *more])
    assert "resumed at step 6" in capsys.readouterr().out
    lines = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [*range(1, 9)]
    assert [line["test_ne"] for line in lines if "test_ne" in line] == [None] * 4


def test_epochs_without_an_ne_use_up_the_patience(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The last epoch was the best of those without an NE, so a run of nan never ran out of patience."""
    kept = Kept()
    with pytest.raises(SystemExit, match="diverged"):
        example().main([*SMALL, *DIVERGES, "--patience", "2"], [kept])
    assert "no better test NE for 2 epochs" in capsys.readouterr().out
    assert len([told for _, told in kept.told if told and "test_ne" in told]) == 2


def test_losses_that_are_no_numbers_come_back_from_a_checkpoint() -> None:
    progress = example("progress").Progress
    before = progress(
        step=3, epoch_loss=math.inf, line_loss=-math.inf, epochs=[{"test_ne": 0.5, "train_loss": math.nan}]
    )
    before.history = [(1, 0.5, None), (2, math.nan, 3.0), (3, math.inf, 4.0)]
    text = json.dumps(before.to_json(), allow_nan=False)
    # nan is not equal to itself
    assert repr(progress.from_json(json.loads(text))) == repr(before)


def test_lines_of_metrics_are_json_where_a_loss_is_infinite() -> None:
    """`Infinity` was written, which JSON does not have."""
    numbers = {"loss": math.inf, "of": [-math.inf, math.nan, 1.0]}
    assert example("report").without_nan(numbers) == {"loss": None, "of": [None, None, 1.0]}


def test_trackers_that_were_not_started_are_not_closed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that is refused as it resumes warned of TensorBoard: AttributeError, training goes on."""
    need("tensorboard")
    argv = [*SMALL, "--epochs", "1", "--checkpoint-dir", str(tmp_path / "ck")]
    example().main(argv)
    kept = Kept()
    with pytest.raises(SystemExit, match="--lr was 0.02 and is 0.5"):
        example().main([*argv, "--resume", "--lr", "0.5", "--tensorboard", str(tmp_path / "tb")], [kept])
    assert "warning" not in capsys.readouterr().out and kept.told == []


def test_a_file_of_other_lines_is_left_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The warning said: argument of type 'int' is not iterable."""
    path = tmp_path / "other.jsonl"
    path.write_text('{"name": 1}\n')
    result: dict[str, Any] = example().main([*SMALL, "--epochs", "1", "--metrics", str(path)])
    assert len(result["epochs"]) == 1 and path.read_text() == '{"name": 1}\n'
    assert (
        f"ValueError: {path} has lines that are no metrics, '{{\"name\": 1}}': name another" in capsys.readouterr().out
    )


def test_a_page_is_written_where_a_name_is_not_utf_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run with `--json` into a file of another encoding lost its page, by UnicodeEncodeError after the training."""
    module = example("page")
    monkeypatch.setattr(module, "page", lambda run: "--json runs/\udcff.json")
    module.write_page(tmp_path / "page.html", None)
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == "--json runs/?.json"

"""Options of the DLRM example come from the command line and a TOML file; what is wrong is told in a line."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from test_example_dlrm import example


def parse(*argv: str) -> Any:
    return example("arguments").parse("", argv)


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    """What a command line is refused with: one line, and the status of wrong usage."""
    with pytest.raises(SystemExit) as stopped:
        parse(*argv)
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err == f"{stopped.value.message} (--help lists the options)\n"  # type: ignore[attr-defined]
    return printed.err.removeprefix("train.py: error: ").removesuffix(" (--help lists the options)\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--lr", "x"], "Error parsing --lr: could not convert string to float: 'x'"),
        (["--epochs", "3.5"], "Error parsing --epochs: invalid literal for int() with base 10: '3.5'"),
        (["--lrr", "3"], "Unrecognized options: --lrr, 3; perhaps --lr is meant"),
        # no abbreviations: an option of tomorrow would make another one of them
        (["--res"], "Unrecognized options: --res; perhaps --resume is meant"),
        (["--data"], "Missing value for argument '--data'. Expected 1 values"),
        (["/a" * 300], f"Unrecognized options: {'/a' * 300}"),
        (["--tier", "tape"], "invalid choice 'tape' for argument '--tier'. Expected one of ('none', 'ram', 'file')"),
    ],
)
def test_what_is_mistyped_is_a_line(capsys: pytest.CaptureFixture[str], argv: list[str], message: str) -> None:
    """tyro draws a box of the width of the terminal, into which a long path is broken."""
    assert refusal(capsys, *argv) == message


def test_other_ranks_are_silent(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit) as stopped:
        parse("--lr", "x")
    assert capsys.readouterr() == ("", "")
    assert stopped.value.message.startswith("train.py: error: Error parsing --lr")  # type: ignore[attr-defined]


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        f'lr = 1\nbatch-size = 64\nsteps = 7\noptimizer = "sgd"\nresume = true\ncheckpoint_dir = "{tmp_path}"\n'
    )
    options = parse("--config", str(path), "--optimizer", "adam", "--steps", "None", "--no-resume")
    wanted = {"lr": 1.0, "batch_size": 64, "checkpoint_dir": str(tmp_path), "optimizer": "adam", "config": path}
    assert options == replace(example("arguments").Options(), **wanted)
    assert type(options.lr) is float and parse("--config", str(path)).resume


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("learning_rate = 0.1", "no option 'learning_rate'"),
        ("batchsize = 64", "no option 'batchsize', perhaps 'batch_size' is meant"),
        ("[train]\nlr = 0.1", "no option 'train'"),
        ('config = "other.toml"', "no option 'config'"),
        ("dim = 8\nbatch_size = 4\nbatch-size = 4", "'batch-size' is there twice"),
        ('lr = "0.1"', "'lr': Expected `float`, got `str`, got '0.1'"),
        ("epochs = 2.5", "'epochs': Expected `int`, got `float`, got 2.5"),
        ("epochs = true", "'epochs': Expected `int`, got `bool`, got True"),
        ("resume = 1", "'resume': Expected `bool`, got `int`, got 1"),
        ('optimizer = "adamw"', "'optimizer': Invalid enum value 'adamw', got 'adamw'"),
        ("metrics = 3", "'metrics': expected str, bytes or os.PathLike object, not int, got 3"),
        ("lr = ", "Invalid value (at end of document)"),
        ("lr = " + "[" * 20_000, "it is nested too deeply"),
    ],
)
def test_a_file_with_something_else_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    assert refusal(capsys, "--config", str(path)) == f"--config {path}: {message}"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--seed", str(2**64)], "--seed must be of 64 bits, got 18446744073709551616"),
        (["--export", "a\udcff"], "--export 'a\\udcff': the name must be UTF-8"),
        (["--json", "a\0b"], "--json 'a\\x00b': no file and no name has a NUL in it"),
        (
            ["--tier", "file", "--tier-folder", __file__],
            f"--tier-folder {__file__}: [Errno 17] File exists: '{__file__}'",
        ),
    ],
)
def test_what_ended_a_run_later_is_told_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argv: list[str], message: str
) -> None:
    """Tracebacks, of a NUL and of torch's writer after the training."""
    monkeypatch.chdir(tmp_path)
    assert refusal(capsys, *argv) == message


def test_a_value_of_the_file_is_checked_as_one_of_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text("lr = -1.0")
    config = ("--config", str(tmp_path / "run.toml"))
    assert refusal(capsys, *config) == "--lr must be positive and finite, got -1.0"
    assert parse(*config, "--lr", "1").lr == 1
    assert "No such file or directory" in refusal(capsys, "--config", str(tmp_path / "nowhere"))


def test_a_file_url_is_a_folder_that_is_made_before_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parse("--checkpoint-dir", f"file://{tmp_path}/new/run")
    assert (tmp_path / "new" / "run").is_dir()
    (tmp_path / "file").write_text("")
    assert "File exists" in refusal(capsys, "--checkpoint-dir", f"file://{tmp_path}/file")
    # a store is asked by the first save
    parse("--checkpoint-dir", "s3://bucket/run")
    beside, place = example("beside"), tmp_path / "made" / "config.toml"
    beside.write(place, b"epochs = 1")
    assert beside.read(place) == b"epochs = 1" and [*place.parent.iterdir()] == [place]


def test_every_option_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = example("arguments")
    with pytest.raises(SystemExit) as stopped:
        parse("--help")
    printed = capsys.readouterr().out
    assert stopped.value.code == 0 and "(default: 0.02)" in printed
    # in a box, or below rules where the terminal has no characters for one
    _, *helped = re.split(r"^[^\w-]*(--[a-z][a-z-]*)", printed, flags=re.MULTILINE)
    assert helped[::2] == [arguments.flag(field.name) for field in fields(arguments.Options)]
    # more than its type and its default
    assert all(len(text.split("(default:")[0].split()) > 2 for text in helped[1::2])


def test_a_library_that_reads_the_options_and_is_missing_is_named(tmp_path: Path) -> None:
    (tmp_path / "tyro.py").write_text("raise ModuleNotFoundError(\"No module named 'tyro'\")")
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "dlrm" / "train.py")],
        env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(
        "train.py: error: No module named 'tyro', which reads the options: pip install \".[ex"
    )

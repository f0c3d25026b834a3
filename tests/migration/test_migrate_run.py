"""`shardwise migrate --run`: a program tried on two ranks, and what is said of how it ended.

Takes 25 s: every trial starts two processes that import torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkout import run_python

GOOD = """
import sys
import torch
import torch.distributed as dist
from torchrec import KeyedTensor
from torchrec.optim import RowWiseAdagrad
dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
assert sys.argv[1:] == ["--epochs", "2 a"] and total.item() == 2 and KeyedTensor and RowWiseAdagrad
"""
STOPS = """
import torch.distributed as dist
from torchrec import KeyedTensor
dist.init_process_group("gloo")
def metric():
    from torchrec.metrics.auc import AUCMetric
if dist.get_rank() == 1:
    metric()
dist.barrier()
"""


@pytest.mark.full
def test_a_program_that_ends_well_is_reported_with_the_names_it_took(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(GOOD)
    arguments = ["--run", "--arguments", "--epochs '2 a'", "--json"]
    done = run_python("-m", "shardwise", "migrate", program, *arguments, folder=tmp_path, status=None)
    trial = json.loads(done.stdout)["run"]
    assert [(ending["rank"], ending["status"]) for ending in trial["endings"]] == [(0, 0), (1, 0)], done.stdout
    assert done.returncode == 0
    taken = {entry["name"]: entry["status"] for entry in trial["findings"]}
    assert taken == {"torchrec.KeyedTensor": taken["torchrec.KeyedTensor"], "torchrec.optim.RowWiseAdagrad": "works"}


def test_a_program_that_stops_is_reported_with_its_line_and_what_to_write(tmp_path: Path) -> None:
    program = tmp_path / "train.py"
    program.write_text(STOPS)
    done = run_python("-m", "shardwise", "migrate", program, "--run", "--timeout", "120", folder=tmp_path, status=1)
    printed = " ".join(done.stdout.split())
    assert f"rank 1 ended with status 1 at {program}:6: ModuleNotFoundError: shardwise has no counterpart" in printed
    assert "rank 0 ended well" not in printed
    assert "torchrec.metrics: torchmetrics has most of them" in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.py", "b.py", "--run"], "--run tries one program"),
        (["a.py", "--run", "--write"], "--run tries one program"),
        (["a.py", "--run", "--arguments", "'"], "is no command line: No closing quotation"),
        (["a.py", "--arguments", "x"], "--arguments are those of the program that --run tries"),
    ],
)
def test_run_takes_one_program(tmp_path: Path, arguments: list[str], message: str) -> None:
    for name in ("a.py", "b.py"):
        (tmp_path / name).touch()
    done = run_python("-m", "shardwise", "migrate", *arguments, folder=tmp_path, status=2)
    assert message in done.stderr

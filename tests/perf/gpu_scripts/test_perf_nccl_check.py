"""The check of sharded training over NCCL runs here over gloo: on one rank alone, on two, and as its command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from checkout import ROOT
from ranks import run_ranks
from torch import Tensor

from shardwise.perf.gpu_scripts import nccl_check
from shardwise.sharding.comms.exchange import Exchange, Pending

pytestmark = pytest.mark.ranks
FEW = replace(nccl_check.SMALL, rows=20, dim=8, batch=5, steps=2)


def require_ok(report: dict[str, Any], ranks: int) -> None:
    for name, record in report["sections"].items():
        assert record["status"] == "ok", (name, record["error"])
        # collectives ran, with one rank too
        assert record["collectives"] > 0, name
    assert report["ok"] and report["ranks"] == ranks and report["backend"] == "gloo"


@pytest.mark.full
def test_one_process_alone_passes_every_section() -> None:
    report = nccl_check.one_card("cpu", FEW)
    require_ok(report, 1)
    assert list(report["sections"]) == list(nccl_check.SECTIONS)
    assert json.loads(json.dumps(report))["sections"]["sharding_types"]["result"] == {"compared": 16}
    assert not dist.is_initialized()


def two() -> dict[str, Any]:
    return nccl_check.run(torch.device("cpu"), FEW, list(nccl_check.SECTIONS))


@pytest.mark.full
def test_two_ranks_pass_every_section() -> None:
    for report in run_ranks(2, two):
        require_ok(report, 2)
        assert report["sections"]["bandwidths"]["result"]["rows, 256 bytes"]["gb_per_s"] > 0


def broken() -> dict[str, Any]:
    """Rank 1 sends rows whose first number is a little larger."""
    rows = Exchange.rows

    def wrong(self: Exchange, send: Tensor, *args: Any, **kwargs: Any) -> Pending:
        if self.rank == 1 and send.numel() and kwargs.get("what", "rows") == "rows":
            send[0] += 1 / 16
        return rows(self, send, *args, **kwargs)

    with patch.object(Exchange, "rows", wrong):
        return nccl_check.run(torch.device("cpu"), FEW, ["sharding_types", "checkpoint"])


def test_a_wrong_number_is_reported_by_the_rank_that_sees_it() -> None:
    for report in run_ranks(2, broken):
        record = report["sections"]["sharding_types"]
        assert not report["ok"] and record["status"] == "failed"
        assert "'row_wise, pooled': 'output 0 of step 0 by" in record["error"]["rank 0"]


@pytest.mark.long
def test_the_command_writes_its_report(tmp_path: Path) -> None:
    given = {**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable}
    command = [
        str(ROOT / "perf" / "nccl_check.sh"),
        "--device",
        "cpu",
        "--small",
        "--sections",
        "bandwidths",
        "failure",
    ]
    done = subprocess.run(command, env=given, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    require_ok(json.loads((tmp_path / "nccl_check.json").read_text()), 2)
    assert "failure: ok" in (tmp_path / "nccl_check.txt").read_text()

"""The tutorial's snippets, put into one file as it says, train on two processes of torchrun as well."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

# waits for torchrun and three programs to import torch
pytestmark = [pytest.mark.ranks, pytest.mark.full]


def test_the_tutorial_as_one_file_answers_the_same_on_two_processes(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "tutorial.md").read_text()
    program = tmp_path / "first.py"
    program.write_text("\n".join(re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "first.py"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-3000:]
    said = [line for line in run.stdout.splitlines() if line.startswith("[")]
    summary = re.search(r"It prints `(\[.*?\])`", page)
    assert summary is not None
    # rank 0 has exported, and both have asked
    assert sorted(said) == sorted([summary[1], "[True, False]", "[True, False]"])

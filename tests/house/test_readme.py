"""The README's quick start runs as printed, in one process and on two ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

README = ROOT / "README.md"


def quick_start() -> tuple[str, str]:
    """The program, and what it prints on two ranks."""
    (found,) = re.findall(r"```python\n(.*?)```.*?```\n(product: .*?)```", README.read_text(), re.DOTALL)
    program, printed = found
    return program, printed


def losses(printed: str) -> list[float]:
    return [float(number) for number in re.findall(r"^step \d+: loss (\d\.\d{3})$", printed, re.MULTILINE)]


def run(folder: Path, *launcher: str) -> str:
    program, _ = quick_start()
    (folder / "quickstart.py").write_text(program)
    command = [sys.executable, *launcher, "quickstart.py"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_quick_start_trains_in_one_process(tmp_path: Path) -> None:
    printed = run(tmp_path)
    assert printed.startswith("product: table_wise on ranks [0]\nuser: table_wise on ranks [0]\nstep 0: loss 0.")
    first, *_, last = losses(printed)
    assert first > 0.65 and last < 0.05


@pytest.mark.full
@pytest.mark.ranks
def test_the_quick_start_prints_on_two_ranks_what_stands_beside_it(tmp_path: Path) -> None:
    printed = run(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    _, said = quick_start()
    # losses of another machine differ in the last places
    assert re.sub(r"0\.\d+", "", printed) == re.sub(r"0\.\d+", "", said)
    assert losses(printed) == pytest.approx(losses(said), abs=0.01) and len(losses(said)) == 5

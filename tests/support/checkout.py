"""Files of this checkout that tests read: its root, golden data, and real data beside it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())
TESTS = ROOT / "tests"
# never committed: tests that read it are skipped where it is not there
SHARED = ROOT.parent / "shared"
REAL_DATA = Path(os.environ.get("SHARDWISE_DATA", SHARED / "data"))


def file_of_tests(pattern: str) -> Path:
    """The one file of tests/ whose name is this, whatever folder it lies in.

    Raises:
        ValueError: none is, or several are.
    """
    (path,) = TESTS.rglob(pattern)
    return path


def python_path() -> str:
    """PYTHONPATH of a process that imports shardwise and any module of tests/."""
    folders = {path.parent for path in TESTS.rglob("*.py")}
    return os.pathsep.join([str(ROOT), *sorted(map(str, folders)), *filter(None, [os.environ.get("PYTHONPATH")])])


def golden(name: str) -> Any:
    """What golden/<name>.json has: numbers of another library's, or of an earlier version of ours."""
    return json.loads((Path(__file__).parent / "golden" / f"{name}.json").read_text())


def without_gloo(printed: str) -> str:
    """Lines of a program and its ranks without gloo's (torch 2.9), which it writes in pieces that mix."""
    own = [line for line in printed.splitlines(keepends=True) if "connected peer ranks is" not in line]
    return re.sub(r"^(\[Gloo\] Rank )+", "", "".join(own), flags=re.MULTILINE)


def run_python(
    *arguments: object, folder: Path | None = None, status: int | None = 0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Python with these arguments in a process that finds this checkout, and ends with `status` if that is given."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=folder, env=env)
    assert status is None or done.returncode == status, done.stderr
    return done

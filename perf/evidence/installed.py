"""Install the wheel in an empty environment of each Python, and do there what someone does who has nothing else.

    make installed PYTHONS="python3.10 python3.13"      interpreters, by name or path

The wheel is built as pip builds it and installed with what it requires: whatever torch the index has for that Python,
which on Linux is one for CUDA, of gigabytes. Nothing of the checkout can be imported: the steps run in a folder of
their own, without PYTHONPATH. Environments are removed afterwards. The result, of an interpreter that could not install
it as well, is perf/results/installed.json; what it says of other Pythons stays. Only the standard library is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "perf" / "results" / "installed.json"
REPORTED = ("shardwise", "torch", "numpy", "safetensors", "click", "rich")
SECONDS = 600.0
# what is done there, of the environment's Python, and what is printed if it went well
STEPS: tuple[tuple[str, tuple[str, ...], str], ...] = (
    ("requirements are met", ("-m", "pip", "check"), "No broken requirements found."),
    (
        "quick start of README.md on two ranks",
        ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "quickstart.py"),
        "user: table_wise on ranks [0]\nstep 0: loss 0.",
    ),
    ("shardwise --version", ("-m", "shardwise", "--version"), "shardwise, version "),
    ("shardwise doctor --quick", ("-m", "shardwise", "doctor", "--quick"), "nothing is wrong"),
    (
        "an extra is named by its packages",
        ("-c", "from shardwise._version import how_to_install; print(how_to_install('cpu'))"),
        'pip install "numba',
    ),
    ("nothing of the checkout is imported", ("-c", "import shardwise.jagged as j; print(j.__file__)"), "site-packages"),
)  # fmt: skip


def quick_start() -> str:
    """The program in README.md."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    return str(code)


def run(command: Sequence[str | Path], folder: Path) -> tuple[int, str]:
    """Status and what was printed, by a process that sees nothing of ours: not by a variable, nor in its folder."""
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    environment["OMP_NUM_THREADS"] = "1"
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, timeout=SECONDS, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return 1, f"not done after {SECONDS:.0f} s"
    return done.returncode, done.stdout


def build(folder: Path) -> Path:
    """The wheel, built by pip from a copy of this checkout, because building leaves files behind.

    Raises:
        RuntimeError: with what pip printed last, where it could not be built.
    """
    left = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")
    tree = shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=left)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", folder, tree]
    status, printed = run([str(argument) for argument in command], folder)
    if status:
        raise RuntimeError(printed.strip()[-1000:])
    (wheel,) = folder.glob("*.whl")
    return wheel


def tried(interpreter: str, wheel: Path) -> dict[str, Any]:
    """What installed.json says of an interpreter."""
    about: dict[str, Any] = {"date": str(date.today()), "commit": _commit()}
    with tempfile.TemporaryDirectory(prefix="installed") as name:
        folder = Path(name)
        python = folder / "environment" / "bin" / "python"
        start = time.monotonic()
        for step in (
            [interpreter, "-m", "venv", str(folder / "environment")],
            [str(python), "-m", "pip", "install", "-q", "--no-cache-dir", str(wheel)],
        ):
            status, printed = run(step, folder)
            if status:
                return {**about, "not_installed": (printed.strip().splitlines() or [f"status {status}"])[-1]}
        about["seconds_to_install"] = round(time.monotonic() - start)
        about["versions"] = _versions(python, folder)
        (folder / "quickstart.py").write_text(quick_start(), encoding="utf-8")
        about["steps"] = {task: _step(python, words, expected, folder) for task, words, expected in STEPS}
    return about


def _step(python: Path, words: Sequence[str], expected: str, folder: Path) -> str:
    """ "passed", or what went wrong."""
    status, printed = run([str(python), *words], folder)
    if status == 0 and expected in printed:
        return "passed"
    return f"status {status}: {printed.strip()[-1000:]}"


def _versions(python: Path, folder: Path) -> dict[str, str]:
    code = (
        "import json, platform; from importlib.metadata import version;"
        f"print(json.dumps({{'python': platform.python_version(), **{{n: version(n) for n in {REPORTED!r}}}}}))"
    )
    versions: dict[str, str] = json.loads(run([str(python), "-c", code], folder)[1])
    return versions


def _commit() -> str:
    """Of the checkout, with a plus where files differ from it."""
    name = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    changes = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True)
    return name.stdout.strip() + ("+" if changes.stdout else "")


def main(argv: Sequence[str] | None = None) -> int:
    """Try every interpreter, one after the other; 1 where one failed."""
    parser = argparse.ArgumentParser(description="The wheel in an empty environment of each Python.")
    parser.add_argument("pythons", nargs="+", metavar="PYTHON", help="an interpreter: python3.12, or a path")
    parser.add_argument("--json", type=Path, default=RESULT, metavar="FILE", help="where the result is kept")
    given = parser.parse_args(argv)
    if unknown := [python for python in given.pythons if not shutil.which(python)]:
        parser.error(f"there is no interpreter {unknown[0]}")
    results: dict[str, Any] = json.loads(given.json.read_text()) if given.json.exists() else {}
    failed = False
    with tempfile.TemporaryDirectory(prefix="wheel") as name:
        wheel = build(Path(name))
        for python in given.pythons:
            code = "import sys; print('%d.%d' % sys.version_info[:2])"
            version = run([python, "-c", code], Path(name))[1].strip()
            print(f"Python {version}", flush=True)
            about = results[version] = tried(python, wheel)
            failed |= "steps" not in about or any(status != "passed" for status in about["steps"].values())
            print(json.dumps(about, indent=1), flush=True)
            ordered = sorted(results.items(), key=lambda item: tuple(map(int, item[0].split("."))))
            given.json.write_text(json.dumps(dict(ordered), indent=1) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

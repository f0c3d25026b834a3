"""Cases of the suite: what importing shardwise takes, and how large it is to download and on disk.

Imports are timed in fresh processes, without the start of Python. Sizes are of files as they are, without bytecode.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from functools import cache, partial
from pathlib import Path

import shardwise
from shardwise.perf.suite.case import (
    OURS,
    Case,
    Ready,
    Series,
    Setting,
)

PACKAGE = Path(shardwise.__file__).resolve().parent
# nothing that git would not archive
LEFT_BEHIND = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")
SECONDS = 300.0
_BUILD = "import sys, setuptools.build_meta as b; b.build_wheel(sys.argv[1])"
# what a checkout has and a wheel has not, as setup.py says it
LEFT_OUT = (
    *("perf/compile/", "perf/counts/", "perf/evidence/", "perf/gpu/", "perf/gpu_scripts/"),
    *("perf/conftest.py", "perf/test_cases.py"),
)
# what a peer may be installed as
DISTRIBUTIONS: Mapping[str, Sequence[str]] = {"fbgemm": ("fbgemm-gpu", "fbgemm-gpu-cpu"), "torchrec": ("torchrec",)}


def make_import(setting: Setting, *, statement: str) -> Ready:
    """The import of ours beside what each peer begins with."""
    statements = {OURS: statement, "torch": "import torch", "torchrec": "import torchrec"}
    timed = {who: line for who, line in statements.items() if who == OURS or who in setting.peers}

    def check() -> None:
        version = _run(["-c", f"{statement}\nimport shardwise\nprint(shardwise.__version__)"])
        if version != shardwise.__version__:
            raise AssertionError(f"a new process imports shardwise {version}, here it is {shardwise.__version__}")

    return Ready(check=check, rounds=partial(_imports, timed), graph=False, notes=timed)


def _imports(statements: Mapping[str, str], count: int) -> Series:
    seconds: dict[str, list[float]] = {who: [] for who in statements}
    for _ in range(count):
        for who, statement in statements.items():
            seconds[who].append(import_seconds(statement))
    return seconds


def import_seconds(statement: str) -> float:
    """Seconds of the statement in a process of its own."""
    code = f"import time\nbegin = time.perf_counter()\n{statement}\nprint(time.perf_counter() - begin)"
    return float(_run(["-W", "ignore", "-c", code]))


def _run(arguments: Sequence[str], cwd: Path | None = None) -> str:
    """The last line that a Python process prints, which has this shardwise first on its path."""
    path = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=SECONDS, cwd=cwd,
        env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}:\n{done.stdout}{done.stderr}")
    return (done.stdout.strip().splitlines() or [""])[-1]


def make_wheel(setting: Setting) -> Ready:
    """The size of the wheel: built from the checkout, or of the installed files as a wheel would compress them."""
    folder = Path(tempfile.mkdtemp(prefix="wheel"))
    built = _can_build()
    try:
        wheel = _built_wheel(folder) if built else _zipped(folder / "shardwise.whl")
    except BaseException:
        shutil.rmtree(folder)
        raise
    return Ready(
        check=partial(check_wheel, wheel), rounds=partial(_constant, {OURS: wheel.stat().st_size}), graph=False,
        close=partial(shutil.rmtree, folder), notes={"built": built},
    )  # fmt: skip


def _can_build() -> bool:
    """Whether this is a checkout, and setuptools is as new as pyproject.toml wants it."""
    root = PACKAGE.parent
    if not ((root / "pyproject.toml").is_file() and (root / "kernels").is_dir()):
        return False
    try:
        return int(importlib.metadata.version("setuptools").split(".")[0]) >= 77
    except importlib.metadata.PackageNotFoundError:
        return False


def _built_wheel(folder: Path) -> Path:
    """The wheel that pip would build, without network and isolation; in a copy, because building leaves files."""
    tree = shutil.copytree(PACKAGE.parent, folder / "tree", symlinks=True, ignore=LEFT_BEHIND)
    _run(["-c", _BUILD, str(folder)], cwd=tree)
    (wheel,) = folder.glob("*.whl")
    return wheel


def _zipped(to: Path) -> Path:
    with zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in installed_files():
            archive.write(path, f"shardwise/{path.relative_to(PACKAGE)}")
    return to


def check_wheel(wheel: Path) -> None:
    """Raise AssertionError if the wheel lacks a file of this shardwise, or has more than them and what describes it."""
    with zipfile.ZipFile(wheel) as archive:
        inside = {name for name in archive.namelist() if ".dist-info/" not in name}
    expected = {f"shardwise/{path.relative_to(PACKAGE).as_posix()}" for path in installed_files()}
    if inside != expected:
        raise AssertionError(f"the wheel lacks {sorted(expected - inside)[:5]}, has {sorted(inside - expected)[:5]}")


@cache
def installed_files() -> Sequence[Path]:
    """Files of this shardwise that a wheel has, through the links of a checkout."""
    files = [Path(folder) / name for folder, _, names in os.walk(PACKAGE, followlinks=True) for name in names]
    data = (PACKAGE / "kernels" / "tuned", PACKAGE / "migration")
    packed = [
        path for path in files if path.suffix in (".py", ".typed") or (path.suffix == ".json" and path.parent in data)
    ]
    return [path for path in packed if not path.relative_to(PACKAGE).as_posix().startswith(LEFT_OUT)]


def make_installed(setting: Setting) -> Ready:
    """Bytes on disk of shardwise, and of each peer without what it needs."""
    sizes = {OURS: sum(path.stat().st_size for path in installed_files())}
    for who, names in DISTRIBUTIONS.items():
        size = _distribution_bytes(names) if who in setting.peers else None
        if size is not None:
            sizes[who] = size

    def check() -> None:
        if (PACKAGE / "kernels" / "lookup" / "pooled.py") not in {*installed_files()}:
            raise AssertionError("the kernels are not among the files of this shardwise")

    return Ready(check=check, rounds=partial(_constant, sizes), graph=False)


def _distribution_bytes(names: Sequence[str]) -> int | None:
    """Of the files that the installed distribution lists; None if it is not installed."""
    for name in names:
        try:
            files = importlib.metadata.distribution(name).files or []
        except importlib.metadata.PackageNotFoundError:
            continue
        paths = [Path(str(file.locate())) for file in files if "__pycache__" not in file.parts]
        return sum(path.stat().st_size for path in paths if path.is_file())
    return None


def _constant(sizes: Mapping[str, int], count: int) -> Series:
    return {who: [float(size)] * count for who, size in sizes.items()}


_SUITES, _DEVICES = frozenset({"cpu", "full"}), frozenset({"cpu"})

CASES: Sequence[Case] = (
    *(
        Case(statement, "package", partial(make_import, statement=statement), _SUITES, _DEVICES, slow=True)
        for statement in ("import shardwise", "from shardwise import EmbeddingBagCollection")
    ),
    Case("wheel size", "package", make_wheel, _SUITES, _DEVICES, unit="bytes"),
    Case("installed size", "package", make_installed, _SUITES, _DEVICES, unit="bytes"),
)

"""What a user installs: one small wheel that holds every folder, also from a checkout that lost the links."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("data", "embeddings", "inference", "jagged", "kernels", "models", "perf", "planner", "sharding")
LEFT_BEHIND = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")


def checkout(to: Path) -> Path:
    """A copy of what git would archive, links as links."""
    shutil.copytree(ROOT, to, symlinks=True, ignore=LEFT_BEHIND)
    return to


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tree = checkout(tmp_path_factory.mktemp("wheel") / "tree")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tree / "out"), str(tree)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = (tree / "out").iterdir()
    return built


def test_the_wheel_holds_every_folder_and_nothing_else(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    assert {name.split("/")[0] for name in names} == {"shardwise"}
    assert {name.split("/")[1] for name in names if name.count("/") > 1} == {*FOLDERS, "served"}
    sources = {
        *(f"shardwise/{path.name}" for path in (ROOT / "shardwise").glob("*.py")),
        *(
            f"shardwise/{path.relative_to(ROOT / 'shardwise')}"
            for path in (ROOT / "shardwise" / "served").rglob("*.py")
        ),
        *(f"shardwise/{path.relative_to(ROOT)}" for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")),
        *(f"shardwise/{path.relative_to(ROOT)}" for path in (ROOT / "kernels" / "tuned").glob("*.json")),
        "shardwise/py.typed",
    }
    assert set(names) == sources


def test_the_wheel_is_small_and_pure_python(wheel: Path) -> None:
    assert wheel.stat().st_size < 1_500_000
    assert wheel.name.endswith("-py3-none-any.whl")


def test_the_unpacked_wheel_imports_from_itself(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    assert imported_from(tmp_path) == str(tmp_path / "shardwise" / "jagged" / "__init__.py")


def test_a_checkout_without_links_imports_through_the_root(tmp_path: Path) -> None:
    tree = checkout(tmp_path / "tree")
    for folder in FOLDERS:
        (tree / "shardwise" / folder).unlink()
    assert imported_from(tree) == str(tree / "jagged" / "__init__.py")


def imported_from(path: Path) -> str:
    """Where `shardwise.jagged` lies for a process that starts with `path` on its PYTHONPATH."""
    code = "import shardwise, shardwise.jagged; shardwise.KeyedJaggedTensor; print(shardwise.jagged.__file__)"
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=path,
        env={**os.environ, "PYTHONPATH": str(path)},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()

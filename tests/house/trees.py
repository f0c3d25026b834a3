"""Copies of this checkout with their links, with text in their place and without them, and what is built from each."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

from checkout import ROOT

FOLDERS = ("data", "embeddings", "fbgemm", "inference", "jagged", "kernels", "models", "perf", "planner", "sharding")
# how the links arrive: git; git with core.symlinks=false and most unpackers of zip files; archives that drop them
LINKS = ("links", "text", "missing")
# nothing that git would not archive
LEFT_BEHIND = shutil.ignore_patterns(
    *(".git", ".venv", ".peer", ".matrix", ".*_cache", ".hypothesis", ".benchmarks", "__pycache__", "*.egg-info"),
    *("build", "dist", "runs", "out"),
)


def checkout(to: Path) -> Path:
    """A copy of what git would archive, links as links."""
    shutil.copytree(ROOT, to, symlinks=True, ignore=LEFT_BEHIND)
    return without_links(to, "missing") if not (ROOT / "shardwise" / "kernels").is_dir() else to


def without_links(tree: Path, links: str) -> Path:
    for folder in FOLDERS if links != "links" else ():
        (tree / "shardwise" / folder).unlink(missing_ok=True)
        if links == "text":
            (tree / "shardwise" / folder).write_text(f"../{folder}")
    return tree


def run_process(*arguments: str, fails: bool = False, **options: Any) -> str:
    """What a Python process prints, which ends well, or `fails`."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, **options)
    printed: str = done.stdout + done.stderr
    assert (done.returncode != 0) == fails, printed
    return printed if fails else done.stdout.strip()


def run_in_tree(tree: Path, *arguments: str, fails: bool = False) -> str:
    """The same by a process that works in a tree, and finds shardwise there."""
    return run_process(*arguments, fails=fails, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)})


def build_tree(tree: Path, *options: str, fails: bool = False) -> str:
    return run_process("-m", "build", "--no-isolation", "--outdir", str(tree / "out"), *options, str(tree), fails=fails)


def wheel_of(tree: Path) -> Path:
    """The wheel that was built from a tree."""
    (built,) = (tree / "out").glob("*.whl")
    return built


def archive_of(tree: Path) -> Path:
    """The source archive that was built from a tree."""
    (built,) = (tree / "out").glob("*.tar.gz")
    return built


def in_wheel(wheel: Path) -> dict[str, tuple[int, bytes]]:
    """Mode and bytes of each file in a wheel, without the list of them."""
    with zipfile.ZipFile(wheel) as archive:
        entries = [entry for entry in archive.infolist() if not entry.filename.endswith("/RECORD")]
        return {entry.filename: (entry.external_attr >> 16, archive.read(entry)) for entry in entries}


def in_archive(source: Path) -> dict[str, tuple[int, bytes]]:
    """The same of a source archive, whose entries are files and folders; names without its folder's."""
    found = {}
    with tarfile.open(source) as archive:
        for entry in archive.getmembers():
            file = archive.extractfile(entry)
            assert entry.isdir() or (entry.isfile() and file is not None), f"{entry.name} is no file"
            if file is not None:
                found[entry.name.split("/", 1)[1]] = (stat.S_IMODE(entry.mode), file.read())
    return found


class Trees(dict[str, Path]):
    """Trees of each kind of LINKS and "archive", an unpacked one, by name; wheel and archive of each in its out/."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def __missing__(self, kind: str) -> Path:
        if kind == "archive":
            with tarfile.open(archive_of(self["links"])) as archive:
                archive.extractall(self._folder / kind, filter="data")
            (tree,) = (self._folder / kind).iterdir()
        else:
            tree = without_links(checkout(self._folder / kind), kind)
        self[kind] = tree
        # the archive from the tree, and the wheel from the tree too
        build_tree(tree, "--sdist", "--wheel")
        return tree

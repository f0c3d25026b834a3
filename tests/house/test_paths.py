"""Links of the documents and paths in comments lead to files that are there."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import ROOT

LINK = re.compile(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)")
FOLDERS = "data|docs|embeddings|examples|inference|jagged|kernels|models|perf|planner|sharding|shardwise|tests"
PATH = re.compile(rf"(?<![\w/.*-])((?:{FOLDERS})/[\w/]+\.(?:py|md|sh|toml|json|svg))\b")
# what was true when it was written, and what names files that it makes up
EXEMPT = re.compile(r"(CHANGELOG|FACTS|docs/evidence/beside_\w+)\.md|tests/(house|perf/evidence|perf/suite)/.*")


def tracked(*endings: str) -> list[Path]:
    """Files of the repository, without results, which name what they measured as it was called."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout of git")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = [ROOT / name for name in listed.split("\0") if name.endswith(endings) and "results/" not in name]
    return [path for path in paths if path.exists() and not path.is_symlink()]


def broken_links(path: Path, text: str) -> Iterator[str]:
    for target in LINK.findall(text):
        if not (path.parent / target).exists():
            yield f"{path.relative_to(ROOT)} links {target}"


def broken_paths(path: Path, text: str) -> Iterator[str]:
    for target in PATH.findall(text):
        if not (ROOT / target).exists():
            yield f"{path.relative_to(ROOT)} names {target}"


def test_links_of_documents_lead_somewhere() -> None:
    assert [line for path in tracked(".md") for line in broken_links(path, path.read_text())] == []


def test_paths_in_texts_and_comments_are_of_files() -> None:
    files = [path for path in tracked(".md", ".py", ".sh") if not EXEMPT.fullmatch(str(path.relative_to(ROOT)))]
    assert [line for path in files for line in broken_paths(path, path.read_text())] == []


def test_a_broken_link_and_a_broken_path_are_seen() -> None:
    here = ROOT / "docs" / "a.md"
    assert [*broken_links(here, "[x](../README.md#y) [y](../gone.md)")] == ["docs/a.md links ../gone.md"]
    assert [*broken_paths(here, "`kernels/_op.py`, kernels/gone.py")] == ["docs/a.md names kernels/gone.py"]

"""Links of the documents lead to files and headings that are there, and paths in comments to files."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import ROOT

LINK = re.compile(r"\]\(([^)#\s:]*)(?:#([^)\s]*))?\)")
CODE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
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
    for target, anchor in LINK.findall(CODE.sub("", text)):
        linked = path.parent / target
        if not linked.exists():
            yield f"{path.relative_to(ROOT)} links {target}"
        elif anchor and (not target or target.endswith(".md")):
            headings = linked.read_text() if target else text
            if anchor not in anchors(headings):
                yield f"{path.relative_to(ROOT)} links {target}#{anchor}"


def anchors(text: str) -> set[str]:
    """Those of the headings of a document, as GitHub makes them and mkdocs by mkdocs.yml."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ +(.+?) *#*$", CODE.sub("", text), re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", words.lower()).replace(" ", "-")
        # the second of a name has another ending on GitHub (-1) than on the site (_1): no link should need it
        seen[slug] += 1
        found |= {slug} if seen[slug] == 1 else set()
    return found


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
    text = "# A b, `c`\n[x](../README.md) [y](../gone.md) [z](../README.md#gone) [b](#a-b-c) [c](#a-b)\n"
    assert [*broken_links(here, text)] == [
        "docs/a.md links ../gone.md",
        "docs/a.md links ../README.md#gone",
        "docs/a.md links #a-b",
    ]
    assert [*broken_paths(here, "`kernels/_op.py`, kernels/gone.py")] == ["docs/a.md names kernels/gone.py"]

"""What messages and pages tell a newcomer to install exists: the index has no release of shardwise."""

from __future__ import annotations

import re
import sys

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib
from test_layering import ROOT, files

from shardwise._version import how_to_install

# by name, with or without extras; a checkout is a path
FROM_INDEX = re.compile(r"\bpip3? (?:install|download)\b[^\n#]*(?<!of)[\s'\"]shardwise\b(?!/)|\bshardwise\[[a-z]")
KINDS = ("*.py", "*.md", "*.toml", "*.txt", "Makefile", "run")


def pages() -> dict[str, str]:
    paths = {path for kind in KINDS for path in files(kind)} - {"tests/house/test_install.py"}
    return {path: (ROOT / path).read_text() for path in sorted(paths)}


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("pip install shardwise", True), ("pip install 'shardwise[cli]'", True), ("pip install -U \"shardwise\"", True),
        ("needs shardwise[serve]", True), ("pip install torch; cd shardwise", True),
        ("pip install '.[cli]' # of shardwise", False), ("pip install -e '.[dev]'", False),
        ("pip install shardwise/", False), ("shardwise[0]", False), ("import shardwise", False),
    ],
)  # fmt: skip
def test_the_pattern_sees(text: str, found: bool) -> None:
    assert bool(FROM_INDEX.search(text)) == found


def test_nothing_is_installed_from_the_index_by_our_name() -> None:
    """Errors and pages said "pip install shardwise[cli]", which found no such package.

    Once there is a release, `how_to_install` and this test say so.
    """
    found = []
    for path, text in pages().items():
        for number, line in enumerate(text.splitlines(), 1):
            if FROM_INDEX.search(line) and path != "tests/house/test_install.py":
                found.append(f"{path}:{number}: {line.strip()}")
    assert not found, "\n".join(found)


def test_the_extras_that_are_named_are_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = set()
    for path, text in pages().items():
        found = re.findall(r"how_to_install\(['\"](\w+)['\"]\)|\bextra `\[?(\w+)\]?`|'\.\[([\w,]+)\]'", text)
        names = {name for groups in found for group in groups for name in group.split(",") if name}
        assert names <= set(extras), path
        named |= names
    assert {"cli", "data", "migrate", "perf", "serve", "cpu"} <= named
    assert how_to_install("cli") == "pip install '.[cli]' in a checkout of shardwise"

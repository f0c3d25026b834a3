"""docs/checkpoints.md says what is so: its snippets give what stands beside them."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from test_docs_jagged import outcome, plain, steps

from shardwise.checkpoint import LoadPolicy

PAGE = Path(__file__).parents[1] / "docs" / "checkpoints.md"


def test_every_snippet_gives_what_stands_beside_it() -> None:
    names: dict[str, Any] = {"__name__": "docs"}
    wrong, said = [], 0
    for line, node, expected in steps(PAGE.read_text()):
        found = outcome(node, names, fails=False)
        said += expected is not None
        if expected is not None and plain(found or "") != plain(expected):
            wrong.append(f"line {line}: {plain(found or '')!r} is not {plain(expected)!r}")
    assert not wrong, "\n".join(wrong)
    assert said > 10


def test_every_policy_has_a_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert rows == [one.name for one in fields(LoadPolicy)]

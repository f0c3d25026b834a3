"""docs/reliability.md says what is so: its snippets give what stands beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from test_docs_jagged import outcome, plain, steps

PAGE = Path(__file__).parents[1] / "docs" / "reliability.md"


def test_every_snippet_gives_what_stands_beside_it() -> None:
    names: dict[str, Any] = {"__name__": "docs"}
    said = [
        (plain(outcome(node, names, fails=False) or ""), plain(expected or ""))
        for _, node, expected in steps(PAGE.read_text())
    ]
    assert [found for found, _ in said] == [expected for _, expected in said]
    assert ("256", "256") in said

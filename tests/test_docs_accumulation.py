"""docs/accumulation.md says what is so: its snippets give what stands beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from test_docs_jagged import outcome, plain, steps

PAGE = Path(__file__).parents[1] / "docs" / "accumulation.md"


def test_every_snippet_gives_what_stands_beside_it() -> None:
    names: dict[str, Any] = {"__name__": "docs"}
    wrong, said = [], 0
    for line, node, expected in steps(PAGE.read_text()):
        found = outcome(node, names, fails=False)
        if expected is not None:
            said += 1
            if plain(found or "") != plain(expected):
                wrong.append(f"line {line}: {plain(found or '')!r} is not {plain(expected)!r}")
    assert not wrong, "\n".join(wrong)
    assert said == 5

"""docs/accumulation.md says what is so: its snippets give what stands beside them."""

from __future__ import annotations

from pathlib import Path

from snippets import wrong_snippets

PAGE = Path(__file__).parents[2] / "docs" / "accumulation.md"


def test_every_snippet_gives_what_stands_beside_it() -> None:
    wrong, said = wrong_snippets(PAGE)
    assert not wrong, "\n".join(wrong)
    assert said == 5

"""docs/accumulation.md says what is so: its snippets give what stands beside them."""

from __future__ import annotations

from checkout import ROOT
from snippets import wrong_snippets

PAGE = ROOT / "docs" / "accumulation.md"


def test_every_snippet_gives_what_stands_beside_it() -> None:
    wrong, said = wrong_snippets(PAGE)
    assert not wrong, "\n".join(wrong)
    assert said == 5

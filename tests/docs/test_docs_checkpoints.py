"""docs/checkpoints.md says what is so: its snippets give what stands beside them."""

from __future__ import annotations

import re
from dataclasses import fields

from checkout import ROOT
from snippets import wrong_snippets

from shardwise.checkpoint import LoadPolicy

PAGE = ROOT / "docs" / "checkpoints.md"


def test_every_snippet_gives_what_stands_beside_it() -> None:
    wrong, said = wrong_snippets(PAGE)
    assert not wrong, "\n".join(wrong)
    assert said > 10


def test_every_policy_has_a_row() -> None:
    rows = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE)
    assert rows == [one.name for one in fields(LoadPolicy)]

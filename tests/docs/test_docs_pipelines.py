"""docs/pipelines.md says what is so: its snippets give what stands beside them, its picture is that of the numbers."""

from __future__ import annotations

import json

from checkout import ROOT
from snippets import wrong_snippets

from shardwise.perf.evidence.pipeline_overlap import PICTURE, RESULT, hidden, picture

PAGE = ROOT / "docs" / "pipelines.md"


def test_every_snippet_gives_what_stands_beside_it() -> None:
    wrong, said = wrong_snippets(PAGE)
    assert not wrong, "\n".join(wrong)
    assert said == 7


def test_the_picture_is_drawn_from_the_numbers() -> None:
    assert PICTURE.read_text() == picture(json.loads(RESULT.read_text()))
    assert f"pictures/{PICTURE.name}" in PAGE.read_text()


def test_hidden_is_the_part_of_the_delay_that_costs_nothing() -> None:
    assert hidden(100.0, 140.0, 100.0) == 1.0
    assert hidden(100.0, 140.0, 110.0) == 0.75
    assert hidden(100.0, 140.0, 140.0) == 0.0

"""docs/pipelines.md says what is so: its snippets give what stands beside them, its picture is that of the numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from test_docs_jagged import outcome, plain, steps

from shardwise.perf.pipeline_overlap import PICTURE, RESULT, hidden, picture

PAGE = Path(__file__).parents[1] / "docs" / "pipelines.md"


def test_every_snippet_gives_what_stands_beside_it() -> None:
    names: dict[str, Any] = {"__name__": "docs"}
    wrong, said = [], 0
    for line, node, expected in steps(PAGE.read_text()):
        found = outcome(node, names, fails=re.match(r"\w+Error: ", expected or "") is not None)
        if found != "None" or expected is not None:
            said += expected is not None
            if plain(found or "") != plain(expected or ""):
                wrong.append(f"line {line}: {plain(found or '')!r} is not {plain(expected or '')!r}")
    assert not wrong, "\n".join(wrong)
    assert said == 7


def test_the_picture_is_drawn_from_the_numbers() -> None:
    assert PICTURE.read_text() == picture(json.loads(RESULT.read_text()))
    assert f"pictures/{PICTURE.name}" in PAGE.read_text()


def test_hidden_is_the_part_of_the_delay_that_costs_nothing() -> None:
    assert hidden(100.0, 140.0, 100.0) == 1.0
    assert hidden(100.0, 140.0, 110.0) == 0.75
    assert hidden(100.0, 140.0, 140.0) == 0.0

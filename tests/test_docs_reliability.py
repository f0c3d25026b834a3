"""docs/reliability.md says what is so: its snippets give what stands beside them, its table is that of the soak."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from test_docs_jagged import outcome, plain, steps

from shardwise.perf.soak import summary

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reliability.md"


def test_every_snippet_gives_what_stands_beside_it() -> None:
    names: dict[str, Any] = {"__name__": "docs"}
    said = [
        (plain(outcome(node, names, fails=False) or ""), plain(expected or ""))
        for _, node, expected in steps(PAGE.read_text())
    ]
    assert [found for found, _ in said] == [expected for _, expected in said]
    assert ("256", "256") in said


def test_the_table_has_the_numbers_of_the_recorded_soak() -> None:
    report = json.loads((ROOT / "perf" / "results" / "cpu" / "soak.json").read_text())
    page = PAGE.read_text()
    for row in summary(report):
        assert row in page
    assert abs(report["test_auc"]["disturbed"] - report["test_auc"]["undisturbed"]) <= 0.005

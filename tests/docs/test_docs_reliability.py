"""docs/reliability.md says what is so: its snippets give what stands beside them, its table is that of the soak."""

from __future__ import annotations

import json

from checkout import ROOT
from snippets import wrong_snippets

from shardwise.perf.evidence.soak import summary

PAGE = ROOT / "docs" / "reliability.md"


def test_every_snippet_gives_what_stands_beside_it() -> None:
    wrong, said = wrong_snippets(PAGE)
    assert not wrong, "\n".join(wrong)
    assert said >= 1


def test_the_table_has_the_numbers_of_the_recorded_soak() -> None:
    report = json.loads((ROOT / "perf" / "results" / "cpu" / "soak.json").read_text())
    page = PAGE.read_text()
    for row in summary(report):
        assert row in page
    assert abs(report["test_auc"]["disturbed"] - report["test_auc"]["undisturbed"]) <= 0.005

"""What `make evidence NAME=tier_times` fits and says; what is kept is within its bound."""

from __future__ import annotations

import argparse
import json

import pytest

from shardwise.perf.evidence.tiers import times
from shardwise.perf.evidence.tiers.times import Shape
from shardwise.planner.cost.cache import Links
from shardwise.sharding.calibration.calibrate import Brought, fit_links


def test_speeds_that_made_the_times_are_found() -> None:
    links = Links(link_gb_s=4.0, find_ns=7.0, miss_ns=150.0, batch_us=90.0)
    brought = [
        Brought(wanted, missed, record, links.prefetch_ms(missed, wanted, record), 0.5)
        for wanted, missed, record in (
            (100, 10, 64),
            (4000, 900, 64),
            (3000, 100, 576),
            (3000, 2000, 576),
            (900, 0, 128),
        )
    ]
    found = fit_links(brought)
    for name in ("link_gb_s", "find_ns", "miss_ns", "batch_us"):
        assert getattr(found, name) == pytest.approx(getattr(links, name), rel=1e-6)


def test_a_tiny_run_predicts_and_measures_every_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    small = [
        Shape("a", 2000, 8, 16, 4, "RowWiseAdagrad", 0.2),
        Shape("b", 3000, 16, 32, 2, "Adam", 0.1, 0.0),
        Shape("c", 1000, 4, 64, 2, "SGD", 0.3),
    ]
    monkeypatch.setattr(times, "CALIBRATED", small[:2])
    monkeypatch.setattr(times, "HELD_OUT", small[2:])
    monkeypatch.setattr(times, "BOUND", -1.0)
    report = times.run(argparse.Namespace(turns=2, write=False))
    assert not report.good and "- shape c: predicted " in report.text
    assert report.text.count("| a |") == report.text.count("| b |") == report.text.count("| c, held out |") == 1


def test_predictions_that_are_kept_are_within_their_bound() -> None:
    kept = json.loads(times.RESULT.read_text(encoding="utf-8"))
    held_out = [entry for entry in kept["shapes"] if entry["held_out"]]
    assert [entry["shape"]["name"] for entry in held_out] == [shape.name for shape in times.HELD_OUT]
    assert all(abs(entry["ratio"] - 1) <= times.BOUND for entry in held_out)

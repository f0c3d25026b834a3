"""The evidence of a cached step measures what it says, on tables that are small; what is kept is within its bounds."""

from __future__ import annotations

import argparse
import json

import pytest

from shardwise.perf.evidence.tiers import tier_step


def test_slots_give_the_hits_that_a_step_is_measured_at(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"R": 4000, "D": 4, "B": 64, "POOL": 6}.items():
        monkeypatch.setattr(tier_step, name, value)
    report = tier_step.run(argparse.Namespace(turns=2, write=False))
    result = json.loads(report.text)
    rates = [one["hit_rate"] for one in result["cached"]]
    assert rates[0] == 1.0 and 0.8 < rates[1] < 1.0 and 0.45 < rates[2] < 0.75
    assert result["turns"] == 2 and all(one["ratio"] > 0 for one in result["cached"])


def test_the_steps_that_were_measured_are_within_their_bounds() -> None:
    kept = json.loads(tier_step.RESULT.read_text(encoding="utf-8"))
    assert [one["bound"] for one in kept["cached"]] == [*tier_step.BOUNDS.values()]
    assert all(one["ratio"] <= one["bound"] for one in kept["cached"])

"""What `make evidence NAME=criteo_rows` compares and says; what is kept is within its bound."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from optional import need

from shardwise.perf.evidence.clicks import criteo_rows

need("numba")
need("pyarrow")


def test_all_sides_read_the_same_rows(tmp_path: Path) -> None:
    path = tmp_path / "day_0.tsv"
    criteo_rows.generate(path, criteo_rows.BATCH)
    assert {call() for call in criteo_rows.sides(path).values()} == {criteo_rows.BATCH}


def test_ratios_are_of_one_round_and_slow_columns_are_named() -> None:
    ours, theirs = [(2.0, 1.0), (4.0, 2.0), (8.0, 4.0)], [(1.0, 2.0), (2.0, 4.0), (4.0, 8.0)]
    turns = {**dict.fromkeys(criteo_rows.PEERS, theirs), **dict.fromkeys(criteo_rows.BOUNDED, ours)}
    entries = criteo_rows.compare({**turns, criteo_rows.PLAIN: ours[:1]})
    assert [(entry["elapsed"]["median"], entry["on_cores"]["median"]) for entry in entries] == [(0.5, 2.0)] * 6
    bad = criteo_rows.section_of(entries).bad
    assert bad == [
        "columns: 0.50 of the rows a second of pyarrow, streamed",
        "columns: 0.50 of the rows a second of pyarrow, whole",
        # to the one that has all cores by time on cores, 2.0
        "batches: 0.50 of the rows a second of pyarrow, streamed",
    ]


def test_what_is_kept_is_as_it_has_to_be() -> None:
    kept = json.loads(criteo_rows.RESULT.read_text(encoding="utf-8"))
    assert kept["bad"] == []
    bounded = [entry for entry in kept["ratios"] if entry["side"] in criteo_rows.BOUNDED]
    assert len(bounded) == 4
    assert min(entry[criteo_rows.clock_of(entry)]["median"] for entry in bounded) >= criteo_rows.BOUND
    recomputed = criteo_rows.compare(kept["microseconds_a_row"])
    for entry, again in zip(kept["ratios"], recomputed, strict=True):
        assert again["elapsed"]["median"] == pytest.approx(entry["elapsed"]["median"], rel=0.01)

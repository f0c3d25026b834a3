"""The evidence of the file tier measures what it says, on a file that is small."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from shardwise.perf.evidence.tiers import file_rows


@pytest.mark.skipif(sys.platform != "linux", reason="reads past Linux's page cache")
def test_the_report_has_rates_of_the_disk_and_of_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    kinds = ["read, cold", "read, cold, not asked ahead", "read, warm", "write, cold", "write, warm"]
    rates = file_rows.record_rates(tmp_path, 1 << 22, 512, 1000, 2)
    assert [*rates] == kinds and all(rate > 0 for rate in rates.values())
    monkeypatch.setattr(file_rows, "disk_rates", lambda *args: dict.fromkeys(file_rows.THREADS, 1000.0))
    monkeypatch.setattr(file_rows, "record_rates", lambda folder, nbytes, size, *args: dict.fromkeys(kinds, 0.5 * size))
    report = file_rows.run(argparse.Namespace(folder=tmp_path, gib=1, rows=10, turns=1))
    assert "| pages of cold reads, share of the disk's best | 26% | 96% | 205% |" in report.text and not report.good


def test_a_record_touches_the_pages_that_its_bytes_lie_on() -> None:
    # of 8 rows of 1,536 bytes, on 3 pages, two lie on two pages each
    pages = {(row * 1536 + byte) // 4096: row for row in range(8) for byte in range(1536)}
    assert len(pages) == 3 and [file_rows.pages_of(size) for size in (512, 1536, 4096, 6144)] == [1, 1.25, 1, 2]


def test_rows_are_distinct_and_of_the_whole_file() -> None:
    rows = file_rows.some_rows(1000, 300)
    assert rows.numel() == 300 and bool((rows.diff() > 0).all()) and rows[0] < 50 and rows[-1] > 950

"""A RAM cache over a file holds what the file would, writes below what changed, and keeps the rows used last."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch
from torch import Tensor

from shardwise.embeddings.tiers import FileRecords, HostRecords, RamOverFile

ROWS, BYTES = 1000, 64


class LoggedRecords(HostRecords):
    """A backing that notes its calls, and fails when it is told to."""

    def __init__(self) -> None:
        super().__init__(ROWS, BYTES)
        self.calls: list[tuple[str, list[int]]] = []
        self.full = False

    def read(self, rows: Tensor, out: Tensor) -> None:
        self.calls.append(("read", rows.tolist()))
        super().read(rows, out)

    def write(self, rows: Tensor, records: Tensor) -> None:
        self.calls.append(("write", rows.tolist()))
        if self.full:
            raise OSError(errno.ENOSPC, "full")
        super().write(rows, records)


def records_of(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8)[:, None].expand(-1, BYTES).contiguous()


def read(cache: RamOverFile, *rows: int) -> list[int]:
    out = torch.zeros(len(rows), BYTES, dtype=torch.uint8)
    cache.read(torch.tensor(rows), out)
    assert (out == out[:, :1]).all()
    return out[:, 0].tolist()


@pytest.mark.parametrize("ram_rows", [1, 10, 300, ROWS, 10 * ROWS])
def test_after_a_flush_the_file_has_every_byte(ram_rows: int, tmp_path: Path) -> None:
    """Calls of more rows than the cache has places among them."""
    file = FileRecords(ROWS, BYTES, tmp_path, name="user")
    cache, whole = RamOverFile(file, ROWS, BYTES, ram_rows=ram_rows), HostRecords(ROWS, BYTES)
    for _ in range(100):
        rows = torch.randperm(ROWS)[: int(torch.randint(0, 400, ()))].sort().values
        records = torch.randint(0, 256, (rows.numel(), BYTES), dtype=torch.uint8)
        cache.write(rows, records)
        whole.write(rows, records)
        rows = torch.randperm(ROWS)[: int(torch.randint(0, 400, ()))].sort().values
        cached, expected = (torch.full((rows.numel(), BYTES), 7, dtype=torch.uint8) for _ in range(2))
        cache.read(rows, cached)
        whole.read(rows, expected)
        assert torch.equal(cached, expected)
    cache.flush()
    below = torch.full((ROWS, BYTES), 7, dtype=torch.uint8)
    file.read(torch.arange(ROWS), below)
    assert torch.equal(below, whole.records)
    saves = cache.saves
    cache.flush()
    assert cache.saves == saves
    cache.close()


def test_rows_whose_last_call_is_longest_ago_go_first() -> None:
    below = LoggedRecords()
    cache = RamOverFile(below, ROWS, BYTES, ram_rows=4)
    cache.write(torch.tensor([10, 20]), records_of(1, 2))
    cache.write(torch.tensor([30, 40]), records_of(3, 4))
    assert read(cache, 10) == [1] and not below.calls
    # 20 was used longest ago, then the first of the second call
    assert read(cache, 50, 60) == [0, 0]
    assert below.calls == [("read", [50, 60]), ("write", [20, 30])]
    below.calls.clear()
    assert read(cache, 10, 40, 50, 60) == [1, 4, 0, 0] and not below.calls
    assert read(cache, 20, 30) == [2, 3]
    assert below.calls == [("read", [20, 30]), ("write", [10, 40])]
    assert (cache.hits, cache.misses, cache.saves) == (5, 4 + 4, 4)


def test_rows_that_nobody_wrote_are_not_written_below() -> None:
    below = LoggedRecords()
    cache = RamOverFile(below, ROWS, BYTES, ram_rows=2)
    for row in range(10):
        read(cache, row)
    assert [name for name, _ in below.calls] == ["read"] * 10
    cache.write(torch.tensor([9]), records_of(1))
    read(cache, 1, 2)
    cache.flush()
    assert [call for call in below.calls if call[0] == "write"] == [("write", [9])]


def test_a_save_that_fails_loses_no_row() -> None:
    below = LoggedRecords()
    cache = RamOverFile(below, ROWS, BYTES, ram_rows=2)
    cache.write(torch.tensor([1, 2]), records_of(1, 2))
    below.full = True
    with pytest.raises(OSError, match="full"):
        read(cache, 3)
    assert read(cache, 1, 2) == [1, 2]
    with pytest.raises(OSError, match="full"):
        cache.flush()
    below.full = False
    assert read(cache, 3, 4) == [0, 0] and read(cache, 1, 2) == [1, 2]


def test_what_is_remembered_of_calls_stays_small() -> None:
    """A table of which all that is used lies in memory evicts nothing, for as long as it trains."""
    cache = RamOverFile(LoggedRecords(), ROWS, BYTES, ram_rows=50)
    out = torch.zeros(40, BYTES, dtype=torch.uint8)
    for _ in range(200):
        cache.read(torch.arange(40), out)
    assert len(cache._touched) <= 6
    assert cache.misses == 40


def test_a_cache_that_grows_keeps_its_rows(tmp_path: Path) -> None:
    cache = RamOverFile(FileRecords(ROWS, BYTES, tmp_path, name="user"), ROWS, BYTES, ram_rows=2)
    cache.write(torch.tensor([1, 2, 3]), records_of(1, 2, 3))
    cache.grow(2 * ROWS)
    cache.write(torch.tensor([2 * ROWS - 1]), records_of(9))
    assert read(cache, 1, 2, 3, ROWS, 2 * ROWS - 1) == [1, 2, 3, 0, 9]
    cache.close()

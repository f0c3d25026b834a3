"""Backings hold bytes: what was written last comes back, row by row, from memory and from files alike."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TypeGuard
from unittest.mock import Mock, call

import pytest
import torch
from torch import Tensor

from shardwise.embeddings.tiers import Backing, FileRecords, HostRecords, RamOverFile, backing as backings, files
from shardwise.kernels.files import rows as file_rows

ROWS, BYTES = 1000, 48

BACKINGS: dict[str, Callable[[int, int, Path], Backing]] = {
    "host": lambda rows, size, folder: HostRecords(rows, size),
    "file": lambda rows, size, folder: FileRecords(rows, size, folder, name="user"),
    "mapped file": lambda rows, size, folder: FileRecords(rows, size, folder, name="user", how="mmap"),
    "memory over a file": lambda rows, size, folder: RamOverFile(
        FileRecords(rows, size, folder, name="user"), rows, size, ram_rows=150
    ),
}
all_backings = pytest.mark.parametrize("make", BACKINGS.values(), ids=BACKINGS)


def some_rows(rows: int, most: int) -> Tensor:
    """Distinct rows, ascending; often neighbours, sometimes none."""
    n = int(torch.randint(0, most + 1, ()))
    if torch.rand(()) < 0.3:
        start = int(torch.randint(0, rows - n + 1, ()))
        return torch.arange(start, start + n)
    return torch.randperm(rows)[:n].sort().values


def some_records(n: int, size: int = BYTES) -> Tensor:
    return torch.randint(0, 256, (n, size), dtype=torch.uint8)


@all_backings
def test_rows_are_what_was_written_last(make: Callable[[int, int, Path], Backing], tmp_path: Path) -> None:
    backing, written = make(ROWS, BYTES, tmp_path), dict[int, bytes]()
    for _ in range(200):
        rows, records = some_rows(ROWS, 200), some_records(200)
        records = records[: rows.numel()]
        backing.write(rows, records)
        written |= {row: bytes(record.tolist()) for row, record in zip(rows.tolist(), records, strict=True)}
        rows = some_rows(ROWS, 300)
        out = torch.full((rows.numel(), BYTES), 77, dtype=torch.uint8)
        backing.read(rows, out)
        assert [bytes(record.tolist()) for record in out] == [written.get(row, bytes(BYTES)) for row in rows.tolist()]
    backing.close()
    backing.close()


@all_backings
def test_a_backing_that_grows_keeps_its_rows(make: Callable[[int, int, Path], Backing], tmp_path: Path) -> None:
    backing = make(ROWS, BYTES, tmp_path)
    records, out = some_records(ROWS), torch.empty(2 * ROWS, BYTES, dtype=torch.uint8)
    backing.write(torch.arange(ROWS), records)
    backing.grow(2 * ROWS)
    backing.read(torch.arange(2 * ROWS), out)
    assert torch.equal(out[:ROWS], records) and not out[ROWS:].any()
    with pytest.raises(ValueError, match="2,000 rows cannot shrink to 1,999"):
        backing.grow(2 * ROWS - 1)
    backing.close()


@all_backings
@pytest.mark.parametrize(
    ("rows", "error", "words"),
    [
        ([3, 3], ValueError, "ascending and distinct"),
        ([4, 3], ValueError, "ascending and distinct"),
        ([-1, 3], IndexError, r"row -1 is outside \[0, 1000\)"),
        ([3, 1000], IndexError, r"row 1000 is outside \[0, 1000\)"),
        ([1, 2, 3], ValueError, r"rows \[3\] with records \[2, 48\]"),
    ],
)
def test_rows_that_do_not_fit_are_refused(
    make: Callable[[int, int, Path], Backing], rows: list[int], error: type[Exception], words: str, tmp_path: Path
) -> None:
    backing, records = make(ROWS, BYTES, tmp_path), some_records(2)
    for move in (backing.read, backing.write):
        with pytest.raises(error, match=words):
            move(torch.tensor(rows), records)
    backing.close()


def test_files_are_read_and_written_without_loops_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_rows, "_loops", lambda: None)
    test_rows_are_what_was_written_last(BACKINGS["file"], tmp_path)


def test_what_the_system_does_not_move_at_once_is_moved_piece_by_piece(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A signal may end a call early, and Linux moves less than 2 GiB a call: loops stop there, and go on behind it."""
    calls = list[int]()

    def stops(file: int, rows: Tensor, records: Tensor) -> int:
        calls.append(rows.numel())
        return whole(file, rows[:3], records[:3]) or 0

    for name in ("read_file_rows", "write_file_rows"):
        whole = getattr(file_rows, name)
        if whole(0, torch.arange(0), torch.empty(0, BYTES, dtype=torch.uint8)) is None:
            pytest.skip("no loops here")
        with monkeypatch.context() as patched:
            patched.setattr(files, name, stops)
            test_rows_are_what_was_written_last(BACKINGS["file"], tmp_path)
    assert len(calls) > 1000


def test_records_in_memory_are_moved_in_place() -> None:
    backing = HostRecords(ROWS, BYTES)
    records = some_records(2)
    backing.records[torch.tensor([5, 7])] = records
    out = torch.empty(2, BYTES, dtype=torch.uint8)
    backing.read(torch.tensor([5, 7]), out)
    assert torch.equal(out, records)


def test_memory_is_taken_when_it_is_written() -> None:
    """4 GiB, of which nothing is written."""
    before = resident_bytes()
    backing = HostRecords(1 << 20, 4096)
    assert resident_bytes() - before < 1 << 28
    backing.close()


def test_memory_that_no_machine_has_is_refused() -> None:
    with pytest.raises(MemoryError, match="records of 1,099,511,627,776 rows"):
        HostRecords(1 << 40, 512)


def test_memory_that_the_system_does_not_give_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit on memory that this machine would have is met when the memory is mapped."""
    monkeypatch.setattr(backings, "require_memory", lambda *args: None)
    for rows in (1 << 40, 1 << 56):
        with pytest.raises(MemoryError, match=f"records of {rows:,} rows: .* which the system does not give"):
            HostRecords(rows, 512)


def test_pinned_records_are_locked_in_place_and_unlocked(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Mock(cudaHostRegister=Mock(return_value=0), cudaHostUnregister=Mock(return_value=0))
    monkeypatch.setattr(backings, "_runtime", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    backing = HostRecords(ROWS, BYTES, pinned=True)
    first = backing.records.data_ptr()
    backing.grow(2 * ROWS)
    second = backing.records.data_ptr()
    backing.close()
    lock, unlock = call.cudaHostRegister, call.cudaHostUnregister
    assert runtime.mock_calls == [
        lock(first, ROWS * BYTES, 0), lock(second, 2 * ROWS * BYTES, 0), unlock(first), unlock(second)
    ]  # fmt: skip


def is_here(backing: Backing) -> TypeGuard[HostRecords]:
    return isinstance(backing, HostRecords)


def test_records_of_several_tables_share_a_memory_until_the_last_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = Mock(cudaHostRegister=Mock(return_value=0), cudaHostUnregister=Mock(return_value=0))
    monkeypatch.setattr(backings, "_runtime", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    one, two, three = [part for part in backings.side_by_side(HostRecords, [3, 5, 4], BYTES) if is_here(part)]
    assert two.follows(one) and three.follows(two) and not three.follows(one) and not one.follows(two)
    first = one.records.data_ptr()
    assert [two.records.data_ptr(), three.records.data_ptr()] == [first + 3 * BYTES, first + 8 * BYTES]
    records = some_records(5)
    two.write(torch.arange(5), records)
    assert not one.records.any() and not three.records.any()
    # all of it once, whoever asks
    for part in (two, one):
        part.pin()
    assert runtime.mock_calls == [call.cudaHostRegister(first, 12 * BYTES, 0)]
    two.grow(6)
    assert torch.equal(two.records[:5], records) and not two.follows(one) and not three.follows(two)
    apart = copy.deepcopy(one)
    assert not apart.follows(one) and not two.follows(apart) and apart.records.data_ptr() != first
    for part in (one, three):
        assert call.cudaHostUnregister(first) not in runtime.mock_calls
        part.close()
        part.close()
    assert call.cudaHostUnregister(first) in runtime.mock_calls
    for part in (two, apart):
        part.close()


def test_backings_of_others_are_made_one_by_one() -> None:
    made: list[tuple[int, int]] = []

    def below(rows: int, record_bytes: int) -> HostRecords:
        made.append((rows, record_bytes))
        return HostRecords(rows, record_bytes)

    one, two = [part for part in backings.side_by_side(below, [3, 5], BYTES) if is_here(part)]
    assert made == [(3, BYTES), (5, BYTES)] and not two.follows(one)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_memory_that_cuda_does_not_pin_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backings, "_runtime", lambda: Mock(cudaHostRegister=lambda *args: 2))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(MemoryError, match=r"records of 48,000 bytes: CUDA cannot pin so much \(error 2\)"):
        HostRecords(ROWS, BYTES, pinned=True)


def test_pinned_records_without_cuda_are_refused() -> None:
    with pytest.raises(ValueError, match="pinned records are for CUDA, and there is none here"):
        HostRecords(ROWS, BYTES, pinned=True)


@pytest.mark.gpu
def test_a_gpu_copies_pinned_records_while_the_host_goes_on() -> None:
    backing = HostRecords(ROWS, BYTES, pinned=True)
    backing.records.copy_(some_records(ROWS))
    assert backing.records.is_pinned()
    assert torch.equal(backing.records.to("cuda", non_blocking=True).cpu(), backing.records)
    backing.close()


def resident_bytes() -> int:
    status = Path("/proc/self/statm")
    if not status.exists():
        pytest.skip("no /proc here")
    return int(status.read_text().split()[1]) * 4096

"""Files of the file tier are scratch: reserved, locked and gone with their process, and each fault is told by name.

Takes a quarter of a minute: it starts processes."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Literal

import pytest
import torch
from checkout import ROOT

from shardwise.embeddings.tiers import FileRecords, files, scratch

BYTES = 64


def other_process(code: str, folder: Path) -> subprocess.Popen[str]:
    """A process that runs the code, with FileRecords and `folder`."""
    lines = (
        f"import os, signal, sys, torch\nfrom shardwise.embeddings.tiers import FileRecords\nfolder = {str(folder)!r}\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", lines + textwrap.dedent(code)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)


def filled(folder: Path, name: str = "user", how: Literal["pread", "mmap"] | None = None) -> FileRecords:
    """1000 rows of ones."""
    records = FileRecords(1000, BYTES, folder, name=name, how=how)
    records.write(torch.arange(1000), torch.ones(1000, BYTES, dtype=torch.uint8))
    return records


def test_a_folder_that_is_missing_is_made_and_left_empty(tmp_path: Path) -> None:
    folder = tmp_path / "of" / "tiers"
    records = filled(folder)
    assert [path.name for path in folder.iterdir()] == ["user.lock"]
    records.close()
    assert not [*folder.iterdir()]
    with pytest.raises(ValueError, match="table 'user': its scratch file in .* is closed"):
        records.read(torch.tensor([1]), torch.zeros(1, BYTES, dtype=torch.uint8))


def test_a_backing_that_is_dropped_leaves_nothing(tmp_path: Path) -> None:
    filled(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_names_of_tables_are_any_words(tmp_path: Path) -> None:
    names = ["../user", ".._user", "user/0", "Ünïcode", "a" * 300]
    backings = [filled(tmp_path / "in", name=name) for name in names]
    assert len([*(tmp_path / "in").iterdir()]) == len(names) and [*tmp_path.iterdir()] == [tmp_path / "in"]
    for backing in backings:
        backing.close()


def test_one_process_has_a_name_twice(tmp_path: Path) -> None:
    """Two models of one process may have tables of the same name: their files are two."""
    a, b = filled(tmp_path), filled(tmp_path)
    a.write(torch.tensor([5]), torch.full((1, BYTES), 9, dtype=torch.uint8))
    a.close()
    out = torch.zeros(1, BYTES, dtype=torch.uint8)
    b.read(torch.tensor([5]), out)
    assert (out == 1).all() and [path.name for path in tmp_path.iterdir()] == ["user.lock"]
    b.close()


def test_another_process_is_named_that_has_the_folder(tmp_path: Path) -> None:
    code = """
        records = FileRecords(10, 64, folder, name="user")
        print("made", flush=True)
        signal.pause()
    """
    process = other_process(code, tmp_path)
    assert process.stdout is not None and process.stdout.readline() == "made\n"
    with pytest.raises(BlockingIOError, match=f"table 'user': process {process.pid} on .* a folder of its own"):
        filled(tmp_path)
    filled(tmp_path, name="item").close()
    process.kill()
    process.wait()
    process.stdout.close()
    filled(tmp_path).close()


def test_a_process_that_is_killed_leaves_a_folder_for_the_next_one(tmp_path: Path) -> None:
    code = """
        records = FileRecords(1 << 14, 1024, folder, name="user")
        records.write(torch.arange(1 << 14), torch.ones(1 << 14, 1024, dtype=torch.uint8))
        os.kill(os.getpid(), signal.SIGKILL)
    """
    process = other_process(code, tmp_path)
    assert process.wait() == -signal.SIGKILL and process.stdout is not None
    process.stdout.close()
    # and none of the disk
    assert [path.name for path in tmp_path.iterdir()] == ["user.lock"]
    assert (tmp_path / "user.lock").stat().st_size <= 512
    records, out = FileRecords(1 << 14, 1024, tmp_path, name="user"), torch.ones(1 << 14, 1024, dtype=torch.uint8)
    records.read(torch.arange(1 << 14), out)
    assert not out.any()
    records.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("how", ["pread", "mmap"])
def test_a_forked_process_has_no_part_in_it(how: Literal["pread", "mmap"], tmp_path: Path) -> None:
    """Workers of data loaders are forks: when they end the lock and the file must stay their parent's."""
    records = filled(tmp_path, how=how)
    child = os.fork()
    if not child:
        # nothing else of the test may run here
        status = 1
        try:
            records.read(torch.tensor([1]), torch.zeros(1, BYTES, dtype=torch.uint8))
        except ValueError:
            records.close()
            status = 0
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    process = other_process("FileRecords(10, 64, folder, name='user')", tmp_path)
    assert process.wait() == 1 and process.stdout is not None
    process.stdout.close()
    out = torch.zeros(1, BYTES, dtype=torch.uint8)
    records.read(torch.tensor([7]), out)
    assert (out == 1).all()
    records.close()


def test_a_table_that_the_disk_has_no_room_for_is_refused_at_once(tmp_path: Path) -> None:
    words = r"table 'user': its rows need 65536\.00 GiB in a scratch file, [\d.]+ GiB are free: .* another folder"
    with pytest.raises(OSError, match=words) as raised:
        FileRecords(1 << 40, BYTES, tmp_path, name="user")
    assert raised.value.errno == errno.ENOSPC and raised.value.filename == str(tmp_path)
    assert not [*tmp_path.iterdir()]


def test_files_that_are_still_to_be_filled_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scratch, "_reserve", lambda file, nbytes: False)
    monkeypatch.setattr(scratch, "_free_bytes", lambda folder: 3 << 30)
    first = FileRecords(1 << 21, 1024, tmp_path, name="user")
    with pytest.raises(OSError, match=r"need 2\.00 GiB .*, 3\.00 GiB are free, 2\.00 GiB of them for open files"):
        FileRecords(1 << 21, 1024, tmp_path, name="item")
    FileRecords(1 << 20, 1024, tmp_path, name="item").close()
    with pytest.raises(OSError, match=r"need 3\.00 GiB"):
        first.grow(5 << 20)
    first.close()
    FileRecords(1 << 21, 1024, tmp_path, name="item").close()


def test_space_is_reserved_when_the_file_is_made(tmp_path: Path) -> None:
    records = FileRecords(1 << 14, 1024, tmp_path, name="user")
    if scratch._fallocate() is None:
        pytest.skip("this system reserves nothing")
    assert os.stat(records._file.fileno()).st_blocks * 512 >= 1 << 24
    records.close()


def test_a_file_that_somebody_truncated_is_no_zeros(tmp_path: Path) -> None:
    records, out = filled(tmp_path), torch.zeros(2, BYTES, dtype=torch.uint8)
    os.truncate(records._file.fileno(), 500 * BYTES + 10)
    records.read(torch.tensor([3, 499]), out)
    assert (out == 1).all()
    with pytest.raises(OSError, match=r"table 'user': its scratch file ends before its 64,000 bytes: .* checkpoint"):
        records.read(torch.tensor([3, 500]), out)
    records.close()


def test_a_folder_that_is_removed_meanwhile_takes_nothing_along(tmp_path: Path) -> None:
    folder = tmp_path / "in"
    records, out = filled(folder), torch.zeros(1, BYTES, dtype=torch.uint8)
    (folder / "user.lock").unlink()
    folder.rmdir()
    records.read(torch.tensor([999]), out)
    assert (out == 1).all()
    records.close()
    assert not folder.exists()


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of file sizes")
def test_a_disk_that_is_full_is_named_with_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A limit of file sizes stands for it: the system refuses in the middle of a write."""
    import resource

    monkeypatch.setattr(scratch, "_reserve", lambda file, nbytes: False)
    records = FileRecords(1 << 14, 1024, tmp_path, name="user")
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        records.write(torch.arange(100), torch.ones(100, 1024, dtype=torch.uint8))
        with pytest.raises(
            OSError, match=r"table 'user': its rows cannot be written: File too large. It needs 0\.02 G"
        ):
            records.write(torch.arange(1000, 1100), torch.ones(100, 1024, dtype=torch.uint8))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    out = torch.zeros(100, 1024, dtype=torch.uint8)
    records.read(torch.arange(100), out)
    assert (out == 1).all()
    records.close()


@pytest.mark.skipif(sys.platform == "win32", reason="needs limits of file sizes")
def test_a_file_that_cannot_be_made_leaves_nothing(tmp_path: Path) -> None:
    import resource

    # other tests' files may wait for the garbage collector
    others = {*scratch._open}
    before, ignored = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    try:
        with pytest.raises(OSError, match=r"table 'user': a scratch file of 0\.02 GiB cannot be made: .*`ulimit -f`"):
            FileRecords(1 << 14, 1024, tmp_path, name="user")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert not [*tmp_path.iterdir()] and not {*scratch._open} - others


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EIO, "Input/output error. Its rows are lost: look at the disk"),
        (errno.ENOSPC, r"No space left on device. It needs 0\.00 GiB in all, [\d.]+ GiB are free: make room"),
    ],
)
def test_what_the_disk_says_comes_with_table_and_way_out(
    number: int, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records, out = filled(tmp_path), torch.zeros(2, BYTES, dtype=torch.uint8)

    def fail(*args: object) -> int:
        raise OSError(number, os.strerror(number))

    # a loop stops before the row that the system refuses
    for name, done, move in (("read", "read", records.read), ("write", "written", records.write)):
        monkeypatch.setattr(files, f"{name}_file_rows", lambda *args: 1)
        monkeypatch.setattr(os, "preadv" if name == "read" else "pwrite", fail)
        with pytest.raises(OSError, match=f"table 'user': its rows cannot be {done}: {words}") as raised:
            move(torch.tensor([1, 5]), out)
        assert raised.value.errno == number and raised.value.filename == str(tmp_path)
    records.close()


def test_no_file_can_be_where_a_file_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(OSError, match="table 'user': the folder cannot be made: File exists. Choose a folder that"):
        FileRecords(10, BYTES, tmp_path / "file", name="user")


def test_a_folder_that_cannot_be_written_is_named_with_its_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that was there already gave the system's words for its lock, and neither table nor way out."""

    def refuse(*args: object) -> int:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    # root writes everywhere
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(PermissionError, match="table 'user': its lock .* Permission denied. Choose a folder that"):
        FileRecords(10, BYTES, tmp_path, name="user")

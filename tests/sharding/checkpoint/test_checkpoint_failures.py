"""Saves that fail: all ranks raise, the last good checkpoint stays, the model stays, the next save works."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import failing_saves as checkpoint_kills
import pytest
import torch.distributed as dist
from checkout import python_path
from checkpoint_cases import MIX, bytes_of, same, saved, trained, values_of
from lone_ranks import kill_me, lone_ranks
from ranks import run_ranks
from sharding_mixes import build, environment, shard
from sharding_steps import train_on

from shardwise import checkpoint
from shardwise.sharding.checkpoint import files, folder

pytestmark = pytest.mark.ranks


def full(*_: Any) -> int:
    raise OSError(errno.ENOSPC, "No space left on device")


def save_failing(place: str, rank: int, how: str, asynchronous: bool) -> tuple[str, str, bool, bool]:
    """A good save, one that fails on a rank, and another; what the second raised and changed."""
    model = shard(MIX, build(MIX, "adam"), environment())
    train_on(MIX, model, range(1))
    checkpoint.save(place, model, step=1)
    before = {name: value.clone() for name, value in model.named_parameters()}
    write_all = files.write_all
    if dist.get_rank() == rank:
        files.write_all = full if how == "full" else lambda *_: kill_me()  # type: ignore[assignment]
    kind, text = "", ""
    try:
        checkpoint.save(place, model, step=2, asynchronous=asynchronous).wait()
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    files.write_all = write_all
    unchanged = all((value == before[name]).all() for name, value in model.named_parameters())
    if how == "killed":
        return kind, text, unchanged, True
    path = checkpoint.save(place, model, step=3).path
    return kind, text, unchanged, checkpoint.verify(path) == []


@pytest.mark.parametrize("rank, asynchronous", [(0, True), (1, False)])
def test_a_full_disk_on_one_rank_is_raised_by_all(rank: int, asynchronous: bool, tmp_path: Path) -> None:
    """Fault 41."""
    for kind, text, unchanged, good in run_ranks(2, save_failing, str(tmp_path), rank, "full", asynchronous):
        assert (kind, unchanged, good) == ("OSError", True, True)
        assert "No space left on device" in text
    assert [path.name[-1] for path in checkpoint.steps(tmp_path)] == ["1", "3"]
    assert leftovers(tmp_path) == []


def leftovers(place: Path) -> list[str]:
    return sorted(entry.name for entry in place.iterdir() if entry.name.startswith(".") and entry.name != ".lock")


@pytest.mark.parametrize("rank, asynchronous", [(0, True), (1, False)])
def test_a_rank_killed_in_a_save_ends_its_peers_by_name(rank: int, asynchronous: bool, tmp_path: Path) -> None:
    """Fault 35: within the deadline, and without a collective: the asynchronous save has none to notice by."""
    ranks = lone_ranks(2, save_failing, str(tmp_path), rank, "killed", asynchronous, deadline=100.0)
    assert ranks[rank].killed
    for number, said in enumerate(ranks):
        if number != rank:
            kind, text, unchanged, _ = said.value or pytest.fail(f"{said}")
            assert (kind, unchanged) == ("RankFailure", True)
            assert re.match(rf"rank {rank} died in the save of .*step-0+2; older checkpoints are untouched", text)
    newest = checkpoint.latest(tmp_path)
    assert newest is not None and newest.name.endswith("1") and checkpoint.verify(newest) == []
    # no leftover blocks the next save, which clears them
    assert leftovers(tmp_path) != []
    assert checkpoint.verify(saved(tmp_path, step=4)) == [] and leftovers(tmp_path) == []


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Files of this process can have `size` bytes, as on a disk that is nearly full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


@pytest.mark.parametrize("size", [100, 5000])
def test_a_file_that_cannot_grow_fails_the_save_and_leaves_the_last_good_one(size: int, tmp_path: Path) -> None:
    """Fault 41, as the kernel says it: in the header, and in the middle of the tensors."""
    path, model = saved(tmp_path), trained()
    before, there = values_of(model), bytes_of(path)
    with largest_file(size), pytest.raises(OSError, match="File too large"):
        checkpoint.save(tmp_path, model, step=2)
    assert checkpoint.latest(tmp_path) == path and bytes_of(path) == there and same(before, values_of(model))
    assert checkpoint.verify(checkpoint.save(tmp_path, model, step=2).path) == []


def test_a_folder_that_cannot_be_made_or_written_is_refused(tmp_path: Path) -> None:
    """Fault 41."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        checkpoint.save(tmp_path / "file" / "steps", trained(), step=1)
    if Path("/proc/1").is_dir():
        with pytest.raises(OSError):
            checkpoint.save("/proc/steps", trained(), step=1)


def test_a_failure_in_the_background_is_raised_by_wait_once_or_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained()
    with monkeypatch.context() as patched:
        patched.setattr(files, "write_all", full)
        told, untold = (checkpoint.save(tmp_path / name, model, step=1, asynchronous=True) for name in ("a", "b"))
        with pytest.raises(OSError, match="No space left"):
            told.wait()
        told.wait()
        assert told.done()
        while not untold.done():
            time.sleep(0.01)
    checkpoint.save(tmp_path / "a", model, step=2)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path / "b", model, step=2)
    assert checkpoint.latest(tmp_path / "b") is None
    checkpoint.save(tmp_path / "b", model, step=2)
    assert [path.name[-1] for path in checkpoint.steps(tmp_path / "b")] == ["2"]


def test_what_a_save_in_the_background_writes_is_what_was_there_when_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, go, write_all = trained(), threading.Event(), files.write_all

    def late(*given: Any) -> int:
        assert go.wait(30.0)
        return write_all(*given)

    monkeypatch.setattr(files, "write_all", late)
    wanted = values_of(model)
    saving = checkpoint.save(tmp_path, model, step=1, asynchronous=True)
    for param in model.parameters():
        param.data.fill_(0.0)
    assert not saving.done() and not saving.path.exists() and checkpoint.latest(tmp_path) is None
    go.set()
    saving.wait()
    other = trained("adam", 1)
    checkpoint.load(saving.path, other)
    assert same(values_of(other), wanted)


def test_the_next_save_waits_for_the_one_before(tmp_path: Path) -> None:
    model = trained()
    savings = [checkpoint.save(tmp_path, model, step=step, asynchronous=True) for step in range(1, 6)]
    assert all(saving.done() for saving in savings[:-1])
    savings[-1].wait()
    assert [path.name[-1] for path in checkpoint.steps(tmp_path)] == ["3", "4", "5"]


def hold(place: str) -> str:
    """One job saves on and on; another tries to, until it was refused."""
    model, refused = trained(), ""
    end = time.monotonic() + 30.0
    step = 0
    while time.monotonic() < end and not (Path(place) / "refused").exists():
        step += 1
        try:
            checkpoint.save(place, model, step=1000 * dist.get_rank() + step, keep_last=None)
        except BlockingIOError as error:
            refused = str(error)
            (Path(place) / "refused").touch()
    return refused


def test_of_two_jobs_that_save_into_one_folder_one_is_refused_and_nothing_breaks(tmp_path: Path) -> None:
    """Fault 43."""
    texts = [text for text in run_ranks(2, hold, str(tmp_path)) if text]
    holder = r"(process \d+ on .*|another process): give each job a folder of its own"
    assert texts and all(re.search(f"another save is under way there, by {holder}", text) for text in texts)
    assert checkpoint.steps(tmp_path) and all(checkpoint.verify(path) == [] for path in checkpoint.steps(tmp_path))
    assert leftovers(tmp_path) == []


def test_a_lock_of_this_process_refuses_as_well(tmp_path: Path) -> None:
    lock = folder.FolderLock(tmp_path)
    with pytest.raises(BlockingIOError, match=f"process {os.getpid()} on"):
        checkpoint.save(tmp_path, trained(), step=1)
    lock.release()
    checkpoint.save(tmp_path, trained(), step=1)


def ranks_differ(place: str) -> str:
    model = shard(MIX, build(MIX, "adam"), environment())
    try:
        checkpoint.save(place, model, step=dist.get_rank())
    except RuntimeError as error:
        return str(error)
    return ""


def test_ranks_that_save_different_steps_are_told(tmp_path: Path) -> None:
    for text in run_ranks(2, ranks_differ, str(tmp_path)):
        assert "differ from this one in the step, the plan or the tables" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.full
def test_ten_kills_at_random_points_of_saves_lose_nothing(tmp_path: Path) -> None:
    """Fault 40, a sample; the script says what is looked at, and runs a hundred by itself."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    command = [sys.executable, "-m", checkpoint_kills.__name__, "--kills", "10"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr
    # gloo of torch 2.9 talks as well
    assert re.search(r"^1\d kills in \d+ rounds, \d+ steps reached, nothing lost", done.stdout, re.MULTILINE)

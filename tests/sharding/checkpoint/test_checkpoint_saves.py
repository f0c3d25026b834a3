"""Saves: what lies on the disk, which steps are kept; where one fails all ranks raise, and the last good one stays."""

from __future__ import annotations

import errno
import json
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
import safetensors.torch
import torch
import torch.distributed as dist
from checkout import python_path
from checkpoint_cases import MIX, bytes_of, same, saved, trained, values_of
from lone_ranks import kill_me, lone_ranks
from ranks import run_ranks
from sharding_mixes import build, environment, shard
from sharding_steps import train_on
from torch import Tensor, nn

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
    checkpoint,
)
from shardwise.sharding.checkpoint import files, folder, manifest

FILE = "rank-00000.safetensors"
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (5,), (7, 3)])
def test_the_library_reads_what_is_written_in_its_own_dtype(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "BLOCK_BYTES", 32)
    net = nn.Module()
    net.register_buffer("a", torch.randn(shape, generator=torch.Generator().manual_seed(1)).mul(10).to(dtype))
    # not contiguous
    net.register_buffer("b", torch.arange(12.0).view(3, 4).t())
    path = checkpoint.save(tmp_path, net, step=3).path
    tensors = safetensors.torch.load_file(path / FILE)
    assert set(tensors) == {"dense/a/weight", "dense/b/weight"}
    for name, value in net.named_buffers():
        tensor = tensors[f"dense/{name}/weight"]
        assert tensor.dtype == value.dtype and torch.equal(tensor, value)
    assert checkpoint.verify(path) == []


def wide() -> EmbeddingBagCollection:
    """A table of 1 MiB with its states."""
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(4096, 64, "t", feature_names=["f"])])
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
    ebc.fused_optimizer()
    return ebc


def test_no_more_than_a_block_of_a_tensor_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of the largest piece that is written, hashed or read at a time."""
    block, largest = 64 * 1024, {"write": 0, "read": 0, "pieces": 0}
    monkeypatch.setattr(files, "BLOCK_BYTES", block)
    write_all, read = files.write_all, files.TensorFiles.read

    def counted_write(file: Any, data: Any) -> int:
        largest["write"] = max(largest["write"], memoryview(data).nbytes)
        return write_all(file, data)

    def counted_read(self: Any, stored: Any, box: Any) -> Tensor:
        tensor = read(self, stored, box)
        largest["read"], largest["pieces"] = max(largest["read"], tensor.nbytes), largest["pieces"] + 1
        return tensor

    monkeypatch.setattr(files, "write_all", counted_write)
    monkeypatch.setattr(files.TensorFiles, "read", counted_read)
    model, other = wide(), wide()
    path = checkpoint.save(tmp_path, model, step=1).path
    checkpoint.load(path, other)
    assert same(values_of(other), values_of(model))
    assert largest["write"] <= block and largest["read"] <= block
    # 16 blocks of rows, and one of the state, which is read twice
    assert largest["pieces"] == 16 + 2


def names(folder: Path) -> list[str]:
    return [path.name.removeprefix("step-").lstrip("0") for path in checkpoint.steps(folder)]


def test_the_newest_good_ones_are_kept(tmp_path: Path) -> None:
    model = trained()
    for step in (1, 2, 3, 4):
        checkpoint.save(tmp_path, model, step=step, keep_last=2)
    assert names(tmp_path) == ["3", "4"]
    (tmp_path / "step-000000000003" / FILE).unlink()
    checkpoint.save(tmp_path, model, step=5, keep_last=2)
    # what is not good does not count, and goes once it is older
    assert names(tmp_path) == ["4", "5"]
    checkpoint.save(tmp_path, model, step=6, keep_last=None)
    assert names(tmp_path) == ["4", "5", "6"]
    # of a run that went back: what was just saved is never removed
    checkpoint.save(tmp_path, model, step=2, keep_last=1)
    assert names(tmp_path) == ["2"]


def test_a_step_that_is_saved_again_replaces_the_old_one_once_it_is_whole(tmp_path: Path) -> None:
    old, new = trained("adam", 1), trained("adam", 2)
    first = checkpoint.save(tmp_path, old, step=7).path
    second = checkpoint.save(tmp_path, new, step=7).path
    assert checkpoint.latest(tmp_path) == second and not first.exists()
    checkpoint.load(second, old)
    assert same(values_of(old), values_of(new))
    checkpoint.save(tmp_path, new, step=7)
    assert len(checkpoint.steps(tmp_path)) == 1


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


@pytest.mark.parametrize(
    "given, match",
    [
        ({"step": -1}, "step must be a whole number"),
        ({"step": 1.0}, "step must be a whole number"),
        ({"step": 1, "keep_last": 0}, "keep_last must be at least 1"),
        ({"step": 1, "extra": {"a": float("nan")}}, "not JSON compliant"),
        ({"step": 1, "extra": {"a": {1, 2}}}, "extra: .*not JSON serializable"),
        ({"step": 1, "extra": {"a": {1: 2, "1": 3}}}, "extra: key '1' is there twice"),
        ({"step": 1, "extra": {True: 2, "true": 3}}, "extra: key 'true' is there twice"),
        ({"step": 1, "extra": {"a": 10**5000}}, "extra: .*digits"),
        ({"step": 1, "extra": {"a": nested(100)}}, "extra: it is nested more than 100 deep"),
        ({"step": 1, "extra": {"a": nested(5000)}}, "extra: it is nested more than 100 deep"),
    ],
)
def test_bad_arguments_are_refused(given: dict[str, Any], match: str, tmp_path: Path) -> None:
    """Keys that are the same text in JSON were saved, and the manifest could be read no more: older steps were gone."""
    with pytest.raises((ValueError, TypeError), match=match):
        checkpoint.save(tmp_path / "steps", trained(), **given)
    assert not (tmp_path / "steps").exists()


def test_what_is_saved_can_be_read_however_large_and_deep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest that is larger than what is read was written all the same, and older checkpoints removed for it."""
    good = checkpoint.save(tmp_path, trained(), step=1, extra={"a": nested(99)}, keep_last=1).path

    def down(frames: int) -> Any:
        return down(frames - 1) if frames else checkpoint.read_manifest(good)

    assert down(600).extra == {"a": nested(99)}
    size = (good / "manifest.json").stat().st_size
    monkeypatch.setattr(manifest, "MAX_BYTES", size)
    with pytest.raises(ValueError, match=f"would have {size + 600} bytes, at most {size} are read"):
        checkpoint.save(tmp_path, trained(), step=1, extra={"a": nested(99), "bb": "x" * 590}, keep_last=1)
    with pytest.raises(ValueError, match=f"extra: .* at most {size} are read"):
        checkpoint.save(tmp_path, trained(), step=1, extra={"a": "x" * size}, keep_last=1)
    assert checkpoint.steps(tmp_path) == [good] and checkpoint.verify(good) == []


def test_the_manifest_says_what_is_where(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, trained(), step=3, extra={"epoch": 1}).path
    manifest = checkpoint.read_manifest(path)
    table = manifest.tables["embedding_bags.t0.weight"]
    assert (manifest.step, manifest.extra, manifest.world_size) == (3, {"epoch": 1}, 1)
    assert (table.table, table.rows, table.dim, table.rule, table.steps) == ("t0", 40, 8, "adam", 2)
    assert json.loads((path / "manifest.json").read_text())["format"] == 2
    assert {tensor.state for tensor in manifest.tensors} == {"weight", "momentum1", "momentum2"}
    assert [group["lr"] for group in manifest.fused] == [0.05]


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


@pytest.mark.ranks
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


@pytest.mark.ranks
@pytest.mark.parametrize("rank, asynchronous", [(0, True), (1, False)])
def test_a_rank_killed_in_a_save_ends_its_peers_by_name(rank: int, asynchronous: bool, tmp_path: Path) -> None:
    """Fault 35: within the deadline, and without a collective: the asynchronous save has none to notice by."""
    ranks = lone_ranks(2, save_failing, str(tmp_path), rank, "killed", asynchronous, deadline=100.0)
    assert ranks[rank].killed
    for number, outcome in enumerate(ranks):
        if number != rank:
            kind, text, unchanged, _ = outcome.value or pytest.fail(f"{outcome}")
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


@pytest.mark.ranks
@pytest.mark.parametrize("size", [100, 5000])
def test_a_file_that_cannot_grow_fails_the_save_and_leaves_the_last_good_one(size: int, tmp_path: Path) -> None:
    """Fault 41, as the kernel says it: in the header, and in the middle of the tensors."""
    path, model = saved(tmp_path), trained()
    before, there = values_of(model), bytes_of(path)
    with largest_file(size), pytest.raises(OSError, match="File too large"):
        checkpoint.save(tmp_path, model, step=2)
    assert checkpoint.latest(tmp_path) == path and bytes_of(path) == there and same(before, values_of(model))
    assert checkpoint.verify(checkpoint.save(tmp_path, model, step=2).path) == []


@pytest.mark.ranks
def test_a_folder_that_cannot_be_made_or_written_is_refused(tmp_path: Path) -> None:
    """Fault 41."""
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        checkpoint.save(tmp_path / "file" / "steps", trained(), step=1)
    if Path("/proc/1").is_dir():
        with pytest.raises(OSError):
            checkpoint.save("/proc/steps", trained(), step=1)


@pytest.mark.ranks
def test_a_failure_in_the_background_is_raised_by_wait_once_or_by_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = trained()
    with monkeypatch.context() as patched:
        patched.setattr(files, "write_all", full)
        waited, unwaited = (checkpoint.save(tmp_path / name, model, step=1, asynchronous=True) for name in ("a", "b"))
        with pytest.raises(OSError, match="No space left"):
            waited.wait()
        waited.wait()
        assert waited.done()
        while not unwaited.done():
            time.sleep(0.01)
    checkpoint.save(tmp_path / "a", model, step=2)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save(tmp_path / "b", model, step=2)
    assert checkpoint.latest(tmp_path / "b") is None
    checkpoint.save(tmp_path / "b", model, step=2)
    assert [path.name[-1] for path in checkpoint.steps(tmp_path / "b")] == ["2"]


@pytest.mark.ranks
def test_what_a_save_in_the_background_writes_is_what_was_there_when_it_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, go, write_all = trained(), threading.Event(), files.write_all

    def late(*arguments: Any) -> int:
        assert go.wait(30.0)
        return write_all(*arguments)

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


@pytest.mark.ranks
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


@pytest.mark.ranks
def test_of_two_jobs_that_save_into_one_folder_one_is_refused_and_nothing_breaks(tmp_path: Path) -> None:
    """Fault 43."""
    texts = [text for text in run_ranks(2, hold, str(tmp_path)) if text]
    holder = r"(process \d+ on .*|another process): give each job a folder of its own"
    assert texts and all(re.search(f"another save is under way there, by {holder}", text) for text in texts)
    assert checkpoint.steps(tmp_path) and all(checkpoint.verify(path) == [] for path in checkpoint.steps(tmp_path))
    assert leftovers(tmp_path) == []


@pytest.mark.ranks
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


@pytest.mark.ranks
def test_ranks_that_save_different_steps_are_told(tmp_path: Path) -> None:
    for text in run_ranks(2, ranks_differ, str(tmp_path)):
        assert "differ from this one in the step, the plan or the tables" in text
    assert list(tmp_path.iterdir()) == []


@pytest.mark.ranks
@pytest.mark.full
def test_ten_kills_at_random_points_of_saves_lose_nothing(tmp_path: Path) -> None:
    """Fault 40, a sample; the script says what is looked at, and runs a hundred by itself."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    command = [sys.executable, "-m", checkpoint_kills.__name__, "--kills", "10"]
    process = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert process.returncode == 0, process.stderr
    # gloo of torch 2.9 talks as well
    assert re.search(r"^1\d kills in \d+ rounds, \d+ steps reached, nothing lost", process.stdout, re.MULTILINE)

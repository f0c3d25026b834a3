"""Checkpoints in stores: the files of a local folder byte for byte, whatever fails; one job at a time; few bytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from checkpoint_cases import bytes_of, same, trained, values_of
from click.testing import CliRunner
from failing_store import AFTER, BEFORE, FROM_THEN_ON, FailingStore, FolderStore

from shardwise import EmbeddingBagCollection, EmbeddingBagConfig, checkpoint, cli
from shardwise.sharding.checkpoint import files, object_saves, storage
from shardwise.sharding.checkpoint.places import Url

FILE, STEP = "rank-00000.safetensors", "step-00000000000"
RUN = "failing://bucket/run"


@pytest.fixture(autouse=True)
def _empty_store() -> Iterator[None]:
    FailingStore.store.clear()
    FailingStore.reset()
    yield
    FailingStore.reset()


def objects(folder: str) -> dict[str, bytes]:
    """What lies in a folder of a store, but for locks."""
    fs, root = fsspec.core.url_to_fs(folder)
    names = (name[len(root) + 1 :] for name in fs.find(root))
    return {name: fs.cat_file(f"{root}/{name}") for name in names if not name.startswith(".lock-")}


def names(folder: str) -> list[str]:
    return [path.name.removeprefix("step-").lstrip("0") for path in checkpoint.steps(folder)]


@pytest.mark.parametrize("url", [RUN, "memory://bucket/run", "folders://{}/made/by/save"])
def test_a_store_has_the_files_of_a_local_folder_byte_for_byte(url: str, tmp_path: Path) -> None:
    url, local, model = url.format(tmp_path), tmp_path / "local", trained()
    for folder in (url, local):
        for step in (1, 2, 3):
            checkpoint.save(folder, model, step=step, keep_last=2, extra={"a": 1}, asynchronous=step == 2).wait()
    assert objects(url) == {name: (local / name).read_bytes() for name in bytes_of(local) if name != ".lock"}
    newest = checkpoint.latest(url)
    assert (
        newest is not None
        and str(newest) == f"{url}/{STEP}3"
        and names(url) == ["2", "3"]
        and checkpoint.verify(newest) == []
    )
    other = trained("adam", 1)
    assert checkpoint.load(newest, other).step == 3 and same(values_of(other), values_of(model))
    whole = checkpoint.full_state_dict(newest)
    assert same(whole, checkpoint.full_state_dict(local / f"{STEP}3"))
    assert not checkpoint.diff(url, local)
    again = checkpoint.save(url, model, step=3).path
    assert again.name == f"{STEP}3.1" and names(url) == ["2", "3.1"]
    checkpoint.remove(again)
    assert names(url) == ["2"] and checkpoint.latest(url) == Url(f"{url}/{STEP}2")


def test_what_is_cut_anew_exported_and_converted_is_the_same_in_a_store(tmp_path: Path) -> None:
    model = trained()
    checkpoint.save(RUN, model, step=4)
    cut = checkpoint.reshard(RUN, "failing://bucket/cut", world_size=2, plan="column_wise", resplit="mean")
    local = checkpoint.reshard(RUN, tmp_path / "cut", world_size=2, plan="column_wise", resplit="mean")
    assert {name: (local / name).read_bytes() for name in bytes_of(local)} == objects(str(cut))
    with pytest.raises(ValueError, match="has the checkpoint itself"):
        checkpoint.reshard(RUN, f"{RUN}/")
    checkpoint.export(RUN, "failing://bucket/whole.safetensors", states=True)
    checkpoint.export(RUN, tmp_path / "whole.safetensors", states=True)
    assert objects("failing://bucket")["whole.safetensors"] == (tmp_path / "whole.safetensors").read_bytes()
    checkpoint.to_dcp(RUN, "failing://bucket/dcp")
    with pytest.raises(ValueError, match="is not empty"):
        checkpoint.to_dcp(RUN, "failing://bucket/dcp")
    back = checkpoint.from_dcp_trusted("failing://bucket/dcp", "failing://bucket/back", rules="adam")
    assert checkpoint.diff(RUN, back).values == {}
    other = trained("adam", 1)
    checkpoint.load(back, other)
    assert same(values_of(other), values_of(model))


def requests_of_a_save() -> int:
    """How many there are of the second save, and of removing the first."""
    FailingStore.reset()
    checkpoint.save(RUN, trained(), step=2, keep_last=1)
    return FailingStore.requests


@pytest.mark.parametrize("how", [BEFORE, AFTER, FROM_THEN_ON])
def test_whatever_request_fails_nothing_is_lost(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each request fails in turn: what was there stays, the error names the URL, and the next save is good."""
    monkeypatch.setattr(object_saves, "_LOOK_SECONDS", 0.0)
    old, new = trained("adam", 1), trained("adam", 2)
    checkpoint.save(RUN, old, step=1)
    count, raised = requests_of_a_save(), 0
    for at in range(1, count + 1):
        FailingStore.store.clear()
        first = checkpoint.save(RUN, old, step=1).path
        FailingStore.reset(at, how)
        said = ""
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            try:
                checkpoint.save(RUN, new, step=2, keep_last=1)
            except OSError as error:
                said, raised = str(error), raised + 1
                assert said.startswith(RUN) and "was cut off" in said, said
        FailingStore.reset()
        newest = checkpoint.latest(RUN)
        assert newest is not None and checkpoint.verify(newest) == []
        # an answer that was lost may be that to the manifest itself
        assert newest == first if said and how == BEFORE else newest.name in (f"{STEP}1", f"{STEP}2")
        assert said or newest.name == f"{STEP}2"
        other = trained("adam", 1)
        assert checkpoint.load(newest, other).step in (1, 2)
        assert same(values_of(other), values_of(old if newest == first else new))
        last = checkpoint.save(RUN, new, step=3, keep_last=1).path
        assert checkpoint.verify(last) == [] and checkpoint.latest(RUN) == last
        complete = {path.name for path in checkpoint.steps(RUN)}
        assert {name.split("/")[0] for name in objects(RUN)} == complete, f"leftovers after request {at}"
    assert raised >= count // 2


@pytest.mark.parametrize("ask", [checkpoint.latest, checkpoint.steps, checkpoint.verify, checkpoint.read_manifest])
def test_a_store_that_does_not_answer_is_no_store_without_checkpoints(ask: Any) -> None:
    """A network that failed once would have had a run begin anew, or go on from an older step."""
    path = checkpoint.save(RUN, trained(), step=1).path
    place = RUN if ask in (checkpoint.latest, checkpoint.steps) else path
    FailingStore.reset()
    ask(place)
    for at in range(1, FailingStore.requests + 1):
        FailingStore.reset(at)
        with pytest.raises(storage.StoreError, match="was cut off"):
            ask(place)


def test_what_has_no_manifest_is_no_checkpoint_and_goes_with_the_next_save() -> None:
    model = trained()
    good = checkpoint.save(RUN, model, step=1).path
    fs, root = fsspec.core.url_to_fs(RUN)
    fs.pipe_file(f"{root}/{STEP}2/{FILE}", fs.cat_file(f"{root}/{STEP}1/{FILE}"))
    fs.pipe_file(f"{root}/{STEP}2/notes.txt", b"of somebody else")
    fs.pipe_file(f"{root}/other/{FILE}", b"of somebody else")
    assert checkpoint.latest(RUN) == good and names(RUN) == ["1"]
    with pytest.raises(FileNotFoundError, match=f"{STEP}2 is no finished checkpoint"):
        checkpoint.load(f"{RUN}/{STEP}2", model)
    with pytest.raises(FileNotFoundError):
        checkpoint.remove(f"{RUN}/other")
    checkpoint.save(RUN, model, step=3)
    assert names(RUN) == ["1", "3"]
    assert {name for name in objects(RUN) if "1/" not in name and "3/" not in name} == {
        f"{STEP}2/notes.txt",
        f"other/{FILE}",
    }


def test_a_load_that_the_store_ends_says_that_the_model_is_changed_in_part() -> None:
    """Where all was checked and the model is being filled there is no way back; it said that nothing was changed."""
    path, model = checkpoint.save(RUN, trained(), step=1).path, trained("adam", 1)
    before = values_of(model)
    FailingStore.reset()
    checkpoint.load(path, trained("adam", 1))
    count, said = FailingStore.requests, []
    for at in range(1, count + 1):
        FailingStore.reset(at)
        with pytest.raises(OSError, match="was cut off") as raised:
            checkpoint.load(path, model)
        said.append("the model is changed in part: load it once more" in str(raised.value))
        assert said[-1] or same(values_of(model), before)
    assert said == sorted(said) and 0 < sum(said) < count
    FailingStore.reset()
    checkpoint.load(path, model)
    assert same(values_of(model), values_of(trained()))


@pytest.mark.parametrize("data", [None, b"", b"short", b"\xff"])
def test_a_damaged_object_is_named_and_passed_over(data: bytes | None) -> None:
    model = trained()
    good, bad = (checkpoint.save(RUN, model, step=step).path for step in (1, 2))
    fs, root = fsspec.core.url_to_fs(RUN)
    whole = fs.cat_file(f"{root}/{STEP}2/{FILE}")
    if data is None:
        fs.rm_file(f"{root}/{STEP}2/{FILE}")
    else:
        fs.pipe_file(f"{root}/{STEP}2/{FILE}", whole[:-1] + data if data == b"\xff" else data)
    if data == b"\xff":
        assert "has other bytes than were saved" in checkpoint.verify(bad)[0]
    else:
        assert checkpoint.latest(RUN) == good and FILE in checkpoint.verify(bad)[0]
    before = values_of(model)
    with pytest.raises(checkpoint.CheckpointDamaged, match=f"{RUN}/{STEP}2/{FILE}"):
        checkpoint.load(bad, model)
    assert same(values_of(model), before)


def lock(count: int = 0, **holder: Any) -> str:
    """Put another job's lock there; its name."""
    fs, root = fsspec.core.url_to_fs(RUN)
    fs.pipe_file(f"{root}/.lock-000000007", json.dumps({"holder": "process 1 on x", "count": count, **holder}).encode())
    return f"{root}/.lock-000000007"


def test_a_job_that_lives_refuses_another_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_saves, "_LOOK_SECONDS", 0.0)
    lock()
    monkeypatch.setattr(object_saves.time, "sleep", lambda _: lock(1))
    with pytest.raises(BlockingIOError, match=f"{RUN}: another save is under way there, by process 1 on x: give"):
        checkpoint.save(RUN, trained(), step=1)
    assert checkpoint.steps(RUN) == [] and objects(RUN) == {}


def test_a_save_of_this_process_refuses_as_well() -> None:
    lease = object_saves.Lease(Url(RUN))
    with pytest.raises(BlockingIOError, match=f"process {os.getpid()} on"):
        checkpoint.save(RUN, trained(), step=1)
    lease.release()
    checkpoint.save(RUN, trained(), step=1)


def test_a_job_that_died_elsewhere_is_waited_for_and_what_it_may_still_write_does_no_harm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lock stays as it was for as long as a lease; the step gets a name that the dead one does not write to."""
    monkeypatch.setattr(object_saves, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(object_saves, "_LEASE_SECONDS", 0.1)
    name = lock()
    begin = time.monotonic()
    path = checkpoint.save(RUN, trained(), step=1).path
    assert time.monotonic() - begin >= 0.1 and path.name == f"{STEP}1.8"
    fs, root = fsspec.core.url_to_fs(RUN)
    assert not fs.exists(name)
    fs.pipe_file(f"{root}/{STEP}1/{FILE}", b"late")
    assert checkpoint.latest(RUN) == path and checkpoint.verify(path) == []


def test_a_save_that_was_taken_for_dead_writes_into_no_folder_of_any_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the first save after it had a name of its own: one that woke up after the second removed what that saved."""
    monkeypatch.setattr(object_saves, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(object_saves, "_LEASE_SECONDS", 0.1)
    stopped = object_saves.ObjectAttempt.begin(Url(RUN), 5, world_size=1)
    stopped.join()
    # what another machine does
    monkeypatch.setattr(object_saves, "_held", set())
    monkeypatch.setattr(object_saves, "_is_here", lambda holder: False)
    model = trained()
    paths = [checkpoint.save(RUN, model, step=step).path for step in (4, 5, 6)]
    storage.overwrite(stopped.target / FILE, b"late")
    assert all(checkpoint.verify(path) == [] for path in paths)
    stopped.leave()
    assert checkpoint.steps(RUN) == paths and all(checkpoint.verify(path) == [] for path in paths)
    assert len({path.name for path in [*paths, stopped.target]}) == 4
    assert checkpoint.save(RUN, model, step=7).path.name == f"{STEP}7.2"


def test_a_save_that_does_not_see_its_own_lock_in_the_list_writes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The list lags behind: it may not show the checkpoint whose name, and so whose files, the save would take."""
    good, now = checkpoint.save(RUN, trained(), step=1).path, object_saves.listing
    there = objects(RUN)
    monkeypatch.setattr(object_saves, "listing", lambda place: {".lock-000000001": 1} if now(place) else {})
    with pytest.raises(storage.StoreError, match=r"\.lock-000000002 was written and is not in the list"):
        checkpoint.save(RUN, trained("adam", 1), step=1)
    assert objects(RUN) == there and checkpoint.verify(good) == []


def test_a_list_that_lags_behind_costs_no_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is not in the list was written over; one whose manifest is not was taken for the rest of a dead save."""
    good, there = checkpoint.save(RUN, trained(), step=1).path, objects(RUN)
    now = object_saves.listing
    for hidden, step, kind in ((f"{STEP}1/", 1, OSError), (f"{STEP}1/manifest.json", 2, None)):

        def listing(folder: Url, hidden: str = hidden) -> dict[str, int]:
            return {name: size for name, size in now(folder).items() if not name.startswith(hidden)}

        with monkeypatch.context() as patch:
            patch.setattr(object_saves, "listing", listing)
            if kind is not None:
                with pytest.raises(kind, match=f"{STEP}1 is there and was not in the list of the folder"):
                    checkpoint.save(RUN, trained("adam", 1), step=step)
            else:
                checkpoint.save(RUN, trained("adam", 1), step=step)
        assert {name: data for name, data in objects(RUN).items() if name in there} == there
        assert checkpoint.verify(good) == []


def test_what_is_committed_stays_where_the_old_one_cannot_be_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """With warnings as errors the old one was gone by half when the new one was removed."""
    checkpoint.save(RUN, trained(), step=1)
    FailingStore.reset()
    checkpoint.save(RUN, trained(), step=2, keep_last=1)
    count = FailingStore.requests
    for at in range(1, count + 1):
        FailingStore.store.clear()
        FailingStore.reset()
        checkpoint.save(RUN, trained(), step=1)
        FailingStore.reset(at)
        # what is committed is no error of rank 0 alone, whom the others would wait for
        with warnings.catch_warnings(), suppress(OSError):
            warnings.simplefilter("error")
            checkpoint.save(RUN, trained(), step=2, keep_last=1)
        FailingStore.reset()
        newest = checkpoint.latest(RUN)
        assert newest is not None and checkpoint.verify(newest) == [], f"all lost after request {at} of {count}"


def test_a_save_that_was_taken_for_dead_commits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    good, write_all = checkpoint.save(RUN, trained(), step=1).path, files.write_all

    def overtaken(*arguments: Any) -> int:
        lock()
        return write_all(*arguments)

    monkeypatch.setattr(files, "write_all", overtaken)
    with pytest.raises(OSError, match="another save took this one for dead and began: nothing is written"):
        checkpoint.save(RUN, trained(), step=2)
    assert checkpoint.steps(RUN) == [good]


def test_a_save_that_is_stopped_before_its_manifest_and_taken_for_dead_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one had removed its files; it said that all was well, and removed the good ones of before."""
    good, create = checkpoint.save(RUN, trained(), step=1).path, object_saves.create_alone

    def stopped(file: Any, data: bytes) -> None:
        if file.name == "manifest.json":
            lock()
            object_saves.clear_unfinished(Url(RUN), storage.listing(Url(RUN)))
        create(file, data)

    monkeypatch.setattr(object_saves, "create_alone", stopped)
    with pytest.raises(storage.StoreError, match="another save took this one for dead"):
        checkpoint.save(RUN, trained(), step=2, keep_last=1)
    assert checkpoint.steps(RUN) == [good] and {name.split("/")[0] for name in objects(RUN)} == {good.name}


def test_a_save_that_looked_long_ago_takes_no_lock_below_a_living_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two saves came and went in between, its number was free again: it removed a third one's files."""
    folder = Url(RUN)
    storage.overwrite(folder / ".lock-000000007", b'{"holder": "another"}')
    storage.overwrite(folder / f"{STEP}1" / FILE, b"half")
    now, looked = object_saves.listing, list[Url]()

    def listing(place: Url) -> dict[str, int]:
        looked.append(place)
        return {} if len(looked) == 1 else now(place)

    monkeypatch.setattr(object_saves, "listing", listing)
    with pytest.raises(storage.StoreError, match="another save took this one for dead"):
        object_saves.ObjectAttempt.begin(folder, 2, world_size=1)
    assert objects(RUN) == {f"{STEP}1/{FILE}": b"half"}


def test_a_killed_save_leaves_no_checkpoint_and_the_next_one_goes_on_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process is gone from this machine, so that nobody waits until its lock is old."""
    url = f"folders://{tmp_path}/run"
    program = (
        "import os, signal, sys\n"
        "import failing_store\n"
        "from checkpoint_cases import trained\n"
        "from shardwise import checkpoint\n"
        "from shardwise.sharding.checkpoint import files\n"
        "checkpoint.save(sys.argv[1], trained(), step=1)\n"
        "written = files.write_all\n"
        "def kill(file, data):\n"
        "    written(file, memoryview(data).cast('B')[: len(memoryview(data).cast('B')) // 2])\n"
        "    if len(data) > 300: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return written(file, memoryview(data).cast('B')[len(memoryview(data).cast('B')) // 2 :])\n"
        "files.write_all = kill\n"
        "checkpoint.save(sys.argv[1], trained(), step=2)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", program, url], env=env, timeout=120)
    assert ended.returncode == -9
    assert f"{STEP}2/{FILE}" in objects(url) and names(url) == ["1"]
    newest = checkpoint.latest(url)
    assert newest is not None and checkpoint.verify(newest) == []
    # whoever waits for the lock to be old sleeps so long between two looks, which is an error
    monkeypatch.setattr(object_saves, "_LOOK_SECONDS", -1.0)
    assert checkpoint.save(url, trained(), step=2).path.name == f"{STEP}2.3"
    assert names(url) == ["1", "2.3"] and f"{STEP}2/{FILE}" not in objects(url)


def wide(rows: int) -> EmbeddingBagCollection:
    return EmbeddingBagCollection([EmbeddingBagConfig(rows, 16, "t", feature_names=["f"])])


def test_only_the_rows_that_are_wanted_are_read() -> None:
    path = checkpoint.save(RUN, wide(4096), step=1).path
    manifest = len(objects(RUN)[f"{STEP}1/manifest.json"])
    FailingStore.reset()
    policy = checkpoint.LoadPolicy(resized="overlap")
    checkpoint.load(path, wide(100), policy=policy, verify=False)
    # of 256 KiB two looks at the header, and 100 of 4096 rows of 16 numbers
    assert FailingStore.bytes_read == manifest + 2 * storage._AHEAD_BYTES + 100 * 16 * 4
    assert FailingStore.names.count("get") == 4


def test_no_more_than_a_block_is_in_memory_and_a_long_one_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    model = wide(4096)
    path, largest, cat = checkpoint.save(RUN, model, step=1).path, [0], storage.cat
    monkeypatch.setattr(files, "BLOCK_BYTES", 64 * 1024)
    monkeypatch.setattr(storage, "_PIECE_BYTES", 20_000)

    def counted(file: Url, begin: int, end: int) -> bytes:
        data = cat(file, begin, end)
        largest[0] = max(largest[0], len(data))
        return data

    monkeypatch.setattr(storage, "cat", counted)
    FailingStore.reset()
    # of half the columns no more bytes are read at a time either
    with checkpoint_source(path) as source:
        for block in source.blocks(source.manifest.tensors[0]):
            assert block.nbytes <= 64 * 1024
        half = source._files.read(source.manifest.tensors[0], ((10, 4000), (3, 8)))
    assert torch.equal(half, model.state_dict()["embedding_bags.t.weight"][10:4000, 3:8])
    assert largest[0] <= 64 * 1024 and FailingStore.names.count("get") > 3 * 4


def checkpoint_source(path: Any) -> Any:
    from shardwise.sharding.checkpoint.offline import Source

    return Source(path)


@pytest.mark.parametrize(
    "url, kind, match",
    [
        ("strange://bucket/x", ValueError, "strange://bucket/x: Protocol not known"),
        ("my_own://bucket/x", ValueError, "my_own://bucket/x: Protocol not known"),
        ("reference://x", ValueError, "reference://x: TypeError: .*stands in fsspec's configuration"),
        # nobody listens on the port of discarded messages
        ("ftp://127.0.0.1:9/x", storage.StoreError, "ftp://127.0.0.1:9/x: cannot reach it: ConnectionRefusedError"),
        ("simplecache::memory://x", ValueError, "is a chain of URLs"),
        ("ftp://me:word@host/x", ValueError, "'host/x' has a password"),
        (Path("s3://bucket/x"), ValueError, "was a URL before it was a Path"),
        (str(Path("s3://bucket/x")), ValueError, "was a URL before it was a Path, or lacks a slash"),
        (" s3://bucket/x", ValueError, "is a URL with white space around it"),
        ("memory://bucket/x\n", ValueError, "is a URL with white space around it"),
        ("memory://bucket//x", ValueError, "has the part '', which a store takes for a name"),
        ("memory://bucket/y/../x", ValueError, r"has the part '\.\.'"),
        ("file://bucket/x", ValueError, "has no path from the root on: file:///folder has three slashes"),
        ("gs://bucket/x", ImportError, r"gs://bucket/x: .*gcsfs.*pip install"),
    ],
)
def test_urls_that_cannot_be_used_are_refused(url: Any, kind: type[Exception], match: str) -> None:
    if "gs" in str(url) and any(name == "gcsfs" for name in sys.modules):
        pytest.skip("gcsfs is installed")
    for ask in (checkpoint.latest, checkpoint.verify, lambda place: checkpoint.save(place, trained(), step=1)):
        with pytest.raises(kind, match=match):
            ask(url)


def test_a_local_path_never_meets_fsspec(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from checkpoint_cases import trained\n"
        "from shardwise import checkpoint\n"
        "path = checkpoint.save(sys.argv[1], trained(), step=1).path\n"
        "checkpoint.load(checkpoint.latest(sys.argv[1]), trained())\n"
        "def refuse(*_): raise AssertionError('fsspec')\n"
        "fs = sys.modules.get('fsspec.core')\n"
        "if fs is not None: fs.url_to_fs = refuse\n"
        "checkpoint.load(path, trained())\n"
        "checkpoint.save(sys.argv[1], trained(), step=2)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    assert subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=env, timeout=120).returncode == 0


@pytest.mark.parametrize("scheme", ["file", "FILE", "local"])
def test_a_file_url_is_the_path(scheme: str, tmp_path: Path) -> None:
    """Through fsspec a save into it had no fsync and no rename, and a file that was exported anew was cut first."""
    folder = tmp_path / "a %20 b"
    assert checkpoint.locate(f"{scheme}://{folder}") == folder
    path = checkpoint.save(f"{scheme}://{folder}/", trained(), step=1).path
    assert path == folder / f"{STEP}1" and checkpoint.latest(folder) == path
    assert checkpoint.latest(f"{scheme}://{folder}") == path


def exported(url: str, source: Any) -> bytes | None:
    """The file there is after an export onto it, that may fail."""
    with suppress(OSError):
        checkpoint.export(source, url)
    FailingStore.at = 0
    fs, path = fsspec.core.url_to_fs(url)
    return fs.cat_file(path) if fs.exists(path) else None


@pytest.mark.parametrize("name", ["whole.safetensors", "[w]*.safetensors"])
@pytest.mark.parametrize("how", [BEFORE, AFTER, FROM_THEN_ON])
def test_an_export_that_fails_leaves_the_file_that_was_there(how: str, name: str, tmp_path: Path) -> None:
    """A store that opens files under their names had the beginning of the new one, and nothing of the old."""
    url, folder = f"failing://bucket/out/{name}", tmp_path / "run"
    checkpoint.save(folder, trained("adam", 1), step=1)
    first = exported(url, folder)
    checkpoint.save(folder, trained("adam", 2), step=2)
    FailingStore.reset()
    second, names = exported(url, folder), FailingStore.names
    # the last two remove what it was written as, and read it here
    assert first != second and names[:2] == ["open", "write"] and names[-3:] == ["copy", "delete", "get"]
    count = len(names) - 2
    for at in range(1, count + 1):
        FailingStore.reset()
        assert exported(url, folder / f"{STEP}1") == first
        FailingStore.reset(at, how)
        now = exported(url, folder)
        assert now == (second if how == AFTER and at == count else first)
        assert how == FROM_THEN_ON or list(objects("failing://bucket/out")) == [name]


def test_a_rename_that_is_not_done_and_not_said_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """HDFS answers so where the name is taken: the export seemed to be there, and the new file was removed."""
    checkpoint.save(tmp_path / "run", trained(), step=1)
    url = f"folders://{tmp_path}/out.safetensors"
    first = exported(url, tmp_path / "run")
    monkeypatch.setattr(FolderStore, "mv", lambda self, path, to: None)
    with pytest.raises(FileExistsError, match=f"{url}: the store did not rename"):
        checkpoint.export(tmp_path / "run", url)
    assert exported(url, tmp_path / "run") == first and [path.name for path in tmp_path.glob(".*")] == []


def test_a_store_that_neither_renames_nor_copies_is_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint.save(tmp_path / "run", trained(), step=1)
    for name in ("mv", "cp_file"):
        monkeypatch.setattr(FolderStore, name, getattr(fsspec.AbstractFileSystem, name))
    assert exported(f"folders://{tmp_path}/out.safetensors", tmp_path / "run")


def test_a_rank_that_cannot_write_leaves_the_file_that_was_there_in_a_store_with_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path / "run", trained(), step=1)
    url = f"folders://{tmp_path}/out.safetensors"
    first, write_all = exported(url, tmp_path / "run"), files.write_all
    checkpoint.save(tmp_path / "run", trained("adam", 3), step=2)

    def full(file: Any, data: Any) -> int:
        write_all(file, memoryview(data).cast("B")[:10])
        raise OSError("the disk is full")

    monkeypatch.setattr(files, "write_all", full)
    assert exported(url, tmp_path / "run") == first
    monkeypatch.setattr(files, "write_all", write_all)
    assert exported(url, tmp_path / "run") not in (first, None)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.safetensors", "run"]


@pytest.mark.parametrize("name", ["run[1]", "run?", "*"])
@pytest.mark.parametrize("root", ["memory://patterns", "folders://{}"])
def test_a_name_that_looks_like_a_pattern_is_a_name(root: str, name: str, tmp_path: Path) -> None:
    """fsspec took it for a pattern: what was removed was the checkpoint of another run, which the pattern matches."""
    root = root.format(tmp_path)
    for run in ("run1", name):
        for step in (1, 2):
            checkpoint.save(f"{root}/{run}", trained("adam", step), step=step)
    other = objects(f"{root}/run1")
    checkpoint.remove(f"{root}/{name}/{STEP}1")
    assert names(f"{root}/{name}") == ["2"] and objects(f"{root}/run1") == other
    # what a save removes of older ones, and of itself where it fails
    checkpoint.save(f"{root}/{name}", trained(), step=1, keep_last=1)
    checkpoint.save(f"{root}/{name}", trained(), step=3, keep_last=1)
    assert {file.split("/")[0] for file in objects(f"{root}/{name}")} == {f"{STEP}3"}
    assert objects(f"{root}/run1") == other and len(other) == 4


def test_removing_a_checkpoint_that_is_not_there_is_said() -> None:
    """It seemed to be removed, by a name with a slip in it."""
    checkpoint.save(RUN, trained(), step=1)
    with pytest.raises(FileNotFoundError, match=f"{RUN}/{STEP}7"):
        checkpoint.remove(f"{RUN}/{STEP}7")
    assert names(RUN) == ["1"]


def test_commands_take_urls() -> None:
    """In memory:// all of them run in this process."""
    runner, url = CliRunner(), "memory://commands/run"
    for step in (1, 2):
        checkpoint.save(url, trained("adam", step), step=step)

    def said(*command: str, status: int = 0) -> str:
        result = runner.invoke(cli.commands(), ["ckpt", *command])
        assert result.exit_code == status, result.output
        return result.output

    assert json.loads(said("show", f"{url}/{STEP}1", "--json"))["path"] == f"{url}/{STEP}1"
    assert f"{url}/{STEP}2: good" in said("verify", url)
    assert "differs in" in said("diff", f"{url}/{STEP}1", url, status=1)
    assert said("reshard", url, "memory://commands/cut", "--world-size", "2").endswith(
        f"memory://commands/cut/{STEP}2\n"
    )
    said("export", url, "memory://commands/whole.safetensors")
    assert "memory://commands/nothing is no checkpoint" in said("show", "memory://commands/nothing", status=2)
    assert "gs://bucket/run: " in said("show", "gs://bucket/run", status=2)
    assert "has a password" in said("show", "ftp://me:word@host/x", status=2)


def test_a_url_is_a_place_like_a_path() -> None:
    url = checkpoint.locate("S3://bucket/runs/7/")
    assert (str(url), url.name, str(url.parent), str(url / "best")) == (
        "s3://bucket/runs/7",
        "7",
        "s3://bucket/runs",
        "s3://bucket/runs/7/best",
    )
    assert os.fspath(url) == "s3://bucket/runs/7" and checkpoint.locate(url) is url
    assert checkpoint.locate("runs/7") == Path("runs/7")

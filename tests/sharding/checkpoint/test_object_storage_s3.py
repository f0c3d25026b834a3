"""Checkpoints in S3, of a server in this process: ranks save and load as on a local disk, or all say what is wrong.

Takes 30 s: ranks that die are waited for.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import MIX, bytes_of, trained as trained_alone
from checkpoint_nets import loaded, train, trained
from fsspec.config import conf
from lone_ranks import kill_me, lone_ranks
from optional import need
from ranks import run_ranks
from s3_server import s3_server, use_s3
from sharding_mixes import build, environment, shard
from sharding_steps import train_on
from torch import Tensor

from shardwise import checkpoint
from shardwise.sharding.checkpoint import files, object_saves, storage
from shardwise.sharding.checkpoint.places import Url

s3fs = need("s3fs")


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with s3_server() as address:
        yield address


def objects(folder: str) -> dict[str, bytes]:
    """What lies in a folder of the bucket, but for locks."""
    fs, root = fsspec.core.url_to_fs(folder)
    found = {name[len(root) + 1 :]: fs.cat_file(name) for name in fs.find(root)}
    return {name: data for name, data in found.items() if not name.startswith(".lock-")}


def save_there_and_here(address: str, url: str, folder: str) -> list[str]:
    """One model saved into the bucket and into a local folder, by rows of both ranks."""
    use_s3(address)
    model, optimizer = trained("adam", "rows")
    paths = []
    for place, asynchronous in ((url, False), (url, True), (folder, False), (folder, True)):
        step = 5 + asynchronous
        saving = checkpoint.save(place, model, optimizer, step=step, extra={"a": 1}, asynchronous=asynchronous)
        saving.wait()
        paths.append(str(saving.path))
    return paths


def go_on(address: str, paths: list[str]) -> list[tuple[list[float], dict[str, Tensor]]]:
    """The losses of further steps from each checkpoint by another plan, and the weights then."""
    use_s3(address)
    results = []
    for path in paths:
        model, optimizer = loaded(path, "adam", "columns" if dist.is_initialized() else "first")
        results.append((train(model, optimizer, range(2, 4)), checkpoint.full_state_dict(model)))
    return results


@pytest.mark.ranks
def test_two_ranks_save_the_files_of_a_local_folder_and_any_number_goes_on_alike(address: str, tmp_path: Path) -> None:
    url = "s3://bucket/both"
    first, second = run_ranks(2, save_there_and_here, address, url, str(tmp_path))
    assert first == second and first[1] == f"{url}/step-000000000006"
    local = {name: (tmp_path / name).read_bytes() for name in bytes_of(tmp_path) if name != ".lock"}
    assert objects(url) == local and len(local) == 6
    assert all(checkpoint.verify(path) == [] for path in checkpoint.steps(url))
    ends = [go_on(address, first[1::2]), *run_ranks(2, go_on, address, first[1::2])]
    for (losses, weights), (wanted, wanted_weights) in ends:
        assert losses == wanted and weights.keys() == wanted_weights.keys()
        assert all(torch.equal(weights[name], wanted_weights[name]) for name in weights)


@pytest.mark.ranks
@pytest.mark.full
def test_four_ranks_load_what_two_saved(address: str, tmp_path: Path) -> None:
    paths, _ = run_ranks(2, save_there_and_here, address, "s3://bucket/four", str(tmp_path))
    for (losses, weights), (wanted, wanted_weights) in run_ranks(4, go_on, address, paths[1::2]):
        assert losses == wanted
        assert all(torch.equal(weights[name], wanted_weights[name]) for name in weights)


def save_failing(address: str, place: str, rank: int, how: str) -> tuple[str, str, bool]:
    """A good save, and one that fails on a rank between two blocks; what that raised, and whether a third is good."""
    use_s3(address)
    object_saves._DEAD_SECONDS = 2.0
    model = shard(MIX, build(MIX, "adam"), environment())
    train_on(MIX, model, range(1))
    checkpoint.save(place, model, step=1)
    write_all, written = files.write_all, []

    def cut_off(file: Any, data: Any) -> int:
        written.append(len(data))
        if len(written) > 3:
            if how == "killed":
                kill_me()
            raise ConnectionResetError("the network is gone")
        return write_all(file, data)

    if dist.get_rank() == rank:
        files.write_all = cut_off
    kind, text = "", ""
    try:
        checkpoint.save(place, model, step=2, asynchronous=rank == 0).wait()
    except Exception as error:
        kind, text = type(error).__name__, str(error)
    files.write_all = write_all
    if how == "killed":
        return kind, text, True
    return kind, text, checkpoint.verify(checkpoint.save(place, model, step=3).path) == []


@pytest.mark.ranks
@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.full)])
def test_a_rank_that_fails_is_raised_by_all(rank: int, address: str) -> None:
    url = f"s3://bucket/failing{rank}"
    for kind, text, good in run_ranks(2, save_failing, address, url, rank, "cut off"):
        assert kind in ("ConnectionResetError", "OSError") and "the network is gone" in text and good
    assert {name.split("/")[0][-1] for name in objects(url)} == {"1", "3"}


@pytest.mark.ranks
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_rank_killed_between_its_blocks_ends_its_peer_by_name(rank: int, address: str) -> None:
    """Without a collective, and the next job finds the last good checkpoint and saves at once."""
    url = f"s3://bucket/killed{rank}"
    ranks = lone_ranks(2, save_failing, address, url, rank, "killed", deadline=100.0)
    assert ranks[rank].killed
    kind, text, _ = ranks[1 - rank].value or pytest.fail(f"{ranks}")
    assert kind == "RankFailure" and "in the save of" in text and "older checkpoints are untouched" in text
    newest = checkpoint.latest(url)
    assert newest is not None and newest.name.endswith("1") and checkpoint.verify(newest) == []
    model, optimizer = trained("adam")
    path = checkpoint.save(url, model, optimizer, step=2).path
    assert checkpoint.latest(url) == path and checkpoint.verify(path) == []
    assert {name.split("/")[0] for name in objects(url)} == {newest.name, path.name}


def save_nowhere(address: str, url: str) -> list[tuple[str, str]]:
    """What saving and loading raise."""
    use_s3(address)
    raised = []
    for ask in (lambda: checkpoint.save(url, *trained("adam"), step=1), lambda: loaded(f"{url}/step-1", "adam")):
        try:
            ask()
        except Exception as error:
            raised.append((type(error).__name__, str(error)))
    return raised


@pytest.mark.ranks
def test_a_bucket_that_is_not_there_is_named_on_all_ranks(address: str) -> None:
    for raised in run_ranks(2, save_nowhere, address, "s3://nowhere/run"):
        assert len(raised) == 2
        for kind, text in raised:
            # on the other rank it is the class that it derives from
            assert kind in ("FileNotFoundError", "OSError") and "s3://nowhere/run" in text and "not" in text
    for ask in (checkpoint.latest, checkpoint.steps):
        with pytest.raises(FileNotFoundError, match="s3://nowhere/run: The specified bucket does not exist"):
            ask("s3://nowhere/run")


def test_a_server_that_is_not_there_and_missing_credentials_are_said(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    without = {key: value for key, value in conf["s3"].items() if key not in ("key", "secret")}
    monkeypatch.setitem(conf, "s3", without)
    with pytest.raises(storage.StoreError, match="s3://bucket/run: cannot list it: NoCredentialsError"):
        checkpoint.latest("s3://bucket/run")
    # nobody listens on the port of discarded messages
    once = {"retries": {"max_attempts": 0}, "connect_timeout": 1}
    keys = {"key": "k", "secret": "s", "endpoint_url": "http://127.0.0.1:9", "config_kwargs": once}
    monkeypatch.setitem(conf, "s3", keys)
    monkeypatch.setattr(s3fs.S3FileSystem, "retries", 1)
    with pytest.raises(storage.StoreError, match="s3://bucket/run: cannot list it: .*127.0.0.1:9"):
        checkpoint.latest("s3://bucket/run")


def save_on(address: str, url: str, saves: int) -> tuple[int, int]:
    """As a job of its own, beside that of the other rank: saves that went well, and that were refused."""
    use_s3(address)
    object_saves._LOOK_SECONDS = object_saves._RENEW_SECONDS = 0.01
    rank, well, refused = dist.get_rank(), 0, 0
    model = trained_alone()
    for step in range(saves):
        try:
            checkpoint.save(url, model, step=100 * rank + step, keep_last=None)
            well += 1
        except BlockingIOError as error:
            # who it was may be gone when its name is read
            assert "another save is under way there, by " in str(error)
            refused += 1
    return well, refused


@pytest.mark.ranks
def test_two_jobs_that_save_into_one_folder_break_nothing(address: str) -> None:
    counts = run_ranks(2, save_on, address, "s3://bucket/jobs", 6)
    assert all(well + refused == 6 for well, refused in counts)
    paths = checkpoint.steps("s3://bucket/jobs")
    assert len(paths) == sum(well for well, _ in counts) > 0
    assert all(checkpoint.verify(path) == [] for path in paths)
    assert {name.split("/")[0] for name in objects("s3://bucket/jobs")} == {path.name for path in paths}


def test_two_locks_of_one_number_are_never_there(address: str) -> None:
    """The store itself refuses the second, whatever both saw before."""
    file = Url("s3://bucket/lock/.lock-000000001")
    storage.create_alone(file, b"first")
    with pytest.raises(FileExistsError, match="s3://bucket/lock"):
        storage.create_alone(file, b"second")
    # one that asks again since it missed the answer is no second one
    storage.create_alone(file, b"first")


def test_an_empty_object_is_a_damaged_one_and_no_outage(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """S3 has no range of it: nothing was passed over by `latest`, and an empty lock ended every save."""
    url, model = "s3://bucket/empty", trained_alone()
    good, bad = (checkpoint.save(url, model, step=step).path for step in (1, 2))
    storage.overwrite(Url(f"{bad}/manifest.json"), b"")
    assert checkpoint.latest(url) == good and "manifest.json" in checkpoint.verify(bad)[0]
    storage.overwrite(Url(url) / ".lock-000000009", b"")
    monkeypatch.setattr(object_saves, "_LOOK_SECONDS", 0.05)
    monkeypatch.setattr(object_saves, "_LEASE_SECONDS", 0.1)
    assert checkpoint.verify(checkpoint.save(url, model, step=3).path) == []


def test_a_pattern_in_the_name_of_a_run_removes_nothing_of_another(address: str) -> None:
    """fsspec took the name for the pattern that it is: the older checkpoint of run1 was removed instead."""
    model = trained_alone()
    for run in ("run1", "run[1]"):
        for step in (1, 2):
            checkpoint.save(f"s3://bucket/pattern/{run}", model, step=step, keep_last=1 if "[" in run else 3)
    assert [path.name[-1] for path in checkpoint.steps("s3://bucket/pattern/run1")] == ["1", "2"]
    assert {name.split("/")[0][-1] for name in objects("s3://bucket/pattern/run[1]")} == {"2"}


def test_a_save_costs_few_requests(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    call = s3fs.S3FileSystem._call_s3

    async def counted(self: Any, method: str, *arguments: Any, **settings: Any) -> Any:
        calls.append(method)
        return await call(self, method, *arguments, **settings)

    monkeypatch.setattr(s3fs.S3FileSystem, "_call_s3", counted)
    model, optimizer = trained("adam")
    saved = []
    for step in range(1, 6):
        calls.clear()
        checkpoint.save("s3://bucket/costs", model, optimizer, step=step, keep_last=3)
        saved.append({name: calls.count(name) for name in sorted(set(calls))})
    calls.clear()
    path = checkpoint.latest("s3://bucket/costs")
    assert path is not None and calls[:2] == ["list_objects_v2", "get_object"]
    # the lock twice and the manifest; the file's own is not counted here
    expected = {"put_object": 3, "list_objects_v2": 9, "get_object": 5, "delete_object": 1, "delete_objects": 2}
    assert saved[-1] == saved[-2] == expected

"""Files that are cut off, changed or made by an enemy are named and refused before anything is loaded or allocated."""

from __future__ import annotations

import json
import os
import pickle
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint_cases import MIX, rewrite, same, saved, seal, trained, values_of
from ranks import run_ranks
from sharding_mixes import build, environment, shard

from shardwise import checkpoint
from shardwise.checkpoint import CheckpointDamaged
from shardwise.sharding.checkpoint.files import BLOCK_BYTES

FILE, MANIFEST = "rank-00000.safetensors", "manifest.json"


def refused(path: Path, match: str, error: type[Exception] = CheckpointDamaged) -> None:
    """Loading raises, names the file, changes nothing and allocates next to nothing."""
    model = trained("adam", 1)
    before = values_of(model)
    tracemalloc.start()
    with pytest.raises(error, match=match):
        checkpoint.load(path, model)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2 * BLOCK_BYTES
    assert same(before, values_of(model))


@pytest.mark.parametrize("size", [0, 7, 100, -1])
def test_a_truncated_file_is_named_and_refused(size: int, tmp_path: Path) -> None:
    """Fault 42. The size is all that `latest` looks at."""
    older, path = saved(tmp_path, step=1), saved(tmp_path, step=2)
    os.truncate(path / FILE, size if size >= 0 else (path / FILE).stat().st_size - 1)
    refused(path, f"{FILE} has .* bytes, it was saved with")
    assert checkpoint.latest(tmp_path) == older
    assert len(checkpoint.verify(path)) == 1 and FILE in checkpoint.verify(path)[0]


def test_every_flipped_bit_is_found(tmp_path: Path) -> None:
    """Fault 42: in the header's length, the header, the first and the last number."""
    path = saved(tmp_path)
    good = (path / FILE).read_bytes()
    header = int.from_bytes(good[:8], "little")
    for at in (0, 7, 8, 8 + header // 2, 8 + header, len(good) - 1):
        (path / FILE).write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        refused(path, FILE)
        assert any(FILE in problem for problem in checkpoint.verify(path))
    (path / FILE).write_bytes(good)
    assert checkpoint.verify(path) == []


def test_a_missing_file_or_manifest_is_named(tmp_path: Path) -> None:
    path = saved(tmp_path)
    (path / FILE).unlink()
    refused(path, FILE)
    (path / MANIFEST).unlink()
    refused(path, MANIFEST, FileNotFoundError)
    assert checkpoint.latest(tmp_path) is None and checkpoint.latest(tmp_path / "nowhere") is None
    assert MANIFEST in checkpoint.verify(path)[0]


def poison(value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["table/embedding_bags.t0.weight/momentum2/0:40/0:8"][31, 5] = value

    return change


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_an_optimizer_state_that_is_not_finite_is_refused_by_name(value: float, tmp_path: Path) -> None:
    """Fault 30: it would make every row that it meets NaN, some steps later."""
    path = saved(tmp_path)
    tensors = safetensors.torch.load_file(path / FILE)
    poison(value)(tensors)
    safetensors.torch.save_file(tensors, path / FILE)
    seal(path)
    refused(path, rf"t0.weight: adam momentum2: {value} at \[31, 5\].*{FILE}", ValueError)


def set_in(*keys: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """Put a value into a manifest."""

    def change(manifest: dict[str, Any]) -> None:
        place: Any = manifest
        for key in keys[:-1]:
            place = place[key]
        place[keys[-1]] = value

    return change


def name_file(name: str) -> Callable[[dict[str, Any]], None]:
    """Let all tensors be in another file."""

    def change(manifest: dict[str, Any]) -> None:
        manifest["files"][0]["name"] = name
        for tensor in manifest["tensors"]:
            tensor["file"] = name

    return change


def twice(manifest: dict[str, Any]) -> None:
    manifest["tensors"].append(manifest["tensors"][0])


def overlapping(manifest: dict[str, Any]) -> None:
    """A second piece over the first rows."""
    first = manifest["tensors"][0]
    key = first["key"].replace("/0:40/", "/0:1/")
    manifest["tensors"].append({**first, "rows": [0, 1], "shape": [1, 8], "key": key})


MANIFESTS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "a path upwards": (name_file("../rank-00000.safetensors"), "no name of a checkpoint's file"),
    "an absolute path": (name_file("/etc/passwd"), "no name of a checkpoint's file"),
    "a hidden path": (name_file("a/../../rank-00000.safetensors"), "no name of a checkpoint's file"),
    "a huge table": (set_in("tables", "embedding_bags.t0.weight", "rows", value=2**50), "shards hold"),
    "a huge piece": (set_in("tensors", 0, "shape", value=[2**40, 8]), "has shape"),
    "huge rows": (set_in("tensors", 0, "rows", value=[0, 2**62]), "has shape"),
    "a negative size": (set_in("tensors", 0, "shape", value=[-1, 8]), "is no size"),
    "a size with a point": (set_in("tables", "embedding_bags.t0.weight", "rows", value=40.0), "is no size"),
    "a size that is a word": (set_in("step", value=True), "is no size"),
    "an unknown dtype": (set_in("tensors", 0, "dtype", value="nn"), "dtype 'nn' is unknown"),
    "an unknown kind": (set_in("tensors", 0, "kind", value="code"), "of kind 'code'"),
    "a file that is not listed": (set_in("tensors", 0, "file", value="rank-00009.safetensors"), "not listed"),
    "another key": (set_in("tensors", 0, "key", value="x"), "has key 'x'"),
    "a tensor twice": (twice, "listed twice"),
    "a file twice": (lambda manifest: manifest["files"].append(manifest["files"][0]), "listed twice"),
    "another step than its folder's": (set_in("step", value=3), "is of step 3, its folder of step 1"),
    "overlapping pieces": (overlapping, "some twice"),
    "a missing piece": (lambda manifest: manifest["tensors"].pop(0) and None, "has no rows"),
    "no tables": (lambda manifest: manifest.pop("tables") and None, "tables"),
    "a list": (set_in("tables", value=[]), "is no object"),
    "a bad checksum": (set_in("files", 0, "sha256", value="0" * 63), "sha256"),
}


@pytest.mark.parametrize("what", MANIFESTS)
def test_a_malicious_manifest_is_refused(what: str, tmp_path: Path) -> None:
    """Fault 45."""
    path = saved(tmp_path)
    change, match = MANIFESTS[what]
    rewrite(path, change)
    refused(path, f"(?s){MANIFEST}.*{match}")
    assert checkpoint.latest(tmp_path) is None and len(checkpoint.verify(path)) == 1


TEXTS = {
    "keys twice": (b'{"format": 1, "format": 1}', "'format' is there twice"),
    "not a number": (b'{"format": NaN}', "NaN is no JSON number"),
    "another format": (b'{"format": 3}', "format 3, this version reads formats 1 and 2"),
    "format 1 with more": (b'{"format": 1, "sha256": ""}', "format 1 with other keys than it has"),
    "format 2 without a checksum": (b'{"format": 2}', "was changed after it was written"),
    "brackets": (b"[" * 200_000, "nested too deeply|Decode"),
    "a long number": (b'{"format": 1' + b"0" * 10_000 + b"}", "format|digits"),
    "pickle": (pickle.dumps({"format": 1}), "utf-8|Decode|decode"),
    "nothing": (b"", "Decode"),
}


@pytest.mark.parametrize("what", TEXTS)
def test_a_manifest_that_is_no_json_is_refused(what: str, tmp_path: Path) -> None:
    """Fault 45."""
    path = saved(tmp_path)
    text, match = TEXTS[what]
    (path / MANIFEST).write_bytes(text)
    refused(path, f"(?s){MANIFEST}.*({match})")


def test_a_manifest_of_a_gigabyte_is_refused_unread(tmp_path: Path) -> None:
    """Fault 45."""
    path = saved(tmp_path)
    os.truncate(path / MANIFEST, 2**30)
    refused(path, f"{MANIFEST} has {2**30} bytes")


@pytest.mark.parametrize("name", [FILE, MANIFEST])
def test_a_link_in_the_place_of_a_file_is_not_followed(name: str, tmp_path: Path) -> None:
    """Fault 45: it may lead anywhere."""
    path = saved(tmp_path / "steps")
    os.rename(path / name, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", path / name)
    refused(path, name)


def with_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[bytes], bytes]:
    """A file whose header is changed, its length with it."""

    def made(data: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        text = change(header) or json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + size :]

    return made


def first(header: dict[str, Any]) -> Any:
    return next(iter(header.values()))


def all_at_once(header: dict[str, Any]) -> None:
    """Two tensors of one size at the same bytes."""
    a, b = [key for key in header if "t0.weight" in key][:2]
    header[b]["data_offsets"] = header[a]["data_offsets"]


FILES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a header of 2**62 bytes": (lambda data: (2**62).to_bytes(8, "little") + data[8:], "header would be"),
    "a header as long as the file": (lambda data: len(data).to_bytes(8, "little") + data[8:], "header would be"),
    "a huge shape": (with_header(lambda header: first(header).update(shape=[2**40, 2**20])), "the manifest says"),
    "another dtype": (with_header(lambda header: first(header).update(dtype="I32")), "the manifest says"),
    "offsets outside": (
        with_header(lambda header: first(header).update(data_offsets=[2**40, 2**40 + 1280])),
        "overlap or leave",
    ),
    "offsets backwards": (with_header(lambda header: first(header).update(data_offsets=[1280, 0])), "manifest says"),
    "offsets that overlap": (with_header(all_at_once), "overlap or leave"),
    "a tensor less": (with_header(lambda header: header.pop(next(iter(header))) and None), "list other tensors"),
    "keys twice": (with_header(lambda header: b'{"a": {}, "a": {}}'), "is there twice"),
    "words for sizes": (with_header(lambda header: first(header).update(data_offsets=["a", "b"])), "no safetensors"),
    "pickle": (lambda data: pickle.dumps({"a": 1}).ljust(len(data), b"\0"), "header would be"),
}


@pytest.mark.parametrize("what", FILES)
def test_a_malicious_file_is_refused_with_the_right_checksum(what: str, tmp_path: Path) -> None:
    """Fault 45: an enemy who can write a file can write its checksum."""
    path = saved(tmp_path)
    change, match = FILES[what]
    (path / FILE).write_bytes(change((path / FILE).read_bytes()))
    seal(path)
    refused(path, f"{FILE}.*{match}")
    assert FILE in checkpoint.verify(path)[0]


def load_here(path: str) -> tuple[str, str, bool]:
    model = shard(MIX, build(MIX, "adam"), environment())
    before = {name: value.clone() for name, value in model.named_parameters()}
    try:
        checkpoint.load(path, model)
    except Exception as error:
        unchanged = all(torch.equal(value, before[name]) for name, value in model.named_parameters())
        return type(error).__name__, str(error), unchanged
    return "", "", False


def save_here(folder: str) -> None:
    checkpoint.save(folder, shard(MIX, build(MIX, "adam"), environment()), step=3)


@pytest.mark.ranks
def test_all_ranks_refuse_what_one_of_them_finds(tmp_path: Path) -> None:
    """Fault 42: each file is read by one rank, and all raise before any of them changes a row."""
    run_ranks(2, save_here, str(tmp_path))
    path = tmp_path / "step-000000000003"
    assert sorted(file.name for file in path.iterdir()) == [MANIFEST, FILE, "rank-00001.safetensors"]
    data = bytearray((path / "rank-00001.safetensors").read_bytes())
    data[-1] ^= 1
    (path / "rank-00001.safetensors").write_bytes(data)
    for world in (1, 2, 4):
        for kind, text, unchanged in run_ranks(world, load_here, str(path)):
            assert (kind, unchanged) == ("CheckpointDamaged", True)
            assert "rank-00001.safetensors has other bytes" in text

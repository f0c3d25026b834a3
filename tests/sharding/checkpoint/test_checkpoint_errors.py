"""Files that are cut off, changed by a bit or made by an enemy are named and refused, before anything is allocated."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import tracemalloc
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint_cases import MIX, rewrite, same, saved, seal, trained, values_of, without_checksum
from click.testing import CliRunner
from ranks import run_ranks
from sharding_mixes import build, environment, shard

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
    checkpoint,
    cli,
)
from shardwise.checkpoint import CheckpointDamaged
from shardwise.sharding.checkpoint.files import BLOCK_BYTES

MANIFEST, FILE, STEP = "manifest.json", "rank-00000.safetensors", "step-000000000001"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of three tables with the states of Adam."""
    return saved(tmp_path_factory.mktemp("good"))


@pytest.fixture
def path(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / STEP))


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


def test_a_missing_file_or_manifest_is_named(path: Path, tmp_path: Path) -> None:
    (path / FILE).unlink()
    refused(path, FILE)
    (path / MANIFEST).unlink()
    refused(path, MANIFEST, FileNotFoundError)
    assert checkpoint.latest(tmp_path) is None and checkpoint.latest(tmp_path / "nowhere") is None
    assert MANIFEST in checkpoint.verify(path)[0]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
def test_an_optimizer_state_that_is_not_finite_is_refused_by_name(value: float, path: Path) -> None:
    """Fault 30: it would make every row that it meets NaN, some steps later."""
    tensors = safetensors.torch.load_file(path / FILE)
    tensors["table/embedding_bags.t0.weight/momentum2/0:40/0:8"][31, 5] = value
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


@pytest.mark.parametrize("case", MANIFESTS)
def test_a_malicious_manifest_is_refused(case: str, path: Path, tmp_path: Path) -> None:
    """Fault 45."""
    change, match = MANIFESTS[case]
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


@pytest.mark.parametrize("case", TEXTS)
def test_a_manifest_that_is_no_json_is_refused(case: str, path: Path) -> None:
    """Fault 45."""
    text, match = TEXTS[case]
    (path / MANIFEST).write_bytes(text)
    refused(path, f"(?s){MANIFEST}.*({match})")


def test_a_manifest_of_a_gigabyte_is_refused_unread(path: Path) -> None:
    """Fault 45."""
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

    def edit(data: bytes) -> bytes:
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        text = change(header) or json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + data[8 + size :]

    return edit


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


@pytest.mark.parametrize("case", FILES)
def test_a_malicious_file_is_refused_with_the_right_checksum(case: str, path: Path) -> None:
    """Fault 45: an enemy who can write a file can write its checksum."""
    change, match = FILES[case]
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


def small() -> EmbeddingBagCollection:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(3, 4, "t", feature_names=["f"])])
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
    return ebc


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.save(tmp_path_factory.mktemp("flips"), small(), step=1, extra={"epoch": 3}).path


@pytest.fixture
def tiny(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / STEP))


def flipped(file: Path, bits: Iterable[int]) -> Iterator[int]:
    """Each of `bits`, while that bit of the file is flipped; at the end the file is as it was."""
    good = file.read_bytes()
    opened = os.open(file, os.O_WRONLY)
    try:
        for bit in bits:
            os.pwrite(opened, bytes([good[bit // 8] ^ (1 << bit % 8)]), bit // 8)
            yield bit
            os.pwrite(opened, good[bit // 8 : bit // 8 + 1], bit // 8)
    finally:
        os.pwrite(opened, good, 0)
        os.close(opened)


def flips_refused(path: Path, name: str, bits: Iterable[int]) -> int:
    """How many flips of a file `verify` named and `load` refused with the model as it was: all, or this raises."""
    model, count = small(), 0
    before = values_of(model)
    for bit in flipped(path / name, bits):
        errors = checkpoint.verify(path)
        assert errors and name in errors[0], f"verify does not see bit {bit} of {name}: {errors}"
        with pytest.raises(CheckpointDamaged, match=name):
            checkpoint.load(path, model)
        count += 1
    assert same(before, values_of(model))
    assert checkpoint.verify(path) == [] and checkpoint.load(path, model).step == 1
    return count


@pytest.mark.parametrize("name", [MANIFEST, FILE])
def test_no_flipped_bit_of_a_file_loads_as_another_state(name: str, tiny: Path) -> None:
    """The step 1 of a manifest became 3: it loaded, and `verify` found nothing. So did 1,086 of 10,072 flips."""
    bits = range(8 * (tiny / name).stat().st_size)
    assert flips_refused(tiny, name, bits) == len(bits)


def test_whatever_reads_a_checkpoint_refuses_a_manifest_that_was_changed(tiny: Path, tmp_path: Path) -> None:
    older = Path(shutil.copytree(tiny, tmp_path / "whole" / STEP))
    place = (tiny / MANIFEST).read_bytes().index(b'"epoch": 3') + 9
    refusals = 0
    for _ in flipped(tiny / MANIFEST, (8 * place + bit for bit in range(8))):
        readers: dict[str, Callable[[], object]] = {
            "load": lambda: checkpoint.load(tiny, small()),
            "read_manifest": lambda: checkpoint.read_manifest(tiny),
            "full_state_dict": lambda: checkpoint.full_state_dict(tiny),
            "diff": lambda: checkpoint.diff(older, tiny),
            "reshard": lambda: checkpoint.reshard(tiny, tmp_path / "anew", world_size=2),
            "export": lambda: checkpoint.export(tiny, tmp_path / "all.safetensors"),
            "to_dcp": lambda: checkpoint.to_dcp(tiny, tmp_path / "dcp"),
        }
        for read in readers.values():
            with pytest.raises(CheckpointDamaged, match=MANIFEST):
                read()
            refusals += 1
        assert checkpoint.latest(tiny.parent) is None and checkpoint.steps(tiny.parent) == [tiny]
        for command in (["show", str(tiny)], ["verify", str(tiny)], ["diff", str(older), str(tiny)]):
            result = CliRunner().invoke(cli.commands(), ["ckpt", *command])
            # what verify is asked is whether it is whole
            assert (
                result.exit_code == (1 if command[0] == "verify" else 2) and MANIFEST in result.output + result.stderr
            )
    assert refusals == 8 * 7
    assert {entry.name for entry in tmp_path.iterdir()} == {STEP, "whole"}


def test_a_folder_is_of_the_step_that_its_manifest_says(tiny: Path) -> None:
    """A flipped bit in the folder's name, or a folder that was renamed, made `latest` find the wrong one as newest."""
    other = tiny.with_name("step-000000000005")
    os.rename(tiny, other)
    with pytest.raises(CheckpointDamaged, match="is of step 1, its folder of step 5"):
        checkpoint.load(other, small())
    assert len(checkpoint.verify(other)) == 1 and checkpoint.latest(tiny.parent) is None
    # a step that was saved again, and a name that says no step
    for name in (f"{STEP}.2", "best"):
        other = Path(os.rename(other, tiny.with_name(name)) or tiny.with_name(name))
        assert checkpoint.verify(other) == [] and checkpoint.load(other, small()).step == 1


def test_no_flipped_bit_of_a_folders_name_changes_the_step(written: Path, tmp_path: Path) -> None:
    model, outcomes = small(), {"loaded": 0, "refused": 0}
    for bit in (bit for bit in range(8 * len(STEP)) if bit % 8 != 7):
        # bit 7 makes it no UTF-8, which safetensors does not open
        name = bytearray(STEP.encode())
        name[bit // 8] ^= 1 << bit % 8
        if b"/" in name or b"\0" in name:
            continue
        place = tmp_path / name.decode()
        place.symlink_to(written)
        assert checkpoint.latest(tmp_path) is None
        try:
            assert checkpoint.load(place, model).step == 1
            outcomes["loaded"] += 1
        except CheckpointDamaged as error:
            assert "its folder of step" in str(error)
            outcomes["refused"] += 1
        place.unlink()
    # digits that stay digits
    assert outcomes["refused"] > 30 and outcomes["loaded"] > 60


def test_a_manifest_from_before_there_were_checksums_loads_and_is_named(tiny: Path, tmp_path: Path) -> None:
    model = small()
    without_checksum(tiny)
    with pytest.warns(UserWarning, match=f"{MANIFEST} has no checksum of its own"):
        loaded = checkpoint.load(tiny, model)
    assert (loaded.step, loaded.extra) == (1, {"epoch": 3})
    assert [MANIFEST in line and "no checksum of its own" in line for line in checkpoint.verify(tiny)] == [True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoint.latest(tiny.parent) == tiny
    with pytest.warns(UserWarning, match="no checksum of its own"):
        anew = checkpoint.reshard(tiny, tmp_path / "anew")
    assert checkpoint.verify(anew) == [] and not checkpoint.diff(anew, anew)


def test_a_manifest_does_not_lose_its_checksum_by_its_beginning_alone(tiny: Path) -> None:
    """Format 1 with a checksum, format 2 without, other spaces: nothing of these is taken for an old manifest."""
    good = (tiny / MANIFEST).read_bytes()
    begin = b'{"format": 2, "sha256": "'
    assert good.startswith(begin) and json.loads(good)["format"] == 2
    for other in (
        good.replace(b'"format": 2', b'"format": 1', 1),
        good.replace(b'"sha256"', b'"sha257"', 1).replace(b'"format": 2', b'"format": 1', 1),
        b'{"format": 2, ' + good[len(begin) + 64 + 3 :],
        b" " + good,
        good + b"\n",
        good.replace(b": ", b":", 1),
        good[:-1],
        good.upper(),
    ):
        (tiny / MANIFEST).write_bytes(other)
        assert len(checkpoint.verify(tiny)) == 1
        with pytest.raises(CheckpointDamaged, match=MANIFEST):
            checkpoint.load(tiny, small())


def test_what_is_written_is_what_is_read(tiny: Path) -> None:
    """`extra` of any text, and a manifest that is written anew with its checksum."""
    extra = {"é \u2028": ['"sha256": "', {"": None}, 1e300, -0.0, "\ud800"]}
    rewrite(tiny, lambda manifest: manifest.update(extra=extra))
    assert checkpoint.verify(tiny) == []
    assert checkpoint.load(tiny, small()).extra == extra
    assert torch.is_tensor(checkpoint.full_state_dict(tiny)["embedding_bags.t.weight"])

"""What lies on the disk: files that safetensors reads, written and read a block at a time; which steps are kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from checkpoint_cases import same, trained, values_of
from torch import Tensor, nn

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
    checkpoint,
)
from shardwise.sharding.checkpoint import files, manifest

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
    found = safetensors.torch.load_file(path / FILE)
    assert set(found) == {"dense/a/weight", "dense/b/weight"}
    for name, value in net.named_buffers():
        one = found[f"dense/{name}/weight"]
        assert one.dtype == value.dtype and torch.equal(one, value)
    assert checkpoint.verify(path) == []


def wide() -> EmbeddingBagCollection:
    """A table of 1 MiB with its states."""
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(4096, 64, "t", feature_names=["f"])])
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
    ebc.fused_optimizer()
    return ebc


def test_no_more_than_a_block_of_a_tensor_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of the largest piece that is written, hashed or read at a time."""
    block, held = 64 * 1024, {"write": 0, "read": 0, "pieces": 0}
    monkeypatch.setattr(files, "BLOCK_BYTES", block)
    write_all, read = files.write_all, files.TensorFiles.read

    def counted_write(file: Any, data: Any) -> int:
        held["write"] = max(held["write"], memoryview(data).nbytes)
        return write_all(file, data)

    def counted_read(self: Any, stored: Any, box: Any) -> Tensor:
        found = read(self, stored, box)
        held["read"], held["pieces"] = max(held["read"], found.nbytes), held["pieces"] + 1
        return found

    monkeypatch.setattr(files, "write_all", counted_write)
    monkeypatch.setattr(files.TensorFiles, "read", counted_read)
    model, other = wide(), wide()
    path = checkpoint.save(tmp_path, model, step=1).path
    checkpoint.load(path, other)
    assert same(values_of(other), values_of(model))
    assert held["write"] <= block and held["read"] <= block
    # 16 blocks of rows, and one of the state, which is read twice
    assert held["pieces"] == 16 + 2


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
    found: list[Any] = []
    for _ in range(levels - 1):
        found = [found]
    return found


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
    assert {one.state for one in manifest.tensors} == {"weight", "momentum1", "momentum2"}
    assert [group["lr"] for group in manifest.fused] == [0.05]

"""No bit of a checkpoint can change unseen: not of its manifest, of its other files, or of the name of its folder."""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from checkpoint_cases import rewrite, same, values_of, without_checksum
from click.testing import CliRunner

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
    checkpoint,
    cli,
)
from shardwise.checkpoint import CheckpointDamaged

MANIFEST, FILE, STEP = "manifest.json", "rank-00000.safetensors", "step-000000000001"


def small() -> EmbeddingBagCollection:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(3, 4, "t", feature_names=["f"])])
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
    return ebc


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint.save(tmp_path_factory.mktemp("flips"), small(), step=1, extra={"epoch": 3}).path


@pytest.fixture
def path(written: Path, tmp_path: Path) -> Path:
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


def refused(path: Path, name: str, bits: Iterable[int]) -> int:
    """How many flips of a file `verify` named and `load` refused with the model as it was: all, or this raises."""
    model, count = small(), 0
    before = values_of(model)
    for bit in flipped(path / name, bits):
        found = checkpoint.verify(path)
        assert found and name in found[0], f"verify does not see bit {bit} of {name}: {found}"
        with pytest.raises(CheckpointDamaged, match=name):
            checkpoint.load(path, model)
        count += 1
    assert same(before, values_of(model))
    assert checkpoint.verify(path) == [] and checkpoint.load(path, model).step == 1
    return count


@pytest.mark.parametrize("name", [MANIFEST, FILE])
def test_no_flipped_bit_of_a_file_loads_as_another_state(name: str, path: Path) -> None:
    """The step 1 of a manifest became 3: it loaded, and `verify` found nothing. So did 1,086 of 10,072 flips."""
    bits = range(8 * (path / name).stat().st_size)
    assert refused(path, name, bits) == len(bits)


def test_whatever_reads_a_checkpoint_refuses_a_manifest_that_was_changed(path: Path, tmp_path: Path) -> None:
    older = Path(shutil.copytree(path, tmp_path / "whole" / STEP))
    place = (path / MANIFEST).read_bytes().index(b'"epoch": 3') + 9
    seen = 0
    for _ in flipped(path / MANIFEST, (8 * place + bit for bit in range(8))):
        readers: dict[str, Callable[[], object]] = {
            "load": lambda: checkpoint.load(path, small()),
            "read_manifest": lambda: checkpoint.read_manifest(path),
            "full_state_dict": lambda: checkpoint.full_state_dict(path),
            "diff": lambda: checkpoint.diff(older, path),
            "reshard": lambda: checkpoint.reshard(path, tmp_path / "anew", world_size=2),
            "export": lambda: checkpoint.export(path, tmp_path / "all.safetensors"),
            "to_dcp": lambda: checkpoint.to_dcp(path, tmp_path / "dcp"),
        }
        for read in readers.values():
            with pytest.raises(CheckpointDamaged, match=MANIFEST):
                read()
            seen += 1
        assert checkpoint.latest(path.parent) is None and checkpoint.steps(path.parent) == [path]
        for command in (["show", str(path)], ["verify", str(path)], ["diff", str(older), str(path)]):
            result = CliRunner().invoke(cli.commands(), ["ckpt", *command])
            assert result.exit_code == 1 and MANIFEST in result.output + result.stderr
    assert seen == 8 * 7
    assert {one.name for one in tmp_path.iterdir()} == {STEP, "whole"}


def test_a_folder_is_of_the_step_that_its_manifest_says(path: Path) -> None:
    """A flipped bit in the folder's name, or a folder that was renamed, made `latest` find the wrong one as newest."""
    other = path.with_name("step-000000000005")
    os.rename(path, other)
    with pytest.raises(CheckpointDamaged, match="is of step 1, its folder of step 5"):
        checkpoint.load(other, small())
    assert len(checkpoint.verify(other)) == 1 and checkpoint.latest(path.parent) is None
    # a step that was saved again, and a name that says no step
    for name in (f"{STEP}.2", "best"):
        other = Path(os.rename(other, path.with_name(name)) or path.with_name(name))
        assert checkpoint.verify(other) == [] and checkpoint.load(other, small()).step == 1


def test_no_flipped_bit_of_a_folders_name_changes_the_step(written: Path, tmp_path: Path) -> None:
    model, seen = small(), {"loaded": 0, "refused": 0}
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
            seen["loaded"] += 1
        except CheckpointDamaged as error:
            assert "its folder of step" in str(error)
            seen["refused"] += 1
        place.unlink()
    # digits that stay digits
    assert seen["refused"] > 30 and seen["loaded"] > 60


def test_a_manifest_from_before_there_were_checksums_loads_and_is_named(path: Path, tmp_path: Path) -> None:
    model = small()
    without_checksum(path)
    with pytest.warns(UserWarning, match=f"{MANIFEST} has no checksum of its own"):
        loaded = checkpoint.load(path, model)
    assert (loaded.step, loaded.extra) == (1, {"epoch": 3})
    assert [MANIFEST in line and "no checksum of its own" in line for line in checkpoint.verify(path)] == [True]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert checkpoint.latest(path.parent) == path
    with pytest.warns(UserWarning, match="no checksum of its own"):
        anew = checkpoint.reshard(path, tmp_path / "anew")
    assert checkpoint.verify(anew) == [] and not checkpoint.diff(anew, anew)


def test_a_manifest_does_not_lose_its_checksum_by_its_beginning_alone(path: Path) -> None:
    """Format 1 with a checksum, format 2 without, other spaces: nothing of these is taken for an old manifest."""
    good = (path / MANIFEST).read_bytes()
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
        (path / MANIFEST).write_bytes(other)
        assert len(checkpoint.verify(path)) == 1
        with pytest.raises(CheckpointDamaged, match=MANIFEST):
            checkpoint.load(path, small())


def test_what_is_written_is_what_is_read(path: Path) -> None:
    """`extra` of any text, and a manifest that is written anew with its checksum."""
    extra = {"é \u2028": ['"sha256": "', {"": None}, 1e300, -0.0, "\ud800"]}
    rewrite(path, lambda manifest: manifest.update(extra=extra))
    assert checkpoint.verify(path) == []
    assert checkpoint.load(path, small()).extra == extra
    assert torch.is_tensor(checkpoint.full_state_dict(path)["embedding_bags.t.weight"])

"""Batches of Criteo's numpy files are TorchRec's: recorded with its own class, over ranks, stages and orders."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkout import golden

from shardwise.data.criteo_arrays import BinaryCriteoUtils, InMemoryBinaryCriteoIterDataPipe

RECORDED = golden("criteo_arrays")
# rows of the files, batch size, ranks, stage, drop_last, shuffle_batches, shuffle_training_set, mmap_mode
CASES: list[tuple[list[int], int, int, str, bool, bool, bool, bool]] = [
    ([10, 7, 9], 4, 2, "train", False, False, False, False),
    ([10, 7, 9], 4, 3, "train", True, False, False, False),
    ([10, 7, 9], 4, 2, "train", False, True, True, False),
    ([16, 1], 8, 2, "train", False, False, False, False),
    ([21], 4, 2, "val", False, False, False, True),
    ([21], 4, 2, "test", False, False, False, False),
    ([5], 4, 3, "train", False, True, False, True),
    ([10, 7, 9], 4, 3, "train", False, False, True, True),
]
RANGES: list[tuple[list[int], int, int, int | None]] = [
    ([5, 3, 9], 2, 0, None), ([5, 3, 9], 3, 2, None), ([5, 3, 9], 4, 1, 12), ([10], 3, 5, 9)
]  # fmt: skip


def files(folder: Path, lengths: list[int]) -> list[list[str]]:
    """A row's number is in all of its dense columns, in its ids and, odd or even, in its label."""
    paths: list[list[str]] = [[], [], []]
    first = 0
    for day, length in enumerate(lengths):
        ids = np.arange(first, first + length)[:, None]
        first += length
        arrays = {
            "dense": np.repeat(ids, 13, 1).astype(np.float32),
            "sparse": (ids * 31 + np.arange(26) * 7).astype(np.int32),
            "labels": (ids % 2).astype(np.int32),
        }
        for kind, (name, array) in zip(paths, arrays.items(), strict=True):
            kind.append(str(folder / f"{day}_{name}.npy"))
            np.save(kind[-1], array)
    return paths


def shown(pipe: InMemoryBinaryCriteoIterDataPipe) -> list[Any]:
    """How many batches, and of each the rows, a sum over its ids by their places, the labels and the size."""
    batches = []
    for batch in pipe:
        ids = batch.sparse_features.values().long()
        batches.append([
            batch.dense_features[:, 0].int().tolist(), int((ids * (1 + torch.arange(len(ids)) % 11)).sum()),
            batch.labels.tolist(), batch.sparse_features.stride(),
        ])  # fmt: skip
    return [len(pipe), batches]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_every_rank_has_the_batches_that_torchrec_gives_it(case: int, tmp_path: Path) -> None:
    lengths, size, ranks, stage, drop_last, shuffle_batches, shuffle_set, mmap = CASES[case]
    paths = files(tmp_path, lengths)
    for rank in range(ranks):
        pipe = InMemoryBinaryCriteoIterDataPipe(
            stage, *paths, batch_size=size, rank=rank, world_size=ranks, drop_last=drop_last,
            shuffle_batches=shuffle_batches, shuffle_training_set=shuffle_set, mmap_mode=mmap, hashes=[13] * 26,
        )  # fmt: skip
        assert shown(pipe) == RECORDED[str(case)][rank]


def test_rows_of_files_are_shared_out_as_torchrec_shares_them(tmp_path: Path) -> None:
    ours = []
    for lengths, ranks, start, last in RANGES:
        for rank in range(ranks):
            ranges, remainder = BinaryCriteoUtils.get_file_row_ranges_and_remainder(lengths, rank, ranks, start, last)
            ours.append([[[file, *rows] for file, rows in ranges.items()], remainder])
    assert ours == RECORDED["ranges"]
    dense, sparse, _ = files(tmp_path, [10, 7, 9])
    assert list(BinaryCriteoUtils.get_shape_from_npy(sparse[0])) == RECORDED["shape"]
    for mmap_mode in (False, True):
        rows = BinaryCriteoUtils.load_npy_range(dense[0], 3, 4, mmap_mode=mmap_mode)
        assert rows[:, 0].tolist() == RECORDED["load"]


def test_files_that_do_not_fit_together_are_refused(tmp_path: Path) -> None:
    dense, sparse, labels = files(tmp_path, [4])
    short = str(tmp_path / "short.npy")
    np.save(short, np.zeros((3, 1), np.int32))

    def pipe(stage: str = "train", sparse: list[str] = sparse, labels: list[str] = labels, **more: Any) -> None:
        InMemoryBinaryCriteoIterDataPipe(
            stage, dense, sparse, labels, **{"batch_size": 2, "rank": 0, "world_size": 1, **more}
        )

    for message, arguments in (
        ("stage must be one of train, val, test, got 'eval'", {"stage": "eval"}),
        ("at least one each, got 1, 0, 1", {"sparse": []}),
        ("have 4, 4, 3 rows", {"labels": [short]}),
        ("hashes must have a number for each of 26 features, got 2", {"hashes": [1, 2]}),
        ("batch_size must be positive, got 0", {"batch_size": 0}),
    ):
        with pytest.raises(ValueError, match=message):
            pipe(**arguments)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"start_row \(4\) is out of bounds"):
        BinaryCriteoUtils.load_npy_range(dense[0], 4, 1)
    with pytest.raises(ValueError, match=r"num_rows \(3\) exceeds"):
        BinaryCriteoUtils.load_npy_range(dense[0], 2, 3)
    with pytest.raises(ValueError, match="ndim != 2"):
        np.save(short, np.zeros(3))
        BinaryCriteoUtils.load_npy_range(short, 0, 1)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "No data left in file"),
        (b"no array" * 9, "This file contains pickled .object. data"),
        (b"PK\x03\x04" + bytes(40), "File is not a zip file"),
        (np.lib.format.MAGIC_PREFIX + b"\x01\x00\x06\x00{'a':\n", ".*"),
        (None, "Failed to read all data for array|mmap length is greater than file size"),
    ],
    ids=["empty", "text", "zip", "header", "cut"],
)
@pytest.mark.parametrize("mmap_mode", [False, True])
def test_an_array_that_cannot_be_read_is_named(
    content: bytes | None, why: str, mmap_mode: bool, tmp_path: Path
) -> None:
    """Of 72 files of numpy's the bad one was not named, and numpy's advice was to load it without a check."""
    dense, sparse, labels = files(tmp_path, [4, 5])
    path = Path(sparse[1])
    path.write_bytes(path.read_bytes()[:-1] if content is None else content)
    message = rf"^{re.escape(sparse[1])}: no .npy file, or not a whole one: ({why})$"
    with pytest.raises(ValueError, match=message):
        InMemoryBinaryCriteoIterDataPipe("train", dense, sparse, labels, 2, 0, 1, mmap_mode=mmap_mode)
    np.savez(path.with_suffix(".npz"), ids=np.zeros((5, 26)))
    path.with_suffix(".npz").replace(path)
    with pytest.raises(ValueError, match=rf"^{re.escape(sparse[1])}: no .npy file but an archive of several$"):
        BinaryCriteoUtils.get_shape_from_npy(sparse[1])


def test_a_lack_of_memory_is_no_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*arguments: Any, **settings: Any) -> None:
        raise MemoryError("Unable to allocate 9 TiB")

    monkeypatch.setattr(np, "load", load)
    with pytest.raises(MemoryError, match="9 TiB"):
        BinaryCriteoUtils.get_shape_from_npy(str(tmp_path / "a.npy"))


def test_ids_of_another_number_of_columns_are_refused_by_file(tmp_path: Path) -> None:
    """The first batch said what its lengths sum to, and not of which file."""
    dense, sparse, labels = files(tmp_path, [4, 5])
    np.save(sparse[1], np.zeros((5, 25), np.int64))
    with pytest.raises(ValueError, match=rf"^{re.escape(sparse[1])}: need 26 columns, the array has shape \(5, 25\)$"):
        InMemoryBinaryCriteoIterDataPipe("train", dense, sparse, labels, 2, 0, 1)

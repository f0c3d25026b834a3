"""Criteo click logs as numpy files, three of each day: dense [N, 13], sparse [N, 26] and labels [N, 1].

They are read whole, or mapped. The rows of all files in their order are cut into global batches of `batch_size`, which
the ranks take in turn; what is left over is shared out among the ranks, to the first ones a row more. So every rank has
the same number of batches.

Letters: N rows of a file, B rows of a batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import IterableDataset

from shardwise.jagged import KeyedJaggedTensor

from . import criteo_preprocess
from .batch import Batch
from .criteo import CAT_FEATURE_COUNT, DEFAULT_CAT_NAMES
from .paths import PATH_MANAGER_KEY, load_array
from .source import check_split

Array: TypeAlias = npt.NDArray[np.generic]
_STAGES = ("train", "val", "test")


class BinaryCriteoUtils:
    """Making .npy files and reading pieces of them, by TorchRec's names.

    `path_manager_key` counts in programs that use iopath: shardwise.data.paths.
    """

    tsv_to_npys = staticmethod(criteo_preprocess.tsv_to_npys)
    sparse_to_contiguous = staticmethod(criteo_preprocess.sparse_to_contiguous)
    shuffle = staticmethod(criteo_preprocess.shuffle)

    @staticmethod
    def get_shape_from_npy(path: str | os.PathLike[str], path_manager_key: str = PATH_MANAGER_KEY) -> tuple[int, ...]:
        """The shape of the array in a file, of which only the header is read."""
        return tuple(load_array(path, path_manager_key=path_manager_key, mmap_mode="r").shape)

    @staticmethod
    def get_file_row_ranges_and_remainder(
        lengths: Sequence[int], rank: int, world_size: int, start_row: int = 0, last_row: int | None = None
    ) -> tuple[dict[int, tuple[int, int]], int]:
        """Which rows a rank has where files of these `lengths` are shared out evenly, in one piece for each rank.

        Of the rows of all files, one after another, those from `start_row` to `last_row` (inclusive; by default the
        last there is) are meant. Returns the first and the last row for each file, by its place in `lengths`, of which
        the rank has any, and how many ranks, the first ones, have a row more than the others.
        """
        check_split(world_size, rank, world_size)
        total = sum(lengths) if last_row is None else last_row + 1
        each, remainder = divmod(total - start_row, world_size)
        first = start_row + rank * each + min(rank, remainder)
        last = first + each + (rank < remainder) - 1
        ranges = {}
        for file, (end, length) in enumerate(zip(accumulate(lengths), lengths, strict=True)):
            begin = end - length
            if first < end and last >= begin and first <= last and length:
                ranges[file] = (max(first, begin) - begin, min(last, end - 1) - begin)
        return ranges, remainder

    @staticmethod
    def load_npy_range(
        fname: str | os.PathLike[str],
        start_row: int,
        num_rows: int,
        path_manager_key: str = PATH_MANAGER_KEY,
        mmap_mode: bool = False,
    ) -> Array:
        """Rows [start_row, start_row + num_rows) of a file's array of two dims, in memory or, on request, mapped.

        Raises:
            ValueError: the array has another number of dims, or not these rows.
        """
        rows = load_array(fname, path_manager_key=path_manager_key, mmap_mode="r")
        if rows.ndim != 2:
            raise ValueError(f"Cannot load range for npy with ndim != 2: {fname} has shape {rows.shape}")
        if not 0 <= start_row < len(rows):
            raise ValueError(f"start_row ({start_row}) is out of bounds: {fname} has rows 0 to {len(rows) - 1}")
        if num_rows < 0 or start_row + num_rows > len(rows):
            raise ValueError(
                f"num_rows ({num_rows}) exceeds number of available rows: {fname} has {len(rows) - start_row} from row"
                f" {start_row} on"
            )
        piece: Array = rows[start_row : start_row + num_rows]
        return piece if mmap_mode else np.array(piece)


class InMemoryBinaryCriteoIterDataPipe(IterableDataset[Batch]):
    """This rank's batches of Criteo days in numpy files, as TorchRec's class of this name gives them.

    Args:
        stage: "train" takes all rows; "val" and "test" take the first and the second half of the first file's rows,
            and all of the files after it.
        dense_paths, sparse_paths, labels_paths: files of the same days in the same order.
        batch_size: B; the last batch of a rank may have fewer rows, or one more.
        rank: takes every `world_size`-th batch, from its own number on.
        world_size: number of ranks that share the rows.
        drop_last: leave out the rows that do not fill a batch on every rank.
        shuffle_batches: mix the rows within each batch.
        shuffle_training_set: mix the rows of all files first, each rank keeping its share in memory; for "train".
        shuffle_training_set_random_seed: of both, so that epochs of another object are the same.
        mmap_mode: leave the files where they are and read a batch at a time.
        hashes: rows of each of the 26 tables; ids are taken modulo them.
        path_manager_key: of iopath's manager, in programs that use iopath.

    Raises:
        ValueError: an unknown stage, numbers of files or rows that differ, not 26 hashes or columns of ids, or a file
            that is no .npy file or was cut short.
    """

    def __init__(
        self,
        stage: str,
        dense_paths: Sequence[str],
        sparse_paths: Sequence[str],
        labels_paths: Sequence[str],
        batch_size: int,
        rank: int,
        world_size: int,
        drop_last: bool | None = False,
        shuffle_batches: bool = False,
        shuffle_training_set: bool = False,
        shuffle_training_set_random_seed: int = 0,
        mmap_mode: bool = False,
        hashes: Sequence[int] | None = None,
        path_manager_key: str = PATH_MANAGER_KEY,
    ) -> None:
        if stage not in _STAGES:
            raise ValueError(f"stage must be one of {', '.join(_STAGES)}, got {stage!r}")
        check_split(world_size, rank, world_size)
        if batch_size < 1:
            raise ValueError(f"batch_size must be positive, got {batch_size}")
        if hashes is not None and len(hashes) != CAT_FEATURE_COUNT:
            raise ValueError(f"hashes must have a number for each of {CAT_FEATURE_COUNT} features, got {len(hashes)}")
        self.stage = stage
        self.dense_paths, self.sparse_paths, self.labels_paths = dense_paths, sparse_paths, labels_paths
        self.batch_size = batch_size
        self.rank, self.world_size = rank, world_size
        self.drop_last = drop_last
        self.shuffle_batches = shuffle_batches
        self.shuffle_training_set = shuffle_training_set
        self.mmap_mode = mmap_mode
        self.hashes = None if hashes is None else np.array(hashes).reshape(1, CAT_FEATURE_COUNT)
        self.path_manager_key = path_manager_key
        self.keys = DEFAULT_CAT_NAMES
        self._random = np.random.RandomState(shuffle_training_set_random_seed)
        self._load()
        self.num_rows_per_file = [len(rows) for rows in self.dense_arrs]
        self.num_full_batches, self.last_batch_sizes = self._cut(sum(self.num_rows_per_file))

    def __len__(self) -> int:
        """Batches of this rank."""
        return self.num_full_batches // self.world_size + bool(self.last_batch_sizes[0] > 0)

    def __iter__(self) -> Iterator[Batch]:
        for first, rows in self._places():
            dense, sparse, labels = (
                self._rows(arrays, first, rows) for arrays in (self.dense_arrs, self.sparse_arrs, self.labels_arrs)
            )
            if self.mmap_mode and self.hashes is not None:
                sparse = sparse % self.hashes
            yield self._np_arrays_to_batch(dense, sparse, labels)

    def _load(self) -> None:
        groups = (self.dense_paths, self.sparse_paths, self.labels_paths)
        if len({len(paths) for paths in groups}) != 1 or not self.dense_paths:
            raise ValueError(
                "dense_paths, sparse_paths and labels_paths must name the same files, at least one each, got"
                f" {', '.join(str(len(paths)) for paths in groups)}"
            )
        mixed = self.shuffle_training_set and self.stage == "train"
        mode: Literal["r"] | None = "r" if self.mmap_mode or mixed else None
        arrays = [
            [load_array(path, path_manager_key=self.path_manager_key, mmap_mode=mode) for path in paths]
            for paths in groups
        ]
        for paths, day in zip(zip(*groups, strict=True), zip(*arrays, strict=True), strict=True):
            if len({len(rows) for rows in day}) != 1:
                raise ValueError(f"{', '.join(map(str, paths))} have {', '.join(str(len(rows)) for rows in day)} rows")
        for path, rows in zip(self.sparse_paths, arrays[1], strict=True):
            if rows.ndim != 2 or rows.shape[1] != CAT_FEATURE_COUNT:
                raise ValueError(f"{path}: need {CAT_FEATURE_COUNT} columns, the array has shape {rows.shape}")
        if mixed:
            arrays = self._mixed(arrays)
        else:
            half = (len(arrays[0][0]) + 1) // 2
            kept = {"train": slice(None), "val": slice(half), "test": slice(half, None)}[self.stage]
            for files in arrays:
                files[0] = files[0][kept]
        if self.hashes is not None and not self.mmap_mode:
            arrays[1] = [rows % self.hashes for rows in arrays[1]]
        self.dense_arrs, self.sparse_arrs, self.labels_arrs = arrays

    def _mixed(self, arrays: list[list[Array]]) -> list[list[Array]]:
        """This rank's share of all rows in random order; it is then alone with them."""
        lengths = [len(rows) for rows in arrays[0]]
        # where each row goes: rows of a file in their order, as they are read
        places = self._random.permutation(sum(lengths))
        each, more = divmod(len(places), self.world_size)
        first = self.rank * each + min(self.rank, more)
        rows = each + (self.rank < more)
        share: list[list[Array]] = []
        for files in arrays:
            taken = np.empty((rows, *files[0].shape[1:]), files[0].dtype)
            for end, file in zip(accumulate(lengths), files, strict=True):
                targets = places[end - len(file) : end] - first
                chosen = (targets >= 0) & (targets < rows)
                taken[targets[chosen]] = file[chosen]
            share.append([taken])
        self.rank, self.world_size = 0, 1
        return share

    def _cut(self, total: int) -> tuple[int, npt.NDArray[np.int64]]:
        """Full batches of all ranks together, and the rows of each rank's last batch."""
        full = total // self.batch_size // self.world_size * self.world_size
        last = np.zeros(self.world_size, dtype=np.int64)
        left = total % (self.world_size * self.batch_size)
        if left and not self.drop_last:
            if left < self.world_size and full:
                # too few for all: they go to the last full batches
                full -= self.world_size
                last += self.batch_size
            else:
                last += left // self.world_size
            last[: left % self.world_size] += 1
        return full, last

    def _places(self) -> Iterator[tuple[int, int]]:
        """First row and number of rows of this rank's batches."""
        for batch in range(self.rank, self.num_full_batches, self.world_size):
            yield batch * self.batch_size, self.batch_size
        if self.last_batch_sizes[0] > 0:
            begin = self.num_full_batches * self.batch_size + int(self.last_batch_sizes[: self.rank].sum())
            yield begin, int(self.last_batch_sizes[self.rank])

    def _rows(self, arrays: list[Array], first: int, rows: int) -> Array:
        """Rows of all files, copied out of them."""
        pieces, begin = [], 0
        for array in arrays:
            piece = array[max(first - begin, 0) : max(first + rows - begin, 0)]
            if len(piece):
                pieces.append(piece)
            begin += len(array)
        return np.concatenate(pieces) if pieces else np.array(arrays[0][:0])

    def _np_arrays_to_batch(self, dense: Array, sparse: Array, labels: Array) -> Batch:
        if self.shuffle_batches:
            order = self._random.permutation(len(dense))
            dense, sparse, labels = dense[order], sparse[order], labels[order]
        lengths = torch.ones(CAT_FEATURE_COUNT * len(dense), dtype=torch.int32)
        return Batch(
            torch.from_numpy(dense),
            KeyedJaggedTensor(
                self.keys,
                torch.from_numpy(np.ascontiguousarray(sparse.T).reshape(-1)),
                lengths=lengths,
                stride=len(dense),
                length_per_key=[len(dense)] * CAT_FEATURE_COUNT,
            ),
            torch.from_numpy(labels.reshape(-1)),
        )

"""Criteo's text files to numpy files, three a day, with ids made small and days mixed: TorchRec's preparation.

`day_0` becomes `day_0_dense.npy` [N, 13] fp32, `day_0_sparse.npy` [N, 26] and `day_0_labels.npy` [N, 1]. Files are
named as by TorchRec and hold the same values, so that either side's programs go on from them.

Letters: N rows of a file.
"""

from __future__ import annotations

import csv
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from .criteo import CAT_FEATURE_COUNT, DAYS, FREQUENCY_THRESHOLD, INT_FEATURE_COUNT
from .paths import PATH_MANAGER_KEY, load_array, local_path, open_path
from .rows import shortened

Array: TypeAlias = npt.NDArray[np.generic]
Path: TypeAlias = str | os.PathLike[str]

# what the label is where a file has none
NO_LABEL = -1
_DATASETS = ("criteo_1tb", "criteo_kaggle")
# ids of categories seen too seldom share the first; the others follow
_SELDOM, _FIRST_ID = 1, 2
# lines that are Python objects at a time
_CHUNK = 1 << 16
_INT32, _INT64, _FLOAT32_EXACT = np.iinfo(np.int32).max, np.iinfo(np.int64).max, 1 << 24


def tsv_to_npys(
    in_file: Path,
    out_dense_file: Path,
    out_sparse_file: Path,
    out_labels_file: Path,
    dataset_name: str = "criteo_1tb",
    path_manager_key: str = PATH_MANAGER_KEY,
) -> None:
    """Write a text file's columns as three arrays: dense [N, 13] fp32, sparse [N, 26] int64 and labels [N, 1] int32.

    Dense: log(x - m + 2), where m is the least of the whole file, so that the least becomes log 2. What is missing
    is 0 before that, and a category that is missing is id 0. Of "criteo_kaggle" a file with "test" in its name has no
    labels: they are -1.

    Raises:
        ValueError: an unknown dataset, a file without lines, or a line that cannot be read, by `path:line`; where the
            text is not UTF-8, by a line before it.
    """
    if dataset_name not in _DATASETS:
        raise ValueError(f"dataset_name must be one of {', '.join(_DATASETS)}, got {dataset_name!r}")
    labelled = not (dataset_name == "criteo_kaggle" and "test" in os.path.basename(in_file))
    chunks = list(_parsed(in_file, labelled, path_manager_key))
    if not chunks:
        raise ValueError(f"{os.fspath(in_file)}: no lines")
    rows = np.concatenate(chunks)
    # the least and the greatest may be further apart than 32 bits hold
    dense = rows[:, 1 : 1 + INT_FEATURE_COUNT]
    dense = dense - (dense.min() - 2)
    for path, array in (
        (out_dense_file, np.log(dense, dtype=np.float32)),
        (out_sparse_file, np.ascontiguousarray(rows[:, 1 + INT_FEATURE_COUNT :])),
        (out_labels_file, rows[:, :1].astype(np.int32)),
    ):
        _save(path, array, path_manager_key)


def sparse_to_contiguous(
    in_files: Sequence[Path],
    output_dir: Path,
    frequency_threshold: int = FREQUENCY_THRESHOLD,
    columns: int = CAT_FEATURE_COUNT,
    path_manager_key: str = PATH_MANAGER_KEY,
    output_file_suffix: str = "_contig_freq.npy",
) -> None:
    """Renumber the ids of each column over all files: from 2 on, in the order in which they first appear.

    Ids that appear less than `frequency_threshold` times, in all files together, become 1. `day_0_sparse.npy` is
    written to `output_dir` as `day_0_sparse` and `output_file_suffix`.

    Raises:
        ValueError: files with one name, or of less than `columns` columns.
    """
    names = [os.path.basename(path).split(".")[0] for path in in_files]
    if len(set(names)) < len(names):
        raise ValueError(f"in_files must have different names, got {', '.join(names)}")
    files = [load_array(path, path_manager_key=path_manager_key) for path in in_files]
    for path, file in zip(in_files, files, strict=True):
        if file.ndim != 2 or file.shape[1] < columns:
            raise ValueError(f"{os.fspath(path)}: need {columns} columns, the array has shape {file.shape}")
    ends = list(accumulate(map(len, files)))
    for column in range(columns if files else 0):
        renumbered = _renumbered(np.concatenate([file[:, column] for file in files]), frequency_threshold)
        for file, end in zip(files, ends, strict=True):
            file[:, column] = renumbered[end - len(file) : end]
    for name, file in zip(names, files, strict=True):
        _save(os.path.join(output_dir, name + output_file_suffix), file, path_manager_key)


def shuffle(
    input_dir_labels_and_dense: Path,
    input_dir_sparse: Path,
    output_dir_shuffled: Path,
    rows_per_day: Mapping[int, int],
    output_dir_full_set: Path | None = None,
    days: int = DAYS,
    int_columns: int = INT_FEATURE_COUNT,
    sparse_columns: int = CAT_FEATURE_COUNT,
    path_manager_key: str = PATH_MANAGER_KEY,
    random_seed: int = 0,
) -> None:
    """Mix the rows of all days but the last, and cut them into days of the same lengths; the last is copied.

    `day_{d}_dense.npy`, `day_{d}_sparse.npy` and `day_{d}_labels.npy` are read and, with the same names, written. The
    order is TorchRec's for the same seed. Ids stay exact: int32, or int64 where one needs it. Files are mapped, so
    that not all of them have to fit in memory. With `output_dir_full_set`, `full.npy` has the rows before they are
    mixed, dense, sparse and label side by side: fp32, or fp64 where an id needs it.

    Raises:
        ValueError: `rows_per_day` has not the number of rows of a day's file, or a file not as many columns.
    """
    kinds = {"dense": int_columns, "sparse": sparse_columns, "labels": 1}
    folders = {kind: input_dir_sparse if kind == "sparse" else input_dir_labels_and_dense for kind in kinds}

    def day(folder: Path, number: int, kind: str) -> str:
        return os.path.join(folder, f"day_{number}_{kind}.npy")

    files: dict[str, list[Array]] = {}
    for kind, columns in kinds.items():
        paths = [day(folders[kind], number, kind) for number in range(days - 1)]
        files[kind] = [load_array(path, path_manager_key=path_manager_key, mmap_mode="r") for path in paths]
        for number, (path, file) in enumerate(zip(paths, files[kind], strict=True)):
            if file.shape != (rows_per_day.get(number), columns):
                raise ValueError(
                    f"{path} has shape {file.shape}, but rows_per_day and the columns say"
                    f" {(rows_per_day.get(number), columns)}"
                )
    lengths = [len(file) for file in files["labels"]]
    order = np.arange(sum(lengths))
    if output_dir_full_set is not None:
        _save(os.path.join(output_dir_full_set, "full.npy"), _side_by_side(files, order), path_manager_key)
    # the order of numpy's own shuffle of rows, which is TorchRec's
    np.random.RandomState(random_seed).shuffle(order)
    for number, (end, length) in enumerate(zip(accumulate(lengths), lengths, strict=True)):
        for kind, parts in files.items():
            taken = _rows(parts, order[end - length : end])
            dtype = np.dtype(np.float32) if kind == "dense" else _narrowest_integer(taken)
            _save(day(output_dir_shuffled, number, kind), taken.astype(dtype), path_manager_key)
    for kind, folder in folders.items():
        place = local_path(day(folder, days - 1, kind), path_manager_key=path_manager_key)
        with (
            open(place, "rb") as last,
            open_path(day(output_dir_shuffled, days - 1, kind), "wb", path_manager_key=path_manager_key) as copy,
        ):
            shutil.copyfileobj(last, copy)


def _parsed(path: Path, labelled: bool, path_manager_key: str) -> Iterator[npt.NDArray[np.int64]]:
    """The lines of a file as rows [<= _CHUNK, 40] of label, integers and categories."""
    with open_path(path, "r", path_manager_key=path_manager_key) as lines:
        reader = csv.reader(lines, delimiter="\t")
        rows: list[list[int]] = []
        while True:
            # of a row: a quoted field may go on over several
            line = reader.line_num + 1
            try:
                fields = next(reader, None)
                if fields is not None:
                    rows.append(_row(fields if labelled else [str(NO_LABEL), *fields]))
            except UnicodeDecodeError as error:
                # text is decoded ahead of the lines
                raise ValueError(f"{os.fspath(path)}: not UTF-8, in line {line} or after it: {error}") from error
            except (ValueError, csv.Error) as error:
                raise ValueError(f"{os.fspath(path)}:{line}: {shortened(str(error))}") from error
            if rows and (fields is None or len(rows) == _CHUNK):
                yield np.array(rows, np.int64)
                rows = []
            if fields is None:
                return


def _row(fields: list[str]) -> list[int]:
    integers, categories = fields[: 1 + INT_FEATURE_COUNT], fields[1 + INT_FEATURE_COUNT :]
    if len(categories) != CAT_FEATURE_COUNT:
        expected = 1 + INT_FEATURE_COUNT + CAT_FEATURE_COUNT
        raise ValueError(f"{len(fields)} columns with the label, expected {expected}")
    numbers = [int(field or 0) for field in integers]
    if not all(-_INT32 <= number <= _INT32 for number in numbers):
        raise ValueError(f"an integer needs more than 32 bits: {max(numbers, key=abs)}")
    ids = [int(field or "0", 16) for field in categories]
    if not all(-_INT64 <= number <= _INT64 for number in ids):
        raise ValueError(f"a category needs more than 64 bits: {max(ids, key=abs):x}")
    return numbers + ids


def _renumbered(ids: Array, threshold: int) -> npt.NDArray[np.int64]:
    """Ids from 2 on in the order of their first places; 1 for those with less than `threshold` places."""
    _, first, inverse, counts = np.unique(ids, return_index=True, return_inverse=True, return_counts=True)
    often = counts >= threshold
    number = np.full(len(first), _SELDOM, np.int64)
    by_place = np.flatnonzero(often)[np.argsort(first[often])]
    number[by_place] = np.arange(_FIRST_ID, _FIRST_ID + len(by_place))
    renumbered: npt.NDArray[np.int64] = number[inverse.reshape(-1)]
    return renumbered


def _rows(files: Sequence[Array], numbers: npt.NDArray[np.int64]) -> Array:
    """Rows of all files, one after another, by number."""
    taken = np.empty((len(numbers), files[0].shape[1]), np.result_type(*files))
    for end, file in zip(accumulate(map(len, files)), files, strict=True):
        inside = np.flatnonzero((numbers >= end - len(file)) & (numbers < end))
        taken[inside] = file[numbers[inside] - (end - len(file))]
    return taken


def _side_by_side(files: Mapping[str, Sequence[Array]], numbers: npt.NDArray[np.int64]) -> Array:
    dense, sparse, labels = (_rows(parts, numbers) for parts in files.values())
    exact = not sparse.size or int(np.abs(sparse).max()) <= _FLOAT32_EXACT
    return np.concatenate([dense, sparse, labels], axis=1).astype(np.float32 if exact else np.float64)


def _narrowest_integer(array: Array) -> np.dtype[np.generic]:
    fits = not array.size or -_INT32 <= int(array.min()) <= int(array.max()) <= _INT32
    return np.dtype(np.int32 if fits else np.int64)


def _save(path: Path, array: Array, path_manager_key: str) -> None:
    with open_path(path, "wb", path_manager_key=path_manager_key) as file:
        np.save(file, array)

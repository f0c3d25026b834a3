"""Criteo's text files as a stream of samples, as TorchRec streams them: label, 13 integers, 26 categories as text."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from torch.utils.data import IterDataPipe

from ..criteo import CAT_FEATURE_COUNT, DEFAULT_COLUMN_NAMES, INT_FEATURE_COUNT
from .pipes import LoadFiles, ReadLinesFromCSV, files_of_worker, safe_cast

_INTEGER, _TEXT = partial(safe_cast, dest_type=int, default=0), partial(safe_cast, dest_type=str, default="")
# what turns each field into its value, in the order of the columns
COLUMN_TYPE_CASTERS: list[Callable[[Any], Any]] = [*[_INTEGER] * (1 + INT_FEATURE_COUNT), *[_TEXT] * CAT_FEATURE_COUNT]


def row_by_name(fields: Sequence[str]) -> dict[str, int | str]:
    """The columns of a line by name, of the last column first: lines without a label have all columns but that.

    Raises:
        ValueError: more fields than columns.
    """
    if len(fields) > len(DEFAULT_COLUMN_NAMES):
        raise ValueError(f"a line has {len(fields)} fields, Criteo's have {len(DEFAULT_COLUMN_NAMES)} at most")
    ends = zip(reversed(DEFAULT_COLUMN_NAMES), reversed(COLUMN_TYPE_CASTERS), reversed(fields), strict=False)
    return {name: cast(field) for name, cast, field in ends}


class CriteoIterDataPipe(IterDataPipe[Any]):
    """What `row_mapper` makes of the fields of each line of the files, one file after the other; None: the fields.

    By default that is a dict of the columns by name, integers that are missing 0 and categories as text. In a
    DataLoader with n workers each reads every n-th file. `open_kw` are arguments of `open`, and `path_manager_key`
    may be among them.
    """

    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]],
        *,
        row_mapper: Callable[[list[str]], Any] | None = row_by_name,
        **open_kw: Any,
    ) -> None:
        super().__init__()
        self.paths, self.row_mapper, self.open_kw = paths, row_mapper, open_kw

    def __iter__(self) -> Iterator[Any]:
        lines = ReadLinesFromCSV(LoadFiles(files_of_worker(self.paths), mode="r", **self.open_kw), delimiter="\t")
        return iter(lines) if self.row_mapper is None else map(self.row_mapper, lines)


def criteo_terabyte(
    paths: Iterable[str | os.PathLike[str]],
    *,
    row_mapper: Callable[[list[str]], Any] | None = row_by_name,
    **open_kw: Any,
) -> IterDataPipe[Any]:
    """The samples of days of Criteo's terabyte logs: a `CriteoIterDataPipe` of these files."""
    return CriteoIterDataPipe(paths, row_mapper=row_mapper, **open_kw)


def criteo_kaggle(
    path: str | os.PathLike[str],
    *,
    row_mapper: Callable[[list[str]], Any] | None = row_by_name,
    **open_kw: Any,
) -> IterDataPipe[Any]:
    """The samples of a file of Criteo's Kaggle challenge, train.txt or, without labels, test.txt."""
    return CriteoIterDataPipe((path,), row_mapper=row_mapper, **open_kw)

"""MovieLens' ratings as a stream of samples, as TorchRec streams them, on request each with its movie."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch.utils.data import IterDataPipe

from ..movielens import DEFAULT_COLUMN_NAMES, MOVIES_FILENAME, RATINGS_FILENAME
from .pipes import LoadFiles, ReadLinesFromCSV, safe_cast

_INTEGER, _TEXT = partial(safe_cast, dest_type=int, default=0), partial(safe_cast, dest_type=str, default="")
# what turns each field into its value, in the order of the columns
COLUMN_TYPE_CASTERS: list[Callable[[Any], Any]] = [
    _INTEGER, _INTEGER, partial(safe_cast, dest_type=float, default=0.0), _INTEGER, _TEXT, _TEXT
]  # fmt: skip


def row_by_name(fields: Sequence[str]) -> dict[str, float | int | str]:
    """The columns of a line by name."""
    columns = zip(DEFAULT_COLUMN_NAMES, COLUMN_TYPE_CASTERS, fields, strict=False)
    return {name: cast(field) for name, cast, field in columns}


def movielens_20m(
    root: str | os.PathLike[str],
    *,
    include_movies_data: bool = False,
    row_mapper: Callable[[list[str]], Any] | None = row_by_name,
    **open_kw: Any,
) -> IterDataPipe[Any]:
    """What `row_mapper` makes of the fields of each rating in the folder `root`; None: the fields.

    By default that is a dict of userId, movieId, rating and timestamp, numbers that cannot be read 0; with
    `include_movies_data` title and genres of the movie follow. `open_kw` are arguments of `open`. Every worker of a
    DataLoader reads all ratings, unless `.sharding_filter()` follows.

    Raises:
        KeyError: while it is read, a movie that movies.csv lacks.
    """
    lines: IterDataPipe[list[str]] = _read(root, RATINGS_FILENAME, **open_kw)
    if include_movies_data:
        movies = {number: rest for number, *rest in _read(root, MOVIES_FILENAME, **open_kw)}
        lines = lines.map(_WithMovie(movies))
    return lines if row_mapper is None else lines.map(row_mapper)


def movielens_25m(
    root: str | os.PathLike[str],
    *,
    include_movies_data: bool = False,
    row_mapper: Callable[[list[str]], Any] | None = row_by_name,
    **open_kw: Any,
) -> IterDataPipe[Any]:
    """As `movielens_20m`: the files are alike."""
    return movielens_20m(root, include_movies_data=include_movies_data, row_mapper=row_mapper, **open_kw)


def _read(root: str | os.PathLike[str], name: str, **open_kw: Any) -> ReadLinesFromCSV:
    files = LoadFiles((os.path.join(root, name),), mode="r", **open_kw)
    return ReadLinesFromCSV(files, skip_first_line=True, delimiter=",")


class _WithMovie:
    """Joins a rating's fields with its movie's. Pipes print what they map with in their errors: not all movies."""

    def __init__(self, movies: dict[str, list[str]]) -> None:
        self.movies = movies

    def __call__(self, rating: list[str]) -> list[str]:
        if rating[1] not in self.movies:
            raise KeyError(f"movieId {rating[1]} of a rating is not in {MOVIES_FILENAME}")
        return rating + self.movies[rating[1]]

    def __repr__(self) -> str:
        return f"with_movie({len(self.movies)} movies)"

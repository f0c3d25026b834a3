"""MovieLens ratings as a click model's data: will this user like this movie?

Label: rating >= 4. Sparse features: `user`, `item`, `genres` of the item, and `history`, the user's last items rated
strictly earlier than this rating; ratings with the same timestamp are not earlier. Dense features, none of which looks
at a rating's value or at anything later, each standardised by its mean and deviation over the training rows:

    user_ratings     log(1 + the user's ratings strictly earlier)
    item_ratings     log(1 + the item's ratings strictly earlier)
    genre_count      number of genres of the item
    item_age         log(1 + years from the item's release, as its title ends in it, to the rating); no year: the mean
    rating_year      when the rating was given, in years

Letters: N ratings, in the order of the file; U users, I items. Format: Harper and Konstan, "The MovieLens Datasets:
History and Context", ACM TiiS 2015; user ids may be any non-negative integers and are renumbered in increasing order,
items are numbered in the order of movies.csv.
"""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from .batch import Batch
from .ragged import Bags, Ints, keyed_jagged, single, slices
from .rows import BadRow, BadRowPolicy, BadRows, read_table
from .source import check_split, check_start, rank_slice

_SECONDS_PER_YEAR = 365.2425 * 24 * 3600
_YEAR = re.compile(r"\((\d{4})\)\W*$")

# files and their columns, by TorchRec's names; a rating joined with its movie has all columns, the movie's id once
RATINGS_FILENAME, MOVIES_FILENAME = "ratings.csv", "movies.csv"
DEFAULT_RATINGS_COLUMN_NAMES = ["userId", "movieId", "rating", "timestamp"]
DEFAULT_MOVIES_COLUMN_NAMES = ["movieId", "title", "genres"]
DEFAULT_COLUMN_NAMES = [*DEFAULT_RATINGS_COLUMN_NAMES, *DEFAULT_MOVIES_COLUMN_NAMES[1:]]


class MovieLens:
    """The ratings of a MovieLens folder: ratings.csv and movies.csv, plain or .gz.

    `history` bounds the ids of that feature. A random `evaluate_fraction` of the ratings, drawn with `seed`, is kept
    for `evaluate`; the others are shuffled anew in every epoch of `train`. A bad row raises, or is counted in `skipped`
    and left out under `on_bad_row="skip"`.

    Raises:
        ValueError: a number is out of its range, or a row is bad, with `path:line`.
    """

    dense_names = ("user_ratings", "item_ratings", "genre_count", "item_age", "rating_year")

    def __init__(
        self,
        folder: str | Path,
        *,
        history: int = 50,
        evaluate_fraction: float = 0.1,
        seed: int = 7,
        on_bad_row: BadRowPolicy = "raise",
    ) -> None:
        if history < 0 or not 0.0 <= evaluate_fraction < 1.0:
            raise ValueError(
                f"history must not be negative and evaluate_fraction in [0, 1), got {history} and {evaluate_fraction}"
            )
        bad_rows = BadRows(on_bad_row)
        movies = _Movies(_required(folder, "movies"), bad_rows)
        users, self._item, ratings, self._time = _read_ratings(_required(folder, "ratings"), movies.row_of_id, bad_rows)
        known, self._user = np.unique(users, return_inverse=True)
        self.skipped: Mapping[str, int] = bad_rows.skipped
        self.labels: npt.NDArray[np.float32] = (ratings >= 4.0).astype(np.float32)
        self.genre_names = movies.genre_names
        items = len(movies.row_of_id)
        self.feature_rows: Mapping[str, int] = {
            "user": len(known),
            "item": items,
            "genres": max(1, len(movies.genre_names)),
            "history": items,
        }
        self._genres, self._genre_ends = movies.genres, movies.genre_ends
        by_user, first, before = _earlier(self._user, self._time)
        self._items_by_user = self._item[by_user]
        self._history_stop = before
        self._history_start = np.maximum(first, before - history)
        _, item_first, item_before = _earlier(self._item, self._time)
        order = np.random.default_rng(seed).permutation(len(self.labels))
        self._seed = seed
        self._evaluate_fraction = evaluate_fraction
        self._history = history
        self._evaluate = np.sort(order[: round(len(order) * evaluate_fraction)])
        self._train = np.sort(order[len(self._evaluate) :])
        self._dense = self._standardised(
            np.log1p(before - first),
            np.log1p(item_before - item_first),
            np.diff(self._genre_ends)[self._item],
            np.log1p(np.maximum(self._time / _SECONDS_PER_YEAR + 1970.0 - movies.years[self._item], 0.0)),
            self._time / _SECONDS_PER_YEAR,
        )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def train_samples(self) -> int:
        return len(self._train)

    @property
    def evaluate_samples(self) -> int:
        return len(self._evaluate)

    @property
    def identity(self) -> Mapping[str, str | int | float]:
        return {
            "source": "MovieLens",
            # numpy does not promise that another version shuffles alike
            "order": f"shuffled {_checksum(np.random.default_rng(self._seed).permutation(1000)):08x}",
            "seed": self._seed,
            "ratings": len(self),
            "ratings_checksum": f"{self._ratings_checksum:08x}",
            "evaluate_fraction": self._evaluate_fraction,
            "history": self._history,
        }

    @property
    def ids_per_sample(self) -> Mapping[str, float]:
        return self._ids_per_sample

    @cached_property
    def _ids_per_sample(self) -> Mapping[str, float]:
        history = self._history_stop - self._history_start
        genres = np.diff(self._genre_ends)[self._item]
        means = [float(counts[self._train].mean()) if len(self._train) else 0.0 for counts in (genres, history)]
        return {"user": 1.0, "item": 1.0, "genres": means[0], "history": means[1]}

    @cached_property
    def _ratings_checksum(self) -> int:
        return _checksum(self._user, self._item, self._time, self.labels, self._genres, self._genre_ends)

    def train(
        self, batch_size: int, *, epoch: int = 0, start_step: int = 0, rank: int = 0, world_size: int = 1
    ) -> Iterator[Batch]:
        check_split(batch_size, rank, world_size)
        steps = len(self._train) // batch_size
        check_start(epoch, start_step, steps)
        order = np.random.default_rng((self._seed, epoch)).permutation(self._train)
        part = rank_slice(batch_size, rank, world_size)
        for step in range(start_step, steps):
            yield self.samples(order[step * batch_size : (step + 1) * batch_size][part])

    def evaluate(self, batch_size: int, *, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        check_split(batch_size, rank, world_size)
        for start in range(0, len(self._evaluate), batch_size):
            rows = self._evaluate[start : start + batch_size]
            yield self.samples(rows[rank_slice(len(rows), rank, world_size)])

    def samples(self, index: Ints) -> Batch:
        """The ratings with these numbers, which count the good rows of the file from 0, in this order."""
        item = self._item[index]
        bags: dict[str, Bags] = {
            "user": single(self._user[index]),
            "item": single(item),
            "genres": slices(self._genres, self._genre_ends[item], self._genre_ends[item + 1]),
            "history": slices(self._items_by_user, self._history_start[index], self._history_stop[index]),
        }
        return Batch(torch.from_numpy(self._dense[index]), keyed_jagged(bags), torch.from_numpy(self.labels[index]))

    def _standardised(self, *columns: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
        dense = np.stack(columns, axis=1).astype(np.float64)
        if len(self._train):
            seen = dense[self._train]
            mean = np.nanmean(seen, axis=0)
            dense = (dense - mean) / np.maximum(np.nanstd(seen, axis=0), 1e-6)
        return np.nan_to_num(dense, nan=0.0).astype(np.float32)


class _Movies:
    """movies.csv: rows by movie id, genres as slices of one array, release years (nan where the title has none)."""

    def __init__(self, path: Path, bad_rows: BadRows) -> None:
        self.row_of_id: dict[int, int] = {}
        years: list[float] = []
        genre_lists: list[list[str]] = []
        for line, (movie, title, genres) in read_table(path, tuple(DEFAULT_MOVIES_COLUMN_NAMES), bad_rows):
            try:
                number = _integer("movieId", movie)
                if number in self.row_of_id:
                    raise BadRow("movieId twice", f"movieId {number} stands in an earlier row too")
            except BadRow as bad:
                bad_rows.report(path, line, bad)
                continue
            self.row_of_id[number] = len(years)
            year = _YEAR.search(title)
            years.append(float(year[1]) if year else math.nan)
            genre_lists.append([genre for genre in genres.split("|") if genre])
        if not years:
            raise ValueError(f"{path}: no movies after the header")
        self.years = np.array(years)
        self.genre_names = sorted({genre for genres in genre_lists for genre in genres})
        number_of = {genre: number for number, genre in enumerate(self.genre_names)}
        self.genres = np.array([number_of[genre] for genres in genre_lists for genre in genres], dtype=np.int64)
        self.genre_ends = np.cumsum([0, *map(len, genre_lists)], dtype=np.int64)


def find_table(folder: str | Path, stem: str) -> Path | None:
    """`stem.csv` or `stem.csv.gz` in `folder`."""
    for name in (f"{stem}.csv", f"{stem}.csv.gz"):
        path = Path(folder) / name
        if path.is_file():
            return path
    return None


def _required(folder: str | Path, stem: str) -> Path:
    path = find_table(folder, stem)
    if path is None:
        raise FileNotFoundError(f"{folder}: MovieLens data needs {stem}.csv or {stem}.csv.gz there")
    return path


def _read_ratings(
    path: Path, item_of_id: Mapping[int, int], bad_rows: BadRows
) -> tuple[Ints, Ints, npt.NDArray[np.float64], Ints]:
    """User ids, items, ratings and timestamps of the good rows, each [N]."""
    users: list[int] = []
    items: list[int] = []
    ratings: list[float] = []
    times: list[int] = []
    columns = tuple(DEFAULT_RATINGS_COLUMN_NAMES)
    for line, (user, movie, rating, time) in read_table(path, columns, bad_rows):
        try:
            row = (_integer("userId", user), _item(movie, item_of_id), _rating(rating), _integer("timestamp", time))
        except BadRow as bad:
            bad_rows.report(path, line, bad)
            continue
        users.append(row[0])
        items.append(row[1])
        ratings.append(row[2])
        times.append(row[3])
    if not users:
        raise ValueError(f"{path}: no ratings after the header")
    int64 = np.int64
    return np.array(users, int64), np.array(items, int64), np.array(ratings), np.array(times, int64)


def _checksum(*columns: npt.NDArray[np.generic]) -> int:
    """CRC-32 of the values of all columns."""
    crc = 0
    for column in columns:
        crc = zlib.crc32(np.ascontiguousarray(column).tobytes(), crc)
    return crc


def _integer(column: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise BadRow(f"{column} not an integer", f"{column} must be an integer, got {text!r}") from None
    if not 0 <= number < 1 << 63:
        raise BadRow(f"{column} out of range", f"{column} must be in [0, 2^63), got {number}")
    return number


def _item(text: str, item_of_id: Mapping[int, int]) -> int:
    item = item_of_id.get(_integer("movieId", text))
    if item is None:
        raise BadRow("movieId not in movies", f"movieId {text} is not in the movies file")
    return item


def _rating(text: str) -> float:
    try:
        rating = float(text)
    except ValueError:
        raise BadRow("rating not a number", f"rating must be a number, got {text!r}") from None
    # a nan fails this too
    if not 0.5 <= rating <= 5.0:
        raise BadRow("rating out of range", f"rating must be in [0.5, 5], got {text}")
    return rating


def _earlier(key: Ints, time: Ints) -> tuple[Ints, Ints, Ints]:
    """For each n, which entries have its key and an earlier time: `order[first[n]:before[n]]`, oldest first.

    Entries of one key and time keep the order they came in.
    """
    order = np.lexsort((time, key))
    keys, times = key[order], time[order]
    place = np.arange(len(key), dtype=np.int64)
    new_key = np.diff(keys, prepend=-1) != 0
    new_time = new_key | (np.diff(times, prepend=-1) != 0)
    first = np.empty_like(place)
    before = np.empty_like(place)
    first[order] = np.maximum.accumulate(np.where(new_key, place, 0))
    before[order] = np.maximum.accumulate(np.where(new_time, place, 0))
    return order, first, before

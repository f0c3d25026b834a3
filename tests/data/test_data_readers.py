"""MovieLens and Criteo: what becomes of hand-written folders, what a bad one raises, and the facts of the real ones."""

from __future__ import annotations

import gzip
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from checkout import REAL_DATA

from shardwise.data import Criteo, MovieLens, criteo, open_folder

DATA = REAL_DATA / "ml_latest_small"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="no ml_latest_small below $SHARDWISE_DATA or ../shared/data")

MOVIES = """movieId,title,genres
10,Heat (1995),Action|Crime
20,"Usual Suspects, The (1995)",Crime
30,Untitled,(no genres listed)
"""
RATINGS = """userId,movieId,rating,timestamp
7,10,4.0,1000000000
7,20,3.5,1000000000
7,30,5.0,1000000100
2,20,0.5,900000000
7,20,4.5,1000000200
"""


def folder(path: Path, ratings: str = RATINGS, movies: str = MOVIES, end: str = "\n", zipped: bool = False) -> Path:
    for name, text in (("ratings.csv", ratings), ("movies.csv", movies)):
        data = text.replace("\n", end).encode()
        if zipped:
            (path / f"{name}.gz").write_bytes(gzip.compress(data))
        else:
            (path / name).write_bytes(data)
    return path


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gz"])
def test_ratings_become_labels_and_bags(tmp_path: Path, end: str, zipped: bool) -> None:
    reader = MovieLens(folder(tmp_path, end=end, zipped=zipped), evaluate_fraction=0.0)
    batch = reader.samples(np.arange(5))
    assert batch.labels.tolist() == [1, 0, 1, 0, 1]
    bags = {key: [bag.tolist() for bag in jt.to_dense()] for key, jt in batch.sparse_features.to_dict().items()}
    assert list(bags) == ["user", "item", "genres", "history"]
    assert bags["user"] == [[1], [1], [1], [0], [1]]
    assert bags["item"] == [[0], [1], [2], [1], [1]]
    # in the order of their names: (no genres listed), Action, Crime
    assert bags["genres"] == [[1, 2], [2], [0], [2], [2]]
    # the first two share a timestamp, so neither is earlier
    assert bags["history"] == [[], [], [0, 1], [], [0, 1, 2]]
    assert reader.feature_rows == {"user": 2, "item": 3, "genres": 3, "history": 3}


def test_the_mean_number_of_ids_is_known_before_training(tmp_path: Path) -> None:
    reader = MovieLens(folder(tmp_path), evaluate_fraction=0.25)
    (batch,) = reader.train(reader.train_samples)
    counts = dict(zip(batch.sparse_features.keys(), batch.sparse_features.length_per_key(), strict=True))
    assert {name: count / reader.train_samples for name, count in counts.items()} == pytest.approx(
        dict(reader.ids_per_sample)
    )
    assert counts["history"] and counts["genres"] > reader.train_samples


def test_history_keeps_the_latest_items(tmp_path: Path) -> None:
    reader = MovieLens(folder(tmp_path), history=2)
    assert [bag.tolist() for bag in reader.samples(np.arange(5)).sparse_features["history"].to_dense()][4] == [1, 2]


def test_dense_features_are_standardised_over_the_training_rows(tmp_path: Path) -> None:
    reader = MovieLens(folder(tmp_path), evaluate_fraction=0.0)
    dense = reader.samples(np.arange(5)).dense_features
    user_ratings = np.log1p([0, 0, 2, 0, 3])
    item_ratings = np.log1p([0, 1, 0, 0, 2])
    genre_count = np.array([2, 1, 1, 1, 1])
    for column, raw in enumerate((user_ratings, item_ratings, genre_count)):
        np.testing.assert_allclose(dense[:, column], (raw - raw.mean()) / raw.std(), rtol=1e-5, atol=1e-6)
    # a title without a year: the mean
    assert dense[2, reader.dense_names.index("item_age")] == 0.0
    assert not bool(dense.isnan().any())


def test_columns_may_come_in_another_order_with_others_beside_them(tmp_path: Path) -> None:
    ratings = "timestamp,extra,rating,movieId,userId\n5,x,4.0,10,1\n\n6,y,3.0,20,1\n"
    reader = MovieLens(folder(tmp_path, ratings))
    assert reader.labels.tolist() == [1, 0]


MANY = "userId,movieId,rating,timestamp\n" + "".join(
    f"{n % 5},{10 * (n % 3 + 1)},{1 + n % 5},{n}\n" for n in range(103)
)


def test_the_split_is_a_partition_and_every_epoch_has_its_own_order(tmp_path: Path) -> None:
    reader = MovieLens(folder(tmp_path, MANY))
    assert (reader.train_samples, reader.evaluate_samples, len(reader)) == (93, 10, 103)
    assert sorted([*reader._train, *reader._evaluate]) == list(range(103))
    again = MovieLens(tmp_path)
    np.testing.assert_array_equal(again._evaluate, reader._evaluate)
    assert list(MovieLens(tmp_path, seed=8)._evaluate) != list(reader._evaluate)
    orders = [[batch.dense_features[:, 4].tolist() for batch in reader.train(31, epoch=epoch)] for epoch in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(sum(orders[0], [])) == sorted(sum(orders[2], []))


@pytest.mark.parametrize("split", ["train", "evaluate"])
def test_two_ranks_share_the_global_batches_of_one(tmp_path: Path, split: str) -> None:
    reader = MovieLens(folder(tmp_path, MANY), evaluate_fraction=0.3)
    batches = getattr(reader, split)
    parts = zip(batches(8), batches(8, rank=0, world_size=2), batches(8, rank=1, world_size=2), strict=True)
    for whole, first, second in parts:
        for part in (lambda b: b.labels, lambda b: b.dense_features, lambda b: b.sparse_features["item"].values()):
            assert part(whole).tolist() == part(first).tolist() + part(second).tolist()


BAD_RATINGS = [
    ('7,10,4.0,"1', "not CSV", "not a CSV row, whose quotes close on its line: unexpected end of data"),
    ('7,10,"4.0"5,1', "not CSV", "not a CSV row, .*"),
    ("7,10,4.0", "wrong number of columns", "3 columns, the header has 4"),
    ("x,10,4.0,1", "userId not an integer", "userId must be an integer, got 'x'"),
    ("7,1.5,4.0,1", "movieId not an integer", "movieId must be an integer, got '1.5'"),
    ("7,99,4.0,1", "movieId not in movies", "movieId 99 is not in the movies file"),
    ("7,10,good,1", "rating not a number", "rating must be a number, got 'good'"),
    ("7,10,nan,1", "rating out of range", r"rating must be in \[0.5, 5\], got nan"),
    ("7,10,-4,1", "rating out of range", r"rating must be in \[0.5, 5\], got -4"),
    ("7,10,4.0,-1", "timestamp out of range", r"timestamp must be in \[0, 2\^63\), got -1"),
    ("7,10,4.0,", "timestamp not an integer", "timestamp must be an integer, got ''"),
    ("-7,10,4.0,1", "userId out of range", r"userId must be in \[0, 2\^63\), got -7"),
]


@pytest.mark.parametrize(("row", "reason", "detail"), BAD_RATINGS)
@pytest.mark.parametrize("zipped", [False, True], ids=["plain", "gz"])
def test_a_bad_rating_names_its_line_or_is_counted(
    tmp_path: Path, row: str, reason: str, detail: str, zipped: bool
) -> None:
    lines = RATINGS.splitlines()
    bad = "\n".join([*lines[:3], row, row, *lines[3:]]) + "\n"
    folder(tmp_path, bad, zipped=zipped)
    with pytest.raises(
        ValueError, match=rf'ratings\.csv(\.gz)?:4: {detail}; pass on_bad_row="skip" to leave bad rows out$'
    ):
        MovieLens(tmp_path)
    reader = MovieLens(tmp_path, on_bad_row="skip")
    assert reader.skipped == {reason: 2}
    assert reader.labels.tolist() == [1, 0, 1, 0, 1]


def test_a_stray_quote_costs_its_own_row_alone(tmp_path: Path) -> None:
    """csv.reader over the file read on to the next quote, so the rows between two were one field.

    Every movie between was lost, and the line named was the last of them.
    """
    movies = MOVIES + '40,"Stray,Crime\n50,Heat (1995),Crime\n60,"Stray,Crime\n'
    with pytest.raises(ValueError, match=r"movies\.csv:5: not a CSV row"):
        MovieLens(folder(tmp_path, movies=movies))
    reader = MovieLens(tmp_path, on_bad_row="skip")
    assert reader.skipped == {"not CSV": 2}
    assert reader.feature_rows["item"] == 4


@pytest.mark.parametrize(
    ("ratings", "movies", "message"),
    [
        ('"' + RATINGS, MOVIES, r"ratings\.csv:1: the header is not a CSV row"),
        ("", MOVIES, r"ratings\.csv:1: the file is empty, expected a header with userId, movieId, rating, timestamp"),
        ("userId,movieId,rating\n1,10,4\n", MOVIES, r"ratings\.csv:1: no column 'timestamp' in the header"),
        (RATINGS.splitlines()[0] + "\n", MOVIES, r"ratings\.csv: no ratings after the header"),
        (RATINGS, "", r"movies\.csv:1: the file is empty"),
        (RATINGS, "movieId,title,genres\n", r"movies\.csv: no movies after the header"),
        (RATINGS, MOVIES + "10,Heat again (1996),Crime\n", r"movies\.csv:5: movieId 10 stands in an earlier row too"),
        (RATINGS, MOVIES + "x,Heat (1996),Crime\n", r"movies\.csv:5: movieId must be an integer, got 'x'"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, ratings: str, movies: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MovieLens(folder(tmp_path, ratings, movies))


def test_a_cut_archive_is_an_error_under_any_policy(tmp_path: Path) -> None:
    folder(tmp_path, MANY * 3, zipped=True)
    whole = (tmp_path / "ratings.csv.gz").read_bytes()
    (tmp_path / "ratings.csv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match=r"ratings\.csv\.gz:\d+: damaged gzip file"):
        MovieLens(tmp_path, on_bad_row="skip")


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda path: MovieLens(path / "nowhere"), FileNotFoundError, "needs movies.csv or movies.csv.gz"),
        (lambda path: MovieLens(path, on_bad_row=cast(Any, "ignore")), ValueError, '"raise" or "skip", got \'ignore\''),
        (lambda path: MovieLens(path, history=-1), ValueError, "history must not be negative"),
        (lambda path: MovieLens(path, evaluate_fraction=1.0), ValueError, "evaluate_fraction in"),
    ],
)
def test_wrong_arguments_are_refused(
    tmp_path: Path, make: Callable[[Path], MovieLens], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make(folder(tmp_path))


@needs_data
def test_the_real_ratings_have_their_known_statistics() -> None:
    reader = MovieLens(DATA)
    assert len(reader) == 100_836
    assert reader.feature_rows == {"user": 610, "item": 9742, "genres": 20, "history": 9742}
    assert reader.skipped == {}
    assert math.isclose(reader.labels.mean(), 0.482, abs_tol=5e-4)
    everything = reader.samples(np.arange(len(reader))).sparse_features
    lengths = dict(zip(everything.keys(), everything.lengths().view(4, -1).double().mean(1).tolist(), strict=True))
    assert math.isclose(lengths["genres"], 2.72, abs_tol=5e-3)
    # 42.78 where items of the same second count as earlier
    assert 42.5 < lengths["history"] < 42.78
    assert int(everything.lengths().max()) == 50


@needs_data
def test_no_history_holds_an_item_rated_at_the_same_time_or_later() -> None:
    reader = MovieLens(DATA)
    rated_at = {(u, i): t for u, i, t in zip(reader._user, reader._item, reader._time, strict=True)}
    chosen = np.arange(0, len(reader), 50)
    history = reader.samples(chosen).sparse_features["history"].to_dense()
    for n, items in zip(chosen, history, strict=True):
        times = [rated_at[reader._user[n], int(item)] for item in items]
        assert times == sorted(times)
        assert all(t < reader._time[n] for t in times)


SAMPLE = REAL_DATA / "criteo_1tb_sample"
needs_sample = pytest.mark.skipif(
    not SAMPLE.is_dir(), reason="no criteo_1tb_sample below $SHARDWISE_DATA or ../shared/data"
)


def row(label: object = 0, ints: dict[int, object] | None = None, cats: dict[int, str] | None = None) -> str:
    """A line whose 13 integers are 0 .. 12 and whose categories are 00000000 .. 00000019, but for those given."""
    integers = [str((ints or {}).get(n, n)) for n in range(13)]
    categories = [(cats or {}).get(n, f"{n:08x}") for n in range(26)]
    return "\t".join([str(label), *integers, *categories])


def write(path: Path, lines: list[str], end: str = "\n") -> Path:
    data = "".join(line + end for line in lines).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("name", ["day.tsv", "day.tsv.gz", "day.txt"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["lf", "crlf"])
def test_fields_become_dense_columns_and_bags(tmp_path: Path, name: str, end: str) -> None:
    lines = [row(1, {0: "", 1: -2}, {0: "", 1: "ffffffff"}), row(0, {12: 123456789012}, {25: "fF"})]
    (batch,) = Criteo(write(tmp_path / name, lines, end), rows=1000).train(2)
    assert batch.labels.tolist() == [1, 0]
    dense = batch.dense_features
    assert dense[0, 0] == 0.0
    assert math.isclose(dense[0, 1], -math.log(3), rel_tol=1e-6)
    assert math.isclose(dense[1, 5], math.log(6), rel_tol=1e-6)
    assert math.isclose(dense[1, 12], math.log1p(123456789012), rel_tol=1e-6)
    sparse = batch.sparse_features
    assert sparse.keys() == [f"cat_{n}" for n in range(26)]
    assert [bag.tolist() for bag in sparse["cat_0"].to_dense()] == [[], [0]]
    assert [bag.tolist() for bag in sparse["cat_1"].to_dense()] == [[0xFFFFFFFF % 1000], [1]]
    assert [bag.tolist() for bag in sparse["cat_25"].to_dense()] == [[25], [0xFF]]


def test_how_often_a_category_is_there_is_known_before_training(tmp_path: Path) -> None:
    lines = [row(cats={3: "b" if number % 4 == 0 else "", 7: ""}) for number in range(20)]
    reader = Criteo(write(tmp_path / "day_0.tsv", [*lines, "bad"]), evaluate_every=10, on_bad_row="skip")
    mean_ids = reader.ids_per_sample
    # lines 9 and 19 are for evaluation: of 18, five have cat_3
    assert (mean_ids["cat_0"], mean_ids["cat_3"], mean_ids["cat_7"]) == (1.0, pytest.approx(5 / 18), 0.0)
    assert reader.skipped == {}
    (batch,) = reader.train(18)
    assert batch.sparse_features["cat_3"].values().numel() == 5


def test_training_lines_are_counted_unless_the_files_are_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "a.tsv", numbered(53))
    assert Criteo(path, evaluate_every=10).train_samples == 48
    monkeypatch.setattr(criteo, "_COUNTED_BYTES", path.stat().st_size - 1)
    assert Criteo(path, evaluate_every=10).train_samples is None


def test_each_table_has_its_own_rows(tmp_path: Path) -> None:
    rows = {f"cat_{n}": n + 1 for n in range(26)}
    (batch,) = Criteo(write(tmp_path / "a.tsv", [row(cats=dict.fromkeys(range(26), "ffffffff"))]), rows=rows).train(1)
    assert batch.sparse_features.values().tolist() == [0xFFFFFFFF % (n + 1) for n in range(26)]


def numbered(count: int) -> list[str]:
    return [row(n % 2, {0: n}) for n in range(count)]


def numbers(batches: list[list[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def read(reader: Criteo, split: str, *args: int, **kwargs: int) -> list[list[int]]:
    """The first integer of every sample, by batch."""
    batches = getattr(reader, split)(*args, **kwargs)
    return [batch.dense_features[:, 0].expm1().round().int().tolist() for batch in batches]


def test_every_tenth_line_over_all_files_is_for_evaluation(tmp_path: Path) -> None:
    lines = numbered(47)
    files = [write(tmp_path / "b.tsv", lines[:23]), write(tmp_path / "a.tsv.gz", lines[23:])]
    reader = Criteo(files)
    assert read(reader, "evaluate", 3) == [[9, 19, 29], [39]]
    train = [n for n in range(47) if n % 10 != 9]
    assert read(reader, "train", 20) == [train[:20], train[20:40]]


def test_a_folder_is_read_by_name(tmp_path: Path) -> None:
    lines = numbered(30)
    write(tmp_path / "day_1.tsv", lines[15:])
    write(tmp_path / "day_0.tsv.gz", lines[:15])
    (tmp_path / "README.txt").write_text("not data")
    assert numbers(read(Criteo(tmp_path), "train", 9)) == [n for n in range(30) if n % 10 != 9]


@pytest.mark.parametrize("split", ["train", "evaluate"])
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_take_disjoint_slices_of_the_same_global_batches(tmp_path: Path, split: str, world_size: int) -> None:
    reader = Criteo(write(tmp_path / "a.tsv", numbered(53)), evaluate_every=2)
    whole = read(reader, split, 8)
    parts = [read(reader, split, 8, rank=rank, world_size=world_size) for rank in range(world_size)]
    assert [numbers(list(step)) for step in zip(*parts, strict=True)] == whole


BAD_ROWS = [
    (row() + "\t1", "wrong number of columns", "41 columns, expected 40"),
    ("", "wrong number of columns", "1 columns, expected 40"),
    (row(2), "label not 0 or 1", "column 1, the label, must be 0 or 1, got '2'"),
    (row(-1), "label not 0 or 1", "column 1, the label, must be 0 or 1, got '-1'"),
    (row(ints={3: "1.5"}), "not an integer", "column 5 must be an integer or empty, got '1.5'"),
    (row(ints={12: "x"}), "not an integer", "column 14 must be an integer or empty, got 'x'"),
    (row(cats={0: "xyz"}), "not a category", "column 15 must be up to 8 hex digits or empty, got 'xyz'"),
    (row(cats={25: "-1"}), "not a category", "column 40 must be up to 8 hex digits or empty, got '-1'"),
    (row(cats={1: "0123456789"}), "not a category", "column 16 must be up to 8 hex digits or empty, got '0123456789'"),
]


@pytest.mark.parametrize(("bad", "reason", "detail"), BAD_ROWS)
@pytest.mark.parametrize("name", ["a.tsv", "a.tsv.gz"])
def test_a_bad_row_names_its_file_and_line_or_is_counted(
    tmp_path: Path, bad: str, reason: str, detail: str, name: str
) -> None:
    lines = numbered(8)
    files = [write(tmp_path / "first.tsv", lines[:4]), write(tmp_path / name, [lines[4], bad, *lines[5:]])]
    with pytest.raises(ValueError, match=rf'{name}:2: {detail}.*; pass on_bad_row="skip" to leave bad rows out$'):
        read(Criteo(files), "train", 9)
    reader = Criteo(files, on_bad_row="skip")
    assert numbers(read(reader, "train", 9)) == list(range(8))
    assert reader.skipped == {reason: 1}


def test_a_message_holds_the_start_of_a_long_field(tmp_path: Path) -> None:
    """A field may be as long as its file is, and messages were longer still."""
    path = write(tmp_path / "a.tsv", [row(cats={3: "f" * 300_000})])
    with pytest.raises(ValueError, match=r"a\.tsv:1: column 18 must be up to 8 hex digits") as raised:
        read(Criteo(path), "train", 1)
    assert str(raised.value).endswith('(300,053 characters); pass on_bad_row="skip" to leave bad rows out')
    header = "id,title,genres" + ",x" * 100_000 + "\n"
    for ratings, movies in ((RATINGS, header), (RATINGS + f"7,10,{'4' * 100_000}x,1\n", MOVIES)):
        with pytest.raises(ValueError, match=r"\(\d{3},\d{3} characters\)") as raised:
            MovieLens(folder(tmp_path, ratings, movies))
        assert len(str(raised.value)) < 800 + len(str(tmp_path))


def test_ranks_agree_on_the_number_of_batches_when_rows_are_skipped(tmp_path: Path) -> None:
    lines = numbered(8)
    lines[0] = lines[1] = "bad"
    reader = Criteo(write(tmp_path / "a.tsv", lines), on_bad_row="skip")
    assert read(reader, "train", 4, rank=0, world_size=2) == [[], [4, 5]]
    assert read(reader, "train", 4, rank=1, world_size=2) == [[2, 3], [6, 7]]
    assert reader.skipped == {"wrong number of columns": 2}


def test_files_are_streamed(tmp_path: Path) -> None:
    """An archive cut off in its middle gives the batches before the cut, then the error."""
    path = write(tmp_path / "a.tsv.gz", numbered(5000))
    path.write_bytes(path.read_bytes()[:-1000])
    batches = Criteo(path, on_bad_row="skip").train(100)
    assert next(batches).batch_size == 100
    with pytest.raises(ValueError, match=r"a\.tsv\.gz:\d{4}: damaged gzip file"):
        list(batches)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: list(Criteo(write(path / "a.tsv", [])).train(1)), r"a\.tsv: no rows"),
        (lambda path: Criteo(path), "no .tsv or .txt file there"),
        (lambda path: Criteo(path / "a.tsv", rows={"cat_0": 1}), "missing or unknown: cat_1, cat_10"),
        (lambda path: Criteo(path / "a.tsv", rows=0), "rows of 'cat_0' must be positive, got 0"),
        (lambda path: Criteo(path / "a.tsv", rows=cast(Any, math.nan)), "rows of 'cat_0' must be positive, got nan"),
        (
            lambda path: Criteo(path / "a.tsv", rows=cast(Any, 0.5)),
            "rows of 'cat_0' must be an integer of 64 bits, got 0.5",
        ),
        (lambda path: Criteo(path / "a.tsv", rows=2**63), "rows of 'cat_0' must be an integer of 64 bits, got 922"),
        (lambda path: Criteo(path / "a.tsv", evaluate_every=1), "evaluate_every must be at least 2, got 1"),
        (lambda path: Criteo(path / "a.tsv", on_bad_row=cast(Any, "drop")), '"raise" or "skip", got \'drop\''),
    ],
)
def test_wrong_arguments_of_criteo_are_refused(tmp_path: Path, make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        make(tmp_path)


@needs_sample
def test_the_sample_of_the_terabyte_logs_parses_whole() -> None:
    reader = Criteo(SAMPLE)
    labels = [float(b.labels.sum()) for b in [*reader.train(100), *reader.evaluate(100)]]
    assert len(labels) == 10
    assert sum(labels) == 21
    assert reader.skipped == {}


def test_a_folder_finds_its_reader(tmp_path: Path) -> None:
    criteo, movielens = tmp_path / "c", tmp_path / "m"
    criteo.mkdir()
    movielens.mkdir()
    write(criteo / "day_0.tsv.gz", numbered(3))
    assert isinstance(open_folder(criteo), Criteo)
    (movielens / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,1,4.0,1\n")
    (movielens / "movies.csv").write_text("movieId,title,genres\n1,Heat (1995),Crime\n")
    (movielens / "README.txt").write_text("not data")
    assert isinstance(open_folder(movielens), MovieLens)


def test_a_folder_without_known_data_says_what_was_looked_for(tmp_path: Path) -> None:
    (tmp_path / "data.parquet").write_bytes(b"")
    with pytest.raises(ValueError, match=r"looks for MovieLens .* and Criteo .* the folder holds data\.parquet"):
        open_folder(tmp_path)
    with pytest.raises(FileNotFoundError, match="no such folder"):
        open_folder(tmp_path / "nowhere")

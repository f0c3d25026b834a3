"""Criteo logs: parsing, missing fields, sharding over ranks, bad rows; and finding the reader for a folder."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import Any, cast

import pytest
from checkout import REAL_DATA

from shardwise.data import Criteo, MovieLens, open_folder

SAMPLE = REAL_DATA / "criteo_1tb_sample"
needs_data = pytest.mark.skipif(
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
    found = reader.ids_per_sample
    # lines 9 and 19 are for evaluation: of 18, five have cat_3
    assert (found["cat_0"], found["cat_3"], found["cat_7"]) == (1.0, pytest.approx(5 / 18), 0.0)
    assert reader.skipped == {}
    (batch,) = reader.train(18)
    assert batch.sparse_features["cat_3"].values().numel() == 5


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
        (lambda path: Criteo(path / "a.tsv", evaluate_every=1), "evaluate_every must be at least 2, got 1"),
        (lambda path: Criteo(path / "a.tsv", on_bad_row=cast(Any, "drop")), '"raise" or "skip", got \'drop\''),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        make(tmp_path)


@needs_data
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

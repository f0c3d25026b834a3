"""Streams of Criteo's and MovieLens' text files under TorchRec's names: its samples, and torch's functional forms."""

from __future__ import annotations

import gzip
import pickle
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from checkout import SHARED, golden
from test_data_criteo_preprocess import criteo_line, write_criteo
from torch.utils.data import DataLoader, IterDataPipe, get_worker_info

from shardwise.data.criteo import DEFAULT_COLUMN_NAMES
from shardwise.data.splits import train_filter, val_filter
from shardwise.data.torchrec import pipes
from shardwise.data.torchrec.criteo_lines import CriteoIterDataPipe, criteo_kaggle, criteo_terabyte
from shardwise.data.torchrec.movielens_lines import movielens_20m, movielens_25m
from shardwise.data.torchrec.pipes import Limit, LoadFiles, ParallelReadConcat, ReadLinesFromCSV, safe_cast

RECORDED = golden("criteo_preprocess")


def second_integer(fields: Sequence[str]) -> str:
    return fields[2]


def last_pipes(given: Sequence[Any]) -> Sequence[Any]:
    worker = get_worker_info()
    return given if worker is None else given[-1 - worker.id :][:1]


def test_lines_of_criteo_are_torchrecs_rows(tmp_path: Path) -> None:
    paths = write_criteo(tmp_path, 3, lambda day: 4 + day)
    pipe = criteo_terabyte(paths)
    assert isinstance(pipe, IterDataPipe) and isinstance(pipe, CriteoIterDataPipe)
    rows = list(pipe)
    assert [rows[0], rows[5]] == RECORDED["rows"] and len(rows) == 15
    # a test set has no label, and a stream can be read again
    test = tmp_path / "test.txt"
    test.write_text("".join(criteo_line(0, number, labelled=False) + "\n" for number in range(3)))
    kaggle = criteo_kaggle(str(test), encoding="ascii")
    assert list(kaggle)[1] == list(kaggle)[1] == RECORDED["test row"]
    fields = list(criteo_terabyte(paths, row_mapper=None))
    assert fields[4] == criteo_line(1, 0).split("\t")
    with pytest.raises(ValueError, match="a line has 41 fields, Criteo's have 40 at most"):
        test.write_text(criteo_line(0, 0) + "\t\n")
        list(criteo_kaggle(test))
    with pytest.raises(TypeError, match="colour"):
        list(criteo_terabyte(paths, colour="red"))


def test_pipes_have_torchs_functional_forms(tmp_path: Path) -> None:
    paths = write_criteo(tmp_path, 2, lambda _: 3)
    pipe = criteo_terabyte(paths, row_mapper=second_integer)
    assert list(pipe.limit(2)) == list(Limit(pipe, 2)) == ["-2", "2"]
    assert list(pipe.batch(4).map(len)) == [4, 2]
    assert sorted(pipe.shuffle()) == sorted(pipe) and list(pipe.filter(bool)) == [value for value in pipe if value]
    rows = DataLoader(criteo_terabyte(paths), batch_size=3)
    labels = [batch["label"].tolist() for batch in rows]
    assert labels == [[0, 1, 0], [1, 0, 1]] and list(next(iter(rows))) == DEFAULT_COLUMN_NAMES[::-1]


def test_a_limit_reads_no_sample_beyond_it() -> None:
    read: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(9):
            read.append(number)
            yield number

    assert list(Limit(numbers(), 3)) == [0, 1, 2] == read
    assert list(Limit([1, 2], 3)) == [1, 2] and list(Limit([1], 0)) == []
    with pytest.raises(ValueError, match="limit must not be negative, got -1"):
        Limit([], -1)


def test_workers_share_files_out_once(tmp_path: Path) -> None:
    """TorchRec's own example, pipes of a file each in a `ParallelReadConcat`: of 4 files 3 were never read.

    Each pipe gave its only file to the first worker, whichever had the pipe.
    """
    paths = write_criteo(tmp_path, 4, lambda day: 2 + day)
    expected = list(criteo_terabyte(paths, row_mapper=second_integer))
    whole = DataLoader(criteo_terabyte(paths, row_mapper=second_integer), num_workers=2, batch_size=None)
    # two workers in turn, as recorded from TorchRec
    assert list(whole) == ["-2", "26", "2", "30", "", "", "18", "2", "22", "6", "26", "10", "", "18"]
    batches = [criteo_terabyte((path,), row_mapper=second_integer).batch(2) for path in paths]
    read = DataLoader(ParallelReadConcat(*batches), num_workers=2, batch_size=None)
    assert sorted(value for batch in read for value in batch) == sorted(expected)
    # without workers it is one after the other
    assert [value for batch in ParallelReadConcat(*batches) for value in batch] == expected
    chosen = DataLoader(ParallelReadConcat(*batches, dp_selector=last_pipes), num_workers=1, batch_size=None)
    assert [value for batch in chosen for value in batch] == expected[-5:]


def test_pipes_are_shared_out_evenly_and_never_none(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[Any] = [*range(7)]

    def shares(workers: int) -> list[list[Any]]:
        given = []
        for number in range(workers):
            worker = SimpleNamespace(num_workers=workers, id=number)
            monkeypatch.setattr(pipes, "get_worker_info", lambda worker=worker: worker)
            given.append(list(pipes.share_of_worker(numbers)))
        return given

    # TorchRec's shares
    assert shares(3) == [[0, 1, 2], [3, 4], [5, 6]] and shares(7) == [[number] for number in numbers]
    with pytest.raises(ValueError, match=r"Number of workers 8 exceeds number of datapipes \(7\)"):
        shares(8)


def test_files_are_opened_and_read_as_csv(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_bytes('a;b\n1;"2\n3"\nä;4\n'.encode())
    [(name, file)] = LoadFiles([str(path)], mode="b")
    with file:
        assert name == str(path) and file.read(4) == b"a;b\n"
    lines = ReadLinesFromCSV(LoadFiles([path], mode="r"), skip_first_line=True, delimiter=";")
    assert list(lines) == list(lines) == [["1", "2\n3"], ["ä", "4"]]
    assert list(ReadLinesFromCSV([("lines", ["x,y", "z,"])])) == [["x", "y"], ["z", ""]]
    assert len(LoadFiles([], length=7)) == 7
    # `list` passes over an error of this type, and programs that catch TorchRec's find it
    with pytest.raises(TypeError) as unknown:
        len(LoadFiles([]))
    assert isinstance(unknown.value, NotImplementedError)
    with pytest.raises(ValueError, match="Invalid mode w: must be one of b, t, rb, rt, r"):
        LoadFiles([], mode="w")
    with pytest.raises(TypeError, match="Expected string type for pathname, but got <class 'int'>"):
        list(LoadFiles([3]))  # type: ignore[list-item]
    with pytest.raises(TypeError, match="colour"):
        ReadLinesFromCSV([], colour="red")


def test_a_value_that_cannot_be_cast_is_the_default() -> None:
    assert [safe_cast(text, int, 0) for text in ("7", "", "x")] == [7, 0, 0]
    assert safe_cast("2.5", float, 0.0) == 2.5 and safe_cast(3, str, "") == "3"


def test_filters_split_as_idx_split_train_val_does() -> None:
    numbers = range(25)
    train = [n for n in numbers if train_filter(lambda n: n + 3, 0.7, 1, n)]
    assert train == [n for n in numbers if (n + 3) % 10 < 7]
    assert [n for n in numbers if val_filter(lambda n: n + 3, 0.7, 1, n)] == sorted({*numbers} - {*train})


def test_lines_of_movielens_are_torchrecs_rows(tmp_path: Path) -> None:
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,2,3.5,100\n2,x,?,\n3,7,4,300\n")
    (tmp_path / "movies.csv").write_text('movieId,title,genres\n2,"A, b (1995)",Drama|War\n7,C,\nx,D,E\n')
    # recorded from TorchRec 1.8
    first, second, third = (
        {"userId": 1, "movieId": 2, "rating": 3.5, "timestamp": 100},
        {"userId": 2, "movieId": 0, "rating": 0.0, "timestamp": 0},
        {"userId": 3, "movieId": 7, "rating": 4.0, "timestamp": 300},
    )
    assert list(movielens_20m(str(tmp_path))) == [first, second, third]
    joined = movielens_25m(tmp_path, include_movies_data=True)
    assert list(joined) == [
        {**first, "title": "A, b (1995)", "genres": "Drama|War"}, {**second, "title": "D", "genres": "E"},
        {**third, "title": "C", "genres": ""},
    ]  # fmt: skip
    fields = movielens_25m(str(tmp_path), include_movies_data=True, row_mapper=None)
    assert list(fields)[0] == ["1", "2", "3.5", "100", "A, b (1995)", "Drama|War"]
    assert list(movielens_20m(str(tmp_path)).batch(2).map(len)) == [2, 1]
    # pipes go to workers as they are
    assert len(list(DataLoader(joined.sharding_filter(), num_workers=2, batch_size=None))) == 3
    (tmp_path / "movies.csv").write_text("movieId,title,genres\n2,A,B\n")
    with pytest.raises(KeyError, match=r"movieId x of a rating is not in movies\.csv"):
        list(movielens_20m(str(tmp_path), include_movies_data=True))


def test_an_error_of_joined_movies_does_not_list_them_all(tmp_path: Path) -> None:
    """The pipe's message had the whole of movies.csv, which is megabytes of the 62,000 movies of MovieLens 25M.

    Workers of a loader get the pipe pickled.
    """
    (tmp_path / "ratings.csv").write_text("userId,movieId,rating,timestamp\n1,7,3.5,100\n")
    (tmp_path / "movies.csv").write_text("movieId,title,genres\n" + "".join(f"{100 + n},T,G\n" for n in range(500)))
    joined = pickle.loads(pickle.dumps(movielens_25m(tmp_path, include_movies_data=True)))
    with pytest.raises(KeyError, match="movieId 7 of a rating is not in") as raised:
        list(joined)
    assert len(str(raised.value)) < 500


def test_torchrecs_modules_have_them_all() -> None:
    found = {
        "criteo": "criteo_terabyte criteo_kaggle CriteoIterDataPipe Batch ReadLinesFromCSV COLUMN_TYPE_CASTERS",
        "movielens": "movielens_20m movielens_25m COLUMN_TYPE_CASTERS",
        "utils": "Limit LoadFiles ReadLinesFromCSV ParallelReadConcat safe_cast train_filter val_filter",
    }
    for module, names in found.items():
        mirror = import_module(f"shardwise.torchrec.datasets.{module}")
        assert all(getattr(mirror, name) is not None for name in names.split())
    utils = import_module("shardwise.torchrec.datasets.utils")
    assert utils.Limit is Limit and utils.PATH_MANAGER_KEY == "torchrec"


@pytest.mark.skipif(not (SHARED / "data/ml_latest_small").is_dir(), reason="MovieLens' small data is not here")
def test_the_small_movielens_is_read_whole(tmp_path: Path) -> None:
    for name in ("ratings.csv", "movies.csv"):
        packed = (SHARED / f"data/ml_latest_small/{name}.gz").read_bytes()
        (tmp_path / name).write_bytes(gzip.decompress(packed))
    assert sum(1 for _ in movielens_25m(tmp_path, row_mapper=None)) == 100_836
    first = next(iter(movielens_25m(tmp_path, include_movies_data=True)))
    assert first["title"] == "Toy Story (1995)" and first["rating"] == 4.0

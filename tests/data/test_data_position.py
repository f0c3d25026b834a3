"""A run that stops and starts again, at any number of ranks, sees the batches that one without a stop sees."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardwise.data import Batch, ClickFeature, Clicks, Criteo, MovieLens, Position, Source, restore_position


def clicks(folder: Path) -> Clicks:
    return Clicks(3, train_samples=100, evaluate_samples=10)


def movielens(folder: Path) -> MovieLens:
    ratings = "".join(f"{n % 5},{10 * (n % 3 + 1)},{1 + n % 5},{n}\n" for n in range(111))
    (folder / "ratings.csv").write_text(f"userId,movieId,rating,timestamp\n{ratings}")
    (folder / "movies.csv").write_text("movieId,title,genres\n10,A (1995),X|Y\n20,B (1996),Y\n30,C (1997),Z\n")
    return MovieLens(folder)


def criteo(folder: Path, rows: int = 111) -> Criteo:
    lines = ["\t".join([str(n % 2), str(n), *["1"] * 12, *[f"{n:08x}"] * 26]) for n in range(rows)]
    # two files, the second of which starts within a batch
    (folder / "a.tsv").write_text("\n".join(lines[:50]) + "\n")
    (folder / "b.tsv").write_text("\n".join(lines[50:]) + "\n")
    return Criteo(folder)


SOURCES = [clicks, movielens, criteo]
BATCH = 12


def samples(batches: Iterator[Batch]) -> list[list[Any]]:
    """Per batch and sample: dense columns, label and the bags of all features."""
    per_batch: list[list[Any]] = []
    for batch in batches:
        bags = [[bag.tolist() for bag in jt.to_dense()] for jt in batch.sparse_features.to_dict().values()]
        per_batch.append(list(zip(batch.dense_features.tolist(), batch.labels.tolist(), *bags, strict=True)))
    return per_batch


@pytest.mark.parametrize("make", SOURCES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("start_step", [0, 1, 4, 8])
def test_an_epoch_from_a_step_on_is_the_tail_of_the_whole_epoch(
    tmp_path: Path, make: Callable[[Path], Source], world_size: int, start_step: int
) -> None:
    """Fault 39: the run that stops has one rank, the one that goes on has world_size."""
    source = make(tmp_path)
    for epoch in (0, 2):
        whole = samples(source.train(BATCH, epoch=epoch))
        assert len(whole) == 8
        parts = [
            samples(source.train(BATCH, epoch=epoch, start_step=start_step, rank=rank, world_size=world_size))
            for rank in range(world_size)
        ]
        tail = [[sample for part in step for sample in part] for step in zip(*parts, strict=True)]
        assert tail == whole[start_step:]


@pytest.mark.parametrize("make", SOURCES)
@pytest.mark.parametrize(
    ("start", "message"),
    [
        ({"start_step": 9}, "start_step 9 lies past the end of epoch 0, which has 8 batches"),
        ({"start_step": -1}, "start_step must not be negative, got -1"),
        ({"epoch": -1}, "epoch must not be negative, got -1"),
    ],
)
def test_a_start_outside_the_epoch_is_refused(
    tmp_path: Path, make: Callable[[Path], Source], start: dict[str, int], message: str
) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        next(make(tmp_path).train(BATCH, **start))


def test_what_lies_before_the_start_is_not_parsed(tmp_path: Path) -> None:
    source = criteo(tmp_path)
    lines = (tmp_path / "a.tsv").read_text().split("\n")
    (tmp_path / "a.tsv").write_text("\n".join(["bad", *lines[1:]]))
    with pytest.raises(ValueError, match="columns, expected 40"):
        next(source.train(BATCH))
    assert len(list(source.train(BATCH, start_step=1))) == 7


@pytest.mark.parametrize("make", SOURCES)
def test_a_position_survives_json_and_another_process(tmp_path: Path, make: Callable[[Path], Source]) -> None:
    position = Position.of(make(tmp_path), BATCH, epoch=1, step=5)
    # another object over the same data stands for another process
    restored = restore_position(json.loads(json.dumps(position.to_json())), make(tmp_path), BATCH)
    assert restored == position


def changed_ratings(folder: Path) -> MovieLens:
    movielens(folder)
    path = folder / "ratings.csv"
    path.write_text(path.read_text().replace("\n0,10,1,0\n", "\n0,10,5,0\n"))
    return MovieLens(folder)


CHANGES: list[tuple[Callable[[Path], Source], Callable[[Path], Source], int, str]] = [
    (clicks, clicks, 24, "batch_size was 12 and is 24"),
    (clicks, lambda _: Clicks(4, train_samples=100), BATCH, "seed was 3 and is 4"),
    (clicks, lambda _: Clicks(3, train_samples=200), BATCH, "train_samples was 100 and is 200"),
    (clicks, lambda _: Clicks(3, dense=4, train_samples=100), BATCH, "dense_columns was 8 and is 4"),
    (clicks, lambda _: Clicks(3, features=[ClickFeature("ad", 9)], train_samples=100), BATCH, "features was .*'user'"),
    (clicks, movielens, BATCH, "source was 'generated clicks' and is 'MovieLens'"),
    (movielens, lambda folder: MovieLens(folder, seed=8), BATCH, "seed was 7 and is 8"),
    (movielens, lambda folder: MovieLens(folder, history=5), BATCH, "history was 50 and is 5"),
    (movielens, changed_ratings, BATCH, "ratings_checksum was '[0-9a-f]{8}' and is '[0-9a-f]{8}'$"),
    (criteo, lambda folder: criteo(folder, 112), BATCH, "files was 'a.tsv of .*'"),
    (criteo, lambda folder: Criteo(folder, evaluate_every=5), BATCH, "evaluate_every was 10 and is 5"),
    (criteo, lambda folder: Criteo(folder, rows=10), BATCH, "table_rows was '100000, .*' and is '10, "),
]


@pytest.mark.parametrize(("before", "after", "batch_size", "message"), CHANGES)
def test_other_data_or_batches_are_refused_with_both_values(
    tmp_path: Path,
    before: Callable[[Path], Source],
    after: Callable[[Path], Source],
    batch_size: int,
    message: str,
) -> None:
    saved = Position.of(before(tmp_path), BATCH).to_json()
    with pytest.raises(ValueError, match=f"cannot continue with the same data, .*{message}"):
        restore_position(saved, after(tmp_path), batch_size)


def test_another_shuffle_of_numpy_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = Position.of(movielens(tmp_path), BATCH).to_json()
    other = np.random.Generator(np.random.MT19937(1))
    monkeypatch.setattr(np.random, "default_rng", lambda seed: other)
    with pytest.raises(ValueError, match="order was 'shuffled "):
        restore_position(saved, MovieLens(tmp_path), BATCH)


@pytest.mark.parametrize(
    "change",
    [{"epoch": "1"}, {"epoch": True}, {"step": -1}, {"step": 1.0}, {"batch_size": None}, {"source": 3}, {"": 1}],
)
def test_a_position_of_wrong_values_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    source = clicks(tmp_path)
    with pytest.raises(ValueError, match="position in data"):
        restore_position({**Position.of(source, BATCH).to_json(), **change}, source, BATCH)


@pytest.mark.parametrize("saved", [None, [], {}, {"epoch": 1, "step": 2}])
def test_what_is_no_position_is_refused(tmp_path: Path, saved: object) -> None:
    with pytest.raises(ValueError, match="not a position in data, which has source, batch_size, epoch, step"):
        restore_position(saved, clicks(tmp_path), BATCH)

r"""Criteo click logs: label, 13 integers, 26 hashed categories, tab-separated, empty where missing.

A dense column is sign(x) log(1 + |x|), which keeps the few negative counts of the logs apart from 0; a missing integer
is 0. A category is eight hex digits, taken modulo the rows of its table; a missing category is an empty bag.

The files are streamed, about a quarter of a megabyte at a time. Lines are numbered over all files; every
`evaluate_every`-th is kept for `evaluate`, the others are for `train`, in the order of the files, the same in each
epoch. A global batch is `batch_size` consecutive lines of a split and a rank parses only its slice of them, so ranks
agree on the number of batches without talking; a line skipped as bad makes its rank's slice of that batch one shorter.
A start within an epoch passes over the lines before it without parsing them, so their bad rows are neither raised nor
counted again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from shardwise.jagged import KeyedJaggedTensor

from .batch import Batch
from .criteo_text import CATEGORIES, INTEGERS, Columns, Lines, join, parse, present, read_criteo
from .rows import BadRowPolicy, BadRows
from .source import check_split, check_start, rank_slice

DENSE_NAMES = tuple(f"int_{column}" for column in range(INTEGERS))
CATEGORY_NAMES = tuple(f"cat_{column}" for column in range(CATEGORIES))
# by TorchRec's names; programs cut and join them as lists
INT_FEATURE_COUNT, CAT_FEATURE_COUNT = len(DENSE_NAMES), len(CATEGORY_NAMES)
DEFAULT_LABEL_NAME, DEFAULT_INT_NAMES, DEFAULT_CAT_NAMES = "label", [*DENSE_NAMES], [*CATEGORY_NAMES]
DEFAULT_COLUMN_NAMES = [DEFAULT_LABEL_NAME, *DEFAULT_INT_NAMES, *DEFAULT_CAT_NAMES]
# of the terabyte logs: files, and samples of all files but the last, which is for validation and test
DAYS, TOTAL_TRAINING_SAMPLES = 24, 4_195_197_692
# categories that are seen less often share one id where ids are made contiguous
FREQUENCY_THRESHOLD = 3
# training samples at the begin of the files by which it is estimated how often a category is missing
_PROBE = 4096
# files of more bytes are not read just to count their lines
_COUNTED_BYTES = 1 << 30


class Criteo:
    """Criteo TSV files, plain or .gz: one file, several in this order, or a folder of .tsv or .txt files by name.

    `rows` is the number of rows of each table, or a mapping from `cat_0` .. `cat_25` to it. One row of
    `evaluate_every` is kept for `evaluate`. A bad row raises, or is counted in `skipped` and left out under
    `on_bad_row="skip"`.

    Raises:
        ValueError: there are no files, or a number or name is bad; in reading, a row is, with `path:line`.
    """

    dense_names = DENSE_NAMES

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        *,
        rows: int | Mapping[str, int] = 100_000,
        evaluate_every: int = 10,
        on_bad_row: BadRowPolicy = "raise",
    ) -> None:
        if evaluate_every < 2:
            raise ValueError(f"evaluate_every must be at least 2, got {evaluate_every}")
        self.paths = criteo_files(paths)
        if not self.paths:
            raise ValueError(f"{paths}: no .tsv or .txt file there, plain or .gz")
        by_name = rows if isinstance(rows, Mapping) else dict.fromkeys(CATEGORY_NAMES, rows)
        if set(by_name) != set(CATEGORY_NAMES):
            wrong = sorted(set(by_name) ^ set(CATEGORY_NAMES))
            raise ValueError(f"rows must name cat_0 .. cat_25, missing or unknown: {', '.join(wrong)}")
        for name in CATEGORY_NAMES:
            # a nan fails this too
            if not by_name[name] > 0:
                raise ValueError(f"rows of {name!r} must be positive, got {by_name[name]}")
            if by_name[name] >= 1 << 63 or by_name[name] != int(by_name[name]):
                raise ValueError(f"rows of {name!r} must be an integer of 64 bits, got {by_name[name]}")
        self.feature_rows: Mapping[str, int] = {name: by_name[name] for name in CATEGORY_NAMES}
        self._row_counts = np.array(list(self.feature_rows.values()), dtype=np.int64)
        self._evaluate_every = evaluate_every
        self._bad_rows = BadRows(on_bad_row)
        self.skipped: Mapping[str, int] = self._bad_rows.skipped

    @property
    def ids_per_sample(self) -> Mapping[str, float]:
        return self._ids_per_sample

    @cached_property
    def _ids_per_sample(self) -> Mapping[str, float]:
        # the share of samples that have one; bad rows are neither raised nor counted here
        counts, samples, left = np.zeros(CATEGORIES), 0, _PROBE
        for lines in self._split(evaluate=False):
            there, good = present(lines[:left])
            counts, samples, left = counts + there, samples + good, left - min(left, len(lines))
            if not left:
                break
        return dict(zip(CATEGORY_NAMES, (counts / max(1, samples)).tolist(), strict=True))

    @property
    def train_samples(self) -> int | None:
        """Lines of the files that are for training, good or not: a pass over all of them, without parsing."""
        return self._train_samples

    @cached_property
    def _train_samples(self) -> int | None:
        if sum(path.stat().st_size for path in self.paths) > _COUNTED_BYTES:
            return None
        return sum(map(len, self._split(evaluate=False)))

    @property
    def identity(self) -> Mapping[str, str | int | float]:
        # names and sizes stand for the contents, which may be terabytes; files of one name in two folders are told
        # apart by their order
        return {
            "source": "Criteo",
            "order": "as in the files",
            "files": ", ".join(f"{path.name} of {path.stat().st_size} bytes" for path in self.paths),
            "evaluate_every": self._evaluate_every,
            "table_rows": ", ".join(map(str, self.feature_rows.values())),
        }

    def train(
        self, batch_size: int, *, epoch: int = 0, start_step: int = 0, rank: int = 0, world_size: int = 1
    ) -> Iterator[Batch]:
        check_split(batch_size, rank, world_size)
        check_start(epoch, start_step)
        passed, lines = _pass_over(self._split(evaluate=False), start_step * batch_size)
        check_start(epoch, start_step, steps=passed // batch_size)
        for pieces in _whole_batches(lines, batch_size):
            if sum(map(len, pieces)) >= batch_size:
                yield from self._batches(pieces, batch_size, rank, world_size)

    def evaluate(self, batch_size: int, *, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        check_split(batch_size, rank, world_size)
        for pieces in _whole_batches(self._split(evaluate=True), batch_size):
            yield from self._batches(pieces, batch_size, rank, world_size)

    def _split(self, *, evaluate: bool) -> Iterator[Lines]:
        every, before = self._evaluate_every, 0
        for path in self.paths:
            for lines in read_criteo(path):
                last = np.arange(before, before + len(lines)) % every == every - 1
                before += len(lines)
                yield lines[last == evaluate]
        if not before:
            raise ValueError(f"{', '.join(map(str, self.paths))}: no rows")

    def _batches(self, pieces: Sequence[Lines], batch_size: int, rank: int, world_size: int) -> Iterator[Batch]:
        """A rank's slices of batches that `pieces` have the lines of: one short batch, or whole ones alone."""
        total = sum(map(len, pieces))
        size = min(batch_size, total)
        part = rank_slice(size, rank, world_size)
        place = np.arange(total) % size
        taken = (place >= part.start) & (place < part.stop)
        ends = np.cumsum(list(map(len, pieces)))
        columns = join(
            [
                parse(piece[taken[end - len(piece) : end]] if world_size > 1 else piece, self._row_counts)
                for piece, end in zip(pieces, ends, strict=True)
            ]
        )
        share = part.stop - part.start
        for batch in range(total // size):
            yield self._batch(columns, batch * share, (batch + 1) * share)

    def _batch(self, columns: Columns, start: int, stop: int) -> Batch:
        rows: slice | list[int] = slice(start, stop)
        faults = [fault for fault in columns.faults if start <= fault[0] < stop]
        for _, path, number, bad in faults:
            self._bad_rows.report(path, number, bad)
        if faults:
            rows = sorted(set(range(start, stop)).difference(place for place, *_ in faults))
        ids = columns.ids[:, rows].reshape(-1)
        there = ids >= 0
        return Batch(
            torch.from_numpy(columns.dense[rows].copy()),
            KeyedJaggedTensor(
                CATEGORY_NAMES,
                torch.from_numpy(ids[there]),
                lengths=torch.from_numpy(there.astype(np.int64)),
            ),
            torch.from_numpy(columns.labels[rows].copy()),
        )


def criteo_files(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files meant by `paths`; of a folder, its .tsv or else its .txt files, sorted by name, without a readme."""
    if not isinstance(paths, (str, Path)):
        return [Path(path) for path in paths]
    path = Path(paths)
    if not path.is_dir():
        return [path]
    for suffix in (".tsv", ".txt"):
        files = sorted(
            file
            for file in path.iterdir()
            if file.name.endswith((suffix, f"{suffix}.gz")) and not file.name.lower().startswith(("readme", "license"))
        )
        if files:
            return files
    return []


def _pass_over(lines: Iterator[Lines], count: int) -> tuple[int, Iterator[Lines]]:
    """How many of the first `count` lines there are, and the lines after them."""
    passed = 0
    while passed < count and (piece := next(lines, None)) is not None:
        taken = min(len(piece), count - passed)
        passed += taken
        if taken < len(piece):
            lines = chain([piece[taken:]], lines)
    return passed, lines


def _whole_batches(lines: Iterator[Lines], batch_size: int) -> Iterator[list[Lines]]:
    """The lines in lists that hold whole batches, as many as are there; in the last one what fills none."""
    pending: list[Lines] = []
    held = 0
    for piece in lines:
        held += len(piece)
        rest = held % batch_size
        if held < batch_size:
            pending.append(piece)
            continue
        yield [*pending, piece[: len(piece) - rest]]
        pending, held = [piece[len(piece) - rest :]], rest
    if held:
        yield pending

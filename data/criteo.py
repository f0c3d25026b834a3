r"""Criteo click logs: label, 13 integers, 26 hashed categories, tab-separated, empty where missing.

A dense column is sign(x) log(1 + |x|), which keeps the few negative counts of the logs apart from 0; a missing integer
is 0. A category is eight hex digits, taken modulo the rows of its table; a missing category is an empty bag.

The files are streamed, a line at a time. Lines are numbered over all files; every `evaluate_every`-th is kept for
`evaluate`, the others are for `train`, in the order of the files, the same in each epoch. A global batch is
`batch_size` consecutive lines of a split and a rank parses only its slice of them, so ranks agree on the number of
batches without talking; a line skipped as bad makes its rank's slice of that batch one shorter. A start within an epoch
passes over the lines before it without parsing them, so their bad rows are neither raised nor counted again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch

from .batch import Batch
from .ragged import Bags, keyed_jagged
from .rows import BadRow, BadRowPolicy, BadRows, read_lines
from .source import check_split, check_start, rank_slice

DENSE_NAMES = tuple(f"int_{column}" for column in range(13))
CATEGORY_NAMES = tuple(f"cat_{column}" for column in range(26))
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
_COLUMNS = 1 + len(DENSE_NAMES) + len(CATEGORY_NAMES)
_INTEGER = r"(?:-?[0-9]{1,18})?"
_CATEGORY = r"[0-9a-fA-F]{0,8}"
_ROW = re.compile(rf"[01](?:\t{_INTEGER}){{13}}(?:\t{_CATEGORY}){{26}}")

# path, line in it, text without its end
_Line: TypeAlias = tuple[Path, int, str]


class Criteo:
    """Criteo TSV files, plain or .gz: one file, several in this order, or a folder of .tsv or .txt files by name.

    `rows` is the number of rows of each table, or a mapping from `cat_0` .. `cat_25` to it. A bad row raises ValueError
    with `path:line`, or is counted in `skipped` and left out under `on_bad_row="skip"`.
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
            if by_name[name] <= 0:
                raise ValueError(f"rows of {name!r} must be positive, got {by_name[name]}")
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
        counts, samples = np.zeros(len(CATEGORY_NAMES)), 0
        for _, _, text in islice(self._split(evaluate=False), _PROBE):
            if _ROW.fullmatch(text) is not None:
                counts += [field != "" for field in text.split("\t")[14:]]
                samples += 1
        return dict(zip(CATEGORY_NAMES, (counts / max(1, samples)).tolist(), strict=True))

    @property
    def train_samples(self) -> int | None:
        """Lines of the files that are for training, good or not: a pass over all of them, without parsing."""
        return self._train_samples

    @cached_property
    def _train_samples(self) -> int | None:
        if sum(path.stat().st_size for path in self.paths) > _COUNTED_BYTES:
            return None
        return sum(1 for _ in self._split(evaluate=False))

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
        lines = self._split(evaluate=False)
        passed = sum(1 for _ in islice(lines, start_step * batch_size))
        check_start(epoch, start_step, steps=passed // batch_size)
        for batch in _batches(lines, batch_size):
            if len(batch) == batch_size:
                yield self._parse(batch[rank_slice(batch_size, rank, world_size)])

    def evaluate(self, batch_size: int, *, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        check_split(batch_size, rank, world_size)
        for batch in _batches(self._split(evaluate=True), batch_size):
            yield self._parse(batch[rank_slice(len(batch), rank, world_size)])

    def _split(self, *, evaluate: bool) -> Iterator[_Line]:
        last = self._evaluate_every - 1
        return (
            line for number, line in enumerate(self._lines()) if (number % self._evaluate_every == last) == evaluate
        )

    def _lines(self) -> Iterator[_Line]:
        empty = True
        for path in self.paths:
            for number, line in enumerate(read_lines(path), start=1):
                empty = False
                yield path, number, line.rstrip("\r\n")
        if empty:
            raise ValueError(f"{', '.join(map(str, self.paths))}: no rows")

    def _parse(self, lines: Iterable[_Line]) -> Batch:
        labels: list[float] = []
        integers: list[list[float]] = []
        categories: list[list[int]] = []
        for path, number, text in lines:
            fields = text.split("\t")
            if _ROW.fullmatch(text) is None:
                self._bad_rows.report(path, number, _fault(fields))
                continue
            labels.append(float(fields[0]))
            integers.append([float(field or 0) for field in fields[1:14]])
            # -1 is missing: no category is negative
            categories.append([int(field, 16) if field else -1 for field in fields[14:]])
        dense = np.array(integers, dtype=np.float64).reshape(-1, len(DENSE_NAMES))
        dense = np.sign(dense) * np.log1p(np.abs(dense))
        ids = np.array(categories, dtype=np.int64).reshape(-1, len(CATEGORY_NAMES))
        present = ids >= 0
        ids %= self._row_counts
        bags: dict[str, Bags] = {
            name: (ids[present[:, column], column], present[:, column].astype(np.int64))
            for column, name in enumerate(CATEGORY_NAMES)
        }
        return Batch(
            torch.from_numpy(dense.astype(np.float32)),
            keyed_jagged(bags),
            torch.tensor(labels, dtype=torch.float32),
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


def _batches(lines: Iterator[_Line], batch_size: int) -> Iterator[list[_Line]]:
    """The lines in lists of `batch_size`, the last one as long as it is."""
    while batch := list(islice(lines, batch_size)):
        yield batch


def _fault(fields: list[str]) -> BadRow:
    """The fault of a row that does not match."""
    if len(fields) != _COLUMNS:
        return BadRow("wrong number of columns", f"{len(fields)} columns, expected {_COLUMNS}")
    if fields[0] not in ("0", "1"):
        return BadRow("label not 0 or 1", f"column 1, the label, must be 0 or 1, got {fields[0]!r}")
    for column, field in enumerate(fields[1:14], start=2):
        if re.fullmatch(_INTEGER, field) is None:
            return BadRow("not an integer", f"column {column} must be an integer or empty, got {field!r}")
    for column, field in enumerate(fields[14:], start=15):
        if re.fullmatch(_CATEGORY, field) is None:
            return BadRow("not a category", f"column {column} must be up to 8 hex digits or empty, got {field!r}")
    raise AssertionError(f"a good row was refused: {fields}")

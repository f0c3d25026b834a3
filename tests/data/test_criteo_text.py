"""Criteo's blocks of lines, with and without the compiled loop, against a reader that takes one line at a time."""

from __future__ import annotations

import gzip
import importlib
import re
import sys
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from shardwise.data import Batch, Criteo, criteo_text, rows
from shardwise.kernels import numba_loops

LOOPS = [pytest.param(True, marks=pytest.mark.skipif(not numba_loops.compiles(), reason="no numba")), False]
INTEGER, CATEGORY = r"(?:-?[0-9]{1,18})?", r"[0-9a-fA-F]{0,8}"
HINT = 'pass on_bad_row="skip" to leave bad rows out'
# bits of labels, dense columns, ids, lengths
Bits = list[bytes]


@dataclass
class LineReader:
    """The contract, in the plainest Python: text files read by Python's own lines, each line by regular expressions."""

    paths: list[Path]
    table_rows: int
    every: int
    skip: bool
    skipped: Counter[str] = field(default_factory=Counter)

    def lines(self, evaluate: bool) -> Iterator[tuple[str, str]]:
        number = 0
        for path in self.paths:
            line = 0
            with (gzip.open if path.suffix == ".gz" else open)(
                path, "rt", encoding="utf-8", errors="replace", newline=""
            ) as file:  # type: ignore[operator]
                try:
                    for line, text in enumerate(file, start=1):
                        if (number % self.every == self.every - 1) == evaluate:
                            yield f"{path}:{line}", text.rstrip("\r\n")
                        number += 1
                except (EOFError, gzip.BadGzipFile, zlib.error) as error:
                    raise ValueError(f"{path}:{line + 1}: damaged gzip file: {error}") from error
        if not number:
            raise ValueError(f"{', '.join(map(str, self.paths))}: no rows")

    def batches(self, evaluate: bool, size: int, start: int, rank: int, world: int) -> Iterator[Bits]:
        lines = self.lines(evaluate)
        passed = len(list(islice(lines, start * size)))
        if passed // size < start:
            raise ValueError(f"start_step {start} lies past the end of epoch 0, which has {passed // size} batches")
        while batch := list(islice(lines, size)):
            if len(batch) == size or evaluate:
                yield self.parse(batch[len(batch) * rank // world : len(batch) * (rank + 1) // world])

    def parse(self, lines: list[tuple[str, str]]) -> Bits:
        good: list[list[str]] = []
        for place, text in lines:
            fields = text.split("\t")
            if fault := self.fault(fields):
                if not self.skip:
                    raise ValueError(f"{place}: {fault[1]}; {HINT}")
                self.skipped[fault[0]] += 1
            else:
                good.append(fields)
        dense = np.array([[float(f or 0) for f in fields[1:14]] for fields in good], np.float64).reshape(-1, 13)
        dense = np.sign(dense) * np.log1p(np.abs(dense))
        bags = [fields[column] for column in range(14, 40) for fields in good]
        ids = [int(bag, 16) % self.table_rows for bag in bags if bag]
        return [
            np.array([float(fields[0]) for fields in good], np.float32).tobytes(),
            dense.astype(np.float32).tobytes(),
            np.array(ids, np.int64).tobytes(),
            np.array([bool(bag) for bag in bags], np.int64).tobytes(),
        ]

    @staticmethod
    def fault(fields: list[str]) -> tuple[str, str] | None:
        if len(fields) != 40:
            return "wrong number of columns", f"{len(fields)} columns, expected 40"
        if fields[0] not in ("0", "1"):
            return "label not 0 or 1", f"column 1, the label, must be 0 or 1, got {fields[0]!r}"
        for column, text in enumerate(fields[1:], start=2):
            if column <= 14 and not re.fullmatch(INTEGER, text):
                return "not an integer", f"column {column} must be an integer or empty, got {text!r}"
            if column > 14 and not re.fullmatch(CATEGORY, text):
                return "not a category", f"column {column} must be up to 8 hex digits or empty, got {text!r}"
        return None


def bits(batch: Batch) -> Bits:
    sparse = batch.sparse_features
    tensors = (batch.labels, batch.dense_features, sparse.values(), sparse.lengths())
    assert [str(tensor.dtype)[6:] for tensor in tensors] == ["float32", "float32", "int64", "int64"]
    assert sparse.keys() == [f"cat_{n}" for n in range(26)]
    return [tensor.contiguous().numpy().tobytes() for tensor in tensors]


def outcome(batches: Iterator[Any]) -> tuple[list[Any], str]:
    """What came before the end or the error, and the error."""
    seen: list[Any] = []
    try:
        for batch in batches:
            seen.append(bits(batch) if isinstance(batch, Batch) else batch)
    except ValueError as error:
        return seen, str(error)
    return seen, ""


GOOD_INTEGERS = [
    "",
    "0",
    "7",
    "-1",
    "-0",
    "007",
    "16383",
    "16384",
    "-16384",
    "99999999",
    "123456789012345678",
    "0" * 18,
]
BAD_INTEGERS = [
    "-",
    "--1",
    "+1",
    " 1",
    "1.5",
    "0x1",
    "0" * 19,
    "9" * 19,
    "1e3",
    "\u00b2",
    "\u0661",
    "12a",
    "\x00",
    '"1"',
]
GOOD_CATEGORIES = ["", "0", "ffffffff", "FFFFFFFF", "00000000", "68fd1e64", "aB3", "80000000"]
BAD_CATEGORIES = [
    "g",
    "123456789",
    "-1",
    "68fd1e6 ",
    " 68fd1e6",
    "\ufffd",
    "é",
    "0x12",
    "/",
    ":",
    "@",
    "`",
    "\x0b",
    '"',
]


def row_of(draw: Any, faulty: bool) -> bytes:
    fields = [draw(st.sampled_from("01"))]
    fields += [draw(st.sampled_from(GOOD_INTEGERS)) for _ in range(13)]
    fields += [draw(st.sampled_from(GOOD_CATEGORIES))] * 13 + [draw(st.sampled_from(GOOD_CATEGORIES))] * 13
    fault = draw(st.integers(0, 7)) if faulty else 0
    if fault == 1:
        fields[0] = draw(st.sampled_from(["", "2", "-1", "00", "1 ", "/", "\ufeff1"]))
    if fault in (2, 6):
        fields[draw(st.integers(1, 13))] = draw(st.sampled_from(BAD_INTEGERS))
    if fault in (3, 6):
        fields[draw(st.integers(14, 39))] = draw(st.sampled_from(BAD_CATEGORIES))
    if fault == 4:
        fields = fields[: draw(st.integers(0, 39))]
    if fault == 5:
        fields += [draw(st.sampled_from(["", "1"]))]
    line = "\t".join(fields).encode()
    if fault == 7:
        place = draw(st.integers(0, len(line)))
        line = (
            line[:place]
            + draw(st.sampled_from([b"\xff", b"\xc3", b"\x00", b"\t", b"\r", b"\n", b"\xe2\x80\xa8"]))
            + line[place:]
        )
    return line


@st.composite
def files(draw: Any) -> list[tuple[str, bytes]]:
    """Names and contents of one to three files."""
    made = []
    for number in range(draw(st.integers(1, 3))):
        faulty = draw(st.booleans())
        pool = [row_of(draw, faulty) for _ in range(draw(st.integers(1, 4)))]
        ends = draw(st.sampled_from([[b"\n"], [b"\r\n"], [b"\n", b"\r\n", b"\r"]]))
        lines = draw(st.lists(st.tuples(st.sampled_from(pool), st.sampled_from(ends)), max_size=30))
        content = b"".join(line + end for line, end in lines)
        if lines and draw(st.booleans()):
            content = content[: -len(lines[-1][1])]
        if zipped := draw(st.booleans()):
            content = gzip.compress(content, mtime=0)
            if draw(st.integers(0, 3)) == 0:
                place = draw(st.integers(1, len(content) - 1))
                changed = bytes([content[place] ^ 0x55])
                content = content[:place] + draw(st.sampled_from([b"", changed + content[place + 1 :]]))
        made.append((f"{number}.tsv" + ".gz" * zipped, content))
    return made


@pytest.mark.parametrize("compiled", LOOPS)
@settings(max_examples=80, deadline=None)
@given(
    made=files(),
    size=st.sampled_from([1, 2, 3, 4, 6, 12, 60]),
    every=st.sampled_from([2, 3, 10]),
    table_rows=st.sampled_from([1, 1000, 2**32 - 1, 2**32, 2**40]),
    skip=st.booleans(),
    block=st.sampled_from([1, 50, 256, 1 << 18]),
    data=st.data(),
)
def test_blocks_are_what_lines_are(
    compiled: bool, made: Any, size: int, every: int, table_rows: int, skip: bool, block: int, data: Any
) -> None:
    """Both splits, from every step, of every rank: values to the bit, counts, errors and what comes before them."""
    loops = criteo_text._loops if compiled else lambda: None
    with (
        TemporaryDirectory() as folder,
        patch.object(rows, "_BLOCK", block),
        patch.object(criteo_text, "_loops", loops),
    ):
        paths = [Path(folder) / name for name, _ in made]
        for path, (_, content) in zip(paths, made, strict=True):
            path.write_bytes(content)
        world = data.draw(st.sampled_from([world for world in (1, 2, 3) if size % world == 0]))
        rank = data.draw(st.integers(0, world - 1))
        compare(paths, size, every, table_rows, skip, rank, world)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("block", [700, 1 << 18])
def test_faults_of_many_batches_are_each_their_own(tmp_path: Path, block: int, skip: bool) -> None:
    """A fault is told with its own batch, not with the first of its block: each block has several of both."""
    good = lines_of(90).splitlines()
    for place in range(5, 90, 7):
        good[place] = good[place].replace(b"\t", b"\tx", 1 + place % 40 // 2)
    (tmp_path / "a.tsv").write_bytes(b"\n".join(good[:50]))
    (tmp_path / "b.tsv.gz").write_bytes(gzip.compress(b"\n".join(good[50:])))
    with patch.object(rows, "_BLOCK", block):
        for size, world in ((1, 1), (4, 2), (6, 1), (6, 3), (60, 2)):
            for rank in range(world):
                compare([tmp_path / "a.tsv", tmp_path / "b.tsv.gz"], size, 3, 1000, skip, rank, world)


def compare(paths: list[Path], size: int, every: int, table_rows: int, skip: bool, rank: int, world: int) -> None:
    for evaluate in (False, True):
        for start in range(1 if evaluate else 4):
            ours = Criteo(paths, rows=table_rows, evaluate_every=every, on_bad_row="skip" if skip else "raise")
            oracle = LineReader(paths, table_rows, every, skip)
            if evaluate:
                batches = ours.evaluate(size, rank=rank, world_size=world)
            else:
                batches = ours.train(size, start_step=start, rank=rank, world_size=world)
            assert outcome(batches) == outcome(oracle.batches(evaluate, size, start, rank, world))
            assert ours.skipped == oracle.skipped


def lines_of(count: int) -> bytes:
    categories = [[f"{number * 7919 + column:08x}" for column in range(26)] for number in range(count)]
    return b"".join(
        "\t".join([str(number % 2), *[str(number * 31)] * 13, *categories[number]]).encode() + b"\n"
        for number in range(count)
    )


def test_the_loop_reads_plain_rows_and_the_line_parser_none_of_them(tmp_path: Path) -> None:
    if not numba_loops.compiles():
        pytest.skip("no numba")
    path = tmp_path / "a.tsv"
    path.write_bytes(lines_of(3000))
    with patch.object(criteo_text.Lines, "line", side_effect=AssertionError("parsed by itself")):
        assert sum(batch.batch_size for batch in Criteo(path).train(100)) == 2700


def test_a_block_is_all_that_is_read_before_the_first_batch(tmp_path: Path) -> None:
    """Memory is that of a block, whatever the file's size."""
    path = tmp_path / "a.tsv"
    path.write_bytes(lines_of(20_000))
    blocks = rows.read_blocks(path)
    sizes = [len(block) for block in blocks]
    assert sum(sizes) == path.stat().st_size
    assert max(sizes) < rows._BLOCK + 1000 < path.stat().st_size / 10


def test_a_file_of_cr_alone_is_cut_into_blocks_too(tmp_path: Path) -> None:
    path = tmp_path / "a.tsv"
    path.write_bytes(lines_of(5000).replace(b"\n", b"\r"))
    assert max(map(len, rows.read_blocks(path))) < rows._BLOCK + 1000
    assert sum(batch.batch_size for batch in Criteo(path).train(100)) == 4500


def test_lines_are_parsed_one_by_one_where_the_loop_does_not_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The import alone was guarded: what numba raised while it compiled came out of the first batch."""
    if not numba_loops.compiles():
        pytest.skip("no numba")
    path = tmp_path / "a.tsv"
    path.write_bytes(lines_of(40))
    right = [bits(batch) for batch in Criteo(path).train(6)]

    def broken(*arrays: Any) -> int:
        raise TypeError("no such\ninstruction")

    monkeypatch.setattr("shardwise.data.criteo_loops.parse_rows", broken)
    criteo_text._loops.cache_clear()
    try:
        with pytest.warns(UserWarning, match="numba does not work here, .*: TypeError: no such instruction$") as warned:
            assert [bits(batch) for batch in Criteo(path).train(6)] == right
        assert len(warned) == 1
    finally:
        criteo_text._loops.cache_clear()


def test_the_loop_compiles_where_nothing_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """numba refuses to compile what it was told to keep and cannot: rows were parsed at a twentieth of the rate, though
    other loops are compiled in memory then."""
    if not numba_loops.compiles():
        pytest.skip("no numba")
    caching = importlib.import_module("numba.core.caching")
    monkeypatch.setattr(caching.CacheImpl, "_locator_classes", [])
    monkeypatch.delitem(sys.modules, "shardwise.data.criteo_loops", raising=False)
    monkeypatch.delattr("shardwise.data.criteo_loops", raising=False)
    path = tmp_path / "a.tsv"
    path.write_bytes(lines_of(40))
    criteo_text._loops.cache_clear()
    try:
        with patch.object(criteo_text.Lines, "line", side_effect=AssertionError("parsed by itself")):
            assert sum(batch.batch_size for batch in Criteo(path).train(6)) == 36
    finally:
        criteo_text._loops.cache_clear()

"""Traces: which rows of each table every batch wants, in a file of about two bytes a row, written and read in pieces.

A batch of a trace is that of one step, all ranks together. Of each table it has the distinct rows, ascending, and how
many ids asked for them. Rows are kept as differences: each less the one before, less one (the first less -1), as a
uint16. A difference of 65,535 or more is written as 65,535, and itself among the escapes, as uint32 or, where the table
has 2^32 rows or more, as uint64.

Of a file the suffix says the format. `.npz`, a zip of numpy's arrays:

    header.json                 {"format": "shardwise.trace", "version": 1, "tables": [{"name", "rows", ...}]}
    <chunk>/samples.npy         [n] int64, samples of each batch of the chunk
    <chunk>/<table>/counts.npy  [n] int64, distinct rows of each;  ids.npy [n] int64, ids of each
    <chunk>/<table>/deltas.npy  [sum of counts] uint16;            escapes.npy
    end.json                    {"batches": B, "chunks": C, "rows": distinct rows of each table in all batches}

and `.parquet`, which pyarrow (the extra `data`) writes: a row for each batch and table in turn, with the columns batch,
table, samples, ids, deltas and escapes; header and end are in its metadata. A file is there once it is whole.
"""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shardwise.untrusted import parse_json, require_regular

Array = npt.NDArray[Any]
FORMAT, VERSION = "shardwise.trace", 1
# a difference that stands among the escapes
_ESCAPE = 0xFFFF
# bytes gathered before they are written, and the most that one array of a file may have
_CHUNK_BYTES, _MOST_BYTES = 32 * 2**20, 2**30
_MOST_BATCHES = 4096


@dataclass(frozen=True)
class TracedTable:
    """What a trace says of a table.

    Args:
        name, rows, dim: as in its config.
        dtype: of its rows, FP32, FP16 or BF16.
        record_bytes: of a row with its optimizer's states, as it lies below the device.

    Raises:
        ValueError: a size is not positive.
    """

    name: str
    rows: int
    dim: int
    dtype: str = "FP32"
    record_bytes: int = 0

    def __post_init__(self) -> None:
        for what, least in (("rows", 1), ("dim", 1), ("record_bytes", 0)):
            value = getattr(self, what)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"table {self.name!r}: {what} must be an int of {least} or more, got {value!r}")


@dataclass(frozen=True, eq=False)
class TracedBatch:
    """One batch: its samples, and by table distinct rows [N] int64, ascending, and the ids that asked for them."""

    samples: int
    rows: Mapping[str, Tensor]
    ids: Mapping[str, int]


@dataclass(frozen=True, eq=False)
class _Piece:
    """Some batches of one table, as a file has them."""

    counts: Array
    ids: Array
    deltas: Array
    escapes: Array


@dataclass(frozen=True, eq=False)
class _Chunk:
    """Some batches of all tables; samples [n] int64."""

    samples: Array
    pieces: tuple[_Piece, ...]


class _Target(Protocol):
    """A file that chunks are written to."""

    def write(self, chunk: _Chunk) -> None: ...

    def close(self, end: Mapping[str, Any]) -> None: ...

    def abort(self) -> None: ...


class TraceWriter:
    """Writes a trace, as a context manager; the file appears when it ends without an error.

    Args:
        path: its suffix, .npz or .parquet, says the format.
        tables: those that batches have rows of, all of them.

    Raises:
        ValueError: another suffix, no tables, or two of one name.
        ImportError: the format needs pyarrow, which is not installed.
    """

    def __init__(self, path: str | os.PathLike[str], tables: Sequence[TracedTable]) -> None:
        self.path, self.tables = Path(path), tuple(tables)
        names = [table.name for table in self.tables]
        if not names or len({*names}) != len(names):
            raise ValueError(f"{self.path}: a trace needs tables, each of its own name, got {names}")
        self.batches, self.rows = 0, [0] * len(names)
        self._partial = self.path.with_name(f".{self.path.name}.{os.getpid()}")
        self._chunks = 0
        self._begin_chunk()
        header = {"format": FORMAT, "version": VERSION, "tables": [asdict(table) for table in self.tables]}
        self._target: _Target = _by_suffix(self.path, _NpzTarget, _ParquetTarget)(self._partial, header, self.tables)

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._target.abort()
            self._partial.unlink(missing_ok=True)

    def add(self, samples: int, ids: Mapping[str, Tensor]) -> None:
        """The next batch: of each table all ids [N] that are looked up, in any order and repeated as they come.

        Raises:
            ValueError: an id is none of its table's rows; names both.
        """
        for number, table in enumerate(self.tables):
            every = ids.get(table.name)
            rows, count = (np.zeros(0, np.int64), 0) if every is None else (_distinct(every, table), every.numel())
            self._add_rows(number, rows, count)
        self._samples.append(samples)
        self.batches += 1
        if self._gathered >= _CHUNK_BYTES or len(self._samples) >= _MOST_BATCHES:
            self._flush()

    def close(self) -> None:
        """Write what is left and give the file its name."""
        self._flush()
        self._target.close({"batches": self.batches, "chunks": self._chunks, "rows": self.rows})
        os.replace(self._partial, self.path)

    def _begin_chunk(self) -> None:
        self._samples: list[int] = []
        # of each table: counts, ids, deltas, escapes of each batch
        self._parts: list[tuple[list[int], list[int], list[Array], list[Array]]] = [([], [], [], []) for _ in self.rows]
        self._gathered = 0

    def _add_rows(self, number: int, rows: Array, ids: int) -> None:
        gaps = np.diff(rows, prepend=-1) - 1
        escaped = gaps >= _ESCAPE
        deltas = np.where(escaped, _ESCAPE, gaps).astype(np.uint16)
        escapes = gaps[escaped].astype(_escape_type(self.tables[number]))
        counts, every, *arrays = self._parts[number]
        counts.append(len(rows))
        every.append(ids)
        arrays[0].append(deltas)
        arrays[1].append(escapes)
        self.rows[number] += len(rows)
        self._gathered += deltas.nbytes + escapes.nbytes + 16

    def _flush(self) -> None:
        if not self._samples:
            return
        pieces = tuple(
            _Piece(np.array(counts), np.array(ids), np.concatenate(deltas), np.concatenate(escapes))
            for counts, ids, deltas, escapes in self._parts
        )
        self._target.write(_Chunk(np.array(self._samples, np.int64), pieces))
        self._chunks += 1
        self._begin_chunk()


def _distinct(ids: Tensor, table: TracedTable) -> Array:
    rows = torch.unique(ids.detach().flatten().to("cpu", torch.int64))
    if rows.numel() and (int(rows[0]) < 0 or int(rows[-1]) >= table.rows):
        wrong = int(rows[0]) if int(rows[0]) < 0 else int(rows[-1])
        raise ValueError(f"table {table.name!r}: id {wrong} is none of its {table.rows:,} rows")
    array: Array = rows.numpy()
    return array


class Trace:
    """A trace in a file, read piece by piece whenever it is iterated.

    Raises:
        ValueError: the file is no trace, damaged, or of a later version; names it.
        OSError: there is no such file.
        ImportError: the format needs pyarrow, which is not installed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        require_regular(self.path)
        self._source = _by_suffix(self.path, _NpzSource, _ParquetSource)
        with _named(self.path):
            header, end = self._source(self.path).ends()
            self.tables = _tables_from(header)
            self.batches, self.rows = _end_from(end, len(self.tables))

    def __iter__(self) -> Iterator[TracedBatch]:
        """The batches in their order. Raises as the constructor where what it says does not hold."""
        seen, rows = 0, [0] * len(self.tables)
        with _named(self.path):
            for chunk in self._source(self.path).chunks(self.tables):
                pieces = [_rows_of(piece, table) for piece, table in zip(chunk.pieces, self.tables, strict=True)]
                if any(len(piece) != len(chunk.samples) for piece in pieces):
                    raise ValueError("tables differ in their number of batches")
                for place, samples in enumerate(chunk.samples.tolist()):
                    ids = [int(piece.ids[place]) for piece in chunk.pieces]
                    rows = [total + piece[place].numel() for total, piece in zip(rows, pieces, strict=True)]
                    seen += 1
                    yield TracedBatch(
                        samples,
                        {table.name: piece[place] for table, piece in zip(self.tables, pieces, strict=True)},
                        {table.name: count for table, count in zip(self.tables, ids, strict=True)},
                    )
            if (seen, rows) != (self.batches, self.rows):
                raise ValueError(f"it has {seen} batches with {rows} rows, and says {self.batches} with {self.rows}")


def _rows_of(piece: _Piece, table: TracedTable) -> list[Tensor]:
    """The distinct rows of each batch of a piece, checked."""
    counts, escaped = piece.counts, piece.deltas == _ESCAPE
    if len(piece.ids) != len(counts) or (counts < 0).any() or counts.sum() != len(piece.deltas):
        raise ValueError(f"table {table.name!r}: its counts are not those of its rows")
    if escaped.sum() != len(piece.escapes) or (len(piece.escapes) and piece.escapes.max() >= table.rows):
        raise ValueError(f"table {table.name!r}: its escapes are not those of its rows")
    gaps = piece.deltas.astype(np.int64)
    gaps[escaped] = piece.escapes.astype(np.int64)
    if gaps.sum(dtype=np.float64) >= 2.0**62:
        raise ValueError(f"table {table.name!r}: its rows leave the table")
    sums = np.cumsum(gaps + 1)
    ends = np.cumsum(counts)
    starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
    before = np.concatenate([[0], sums])[starts]
    rows = sums - np.repeat(before, counts) - 1
    if len(rows) and int(rows.max()) >= table.rows:
        raise ValueError(f"table {table.name!r}: row {int(rows.max())} is none of its {table.rows:,}")
    return [*torch.split(torch.from_numpy(rows), counts.tolist())] if len(counts) else []


def _escape_type(table: TracedTable) -> type[np.uint32] | type[np.uint64]:
    return np.uint32 if table.rows <= 2**32 else np.uint64


def _by_suffix(path: Path, npz: Any, parquet: Any) -> Any:
    if path.suffix == ".npz":
        return npz
    if path.suffix == ".parquet":
        return parquet
    raise ValueError(f"{path}: a trace is a file .npz or .parquet, got {path.suffix or 'no suffix'!r}")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """What is wrong with a file is a ValueError that names it."""
    try:
        yield
    except (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:
        text = f"{error.args[0]!r} is missing" if isinstance(error, KeyError) and error.args else str(error)
        raise ValueError(f"{path}: no trace that can be read: {text}") from error
    except Exception as error:
        # zlib and pyarrow have errors of their own, and pyarrow's OSErrors of damaged bytes have no number
        damaged = isinstance(error, OSError) and error.errno is None
        if not damaged and type(error).__module__.split(".")[0] not in ("zlib", "pyarrow"):
            raise
        raise ValueError(f"{path}: no trace that can be read: {error}") from error


def _tables_from(header: Any) -> tuple[TracedTable, ...]:
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"it does not say that it is a {FORMAT}")
    if header.get("version") != VERSION:
        raise ValueError(f"its version is {header.get('version')!r}, and {VERSION} is read here")
    names = {field.name for field in fields(TracedTable)}
    tables = tuple(TracedTable(**{k: v for k, v in entry.items() if k in names}) for entry in header["tables"])
    texts = [text for table in tables for text in (table.name, table.dtype)]
    if not tables or len({table.name for table in tables}) != len(tables) or not all(isinstance(t, str) for t in texts):
        raise ValueError(f"its tables are {[table.name for table in tables]}")
    if any(table.rows > 2**44 for table in tables):
        raise ValueError("a table has more than 2^44 rows")
    return tables


def _end_from(end: Any, tables: int) -> tuple[int, list[int]]:
    batches, rows = end["batches"], end["rows"]
    if not isinstance(batches, int) or not isinstance(rows, list) or len(rows) != tables:
        raise ValueError(f"it ends with {end!r}")
    return batches, rows


class _NpzTarget:
    def __init__(self, path: Path, header: Mapping[str, Any], tables: Sequence[TracedTable]) -> None:
        # the lowest level: rows that are drawn at random have little to find
        self._archive = zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
        self._archive.writestr("header.json", json.dumps(header))
        self._chunk = 0

    def write(self, chunk: _Chunk) -> None:
        self._array("samples", chunk.samples)
        for number, piece in enumerate(chunk.pieces):
            for field in fields(_Piece):
                self._array(f"{number}/{field.name}", getattr(piece, field.name))
        self._chunk += 1

    def _array(self, name: str, array: Array) -> None:
        with self._archive.open(f"{self._chunk}/{name}.npy", "w", force_zip64=True) as member:
            np.lib.format.write_array(member, array, allow_pickle=False)

    def close(self, end: Mapping[str, Any]) -> None:
        self._archive.writestr("end.json", json.dumps(end))
        self._archive.close()

    def abort(self) -> None:
        with suppress(Exception):
            self._archive.close()


class _NpzSource:
    def __init__(self, path: Path) -> None:
        self._path = path

    def ends(self) -> tuple[Any, Any]:
        with zipfile.ZipFile(self._path) as archive:
            return parse_json(_member(archive, "header.json")), parse_json(_member(archive, "end.json"))

    def chunks(self, tables: Sequence[TracedTable]) -> Iterator[_Chunk]:
        with zipfile.ZipFile(self._path) as archive:
            count = parse_json(_member(archive, "end.json"))["chunks"]
            if not isinstance(count, int) or count > len(archive.namelist()):
                raise ValueError(f"it says that it has {count!r} chunks")
            for chunk in range(count):
                pieces = []
                for number, table in enumerate(tables):
                    kinds = (np.int64, np.int64, np.uint16, _escape_type(table))
                    names = (f"{chunk}/{number}/{field.name}.npy" for field in fields(_Piece))
                    pieces.append(_Piece(*(_array_in(archive, *pair) for pair in zip(names, kinds, strict=True))))
                yield _Chunk(_array_in(archive, f"{chunk}/samples.npy", np.int64), tuple(pieces))


def _member(archive: zipfile.ZipFile, name: str) -> bytes:
    """The bytes of a file in an archive, no more than there may be."""
    size = archive.getinfo(name).file_size
    if size > _MOST_BYTES:
        raise ValueError(f"{name} has {size:,} bytes, at most {_MOST_BYTES:,} are read")
    return archive.read(name)


def _array_in(archive: zipfile.ZipFile, name: str, kind: Any) -> Array:
    data = io.BytesIO(_member(archive, name))
    version = np.lib.format.read_magic(data)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(data)
    left = data.getbuffer().nbytes - data.tell()
    if dtype != kind or len(shape) != 1 or shape[0] * dtype.itemsize != left:
        raise ValueError(f"{name} is {dtype} {shape} of {left} bytes, expected {np.dtype(kind)}")
    return np.frombuffer(data.getbuffer()[data.tell() :], dtype)


class _ParquetTarget:
    def __init__(self, path: Path, header: Mapping[str, Any], tables: Sequence[TracedTable]) -> None:
        arrow, parquet = _pyarrow()
        self._arrow, self._batch, self._tables = arrow, 0, tables
        self._wide = any(_escape_type(table) is np.uint64 for table in tables)
        escapes = arrow.uint64() if self._wide else arrow.uint32()
        numbers = [(name, arrow.int64()) for name in ("batch", "table", "samples", "ids")]
        lists = [("deltas", arrow.list_(arrow.uint16())), ("escapes", arrow.list_(escapes))]
        self._schema = arrow.schema([*numbers, *lists], {"header": json.dumps(header)})
        self._writer = parquet.ParquetWriter(
            path, self._schema, compression="zstd", use_dictionary=False, write_page_checksum=True
        )

    def write(self, chunk: _Chunk) -> None:
        batches, tables = len(chunk.samples), len(chunk.pieces)
        # rows of the file are batches, and within them tables; a piece has all batches of one table
        order = np.arange(batches * tables).reshape(tables, batches).T.ravel()
        counts = np.concatenate([piece.counts for piece in chunk.pieces])
        deltas = np.concatenate([piece.deltas for piece in chunk.pieces])
        escapes = np.concatenate([piece.escapes for piece in chunk.pieces])
        marks = np.concatenate([[0], np.cumsum(deltas == _ESCAPE)])
        edges = np.concatenate([[0], np.cumsum(counts)])
        columns = [
            np.repeat(np.arange(self._batch, self._batch + batches), tables),
            np.tile(np.arange(tables), batches),
            np.repeat(chunk.samples, tables),
            np.concatenate([piece.ids for piece in chunk.pieces])[order],
            self._list(edges, deltas, order),
            self._list(marks[edges], escapes.astype(np.uint64 if self._wide else np.uint32), order),
        ]
        self._writer.write_table(self._arrow.table([self._arrow.array(c) for c in columns], schema=self._schema))
        self._batch += batches

    def _list(self, edges: Array, values: Array, order: Array) -> Any:
        whole = self._arrow.LargeListArray.from_arrays(self._arrow.array(edges), self._arrow.array(values))
        field = self._schema.field("deltas" if values.dtype == np.uint16 else "escapes")
        return whole.take(self._arrow.array(order)).cast(field.type)

    def close(self, end: Mapping[str, Any]) -> None:
        self._writer.add_key_value_metadata({"end": json.dumps(end)})
        self._writer.close()

    def abort(self) -> None:
        with suppress(Exception):
            self._writer.close()


class _ParquetSource:
    def __init__(self, path: Path) -> None:
        self._path = path

    def ends(self) -> tuple[Any, Any]:
        _, parquet = _pyarrow()
        with parquet.ParquetFile(self._path) as file:
            metadata = {**(file.schema_arrow.metadata or {}), **(file.metadata.metadata or {})}
        return parse_json(metadata[b"header"]), parse_json(metadata[b"end"])

    def chunks(self, tables: Sequence[TracedTable]) -> Iterator[_Chunk]:
        _, parquet = _pyarrow()
        width = len(tables)
        with parquet.ParquetFile(self._path, page_checksum_verification=True) as file:
            for number in range(file.num_row_groups):
                if file.metadata.row_group(number).total_byte_size > 4 * _MOST_BYTES:
                    raise ValueError(f"row group {number} is too large to read")
                read = file.read_row_group(number)
                columns = {name: read.column(name).combine_chunks() for name in read.column_names}
                of_table = columns["table"].to_numpy(zero_copy_only=False)
                if len(of_table) % width or (of_table != np.tile(np.arange(width), len(of_table) // width)).any():
                    raise ValueError(f"row group {number} does not have every table of its batches in turn")
                pieces = []
                for table in range(width):
                    mine = {name: column[table::width] for name, column in columns.items()}
                    deltas, escapes = (mine[name] for name in ("deltas", "escapes"))
                    pieces.append(
                        _Piece(
                            deltas.value_lengths().to_numpy(zero_copy_only=False).astype(np.int64),
                            mine["ids"].to_numpy(zero_copy_only=False).astype(np.int64),
                            deltas.flatten().to_numpy(zero_copy_only=False),
                            escapes.flatten().to_numpy(zero_copy_only=False),
                        )
                    )
                yield _Chunk(columns["samples"][::width].to_numpy(zero_copy_only=False), tuple(pieces))


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(
            "a .parquet trace needs pyarrow, which the extra `data` brings: install it, or write an .npz"
        ) from error
    return pyarrow, pyarrow.parquet

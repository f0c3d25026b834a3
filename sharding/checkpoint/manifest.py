"""The manifest of a checkpoint: which tables, which tensors, where each lies. Plain data, read as if by an enemy.

Every tensor has an address that no plan is part of: (table, rows, columns, state). Dense tensors are whole.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from shardwise.sharding.layout import ROW_STATES, Shard, Span, validate

from .errors import CheckpointDamaged

FORMAT = 1
NAME = "manifest.json"
# a larger one is refused unread
MAX_BYTES = 256 * 2**20
FILE_NAME = re.compile(r"rank-\d{5,9}\.safetensors")
# kinds of tensors: of a table (its rows or a state of them), a dense parameter or buffer, a state of a dense parameter
TABLE, DENSE, OPTIMIZER = "table", "dense", "optimizer"
# the state that is the rows themselves
WEIGHT = "weight"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_LARGEST = 2**63 - 1


@dataclass(frozen=True)
class Stored:
    """One tensor of a file. `name` is its parameter's in the unsharded model; a table's has `rows` and `columns`.

    A state that is one number a row has shape [rows], and was made of `columns`.
    """

    kind: str
    name: str
    state: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    rows: Span | None = None
    columns: Span | None = None
    file: str = ""

    @property
    def key(self) -> str:
        """Its name in the file."""
        where = [f"{low}:{high}" for low, high in (span for span in (self.rows, self.columns) if span is not None)]
        return "/".join([self.kind, self.name, self.state, *where])


@dataclass(frozen=True)
class TableFacts:
    """A table: `rule` of its fused optimizer with the `settings`, `steps` that it counted, and the plan's shards."""

    table: str
    rows: int
    dim: int
    dtype: torch.dtype
    row_state: str
    rule: str | None
    settings: Mapping[str, Any]
    steps: int
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class FileFacts:
    """A file: its size and checksum."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything of a checkpoint but the tensors.

    `fused` and `dense` are `param_groups` of the tables' optimizers and of the others, parameters by name; `values` are
    the states of dense parameters that are no tensors; `aliases` are further names of the same parameters.
    """

    step: int
    world_size: int
    versions: Mapping[str, str]
    extra: Mapping[str, Any]
    tables: Mapping[str, TableFacts]
    tensors: tuple[Stored, ...]
    files: tuple[FileFacts, ...]
    fused: Sequence[Mapping[str, Any]] = ()
    dense: Sequence[Mapping[str, Any]] = ()
    values: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def by_address(self) -> dict[tuple[str, str, str], list[Stored]]:
        """The pieces of each (kind, name, state)."""
        found: dict[tuple[str, str, str], list[Stored]] = {}
        for one in self.tensors:
            found.setdefault((one.kind, one.name, one.state), []).append(one)
        return found

    @cached_property
    def by_file(self) -> dict[str, list[Stored]]:
        """The tensors of each file."""
        found: dict[str, list[Stored]] = {one.name: [] for one in self.files}
        for one in self.tensors:
            found[one.file].append(one)
        return found


def to_bytes(manifest: Manifest) -> bytes:
    """The manifest as JSON.

    Raises:
        ValueError, TypeError: `extra` or a setting is not JSON.
    """
    tables = {
        name: {
            "table": one.table, "rows": one.rows, "dim": one.dim, "dtype": dtype_name(one.dtype),
            "row_state": one.row_state, "rule": one.rule, "settings": dict(one.settings), "steps": one.steps,
            "shards": [
                {"rank": s.rank, "rows": s.rows, "columns": s.cols, "replica": s.replica} for s in one.shards
            ],
        }
        for name, one in manifest.tables.items()
    }  # fmt: skip
    tensors = [
        {
            "kind": one.kind, "name": one.name, "state": one.state, "rows": one.rows, "columns": one.columns,
            "shape": one.shape, "dtype": dtype_name(one.dtype), "file": one.file, "key": one.key,
        }
        for one in manifest.tensors
    ]  # fmt: skip
    whole = {
        "format": FORMAT, "step": manifest.step, "world_size": manifest.world_size,
        "versions": dict(manifest.versions), "extra": dict(manifest.extra), "tables": tables, "tensors": tensors,
        "files": [{"name": one.name, "bytes": one.bytes, "sha256": one.sha256} for one in manifest.files],
        "fused": list(manifest.fused), "dense": list(manifest.dense), "values": dict(manifest.values),
        "aliases": dict(manifest.aliases),
    }  # fmt: skip
    return json.dumps(whole, allow_nan=False).encode()


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest of a step folder, checked in itself; no other file is opened.

    Raises:
        FileNotFoundError: there is none: no checkpoint, or one that was never finished.
        CheckpointDamaged: it is too large, no JSON of this format, contradicts itself, or names a file outside.
    """
    file = Path(path) / NAME
    try:
        with open(os.open(file, os.O_RDONLY | os.O_NOFOLLOW), "rb") as opened:
            size = os.fstat(opened.fileno()).st_size
            if size > MAX_BYTES:
                raise CheckpointDamaged(f"{file}: {size} bytes, a manifest has at most {MAX_BYTES}")
            data = opened.read(size)
    except FileNotFoundError:
        raise FileNotFoundError(f"{file} is not there: {path} is no finished checkpoint") from None
    except OSError as error:
        raise CheckpointDamaged(f"{file}: {error.strerror}") from error
    try:
        return _manifest(parse_json(data))
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError) as error:
        raise CheckpointDamaged(f"{file}: {type(error).__name__}: {error}") from error


def parse_json(data: bytes) -> Any:
    """JSON without repeated keys and without NaN.

    Raises:
        ValueError: it is not.
    """
    return json.loads(data, object_pairs_hook=_no_repeated, parse_constant=_no_constant)


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _no_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} is there twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _manifest(data: Any) -> Manifest:
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        found = data.get("format") if isinstance(data, dict) else type(data).__name__
        raise ValueError(f"format {found!r}, this version reads format {FORMAT}")
    files = tuple(_file(one) for one in _list(data["files"]))
    names = {one.name for one in files}
    if len(names) < len(files):
        raise ValueError("a file is listed twice")
    tables = {_text(name): _table(_text(name), one) for name, one in _dict(data["tables"]).items()}
    tensors = tuple(_stored(one, tables, names) for one in _list(data["tensors"]))
    if len({(one.file, one.key) for one in tensors}) < len(tensors):
        raise ValueError("a tensor is listed twice")
    found = Manifest(
        _number(data["step"]), _number(data["world_size"]), _dict(data["versions"]), _dict(data["extra"]), tables,
        tensors, files, [_group(one) for one in _list(data["fused"])], [_group(one) for one in _list(data["dense"])],
        {_text(name): _dict(one) for name, one in _dict(data["values"]).items()},
        {_text(name): _text(one) for name, one in _dict(data["aliases"]).items()},
    )  # fmt: skip
    require_whole(found)
    return found


def _table(name: str, data: Any) -> TableFacts:
    if data["row_state"] not in ROW_STATES:
        raise ValueError(f"table {name!r}: row_state {data['row_state']!r} is none of {ROW_STATES}")
    shards = tuple(
        Shard(
            _text(data["table"]), _number(one["rank"]), _span(one["rows"]), _span(one["columns"]), bool(one["replica"])
        )
        for one in _list(data["shards"])
    )
    return TableFacts(
        _text(data["table"]), _number(data["rows"]), _number(data["dim"]), _dtype(data["dtype"]), data["row_state"],
        None if data["rule"] is None else _text(data["rule"]), _dict(data["settings"]), _number(data["steps"]), shards,
    )  # fmt: skip


def _stored(data: Any, tables: Mapping[str, TableFacts], files: set[str]) -> Stored:
    kind, name, file = _text(data["kind"]), _text(data["name"]), _text(data["file"])
    rows = columns = None
    shape = sizes(data["shape"])
    if kind not in (TABLE, DENSE, OPTIMIZER):
        raise ValueError(f"tensor {name!r} is of kind {kind!r}")
    if kind == TABLE:
        rows, columns = _span(data["rows"]), _span(data["columns"])
        if name not in tables:
            raise ValueError(f"tensor {name!r} is of no table")
        if shape not in (_shape(rows), _shape(rows, columns)):
            raise ValueError(f"tensor {name!r} of rows {rows} and columns {columns} has shape {list(shape)}")
    if file not in files:
        raise ValueError(f"tensor {name!r} is in file {file!r}, which is not listed")
    found = Stored(kind, name, _text(data["state"]), shape, _dtype(data["dtype"]), rows, columns, file)
    if data["key"] != found.key:
        raise ValueError(f"tensor {found.key!r} has key {data['key']!r}")
    return found


def require_whole(manifest: Manifest) -> None:
    """The pieces of each table cover it once, in every state; all others are in one piece."""
    place = {one.name: number for number, one in enumerate(manifest.files)}
    for name in manifest.tables:
        if (TABLE, name, WEIGHT) not in manifest.by_address:
            raise ValueError(f"table {name!r} has no rows")
    for (kind, name, state), pieces in manifest.by_address.items():
        if kind != TABLE:
            if len(pieces) > 1:
                raise ValueError(f"{name!r}: {state} is there {len(pieces)} times")
            continue
        facts = manifest.tables[name]
        if len({(len(one.shape), one.dtype) for one in pieces}) > 1 or (state == WEIGHT and len(pieces[0].shape) != 2):
            raise ValueError(f"table {name!r}: the pieces of {state} are not of one kind")
        boxes = [Shard(name, place[one.file], one.rows or (0, 0), one.columns or (0, 0)) for one in pieces]
        try:
            validate(boxes, {name: (facts.rows, facts.dim)}, len(place))
        except ValueError as error:
            raise ValueError(f"{state}: {error}") from None


def _shape(*spans: Span) -> tuple[int, ...]:
    return tuple(high - low for low, high in spans)


def _file(data: Any) -> FileFacts:
    name, checksum = _text(data["name"]), _text(data["sha256"])
    if not FILE_NAME.fullmatch(name):
        raise ValueError(f"file {name!r} is no name of a checkpoint's file, rank-00000.safetensors say")
    if not _SHA256.fullmatch(checksum):
        raise ValueError(f"file {name!r}: sha256 {checksum[:80]!r}")
    return FileFacts(name, _number(data["bytes"]), checksum)


def _group(data: Any) -> dict[str, Any]:
    group = _dict(data)
    group["params"] = [_text(name) for name in _list(group["params"])]
    return group


def sizes(data: Any) -> tuple[int, ...]:
    """A list of sizes in JSON.

    Raises:
        ValueError: it is none.
    """
    return tuple(_number(n) for n in _list(data))


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, _text(name), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"dtype {name!r} is unknown")
    return found


def _span(data: Any) -> Span:
    low, high = sizes(data)
    if low > high:
        raise ValueError(f"[{low}, {high}) is no range")
    return low, high


def _number(data: Any) -> int:
    if type(data) is not int or not 0 <= data <= _LARGEST:
        raise ValueError(f"{str(data)[:80]} is no size")
    return data


def _text(data: Any) -> str:
    if not isinstance(data, str):
        raise ValueError(f"{str(data)[:80]} is no text")
    return data


def _list(data: Any) -> list[Any]:
    if not isinstance(data, list):
        raise ValueError(f"{str(data)[:80]} is no list")
    return data


def _dict(data: Any) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise ValueError(f"{str(data)[:80]} is no object")
    return data

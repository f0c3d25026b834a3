"""The manifest of a checkpoint: which tables, which tensors, where each lies. Plain data, read as if by an enemy.

Every tensor has an address that no plan is part of: (table, rows, columns, state). Dense tensors are whole.

A file begins with the bytes `{"format": 2, "sha256": "`, then 64 digits: the checksum of all bytes after them. Files of
format 1, which were written before, have none, and none of its key: one with a checksum whose beginning was changed is
refused, and not taken for one of those.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from shardwise.planner.layout import (
    ROW_STATES,
    Shard,
    Span,
    validate,
)
from shardwise.untrusted import parse_json, repeated

from .errors import CheckpointDamaged
from .places import absolute, locate
from .storage import StoreError, files_in

FORMAT = 2
# without a checksum of its own, still read
_UNCHECKED = 1
_KEYS = {
    *("format", "step", "world_size", "versions", "extra", "tables", "tensors", "files", "fused", "dense", "values"),
    "aliases",
}
# what stands before and after the checksum
_BEGIN, _DIGITS, _END = f'{{"format": {FORMAT}, "sha256": "'.encode(), 64, b'", '
NAME = "manifest.json"
# the name of a step folder says the step, and how often it was saved before
STEP = re.compile(r"step-(\d{12})(?:\.(\d{1,9}))?")
# a larger one is refused unread
MAX_BYTES = 256 * 2**20
FILE_NAME = re.compile(r"rank-\d{5,9}\.safetensors")
# of objects and lists within each other: a reader that is called far down a stack has few levels left
_MOST_LEVELS = 100
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

    @property
    def cells(self) -> tuple[Span, Span]:
        """Rows and columns, which a piece of a table has."""
        assert self.rows is not None and self.columns is not None
        return self.rows, self.columns


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
        pieces: dict[tuple[str, str, str], list[Stored]] = {}
        for tensor in self.tensors:
            pieces.setdefault((tensor.kind, tensor.name, tensor.state), []).append(tensor)
        return pieces

    @cached_property
    def by_file(self) -> dict[str, list[Stored]]:
        """The tensors of each file."""
        tensors: dict[str, list[Stored]] = {file.name: [] for file in self.files}
        for tensor in self.tensors:
            tensors[tensor.file].append(tensor)
        return tensors


def to_bytes(manifest: Manifest) -> bytes:
    """The manifest as JSON.

    Raises:
        ValueError, TypeError: `extra` or a setting is not JSON, or no reader would take the manifest.
    """
    for what, value in (
        ("extra", manifest.extra),
        ("a setting of a table", [facts.settings for facts in manifest.tables.values()]),
        ("param_groups", [manifest.fused, manifest.dense]),
        ("a state of a parameter", manifest.values),
    ):
        require_json(what, value)
    tables = {
        name: {
            "table": facts.table, "rows": facts.rows, "dim": facts.dim, "dtype": dtype_name(facts.dtype),
            "row_state": facts.row_state, "rule": facts.rule, "settings": dict(facts.settings), "steps": facts.steps,
            "shards": [
                {"rank": s.rank, "rows": s.rows, "columns": s.cols, "replica": s.replica} for s in facts.shards
            ],
        }
        for name, facts in manifest.tables.items()
    }  # fmt: skip
    tensors = [
        {
            "kind": tensor.kind, "name": tensor.name, "state": tensor.state, "rows": tensor.rows,
            "columns": tensor.columns, "shape": tensor.shape, "dtype": dtype_name(tensor.dtype),
            "file": tensor.file, "key": tensor.key,
        }
        for tensor in manifest.tensors
    ]  # fmt: skip
    whole = {
        "step": manifest.step, "world_size": manifest.world_size, "versions": dict(manifest.versions),
        "extra": dict(manifest.extra), "tables": tables, "tensors": tensors,
        "files": [{"name": file.name, "bytes": file.bytes, "sha256": file.sha256} for file in manifest.files],
        "fused": list(manifest.fused), "dense": list(manifest.dense), "values": dict(manifest.values),
        "aliases": dict(manifest.aliases),
    }  # fmt: skip
    sealed = seal(json.dumps(whole, allow_nan=False).encode())
    if len(sealed) > MAX_BYTES:
        raise ValueError(f"the manifest would have {len(sealed)} bytes, at most {MAX_BYTES} are read: is extra large?")
    return sealed


def require_json(what: str, value: Any) -> None:
    """Raise unless a reader of JSON gets `value` back, lists for tuples and texts for the keys of an object.

    Raises:
        ValueError, TypeError: JSON does not have it; two keys are the same text there, 1 and "1" say, of which one
            would be lost; it is nested too deeply; or it is longer than a manifest may be.
    """
    try:
        text = json.dumps(value, allow_nan=False)
        if len(text) > MAX_BYTES:
            raise ValueError(f"{len(text)} bytes, at most {MAX_BYTES} are read of a manifest")
        if _levels(parse_json(text), _MOST_LEVELS) > _MOST_LEVELS:
            raise ValueError(f"it is nested more than {_MOST_LEVELS} deep")
    except RecursionError:
        raise ValueError(f"{what}: it is nested more than {_MOST_LEVELS} deep") from None
    except TypeError as error:
        raise TypeError(f"{what}: {error}") from error
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error


def _levels(value: Any, most: int) -> int:
    """How many objects and lists lie within each other; looks no further than `most` and one."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if inner is None:
        return 0
    return 1 + (max((_levels(item, most - 1) for item in inner), default=0) if most else 0)


def seal(content: bytes) -> bytes:
    """The bytes of a manifest, with their checksum, that says the JSON object `content`."""
    rest = _END + content.removeprefix(b"{")
    return _BEGIN + _checksum(rest) + rest


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """The manifest of a step folder, checked in itself and against the name of the folder; no other file is opened.

    One that was written before manifests had a checksum of their own is read with a warning.

    Raises:
        FileNotFoundError: there is none: no checkpoint, or one that was never finished.
        CheckpointDamaged: it is no regular file or too large, was changed after it was written, is no JSON of this
            format, contradicts itself or the name of the folder, or names a file outside.
    """
    manifest, unchecked = read_with_notes(path)
    if unchecked:
        warnings.warn(unchecked, stacklevel=2)
    return manifest


def read_with_notes(path: str | os.PathLike[str]) -> tuple[Manifest, str]:
    """A manifest, and what of it nothing shows to be as it was written; "" where all is. Raises as `read_manifest`."""
    files = files_in(locate(path))
    file = files.path / NAME
    try:
        data = files.read(NAME, MAX_BYTES)
    except StoreError:
        raise
    except FileNotFoundError:
        raise FileNotFoundError(f"{file} is not there: {path} is no finished checkpoint") from None
    except OSError as error:
        raise CheckpointDamaged(f"{file}: {error.strerror or error}") from error
    except ValueError as error:
        raise CheckpointDamaged(str(error)) from None
    try:
        manifest = _manifest(_checked(data))
    except (ValueError, KeyError, TypeError, RecursionError, AttributeError) as error:
        raise CheckpointDamaged(f"{file}: {type(error).__name__}: {error}") from error
    # absolute, as "." has a name too
    named = STEP.fullmatch(absolute(files.path).name)
    if named is not None and int(named[1]) != manifest.step:
        raise CheckpointDamaged(
            f"{file} is of step {manifest.step}, its folder of step {int(named[1])}: one was changed"
        )
    if data.startswith(_BEGIN):
        return manifest, ""
    return manifest, (
        f"{file} has no checksum of its own (format {_UNCHECKED}, written before manifests had one): nothing shows"
        " whether step, extra, settings and plan are those that were saved; `shardwise ckpt reshard` writes it anew"
    )


def _checked(data: bytes) -> Any:
    """The parsed content of a manifest.

    Raises:
        ValueError: it is no JSON of a known format, or not what was written.
    """
    if data.startswith(_BEGIN):
        at = len(_BEGIN)
        if data[at : at + _DIGITS] != _checksum(data[at + _DIGITS :]):
            raise ValueError("it was changed after it was written: its checksum is not that of its bytes")
        return parse_json(data)
    content = parse_json(data)
    # one with a checksum whose beginning was changed is not taken for one from before there were any
    if isinstance(content, dict) and content.get("format") == _UNCHECKED:
        if strange := sorted(set(content) ^ _KEYS):
            raise ValueError(f"format {_UNCHECKED} with other keys than it has: {strange[0]!r}")
        return content
    number = content.get("format") if isinstance(content, dict) else type(content).__name__
    if number == FORMAT:
        raise ValueError(f"format {FORMAT} begins with {_BEGIN.decode()!r}: it was changed after it was written")
    raise ValueError(f"format {repr(number)[:80]}, this version reads formats {_UNCHECKED} and {FORMAT}")


def _checksum(rest: bytes) -> bytes:
    """Of a manifest whose bytes after the checksum are `rest`; its beginning is always the same."""
    return hashlib.sha256(rest).hexdigest().encode()


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")


def _manifest(data: Any) -> Manifest:
    files = tuple(_file(file) for file in _list(data["files"]))
    names = {file.name for file in files}
    if twice := repeated(file.name for file in files):
        raise ValueError(f"file {twice[0]!r} is listed twice")
    tables = {_text(name): _table(_text(name), table) for name, table in _dict(data["tables"]).items()}
    tensors = tuple(_stored(tensor, tables, names) for tensor in _list(data["tensors"]))
    if twice_there := repeated((tensor.file, tensor.key) for tensor in tensors):
        raise ValueError(f"tensor {twice_there[0][1]!r} is listed twice")
    manifest = Manifest(
        _number(data["step"]), _number(data["world_size"]), _dict(data["versions"]), _dict(data["extra"]), tables,
        tensors, files,
        [_group(group) for group in _list(data["fused"])], [_group(group) for group in _list(data["dense"])],
        {_text(name): _dict(values) for name, values in _dict(data["values"]).items()},
        {_text(name): _text(original) for name, original in _dict(data["aliases"]).items()},
    )  # fmt: skip
    require_whole(manifest)
    return manifest


def _table(name: str, data: Any) -> TableFacts:
    if data["row_state"] not in ROW_STATES:
        raise ValueError(f"table {name!r}: row_state {data['row_state']!r} is none of {ROW_STATES}")
    shards = tuple(
        Shard(
            _text(data["table"]),
            _number(shard["rank"]),
            _span(shard["rows"]),
            _span(shard["columns"]),
            bool(shard["replica"]),
        )
        for shard in _list(data["shards"])
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
    stored = Stored(kind, name, _text(data["state"]), shape, _dtype(data["dtype"]), rows, columns, file)
    if data["key"] != stored.key:
        raise ValueError(f"tensor {stored.key!r} has key {data['key']!r}")
    return stored


def require_whole(manifest: Manifest) -> None:
    """The pieces of each table cover it once, in every state; all others are in one piece."""
    place = {file.name: number for number, file in enumerate(manifest.files)}
    for name in manifest.tables:
        if (TABLE, name, WEIGHT) not in manifest.by_address:
            raise ValueError(f"table {name!r} has no rows")
    for (kind, name, state), pieces in manifest.by_address.items():
        if kind != TABLE:
            if len(pieces) > 1:
                raise ValueError(f"{name!r}: {state} is there {len(pieces)} times")
            continue
        facts = manifest.tables[name]
        if len({(len(piece.shape), piece.dtype) for piece in pieces}) > 1 or (
            state == WEIGHT and len(pieces[0].shape) != 2
        ):
            raise ValueError(f"table {name!r}: the pieces of {state} are not of one kind")
        boxes = [Shard(name, place[piece.file], piece.rows or (0, 0), piece.columns or (0, 0)) for piece in pieces]
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
    dtype = getattr(torch, _text(name), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype {name!r} is unknown")
    return dtype


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

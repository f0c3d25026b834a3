"""A folder that serves a model: which files it has, what `model.json` says of them, and how it appears all at once.

    model.json           facts about the model (`ModelFacts`), with the size and checksum of each other file, and
                         under "sha256" the checksum of itself
    tables.safetensors   of each table `<table>.payload` uint8 [rows, row_bytes], `<table>.scales` [rows, parts] unless
                         its format has none, `<table>.remapping` int32 [ids] if it is pruned
    program.pt2          the exported program, without the tables
    program.aoti.pt2     its code, compiled, where that was asked for

Nothing in here needs torch or numpy.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from shardwise.untrusted import open_regular, parse_json, read_regular, repeated, require_regular

FACTS, TABLES, PROGRAM, COMPILED = "model.json", "tables.safetensors", "program.pt2", "program.aoti.pt2"
# the key of model.json whose value is the checksum of all others
CHECKSUM = "sha256"

# of the format; a reader refuses folders of a later one
VERSION = 1

_BLOCK_BYTES = 16 * 2**20


class ModelDamaged(ValueError):
    """A file of a model's folder is missing, cut off, changed or not what it should be; the message names it."""


@dataclass(frozen=True)
class FeatureFacts:
    """A feature of the input, and the tables that its ids go to.

    An id is good in [0, ids). `ids` is None where any may be: no quantized table takes them, or they are mapped first.
    """

    name: str
    tables: tuple[str, ...]
    ids: int | None


@dataclass(frozen=True)
class TableFacts:
    """A table of `rows` x `dim`, as `format` of kernels/row_formats.py stores it; `features` look it up.

    `pooling` is "sum", "mean", or None where rows stay apart. An id is good in [0, ids); that of a pruned table is
    remapped to a row, or to -1 where its row was left out. Before a table that is `mapped` stands a managed collision
    module: ids of any range become its slots in the program, and slots are what it takes itself. `bytes` counts
    payload, scales and remapping.
    """

    name: str
    rows: int
    ids: int
    dim: int
    format: str
    scale_dtype: str | None
    pruned: bool
    mapped: bool
    pooling: str | None
    features: tuple[str, ...]
    bytes: int

    @property
    def payload(self) -> str:
        """The payload's name in the file."""
        return f"{self.name}.payload"

    @property
    def scales(self) -> str | None:
        """The scales' name in the file; None where the format has none."""
        return None if self.scale_dtype is None else f"{self.name}.scales"

    @property
    def remapping(self) -> str | None:
        """The remapping's name in the file; None where ids are rows."""
        return f"{self.name}.remapping" if self.pruned else None

    @property
    def fp32_bytes(self) -> int:
        """Bytes of all its ids as rows of fp32."""
        return 4 * self.ids * self.dim


@dataclass(frozen=True)
class Place:
    """Where a tensor of the file of tables begins in a plane, in elements."""

    tensor: str
    begin: int


@dataclass(frozen=True)
class Plane:
    """A flat tensor of the program that holds tensors of several tables; what they leave out is zero."""

    name: str
    dtype: str
    elements: int
    places: tuple[Place, ...]


@dataclass(frozen=True)
class OutputFacts:
    """An output; sizes of `shape` that vary are "batch", or "ids" where they follow from the ids."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True)
class FileFacts:
    """A file: its size and checksum."""

    name: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class ModelFacts:
    """All that `model.json` says. `dense` names the columns of the dense input, of which there may be none."""

    format_version: int
    versions: dict[str, str]
    dense: tuple[str, ...]
    features: tuple[FeatureFacts, ...]
    weighted: bool
    outputs: tuple[OutputFacts, ...]
    tables: tuple[TableFacts, ...]
    planes: tuple[Plane, ...]
    files: tuple[FileFacts, ...]


def read_facts(folder: str | os.PathLike[str]) -> ModelFacts:
    """The facts in the `model.json` of a folder.

    Raises:
        FileNotFoundError: the folder, or that file in it, is not there.
        ModelDamaged: it is not what an export writes, or what a later version wrote, or was changed; names the file
            and the key.
    """
    path = Path(folder) / FACTS
    try:
        data = read_regular(path)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(f"{folder} is no exported model: there is no {path}") from None
    except OSError as error:
        raise ModelDamaged(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ModelDamaged(str(error)) from None
    try:
        content = parse_json(data)
    except ValueError as error:
        raise ModelDamaged(f"{path} is no JSON: {error}") from None
    version = content.get("format_version") if isinstance(content, dict) else None
    if isinstance(version, int) and version > VERSION:
        raise ModelDamaged(
            f"{path} has format version {version}, this shardwise reads up to {VERSION}: use the shardwise that it was"
            f" written by, or a later one ({content.get('versions')})"
        )
    try:
        facts: ModelFacts = _parsed(ModelFacts, content, "the file")
    except ValueError as error:
        raise ModelDamaged(f"{path}: {error}") from None
    if content.get(CHECKSUM) != facts_checksum(content):
        raise ModelDamaged(f"{path} was changed after it was written: its checksum is not that of what it says")
    return facts


def facts_checksum(content: Mapping[str, Any]) -> str:
    """The checksum of a `model.json`'s content, however it is laid out."""
    covered = {key: value for key, value in content.items() if key != CHECKSUM}
    return hashlib.sha256(json.dumps(covered, sort_keys=True).encode()).hexdigest()


def check_file(folder: str | os.PathLike[str], facts: ModelFacts, name: str, *, verify: bool) -> Path:
    """The path of a file of the folder, which has the size that is written down, and with `verify` the checksum.

    Raises:
        ModelDamaged: it has not; names the file.
    """
    path = Path(folder) / name
    wanted = next((file for file in facts.files if file.name == name), None)
    if wanted is None:
        raise ModelDamaged(f"{Path(folder) / FACTS} lists no file {name!r}")
    try:
        status = require_regular(path)
    except OSError as error:
        raise ModelDamaged(f"{path}: {error.strerror or error}") from error
    if status.st_size != wanted.bytes:
        raise ModelDamaged(f"{path} has {status.st_size} bytes, it was written with {wanted.bytes}")
    if verify and file_facts(path).sha256 != wanted.sha256:
        raise ModelDamaged(f"{path} has other bytes than were written: its checksum is not that of {FACTS}")
    return path


def file_facts(path: Path) -> FileFacts:
    """Size and checksum of a file as it is."""
    checksum, size = hashlib.sha256(), 0
    with open_regular(path) as file:
        while block := file.read(_BLOCK_BYTES):
            checksum.update(block)
            size += len(block)
    return FileFacts(path.name, size, checksum.hexdigest())


def write_facts(folder: Path, facts: ModelFacts) -> None:
    """Write `model.json`."""
    content = asdict(facts)
    content[CHECKSUM] = facts_checksum(content)
    (folder / FACTS).write_text(json.dumps(content, indent=1) + "\n")


@contextmanager
def new_folder(target: str | os.PathLike[str], *, force: bool) -> Iterator[Path]:
    """A folder to write into, which becomes `target` when the block ends well and vanishes when it fails.

    Files and names are on the disk before that. A model that is there stays until then.

    Raises:
        FileExistsError: `target` is there, and is no exported model or may not be replaced (`force`).
    """
    target = Path(target).absolute()
    require_free(target, force=force)
    target.parent.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(4)
    made, old = (target.with_name(f".{target.name}.{what}-{token}") for what in ("new", "old"))
    made.mkdir()
    try:
        yield made
        for path in (*made.iterdir(), made):
            _sync(path)
        there = target.exists()
        if there:
            os.rename(target, old)
        try:
            os.rename(made, target)
        except OSError:
            if there:
                os.rename(old, target)
            raise
        _sync(target.parent)
    finally:
        for leftover in (made, old):
            shutil.rmtree(leftover, ignore_errors=True)


def require_free(target: Path, *, force: bool) -> None:
    """FileExistsError where `new_folder` would raise it; costs nothing, so that it can be asked before any work."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return
    if not (target / FACTS).is_file():
        raise FileExistsError(f"{target} is there and is no exported model: choose another folder")
    if not force:
        raise FileExistsError(f"{target} holds a model: pass force=True (--force) to replace it")


def _sync(path: Path) -> None:
    """See a file, or the names in a folder, onto the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def _parsed(kind: Any, value: Any, where: str) -> Any:
    """`value` of a JSON file as a `kind`: a dataclass, tuple[X, ...], dict[str, str], X | Y, str, int or bool.

    Keys that a dataclass does not have are left out: later writers of this version may add some.

    Raises:
        ValueError: it is something else; names the place.
    """
    if is_dataclass(kind):
        if not isinstance(value, dict):
            raise ValueError(f"{where} must be an object, got {_kind(value)}")
        missing = [field.name for field in fields(kind) if field.name not in value]
        if missing:
            raise ValueError(f"{where} lacks {', '.join(map(repr, missing))}")
        types = get_type_hints(kind)
        return kind(**{f.name: _parsed(types[f.name], value[f.name], f"{where}: {f.name!r}") for f in fields(kind)})  # type: ignore[operator]
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} must be a list, got {_kind(value)}")
        return tuple(_parsed(get_args(kind)[0], element, f"{where}[{n}]") for n, element in enumerate(value))
    if get_origin(kind) is dict:
        if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
            raise ValueError(f"{where} must be an object of strings")
        return value
    allowed: Sequence[type] = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    # True is an int for Python, not for JSON
    if type(value) not in allowed:
        raise ValueError(f"{where} must be {' or '.join(cls.__name__ for cls in allowed)}, got {_kind(value)}")
    return value


def _kind(value: Any) -> str:
    return type(value).__name__


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of a model, by name.

    Args:
        features: the keys of its batches of ids, in their order; at least one.
        dense: the columns of its dense input, in their order; none if it has no dense input.
        weighted: whether each id comes with a weight.
        outputs: what to call its outputs. By default they are called by the keys of a dict or KeyedTensor, by the
            fields of a named tuple, by their place in a tuple, and a single tensor "output".

    Raises:
        ValueError: there are no features, or a name is there twice.
    """

    features: Sequence[str]
    dense: Sequence[str] = ()
    weighted: bool = False
    outputs: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for what in ("features", "dense", "outputs"):
            names = getattr(self, what)
            if names is None:
                continue
            if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
                raise ValueError(f"Signature: {what} must be a list of names, got {names!r}")
            if twice := sorted(repeated(names)):
                raise ValueError(f"Signature: {what} repeat {', '.join(map(repr, twice))}")
            object.__setattr__(self, what, tuple(names))
        if not self.features:
            raise ValueError("Signature: a model of this kind takes at least one feature")

"""Tables and constraints as files, JSON or TOML by their suffix.

Tables are a list, or an object that has one as "tables":

    {"tables": [{"name": "item", "num_embeddings": 1000000, "embedding_dim": 64, "pooling_factor": 20,
                 "features": ["seen", "bought"], "feature_pooling": [30, 10], "weighted": false, "data_type": "FP32",
                 "optimizer": "Adam", "module": "ebc", "pooled": true, "skew": {"alpha": 1.05}}]}

Name and sizes must be there. Constraints are an object for each table, with the fields of `ParameterConstraints`; those
of "*" hold for all tables, where a table's own do not say otherwise:

    ["*"]
    sharding_types = ["table_wise", "row_wise"]
    [item]
    sharding_types = ["column_wise"]
    not_on = [0]
    skew = { alpha = 1.2 }
    tier = { slots = 0.1, below = "file", folder = "/nvme" }
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from shardwise._names import did_you_mean
from shardwise.embeddings.config import DataType
from shardwise.untrusted import parse_json, read_regular

from ..constraints import ANY, ParameterConstraints, nearest
from ..cost.shardwise import optimizer_named
from ..layout import Tier
from ..tables import (
    ELEMENT_BYTES,
    Feature,
    Skew,
    Table,
)
from ..tiers import plain_tier, tier_from, without_functions

T = TypeVar("T")
# what sets of tables say besides, for people
_REMARKS = ("length_max", "length_p50")
# sizes beyond these are slips of the hand, and more than prices and the search can count
MOST_ROWS, MOST_COLUMNS, MOST_IDS = 2**44, 2**17, 1e9
# of a constraint: Python objects that a file cannot have
_OBJECTS = ("cache_params", "key_value_params", "bounds_check_mode")


def read_tables(path: str | os.PathLike[str]) -> list[Table]:
    """The tables in a file.

    Raises:
        ValueError: it has none, or says of one what cannot be; names file, table and field.
        OSError: there is no such file.
    """
    data = read_data(path)
    every = data.get("tables") if isinstance(data, dict) else data
    if not isinstance(every, list) or not every:
        raise ValueError(f'{path}: no tables: expected a list of them, or an object that has one as "tables"')
    tables = []
    for number, entry in enumerate(every):
        where = f"{path}: table {_called(entry, number)}"
        table = table_from(entry, where)
        if table.optimizer is not None:
            try:
                table = replace(table, optimizer=optimizer_named(table.optimizer))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
        tables.append(table)
    seen: set[str] = set()
    for table in tables:
        if table.path in seen:
            raise ValueError(f"{path}: table {table.path!r} is there twice")
        seen.add(table.path)
    return tables


def table_from(entry: Any, where: str) -> Table:
    """The table that a file's object describes; `where` begins the text of errors. Raises as `read_tables`."""
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: must be an object, got {entry!r}")
    known = {
        "name", "num_embeddings", "embedding_dim", "pooling_factor", "features", "feature_pooling", "num_poolings",
        "batch_sizes", "pooling_kind", "pooled", "weighted", "data_type", "optimizer", "module", "skew",
    }  # fmt: skip
    unknown = [key for key in entry if key not in known and key not in _REMARKS]
    if unknown:
        raise ValueError(f"{where}: unknown field {unknown[0]!r}{nearest(unknown[0], sorted(known))}")
    name = _field(entry, "name", where, _text)
    pooled = _field(entry, "pooled", where, _truth, entry.get("pooling_kind") != "sequence")
    return Table(
        name,
        _field(entry, "num_embeddings", where, _up_to(MOST_ROWS)),
        _field(entry, "embedding_dim", where, _up_to(MOST_COLUMNS)),
        _field(entry, "data_type", where, data_type_from, DataType.FP32),
        _features(entry, name, where),
        pooled,
        _field(entry, "weighted", where, _truth, False),
        _field(entry, "optimizer", where, _text, None),
        _field(entry, "module", where, _text, ""),
        _field(entry, "skew", where, _skew, Skew()),
    )


def _features(entry: Mapping[str, Any], name: str, where: str) -> tuple[Feature, ...]:
    names = _field(entry, "features", where, _list_of(_text), [name])
    mean = _field(entry, "pooling_factor", where, _amount, 1.0)
    lists: dict[str, list[Any]] = {
        "feature_pooling": _field(entry, "feature_pooling", where, _list_of(_amount), [mean] * len(names)),
        "num_poolings": _field(entry, "num_poolings", where, _list_of(_amount), [1.0] * len(names)),
        "batch_sizes": _field(entry, "batch_sizes", where, _list_of(_maybe(_positive)), [None] * len(names)),
    }
    for what, values in lists.items():
        if len(values) != len(names):
            raise ValueError(
                f"{where}: {what} must have one number for each of {len(names)} features, got {len(values)}"
            )
    return tuple(Feature(*arguments) for arguments in zip(names, *lists.values(), strict=True))


def read_constraints(path: str | os.PathLike[str]) -> dict[str, ParameterConstraints]:
    """The constraints in a file by table name, with "*" for tables that it does not name.

    Raises:
        ValueError: a field is unknown or its value cannot be; names file, table and field.
        OSError: there is no such file.
    """
    return constraints_from(read_data(path), str(path))


def constraints_from(data: Any, where: str) -> dict[str, ParameterConstraints]:
    """The constraints that a file's object describes. Raises as `read_constraints`."""
    if not isinstance(data, dict):
        raise ValueError(f"{where}: constraints must be an object with one for each table, got {data!r}")
    default = data.get(ANY, {})
    constraints = {}
    for name, entry in data.items():
        if not isinstance(entry, dict):
            raise ValueError(f"{where}: table {name!r}: its constraint must be an object, got {entry!r}")
        constraints[name] = _constraint({**default, **entry}, f"{where}: table {name!r}")
    return constraints


def _constraint(entry: Mapping[str, Any], where: str) -> ParameterConstraints:
    readers: dict[str, Callable[[Any], Any]] = {
        "sharding_types": _list_of(_text), "compute_kernels": _list_of(_text), "min_partition": _positive,
        "pooling_factors": _list_of(_amount), "num_poolings": _list_of(_amount), "batch_sizes": _list_of(_positive),
        "is_weighted": _truth, "enforce_hbm": _truth, "stochastic_rounding": _truth, "feature_names": _list_of(_text),
        "output_dtype": data_type_from, "device_group": _text, "use_virtual_table": _truth,
        "ranks": _list_of(_rank), "not_on": _list_of(_rank), "same_rank": _text, "skew": _skew, "tier": tier_from,
    }  # fmt: skip
    for field in entry:
        if field in _OBJECTS:
            instead = "" if field == "bounds_check_mode" else "; tier says in a file where rows lie"
            raise ValueError(f"{where}: {field} cannot be said in a file, only in Python{instead}")
        if field not in readers:
            raise ValueError(f"{where}: unknown field {field!r}{nearest(field, readers)}")
    return ParameterConstraints(**{field: _field(entry, field, where, readers[field]) for field in entry})


def table_to(table: Table) -> dict[str, Any]:
    """A table as a file has it, without what is the default."""
    features = table.features
    entry: dict[str, Any] = {
        "name": table.name, "num_embeddings": table.num_embeddings, "embedding_dim": table.embedding_dim,
        "data_type": table.data_type.value, "features": [feature.name for feature in features],
        "feature_pooling": [feature.pooling_factor for feature in features],
    }  # fmt: skip
    if any(feature.num_poolings != 1 for feature in features):
        entry["num_poolings"] = [feature.num_poolings for feature in features]
    if any(feature.batch_size is not None for feature in features):
        entry["batch_sizes"] = [feature.batch_size for feature in features]
    for what, default in (("pooled", True), ("weighted", False), ("optimizer", None), ("module", "")):
        if getattr(table, what) != default:
            entry[what] = getattr(table, what)
    if table.skew != Skew():
        entry["skew"] = _plain_skew(table.skew)
    return entry


def constraint_to(constraint: ParameterConstraints) -> dict[str, Any]:
    """A constraint as a file has it: what differs from the default and a file can have."""
    default = ParameterConstraints()
    entry: dict[str, Any] = {}
    for field in fields(constraint):
        value = getattr(constraint, field.name)
        if value == getattr(default, field.name) or field.name in _OBJECTS:
            continue
        if isinstance(value, Skew):
            value = _plain_skew(value)
        if isinstance(value, Tier):
            # a file has no functions
            value = plain_tier(without_functions(value))
        entry[field.name] = value.value if isinstance(value, DataType) else value
    return entry


def read_data(path: str | os.PathLike[str]) -> Any:
    """The content of a JSON or TOML file.

    Raises:
        ValueError: it is not what its suffix says, or TOML and nothing here can read that.
        OSError: there is no such file, or it is no regular one.
    """
    is_toml = Path(path).suffix == ".toml"
    try:
        data = read_regular(path)
        return _toml(data.decode("utf-8")) if is_toml else parse_json(data, allow_nan=True)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not {'TOML' if is_toml else 'JSON'}: {error}") from error


def _toml(text: str) -> Any:
    return import_module("tomllib" if sys.version_info >= (3, 11) else "tomli").loads(text)


def data_type_from(value: Any) -> DataType:
    """The type of a table's elements by its name, in any case.

    Raises:
        ValueError: there is none of this name.
    """
    known = {kind.value: kind for kind in ELEMENT_BYTES}
    if not isinstance(value, str) or value.upper() not in known:
        near = did_you_mean(value, known) if isinstance(value, str) else ""
        raise ValueError(f"must be one of {', '.join(known)}, got {value!r}{near}")
    return known[value.upper()]


_NEEDED: Any = object()


def _field(entry: Mapping[str, Any], name: str, where: str, read: Callable[[Any], T], default: Any = _NEEDED) -> T:
    """One field of an object, read; None counts as missing."""
    value = entry.get(name)
    if value is None:
        if default is _NEEDED:
            raise ValueError(f"{where}: {name} is missing")
        given: T = default
        return given
    try:
        return read(value)
    except ValueError as error:
        raise ValueError(f"{where}: {name} {error}") from error


def _called(entry: Any, number: int) -> str:
    name = entry.get("name") if isinstance(entry, dict) else None
    return repr(name) if isinstance(name, str) else f"number {number + 1}"


def _reader(is_good: Callable[[Any], bool], what: str) -> Callable[[Any], Any]:
    def read(value: Any) -> Any:
        if not is_good(value):
            raise ValueError(f"must be {what}, got {value!r}")
        return value

    return read


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


_text = _reader(lambda value: isinstance(value, str) and bool(value), "a text")
_truth = _reader(lambda value: isinstance(value, bool), "true or false")
_positive = _reader(lambda value: _is_whole(value) and value >= 1, "a positive whole number")
_rank = _reader(lambda value: _is_whole(value) and value >= 0, "ranks, numbers from 0")
_number = _reader(
    lambda value: (_is_whole(value) or isinstance(value, float)) and 0 <= value < float("inf"), "a number of 0 or more"
)


def _up_to(most: int) -> Callable[[Any], Any]:
    def read(value: Any) -> int:
        number: int = _positive(value)
        if number > most:
            raise ValueError(f"must be {most:,} at most, got {number:,}")
        return number

    return read


def _amount(value: Any) -> float:
    number = _number(value)
    if number > MOST_IDS:
        raise ValueError(f"must be {MOST_IDS:g} at most, got {number}")
    return float(number)


def _list_of(read: Callable[[Any], T]) -> Callable[[Any], list[T]]:
    def read_all(value: Any) -> list[T]:
        if not isinstance(value, list):
            raise ValueError(f"must be a list, got {value!r}")
        return [read(element) for element in value]

    return read_all


def _maybe(read: Callable[[Any], T]) -> Callable[[Any], T | None]:
    return lambda value: None if value is None else read(value)


def _skew(value: Any) -> Skew:
    known = {"alpha": _amount, "shift": _amount, "sorted_ids": _truth}
    if not isinstance(value, dict) or not set(value) <= set(known):
        unknown = sorted(set(value) - set(known)) if isinstance(value, dict) else []
        near = did_you_mean(unknown[0], known) if unknown else ""
        raise ValueError(f"must be an object of {', '.join(known)}, got {value!r}{near}")
    read: dict[str, Any] = {what: known[what](raw) for what, raw in value.items()}
    return Skew(**read)


def _plain_skew(skew: Skew) -> dict[str, Any]:
    return {"alpha": skew.alpha, "shift": skew.shift, "sorted_ids": skew.sorted_ids}

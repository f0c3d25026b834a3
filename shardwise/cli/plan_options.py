"""What people write after `shardwise plan`, as click takes types: sizes of memory, shares of it, dtypes of tables."""

from __future__ import annotations

import re

import click

from ..embeddings.config import DataType
from ..planner.plan.files import data_type_from

_UNITS = {
    "": 1, "b": 1, "kib": 1024, "mib": 1024**2, "gib": 1024**3, "tib": 1024**4,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


class Wrong(click.ClickException):
    """A file or an argument that is no good: one line, and status 2."""

    exit_code = 2


def size(text: str) -> int:
    """Bytes: of "80GiB" (1024^3 each), "80GB" (10^9 each), "85899345920"."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or found[2].lower() not in _UNITS:
        raise click.BadParameter(f"{text!r} is no size: write 80GiB (of 1024^3 bytes), 80GB (of 10^9), or bytes")
    return round(float(found[1]) * _UNITS[found[2].lower()])


def share(text: str) -> float | int:
    """A part of memory: of "15%" the float 0.15, of a size its bytes as an int."""
    if not text.strip().endswith("%"):
        return size(text)
    try:
        part = float(text.strip()[:-1]) / 100
    except ValueError:
        part = -1.0
    if not 0 <= part < 1:
        raise click.BadParameter(f"{text!r} is no part of memory: write 15%, or a size like 10GiB")
    return part


def dtype(text: str) -> tuple[DataType, str | None]:
    """An element type for all tables ("fp16"), or for one ("fp16:item_id")."""
    kind, _, table = text.partition(":")
    try:
        return data_type_from(kind), table or None
    except ValueError as error:
        raise click.BadParameter(f"a dtype {error}") from error

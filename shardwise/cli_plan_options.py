"""What people write after `shardwise plan`: sizes of memory, shares of it, dtypes of tables."""

from __future__ import annotations

import re
from typing import Any

import click

from .embeddings.config import DataType
from .planner.files import data_type_from

UNITS = {
    "": 1, "b": 1, "kib": 1024, "mib": 1024**2, "gib": 1024**3, "tib": 1024**4,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.IGNORECASE)


class Size(click.ParamType):
    """Bytes: "80GiB" (1024^3 bytes each), "80GB" (10^9 bytes each), "85899345920"."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        found = _SIZE.fullmatch(value.strip())
        if found is None or found[2].lower() not in UNITS:
            self.fail(f"{value!r} is no size: write 80GiB (of 1024^3 bytes), 80GB (of 10^9) or bytes", param, ctx)
        return round(float(found[1]) * UNITS[found[2].lower()])


class Share(click.ParamType):
    """A part of memory as "15%", or a size."""

    name = "share or size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float | int:
        """A float below 1 is a share, an int bytes."""
        if isinstance(value, int | float):
            return value
        if not value.strip().endswith("%"):
            return Size().convert(value, param, ctx)
        try:
            share = float(value.strip()[:-1]) / 100
        except ValueError:
            share = -1.0
        if not 0 <= share < 1:
            self.fail(f"{value!r} is no part of memory: write 15%, or a size like 10GiB", param, ctx)
        return share


class TypeOfTables(click.ParamType):
    """An element type for all tables ("fp16"), or for one ("fp16:item_id")."""

    name = "dtype[:table]"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[DataType, str | None]:
        if isinstance(value, tuple):
            return value
        kind, _, table = value.partition(":")
        try:
            return data_type_from(kind), table or None
        except ValueError as error:
            self.fail(f"{value!r}: a dtype {error}", param, ctx)

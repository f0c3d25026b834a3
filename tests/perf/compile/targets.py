"""Cases and targets as parameters: one target of each vendor in every run, the others where all is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

EVERY_RUN = ("sm_90", "gfx942")


def targeted(rows: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Rows of (name, target, ...) as parameters; those for other targets than EVERY_RUN are full."""
    return [
        pytest.param(*row, id=f"{row[0]} {row[1]}", marks=() if row[1] in EVERY_RUN else pytest.mark.full)
        for row in rows
    ]

"""The ways to cut a table, before anybody says what they cost: which blocks there are and how each is divided.

A way is a strategy of `sharding.layout` without ranks: K blocks of columns, each over `span` consecutive ranks that
hold `rows` rows of it each.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Way:
    """K blocks of `widths` columns; place s of a block's span holds `rows[s]` rows.

    `replica`: every rank holds all rows. `one_host`: blocks lie on ranks of one host.
    """

    sharding_type: str
    compute_kernel: str
    widths: tuple[int, ...]
    rows: tuple[int, ...]
    one_host: bool = False
    replica: bool = False

    @property
    def span(self) -> int:
        """Ranks that a block lies on."""
        return len(self.rows)

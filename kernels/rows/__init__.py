"""Where rows lie: they move between slots and records, and the lowest slots are found."""

from .lowest import lowest
from .move_rows import move_rows, record_layout

__all__ = ["lowest", "move_rows", "record_layout"]

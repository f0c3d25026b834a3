"""Where rows lie: they move between slots and records, and the lowest slots are found."""

from .lowest import lowest
from .reuse import ReuseStack

__all__ = ["ReuseStack", "lowest"]

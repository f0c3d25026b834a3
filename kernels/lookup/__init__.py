"""Lookups of rows, pooled and in sequence, their gradient by per-id weights, and the checks before them."""

from .bounds import ids_pass

__all__ = ["ids_pass"]

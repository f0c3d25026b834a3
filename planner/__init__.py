"""Where tables should go. Pure Python: no tensors, no processes."""

from .balanced import balanced_table_wise

__all__ = ["balanced_table_wise"]

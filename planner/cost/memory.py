"""Bytes that a block of a table takes on a rank: its rows, its optimizer's states, and what a step needs besides.

Rows and states are exact but for alignment (64 bytes for each group of tables that share a buffer). What a step needs
is an estimate of the peak, that of the backward: ids of all ranks as they came and in order with their offsets, the
gradient of their results, the sort.
"""

from __future__ import annotations

import numpy as np

from ..search.problem import Ints
from ..tables import Table
from .skew import shares
from .ways import Way

# optimizer class -> states of an element, and of a row: fp32 numbers (`kernels/update/rules.py`)
STATES: dict[str, tuple[int, int]] = {
    "SGD": (0, 0), "RowWiseAdagrad": (0, 1), "Adagrad": (1, 0), "Adam": (2, 0), "AdamW": (2, 0), "SparseAdam": (2, 0),
    "LAMB": (2, 0), "LarsSGD": (1, 0), "PartialRowWiseAdam": (1, 1), "PartialRowWiseLAMB": (1, 1), "FTRL": (2, 0),
}  # fmt: skip
# one whose rule is not known
_UNKNOWN = (2, 0)


def state_bytes(optimizer: str | None, width: int) -> int:
    """Bytes of the optimizer's state of one row of `width` columns; a table without one trains by SGD."""
    of_element, of_row = STATES.get(optimizer or "SGD", _UNKNOWN)
    return 4 * (of_element * width + of_row)


def block_bytes(table: Table, way: Way, width: int, world_size: int, batch_size: int) -> Ints:
    """Bytes at each place of a block's span [S]."""
    rows = np.array(way.rows, np.int64)
    # 4-bit rows fill whole bytes
    held = (rows * int(8 * width * table.element_bytes) + 7) // 8
    if table.served:
        held += rows * table.scale_bytes + served_bytes(table, way, width, batch_size)
        # the one copy of a replicated table is where the outputs are
        return held * (np.arange(way.span) == 0) if way.replica else held
    held += rows * state_bytes(table.optimizer, width)
    if way.replica and table.optimizer is None:
        # the dense gradient, and the bucket that it is reduced in
        return held + 2 * 4 * table.num_embeddings * width
    return held + step_bytes(table, way, width, world_size, batch_size)


def served_bytes(table: Table, way: Way, width: int, batch_size: int) -> Ints:
    """Bytes at each place that a lookup needs besides rows: ids, and what comes out or, of row ranges, rows."""
    ids = table.ids(batch_size)
    share = 1.0 if way.replica else shares(table.num_embeddings, ids, table.skew, way.rows)[0]
    cut = way.span > 1 and not way.replica
    row = width * table.element_bytes + table.scale_bytes if cut else 4.0 * width
    results = ids * share if cut or not table.pooled else table.bags(batch_size)
    return np.broadcast_to(np.ceil(ids * share * 8 + results * row), (way.span,)).astype(np.int64)


def step_bytes(table: Table, way: Way, width: int, world_size: int, batch_size: int) -> Ints:
    """Bytes at each place that a step needs besides rows and states."""
    ids, bags = world_size * table.ids(batch_size), world_size * table.bags(batch_size)
    share = 1.0 if way.replica else shares(table.num_embeddings, ids, table.skew, way.rows)[0]
    # as they came and in order as int32; sort keys, places and bags of each
    of_ids = ids * share * (2 * 4 + 16 + 8 * table.weighted)
    results = bags if table.pooled else ids * share
    # lengths and offsets; the gradient as it came, and as the update reads it. Rows are also moved into other orders
    copies = 2 if table.pooled else 5
    total = np.ceil(of_ids + bags * 12 + copies * 4 * results * width)
    return np.broadcast_to(total, (way.span,)).astype(np.int64)

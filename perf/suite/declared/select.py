"""The bytes that selecting bags, adding them back and regrouping columns declare, as functions of a call.

Letters as in kernels/jagged/index_select.py, index_add.py and regrouping.py; `sector` as in lookup.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from shardwise.kernels.jagged.regroup_plan import Runs

from .lookup import Traffic, _in_sectors


def jagged_index_select_bytes(
    values: Tensor, offsets: Tensor, indices: Tensor, batch_size: int, weights: Tensor | None = None, *, sector: int = 1
) -> Traffic:
    """Of `jagged_index_select` and, with keys, `keyed_jagged_index_select`; the search is left out."""
    bags = (offsets.shape[0] - 1) // max(batch_size, 1) * indices.shape[0]
    lengths = offsets.diff().view(-1, max(batch_size, 1))[:, indices.long()]
    rows = int(lengths.sum())
    row = _row_bytes(values, sector)
    index = {"I": indices.nbytes * (bags // max(indices.shape[0], 1)), "O": 2 * bags * offsets.itemsize}
    reads = {"V": rows * row, **index, "SO": 8 * (bags + 1), "begins": 8 * bags}
    writes = {"Y": rows * row, "lengths": bags * offsets.itemsize, "begins": 8 * bags}
    if weights is not None:
        reads["P"] = writes["Q"] = rows * weights.itemsize
    if values.dim() == 2:
        reads["at"] = writes["at"] = 8 * rows
    return Traffic(reads, writes)


def jagged_index_add_bytes(values: Tensor, indices: Tensor, output_offsets: Tensor, *, sector: int = 1) -> Traffic:
    """Of `jagged_index_add` after its sort: rows of G and X once, the bag of each row there and back."""
    rows, row = int(output_offsets[-1]), _row_bytes(values, sector)
    reads = {"G": values.shape[0] * row, "owner": 8 * rows, "O": 8 * 2 * rows, "copies": 24 * values.shape[0]}
    return Traffic({**reads, "C": 16 * rows}, {"X": rows * row, "owner": 8 * rows})


def regroup_bytes(
    tensors: Sequence[Tensor], runs: Runs, align: int, row_blocks: int, *, sector: int = 1
) -> Traffic:  # fmt: skip
    """Of `regroup`: columns of the outputs once, of the inputs once for each use, the table for each block of rows."""
    batch, itemsize = tensors[0].shape[0], tensors[0].itemsize
    vector = align * itemsize
    reads, writes = Counter[str](), Counter[str]()
    for output, _, columns, *pairs in runs.rows():
        run = batch * _in_sectors(columns * itemsize, sector, vector)
        writes[f"Y{output}"] += run
        reads.update({f"X{tensor}": run * pairs[::2].count(tensor) for tensor in set(pairs[::2]) if tensor >= 0})
    lines = 3 + 3 * runs.repeats
    reads["table"] = row_blocks * lines * _in_sectors(4 * (sum(runs.widths) // align), sector, 4)
    return Traffic(dict(reads), dict(writes))


def _row_bytes(values: Tensor, sector: int) -> int:
    row = values.itemsize * (values.shape[1] if values.dim() == 2 else 1)
    return _in_sectors(row, sector, row) if values.dim() == 2 else row

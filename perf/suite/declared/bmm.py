"""The bytes that the ops on bags of rows declare, as functions of a call.

Letters as in the kernels' modules. Sectors are not counted: rows are whole sectors or neighbours of one another.
"""

from __future__ import annotations

from torch import Tensor

from .lookup import Traffic


def jagged_dense_bmm_bytes(values: Tensor, offsets: Tensor, dense: Tensor, *, tile: int = 1) -> Traffic:
    """Of `jagged_dense_bmm`: rows once, and the matrix of a bag once for each tile of so many rows that it meets."""
    ends = offsets.tolist()
    met = sum(-(-end // tile) - begin // tile for begin, end in zip(ends, ends[1:], strict=False) if end > begin)
    matrix = dense.shape[1] * dense.shape[2] * dense.itemsize
    inside = ends[-1] * values.shape[1] * values.itemsize
    return Traffic({"X": inside, "W": met * matrix}, {"Y": values.shape[0] * dense.shape[2] * values.itemsize})


def jagged_jagged_bmm_bytes(x: Tensor, y: Tensor, offsets: Tensor) -> Traffic:
    """Of `jagged_jagged_bmm` where M and K are at most a tile: rows of both once, the matrices once."""
    inside = int(offsets[-1])
    reads = {"X": inside * x.shape[1] * x.itemsize, "Y": inside * y.shape[1] * y.itemsize}
    return Traffic(reads, {"W": (offsets.shape[0] - 1) * x.shape[1] * y.shape[1] * x.itemsize})


def jagged_softmax_bytes(values: Tensor, offsets: Tensor) -> Traffic:
    """Of `jagged_softmax`: rows of bags twice, all rows of the result once."""
    inside = int(offsets[-1]) * values.shape[1] * values.itemsize
    return Traffic({"X": 2 * inside}, {"Y": values.nbytes})


def jagged_vector_product_bytes(vectors: Tensor, values: Tensor, offsets: Tensor) -> Traffic:
    """Of `jagged_vector_product`: the rows that a weight has and these weights once, the result once."""
    lengths, (lanes, length) = offsets.diff(), vectors.shape
    taken, bags = int(lengths.clamp(max=length).sum()), lengths.shape[0]
    row = values.shape[1] * values.itemsize
    reads = {"X": taken * row, "V": taken * (lanes // max(bags, 1)) * vectors.itemsize}
    return Traffic(reads, {"Y": bags * row})


def batched_unary_embeddings_bytes(weight: Tensor, offsets: Tensor, ids: Tensor) -> Traffic:
    """Of `batched_unary_embeddings`: for each task the ids, and a number for each; the result once."""
    tasks, inside = weight.shape[0], int(offsets[-1])
    reads = {"I": tasks * inside * ids.itemsize, "W": tasks * inside * weight.itemsize}
    return Traffic(reads, {"Y": tasks * (offsets.shape[0] - 1) * weight.itemsize})

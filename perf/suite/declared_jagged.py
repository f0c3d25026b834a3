"""The bytes that the jagged ops declare, as functions of a call; letters as in the kernels, `sector` as in declared.py.

Searches, sorts, and offsets of inner dims are left out, which caches or torch serve. Where there is no `sector`, rows
are whole sectors or neighbours of one another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import prod

from torch import Tensor

from shardwise.kernels.jagged.padded import (
    ADD,
    MOVE,
    MULTIPLY,
    places_ref,
)
from shardwise.kernels.jagged.regroup_plan import Runs

from .declared import Traffic, _in_sectors


def move_segments_bytes(values: Sequence[Tensor], moved: int, *, sector: int = 1) -> Traffic:
    """Of `move_segments`, by V0, V1, ... and Y0, Y1, ...: every moved value once each way; the search is left out.

    Rows also have 8 bytes each way that say where they lie.
    """
    each = [moved * _row(v, sector) for v in values]
    at = 8 * moved * sum(v.dim() > 1 for v in values)
    reads, writes = ({f"{letter}{i}": n for i, n in enumerate(each)} for letter in "VY")
    return Traffic({**reads, "at": at}, {**writes, "at": at})


def collect_segments_bytes(grad: Tensor, size: int, *, sector: int = 1) -> Traffic:
    """Of `collect_segments`: the gradient of every moved value, their sums, and 8 bytes a value for its segment."""
    row = _row(grad, sector)
    return Traffic({"G": grad.shape[0] * row, "segment": 8 * size}, {"Q": size * row, "segment": 8 * size})


def segment_sum_bytes(offsets: Tensor, values: Tensor, *, sector: int = 1) -> Traffic:
    """Of `segment_sum` where every value is in a segment: the values and the offsets, and a row for each segment."""
    row = _row(values, sector)
    return Traffic({"V": values.shape[0] * row, "O": offsets.nbytes}, {"Y": (offsets.shape[0] - 1) * row})


def segment_spread_bytes(sums: Tensor, size: int, *, sector: int = 1) -> Traffic:
    """Of the gradient of `segment_sum`: a row read and written for each value, and 8 bytes that say which."""
    row = size * _row(sums, sector)
    return Traffic({"G": row, "at": 8 * size}, {"Y": row, "at": 8 * size})


def complete_cumsum_bytes(lengths: Tensor) -> Traffic:
    """Of `complete_cumsum`: read once, written once and a 0 for each row."""
    rows = prod(lengths.shape[:-1])
    return Traffic({"L": lengths.nbytes}, {"O": lengths.nbytes + rows * lengths.itemsize})


def invert_permute_bytes(permute: Tensor) -> Traffic:
    """Of `invert_permute`: read once, written once; filled before by torch."""
    return Traffic({"P": permute.nbytes}, {"Q": permute.nbytes})


def offsets_range_bytes(offsets: Tensor, size: int) -> Traffic:
    """Of `offsets_range`, and of `expand_into_jagged_permute`: written once; the search is left out."""
    return Traffic({}, {"at": size * offsets.itemsize})


def _row(values: Tensor, sector: int) -> int:
    """Bytes of a row; of one value where they lie side by side, which share their sectors."""
    return values.itemsize if values.dim() == 1 else _whole_row(values, sector)


def _whole_row(rows: Tensor, sector: int) -> int:
    """Of a row, in whole sectors at the worst of the addresses that it may have."""
    nbytes = prod(rows.shape[1:]) * rows.itemsize
    return _in_sectors(nbytes, sector, nbytes)


def to_padded_bytes(
    values: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[int], mode: int = MOVE, *, sector: int = 1
) -> Traffic:
    """Of `jagged_to_padded_dense`, and of the sum or the product that is dense."""
    kept = int((places_ref(offsets, max_lengths, values.shape[0]) >= 0).sum())
    row = _whole_row(values, sector)
    bags = offsets[0].shape[0] - 1
    out = bags * prod(max_lengths) * row
    other = {MOVE: 0, ADD: out, MULTIPLY: kept * row}[mode]
    ends = 2 * bags * prod(max_lengths[:-1]) * offsets[-1].itemsize
    return Traffic({"V": kept * row, "OTHER": other, "O": ends}, {"Y": out})


def to_jagged_bytes(
    dense: Tensor, offsets: Sequence[Tensor], total_length: int, mode: int = MOVE, *, sector: int = 1
) -> Traffic:
    """Of `padded_dense_to_jagged`, and of the sum or the product that is jagged; the search is left out."""
    n = len(offsets)
    kept = int((places_ref(offsets, dense.shape[1 : n + 1], total_length) >= 0).sum())
    row = _whole_row(dense.flatten(0, n), sector)
    other = {MOVE: 0, ADD: total_length * row, MULTIPLY: kept * row}[mode]
    return Traffic(
        {"X": kept * row, "at": 8 * total_length, "OTHER": other}, {"at": 8 * total_length, "Y": total_length * row}
    )


def jagged_index_select_bytes(
    values: Tensor, offsets: Tensor, indices: Tensor, batch_size: int, weights: Tensor | None = None, *, sector: int = 1
) -> Traffic:
    """Of `jagged_index_select` and, with keys, `keyed_jagged_index_select`; the search is left out."""
    bags = (offsets.shape[0] - 1) // max(batch_size, 1) * indices.shape[0]
    lengths = offsets.diff().view(-1, max(batch_size, 1))[:, indices.long()]
    rows = int(lengths.sum())
    row = _row(values, sector)
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
    rows, row = int(output_offsets[-1]), _row(values, sector)
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


def block_bucketize_bytes(
    lengths: Tensor, ids: Tensor, buckets: int, weights: Tensor | None, positions: bool, permute: bool
) -> Traffic:
    """Of `block_bucketize`: ids there and back, by way of their bucket, bag and row; what is asked for."""
    n = ids.shape[0]
    bucket, bag = 1 if buckets < 2**8 else 2 if buckets < 2**15 else 4, 4 if lengths.shape[0] < 2**31 else 8
    per_id = 0 if weights is None else weights.nbytes
    reads = {"I": ids.nbytes, "source": 8 * n, "bucket": bucket * n, "bag": bag * n, "local": ids.nbytes, "P": per_id}
    writes = {"bucket": bucket * n, "bag": bag * n, "local": ids.nbytes, "new_ids": ids.nbytes, "new_weights": per_id}
    writes |= {"positions": ids.nbytes * positions, "permute": ids.nbytes * permute}
    # the first and the last place of each (bucket, bag) that has ids
    writes["counted"] = 2 * lengths.itemsize * min(n, buckets * lengths.shape[0])
    return Traffic(reads, writes)


def jagged_unique_bytes(ids: Tensor, rows: int, distinct: int) -> Traffic:
    """Of `jagged_unique`: a key for each id, its number and place, and each distinct id there and back."""
    n, key = ids.shape[0], 4 if rows + 1 < 2**31 else 8
    reads = {"I": ids.nbytes + ids.itemsize * distinct, "source": 8 * n, "number": 8 * n}
    return Traffic(reads, {"keys": key * n, "inverse": 8 * n, "unique": ids.itemsize * distinct})


def histogram_binning_bytes(logit: Tensor, value: Tensor | None, lengths: Tensor | None) -> Traffic:
    """Of the calibrations: logits there, predictions and bins back, two numbers of a bin, a value of a segment."""
    n = logit.numel()
    reads = {"X": logit.nbytes, "E": 8 * n, "H": 8 * n}
    if value is not None and lengths is not None:
        reads |= {"V": value.nbytes, "L": lengths.nbytes, "starts": 8 * n}
    return Traffic(reads, {"Y": logit.nbytes, "bin_ids": 8 * n})

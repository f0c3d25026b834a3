"""The bytes that each kernel's module declares, as functions of a call, and how many of them lie in whole sectors.

Letters as in the modules. `sector=1` gives their formulas; `sector=32` counts every row as the sectors that it touches
at the worst, given what its address is a multiple of (tensors themselves begin on a sector, as torch allocates them).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from shardwise.kernels import RowFormat
from shardwise.kernels.features import BASE, COLUMN, DIM, FIRST_ROW, batch_size, locate_ids
from shardwise.kernels.transpose import CHUNK


@dataclass(frozen=True)
class Traffic:
    """Bytes that a call reads and writes, by the letter of the tensor."""

    reads: dict[str, int]
    writes: dict[str, int]

    @property
    def bytes_moved(self) -> int:
        return sum(self.reads.values()) + sum(self.writes.values())


def pooled_lookup_bytes(
    weights: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    *,
    sector: int = 1,
) -> Traffic:
    """Of `pooled_lookup`: a row for each id, the index once, the output once."""
    batch, ids = batch_size(offsets, len(features)), _ids_per_feature(offsets, features)
    reads = {
        "W": sum(n * row for n, row in zip(ids, _table_rows(weights, features, sector), strict=True)),
        "I": indices.nbytes,
        "O": offsets.nbytes,
        "P": 0 if per_id_weights is None else per_id_weights.nbytes,
    }
    return Traffic(reads, {"Y": sum(batch * row for row in _columns(features, sector))})


def sequence_lookup_bytes(
    weights: Tensor, indices: Tensor, offsets: Tensor, features: Tensor, *, sector: int = 1
) -> Traffic:
    """Of `sequence_lookup`: a row for each id and where it begins, the output once; the search is left out."""
    n, dim = indices.shape[0], int(features[0, DIM])
    ids = _ids_per_feature(offsets, features)
    rows = sum(n * row for n, row in zip(ids, _table_rows(weights, features, sector), strict=True))
    row = _in_sectors(dim * 4, sector, dim * 4)
    return Traffic({"W": rows, "I": indices.nbytes, "at": 8 * n}, {"at": 8 * n, "Y": n * row})


def weight_gradient_bytes(
    weights: Tensor, indices: Tensor, offsets: Tensor, features: Tensor, *, sector: int = 1
) -> Traffic:
    """Of `per_id_weight_gradient`: a row for each id, the index and the fp32 gradient once, a number for each id."""
    reads = pooled_lookup_bytes(weights, indices, offsets, None, features, sector=sector)
    return Traffic({**reads.reads, "G": reads.writes["Y"]}, {"Q": 4 * indices.shape[0]})


def check_ids_bytes(indices: Tensor, offsets: Tensor) -> Traffic:
    """Of `check_ids`: the index once; the search is left out."""
    return Traffic({"I": indices.nbytes, "O": offsets.nbytes}, {})


def check_gradient_bytes(grad: Tensor) -> Traffic:
    """Of `check_gradient`: the gradient once."""
    return Traffic({"G": grad.nbytes}, {})


def fused_update_bytes(
    weights: Tensor,
    indices: Tensor,
    offsets: Tensor,
    features: Tensor,
    kinds: Sequence[str],
    pooling: str,
    *,
    sector: int = 1,
) -> Traffic:
    """Of `fused_update`: a gradient row for each id, each touched row and its states there and back, 96 bytes an id.

    `kinds` says "element" or "row" for each state. Rows of more than CHUNK ids also leave the sums of their chunks, and
    read them again: at most a row for 31 ids, which the module does not count and "partial" does.
    """
    bag, f, valid = locate_ids(indices, offsets, features)
    dims = features[:, DIM].tolist()
    upstream = (
        [_in_sectors(dim * 4, sector, dim * 4) for dim in dims] if pooling == "sequence" else _columns(features, sector)
    )
    f = f[valid]
    touched, at, hits = torch.unique(indices[valid] + features[f, FIRST_ROW], return_inverse=True, return_counts=True)
    # any feature of the row's table says how its rows lie
    of = torch.zeros_like(touched).scatter_(0, at, f)

    def total(nbytes: Sequence[int], feature: Tensor) -> int:
        """Sum over rows of what a row of each feature takes."""
        return int(torch.tensor(nbytes, device=feature.device)[feature].sum())

    state = _table_rows(weights.new_empty(0, dtype=torch.float32), features, sector)
    one_number = [_in_sectors(4, sector, 4)] * len(dims)
    there_and_back = {"W": total(_table_rows(weights, features, sector), of)}
    for i, kind in enumerate(kinds):
        there_and_back[f"S{i}"] = total(state if kind == "element" else one_number, of)
    sums = torch.tensor([_in_sectors(dim * 4, sector, dim * 4) for dim in dims], device=of.device)
    there_and_back["partial"] = int((_partial_sums(hits) * sums[of]).sum())
    reads = {"G": total(upstream, f), "index": 40 * indices.shape[0]}
    return Traffic(reads | there_and_back, there_and_back | {"index": 56 * indices.shape[0]})


def _partial_sums(hits: Tensor) -> Tensor:
    """Sums of chunks that each row, hit so often, leaves on all levels."""
    sums = torch.zeros_like(hits)
    while bool((hits > CHUNK).any()):
        hits = torch.where(hits > CHUNK, (hits + CHUNK - 1) // CHUNK, 0)
        sums += hits
    return sums


def _ids_per_feature(offsets: Tensor, features: Tensor) -> list[int]:
    return offsets.diff().view(len(features), batch_size(offsets, len(features))).sum(1).tolist()


def _table_rows(flat: Tensor, features: Tensor, sector: int) -> list[int]:
    """Bytes of a row of each feature's table in a flat buffer laid out like W."""
    size = flat.itemsize
    return [_in_sectors(dim * size, sector, dim * size, base * size) for base, dim in features[:, [BASE, DIM]].tolist()]


def _columns(features: Tensor, sector: int) -> list[int]:
    """Bytes of each feature's part of a row of the fp32 output or of its gradient."""
    stride = 4 * int(features[:, DIM].sum())
    return [_in_sectors(4 * dim, sector, stride, 4 * column) for column, dim in features[:, [COLUMN, DIM]].tolist()]


def _in_sectors(nbytes: int, sector: int, *multiples: int) -> int:
    """Bytes of the sectors that `nbytes` touch at the worst, at an address that these numbers' multiples make up."""
    return -(-(nbytes + sector - gcd(sector, *multiples)) // sector) * sector


def quantized_pooled_lookup_bytes(
    kind: RowFormat,
    scales: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    output_dtype: torch.dtype = torch.float32,
    *,
    sector: int = 1,
) -> Traffic:
    """Of `quantized_pooled_lookup`: a row and its scales for each id, the index once, the output once."""
    reads = _rows_read(kind, scales, indices, offsets, features, sector)
    reads |= {"I": indices.nbytes, "O": offsets.nbytes, "P": 0 if per_id_weights is None else per_id_weights.nbytes}
    size, stride = output_dtype.itemsize, output_dtype.itemsize * int(features[:, DIM].sum())
    row = sum(
        _in_sectors(size * dim, sector, stride, size * column) for column, dim in features[:, [COLUMN, DIM]].tolist()
    )
    return Traffic(reads, {"Y": batch_size(offsets, len(features)) * row})


def quantized_sequence_lookup_bytes(
    kind: RowFormat,
    scales: Tensor,
    indices: Tensor,
    offsets: Tensor,
    features: Tensor,
    output_dtype: torch.dtype = torch.float32,
    *,
    sector: int = 1,
) -> Traffic:
    """Of `quantized_sequence_lookup`: a row and its scales for each id and where they begin; the search is left out."""
    n, row = indices.shape[0], int(features[0, DIM]) * output_dtype.itemsize
    reads = _rows_read(kind, scales, indices, offsets, features, sector)
    reads |= {"I": indices.nbytes, "at": 16 * n}
    return Traffic(reads, {"at": 16 * n, "Y": n * _in_sectors(row, sector, row)})


def _rows_read(
    kind: RowFormat, scales: Tensor, indices: Tensor, offsets: Tensor, features: Tensor, sector: int
) -> dict[str, int]:
    per_feature = _ids_per_feature(offsets, features)
    widths = [kind.row_bytes(dim) for dim in features[:, DIM].tolist()]
    rows = sum(n * _in_sectors(width, sector, width) for n, width in zip(per_feature, widths, strict=True))
    parts = kind.parts * scales.itemsize
    return {"Q": rows, "S": indices.shape[0] * _in_sectors(parts, sector, parts) if parts else 0}

"""Sums of gradient rows on the CPU, in the order of the contract (transpose.py): `embedding_bag` adds each chunk.

Shapes: G [B, sum of dims] or [N, D] upstream gradient, keys [N] row numbers sorted, u distinct rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .. import configs
from ..features import (
    FIRST_ROW,
    ROWS,
    Segment,
    batch_size,
    column_offsets,
    linear_rows,
)
from ..jagged.offsets import complete_cumsum
from ..transpose import (
    CHUNK,
    Transposed,
    key_dtype,
    run_begins,
    transpose_index,
)
from .lookup import bag_sums, offsets_are_good

# Rows that are summed and updated at a time: half a MB of gradients
_BLOCK_ELEMENTS = 1 << 17


def transpose_index_cpu(indices: Tensor, offsets: Tensor, features: Tensor, segments: Sequence[Segment]) -> Transposed:
    """`transpose_index` by repeating what belongs to a feature or a bag instead of a search for each id."""
    if not offsets_are_good(offsets, indices.shape[0], padded=True):
        return transpose_index(indices, offsets, features, segments)
    ids, lengths, rows_total = indices[: int(offsets[-1])], offsets.diff(), segments[-1].end_row
    # rows by their numbers: as if all tables had one column
    keys, valid = linear_rows(
        ids, offsets, batch_size(offsets, features.shape[0]), features[:, [FIRST_ROW, ROWS]], base=0, dim=1
    )
    if not bool(valid.all()):
        keys = torch.where(valid, keys, rows_total)
    keys, position = torch.sort(keys.to(key_dtype(rows_total)), stable=True)
    bag = torch.arange(lengths.shape[0], dtype=torch.int32, device="cpu").repeat_interleave(
        lengths, output_size=ids.shape[0]
    )
    return Transposed(keys, position, bag[position])


def row_gradients(
    index: Transposed,
    grad: Tensor,
    scale: Tensor | None,
    segment: Segment,
    dims: Sequence[int],
    batch: int,
    pooled: bool,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Distinct rows of the segment [u] and their summed gradients [u, dim], added in the contract's order.

    They come in blocks that fit a core's cache, so that the update finds them there.
    """
    low, high = torch.searchsorted(index.keys, index.keys.new_tensor([segment.first_row, segment.end_row])).tolist()
    if low == high:
        # tables of this dim may have no features at all
        return
    keys = index.keys[low:high] - segment.first_row
    scale = None if scale is None else scale[low:high]
    if pooled:
        matrix, source = _gradient_matrix(index.bag[low:high], grad, segment.dim, dims, batch)
    else:
        matrix, source = grad, index.position[low:high]
    while keys.shape[0]:
        starts = run_begins(keys).nonzero().squeeze(1)
        bounds = torch.cat([starts, starts.new_tensor([keys.shape[0]])])
        sizes, rows = bounds.diff(), keys[starts].long()
        long = sizes > CHUNK
        if not bool(long.any()):
            yield from _blocks_of_sums(matrix, source, scale, rows, bounds)
            return
        # their ids are parted from the others before rows are summed: numbers are cheap to move, rows are not
        of_long, short = long.repeat_interleave(sizes, output_size=keys.shape[0]), ~long
        of_short = ~of_long
        yield from _blocks_of_sums(
            matrix, source[of_short], None if scale is None else scale[of_short], rows[short],
            complete_cumsum(sizes[short]),
        )  # fmt: skip
        rows, bounds = _chunks(rows[long], sizes[long])
        matrix = bag_sums(matrix, source[of_long], bounds, None if scale is None else scale[of_long])
        keys, source, scale = rows, torch.arange(rows.shape[0], device=rows.device), None


def _chunks(rows: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Runs side by side, cut into chunks of at most CHUNK: the row of each chunk, and the bounds of all chunks."""
    counts = (sizes + (CHUNK - 1)).div(CHUNK, rounding_mode="floor")
    last = counts.cumsum(0)
    parts = sizes.new_full((int(last[-1]),), CHUNK)
    parts[last - 1] = sizes - (counts - 1) * CHUNK
    return rows.repeat_interleave(counts, output_size=len(parts)), complete_cumsum(parts)


def _blocks_of_sums(
    matrix: Tensor, source: Tensor, scale: Tensor | None, rows: Tensor, bounds: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Rows and the sums of matrix[source[i]] between their bounds, so many at a time as stay in a core's cache."""
    block = max(1, configs.cpu("update_block_elements", _BLOCK_ELEMENTS) // matrix.shape[1])
    cuts = [*range(0, rows.shape[0], block), rows.shape[0]]
    # read at once, because each read costs as much as an operator
    ends = bounds[torch.tensor(cuts, device="cpu")].tolist()
    for (first, last), (begin, end) in zip(pairwise(cuts), pairwise(ends), strict=True):
        of_ids = bounds[first : last + 1] - begin if begin else bounds[first : last + 1]
        mine = None if scale is None else scale[begin:end]
        yield rows[first:last], bag_sums(matrix, source[begin:end], of_ids, mine)


def copy_rows(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """table[rows[u]] = values[u], rows distinct: table [R, D], values [U, D] of its dtype."""
    wide, values = torch.complex128, values.contiguous()
    per_wide = wide.itemsize // table.element_size()
    aligned = not (table.data_ptr() | values.data_ptr()) % wide.itemsize
    if not table.is_cuda and aligned and table.is_contiguous() and table.shape[1] % per_wide == 0:
        # an element costs the CPU the same whatever its width
        table, values = table.view(wide), values.view(wide)
    # half the time of index_copy_ on the CPU
    table.index_put_((rows,), values)


def _gradient_matrix(bag: Tensor, grad: Tensor, dim: int, dims: Sequence[int], batch: int) -> tuple[Tensor, Tensor]:
    """G as rows of this dim, and the row of each bag: a view where all features have this dim."""
    samples = torch.arange(batch, device=bag.device)
    if set(dims) == {dim}:
        row_of_bag = samples * len(dims) + torch.arange(len(dims), device=bag.device)[:, None]
        return grad.reshape(-1, dim), row_of_bag.view(-1)[bag]
    columns = column_offsets(dims)
    mine = [j for j, other in enumerate(dims) if other == dim]
    number = torch.zeros(len(dims), dtype=torch.int64, device=bag.device)
    number[mine] = torch.arange(len(mine), device=bag.device)
    row_of_bag = number[:, None] * batch + samples
    return torch.cat([grad[:, columns[j] : columns[j] + dim] for j in mine]), row_of_bag.view(-1)[bag]

"""Sums of gradient rows on the CPU, in the order of the contract (transpose.py): `embedding_bag` adds each chunk.

Shapes: G [B, sum of dims] or [N, D] upstream gradient, keys [N] row numbers sorted, u distinct rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from . import configs
from .cpu_lookup import bag_sums, offsets_are_good
from .features import FIRST_ROW, ROWS, Segment, batch_size, column_offsets, linear_rows
from .transpose import CHUNK, Transposed, key_dtype, position_in_run, transpose_index

# Rows that are summed and updated at a time: half a MB of gradients, which the C library keeps when it is freed
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
    # short numbers: half the memory to fault in
    counts = key_dtype(keys.shape[0])
    scale = None if scale is None else scale[low:high]
    if pooled:
        matrix, source = _gradient_matrix(index.bag[low:high], grad, segment.dim, dims, batch)
    else:
        matrix, source = grad, index.position[low:high]
    block = max(1, configs.cpu("update_block_elements", _BLOCK_ELEMENTS) // segment.dim)
    while keys.shape[0]:
        # CHUNK is a power of two, and a remainder takes longer than all else here
        head = (position_in_run(keys, counts)[1] & (CHUNK - 1) == 0).nonzero().squeeze(1)
        bounds = torch.cat([head, head.new_tensor([keys.shape[0]])])
        keys = keys[head]
        same_as_last = torch.zeros(keys.shape[0] + 1, dtype=torch.bool, device=keys.device)
        same_as_last[1:-1] = keys[1:] == keys[:-1]
        long = same_as_last[:-1] | same_as_last[1:]
        partial = []
        sums = matrix[:0]
        rows, cuts = keys.long(), [*range(0, keys.shape[0], block), keys.shape[0]]
        at = torch.tensor(cuts, device="cpu")
        # read at once, because each read costs as much as an operator
        ends = bounds[at].tolist()
        found = torch.cat([long.new_zeros(1, dtype=torch.int64), long.cumsum(0)])[at].tolist()
        for number, (first, last) in enumerate(pairwise(cuts)):
            begin, end = ends[number : number + 2]
            of_ids, mine = bounds[first : last + 1], rows[first:last]
            of_ids = of_ids - begin if begin else of_ids
            sums = bag_sums(matrix, source[begin:end], of_ids, None if scale is None else scale[begin:end])
            if found[number] != found[number + 1]:
                inner = long[first:last]
                partial.append(sums[inner])
                mine, sums = mine[~inner], sums[~inner]
            yield mine, sums
        keys, scale = keys[long], None
        matrix, source = torch.cat([*partial, sums[:0]]), torch.arange(keys.shape[0], device=keys.device)


def copy_rows(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """table[rows[u]] = values[u], rows distinct: table [R, D], values [U, D] of its dtype."""
    wide, values = torch.complex128, values.contiguous()
    per_wide = wide.itemsize // table.element_size()
    aligned = not (table.data_ptr() | values.data_ptr()) % wide.itemsize
    if not table.is_cuda and aligned and table.is_contiguous() and table.shape[1] % per_wide == 0:
        # an element costs the CPU the same whatever its width
        table, values = table.view(wide), values.view(wide)
    table.index_copy_(0, rows, values)


def _gradient_matrix(bag: Tensor, grad: Tensor, dim: int, dims: Sequence[int], batch: int) -> tuple[Tensor, Tensor]:
    """G as rows of this dim, and the row of each bag: a view where all features have this dim."""
    samples = torch.arange(batch, device=bag.device)
    if all(other == dim for other in dims):
        row_of_bag = samples * len(dims) + torch.arange(len(dims), device=bag.device)[:, None]
        return grad.reshape(-1, dim), row_of_bag.view(-1)[bag]
    columns = column_offsets(dims)
    mine = [j for j, other in enumerate(dims) if other == dim]
    number = torch.zeros(len(dims), dtype=torch.int64, device=bag.device)
    number[mine] = torch.arange(len(mine), device=bag.device)
    row_of_bag = number[:, None] * batch + samples
    return torch.cat([grad[:, columns[j] : columns[j] + dim] for j in mine]), row_of_bag.view(-1)[bag]

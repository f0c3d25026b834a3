"""Sums of gradient rows on the CPU, in the order of the contract (transpose.py): `embedding_bag` adds each chunk.

Shapes: G [B, sum of dims] or [N, D] upstream gradient, keys [N] row numbers sorted, u distinct rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .cpu_lookup import bag_sums
from .features import Segment, column_offsets
from .transpose import CHUNK, Transposed, position_in_run

# Rows that are summed and updated at a time: 1 MB of gradients
_BLOCK_ELEMENTS = 1 << 18


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
    keys = index.keys[low:high].long() - segment.first_row
    scale = None if scale is None else scale[low:high]
    if pooled:
        matrix, source = _gradient_matrix(index.bag[low:high], grad, segment.dim, dims, batch)
    else:
        matrix, source = grad, index.position[low:high]
    block = max(1, _BLOCK_ELEMENTS // segment.dim)
    while keys.shape[0]:
        head = (position_in_run(keys)[1] % CHUNK == 0).nonzero().squeeze(1)
        bounds = torch.cat([head, head.new_tensor([keys.shape[0]])])
        keys = keys[head]
        same_as_last = torch.zeros(keys.shape[0] + 1, dtype=torch.bool, device=keys.device)
        same_as_last[1:-1] = keys[1:] == keys[:-1]
        long = same_as_last[:-1] | same_as_last[1:]
        partial = []
        sums = matrix[:0]
        for first in range(0, keys.shape[0], block):
            cuts, inner = bounds[first : first + block + 1], long[first : first + block]
            ids = slice(int(cuts[0]), int(cuts[-1]))
            sums = bag_sums(matrix, source[ids], cuts - cuts[0], None if scale is None else scale[ids])
            if bool(inner.any()):
                partial.append(sums[inner])
                yield keys[first : first + block][~inner], sums[~inner]
            else:
                yield keys[first : first + block], sums
        keys, scale = keys[long], None
        matrix, source = torch.cat([*partial, sums[:0]]), torch.arange(keys.shape[0], device=keys.device)


def _gradient_matrix(bag: Tensor, grad: Tensor, dim: int, dims: Sequence[int], batch: int) -> tuple[Tensor, Tensor]:
    """G as rows of this dim, and the row of each bag: a view where all features have this dim."""
    f, b = bag // batch, bag % batch
    if all(other == dim for other in dims):
        return grad.reshape(-1, dim), b * len(dims) + f
    columns = column_offsets(dims)
    mine = [j for j, other in enumerate(dims) if other == dim]
    number = f.new_zeros(len(dims))
    number[mine] = torch.arange(len(mine), device=f.device)
    return torch.cat([grad[:, columns[j] : columns[j] + dim] for j in mine]), number[f] * batch + b

"""Products of bags of rows with torch alone: bags are padded to one length, block by block, and meet in torch.bmm.

Letters as in jagged/bmm.py. A block is so few bags that their padded rows stay in a core's cache. Bags much longer than
the others of their block are multiplied one by one, so padding never makes more than a few times the work.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from ..jagged.rows import accumulator

# elements of a block's padded rows, about
_BLOCK_ELEMENTS = 1 << 19


class Block(NamedTuple):
    """Bags [low, high), rows [begin, end) of all of them; padded to `width`, the bags `alone` left out."""

    low: int
    high: int
    begin: int
    end: int
    width: int
    alone: list[int]  # from low


def dense_bmm_cpu(values: Tensor, offsets: Tensor, dense: Tensor, max_length: int | None, transposed: bool) -> Tensor:
    """The reference's result for offsets that are in order."""
    matrices = dense.transpose(1, 2) if transposed else dense
    rows, columns = values.shape[0], matrices.shape[2]
    if rows == 0 or columns == 0 or values.shape[1] == 0 or matrices.shape[0] == 0:
        return values.new_zeros(rows, columns)
    out = values.new_empty(rows, columns)
    exact = accumulator(values.dtype) == values.dtype
    lengths, cut = lengths_of(offsets, max_length)
    last = 0
    for block in blocks_of(offsets, lengths, values.shape[1] + columns):
        starts = offsets[block.low : block.high]
        ours = matrices[block.low : block.high]
        padded = padded_rows(values, starts, block.width)
        product = torch.bmm(padded, ours if exact else ours.to(padded.dtype)).view(-1, columns)
        leave_padding(product, block, offsets, cut, out)
        for b in block.alone:
            begin, end = int(starts[b]), int(starts[b] + lengths[block.low + b])
            out[begin:end] = values[begin:end].to(padded.dtype) @ ours[b].to(padded.dtype)
        last = block.end
    out[last:] = 0
    if cut:
        out.masked_fill_(rows_beyond(offsets, lengths, rows)[:, None], 0)
    return out


def jagged_bmm_cpu(x: Tensor, y: Tensor, offsets: Tensor, max_length: int | None) -> Tensor:
    """The reference's result for offsets that are in order."""
    bags, left, right = offsets.shape[0] - 1, x.shape[1], y.shape[1]
    if x.shape[0] == 0 or bags == 0 or left == 0 or right == 0:
        return x.new_zeros(bags, left, right)
    out = x.new_zeros(bags, left, right)
    exact = accumulator(x.dtype) == x.dtype
    lengths, _ = lengths_of(offsets, max_length)
    for block in blocks_of(offsets, lengths, left + right):
        starts, mine = offsets[block.low : block.high], out[block.low : block.high]
        taken = lengths[block.low : block.high]
        if block.alone:
            taken = torch.where(taken > block.width, 0, taken)
        padding = (torch.arange(block.width, device=starts.device) >= taken[:, None])[:, :, None]
        # zeros on both sides: a NaN of a neighbour would come through a zero on one
        one = padded_rows(x, starts, block.width).masked_fill_(padding, 0).transpose(1, 2)
        other = padded_rows(y, starts, block.width).masked_fill_(padding, 0)
        if exact:
            torch.bmm(one, other, out=mine)
        else:
            mine.copy_(torch.bmm(one, other))
        for b in block.alone:
            begin, end = int(starts[b]), int(starts[b] + lengths[block.low + b])
            mine[b] = x[begin:end].to(one.dtype).t() @ y[begin:end].to(one.dtype)
    return out


def lengths_of(offsets: Tensor, max_length: int | None) -> tuple[Tensor, bool]:
    """Rows of each bag that take part, and whether any is left out."""
    lengths = offsets.diff()
    if max_length is None or int(lengths.max()) <= max_length:
        return lengths, False
    return lengths.clamp(max=max_length), True


def blocks_of(offsets: Tensor, lengths: Tensor, columns: int) -> Iterator[Block]:
    """Blocks of bags that have rows at all."""
    bags = lengths.shape[0]
    usual = 4 * (int(lengths.sum()) // bags) + 4
    size = max(16, _BLOCK_ELEMENTS * torch.get_num_threads() // (usual * columns))
    if bags <= size:
        bounds, longest = [0, int(offsets[-1])], [int(lengths.max())]
    else:
        bounds = [*offsets[:-1:size].tolist(), int(offsets[-1])]
        longest = [int(lengths[low : low + size].max()) for low in range(0, bags, size)]
    for i, most in enumerate(longest):
        begin, end = bounds[i], bounds[i + 1]
        if begin == end:
            continue
        low, high = i * size, min((i + 1) * size, bags)
        width = max(1, min(most, 4 * ((end - begin) // (high - low)) + 4))
        alone = (lengths[low:high] > width).nonzero().flatten().tolist() if most > width else []
        yield Block(low, high, begin, end, width, alone)


def leave_padding(padded: Tensor, block: Block, offsets: Tensor, cut: bool, out: Tensor) -> None:
    """The rows of a block's bags, out of padded [bags * width, D] into `out`; of rows that were left out any."""
    starts, bags = offsets[block.low : block.high], block.high - block.low
    shift = torch.arange(0, bags * block.width, block.width, device=starts.device) - starts
    full = offsets[block.low + 1 : block.high + 1] - starts
    rows = torch.arange(block.begin, block.end, device=starts.device)
    source = rows + shift.repeat_interleave(full, output_size=block.end - block.begin)
    if cut or block.alone:
        source.clamp_(max=bags * block.width - 1)
    mine = out[block.begin : block.end]
    if mine.dtype == padded.dtype:
        torch.index_select(padded, 0, source, out=mine)
    else:
        mine.copy_(padded.index_select(0, source))


def padded_rows(values: Tensor, starts: Tensor, width: int) -> Tensor:
    """[bags, width, D] in the accumulator's dtype: the rows from each start on, whosever they are."""
    index = starts[:, None] + torch.arange(width, device=starts.device)
    rows = values.index_select(0, index.clamp_(max=values.shape[0] - 1).view(-1))
    return rows.view(starts.shape[0], width, values.shape[1]).to(accumulator(values.dtype))


def rows_beyond(offsets: Tensor, lengths: Tensor, rows: int) -> Tensor:
    """Which of the rows take no part, [N] bool."""
    full, end = offsets.diff(), int(offsets[-1])
    stops = (offsets[:-1] + lengths).repeat_interleave(full, output_size=end)
    beyond = torch.ones(rows, dtype=torch.bool, device=offsets.device)
    torch.ge(torch.arange(end, device=offsets.device), stops, out=beyond[:end])
    return beyond

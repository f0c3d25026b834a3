"""Products of bags of rows on the CPU: softmax, vector product and unary lookup by the loops of products_loops.py, or
torch without numba; products with matrices by torch alone: bags are padded to one length and meet in torch.bmm.

Letters as in ../jagged/softmax.py, vector_product.py, unary_embeddings.py and bmm.py there. The loops look
at offsets and ids themselves before they follow them. A block is so few bags that their padded rows stay in a core's
cache; bags much longer than the others of their block are multiplied one by one, so padding never makes more than a few
times the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor

from .. import numba_loops
from .lookup import offsets_are_good
from .threads import run

# elements of a task that is worth another thread
_ALONE = 1 << 16


# the compiled loops; None where numba is missing or does not work
_loops = partial(numba_loops.loops, "products_loops")


def softmax_cpu(values: Tensor, offsets: Tensor, max_length: int | None) -> Tensor:
    """Softmax of each bag's rows, column by column."""
    op, (rows, columns) = "jagged_softmax", values.shape
    out, loops = values.new_empty(rows, columns), _loops_for(values)
    if loops is not None:
        arguments = (_flat(values), _flat(offsets), _flat(out), rows, columns, limit_of(max_length, rows))
        end = _over_bags(op, loops.softmax, arguments, offsets, rows, columns)
        return _without_rest(out, end)
    require_offsets(op, offsets, rows)
    if offsets.shape[0] == 1 or out.numel() == 0:
        return out.zero_()
    lengths, cut = lengths_of(offsets, max_length)
    if cut:
        out.zero_()
    last = 0
    for block in blocks_of(offsets, lengths, cut, 2 * columns):
        starts, taken = offsets[block.low : block.high], lengths[block.low : block.high]
        padded = padded_rows(values, starts, block.width)
        padding = (torch.arange(block.width, device=starts.device) >= taken[:, None])[:, :, None]
        soft = padded.masked_fill(padding, -torch.inf).softmax(1)
        leave_padding(soft.view(-1, columns), block, starts, taken, cut, out)
        for b in block.alone:
            begin, end = int(starts[b]), int(starts[b] + taken[b])
            out[begin:end] = values[begin:end].to(padded.dtype).softmax(0)
        last = block.end
    return _without_rest(out, last)


def softmax_gradient_cpu(grad: Tensor, soft: Tensor, offsets: Tensor, max_length: int | None) -> Tensor:
    """The gradient by the values of a softmax that gave `soft`."""
    op, (rows, columns), loops = "jagged_softmax", soft.shape, _loops_for(soft, grad)
    if loops is not None:
        out = soft.new_empty(rows, columns)
        arguments = (*map(_flat, (grad, soft, offsets, out)), rows, columns, limit_of(max_length, rows))
        end = _over_bags(op, loops.softmax_gradient, arguments, offsets, rows, columns)
        return _without_rest(out, end)
    require_offsets(op, offsets, rows)
    if offsets.shape[0] == 1 or soft.numel() == 0:
        return torch.zeros_like(soft)
    wide = accumulator(soft.dtype)
    soft, upstream, dtype = soft.to(wide), grad.to(wide), soft.dtype
    lengths, cut = lengths_of(offsets, max_length)
    end = int(offsets[-1])
    if cut or end < rows:
        upstream = upstream.masked_fill(rows_beyond(offsets, lengths, rows)[:, None], 0)
    totals = _bag_sums((soft * upstream)[:end], offsets)
    out = upstream.clone()
    out[:end] -= totals.repeat_interleave(offsets.diff(), dim=0, output_size=end)
    return out.mul_(soft).to(dtype)


def vector_product_cpu(vectors: Tensor, values: Tensor, offsets: Tensor, heads: int) -> Tensor:
    """Each head's weights times its columns of the bag's rows: [B*H, D]."""
    op, rows, bags = "jagged_vector_product", values.shape[0], offsets.shape[0] - 1
    length, dim = vectors.shape[1], values.shape[1] // heads
    loops = _loops_for(values)
    if loops is not None:
        out = values.new_empty(bags * heads, dim)
        arguments = (*map(_flat, (vectors, values, offsets, out)), rows, heads, length, dim)
        _over_bags(op, loops.vector_product, arguments, offsets, rows, values.shape[1])
        return out
    require_offsets(op, offsets, rows)
    wide = accumulator(values.dtype)
    weights, beyond = _row_weights(vectors, offsets, heads)
    end = weights.shape[0]
    scaled = values[:end].to(wide).reshape(end, heads, dim) * weights[:, :, None]
    if beyond is not None:
        # a weight of 0 would not do where a row holds an Inf
        scaled.masked_fill_(beyond[:, None, None], 0)
    return _bag_sums(scaled.view(end, heads * dim), offsets).view(bags * heads, dim).to(values.dtype)


def vector_product_by_rows_cpu(grad: Tensor, vectors: Tensor, offsets: Tensor, heads: int, rows: int) -> Tensor:
    """The gradient of a vector product by its rows: [N, H*D]."""
    op, length, dim = "jagged_vector_product", vectors.shape[1], grad.shape[1]
    loops = _loops_for(vectors, grad)
    out = grad.new_empty(rows, heads * dim)
    if loops is not None:
        arguments = (*map(_flat, (grad, vectors, offsets, out)), rows, heads, length, dim)
        end = _over_bags(op, loops.vector_product_by_rows, arguments, offsets, rows, heads * dim)
        return _without_rest(out, end)
    require_offsets(op, offsets, rows)
    weights, beyond = _row_weights(vectors, offsets, heads)
    end = weights.shape[0]
    lanes = grad.to(weights.dtype).reshape(offsets.shape[0] - 1, heads, dim)
    upstream = lanes.repeat_interleave(offsets.diff(), dim=0, output_size=end)
    upstream.mul_(weights[:, :, None])
    if beyond is not None:
        upstream.masked_fill_(beyond[:, None, None], 0)
    out[:end] = upstream.view(end, heads * dim)
    return _without_rest(out, end)


def vector_product_by_vectors_cpu(grad: Tensor, values: Tensor, offsets: Tensor, heads: int, length: int) -> Tensor:
    """The gradient of a vector product by its vectors: [B*H, L]."""
    op, rows, bags, dim = "jagged_vector_product", values.shape[0], offsets.shape[0] - 1, grad.shape[1]
    loops = _loops_for(values, grad)
    if loops is not None:
        out = grad.new_empty(bags * heads, length)
        arguments = (*map(_flat, (grad, values, offsets, out)), rows, heads, length, dim)
        _over_bags(op, loops.vector_product_by_vectors, arguments, offsets, rows, values.shape[1])
        return out
    require_offsets(op, offsets, rows)
    out, wide, end = grad.new_zeros(bags, heads, length), accumulator(values.dtype), int(offsets[-1])
    upstream = grad.to(wide).reshape(bags, heads, dim).repeat_interleave(offsets.diff(), dim=0, output_size=end)
    products = (values[:end].to(wide).reshape(end, heads, dim) * upstream).sum(2)
    bag, place = _places(offsets, end)
    if length <= int(offsets.diff().max() if bags else 0):
        inside = place < length
        bag, place, products = bag[inside], place[inside], products[inside]
    out[bag, :, place] = products.to(out.dtype)
    return out.view(bags * heads, length)


def unary_lookup_cpu(weight: Tensor, table_offsets: Tensor, offsets: Tensor, ids: Tensor) -> Tensor:
    """[tasks, B, T] for weight [tasks, S, 1] or [tasks, S]."""
    (tasks, total, *_), tables = weight.shape, table_offsets.numel() - 1
    batch = (offsets.numel() - 1) // max(tables, 1)
    loops = _loops_for(weight)
    if loops is not None and batch:
        out = weight.new_empty(tasks, batch, tables)
        # kept by these names as long as the loop has their addresses
        weight, table_offsets, begins, numbers = weight.contiguous(), _long(table_offsets), _long(offsets), _long(ids)
        count = ids.numel()
        arguments = (
            weight.data_ptr(), table_offsets.data_ptr(), begins.data_ptr(), numbers.data_ptr(), out.data_ptr(),
            tables, count, tasks, total, batch,
        )  # fmt: skip
        if _over_tables(loops.unary_lookup, arguments, tables, count * tasks):
            require_unary(table_offsets, offsets, ids, total)
        return out
    weight = weight.reshape(tasks, total)
    linear = require_unary(table_offsets, offsets, ids, total)
    wide = accumulator(weight.dtype)
    sums, lengths = torch.zeros(tasks, tables * batch, dtype=wide, device=weight.device), offsets.diff()
    # many ids a table at a time, which stays in the cache
    step = 1 if linear.shape[0] > _ALONE else max(tables, 1)
    bounds = [*_first_ids(offsets, tables)[::step].tolist(), linear.shape[0]]
    for part, low in enumerate(range(0, tables * batch, max(step * batch, 1))):
        rows, counts = linear[bounds[part] : bounds[part + 1]], lengths[low : low + step * batch]
        bag = torch.arange(low, low + counts.shape[0], device=ids.device)
        bag = bag.repeat_interleave(counts, output_size=rows.shape[0])
        # for rows of one number embedding_bag is slow; in one dimension index_add_ adds one after another
        for task, total_of in zip(weight, sums, strict=True):
            total_of.index_add_(0, bag, task.index_select(0, rows).to(wide))
    return sums.view(tasks, tables, batch).transpose(1, 2).to(weight.dtype, memory_format=torch.contiguous_format)


def unary_gradient_cpu(grad: Tensor, table_offsets: Tensor, offsets: Tensor, ids: Tensor, total: int) -> Tensor:
    """[tasks, S] for grad [tasks, B, T]: upstream gradients added in the order of ids."""
    tasks, batch, tables = grad.shape
    loops = _loops_for(grad)
    out = torch.zeros(tasks, total, dtype=accumulator(grad.dtype), device=grad.device)
    if loops is not None and batch:
        arguments = (*map(_flat, (grad, table_offsets, offsets, ids, out)), tasks, total, batch)
        if _over_tables(loops.unary_gradient, arguments, tables, ids.shape[0] * tasks):
            require_unary(table_offsets, offsets, ids, total)
        return out
    linear, counts = require_unary(table_offsets, offsets, ids, total), offsets.diff()
    for task, upstream in zip(out, grad.transpose(1, 2).reshape(tasks, tables * batch), strict=True):
        # in one dimension torch adds one after another
        task.index_add_(0, linear, upstream.to(task.dtype).repeat_interleave(counts, output_size=linear.shape[0]))
    return out.to(grad.dtype)


def require_unary(table_offsets: Tensor, offsets: Tensor, ids: Tensor, total: int) -> Tensor:
    """Row of each id among those of all tables, [ids before the last offset]. Waits for a device.

    Raises:
        ValueError: offsets out of order.
        IndexError: an id outside its table; names the first.
    """
    op, tables = "batched_unary_embeddings", table_offsets.shape[0] - 1
    require_offsets(op, offsets, ids.shape[0], "ids")
    require_offsets(op, table_offsets, total, "rows of weight", name="table_offsets")
    first, end = _first_ids(offsets, tables), int(offsets[-1])
    ids, counts, per_table = ids[:end], table_offsets.diff(), first.diff()
    if end and tables:
        smallest, largest = torch.aminmax(ids)
        if int(smallest) < 0 or int(largest) >= int(counts.min()):
            outside = (ids < 0) | (ids >= counts.repeat_interleave(per_table, output_size=end))
            if bool(outside.any()):
                at = int(outside.nonzero()[0])
                t = int((first[1:] <= at).sum())
                raise IndexError(f"{op}: ids[{at}] is {int(ids[at])}, but table {t} has {int(counts[t])} rows")
    return ids + table_offsets[:-1].repeat_interleave(per_table, output_size=end)


def _first_ids(offsets: Tensor, tables: int) -> Tensor:
    """Where each table's ids begin and the last one's end, [T + 1]."""
    batch = (offsets.shape[0] - 1) // max(tables, 1)
    return offsets[::batch].contiguous() if batch else offsets.new_zeros(tables + 1)


def _loops_for(*tensors: Tensor) -> Any:
    """The loops, if they take tensors of this dtype and device."""
    for tensor in tensors:
        if tensor.dtype != torch.float32 or not tensor.is_cpu:
            return None
    return _loops()


def _flat(tensor: Tensor) -> Any:
    flat = tensor.contiguous().view(-1)
    return (flat.long() if flat.dtype == torch.int32 else flat).numpy()


def _long(tensor: Tensor) -> Tensor:
    return (tensor if tensor.dtype == torch.int64 else tensor.long()).contiguous()


def _over_bags(
    op: str, loop: Callable[..., int], arguments: tuple[Any, ...], offsets: Tensor, rows: int, columns: int
) -> int:
    """Run a loop over all bags, shared among threads by rows. Returns the last offset."""
    bags, end = offsets.shape[0] - 1, int(offsets[-1])
    parts = 1 if end * columns < _ALONE else min(4 * torch.get_num_threads(), bags, end * columns // _ALONE + 1)
    if parts <= 1:
        bad_bags = (loop(*arguments, 0, bags),)
    else:
        shares = torch.arange(parts + 1, device="cpu") * end // parts
        borders = torch.searchsorted(offsets, shares.to(offsets.dtype)).clamp_(max=bags)  # [parts + 1] bags
        borders[0], borders[-1] = 0, bags
        # sorted, so that every bag is looked at whatever the offsets say
        bad_bags = tuple(run([partial(loop, *arguments, *part) for part in pairwise(sorted(borders.tolist()))]))
    if max(bad_bags) >= 0 or int(offsets[0]) != 0 or end > rows:
        require_offsets(op, offsets, rows)
    return end


def _over_tables(loop: Callable[..., int], arguments: tuple[Any, ...], tables: int, ids: int) -> bool:
    """Run a loop over all tables, shared among threads. Returns whether it found anything wrong."""
    parts = 1 if 4 * ids < _ALONE else min(4 * torch.get_num_threads(), tables, 4 * ids // _ALONE + 1)
    if parts <= 1:
        return bool(loop(*arguments, 0, tables) >= 0)
    borders = pairwise([tables * part // parts for part in range(parts + 1)])
    return bool(max(run([partial(loop, *arguments, low, high) for low, high in borders])) >= 0)


def _without_rest(out: Tensor, end: int) -> Tensor:
    """Rows past the last offset are 0."""
    if end < out.shape[0]:
        out[end:] = 0
    return out


def _row_weights(vectors: Tensor, offsets: Tensor, heads: int) -> tuple[Tensor, Tensor | None]:
    """The weight of each row for each head, [rows in bags, H], and which rows no vector reaches, if any."""
    end, length, wide = int(offsets[-1]), vectors.shape[1], accumulator(vectors.dtype)
    bag, place = _places(offsets, end)
    lanes = vectors.reshape(offsets.shape[0] - 1, heads, length)  # [B, H, L]
    if end == 0 or length >= int(offsets.diff().max()):
        return lanes[bag, :, place].to(wide), None
    if length == 0:
        return vectors.new_zeros(end, heads, dtype=wide), torch.ones(end, dtype=torch.bool, device=vectors.device)
    return lanes[bag, :, place.clamp(max=length - 1)].to(wide), place >= length


def _places(offsets: Tensor, end: int) -> tuple[Tensor, Tensor]:
    """Bag of each row, and its place there."""
    lengths = offsets.diff()  # [B]
    bag = torch.arange(lengths.shape[0], device=offsets.device).repeat_interleave(lengths, output_size=end)
    return bag, torch.arange(end, device=offsets.device) - offsets[:-1].repeat_interleave(lengths, output_size=end)


def _bag_sums(rows: Tensor, offsets: Tensor) -> Tensor:
    """Sum of each bag's rows, in the rows' dtype."""
    return _sums_at(torch.arange(rows.shape[0], device=rows.device), rows, offsets)


def _sums_at(at: Tensor, matrix: Tensor, offsets: Tensor) -> Tensor:
    """Sum over each bag of rows at[i] of the matrix; embedding_bag takes no empty input."""
    if matrix.numel() == 0 or at.shape[0] == 0 or offsets.shape[0] == 1:
        return matrix.new_zeros(offsets.shape[0] - 1, matrix.shape[1])
    return nnf.embedding_bag(at.long(), matrix, offsets.long(), mode="sum", include_last_offset=True)


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
    exact = accumulator(values.dtype) == values.dtype
    lengths, cut = lengths_of(offsets, max_length)
    out = values.new_zeros(rows, columns) if cut else values.new_empty(rows, columns)
    last = 0
    for block in blocks_of(offsets, lengths, cut, values.shape[1] + columns):
        starts, taken = offsets[block.low : block.high], lengths[block.low : block.high]
        right = matrices[block.low : block.high]
        padded = padded_rows(values, starts, block.width)  # [bags, width, D]
        # into a tensor that is there: torch.autocast would round what it multiplies otherwise
        product = padded.new_empty(*padded.shape[:2], columns)
        torch.bmm(padded, right if exact else right.to(padded.dtype), out=product)
        product = product.view(-1, columns)  # [bags * width, E]
        leave_padding(product, block, starts, taken, cut, out)
        for b in block.alone:
            begin, end = int(starts[b]), int(starts[b] + taken[b])
            _product(values[begin:end].to(padded.dtype), right[b].to(padded.dtype), out[begin:end])
        last = block.end
    out[last:] = 0
    return out


def jagged_bmm_cpu(x: Tensor, y: Tensor, offsets: Tensor, max_length: int | None) -> Tensor:
    """The reference's result for offsets that are in order."""
    bags, left, right = offsets.shape[0] - 1, x.shape[1], y.shape[1]
    if x.shape[0] == 0 or bags == 0 or left == 0 or right == 0:
        return x.new_zeros(bags, left, right)
    out = x.new_zeros(bags, left, right)
    exact = accumulator(x.dtype) == x.dtype
    lengths, cut = lengths_of(offsets, max_length)
    for block in blocks_of(offsets, lengths, cut, left + right):
        starts, block_out = offsets[block.low : block.high], out[block.low : block.high]
        taken = lengths[block.low : block.high]
        if block.alone:
            taken = torch.where(taken > block.width, 0, taken)
        padding = (torch.arange(block.width, device=starts.device) >= taken[:, None])[:, :, None]  # [bags, width, 1]
        # zeros on both sides: a NaN of a neighbour would come through a zero on one
        x_rows = padded_rows(x, starts, block.width).masked_fill_(padding, 0).transpose(1, 2)  # [bags, D, width]
        y_rows = padded_rows(y, starts, block.width).masked_fill_(padding, 0)  # [bags, width, E]
        if exact:
            torch.bmm(x_rows, y_rows, out=block_out)
        else:
            block_out.copy_(torch.bmm(x_rows, y_rows, out=x_rows.new_empty(block_out.shape)))
        for b in block.alone:
            begin, end = int(starts[b]), int(starts[b] + lengths[block.low + b])
            _product(x[begin:end].to(x_rows.dtype).t(), y[begin:end].to(x_rows.dtype), block_out[b])
    return out


def _product(left: Tensor, right: Tensor, out: Tensor) -> None:
    """A product of matrices [R, D] [D, E] in their dtype, rounded to that of `out` [R, E]; autocast has no part."""
    if out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    else:
        out.copy_(torch.mm(left, right, out=left.new_empty(out.shape)))


def lengths_of(offsets: Tensor, max_length: int | None) -> tuple[Tensor, bool]:
    """Rows of each bag that take part, and whether any is left out."""
    lengths = offsets.diff()
    if max_length is None or int(lengths.max()) <= max_length:
        return lengths, False
    return lengths.clamp(max=max_length), True


def blocks_of(offsets: Tensor, lengths: Tensor, cut: bool, columns: int) -> Iterator[Block]:
    """Blocks of bags that have rows at all; `cut` says that lengths are of fewer rows than offsets."""
    bags, last = lengths.shape[0], int(offsets[-1])
    usual = 4 * ((int(lengths.sum()) if cut else last) // bags) + 4
    size = max(16, _BLOCK_ELEMENTS * torch.get_num_threads() // (usual * columns))
    if bags <= size:
        bounds, longest = [0, last], [int(lengths.max())]
    else:
        bounds = [*offsets[:-1:size].tolist(), last]
        longest = [int(lengths[low : low + size].max()) for low in range(0, bags, size)]
    for i, most in enumerate(longest):
        begin, end = bounds[i], bounds[i + 1]
        if begin == end:
            continue
        low, high = i * size, min((i + 1) * size, bags)
        width = max(1, min(most, 4 * ((end - begin) // (high - low)) + 4))
        alone = (lengths[low:high] > width).nonzero().flatten().tolist() if most > width else []
        yield Block(low, high, begin, end, width, alone)


def leave_padding(padded: Tensor, block: Block, starts: Tensor, taken: Tensor, cut: bool, out: Tensor) -> None:
    """The rows of a block's bags that take part, out of padded [bags * width, D] into `out`.

    Bags begin at `starts` [bags] and have `taken` [bags] rows that do; of bags that are alone the first `width`.
    """
    place = torch.arange(block.width, device=starts.device)
    source = (place < taken[:, None]).view(-1).nonzero().view(-1)  # [rows] of padded
    if cut or block.alone:
        rows = (starts[:, None] + place).view(-1).index_select(0, source)
        out.index_copy_(0, rows.long(), padded.index_select(0, source).to(out.dtype))
        return
    # all rows of all bags, in order
    target = out[block.begin : block.end]
    if target.dtype == padded.dtype:
        torch.index_select(padded, 0, source, out=target)
    else:
        target.copy_(padded.index_select(0, source))


def padded_rows(values: Tensor, starts: Tensor, width: int) -> Tensor:
    """[bags, width, D] in the accumulator's dtype: the rows from each start on, whosever they are."""
    index = starts[:, None] + torch.arange(width, device=starts.device)  # [bags, width]
    rows = values.index_select(0, index.clamp_(max=values.shape[0] - 1).view(-1))
    return rows.view(starts.shape[0], width, values.shape[1]).to(accumulator(values.dtype))


def rows_beyond(offsets: Tensor, lengths: Tensor, rows: int) -> Tensor:
    """Which of the rows take no part, [N] bool."""
    full, end = offsets.diff(), int(offsets[-1])
    stops = (offsets[:-1] + lengths).repeat_interleave(full, output_size=end)  # [rows in bags]
    beyond = torch.ones(rows, dtype=torch.bool, device=offsets.device)
    torch.ge(torch.arange(end, device=offsets.device), stops, out=beyond[:end])
    return beyond


def require_offsets(op: str, offsets: Tensor, rows: int, what: str = "rows", *, name: str = "offsets") -> None:
    """Raise ValueError unless offsets go from 0 to at most `rows` without a fall. Waits for a device."""
    if offsets_are_good(offsets, rows, padded=True):
        return
    numbers = offsets.tolist()
    if numbers[0] != 0:
        raise ValueError(f"{op}: {name} must begin with 0, got {numbers[0]}")
    for b, (begin, end) in enumerate(zip(numbers, numbers[1:], strict=False)):
        if end < begin:
            raise ValueError(f"{op}: {name} must not decrease, but {name}[{b}] = {begin}, {name}[{b + 1}] = {end}")
    raise ValueError(f"{op}: the last of {name} must be at most {rows}, the number of {what}, got {numbers[-1]}")


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which rows of this one are added up."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def limit_of(max_length: int | None, rows: int) -> int:
    """Rows of a bag that take part, at most."""
    return rows if max_length is None else min(max_length, rows)

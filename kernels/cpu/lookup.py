"""Pooled lookup on the CPU: the loop of lookup_loops.py, or without numba few calls of `embedding_bag`.

Those go block by block: the bags of some features for some samples, so few that their sums are still in a core's cache
when they are copied to their columns of the output. All give the same bits. Letters and shapes as in lookup/pooled.py.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from .. import configs, numba_loops
from ..features import (
    BASE,
    MEAN,
    ROWS,
    Lookup,
    batch_size,
    column_offsets,
    linear_rows,
    table_rows,
)
from ..huge_pages import HUGE_PAGE, in_huge_pages
from .threads import call, spread

# sums of a block: 2 MB for each thread
_BLOCK_ELEMENTS = 1 << 19
# ids a feature up to which further passes over them are faster than further calls
_FEW_IDS = 1 << 12
# offsets that Python compares sooner than torch does
_FEW_OFFSETS = 256
# ids a bag up to which putting ids in the order of samples is faster than putting sums in that order
_SHORT = 2
# elements of rows, and ids to look at, that a loop reads before another thread can have been woken
_ALONE, _ALONE_IDS = 1 << 19, 1 << 18

# the compiled loops; None where numba is missing or does not work
_loops = partial(numba_loops.loops, "lookup_loops")
_LOOP_OF = {torch.float32: "pooled_fp32", torch.float16: "pooled_fp16", torch.bfloat16: "pooled_bf16"}
_INDEX = (torch.int32, torch.int64)


def pooled_lookup_cpu(
    weights: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    dims: Sequence[int],
) -> Tensor:
    """The reference's result, fp32."""
    loops = _loops()
    if (
        loops is not None
        and weights.dtype in _LOOP_OF
        and weights.is_contiguous()
        and indices.dtype in _INDEX
        and offsets.dtype in _INDEX
    ):
        loop = getattr(loops, _LOOP_OF[weights.dtype])
        count, ids, width = len(dims), indices.shape[0], sum(dims)
        samples = batch_size(offsets, count)
        out = in_huge_pages(torch.empty(samples, width, dtype=torch.float32, device="cpu"))
        # kept by these names as long as the loop has their addresses
        indices, offsets, features = indices.contiguous(), offsets.contiguous(), features.contiguous()
        scale = None if per_id_weights is None else per_id_weights.float().contiguous()
        arguments = (
            weights.data_ptr(), indices.data_ptr(), indices.itemsize, offsets.data_ptr(), offsets.itemsize,
            0 if scale is None else scale.data_ptr(), features.data_ptr(), out.data_ptr(), count, samples, ids, width,
        )  # fmt: skip
        _in_parts(loop, arguments, ids * width > configs.cpu("lookup_alone", _ALONE) * count)
        return out
    batch = batch_size(offsets, len(dims))
    scale = None if per_id_weights is None else per_id_weights.float()
    lookup = Lookup(indices, offsets, scale, features, dims=dims)
    if (
        batch
        and len(set(dims)) == 1
        and indices.shape[0] <= configs.cpu("lookup_short", _SHORT) * (offsets.shape[0] - 1)
    ):
        return _by_samples(weights, lookup)
    out = in_huge_pages(torch.empty(batch, sum(dims), dtype=torch.float32, device="cpu"))
    _by_features(out, weights, lookup)
    return out


def _block_elements() -> int:
    return configs.cpu("lookup_block_elements", _BLOCK_ELEMENTS) * torch.get_num_threads()


def _new(batch: int, columns: int) -> Tensor:
    return in_huge_pages(torch.empty(batch, columns, dtype=torch.float32, device="cpu"))


def _in_parts(loop: Callable[[], int], arguments: tuple[int, ...], many: bool) -> bool:
    """Run a loop, by all threads if there is much to do; whether it found nothing bad."""
    threads = torch.get_num_threads()
    # more parts than threads, so that none waits long for another
    parts = 4 * threads if many and threads > 1 else 1
    job = array("q", (parts, 0, 0, *arguments))
    divide = call if parts == 1 else spread
    divide(loop(), job.buffer_info()[0])
    return not job[2]


def _by_samples(weights: Tensor, lookup: Lookup) -> Tensor:
    """Short bags of tables of one dim: the few ids are brought into the order of the output."""
    offsets, features, dim = lookup.offsets, lookup.features, lookup.dims[0]
    count = features.shape[0]
    batch = batch_size(offsets, count)
    anchor = int(features[:, BASE].min())
    rows = int((features[:, BASE] - anchor + features[:, ROWS] * dim).max()) // dim
    lengths = offsets.diff().view(count, batch)  # [F, B]
    linear, bags, scale = _in_sample_order(lookup, lengths, anchor)
    table = table_rows(weights, anchor, rows, dim)  # [rows, D], all tables side by side
    if batch * count * dim * 4 < HUGE_PAGE:
        out = bag_sums(table, linear, bags, scale).view(batch, count * dim)
    else:
        out, samples = _new(batch, count * dim), max(1, _block_elements() // (count * dim))
        for low in range(0, batch, samples):
            bounds = bags[low * count : (low + samples) * count + 1]  # [samples * F + 1]
            begin, end = int(bounds[0]), int(bounds[-1])
            p = None if scale is None else scale[begin:end]
            out[low : low + samples].view(-1, dim).copy_(bag_sums(table, linear[begin:end], bounds - begin, p))
    averaged = features[:, MEAN] != 0
    if bool(averaged.any()):
        out.view(batch, count, dim).div_(torch.where(averaged, lengths.t().clamp(min=1), 1)[:, :, None])
    return out


def _in_sample_order(lookup: Lookup, lengths: Tensor, anchor: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Rows of W from element `anchor`, bag offsets and weights, bag (b, f) at b * F + f; lengths [F, B]."""
    indices, offsets, scale, features, *_ = lookup
    dim = lookup.dims[0]
    count, batch = lengths.shape
    end = int(offsets[-1])
    if end == count * batch and bool((lengths == 1).all()):
        ids = indices[:end].view(count, batch)
        smallest, largest = ids.aminmax(dim=1)
        if bool((smallest >= 0).all()) and bool((largest < features[:, ROWS]).all()):
            linear = ids + ((features[:, BASE] - anchor) // dim)[:, None]
            return linear.t().reshape(-1), offsets, None if scale is None else scale[:end].view_as(ids).t().reshape(-1)
    linear, valid = linear_rows(indices[:end], offsets, batch, features, anchor, dim)
    in_order = lengths.t().reshape(-1)  # [B * F]
    bags = torch.cat([in_order.new_zeros(1), in_order.cumsum(0)])  # [B * F + 1]
    shift = offsets[:-1].view(count, batch).t().reshape(-1) - bags[:-1]  # [B * F] from a place of the result to its id
    order = shift.repeat_interleave(in_order, output_size=end) + torch.arange(end, device="cpu")  # [N]
    linear, scale = linear[order], None if scale is None else scale[order]
    if bool(valid.all()):
        return linear, bags, scale
    return _without_bad(linear, bags, scale, valid[order])


def _without_bad(
    ids: Tensor, bags: Tensor, scale: Tensor | None, valid: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Bags without bad ids: a zero weight would not do where the row that it multiplies holds an Inf."""
    bags = torch.cat([bags.new_zeros(1), valid.cumsum(0)])[bags]
    return ids[valid], bags, None if scale is None else scale[valid]


def _by_features(out: Tensor, weights: Tensor, lookup: Lookup) -> None:
    """Longer bags, or tables of several dims: the sums of a block are brought into the order of the output."""
    indices, offsets, scale, features, *_ = lookup
    dims = lookup.dims
    batch, columns = out.shape[0], column_offsets(dims)
    tables = features.tolist()
    bounds = offsets[::batch].tolist() if batch else []
    for f, count, low, high in _blocks(dims, batch, bounds):
        dim, block_tables, cuts = dims[f], tables[f : f + count], bounds[f : f + count + 1]
        bags = offsets[f * batch + low : (f + count - 1) * batch + high + 1]  # [count * samples + 1]
        begin, end = int(bags[0]), int(bags[-1])
        ids, bags, p = indices[begin:end], bags - begin, None if scale is None else scale[begin:end]
        anchor = min(table[BASE] for table in block_tables)
        stop = max(table[BASE] + table[ROWS] * dim for table in block_tables)
        kept, valid = bags, None
        if count > 1 and _inside(ids, cuts, [table[ROWS] for table in block_tables]):
            ids = ids.to(torch.int64, copy=True)
            _add_each(ids, cuts, [(table[BASE] - anchor) // dim for table in block_tables])
        elif count > 1:
            ids, valid = linear_rows(ids, bags, batch, features[f : f + count], anchor, dim)
        elif not _all_in(ids, block_tables[0][ROWS]):
            valid = (ids >= 0) & (ids < block_tables[0][ROWS])
        if valid is not None and not bool(valid.all()):
            ids, kept, p = _without_bad(ids, bags, p, valid)
        sums = bag_sums(table_rows(weights, anchor, (stop - anchor) // dim, dim), ids, kept, p)
        sums = sums.view(count, high - low, dim)
        if any(table[MEAN] for table in block_tables):
            counts = bags.diff().clamp(min=1).view(count, -1)  # [count, samples]
            sums /= torch.where(features[f : f + count, MEAN, None] != 0, counts, 1)[:, :, None]
        out[low:high, columns[f] : columns[f + count]].view(high - low, count, dim).copy_(sums.transpose(0, 1))


def _blocks(dims: Sequence[int], batch: int, bounds: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """(first feature, features, first sample, end of samples): one feature, or all samples of some of equal dim."""
    f, few = 0, configs.cpu("lookup_few_ids", _FEW_IDS)
    while batch and f < len(dims):
        samples, count = max(1, _block_elements() // dims[f]), 1
        while (
            f + count < len(dims)
            and dims[f + count] == dims[f]
            and (count + 1) * batch <= samples
            and bounds[f + count + 1] - bounds[f] <= few * (count + 1)
        ):
            count += 1
        for low in range(0, batch, samples):
            yield f, count, low, min(low + samples, batch)
        f += count


def ids_are_good(indices: Tensor, offsets: Tensor, features: Tensor, padded: bool) -> bool:
    """Whether `check_ids_ref` would find nothing wrong, by few passes over ids [N] and offsets [F*B + 1].

    Features are [F, 8].

    Raises:
        ValueError: the offsets do not divide among the features.
    """
    count, ids, loops = features.shape[0], indices.shape[0], _loops()
    batch = batch_size(offsets, count)
    if loops is not None and indices.dtype in _INDEX and offsets.dtype in _INDEX:
        # kept by these names as long as the loop has their addresses
        indices, offsets, features = indices.contiguous(), offsets.contiguous(), features.contiguous()
        arguments = (
            indices.data_ptr(), indices.itemsize, offsets.data_ptr(), offsets.itemsize, features.data_ptr(),
            count, batch, ids, int(padded),
        )  # fmt: skip
        return _in_parts(loops.ids_are_good, arguments, ids > configs.cpu("check_alone_ids", _ALONE_IDS))
    end = int(offsets[-1])
    if not offsets_are_good(offsets, ids, padded):
        return False
    indices, rows = indices[:end], features[:, ROWS].tolist()
    if _all_in(indices, min(rows)):
        return True
    bounds = offsets[::batch].tolist()
    if end < _FEW_IDS * count:
        return _inside(indices, bounds, rows)
    return all(_all_in(indices[bounds[f] : bounds[f + 1]], rows[f]) for f in range(count))


def offsets_are_good(offsets: Tensor, ids: int, padded: bool) -> bool:
    """Whether offsets [n] go from 0 to the number of ids (with `padded`, at most to it) without a fall."""
    if offsets.shape[0] <= _FEW_OFFSETS:
        numbers: list[int] = offsets.tolist()
        end = numbers[-1]
        return numbers[0] == 0 and (end <= ids if padded else end == ids) and sorted(numbers) == numbers
    end = int(offsets[-1])
    reaches = end <= ids if padded else end == ids
    # compared and not subtracted: a difference of 2**63 or more comes back negative, or a fall as a rise
    return int(offsets[0]) == 0 and reaches and not bool((offsets[1:] < offsets[:-1]).any())


def _all_in(ids: Tensor, rows: int) -> bool:
    """Whether all ids lie in [0, rows)."""
    if ids.shape[0] == 0:
        return True
    smallest, largest = torch.aminmax(ids)
    return int(smallest) >= 0 and int(largest) < rows


def _inside(ids: Tensor, bounds: Sequence[int], rows: Sequence[int]) -> bool:
    """Whether ids bounds[f] ... bounds[f + 1] - 1, of [bounds[0], bounds[-1]), lie in [0, rows[f]), for all f."""
    if ids.shape[0] == 0:
        return True
    most = torch.iinfo(ids.dtype).max
    # rows[f] - 1 - id: it or the id itself has a sign where the id lies outside
    left = ids.neg()
    _add_each(left, bounds, [min(n - 1, most) for n in rows])
    return int(left.bitwise_or_(ids).min()) >= 0


def _add_each(ids: Tensor, bounds: Sequence[int], numbers: Sequence[int]) -> None:
    """Add numbers[f] to the ids from bounds[f] to bounds[f + 1], in place."""
    torch._foreach_add_(torch.split(ids, [end - begin for begin, end in pairwise(bounds)]), list(numbers))


def bag_sums(matrix: Tensor, rows: Tensor, bags: Tensor, scale: Tensor | None) -> Tensor:
    """Sum over each bag of scale[i] * matrix[rows[i]] in fp32: rows [n], bags [m + 1] from 0 to n -> [m, dim]."""
    if matrix.dtype is not torch.float32:
        # embedding_bag rounds to the table's dtype: gather in fp32 and sum those rows instead
        matrix, rows = matrix[rows].float(), torch.arange(rows.shape[0], device=rows.device)
    if bags.shape[0] == 1 or rows.shape[0] == 0:
        return matrix.new_zeros(bags.shape[0] - 1, matrix.shape[1])
    # a strided scale would send embedding_bag down another path, with other bits
    scale = None if scale is None else scale.contiguous()
    # what torch.nn.functional does before it costs as much as a small bag's sum
    return torch.embedding_bag(matrix, rows, bags.to(rows.dtype), False, 0, False, scale, True)[0]

"""Divide the ids of a batch among buckets (ranks, shards) that each own a block of every feature's rows.

Shapes: L [F*B] lengths (of bags; features may have batches of their own), I [N] ids, P [N] per-id weights,
S [F] rows of a block; K buckets; the result: lengths [K*F*B], bucket the slowest, and ids, weights [N] in that order.
Bytes moved by the kernels: the first N * (2 itemsize(I) + 1 + itemsize(bag)), the sort of one byte an id (two for more
than 255 buckets, four for more than 32767) 2N * (1 + 8), the second N * (8 + 1 + 2 itemsize(I) + itemsize(bag)),
2N * itemsize(P), N * itemsize(I) for each of positions and permutation, and 8 * K*F*B for the lengths.
Ids are in bag order already: one stable sort by bucket brings them into bucket order, without any atomics.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._op import (
    INTERPRETED,
    direct,
    register,
    register_autograd,
    runs_kernel,
    tl,
    triton,
)
from ..cpu import buckets as cpu_buckets
from ..cpu.buckets import Batch
from ..lookup.bounds import require_ids
from ..memory import MANY, require_memory, require_sortable

# a thread has one id: of more, gathers and what is read in order would want different tiles
_BLOCK = 64 if INTERPRETED else 128
# numbers that Python compares sooner than torch does
_FEW = 256
_Outputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


class Bucketized(NamedTuple):
    """A batch in bucket order: lengths [K*F*B], ids [N], and what was asked for besides."""

    lengths: Tensor
    ids: Tensor
    weights: Tensor | None
    positions: Tensor | None  # [N] place of each id in its bag before, in the new order
    unbucketize_permute: Tensor | None  # [N] where each id of the old order lies in the new one


def block_bucketize_ref(
    lengths: Tensor,
    ids: Tensor,
    block_sizes: Tensor,
    num_buckets: int,
    *,
    weights: Tensor | None = None,
    batch_sizes: Tensor | None = None,
    bucketize_pos: bool = False,
    sequence: bool = False,
    keep_orig_idx: bool | Tensor = False,
    block_bucketize_pos: Sequence[Tensor] | None = None,
    total_num_blocks: Tensor | None = None,
) -> Bucketized:
    """A stable sort by (bucket, bag); arguments that are tensors lie on the device of the ids."""
    bags, features = lengths.shape[0], block_sizes.shape[0]
    bag = torch.arange(bags, device=ids.device).repeat_interleave(lengths)
    counts = bags // max(features, 1) if batch_sizes is None else batch_sizes
    f = torch.arange(features, device=ids.device).repeat_interleave(counts)[bag]
    borders = None if block_bucketize_pos is None else torch.stack(list(block_bucketize_pos)).long()
    bucket, local = _divide(ids, f, block_sizes, num_buckets, borders, total_num_blocks)
    keep = torch.as_tensor(keep_orig_idx, device=ids.device).expand(features)[f]
    key = bucket * bags + bag
    order = torch.argsort(key, stable=True)
    starts = lengths.cumsum(0) - lengths
    place = torch.arange(ids.shape[0], device=ids.device)
    return Bucketized(
        torch.bincount(key, minlength=num_buckets * bags).to(lengths.dtype),
        torch.where(keep, ids, local)[order].to(ids.dtype),
        None if weights is None else weights[order],
        (place - starts[bag])[order].to(ids.dtype) if bucketize_pos else None,
        torch.empty_like(place).scatter_(0, order, place).to(ids.dtype) if sequence else None,
    )


def _divide(
    ids: Tensor, f: Tensor, block_sizes: Tensor, buckets: int, borders: Tensor | None, totals: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Bucket of each id of features `f`, and its row there: [N] int64. Bad ids stay as they are, in bucket 0."""
    id = ids.long().clamp(min=0)
    block = block_sizes.long()[f]
    blocks = buckets if totals is None else totals.long()[f]
    if borders is not None:
        # a block of 0 rows: ids are raw, and are divided by their remainder in proportion to the borders
        inside = torch.where(block == 0, id % blocks * borders[f, -1] // blocks, id)
        bucket = _borders_passed(borders[:, 1:], f, inside)
        local = id - borders[f, bucket.clamp(max=buckets - 1)]
        outside = bucket >= buckets
        bucket, local = torch.where(outside, id % buckets, bucket), torch.where(outside, id // buckets, local)
        local = torch.where(block == 0, id // blocks, local)
    else:
        size = block * (1 if totals is None else blocks // buckets)
        bucket = id // size.clamp(min=1)
        outside = (bucket >= buckets) | (block == 0)
        local = torch.where(outside, id // blocks, id - bucket * size)
        remainder = id % blocks if totals is None else id % blocks // (blocks // buckets)
        bucket = torch.where(outside, remainder, bucket)
    return torch.where(ids < 0, 0, bucket), torch.where(ids < 0, ids.long(), local)


def _borders_passed(borders: Tensor, f: Tensor, ids: Tensor) -> Tensor:
    """How many of their feature's borders [F, K] ids [N] have reached."""
    beyond = int(borders.max()) + 1 if borders.numel() else 1
    if beyond * borders.shape[0] >= 2**63:
        return (borders[f] <= ids[:, None]).sum(1)
    # feature after feature, borders are sorted as a whole
    shifts = torch.arange(borders.shape[0], device=ids.device) * beyond
    passed = torch.searchsorted(
        (borders + shifts[:, None]).flatten(), ids.clamp(max=beyond - 1) + shifts[f], right=True
    )  # fmt: skip
    return passed - f * borders.shape[1]


def block_bucketize(
    lengths: Tensor,
    ids: Tensor,
    block_sizes: Tensor,
    num_buckets: int,
    *,
    weights: Tensor | None = None,
    batch_sizes: Tensor | Sequence[int] | None = None,
    bucketize_pos: bool = False,
    sequence: bool = False,
    keep_orig_idx: bool | Sequence[bool] | Tensor = False,
    block_bucketize_pos: Sequence[Tensor] | None = None,
    total_num_blocks: Tensor | Sequence[int] | None = None,
) -> Bucketized:
    """Divide ids among buckets that each own a block of rows; differentiable in `weights`.

    Bucket k owns rows [k * S_f, (k + 1) * S_f) of feature f, and its ids count from the block's first row. Ids of one
    (bucket, feature, sample) keep their order. An id past all blocks goes to bucket id % K as id // K, and so do all
    ids of a feature whose block size is 0: ids that are yet to be hashed. A negative id raises on the CPU; on CUDA it
    goes to bucket 0 as it is, where the lookup's check of ids finds it. Ids past the last bag come last, in no bucket.

    Shapes: lengths [F*B], ids [N], block_sizes [F], all int32 or int64; weights [N].

    Args:
        batch_sizes: [F] samples of each feature where they differ; they add up to len(lengths).
        bucketize_pos: return the place of each id in its bag before.
        sequence: return the permutation that brings rows of the new order back: `rows[unbucketize_permute]`.
        keep_orig_idx: leave ids as they are; one bool, or one for each feature [F].
        block_bucketize_pos: for each feature the K + 1 rows where its blocks begin and the last one ends, [0, ..., R].
            Blocks of uneven size; block_sizes then only says by 0 which features have raw ids.
        total_num_blocks: [F] blocks of each feature where a bucket owns several: multiples of K.

    Returns:
        lengths [K*F*B] in lengths' type, ids [N], weights [N] or None, positions and permutation [N] in ids' type or
        None.

    Raises:
        ValueError: shapes that do not fit; on the CPU also lengths that are negative or do not add up to N, negative
            ids or block sizes, borders that do not begin at 0 or decrease, and total_num_blocks that do not divide.
        TypeError: ids, lengths or block sizes that are not integers.
    """
    check_bags(lengths, ids, block_sizes, num_buckets, weights)
    ends = totals = borders = keep = None
    if batch_sizes is not None:
        ends = ends_of_features(batch_sizes, lengths, block_sizes)
    elif lengths.shape[0] % block_sizes.shape[0] if block_sizes.shape[0] else lengths.shape[0]:
        raise ValueError(f"{lengths.shape[0]} lengths do not divide among {block_sizes.shape[0]} block_sizes")
    if total_num_blocks is not None:
        totals = blocks_of_features(total_num_blocks, block_sizes, num_buckets)
    if block_bucketize_pos is not None:
        borders = stacked_borders(block_bucketize_pos, block_sizes, num_buckets)
    if not isinstance(keep_orig_idx, bool):
        keep = of_features(keep_orig_idx, "keep_orig_idx", block_sizes)
        keep_orig_idx = False
    trained = weights is not None and weights.requires_grad and torch.is_grad_enabled()
    call = _block_bucketize if direct(lengths, ids, block_sizes, weights) else torch.ops.shardwise.block_bucketize
    new_weights, new_lengths, new_ids, positions, permute = call(
        lengths, ids, block_sizes, num_buckets, weights, ends, totals, borders, keep_orig_idx, keep, bucketize_pos,
        sequence or trained,
    )  # fmt: skip
    return Bucketized(
        new_lengths,
        new_ids,
        None if weights is None else new_weights,
        positions if bucketize_pos else None,
        permute if sequence else None,
    )


@triton.jit
def _last_at_most(starts, count, x, steps):  # type: ignore[no-untyped-def]
    """How many of `count` sorted numbers are at most x. steps >= log2(count) + 1."""
    low = x * 0
    high = low + count
    for _ in range(0, steps):
        middle = (low + high) // 2
        inside = middle < high
        right = inside & (tl.load(starts + middle, mask=inside, other=0) <= x)
        low = tl.where(right, middle + 1, low)
        high = tl.where(inside & (right == 0), middle, high)
    return low


@triton.jit(do_not_specialize=["N", "bags", "B", "bag_steps"], do_not_specialize_on_alignment=["I"])
def _bucket_of_id_kernel(  # type: ignore[no-untyped-def]
    I,
    ends_of_bags,
    S,
    ends,
    totals,
    borders,
    keep,
    bucket,
    bag,
    local,
    N,
    bags,
    F,
    B,
    K,
    bag_steps,
    KEEP: tl.constexpr,
    FEATURE_STEPS: tl.constexpr,
    BUCKET_STEPS: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    HAS_TOTALS: tl.constexpr,
    HAS_BORDERS: tl.constexpr,
    HAS_KEEP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = position < N
    id = tl.load(I + position, mask=here, other=0).to(tl.int64)
    b = _last_at_most(ends_of_bags, bags, position, bag_steps)
    f = _last_at_most(ends, F, b, FEATURE_STEPS) if HAS_ENDS else b // B
    live = here & (b < bags) & (f < F)
    good = live & (id >= 0)
    block = tl.load(S + f, mask=good, other=1).to(tl.int64)
    blocks = tl.zeros_like(id) + K
    size = block
    each = tl.zeros_like(id) + 1
    if HAS_TOTALS:
        each = tl.maximum(tl.load(totals + f, mask=good, other=1) // K, 1)
        blocks = each * K
        size = block * each
    if HAS_BORDERS:
        begins = borders + f * (K + 1)
        last = tl.load(begins + K, mask=good, other=1)
        inside = tl.where(block == 0, id % blocks * last // blocks, id)
        low = id * 0
        high = low + K
        for _ in tl.static_range(BUCKET_STEPS):
            middle = (low + high) // 2
            going = middle < high
            # the end of bucket number `middle`
            right = going & (tl.load(begins + middle + 1, mask=good & going, other=0) <= inside)
            low = tl.where(right, middle + 1, low)
            high = tl.where(going & (right == 0), middle, high)
        outside = low >= K
        k = tl.where(outside, id % K, low)
        row = tl.where(outside, id // K, id - tl.load(begins + low, mask=good & (low < K), other=0))
        row = tl.where(block == 0, id // blocks, row)
    else:
        k = id // tl.maximum(size, 1)
        outside = (k >= K) | (block <= 0)
        row = tl.where(outside, id // blocks, id - k * size)
        k = tl.where(outside, id % blocks // each, k)
    k = tl.where(id < 0, 0, k)
    row = tl.where(id < 0, id, row)
    if HAS_KEEP:
        row = tl.where(tl.load(keep + f, mask=live, other=1) != 0, id, row)
    if KEEP:
        row = id
    # ids of no bag come last, behind all buckets
    tl.store(bucket + position, tl.where(live, k, K).to(bucket.dtype.element_ty), mask=here)
    tl.store(bag + position, tl.where(live, b, 0).to(bag.dtype.element_ty), mask=here)
    tl.store(local + position, tl.where(live, row, id).to(local.dtype.element_ty), mask=here)


@triton.jit(do_not_specialize=["N", "bags"], do_not_specialize_on_alignment=["P"])
def _place_in_buckets_kernel(  # type: ignore[no-untyped-def]
    source,
    bucket,
    bag,
    local,
    ends_of_bags,
    P,
    new_ids,
    new_weights,
    positions,
    permute,
    begins,
    ends,
    N,
    bags,
    K,
    HAS_WEIGHTS: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_PERMUTE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = place < N
    s = tl.load(source + place, mask=here, other=0)
    k = tl.load(bucket + place, mask=here, other=0).to(tl.int64)
    b = tl.load(bag + s, mask=here, other=0).to(tl.int64)
    tl.store(new_ids + place, tl.load(local + s, mask=here, other=0), mask=here)
    if HAS_WEIGHTS:
        tl.store(new_weights + place, tl.load(P + s, mask=here, other=0), mask=here)
    if HAS_POSITIONS:
        first = tl.load(ends_of_bags + b - 1, mask=here & (b > 0), other=0)
        tl.store(positions + place, (s - first).to(positions.dtype.element_ty), mask=here)
    if HAS_PERMUTE:
        tl.store(permute + s, place.to(permute.dtype.element_ty), mask=here)
    # the first and the last id of a (bucket, bag) say how many it has
    run = k * bags + b
    before = here & (place > 0)
    k_before = tl.load(bucket + place - 1, mask=before, other=0).to(tl.int64)
    b_before = tl.load(bag + tl.load(source + place - 1, mask=before, other=0), mask=before, other=0).to(tl.int64)
    after = place + 1 < N
    k_after = tl.load(bucket + place + 1, mask=after, other=0).to(tl.int64)
    b_after = tl.load(bag + tl.load(source + place + 1, mask=after, other=0), mask=after, other=0).to(tl.int64)
    counted = here & (k < K)
    opens = counted & ((place == 0) | (k_before * bags + b_before != run))
    closes = counted & ((place == N - 1) | (k_after * bags + b_after != run))
    tl.store(begins + run, place.to(begins.dtype.element_ty), mask=opens)
    tl.store(ends + run, (place + 1).to(ends.dtype.element_ty), mask=closes)


def _block_bucketize(
    lengths: Tensor,
    ids: Tensor,
    block_sizes: Tensor,
    num_buckets: int,
    weights: Tensor | None,
    ends: Tensor | None,
    totals: Tensor | None,
    borders: Tensor | None,
    keep_all: bool,
    keep: Tensor | None,
    with_positions: bool,
    with_permute: bool,
) -> _Outputs:
    """Weights, the one output with a gradient, lengths, ids, positions and permutation; empty where not wanted."""
    lengths, ids, block_sizes = lengths.contiguous(), ids.contiguous(), block_sizes.contiguous()
    weights = None if weights is None else weights.contiguous()
    if num_buckets > MANY // max(lengths.numel(), 1):
        require_memory(f"num_buckets {num_buckets}", (num_buckets, lengths.shape[0]), lengths.dtype, lengths.device)
    if not runs_kernel(ids):
        batch = Batch(lengths, ids, block_sizes, num_buckets, weights, ends, totals, borders, keep_all, keep)
        return _block_bucketize_torch(batch, with_positions, with_permute)
    require_sortable("block_bucketize", "ids", ids)
    n, bags, features, device = ids.shape[0], lengths.shape[0], block_sizes.shape[0], ids.device
    new_ids, new_weights, positions, permute = _outputs(ids, weights, with_positions, with_permute)
    counted = torch.zeros(2, num_buckets * bags, dtype=lengths.dtype, device=device)
    if n == 0 or features == 0 or bags == 0:
        return new_weights, counted[0].clone(), new_ids, positions, permute
    ends_of_bags = lengths.cumsum(0)
    bucket = torch.empty(n, dtype=_bucket_dtype(num_buckets), device=device)
    bag = torch.empty(n, dtype=torch.int32 if bags < 2**31 else torch.int64, device=device)
    local = torch.empty_like(ids)
    grid = (triton.cdiv(n, _BLOCK),)
    _bucket_of_id_kernel[grid](
        ids, ends_of_bags, block_sizes, _or(ends, ids), _or(totals, ids), _or(borders, ids), _or(keep, ids),
        bucket, bag, local, n, bags, features, max(bags // features, 1), num_buckets,
        bags.bit_length() + 1, keep_all, features.bit_length() + 1, num_buckets.bit_length() + 1,
        ends is not None, totals is not None, borders is not None, keep is not None, _BLOCK,
    )  # fmt: skip
    bucket, source = torch.sort(bucket, stable=True)
    _place_in_buckets_kernel[grid](
        source, bucket, bag, local, ends_of_bags, _or(weights, ids), new_ids, new_weights, positions, permute,
        counted[0], counted[1], n, bags, num_buckets, weights is not None, with_positions, with_permute, _BLOCK,
    )  # fmt: skip
    return new_weights, counted[1] - counted[0], new_ids, positions, permute


def _or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """The tensor, or any other in the place of one that the kernel will not read."""
    return other if tensor is None else tensor


def _bucket_dtype(buckets: int) -> torch.dtype:
    """The narrowest type of a bucket's number and of one more: the sort has a pass for each byte."""
    return torch.uint8 if buckets < 2**8 else torch.int16 if buckets < 2**15 else torch.int32


def _outputs(
    ids: Tensor, weights: Tensor | None, positions: bool, permute: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, weights, positions and permutation, empty where not wanted."""
    return (
        torch.empty_like(ids),
        ids.new_empty(0) if weights is None else torch.empty_like(weights),
        torch.empty_like(ids) if positions else ids.new_empty(0),
        torch.empty_like(ids) if permute else ids.new_empty(0),
    )


def _block_bucketize_torch(batch: Batch, with_positions: bool, with_permute: bool) -> _Outputs:
    """On the CPU one thread or more of compiled loops, or the reference with a sort of one byte an id."""
    lengths, ids, block_sizes, num_buckets, weights, ends, totals, borders, keep_all, keep = batch
    loop = cpu_buckets.loops() if ids.is_cpu and ids.shape[0] < 2**31 and num_buckets < 2**31 else None
    if loop is not None:
        new_ids, new_weights, positions, permute = _outputs(ids, weights, with_positions, with_permute)
        new_lengths = torch.empty(num_buckets * lengths.shape[0], dtype=lengths.dtype, device="cpu")
        outputs = new_weights, new_lengths, new_ids, positions, permute
        if cpu_buckets.bucketize(loop, batch._replace(block_sizes=block_sizes.long()), outputs) != ids.shape[0]:
            raise_bad_values(lengths, ids, block_sizes)
        return outputs
    n, bags, features, device = ids.shape[0], lengths.shape[0], block_sizes.shape[0], ids.device
    if ids.is_cpu:
        raise_bad_values(lengths, ids, block_sizes)
    bag = torch.arange(bags, device=device).repeat_interleave(lengths, output_size=n)  # [N]
    f = (
        _feature_of_bag(lengths, features, ends)[bag]
        if borders is not None or totals is not None or keep is not None
        else None
    )
    divided = None
    if f is None:
        divided = _divide_inside(lengths, ids, block_sizes, num_buckets, ends)
    if divided is None:
        f = _feature_of_bag(lengths, features, ends)[bag] if f is None else f
        divided = _divide(ids, f, block_sizes, num_buckets, borders, totals)
    bucket, local = divided  # [N], [N]
    if keep_all:
        local = ids
    elif keep is not None and f is not None:
        local = torch.where(keep.bool()[f], ids, local)
    counts = torch.bincount(torch.add(bag, bucket, alpha=bags), minlength=num_buckets * bags).to(lengths.dtype)
    order = _stable_order(bucket, num_buckets)  # [N] positions, bucket by bucket
    none = (ids.new_empty(0), ids.new_empty(0), ids.new_empty(0))
    new_weights, positions, permute = none
    if weights is not None:
        new_weights = weights[order]
    if with_positions:
        starts = lengths.cumsum(0) - lengths  # [F*B]
        positions = (torch.arange(n, device=device) - starts[bag])[order].to(ids.dtype)
    if with_permute:
        permute = torch.empty_like(ids).scatter_(0, order, torch.arange(n, dtype=ids.dtype, device=device))
    return new_weights, counts, local[order].to(ids.dtype), positions, permute


def _feature_of_bag(lengths: Tensor, features: int, ends: Tensor | None) -> Tensor:
    """[F*B] int64."""
    bags, feature = lengths.shape[0], torch.arange(features, device=lengths.device)
    if ends is None:
        return feature.repeat_interleave(bags // max(features, 1), output_size=bags)
    return feature.repeat_interleave(ends.diff(prepend=ends.new_zeros(1)), output_size=bags)


def _divide_inside(
    lengths: Tensor, ids: Tensor, block_sizes: Tensor, buckets: int, ends: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """`_divide` in fewer steps, for ids that all lie in their blocks; None where one does not, or on a GPU."""
    features = block_sizes.shape[0]
    if not ids.is_cpu or not features or ends is not None:
        return None
    per_feature = lengths.view(features, -1).sum(1)  # [F]
    size = block_sizes.long().clamp(min=1).repeat_interleave(per_feature, output_size=ids.shape[0])  # [N]
    bucket = torch.div(ids, size, rounding_mode="trunc")
    if bucket.numel() and (int(bucket.max()) >= buckets or int(block_sizes.min()) < 1):
        return None
    return bucket, torch.addcmul(ids, bucket, size, value=-1)


def _stable_order(bucket: Tensor, buckets: int) -> Tensor:
    """The stable argsort [N] of bucket numbers."""
    narrow = bucket.to(_bucket_dtype(buckets))
    if narrow.is_cpu and importlib.util.find_spec("numpy") is not None:
        # of one or two bytes numpy's is a radix sort, 9 times as fast as torch's
        return torch.from_numpy(narrow.numpy().argsort(kind="stable"))
    return torch.argsort(narrow, stable=True)


def _fake(
    lengths: Tensor,
    ids: Tensor,
    block_sizes: Tensor,
    num_buckets: int,
    weights: Tensor | None,
    ends: Tensor | None,
    totals: Tensor | None,
    borders: Tensor | None,
    keep_all: bool,
    keep: Tensor | None,
    with_positions: bool,
    with_permute: bool,
) -> _Outputs:
    new_ids, new_weights, positions, permute = _outputs(ids, weights, with_positions, with_permute)
    return new_weights, lengths.new_empty(num_buckets * lengths.shape[0]), new_ids, positions, permute


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: _Outputs) -> None:
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(output[4])


def _backward(ctx: Any, grad: Tensor | None, *_: Tensor | None) -> tuple[Any, ...]:
    (permute,) = ctx.saved_tensors
    # each id has one place: a gather, no sums
    of_weights = None if grad is None or not ctx.needs_input_grad[4] else grad.index_select(0, permute)
    return (None,) * 4 + (of_weights,) + (None,) * 7


register_autograd(
    register(
        "block_bucketize(Tensor lengths, Tensor ids, Tensor block_sizes, SymInt num_buckets, Tensor? weights,"
        " Tensor? ends, Tensor? totals, Tensor? borders, bool keep_all, Tensor? keep, bool with_positions,"
        " bool with_permute) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
        _block_bucketize,
        _fake,
    ),
    _backward,
    _setup_context,
)


def check_bags(lengths: Tensor, ids: Tensor, block_sizes: Tensor, buckets: int, weights: Tensor | None) -> None:
    """Raise for what no batch can be, whatever its values are."""
    for name, tensor in (("lengths", lengths), ("ids", ids), ("block_sizes", block_sizes)):
        require_ids(name, tensor)
        if tensor.dim() != 1:
            raise ValueError(f"{name} must have one dimension, got shape {tuple(tensor.shape)}")
        if tensor.device != ids.device:
            raise ValueError(f"{name} is on {tensor.device}, ids on {ids.device}")
    if weights is not None:
        if weights.shape != ids.shape:
            raise ValueError(f"weights must have shape {tuple(ids.shape)} as ids, got {tuple(weights.shape)}")
        if weights.device != ids.device:
            raise ValueError(f"weights is on {weights.device}, ids on {ids.device}")
    if buckets < 1:
        raise ValueError(f"num_buckets must be positive, got {buckets}")
    if block_sizes.shape[0] == 0 and ids.shape[0] and not lengths.shape[0]:
        raise ValueError(f"{ids.shape[0]} ids of 0 features")


def of_features(numbers: Tensor | Sequence[int], name: str, block_sizes: Tensor) -> Tensor:
    """Integers [F] of features, int64 on the device of the block sizes."""
    tensor = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=torch.int64, device="cpu")
    if tensor.is_floating_point() or tensor.is_complex():
        raise TypeError(f"{name} must be integers, got {tensor.dtype}")
    if tensor.shape != block_sizes.shape:
        raise ValueError(f"{name} must have shape {tuple(block_sizes.shape)}, got {tuple(tensor.shape)}")
    return tensor.to(block_sizes.device, torch.int64, non_blocking=True).contiguous()


def ends_of_features(batch_sizes: Tensor | Sequence[int], lengths: Tensor, block_sizes: Tensor) -> Tensor:
    """Number of bags up to the end of each feature."""
    sizes = of_features(batch_sizes, "batch_sizes", block_sizes)
    ends = sizes.cumsum(0)
    # values on a device are not looked at: the kernel keeps to the features there are
    if sizes.is_cpu and not torch.compiler.is_compiling():
        # few numbers: Python adds them sooner than torch begins to
        numbers = sizes.tolist()
        if min(numbers, default=0) < 0:
            raise ValueError(f"batch_sizes must not be negative, got {numbers}")
        if sum(numbers) != lengths.shape[0]:
            raise ValueError(f"batch_sizes add up to {sum(numbers)}, but there are {lengths.shape[0]} lengths")
    return ends


def blocks_of_features(totals: Tensor | Sequence[int], block_sizes: Tensor, buckets: int) -> Tensor:
    """Blocks of each feature, [F], of which each bucket has as many."""
    blocks = of_features(totals, "total_num_blocks", block_sizes)
    if not blocks.is_cpu or torch.compiler.is_compiling():
        return blocks
    if blocks.numel() <= _FEW:
        bad = any(number < buckets or number % buckets for number in blocks.tolist())
    else:
        bad = bool(((blocks < buckets) | (blocks % buckets != 0)).any())
    if bad:
        raise ValueError(f"total_num_blocks must be positive multiples of {buckets} buckets, got {blocks.tolist()}")
    return blocks


def stacked_borders(borders: Sequence[Tensor], block_sizes: Tensor, buckets: int) -> Tensor:
    """Borders of all features, [F, K + 1] int64."""
    if len(borders) != block_sizes.shape[0]:
        raise ValueError(f"block_bucketize_pos must be of {block_sizes.shape[0]} features, got {len(borders)}")
    for f, border in enumerate(borders):
        if border.shape != (buckets + 1,):
            raise ValueError(
                f"block_bucketize_pos[{f}] must have {buckets + 1} borders of {buckets} buckets, got shape"
                f" {tuple(border.shape)}"
            )
        if border.is_floating_point():
            raise TypeError(f"block_bucketize_pos[{f}] must be integers, got {border.dtype}")
    if not borders:
        return block_sizes.new_zeros(0, buckets + 1, dtype=torch.int64)
    stacked = torch.stack(list(borders)).to(block_sizes.device, torch.int64, non_blocking=True)
    if not stacked.is_cpu or torch.compiler.is_compiling():
        return stacked
    # few numbers: Python compares them sooner than torch begins to
    if stacked.numel() <= _FEW and all(row[0] == 0 and sorted(row) == row for row in stacked.tolist()):
        return stacked
    bad = (stacked[:, 0] != 0) | (stacked[:, 1:] < stacked[:, :-1]).any(1)
    if bool(bad.any()):
        f = int(bad.nonzero()[0])
        raise ValueError(f"block_bucketize_pos[{f}] must begin at 0 and not decrease, got {stacked[f].tolist()}")
    return stacked


def raise_bad_values(lengths: Tensor, ids: Tensor, block_sizes: Tensor) -> None:
    """ValueError for a negative block size or id, or for lengths that are not the ids'; on the CPU."""
    if block_sizes.shape[0] and int(block_sizes.min()) < 0:
        f = int((block_sizes < 0).nonzero()[0])
        raise ValueError(f"block_sizes[{f}] is {int(block_sizes[f])}, block sizes must not be negative")
    if lengths.shape[0] and int(lengths.min()) < 0:
        bag = int((lengths < 0).nonzero()[0])
        raise ValueError(f"lengths[{bag}] is {int(lengths[bag])}, lengths must not be negative")
    # what is added up must not overflow
    if lengths.shape[0] and int(lengths.max()) > ids.shape[0]:
        bag = int(lengths.argmax())
        raise ValueError(f"lengths[{bag}] is {int(lengths[bag])} of {ids.shape[0]} ids")
    if int(lengths.sum()) != ids.shape[0]:
        raise ValueError(f"lengths add up to {int(lengths.sum())}, but there are {ids.shape[0]} ids")
    if ids.shape[0] and int(ids.min()) < 0:
        at = int((ids < 0).nonzero()[0])
        raise ValueError(f"ids[{at}] is {int(ids[at])}, ids must not be negative")

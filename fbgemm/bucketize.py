"""Ids divided among buckets (ranks), each of which owns blocks of every feature's rows.

Shapes: lengths [F * B] of bags, feature by feature; indices [N]; block_sizes [F]; `my_size` buckets. Features may have
batches of their own, `batch_size_per_feature` [F]; `max_B`, the largest of them, is not needed here.
Ids may be raw hashes: one below 0 is the unsigned number that has its bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise import kernels
from shardwise.kernels import Bucketized
from shardwise.kernels._op import INTERPRETED

from .registry import op

# what `kernels.block_bucketize` calls its arguments -> what the ops call them
_WORDS = {
    "ids": "indices",
    "batch_sizes": "batch_size_per_feature",
    "num_buckets": "my_size",
    "keep_orig_idx": "keep_orig_idx_per_feature",
}


def _fake(
    lengths: Tensor,
    indices: Tensor,
    bucketize_pos: bool,
    sequence: bool,
    block_sizes: Tensor,
    my_size: int,
    weights: Tensor | None = None,
    *_: object,
) -> Bucketized:
    """Outputs of the right shapes: values are not to be read."""
    del block_sizes
    return Bucketized(
        lengths.new_empty(my_size * lengths.numel()),
        torch.empty_like(indices),
        None if weights is None else torch.empty_like(weights),
        torch.empty_like(indices) if bucketize_pos else None,
        torch.empty_like(indices) if sequence else None,
    )


def _inference_fake(
    lengths: Tensor,
    indices: Tensor,
    bucketize_pos: bool,
    sequence: bool,
    block_sizes: Tensor,
    my_size: int,
    weights: Tensor | None = None,
    batch_size_per_feature: Tensor | None = None,
    max_B: int = -1,
    block_bucketize_pos: Sequence[Tensor] | None = None,
    return_bucket_mapping: bool = False,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    del batch_size_per_feature, max_B, block_bucketize_pos
    new = _fake(lengths, indices, bucketize_pos, sequence, block_sizes, my_size, weights)
    return *new[:5], torch.empty_like(indices) if return_bucket_mapping else None


def _weights_2d_fake(
    lengths: Tensor,
    indices: Tensor,
    bucketize_pos: bool,
    sequence: bool,
    block_sizes: Tensor,
    my_size: int,
    weights: Tensor,
    weights_dim: int = 1,
    *_: object,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    new = _fake(lengths, indices, bucketize_pos, sequence, block_sizes, my_size)
    return new.lengths, new.ids, weights.new_empty(indices.numel(), weights_dim), new.positions, new.unbucketize_permute


@op(
    "block_bucketize_sparse_features(Tensor lengths, Tensor indices, bool bucketize_pos, bool sequence,"
    " Tensor block_sizes, SymInt my_size, Tensor? weights=None, Tensor? batch_size_per_feature=None, SymInt max_B=-1,"
    " Tensor[]? block_bucketize_pos=None, bool keep_orig_idx=False, Tensor? total_num_blocks=None,"
    " Tensor? keep_orig_idx_per_feature=None) -> (Tensor, Tensor, Tensor?, Tensor?, Tensor?)",
    fake=_fake,
    differentiable=True,
    words=_WORDS,
)
def block_bucketize_sparse_features(
    lengths: Tensor,
    indices: Tensor,
    bucketize_pos: bool,
    sequence: bool,
    block_sizes: Tensor,
    my_size: int,
    weights: Tensor | None = None,
    batch_size_per_feature: Tensor | None = None,
    max_B: int = -1,
    block_bucketize_pos: Sequence[Tensor] | None = None,
    keep_orig_idx: bool = False,
    total_num_blocks: Tensor | None = None,
    keep_orig_idx_per_feature: Tensor | None = None,
) -> Bucketized:
    """Lengths [my_size * F * B], ids, weights, places in bags and the permutation back, each where it is asked for."""
    del max_B
    return _bucketize(
        lengths, indices, bucketize_pos, sequence, block_sizes, my_size, weights, batch_size_per_feature,
        block_bucketize_pos, keep_orig_idx, total_num_blocks, keep_orig_idx_per_feature,
    )  # fmt: skip


@op(
    "block_bucketize_sparse_features_inference(Tensor lengths, Tensor indices, bool bucketize_pos, bool sequence,"
    " Tensor block_sizes, SymInt my_size, Tensor? weights=None, Tensor? batch_size_per_feature=None, SymInt max_B=-1,"
    " Tensor[]? block_bucketize_pos=None, bool return_bucket_mapping=False, bool keep_orig_idx=False,"
    " Tensor? total_num_blocks=None, Tensor? keep_orig_idx_per_feature=None)"
    " -> (Tensor, Tensor, Tensor?, Tensor?, Tensor?, Tensor?)",
    fake=_inference_fake,
    differentiable=True,
    words=_WORDS,
)
def block_bucketize_sparse_features_inference(
    lengths: Tensor,
    indices: Tensor,
    bucketize_pos: bool,
    sequence: bool,
    block_sizes: Tensor,
    my_size: int,
    weights: Tensor | None = None,
    batch_size_per_feature: Tensor | None = None,
    max_B: int = -1,
    block_bucketize_pos: Sequence[Tensor] | None = None,
    return_bucket_mapping: bool = False,
    keep_orig_idx: bool = False,
    total_num_blocks: Tensor | None = None,
    keep_orig_idx_per_feature: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """What `block_bucketize_sparse_features` gives, and the bucket [N] of each id where it was."""
    del max_B
    new = _bucketize(
        lengths, indices, bucketize_pos, sequence or return_bucket_mapping, block_sizes, my_size, weights,
        batch_size_per_feature, block_bucketize_pos, keep_orig_idx, total_num_blocks, keep_orig_idx_per_feature,
    )  # fmt: skip
    mapping = None
    if return_bucket_mapping and new.unbucketize_permute is not None:
        ends = new.lengths.view(my_size, lengths.numel()).sum(1).cumsum(0)
        mapping = torch.searchsorted(ends, new.unbucketize_permute.long(), right=True).to(indices.dtype)
    return *new[:4], new.unbucketize_permute if sequence else None, mapping


@op(
    "block_bucketize_sparse_features_2d_weights(Tensor lengths, Tensor indices, bool bucketize_pos, bool sequence,"
    " Tensor block_sizes, SymInt my_size, Tensor weights, SymInt weights_dim=1, Tensor? batch_size_per_feature=None,"
    " SymInt max_B=-1, Tensor[]? block_bucketize_pos=None, bool keep_orig_idx=False, Tensor? total_num_blocks=None,"
    " Tensor? keep_orig_idx_per_feature=None) -> (Tensor, Tensor, Tensor, Tensor?, Tensor?)",
    fake=_weights_2d_fake,
    differentiable=True,
    words=_WORDS,
)
def block_bucketize_sparse_features_2d_weights(
    lengths: Tensor,
    indices: Tensor,
    bucketize_pos: bool,
    sequence: bool,
    block_sizes: Tensor,
    my_size: int,
    weights: Tensor,
    weights_dim: int = 1,
    batch_size_per_feature: Tensor | None = None,
    max_B: int = -1,
    block_bucketize_pos: Sequence[Tensor] | None = None,
    keep_orig_idx: bool = False,
    total_num_blocks: Tensor | None = None,
    keep_orig_idx_per_feature: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """What `block_bucketize_sparse_features` gives, of weights [N, weights_dim]."""
    del max_B
    if weights.numel() != indices.numel() * weights_dim:
        raise ValueError(
            f"weights must have shape {[indices.numel(), weights_dim]} for these indices and weights_dim,"
            f" got {list(weights.shape)}"
        )
    # a number an id travels with it; of wider rows the order is needed
    narrow = weights_dim == 1
    new = _bucketize(
        lengths, indices, bucketize_pos, sequence or not narrow, block_sizes, my_size,
        weights.reshape(-1) if narrow else None, batch_size_per_feature, block_bucketize_pos, keep_orig_idx,
        total_num_blocks, keep_orig_idx_per_feature,
    )  # fmt: skip
    new_lengths, ids, moved, positions, unbucketize = new
    if moved is None:
        assert unbucketize is not None
        order = kernels.invert_permute(unbucketize)
        moved = weights.reshape(indices.numel(), weights_dim).index_select(0, order)
    else:
        moved = moved.unsqueeze(1)
    return new_lengths, ids, moved, positions, unbucketize if sequence else None


@op(
    "bucketize_sparse_features(Tensor lengths, Tensor indices, bool bucketize_pos, SymInt my_size,"
    " Tensor? weights=None) -> (Tensor, Tensor, Tensor?, Tensor?)",
    differentiable=True,
    words=_WORDS,
)
def bucketize_sparse_features(
    lengths: Tensor, indices: Tensor, bucketize_pos: bool, my_size: int, weights: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Lengths, ids, weights and places in bags where id i goes to bucket i % my_size as i // my_size."""
    # ids of a feature whose blocks have no rows are dealt out so
    return _bucketize(lengths, indices, bucketize_pos, False, indices.new_zeros(1), my_size, weights)[:4]


@op(
    "populate_bucketized_permute(Tensor lengths, Tensor bucketized_lengths, Tensor bucket_mapping) -> Tensor",
    fake=lambda lengths, bucketized_lengths, bucket_mapping: bucket_mapping.new_empty(bucket_mapping.shape),
)
def populate_bucketized_permute(lengths: Tensor, bucketized_lengths: Tensor, bucket_mapping: Tensor) -> Tensor:
    """Where each id comes to lie among ids of `bucketized_lengths` [K * F * B]; `bucket_mapping` [N] is its bucket."""
    for name, each in (
        ("lengths", lengths), ("bucketized_lengths", bucketized_lengths), ("bucket_mapping", bucket_mapping)
    ):  # fmt: skip
        if each.is_floating_point():
            raise TypeError(f"{name} must be integers, got {each.dtype}")
    size, bags, runs = bucket_mapping.numel(), lengths.numel(), bucketized_lengths.numel()
    if size and (not bags or runs % bags):
        raise ValueError(f"bucketized_lengths must be a multiple of the {bags} lengths, got {runs}")
    if bucket_mapping.is_cpu:
        if int(lengths.sum()) != size or int(bucketized_lengths.sum()) != size:
            raise ValueError(
                f"lengths and bucketized_lengths must add up to the {size} entries of bucket_mapping,"
                f" got {int(lengths.sum())} and {int(bucketized_lengths.sum())}"
            )
        if size and not 0 <= int(bucket_mapping.min()) <= int(bucket_mapping.max()) < runs // bags:
            raise ValueError(f"bucket_mapping must be of 0 ... {runs // bags - 1}, got {bucket_mapping.tolist()[:10]}")
    run = bucket_mapping.reshape(-1).long() * bags + _bag_of_id(lengths.reshape(-1), size)
    run, order = run.clamp(0, max(runs - 1, 0)).sort(stable=True)
    place = torch.arange(size, device=run.device) - torch.searchsorted(run, run)
    place += kernels.complete_cumsum(bucketized_lengths.reshape(-1))[run]
    permute = torch.empty_like(place, dtype=bucket_mapping.dtype)
    return permute.scatter_(0, order, place.to(bucket_mapping.dtype)).view(bucket_mapping.shape)


def _bag_of_id(lengths: Tensor, size: int) -> Tensor:
    """The bag [N] of each of `size` ids; the last one of those past the end."""
    places = torch.arange(size, device=lengths.device)
    return torch.searchsorted(lengths.cumsum(0), places, right=True).clamp(max=max(lengths.numel() - 1, 0))


def _bucketize(
    lengths: Tensor,
    indices: Tensor,
    bucketize_pos: bool,
    sequence: bool,
    block_sizes: Tensor,
    my_size: int,
    weights: Tensor | None,
    batch_sizes: Tensor | None = None,
    borders: Sequence[Tensor] | None = None,
    keep_orig_idx: bool = False,
    total_num_blocks: Tensor | None = None,
    keep_per_feature: Tensor | None = None,
) -> Bucketized:
    """`kernels.block_bucketize`, which takes no ids below 0, for ids that may be."""
    if my_size < 1:
        raise ValueError(f"my_size must be positive, got {my_size}")
    lengths = lengths if lengths.dim() == 1 else lengths.reshape(-1)
    keep = keep_orig_idx if keep_per_feature is None else keep_per_feature

    def bucketize(ids: Tensor, with_permute: bool) -> Bucketized:
        return kernels.block_bucketize(
            lengths, ids, block_sizes, my_size, weights=weights, batch_sizes=batch_sizes, bucketize_pos=bucketize_pos,
            sequence=with_permute, keep_orig_idx=keep, block_bucketize_pos=borders or None,
            total_num_blocks=total_num_blocks,
        )  # fmt: skip

    if indices.is_cpu and not INTERPRETED and not torch.compiler.is_compiling():
        try:
            return bucketize(indices, sequence)
        except ValueError:
            if not bool((indices < 0).any()):
                raise
    if not block_sizes.numel():
        return bucketize(indices, sequence)
    if indices.dtype != torch.int64:
        new = bucketize(indices.long() & 0xFFFF_FFFF, sequence)
        return new._replace(
            ids=new.ids.to(indices.dtype),
            positions=None if new.positions is None else new.positions.to(indices.dtype),
            unbucketize_permute=None if new.unbucketize_permute is None else new.unbucketize_permute.to(indices.dtype),
        )
    for name, each in (("total_num_blocks", total_num_blocks), ("keep_orig_idx_per_feature", keep_per_feature)):
        if each is not None and (each.shape != block_sizes.shape or not each.numel()):
            raise ValueError(f"{name} must have shape {list(block_sizes.shape)} as block_sizes, got {list(each.shape)}")
    keep_id = keep
    blocks = divisor = torch.full((), my_size, device=indices.device)
    if total_num_blocks is not None or keep_per_feature is not None:
        feature = _feature_of_id(lengths, block_sizes, batch_sizes, indices.numel())
        if total_num_blocks is not None:
            blocks = divisor = total_num_blocks.to(indices.device, torch.int64).clamp(min=1)[feature]
            if borders:
                divisor = torch.where(block_sizes[feature] == 0, blocks, divisor.new_full((), my_size))
        if keep_per_feature is not None:
            keep_id = keep_per_feature.to(indices.device)[feature]
    below = indices < 0
    # an id above all rows with the remainder of 2 ** 64 + id stands in for it
    stand_in = (indices + _quotient(blocks)[1]).remainder(blocks) + 2**62 // blocks * blocks
    new = bucketize(torch.where(below, stand_in, indices), True)
    assert new.unbucketize_permute is not None
    quotient, remainder = _quotient(divisor)
    row = (indices + remainder).div(divisor, rounding_mode="floor") + quotient
    if isinstance(keep_id, Tensor):
        row = torch.where(keep_id.bool(), indices, row)
    elif keep_id:
        row = indices
    rows = torch.where(below, row, new.ids[new.unbucketize_permute])
    ids = torch.empty_like(rows).scatter_(0, new.unbucketize_permute, rows)
    return new._replace(ids=ids, unbucketize_permute=new.unbucketize_permute if sequence else None)


def _quotient(divisor: Tensor) -> tuple[Tensor, Tensor]:
    """2 ** 64 divided by int64 numbers: the last 64 bits of the quotient, and the remainder."""
    half = 2**63 - 1
    rest = 2 * (half - half // divisor * divisor) + 2
    return 2 * (half // divisor) + rest // divisor, rest % divisor


def _feature_of_id(lengths: Tensor, block_sizes: Tensor, batch_sizes: Tensor | None, size: int) -> Tensor:
    """The feature [N] of each of `size` ids."""
    features = block_sizes.numel()
    bag = _bag_of_id(lengths, size)
    if batch_sizes is None:
        return bag // max(lengths.numel() // max(features, 1), 1)
    ends = batch_sizes.to(bag.device, torch.int64).cumsum(0)
    return torch.searchsorted(ends, bag, right=True).clamp(max=max(features - 1, 0))

"""Bags of requests that were stacked one after another, put beside one another by feature.

Shapes: B requests, request b has items batch_offsets[b] ... batch_offsets[b + 1] of A in all, and T features. Bags come
in the order request, feature, item; with `broadcast` in the order request, feature, and each serves all items of its
request. They leave in the order feature, item: bag (t, a) has the number t * A + a.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise import kernels
from shardwise.kernels._op import runs_kernel
from shardwise.kernels.cpu import offsets_are_good
from shardwise.kernels.jagged import source_bags

from .registry import op

_INDEX = (torch.int32, torch.int64)
# what kernels, and what is shared here, call their arguments -> what the ops call them
_WORDS = {
    "input_offsets": "cat_ad_offsets",
    "output_offsets": "reordered_cat_ad_offsets",
    "reordered offsets": "reordered_cat_ad_offsets",
    "offsets": "cat_ad_offsets",
    "permute": "cat_ad_offsets",
    "index out of range in self": "cat_ad_offsets lead outside cat_ad_indices",
}
_ROWS = {
    "input_offsets": "cat_sequence_embeddings_offsets",
    "output_offsets": "reordered_cat_sequence_embeddings_offsets",
    "reordered offsets": "reordered_cat_sequence_embeddings_offsets",
    "offsets": "cat_sequence_embeddings_offsets",
    "permute": "cat_sequence_embeddings_offsets",
    "num_ads_in_batch": "num_items_in_batch",
    "index out of range in self": "cat_sequence_embeddings_offsets lead outside cat_sequence_embeddings",
}


def _lengths_fake(
    cat_ad_lengths: Tensor,
    batch_offsets: Tensor,
    num_ads_in_batch: int,
    broadcast_lengths: bool = False,
    max_batch_size: int = 0,
) -> Tensor:
    if broadcast_lengths:
        return cat_ad_lengths.new_empty(cat_ad_lengths.numel() // (batch_offsets.numel() - 1) * num_ads_in_batch)
    if max_batch_size > 0:
        return cat_ad_lengths.new_empty(cat_ad_lengths.numel() // num_ads_in_batch * max_batch_size)
    return cat_ad_lengths.new_empty(cat_ad_lengths.shape)


@op(
    "reorder_batched_ad_lengths(Tensor cat_ad_lengths, Tensor batch_offsets, SymInt num_ads_in_batch,"
    " bool broadcast_lengths=False, SymInt max_batch_size=0) -> Tensor",
    fake=_lengths_fake,
)
def reorder_batched_ad_lengths(
    cat_ad_lengths: Tensor,
    batch_offsets: Tensor,
    num_ads_in_batch: int,
    broadcast_lengths: bool = False,
    max_batch_size: int = 0,
) -> Tensor:
    """Lengths, or other numbers, of bags in their order by feature: A for each feature, or `max_batch_size`, then 0."""
    _check(batch_offsets, num_ads_in_batch)
    if max_batch_size > 0 and (broadcast_lengths or max_batch_size < num_ads_in_batch):
        raise ValueError(
            f"max_batch_size must be 0 with broadcast_lengths, otherwise at least num_ads_in_batch, "
            f"{num_ads_in_batch}, got {max_batch_size}"
        )
    bags = cat_ad_lengths.numel()
    per_feature = batch_offsets.numel() - 1 if broadcast_lengths else num_ads_in_batch
    if bags % per_feature if per_feature else bags:
        what = "requests" if broadcast_lengths else "num_ads_in_batch"
        raise ValueError(f"cat_ad_lengths must have a multiple of {what}, {per_feature}, numbers, got {bags}")
    features = bags // max(per_feature, 1)
    if runs_kernel(cat_ad_lengths):
        most = max_batch_size if max_batch_size > 0 else num_ads_in_batch
        reordered: Tensor = torch.ops.shardwise.reorder_request_lengths(
            cat_ad_lengths.reshape(-1), batch_offsets, features, num_ads_in_batch, most, broadcast_lengths
        )
        return reordered if broadcast_lengths or max_batch_size > 0 else reordered.view(cat_ad_lengths.shape)
    source = source_bags(batch_offsets, features, num_ads_in_batch, bags, broadcast_lengths)
    moved = cat_ad_lengths.reshape(-1)[source]
    if max_batch_size > 0:
        moved = torch.nn.functional.pad(moved, (0, max_batch_size - num_ads_in_batch))
    return moved.view(-1) if broadcast_lengths or max_batch_size > 0 else moved.view(cat_ad_lengths.shape)


def _indices_fake(
    cat_ad_offsets: Tensor,
    cat_ad_indices: Tensor,
    reordered_cat_ad_offsets: Tensor,
    batch_offsets: Tensor,
    num_ads_in_batch: int,
    broadcast_indices: bool = False,
    num_indices_after_broadcast: int = -1,
) -> Tensor:
    return cat_ad_indices.new_empty(num_indices_after_broadcast if broadcast_indices else cat_ad_indices.numel())


@op(
    "reorder_batched_ad_indices(Tensor cat_ad_offsets, Tensor cat_ad_indices, Tensor reordered_cat_ad_offsets,"
    " Tensor batch_offsets, SymInt num_ads_in_batch, bool broadcast_indices=False,"
    " SymInt num_indices_after_broadcast=-1) -> Tensor",
    fake=_indices_fake,
    words=_WORDS,
)
def reorder_batched_ad_indices(
    cat_ad_offsets: Tensor,
    cat_ad_indices: Tensor,
    reordered_cat_ad_offsets: Tensor,
    batch_offsets: Tensor,
    num_ads_in_batch: int,
    broadcast_indices: bool = False,
    num_indices_after_broadcast: int = -1,
) -> Tensor:
    """Values of bags in their order by feature; broadcast, they are `num_indices_after_broadcast`."""
    if cat_ad_indices.dim() != 1:
        raise ValueError(f"cat_ad_indices must have 1 dimension, got shape {list(cat_ad_indices.shape)}")
    if broadcast_indices and num_indices_after_broadcast < 0:
        raise ValueError(
            f"num_indices_after_broadcast must be given with broadcast_indices, got {num_indices_after_broadcast}"
        )
    size = num_indices_after_broadcast if broadcast_indices else cat_ad_indices.shape[0]
    bags = _Bags(cat_ad_offsets, reordered_cat_ad_offsets, batch_offsets, num_ads_in_batch, broadcast_indices)
    return bags.reorder(cat_ad_indices, size)


def _cat_fake(
    cat_ad_offsets: Tensor,
    cat_ad_indices: Sequence[Tensor],
    reordered_cat_ad_offsets: Tensor,
    batch_offsets: Tensor,
    num_ads_in_batch: int,
    broadcast_indices: bool,
    total_num_indices: int,
    pinned_memory: bool = False,
    max_batch_size: int = 0,
) -> Tensor:
    return cat_ad_indices[0].new_empty(total_num_indices)


@op(
    "cat_reorder_batched_ad_indices(Tensor cat_ad_offsets, Tensor[] cat_ad_indices, Tensor reordered_cat_ad_offsets,"
    " Tensor batch_offsets, SymInt num_ads_in_batch, bool broadcast_indices, SymInt total_num_indices,"
    " bool pinned_memory=False, SymInt max_batch_size=0) -> Tensor",
    fake=_cat_fake,
    words=_WORDS,
)
def cat_reorder_batched_ad_indices(
    cat_ad_offsets: Tensor,
    cat_ad_indices: Sequence[Tensor],
    reordered_cat_ad_offsets: Tensor,
    batch_offsets: Tensor,
    num_ads_in_batch: int,
    broadcast_indices: bool,
    total_num_indices: int,
    pinned_memory: bool = False,
    max_batch_size: int = 0,
) -> Tensor:
    """Values of bags in their order by feature, given as a tensor for each request; `total_num_indices` of them.

    With `max_batch_size` the reordered offsets are those of that many items for each feature.
    """
    if len(cat_ad_indices) != max(batch_offsets.numel() - 1, 1):
        raise ValueError(
            f"cat_ad_indices must have a tensor for each of {batch_offsets.numel() - 1} requests, "
            f"got {len(cat_ad_indices)}"
        )
    if total_num_indices < 0:
        raise ValueError(f"total_num_indices must not be negative, got {total_num_indices}")
    dtype = cat_ad_indices[0].dtype
    if other := [each.dtype for each in cat_ad_indices if each.dtype != dtype]:
        raise TypeError(f"cat_ad_indices must all have one dtype, got {dtype} and {other[0]}")
    bags = _Bags(
        cat_ad_offsets, reordered_cat_ad_offsets, batch_offsets, num_ads_in_batch, broadcast_indices, max_batch_size
    )
    moved = bags.reorder(torch.cat([each.reshape(-1) for each in cat_ad_indices]), total_num_indices)
    return moved.pin_memory() if pinned_memory and not moved.is_cuda else moved


@op(
    "reorder_batched_sequence_embeddings(Tensor cat_sequence_embeddings_offsets, Tensor cat_sequence_embeddings,"
    " Tensor reordered_cat_sequence_embeddings_offsets, Tensor batch_offsets, SymInt num_items_in_batch) -> Tensor",
    fake=lambda offsets, embeddings, reordered, batch_offsets, items: embeddings.new_empty(embeddings.shape),
    differentiable=True,
    words=_ROWS,
)
def reorder_batched_sequence_embeddings(
    cat_sequence_embeddings_offsets: Tensor,
    cat_sequence_embeddings: Tensor,
    reordered_cat_sequence_embeddings_offsets: Tensor,
    batch_offsets: Tensor,
    num_items_in_batch: int,
) -> Tensor:
    """Rows [N, D] of bags in their order by feature."""
    if cat_sequence_embeddings.dim() != 2:
        raise ValueError(
            f"cat_sequence_embeddings must have 2 dimensions, got shape {list(cat_sequence_embeddings.shape)}"
        )
    offsets, reordered = cat_sequence_embeddings_offsets, reordered_cat_sequence_embeddings_offsets
    bags = _Bags(offsets, reordered, batch_offsets, num_items_in_batch)
    return bags.reorder(cat_sequence_embeddings, cat_sequence_embeddings.shape[0])


class _Bags:
    """Where the values of bags are in the order by feature: `items` of them for each feature, `most` with padding."""

    def __init__(
        self,
        offsets: Tensor,
        reordered: Tensor,
        batch_offsets: Tensor,
        items: int,
        broadcast: bool = False,
        max_batch_size: int = 0,
    ) -> None:
        _check(batch_offsets, items)
        self.offsets, self.reordered, self.batch_offsets = offsets, reordered, batch_offsets
        self.items, self.broadcast, self.most = items, broadcast, max_batch_size if max_batch_size > 0 else items
        if self.most < items:
            raise ValueError(f"max_batch_size must be at least num_ads_in_batch, {items}, got {max_batch_size}")
        bags = reordered.numel() - 1
        if bags % self.most if self.most else bags:
            raise ValueError(f"{bags + 1} reordered offsets do not divide among {self.most} items: expected T * A + 1")
        self.features = bags // max(self.most, 1)
        expected = self.features * (batch_offsets.numel() - 1 if broadcast else items) + 1
        if offsets.numel() != expected:
            raise ValueError(f"there must be {expected} offsets of {self.features} features, got {offsets.numel()}")

    def reorder(self, values: Tensor, size: int) -> Tensor:
        """`size` values, or rows, in their order by feature."""
        if size == 0:
            return values.new_empty(0, *values.shape[1:])
        offsets = self.offsets
        if runs_kernel(values):
            return torch.ops.shardwise.reorder_request_values(  # type: ignore[no-any-return]
                values, offsets, self.reordered, self.batch_offsets, self.items, self.most, self.broadcast, size
            )
        source = source_bags(self.batch_offsets, self.features, self.items, offsets.numel() - 1, self.broadcast)
        if self.most > self.items:
            # padding is bags without values: which one does not matter
            source = torch.nn.functional.pad(source, (0, self.most - self.items))
        places = kernels.expand_into_jagged_permute(source.to(offsets.dtype).view(-1), offsets, self.reordered, size)
        if values.is_cuda:
            # offsets that do not fit must not be followed outside the values
            places = places.clamp(0, max(values.shape[0] - 1, 0))
        return values.index_select(0, places)


def _check(batch_offsets: Tensor, items: int) -> None:
    if batch_offsets.dtype not in _INDEX:
        raise TypeError(f"batch_offsets must be int32 or int64, got {batch_offsets.dtype}")
    if batch_offsets.dim() != 1 or batch_offsets.shape[0] == 0:
        raise ValueError(f"batch_offsets must have 1 dimension and an entry, got shape {list(batch_offsets.shape)}")
    if batch_offsets.is_cpu and not offsets_are_good(batch_offsets, items, padded=False):
        raise ValueError(f"batch_offsets must go from 0 to {items} without falling, got {batch_offsets.tolist()}")

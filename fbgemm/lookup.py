"""Lookups besides those of tables of rows: tables of one column, and the rows that pruning has left.

Shapes: ids [N] in bags of T tables, offsets [T * B + 1]; a remapping of ids or a hash table for each table behind one
another, which offsets [T + 1] divide: a table whose part is empty is not pruned, and its ids stay.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise import kernels
from shardwise.kernels._op import runs_kernel
from shardwise.kernels.hashes import mix32, mix64, unsigned_remainder

from .registry import op
from .slots import FREE, slots_in_turn

_INDEX = (torch.int32, torch.int64)
# slots of an id that are looked at together
_PROBES = 16


@op(
    "batched_unary_embeddings(Tensor weight, Tensor table_offsets, Tensor offsets, Tensor indices) -> Tensor",
    differentiable=True,
    words={"ids": "indices"},
)
def batched_unary_embeddings(weight: Tensor, table_offsets: Tensor, offsets: Tensor, indices: Tensor) -> Tensor:
    """Sums of bags [tasks, B, T] in tables of one column, whose rows weight [tasks, rows, 1] holds in turn."""
    return kernels.batched_unary_embeddings(weight, table_offsets, offsets, indices)


@op(
    "pruned_array_lookup(Tensor indices, Tensor offsets, Tensor index_remappings, Tensor index_remappings_offsets)"
    " -> Tensor",
    fake=lambda indices, *_: torch.empty_like(indices),
)
def pruned_array_lookup(
    indices: Tensor, offsets: Tensor, index_remappings: Tensor, index_remappings_offsets: Tensor
) -> Tensor:
    """Where pruning has put the row of each id [N]: what the remapping of its table says, -1 where the row is gone."""
    _check_index("index_remappings", index_remappings, 1)
    _check_tables(indices, offsets, "index_remappings_offsets", index_remappings_offsets)
    if indices.is_cpu and int(index_remappings_offsets[-1]) > index_remappings.shape[0]:
        raise ValueError(
            f"index_remappings_offsets must end within the {index_remappings.shape[0]} rows of index_remappings,"
            f" got {int(index_remappings_offsets[-1])}"
        )
    # ids of the CPU are looked at before, by what says where rows are
    if indices.is_cuda and runs_kernel(indices):
        return torch.ops.shardwise.remapped_rows(  # type: ignore[no-any-return]
            indices, offsets, index_remappings, index_remappings_offsets
        )
    table = _tables(indices, offsets, index_remappings_offsets)
    begin = index_remappings_offsets[table]
    rows = index_remappings_offsets[table + 1] - begin
    pruned, outside = rows > 0, (indices < 0) | (indices >= rows)
    if indices.is_cpu and bool((outside & pruned).any()):
        at = int((outside & pruned).int().argmax())
        raise IndexError(f"indices[{at}] is {int(indices[at])}, outside the {int(rows[at])} rows of its remapping")
    if index_remappings.shape[0] == 0:
        return indices.clone()
    place = (begin + indices).clamp_(0, index_remappings.shape[0] - 1)
    remapped = index_remappings[place].to(indices.dtype).masked_fill(outside, FREE)
    return torch.where(pruned, remapped, indices)


@op(
    "pruned_hashmap_lookup(Tensor indices, Tensor offsets, Tensor hash_table, Tensor hash_table_offsets) -> Tensor",
    fake=lambda indices, *_: torch.empty_like(indices),
)
def pruned_hashmap_lookup(indices: Tensor, offsets: Tensor, hash_table: Tensor, hash_table_offsets: Tensor) -> Tensor:
    """Where pruning has put the row of each id [N], by a hash table [slots, 2] of ids and rows; -1 where it is gone."""
    _check_hash_table(hash_table)
    _check_tables(indices, offsets, "hash_table_offsets", hash_table_offsets, hash_table.shape[0])
    if runs_kernel(indices):
        return torch.ops.shardwise.hashed_rows(  # type: ignore[no-any-return]
            indices, offsets, hash_table, hash_table_offsets
        )
    table = _tables(indices, offsets, hash_table_offsets)
    begin = hash_table_offsets[table].unsqueeze(1)  # [N, 1]
    slots = hash_table_offsets[table + 1].unsqueeze(1) - begin
    rows = torch.where(slots.squeeze(1) > 0, FREE, indices)
    # those still looked for: their first slot is that of the hash, and the next ones follow
    left = (slots.squeeze(1) > 0).nonzero().squeeze(1)
    begin, slots, wanted = begin[left], slots[left], indices[left].unsqueeze(1)
    home = unsigned_remainder(_hash(wanted), slots)
    first = 0
    # how far ids are from the slots of their hashes is known to the table alone
    while left.numel() and first < hash_table.shape[0]:
        step = torch.arange(first, first + _PROBES, device=indices.device)
        place = begin + (home + step) % slots  # [L, P]
        keys = hash_table[place.clamp_(0, hash_table.shape[0] - 1), 0]
        ends = ((keys == FREE) | (keys == wanted)).int()
        at = place.gather(1, ends.argmax(1, keepdim=True)).squeeze(1)
        found = (hash_table[at, 0] == wanted.squeeze(1)) & (wanted.squeeze(1) != FREE)
        rows[left[found]] = hash_table[at[found], 1].to(rows.dtype)
        first += _PROBES
        more = (ends.sum(1) == 0) & (slots.squeeze(1) > first)
        left, begin, slots, wanted, home = left[more], begin[more], slots[more], wanted[more], home[more]
    return rows


@op(
    "pruned_hashmap_insert(Tensor indices, Tensor dense_indices, Tensor offsets, Tensor(a!) hash_table,"
    " Tensor hash_table_offsets) -> ()",
    fake=lambda *_: None,
)
def pruned_hashmap_insert(
    indices: Tensor, dense_indices: Tensor, offsets: Tensor, hash_table: Tensor, hash_table_offsets: Tensor
) -> None:
    """Put ids [N] and where pruning has put their rows into a hash table [slots, 2], in which -1 is a free slot.

    The table is that of one id after another, each taking the first slot that is free or its own from that of its hash
    on. Ids whose row is -1 are left out.

    Raises:
        ValueError: more ids than slots; nothing is written then.
    """
    _check_hash_table(hash_table)
    if dense_indices.dtype != indices.dtype:
        raise TypeError(f"dense_indices must be {indices.dtype} as indices are, got {dense_indices.dtype}")
    if dense_indices.shape != indices.shape:
        raise ValueError(
            f"dense_indices must have a number for each of {indices.shape[0]} indices, "
            f"got shape {list(dense_indices.shape)}"
        )
    _check_tables(indices, offsets, "hash_table_offsets", hash_table_offsets, hash_table.shape[0])
    table = _tables(indices, offsets, hash_table_offsets)
    slots = hash_table_offsets[table + 1] - hash_table_offsets[table]
    kept = ((dense_indices != FREE) & (indices != FREE) & (slots > 0)).nonzero().squeeze(1)
    if kept.numel() == 0:
        return
    if hash_table.dtype == torch.int32 and indices.dtype == torch.int64:
        low, high = indices[kept].aminmax()
        # a key that is cut to its low half would be another id's; one wait for a device at most
        if int(low) < -(2**31) or int(high) >= 2**31:
            raise ValueError(f"hash_table is int32: it cannot hold indices of {int(low)} ... {int(high)}")
    # an id that comes twice has the place of the first and the row of the last
    of_table, wanted, first, last = _distinct(table[kept], indices[kept])
    rows = dense_indices[kept][last]
    order = first.argsort()
    of_table, wanted, rows = of_table[order], wanted[order], rows[order]
    ends = hash_table_offsets.clamp(0, hash_table.shape[0])
    begin = ends[of_table]
    slots = ends[of_table + 1] - begin
    at = slots_in_turn(wanted, begin, slots, unsigned_remainder(_hash(wanted), slots), hash_table[:, 0], slots)
    # an error is raised by the host, before anything is written
    if bool((at < 0).any()):
        lost = int((at < 0).int().argmax())
        raise ValueError(f"hash_table has no slot left for id {int(wanted[lost])} among its {int(slots[lost])}")
    hash_table[at] = torch.stack([wanted, rows], 1).to(hash_table.dtype)


def _distinct(table: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Distinct pairs of table and id, and the places of the first and of the last of each."""
    pairs, which = torch.unique(torch.stack([table, ids.long()]), dim=1, return_inverse=True)
    place = torch.arange(ids.shape[0], device=ids.device)
    count = pairs.shape[1]
    first = place.new_full((count,), ids.shape[0]).scatter_reduce_(0, which, place, "amin")
    last = place.new_zeros(count).scatter_reduce_(0, which, place, "amax")
    return pairs[0], pairs[1].to(ids.dtype), first, last


def _hash(ids: Tensor) -> Tensor:
    return mix32(ids.long()) if ids.dtype == torch.int32 else mix64(ids)


def _check_tables(indices: Tensor, offsets: Tensor, name: str, ends: Tensor, size: int | None = None) -> None:
    """Raise unless ids are in bags of as many tables as `ends` divide, of which the last ends at `size`."""
    _check_index("indices", indices, 1)
    _check_index("offsets", offsets, 1)
    if offsets.dtype != indices.dtype:
        raise TypeError(f"offsets must be {indices.dtype} as indices are, got {offsets.dtype}")
    if ends.dtype != torch.int64:
        raise TypeError(f"{name} must be int64, got {ends.dtype}")
    tables, bags = ends.numel() - 1, offsets.numel() - 1
    if ends.dim() != 1 or tables < 1:
        raise ValueError(f"{name} must have an entry more than there are tables, got shape {list(ends.shape)}")
    if bags < tables or bags % tables:
        raise ValueError(f"offsets must be T * B + 1 for {tables} tables, got {bags + 1}")
    if indices.is_cpu:
        _check_span("offsets", offsets, indices.shape[0])
        _check_span(name, ends, size)


def _tables(indices: Tensor, offsets: Tensor, ends: Tensor) -> Tensor:
    """The table of each id, [N]."""
    tables, bags = ends.numel() - 1, offsets.numel() - 1
    of_tables = offsets[bags // tables : -1 : bags // tables].contiguous()
    place = torch.arange(indices.shape[0], device=indices.device, dtype=offsets.dtype)
    return torch.searchsorted(of_tables, place, right=True)


def _check_span(name: str, offsets: Tensor, end: int | None) -> None:
    last = int(offsets[-1])
    if int(offsets[0]) != 0 or bool((offsets.diff() < 0).any()) or last != (last if end is None else end):
        raise ValueError(
            f"{name} must go from 0 {'' if end is None else f'to {end} '}without falling, got {offsets.tolist()}"
        )


def _check_index(name: str, tensor: Tensor, dims: int) -> None:
    if tensor.dtype not in _INDEX:
        raise TypeError(f"{name} must be int32 or int64, got {tensor.dtype}")
    if tensor.dim() != dims:
        raise ValueError(f"{name} must have {dims} dimensions, got shape {list(tensor.shape)}")


def _check_hash_table(hash_table: Tensor) -> None:
    _check_index("hash_table", hash_table, 2)
    if hash_table.shape[1] != 2:
        raise ValueError(f"hash_table must be [slots, 2], got shape {list(hash_table.shape)}")


def _prune_fake(
    weight: Tensor,
    indicator: Tensor,
    threshold: float,
    compressed_indices_dtype: torch.dtype,
    abs: bool = True,
    min_num_rows: int = 0,
    min_save_ratio: float | None = 1.0,
) -> tuple[Tensor, Tensor]:
    if not _pays(weight, min_num_rows, min_save_ratio):
        return torch.empty_like(weight), weight.new_empty(1, dtype=compressed_indices_dtype)
    kept = torch.library.get_ctx().new_dynamic_size()
    return (
        weight.new_empty(kept, weight.shape[1]),
        weight.new_empty(weight.shape[0], dtype=compressed_indices_dtype),
    )


@op(
    "embedding_bag_rowwise_prune(Tensor weight, Tensor indicator, float threshold, ScalarType compressed_indices_dtype,"
    " bool abs=True, SymInt min_num_rows=0, float? min_save_ratio=1.) -> (Tensor, Tensor)",
    fake=_prune_fake,
)
def embedding_bag_rowwise_prune(
    weight: Tensor,
    indicator: Tensor,
    threshold: float,
    compressed_indices_dtype: torch.dtype,
    abs: bool = True,
    min_num_rows: int = 0,
    min_save_ratio: float | None = 1.0,
) -> tuple[Tensor, Tensor]:
    """The rows of weight [rows, D] whose indicator is above the threshold, and where each row went, -1 if nowhere.

    At least `min_num_rows` stay, the last ones of those below. Where so many and the places of all would take
    `min_save_ratio` of the bytes of weight or more, counted in fp32 and int32, nothing is pruned: the places are [0].
    """
    if weight.dim() != 2:
        raise ValueError(f"weight must have 2 dimensions, got shape {list(weight.shape)}")
    if indicator.dtype != torch.float32:
        raise TypeError(f"indicator must be float32, got {indicator.dtype}")
    if indicator.numel() != weight.shape[0]:
        raise ValueError(f"indicator must have a number for each of {weight.shape[0]} rows, got {indicator.numel()}")
    if not threshold >= 0:
        raise ValueError(f"threshold must not be negative, got {threshold}")
    if compressed_indices_dtype not in _INDEX:
        raise TypeError(f"compressed_indices_dtype must be int32 or int64, got {compressed_indices_dtype}")
    if not _pays(weight, min_num_rows, min_save_ratio):
        return weight.clone(), torch.zeros(1, dtype=compressed_indices_dtype, device=weight.device)
    # compared in fp64, as the threshold is given
    score = indicator.reshape(-1).double()
    kept = (score.abs() if abs else score) > threshold
    before = kept.cumsum(0) - kept.long()
    rows = torch.arange(kept.shape[0], device=kept.device)
    # with those before a row and all from it on there are no more than have to stay
    kept = kept | (before + kept.shape[0] - rows <= min_num_rows)
    places = torch.where(kept, kept.cumsum(0) - 1, -1).to(compressed_indices_dtype)
    # how many rows stay is the size of an output, which is known on the host alone
    return weight[kept], places


def _pays(weight: Tensor, min_num_rows: int, min_save_ratio: float | None) -> bool:
    if min_save_ratio is None:
        return True
    rows, dim = weight.shape
    return bool(4 * (rows + min_num_rows * dim) < min_save_ratio * 4 * rows * dim)

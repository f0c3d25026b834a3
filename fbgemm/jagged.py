"""Bags selected, cut and numbered: what takes jagged values and gives jagged values.

Shapes: values [N] or [N, D] of B bags with lengths [B] or offsets [B + 1]; of T keys, bags [T*B] key by key.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shardwise import kernels
from shardwise.kernels._op import eager, runs_kernel

from .registry import op


def _some(like: Tensor, *, rows: int | None = None) -> Tensor:
    """For fakes: like a tensor, but with as many rows as the data say if `rows` is None."""
    size: Any = torch.library.get_ctx().new_dynamic_size() if rows is None else rows
    return like.new_empty(size, *like.shape[1:])


@op(
    "jagged_index_select(Tensor values, Tensor lengths, Tensor indices, int? num_dense_output_rows=None) -> Tensor[]",
    differentiable=True,
    words={"selected_lengths_sum": "num_dense_output_rows"},
)
def jagged_index_select(
    values: Tensor, lengths: Tensor, indices: Tensor, num_dense_output_rows: int | None = None
) -> list[Tensor]:
    """Bags `indices` [S] in that order: their values [M, D] and lengths [S]; M, if given, saves a wait."""
    return list(kernels.jagged_index_select(values, lengths, indices, selected_lengths_sum=num_dense_output_rows))


@op(
    "jagged_index_select_2d_forward_v2(Tensor values, Tensor indices, Tensor input_offsets, Tensor output_offsets,"
    " int? num_dense_output_rows=None) -> Tensor",
    fake=lambda values, indices, input_offsets, output_offsets, num_dense_output_rows=None: _some(
        values, rows=num_dense_output_rows
    ),
    words={"lengths": "lengths by input_offsets", "selected_lengths_sum": "num_dense_output_rows"},
)
def jagged_index_select_2d_forward_v2(
    values: Tensor,
    indices: Tensor,
    input_offsets: Tensor,
    output_offsets: Tensor,
    num_dense_output_rows: int | None = None,
) -> Tensor:
    """Values [M, D] of bags `indices` [S]; offsets [B] and [S] are where bags end, M the last of the latter."""
    if output_offsets.shape != indices.shape:
        raise ValueError(
            f"output_offsets must have the shape of indices, {list(indices.shape)}, got {list(output_offsets.shape)}"
        )
    if input_offsets.dim() != 1:
        raise ValueError(f"input_offsets must have one dimension, got shape {list(input_offsets.shape)}")
    lengths = input_offsets.diff(prepend=input_offsets.new_zeros(1))
    selected, _ = kernels.jagged_index_select(values, lengths, indices, selected_lengths_sum=num_dense_output_rows)
    return selected


@op(
    "keyed_jagged_index_select_dim1(Tensor values, Tensor lengths, Tensor offsets, Tensor indices, SymInt batch_size,"
    " Tensor? weights=None, SymInt? selected_lengths_sum=None) -> Tensor[]",
    differentiable=True,
)
def keyed_jagged_index_select_dim1(
    values: Tensor,
    lengths: Tensor,
    offsets: Tensor,
    indices: Tensor,
    batch_size: int,
    weights: Tensor | None = None,
    selected_lengths_sum: int | None = None,
) -> list[Tensor]:
    """Samples `indices` [S] of every key: values [M], lengths [T*S], and weights [M] if there are any."""
    selected = kernels.keyed_jagged_index_select(
        values, lengths, offsets, indices, batch_size, weights, selected_lengths_sum=selected_lengths_sum
    )
    return [each for each in selected if each is not None]


def _unique_fake(
    hash_size_cumsum: Tensor, hash_size_offsets: Tensor, offsets: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        offsets.new_empty(offsets.shape[0] - 1),
        torch.empty_like(offsets),
        _some(indices),
        torch.empty_like(indices, dtype=torch.int64),
    )


@op(
    "jagged_unique_indices(Tensor hash_size_cumsum, Tensor hash_size_offsets, Tensor offsets, Tensor indices)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    fake=_unique_fake,
    words={"ids": "indices"},
)
def jagged_unique_indices(
    hash_size_cumsum: Tensor, hash_size_offsets: Tensor, offsets: Tensor, indices: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Distinct indices of each table as a batch of the same keys, whose bags have nearly equal lengths.

    Shapes: hash_size_cumsum [T + 1], the first row of each key among those of all tables; keys of one table have the
    same. hash_size_offsets [T + 1], the keys of each of T tables, of which some have none. offsets [T*B + 1].

    Returns:
        lengths [T*B], offsets [T*B + 1], distinct indices [U], the place [N] of each index among them.
    """
    if hash_size_cumsum.dim() != 1 or hash_size_cumsum.shape != hash_size_offsets.shape:
        raise ValueError(
            "hash_size_cumsum and hash_size_offsets must be [keys + 1], got shapes"
            f" {list(hash_size_cumsum.shape)} and {list(hash_size_offsets.shape)}"
        )
    # host sync: which keys share a table is known on the host alone, as is the number of distinct indices
    first_rows, first_keys = torch.stack([hash_size_cumsum, hash_size_offsets]).tolist()
    hash_sizes, key_to_table = _tables_of(first_rows, first_keys)
    unique = kernels.jagged_unique(indices, offsets, hash_sizes, key_to_table)
    return unique.lengths, unique.offsets, unique.ids, unique.inverse


def _tables_of(first_rows: list[int], first_keys: list[int]) -> tuple[list[int], list[int]]:
    """Rows of each table that has keys, and the table of each key."""
    keys = len(first_rows) - 1
    if first_keys[:1] != [0] or first_keys[-1] != keys or sorted(first_keys) != first_keys:
        raise ValueError(f"hash_size_offsets must go up from 0 to the {keys} keys, got {first_keys}")
    hash_sizes: list[int] = []
    key_to_table: list[int] = []
    for begin, end in pairwise(first_keys):
        if begin < end:
            if first_rows[begin] != first_rows[end - 1]:
                raise ValueError(
                    f"hash_size_cumsum must be the same for keys {begin} to {end - 1}, which share a table, got"
                    f" {first_rows[begin:end]}"
                )
            key_to_table += [len(hash_sizes)] * (end - begin)
            hash_sizes.append(first_rows[end] - first_rows[begin])
    return hash_sizes, key_to_table


@op(
    "expand_into_jagged_permute(Tensor permute, Tensor input_offset, Tensor output_offset, SymInt output_size)"
    " -> Tensor",
    words={"input_offsets": "input_offset", "output_offsets": "output_offset"},
)
def expand_into_jagged_permute(
    permute: Tensor, input_offset: Tensor, output_offset: Tensor, output_size: int
) -> Tensor:
    """An order of bags as an order of their values: where each of `output_size` comes from."""
    return kernels.expand_into_jagged_permute(permute, input_offset, output_offset, output_size)


@op(
    "jagged_1d_to_truncated_values(Tensor values, Tensor lengths, int max_truncated_length) -> Tensor",
    fake=lambda values, lengths, max_truncated_length: _some(values),
)
def jagged_1d_to_truncated_values(values: Tensor, lengths: Tensor, max_truncated_length: int) -> Tensor:
    """The first `max_truncated_length` values of each bag."""
    if max_truncated_length < 0:
        raise ValueError(f"max_truncated_length must not be negative, got {max_truncated_length}")
    offsets = _offsets_within(values, lengths)
    taken = lengths.clamp(max=max_truncated_length)
    if runs_kernel(values):
        ends = kernels.complete_cumsum(taken)
        return torch.ops.shardwise.take_pieces(values, offsets[:-1], ends, None)  # type: ignore[no-any-return]
    return values[_inside(offsets[:-1], taken, values.shape[0])]


@op(
    "masked_select_jagged_1d(Tensor values, Tensor lengths, Tensor mask, bool? check_length=False) -> (Tensor, Tensor)",
    fake=lambda values, lengths, mask, check_length=False: (_some(values), torch.empty_like(lengths)),
    words={"offsets": "offsets by lengths"},
)
def masked_select_jagged_1d(
    values: Tensor, lengths: Tensor, mask: Tensor, check_length: bool | None = False
) -> tuple[Tensor, Tensor]:
    """Values where `mask` [N] is true, and how many of each bag; the shape of the mask is checked in any case."""
    if mask.dtype != torch.bool or mask.shape != values.shape:
        raise ValueError(f"mask must be bool {list(values.shape)} as values, got {mask.dtype} {list(mask.shape)}")
    offsets = _offsets_within(values, lengths)
    if runs_kernel(values):
        counts = torch.ops.shardwise.masked_counts(mask, offsets)
        taken = kernels.complete_cumsum(counts)
        return torch.ops.shardwise.take_masked(values, mask, offsets, taken, None), counts
    in_bags = torch.arange(values.shape[0], device=values.device) < offsets[-1]
    return values[mask & in_bags], kernels.segment_sum(offsets, mask.to(lengths.dtype))


@op(
    "jagged_slice(Tensor x_values, Tensor x_lengths, Tensor start, int slice_length) -> (Tensor, Tensor)",
    fake=lambda x_values, x_lengths, start, slice_length: (_some(x_values), torch.empty_like(x_lengths)),
    differentiable=True,
    words={"values": "x_values", "lengths": "x_lengths"},
)
def jagged_slice(x_values: Tensor, x_lengths: Tensor, start: Tensor, slice_length: int) -> tuple[Tensor, Tensor]:
    """At most `slice_length` values of each bag from place `start` [B] on, and the lengths that result."""
    if slice_length < 0:
        raise ValueError(f"slice_length must not be negative, got {slice_length}")
    if start.shape != x_lengths.shape:
        raise ValueError(f"start must have the shape of x_lengths, {list(x_lengths.shape)}, got {list(start.shape)}")
    offsets = _offsets_within(x_values, x_lengths)
    # on the CPU alone: elsewhere the numbers would be waited for
    if eager(x_values, start) and bool(((start < 0) | (start > x_lengths)).any()):
        bag = int(((start < 0) | (start > x_lengths)).nonzero()[0])
        raise ValueError(f"start[{bag}] is {int(start[bag])}, outside its bag of {int(x_lengths[bag])} values")
    lengths = (x_lengths - start).clamp(0, slice_length)
    if runs_kernel(x_values):
        ends = kernels.complete_cumsum(lengths)
        return torch.ops.shardwise.take_pieces(x_values, offsets[:-1] + start, ends, None), lengths
    return x_values[_inside(offsets[:-1] + start, lengths, x_values.shape[0])], lengths


@op("jagged_acc_weights_and_counts(Tensor weights, Tensor reverse_indices, int num_unique_indices) -> Tensor")
def jagged_acc_weights_and_counts(weights: Tensor, reverse_indices: Tensor, num_unique_indices: int) -> Tensor:
    """For each of U ids the sum of its weights [N] and how many there are: [U, 2] float32."""
    if weights.dim() != 1 or weights.shape != reverse_indices.shape:
        raise ValueError(
            f"weights and reverse_indices must have one shape [N], got {list(weights.shape)} and"
            f" {list(reverse_indices.shape)}"
        )
    order = torch.argsort(reverse_indices, stable=True)
    ids = reverse_indices[order]
    # on the CPU alone: elsewhere the numbers would be waited for, and indices outside are left out
    if eager(weights, ids) and ids.shape[0] and not 0 <= int(ids[0]) <= int(ids[-1]) < num_unique_indices:
        raise IndexError(f"reverse_indices must be 0 ... {num_unique_indices - 1}, got {int(ids[0])} to {int(ids[-1])}")
    offsets = torch.searchsorted(ids, torch.arange(num_unique_indices + 1, dtype=ids.dtype, device=ids.device))
    sums = kernels.segment_sum(offsets, weights.float()[order])
    return torch.stack([sums, offsets.diff().float()], 1)


@op("get_source_mask(Tensor num_sources, Tensor num_targets, SymInt output_size) -> Tensor")
def get_source_mask(num_sources: Tensor, num_targets: Tensor, output_size: int) -> Tensor:
    """Which of `output_size` values, sources and targets of each sample in turn, are sources; the rest is false."""
    if num_sources.dim() != 1 or num_sources.shape != num_targets.shape:
        raise ValueError(
            f"num_sources and num_targets must have one shape [B], got {list(num_sources.shape)} and"
            f" {list(num_targets.shape)}"
        )
    if isinstance(output_size, int) and output_size < 0:
        raise ValueError(f"output_size must not be negative, got {output_size}")
    sizes = num_sources + num_targets
    # on the CPU alone: elsewhere the numbers would be waited for
    if isinstance(output_size, int) and eager(num_sources, num_targets) and sizes.shape[0]:
        for name, numbers in (("num_sources", num_sources), ("num_targets", num_targets)):
            if int(numbers.min()) < 0:
                raise ValueError(
                    f"{name} must not be negative, sample {int(numbers.argmin())} has {int(numbers.min())}"
                )
        if int(sizes.sum()) > output_size:
            raise ValueError(f"output_size must be at least the sum of all, {int(sizes.sum())}, got {output_size}")
    return _inside(kernels.complete_cumsum(sizes)[:-1], num_sources, output_size)


def _offsets_within(values: Tensor, lengths: Tensor) -> Tensor:
    """Offsets [B + 1] of lengths; on the CPU ValueError where they are negative or more than values [N]."""
    if values.dim() != 1 or lengths.dim() != 1:
        raise ValueError(
            f"values and lengths must have one dimension, got {list(values.shape)} and {list(lengths.shape)}"
        )
    offsets = kernels.complete_cumsum(lengths)
    if eager(values, lengths) and lengths.shape[0]:
        if int(lengths.min()) < 0:
            raise ValueError(f"lengths must not be negative, bag {int(lengths.argmin())} has {int(lengths.min())}")
        if int(offsets[-1]) > values.shape[0]:
            raise ValueError(f"lengths sum to {int(offsets[-1])}, values has {values.shape[0]}")
    return offsets


def _inside(begins: Tensor, sizes: Tensor, total: int) -> Tensor:
    """Which of `total` places lie in the spans that begin there and have these sizes [B], one after another."""
    if runs_kernel(begins):
        return torch.ops.shardwise.inside_pieces(begins, sizes, total)  # type: ignore[no-any-return]
    bounds = torch.stack([begins, begins + sizes], 1).flatten()
    place = torch.arange(total, dtype=bounds.dtype, device=bounds.device)
    return (torch.searchsorted(bounds, place, right=True) & 1).bool()

"""Rows of tensors selected, and segments of rows packed into padded tensors.

Shapes: input [R, ...] rows, indices [S]; values [N, ...] in segments of lengths [B].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise import kernels
from shardwise.kernels._op import eager

from .registry import op


@op(
    "group_index_select_dim0(Tensor[] input_group, Tensor[] indices_group) -> Tensor[]",
    differentiable=True,
    words={"indices": "indices_group", "index out of range in self": "indices_group leads outside input_group"},
)
def group_index_select_dim0(input_group: Sequence[Tensor], indices_group: Sequence[Tensor]) -> list[Tensor]:
    """Of each tensor the rows that its own indices name."""
    if len(input_group) != len(indices_group):
        raise ValueError(
            f"input_group and indices_group must have one length, got {len(input_group)} and {len(indices_group)}"
        )
    return [_rows(rows, indices) for rows, indices in zip(input_group, indices_group, strict=True)]


@op(
    "batch_index_select_dim0(Tensor inputs, Tensor indices, SymInt[] input_num_indices, SymInt[] input_rows,"
    " SymInt[] input_columns, bool permute_output_dim_0_1=False) -> Tensor",
    differentiable=True,
    words={"index out of range in self": "indices leads outside inputs"},
)
def batch_index_select_dim0(
    inputs: Tensor,
    indices: Tensor,
    input_num_indices: Sequence[int],
    input_rows: Sequence[int],
    input_columns: Sequence[int],
    permute_output_dim_0_1: bool = False,
) -> Tensor:
    """Rows of matrices that lie one after another in `inputs`, each with its own number of indices.

    Returns:
        One dimension: the selected rows of each matrix one after another; with `permute_output_dim_0_1` the first row
        of every matrix, then the second of every one.
    """
    tables = len(input_num_indices)
    for name, numbers in (("input_rows", input_rows), ("input_columns", input_columns)):
        if len(numbers) != tables:
            raise ValueError(f"{name} must be as many as input_num_indices, {tables}, got {len(numbers)}")
    sizes = [rows * columns for rows, columns in zip(input_rows, input_columns, strict=True)]
    _check_parts("inputs", inputs, sizes, "input_rows * input_columns")
    _check_parts("indices", indices, input_num_indices, "input_num_indices")
    if permute_output_dim_0_1:
        for count in input_num_indices[1:]:
            _check(count == input_num_indices[0], "input_num_indices must be equal to be permuted", input_num_indices)
    if not tables:
        return inputs.new_empty(0)
    selected = [
        _rows(rows.view(count, columns), chosen)
        for rows, chosen, count, columns in zip(
            inputs.contiguous().split_with_sizes(sizes),
            indices.split_with_sizes(list(input_num_indices)),
            input_rows,
            input_columns,
            strict=True,
        )
    ]
    if permute_output_dim_0_1:
        return torch.cat(selected, 1).flatten()
    return torch.cat([each.flatten() for each in selected])


@op(
    "batch_index_select_dim0_tensor(Tensor inputs, Tensor indices, Tensor input_num_indices, Tensor input_rows,"
    " Tensor input_columns, bool permute_output_dim_0_1=False) -> Tensor",
    fake=lambda inputs, *_, permute_output_dim_0_1=False: inputs.new_empty(torch.library.get_ctx().new_dynamic_size()),
    differentiable=True,
    words={"index out of range in self": "indices leads outside inputs"},
)
def batch_index_select_dim0_tensor(
    inputs: Tensor,
    indices: Tensor,
    input_num_indices: Tensor,
    input_rows: Tensor,
    input_columns: Tensor,
    permute_output_dim_0_1: bool = False,
) -> Tensor:
    """`batch_index_select_dim0` of sizes that are tensors [tables], of which a GPU's are waited for."""
    for name, sizes in (
        ("input_num_indices", input_num_indices), ("input_rows", input_rows), ("input_columns", input_columns)
    ):  # fmt: skip
        if sizes.is_floating_point():
            raise TypeError(f"{name} must be integers, got {sizes.dtype}")
        if sizes.dim() != 1:
            raise ValueError(f"{name} must have one dimension, got shape {list(sizes.shape)}")
    # sizes of views are known on the host alone
    num_indices, rows, columns = (each.tolist() for each in (input_num_indices, input_rows, input_columns))
    return batch_index_select_dim0(inputs, indices, num_indices, rows, columns, permute_output_dim_0_1)


@op(
    "index_select_dim0(Tensor input, Tensor indices, SymInt? consecutive_range_start=0,"
    " SymInt? consecutive_range_length=0, bool? skip_indices_sorting_fwd=None) -> Tensor",
    differentiable=True,
)
def index_select_dim0(
    input: Tensor,
    indices: Tensor,
    consecutive_range_start: int | None = 0,
    consecutive_range_length: int | None = 0,
    skip_indices_sorting_fwd: bool | None = None,
) -> Tensor:
    """Rows `indices`; the other arguments tell FBGEMM's kernel how indices lie, and change no result."""
    return _rows(input, indices)


@op(
    "pack_segments(Tensor t_in, Tensor lengths, SymInt max_length) -> Tensor",
    differentiable=True,
    words={"values": "t_in", "offsets": "offsets by lengths", "max_lengths": "max_length"},
)
def pack_segments(t_in: Tensor, lengths: Tensor, max_length: int) -> Tensor:
    """Segments [B, max_length, ...], cut or filled up with zeros."""
    return kernels.jagged_to_padded_dense(t_in, kernels.complete_cumsum(lengths), max_length)


@op(
    "pack_segments_v2(Tensor t_in, Tensor lengths, SymInt max_length, bool pad_minf=False,"
    " bool return_presence_mask=False) -> (Tensor packed_segments, Tensor? presence_mask)",
    differentiable=True,
    words={"values": "t_in", "offsets": "offsets by lengths", "max_lengths": "max_length"},
)
def pack_segments_v2(
    t_in: Tensor, lengths: Tensor, max_length: int, pad_minf: bool = False, return_presence_mask: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Segments [B, max_length, ...], cut or filled up with zeros or -inf; and if asked for, where they are [B, ...]."""
    if pad_minf and not t_in.is_floating_point():
        raise TypeError(f"t_in must be floating to be filled up with -inf, got {t_in.dtype}")
    offsets = kernels.complete_cumsum(lengths)
    packed = kernels.jagged_to_padded_dense(t_in, offsets, max_length, float("-inf") if pad_minf else 0.0)
    if not return_presence_mask:
        return packed, None
    return packed, torch.arange(max_length, device=lengths.device) < lengths.unsqueeze(1)


def _bottom_k_fake(input: Tensor, k_offsets: Tensor, requires_unique: bool) -> Tensor:
    size = torch.library.get_ctx().new_dynamic_size()
    if k_offsets.shape[0] != 2:
        return input.new_empty(size)
    return input.new_empty(input.shape[0], input.numel() // (input.shape[0] * input.shape[-1]), size)


@op("bottom_k_per_row(Tensor input, Tensor k_offsets, bool requires_unique) -> Tensor", fake=_bottom_k_fake)
def bottom_k_per_row(input: Tensor, k_offsets: Tensor, requires_unique: bool) -> Tensor:
    """The first k numbers of each row; if they have to be unique, the first k distinct ones in ascending order.

    Shapes: input [A, ..., L], R rows in all; k_offsets [R + 1], of which row r has k = k_offsets[r + 1] - k_offsets[r],
    or [2], one k for all rows.

    Returns:
        [A, R / A, k] of one k, else the numbers of all rows one after another.
    """
    if input.dim() < 2 or input.shape[0] == 0 or input.shape[-1] == 0:
        raise ValueError(f"input must have two dimensions at least, and numbers, got shape {list(input.shape)}")
    if input.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"input must be int32 or int64, got {input.dtype}")
    table = input.reshape(-1, input.shape[-1])  # [R, L]
    rows, places = table.shape
    if k_offsets.dim() != 1 or k_offsets.shape[0] not in (2, rows + 1):
        raise ValueError(f"k_offsets must be [2] or [{rows + 1}] for {rows} rows, got {list(k_offsets.shape)}")
    k = k_offsets.diff()  # [R] or [1]
    limit: Tensor | int = places
    if requires_unique:
        # of each number its first place in the row counts
        ordered, order = table.sort(dim=1, stable=True)
        first = torch.ones_like(table, dtype=torch.bool)
        first[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        first = torch.zeros_like(first).scatter(1, order, first)
        count = first.cumsum(1)
        limit = count[:, -1]
        # what is left out goes to the end
        left_out = ~first | (count > k.unsqueeze(1))  # [R, L]
        table = table.masked_fill(left_out, torch.iinfo(table.dtype).max).sort(dim=1).values
    if eager(input, k_offsets) and bool(((k < 0) | (k > limit)).any()):
        raise ValueError(f"input has not so many {'distinct ' * requires_unique}numbers in each row: {k.tolist()}")
    if k_offsets.shape[0] == 2:
        # host sync: the size of the output
        return table.narrow_copy(1, 0, int(k[0])).view(input.shape[0], rows // input.shape[0], int(k[0]))
    return table[torch.arange(places, device=input.device) < k.unsqueeze(1)]


def _check_parts(name: str, tensor: Tensor, parts: Sequence[int], what: str) -> None:
    """ValueError unless a 1-D tensor is as long as its parts together."""
    if tensor.dim() != 1:
        raise ValueError(f"{name} must have one dimension, got shape {list(tensor.shape)}")
    _check(tensor.shape[0] == sum(parts), f"{name} must be as many as the sum of {what} {list(parts)}", tensor.shape[0])


def _check(fits: Any, what: str, got: Any) -> None:
    # a compiler that does not know the sizes takes the check as a fact
    torch._check_value(fits, lambda: f"{what}, got {got}")  # type: ignore[no-untyped-call]


def _rows(rows: Tensor, indices: Tensor) -> Tensor:
    if indices.dim() != 1:
        raise ValueError(f"indices must have one dimension, got shape {list(indices.shape)}")
    if indices.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"indices must be int32 or int64, got {indices.dtype}")
    if rows.dim() == 0:
        raise ValueError("input must have a dimension of rows, got shape []")
    # on CUDA the gradient of an index has the same bits every time, that of index_select has not
    return rows[indices] if rows.is_cuda else rows.index_select(0, indices)

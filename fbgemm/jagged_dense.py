"""Bags beside padded dense tensors: from one to the other, sums and products of both.

Shapes: values [N, D] (or [N]) of the bags of offsets, a tensor for each of n jagged dims, O_1 [B + 1]; a dense tensor
[B, M_1, ..., M_n, D]; lengths [B].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise import kernels

from .registry import in_words, op


@op(
    "dense_to_jagged(Tensor dense, Tensor[] x_offsets, SymInt? total_L=None) -> (Tensor, Tensor[])",
    differentiable=True,
    words={"offsets": "x_offsets", "total_length": "total_L"},
)
def dense_to_jagged(
    dense: Tensor, x_offsets: Sequence[Tensor], total_L: int | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The values of the bags out of a dense tensor, and the offsets; `total_L`, their number, saves a wait."""
    return kernels.padded_dense_to_jagged(dense, x_offsets, total_L), _copies(x_offsets)


@op(
    "jagged_to_padded_dense(Tensor values, Tensor[] offsets, SymInt[] max_lengths, float padding_value=0.) -> Tensor",
    differentiable=True,
)
def jagged_to_padded_dense(
    values: Tensor, offsets: Sequence[Tensor], max_lengths: Sequence[int], padding_value: float = 0.0
) -> Tensor:
    """Each bag in a row of its own, cut at `max_lengths` or filled up: [B, *max_lengths, D]."""
    return kernels.jagged_to_padded_dense(values, offsets, list(max_lengths), padding_value)


@op(
    "jagged_1d_to_dense(Tensor values, Tensor offsets, SymInt max_sequence_length, int padding_value) -> Tensor",
    differentiable=True,
    words={"max_lengths": "max_sequence_length"},
)
def jagged_1d_to_dense(values: Tensor, offsets: Tensor, max_sequence_length: int, padding_value: int) -> Tensor:
    """Values [N] as [B, max_sequence_length]."""
    if values.dim() != 1:
        raise ValueError(f"values must have one dimension, got shape {list(values.shape)}")
    return kernels.jagged_to_padded_dense(values, offsets, max_sequence_length, padding_value)


@op(
    "jagged_2d_to_dense(Tensor values, Tensor offsets, SymInt max_sequence_length) -> Tensor",
    differentiable=True,
    words={"max_lengths": "max_sequence_length"},
)
def jagged_2d_to_dense(values: Tensor, offsets: Tensor, max_sequence_length: int) -> Tensor:
    """Values [N, D] as [B, max_sequence_length, D], zeros where there are none."""
    return kernels.jagged_to_padded_dense(values, offsets, max_sequence_length)


@op(
    "jagged_dense_elementwise_add_jagged_output(Tensor x_values, Tensor[] x_offsets, Tensor y) -> (Tensor, Tensor[])",
    differentiable=True,
    words={"values": "x_values", "offsets": "x_offsets", "dense": "y"},
)
def jagged_dense_elementwise_add_jagged_output(
    x_values: Tensor, x_offsets: Sequence[Tensor], y: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Each value plus what the dense tensor has at its place, and the offsets; values that it cuts off stay."""
    return _add_jagged(x_values, x_offsets, y), _copies(x_offsets)


@op(
    "jagged_dense_dense_elementwise_add_jagged_output(Tensor x_values, Tensor[] x_offsets, Tensor y_0, Tensor y_1)"
    " -> (Tensor, Tensor[])",
    differentiable=True,
    words={"values": "x_values", "offsets": "x_offsets"},
)
def jagged_dense_dense_elementwise_add_jagged_output(
    x_values: Tensor, x_offsets: Sequence[Tensor], y_0: Tensor, y_1: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Each value plus what two dense tensors have at its place, and the offsets."""
    return _add_y_1(_add_y_0(x_values, x_offsets, y_0), x_offsets, y_1), _copies(x_offsets)


@op(
    "jagged_dense_elementwise_add(Tensor x_values, Tensor[] x_offsets, Tensor y) -> Tensor",
    differentiable=True,
    words={"values": "x_values", "offsets": "x_offsets", "dense": "y"},
)
def jagged_dense_elementwise_add(x_values: Tensor, x_offsets: Sequence[Tensor], y: Tensor) -> Tensor:
    """The dense tensor with each value added at its place."""
    return kernels.jagged_dense_add(*_of_one_dtype(x_values, x_offsets, y))


@op(
    "jagged_dense_elementwise_mul(Tensor x_values, Tensor[] x_offsets, Tensor y) -> (Tensor, Tensor[])",
    differentiable=True,
    words={"values": "x_values", "offsets": "x_offsets", "dense": "y"},
)
def jagged_dense_elementwise_mul(
    x_values: Tensor, x_offsets: Sequence[Tensor], y: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Each value times what the dense tensor has at its place, 0 for those that it cuts off; and the offsets."""
    return kernels.jagged_dense_mul(*_of_one_dtype(x_values, x_offsets, y)), _copies(x_offsets)


@op(
    "jagged_dense_bmm(Tensor x_values, Tensor x_offsets, Tensor y, int max_L) -> (Tensor, Tensor)",
    differentiable=True,
    words={"values": "x_values", "offsets": "x_offsets", "dense": "y", "max_length": "max_L"},
)
def jagged_dense_bmm(x_values: Tensor, x_offsets: Tensor, y: Tensor, max_L: int) -> tuple[Tensor, Tensor]:
    """Rows [N, M] of each bag, `max_L` at most, times its matrix of y [B, M, K]: [N, K], and the offsets."""
    return kernels.jagged_dense_bmm(x_values, x_offsets, y, max_L), x_offsets.clone()


@op(
    "jagged_jagged_bmm(Tensor x_values, Tensor y_values, Tensor x_offsets, int max_L) -> Tensor",
    differentiable=True,
    words={"x": "x_values", "y": "y_values", "offsets": "x_offsets", "max_length": "max_L"},
)
def jagged_jagged_bmm(x_values: Tensor, y_values: Tensor, x_offsets: Tensor, max_L: int) -> Tensor:
    """Transposed rows [N, M] of each bag, `max_L` at most, times those [N, K] of another: [B, M, K]."""
    return kernels.jagged_jagged_bmm(x_values, y_values, x_offsets, max_L)


@op(
    "jagged_softmax(Tensor values, Tensor x_offsets, int max_L) -> (Tensor, Tensor)",
    differentiable=True,
    words={"offsets": "x_offsets", "max_length": "max_L"},
)
def jagged_softmax(values: Tensor, x_offsets: Tensor, max_L: int) -> tuple[Tensor, Tensor]:
    """Softmax of each column [N, D] over the rows of each bag, `max_L` at most, 0 for others; and the offsets."""
    return kernels.jagged_softmax(values, x_offsets, max_L), x_offsets.clone()


@op(
    "batched_dense_vec_jagged_2d_mul(Tensor v, Tensor a_values, Tensor a_offsets) -> Tensor",
    differentiable=True,
    words={"vectors": "v", "values": "a_values", "offsets": "a_offsets"},
)
def batched_dense_vec_jagged_2d_mul(v: Tensor, a_values: Tensor, a_offsets: Tensor) -> Tensor:
    """Rows [N, H*D] of each bag added up with the weights of each head, v [B*H, L]: [B*H, D]."""
    return kernels.jagged_vector_product(v, a_values, a_offsets)


@op(
    "stacked_jagged_1d_to_dense(Tensor values, Tensor lengths, int[] offset_per_key, int[] max_lengths_per_key,"
    " int padding_value) -> Tensor[]",
    differentiable=True,
    words={"offsets": "offsets by lengths", "max_lengths": "max_lengths_per_key"},
)
def stacked_jagged_1d_to_dense(
    values: Tensor,
    lengths: Tensor,
    offset_per_key: Sequence[int],
    max_lengths_per_key: Sequence[int],
    padding_value: int,
) -> list[Tensor]:
    """Of each of T keys its values as [B, max length of the key]; lengths [T, B], offset_per_key [T + 1]."""
    if values.dim() != 1:
        raise ValueError(f"values must have one dimension, got shape {list(values.shape)}")
    return _stacked_to_dense(values, lengths, offset_per_key, max_lengths_per_key, padding_value)


@op(
    "stacked_jagged_2d_to_dense(Tensor values, Tensor lengths, int[] offset_per_key, int[] max_lengths_per_key,"
    " int padding_value=0) -> Tensor[]",
    differentiable=True,
    words={"offsets": "offsets by lengths", "max_lengths": "max_lengths_per_key"},
)
def stacked_jagged_2d_to_dense(
    values: Tensor,
    lengths: Tensor,
    offset_per_key: Sequence[int],
    max_lengths_per_key: Sequence[int],
    padding_value: int = 0,
) -> list[Tensor]:
    """Of each of T keys its values as [B, max length of the key, D]; lengths [T, B], offset_per_key [T + 1]."""
    if values.dim() != 2:
        raise ValueError(f"values must have two dimensions, got shape {list(values.shape)}")
    return _stacked_to_dense(values, lengths, offset_per_key, max_lengths_per_key, padding_value)


def _stacked_to_dense(
    values: Tensor,
    lengths: Tensor,
    offset_per_key: Sequence[int],
    max_lengths_per_key: Sequence[int],
    padding_value: int,
) -> list[Tensor]:
    if lengths.dim() != 2:
        raise ValueError(f"lengths must be [keys, batch], got shape {list(lengths.shape)}")
    keys = lengths.shape[0]
    for name, numbers, size in (
        ("offset_per_key", offset_per_key, keys + 1),
        ("max_lengths_per_key", max_lengths_per_key, keys),
    ):
        if len(numbers) != size:
            raise ValueError(f"{name} must have {size} entries for the {keys} keys of lengths, got {list(numbers)}")
    ends = [0, *offset_per_key, values.shape[0]]
    if sorted(ends) != ends:
        raise ValueError(
            f"offset_per_key must go up from 0 to at most {values.shape[0]} values, got {list(offset_per_key)}"
        )
    offsets = kernels.complete_cumsum(lengths)  # [T, B + 1]
    return [
        kernels.jagged_to_padded_dense(
            values[offset_per_key[t] : offset_per_key[t + 1]], offsets[t], max_lengths_per_key[t], padding_value
        )
        for t in range(keys)
    ]


def _add_jagged(x_values: Tensor, x_offsets: Sequence[Tensor], y: Tensor) -> Tensor:
    return kernels.jagged_dense_add_jagged(*_of_one_dtype(x_values, x_offsets, y))


_add_y_0, _add_y_1 = (in_words(_add_jagged, {"dense": name}) for name in ("y_0", "y_1"))


def _of_one_dtype(x_values: Tensor, x_offsets: Sequence[Tensor], y: Tensor) -> tuple[Tensor, Sequence[Tensor], Tensor]:
    """Both in the dtype that torch would add them up in."""
    if x_values.dtype == y.dtype:
        return x_values, x_offsets, y
    dtype = torch.promote_types(x_values.dtype, y.dtype)
    return x_values.to(dtype), x_offsets, y.to(dtype)


def _copies(offsets: Sequence[Tensor]) -> list[Tensor]:
    # an op's outputs share no memory with its arguments
    return [each.clone() for each in offsets]

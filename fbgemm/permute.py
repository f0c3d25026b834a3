"""Segments in another order: bags of features, rows of bags, sequences of embeddings.

Shapes: permute [S] which of T segments comes where, repeats and omissions allowed; lengths [T], or [T, B] of T
features; values and weights [N, ...], N the sum of the lengths. `permuted_lengths_sum` is the number of values moved,
where it is known: then nothing waits for the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise import kernels

from .registry import op

_Permuted = tuple[Tensor, Tensor, Tensor | None]


@op(
    "permute_1D_sparse_data(Tensor permute, Tensor lengths, Tensor values, Tensor? weights=None,"
    " SymInt? permuted_lengths_sum=None) -> (Tensor, Tensor, Tensor?)",
    differentiable=True,
)
def permute_1d_sparse_data(
    permute: Tensor,
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None = None,
    permuted_lengths_sum: int | None = None,
) -> _Permuted:
    """Lengths [S], values and weights with bags in another order."""
    return kernels.permute_1d(permute, lengths, values, weights, permuted_lengths_sum=permuted_lengths_sum)


@op(
    "permute_2D_sparse_data(Tensor permute, Tensor lengths, Tensor values, Tensor? weights=None,"
    " SymInt? permuted_lengths_sum=None) -> (Tensor, Tensor, Tensor?)",
    differentiable=True,
)
def permute_2d_sparse_data(
    permute: Tensor,
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None = None,
    permuted_lengths_sum: int | None = None,
) -> _Permuted:
    """Lengths [S, B], values and weights with features in another order."""
    return kernels.permute_2d(permute, lengths, values, weights, permuted_lengths_sum=permuted_lengths_sum)


@op(
    "permute_sparse_data(Tensor permute, Tensor lengths, Tensor values, Tensor? weights=None,"
    " SymInt? permuted_lengths_sum=None) -> (Tensor, Tensor, Tensor?)",
    differentiable=True,
)
def permute_sparse_data(
    permute: Tensor,
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None = None,
    permuted_lengths_sum: int | None = None,
) -> _Permuted:
    """Lengths [S, B], values and weights with features in another order."""
    return kernels.permute_2d(permute, lengths, values, weights, permuted_lengths_sum=permuted_lengths_sum)


@op(
    "permute_sparse_features(Tensor permute, Tensor lengths, Tensor indices, Tensor? weights=None)"
    " -> (Tensor, Tensor, Tensor?)",
    differentiable=True,
    words={"values": "indices"},
)
def permute_sparse_features(
    permute: Tensor, lengths: Tensor, indices: Tensor, weights: Tensor | None = None
) -> _Permuted:
    """Lengths [S, B], indices and weights with features in another order."""
    return kernels.permute_2d(permute, lengths, indices, weights)


@op(
    "permute_2D_sparse_data_input1D(Tensor permute, Tensor lengths, Tensor values, SymInt stride,"
    " Tensor? weights=None, SymInt? permuted_lengths_sum=None) -> (Tensor, Tensor, Tensor?)",
    differentiable=True,
)
def permute_2d_sparse_data_input_1d(
    permute: Tensor,
    lengths: Tensor,
    values: Tensor,
    stride: int,
    weights: Tensor | None = None,
    permuted_lengths_sum: int | None = None,
) -> _Permuted:
    """`permute_2D_sparse_data` of lengths [T * stride], which gives lengths [S * stride]."""
    if stride < 1 or lengths.numel() % stride:
        raise ValueError(f"stride must divide the {lengths.numel()} lengths, got {stride}")
    permuted = kernels.permute_2d(
        permute, lengths.reshape(-1, stride), values, weights, permuted_lengths_sum=permuted_lengths_sum
    )
    return permuted[0].view(-1), permuted[1], permuted[2]


@op("permute_sequence_embeddings(Tensor permute, Tensor lengths, Tensor embeddings) -> (Tensor, Tensor)",
    differentiable=True, words={"values": "embeddings"},
)  # fmt: skip
def permute_sequence_embeddings(permute: Tensor, lengths: Tensor, embeddings: Tensor) -> tuple[Tensor, Tensor]:
    """Lengths [S, B] and embeddings [M, D] with features in another order."""
    return kernels.permute_2d(permute, lengths, embeddings)[:2]


def _preallocated_fake(
    permute: Tensor,
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None = None,
    permuted_lengths_sum: int | None = None,
    permuted_lengths_out: Tensor | None = None,
    permuted_indices_out: Tensor | None = None,
    permuted_weights_out: Tensor | None = None,
) -> _Permuted:
    moved: int | torch.SymInt = (
        torch.library.get_ctx().new_dynamic_size() if permuted_lengths_sum is None else permuted_lengths_sum
    )
    new_lengths, new_values, new_weights = permuted_lengths_out, permuted_indices_out, permuted_weights_out
    if new_lengths is None:
        new_lengths = lengths.new_empty(permute.shape[0], lengths.shape[1])
    if new_values is None:
        new_values = values.new_empty(moved, *values.shape[1:])
    if weights is None:
        return new_lengths, new_values, None
    if new_weights is None:
        new_weights = weights.new_empty(moved, *weights.shape[1:])
    return new_lengths, new_values, new_weights


@op(
    "permute_2D_sparse_preallocated_out(Tensor permute, Tensor lengths, Tensor values, Tensor? weights=None,"
    " SymInt? permuted_lengths_sum=None, Tensor(a!)? permuted_lengths_out=None, Tensor(b!)? permuted_indices_out=None,"
    " Tensor(c!)? permuted_weights_out=None) -> (Tensor(a!), Tensor(b!), Tensor(c!)?)",
    fake=_preallocated_fake,
)
def permute_2d_sparse_preallocated_out(
    permute: Tensor,
    lengths: Tensor,
    values: Tensor,
    weights: Tensor | None = None,
    permuted_lengths_sum: int | None = None,
    permuted_lengths_out: Tensor | None = None,
    permuted_indices_out: Tensor | None = None,
    permuted_weights_out: Tensor | None = None,
) -> _Permuted:
    """`permute_2D_sparse_data` into tensors that are given; what they have room for besides stays as it is."""
    new_lengths, new_values, new_weights = kernels.permute_2d(
        permute, lengths, values, weights, permuted_lengths_sum=permuted_lengths_sum
    )
    return (
        _written("permuted_lengths_out", permuted_lengths_out, new_lengths),
        _written("permuted_indices_out", permuted_indices_out, new_values),
        None if new_weights is None else _written("permuted_weights_out", permuted_weights_out, new_weights),
    )


def _written(name: str, out: Tensor | None, numbers: Tensor) -> Tensor:
    """The numbers at the beginning of `out`; they alone where there is none."""
    if out is None:
        return numbers
    if out.dtype != numbers.dtype:
        raise TypeError(f"{name} must be {numbers.dtype}, got {out.dtype}")
    if out.shape == numbers.shape:
        return out.copy_(numbers)
    if out.numel() < numbers.numel():
        raise ValueError(f"{name} must have room for {numbers.numel()} numbers, got shape {list(out.shape)}")
    if out.dim() != 1 and not out.is_contiguous():
        raise ValueError(f"{name} must have shape {list(numbers.shape)} or be contiguous, got {list(out.shape)}")
    out.view(-1)[: numbers.numel()].copy_(numbers.flatten())
    return out


@op("invert_permute(Tensor permute) -> Tensor")
def invert_permute(permute: Tensor) -> Tensor:
    """Where each of 0 ... n - 1 lies in `permute`, read in the order of memory; its shape."""
    if permute.dim() == 1:
        return kernels.invert_permute(permute)
    return kernels.invert_permute(permute.reshape(-1)).view(permute.shape)


@op("permute102_baddbmm_permute102(Tensor bias, Tensor A, Tensor B) -> Tensor", differentiable=True, autocast=True)
def permute102_baddbmm_permute102(bias: Tensor, A: Tensor, B: Tensor) -> Tensor:
    """Row m of batch b of A [M, G, K] times B [G, K, N] plus bias [G, N]: [M, G, N]."""
    if A.dim() != 3 or B.dim() != 3 or A.shape[1:] != B.shape[:2] or bias.shape != (B.shape[0], B.shape[2]):
        shapes = [list(each.shape) for each in (bias, A, B)]
        raise ValueError(f"bias, A and B must have shapes [G, N], [M, G, K] and [G, K, N], got {shapes}")
    if A.dtype != bias.dtype or B.dtype != bias.dtype:
        raise TypeError(f"A and B must have the dtype of bias, {bias.dtype}, got {A.dtype} and {B.dtype}")
    return torch.baddbmm(bias.unsqueeze(1), A.transpose(0, 1), B).transpose(0, 1)

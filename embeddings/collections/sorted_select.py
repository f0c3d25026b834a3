"""Rows by index, as `EmbeddingCollection` of TorchRec 1.9 expands rows of ids that were looked up once.

Shapes: rows [R, D], indices [N]; Y [N, D].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.kernels import jagged_index_add


class _SortedSelect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, indices: Tensor) -> Tensor:
        ctx.save_for_backward(indices)
        ctx.rows = rows.shape[0]
        return rows.index_select(0, indices)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (grad,), (indices,) = grad_outputs, ctx.saved_tensors
        # bags of one row
        sizes = [torch.ones(n, dtype=indices.dtype, device=indices.device) for n in (indices.shape[0], ctx.rows)]
        return jagged_index_add(grad.contiguous(), sizes[0], indices, sizes[1], num_rows=ctx.rows), None


def sorted_index_select(embeddings: Tensor, reverse_indices: Tensor) -> Tensor:
    """`embeddings.index_select(0, reverse_indices)` with a gradient that has the same bits every time.

    Gradients of one row are added in the order of the indices, in fp32 at least, without atomics.

    Args:
        embeddings: [R, D], floating.
        reverse_indices: [N] int32 or int64.

    Raises:
        IndexError: on the CPU, an index outside [0, R).
    """
    return _SortedSelect.apply(embeddings, reverse_indices)  # type: ignore[no-any-return, no-untyped-call]


def maybe_sorted_index_select(embeddings: Tensor, indices: Tensor, use_sorted: bool) -> Tensor:
    """`sorted_index_select`, or torch's `index_select` without `use_sorted` and in TorchScript."""
    if torch.jit.is_scripting():  # type: ignore[attr-defined]
        return embeddings.index_select(0, indices)
    if use_sorted:
        return sorted_index_select(embeddings, indices)
    return embeddings.index_select(0, indices)

"""Lookups whose backward gives the tables a sparse gradient: what FBGEMM's optimizer NONE does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...embeddings.tables.row_sums import sum_rows
from ...embeddings.tables.table_group import TableGroup


class _LookupWithSparseGradient(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weights: Tensor,
        per_id_weights: Tensor | None,
        group: TableGroup,
        ids: Tensor,
        offsets: Tensor,
        pooling: str,
    ) -> Tensor:
        ctx.save_for_backward(per_id_weights, ids, offsets)
        ctx.group, ctx.pooling, ctx.like = group, pooling, (weights.shape, weights.dtype)
        return group.look_up(ids, offsets, per_id_weights, pooling)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        per_id_weights, ids, offsets = ctx.saved_tensors
        group: TableGroup = ctx.group
        of_tables = of_weights = None
        if ctx.needs_input_grad[1]:
            of_weights = group.weight_gradient(grad_outputs[0], ids, offsets)
        if ctx.needs_input_grad[0]:
            # tables of one dim lie in one segment
            (sums,) = sum_rows(group, grad_outputs[0], ids, offsets, per_id_weights, ctx.pooling)
            shape, dtype = ctx.like
            of_tables = torch.sparse_coo_tensor(
                sums.rows[None], sums.gradient.to(dtype), shape, is_coalesced=True, check_invariants=False
            )
        return of_tables, of_weights, None, None, None, None


def look_up_with_sparse_gradient(
    weights: Tensor, group: TableGroup, ids: Tensor, offsets: Tensor, per_id_weights: Tensor | None, pooling: str
) -> Tensor:
    """As `TableGroup.look_up` of tables of one dim, whose rows are the rows of `weights` [rows of all, dim].

    Each row that was looked up has a place in the gradient, in ascending order; waits for the device there.
    """
    return _LookupWithSparseGradient.apply(weights, per_id_weights, group, ids, offsets, pooling)  # type: ignore[no-any-return, no-untyped-call]

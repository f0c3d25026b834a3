"""Lookups whose backward gives the tables a sparse gradient: what FBGEMM's optimizer NONE does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.embeddings.tables.row_sums import sum_rows
from shardwise.embeddings.tables.table_group import TableGroup
from shardwise.kernels._op import no_second_derivative


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
        ctx.group, ctx.pooling, ctx.shape = group, pooling, weights.shape
        return group.look_up(ids, offsets, per_id_weights, pooling)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            grads = no_second_derivative("lookup with a sparse gradient", _gradients, ctx, grad_outputs)
        else:
            grads = _gradients(ctx, *grad_outputs)
        of_rows, of_weights = grads
        if of_rows is not None:
            of_rows = torch.sparse_coo_tensor(
                ctx.rows[None], of_rows, ctx.shape, is_coalesced=True, check_invariants=False
            )
        return of_rows, of_weights, None, None, None, None


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Those of the rows that were looked up, which it leaves in `ctx.rows`, and of per-id weights."""
    per_id_weights, ids, offsets = ctx.saved_tensors
    group: TableGroup = ctx.group
    of_rows = of_weights = None
    if ctx.needs_input_grad[1]:
        of_weights = group.weight_gradient(grad, ids, offsets)
    if ctx.needs_input_grad[0]:
        # tables of one dim lie in one segment
        (sums,) = sum_rows(group, grad, ids, offsets, per_id_weights, ctx.pooling)
        ctx.rows, of_rows = sums.rows, sums.gradient.to(group.flat.dtype)
    return of_rows, of_weights


def look_up_with_sparse_gradient(
    weights: Tensor, group: TableGroup, ids: Tensor, offsets: Tensor, per_id_weights: Tensor | None, pooling: str
) -> Tensor:
    """As `TableGroup.look_up` of tables of one dim, whose rows are the rows of `weights` [rows of all, dim].

    Each row that was looked up has a place in the gradient, in ascending order; waits for the device there.
    """
    return _LookupWithSparseGradient.apply(weights, per_id_weights, group, ids, offsets, pooling)  # type: ignore[no-any-return, no-untyped-call]

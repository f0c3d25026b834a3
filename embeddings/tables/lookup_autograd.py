"""Lookups of a `TableGroup` as autograd sees them: what a backward does to the tables, or to their parameters.

A table is trained by a backward if it was trained when it was looked up, and still is: not frozen by
`requires_grad_(False)` before the one nor the other, and not looked up by a module in `eval()`.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.kernels import table_rows
from shardwise.kernels._op import INTERPRETED, no_second_derivative

from .index_ahead import index_ahead

if TYPE_CHECKING:
    from .table_group import TableGroup


class LookupWithUpdate(torch.autograd.Function):
    """A lookup whose backward is the optimizer's step. It hangs on `anchor`; weights are no autograd input."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, per_id_weights: Tensor | None, group: TableGroup, ids: Tensor | None, slots: Tensor,
        offsets: Tensor, pooling: str, lease: Any, frozen: tuple[bool, ...] | None,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(slots, offsets, per_id_weights, ids)
        # not saved: updates of other lookups may come between this forward and its backward
        ctx.group, ctx.pooling, ctx.lease = group, pooling, lease
        # which tables are left alone; None where the backward trains none
        ctx.frozen = frozen
        out = group.look_up(slots, offsets, per_id_weights, pooling)
        ctx.index = None
        # no update on a CPU takes one
        if frozen and (slots.is_cuda or INTERPRETED):
            ctx.index = index_ahead(group, slots, offsets, per_id_weights, ids, pooling=pooling, frozen=frozen)
        ctx.holds = frozen is not None or ctx.needs_input_grad[1]
        if not ctx.holds:
            # nobody comes back for the rows
            group.store.release(lease)
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            # create_graph: an update is no function that autograd follows
            return no_second_derivative("lookup with a fused optimizer", LookupWithUpdate.backward, ctx, grad_outputs)
        (grad,) = grad_outputs
        slots, offsets, per_id_weights, ids = ctx.saved_tensors
        group: TableGroup = ctx.group
        grad_p = None
        if ctx.needs_input_grad[1]:
            # before the update: this gradient is of the rows that were looked up
            grad_p = group.weight_gradient(grad, slots, offsets)
        if ctx.frozen is None:
            warn_of_eval()
        else:
            group.update(
                grad, slots, offsets, per_id_weights, pooling=ctx.pooling, frozen=ctx.frozen, ids=ids, index=ctx.index
            )
        if ctx.holds:
            group.release(ctx.lease)
        return (None, grad_p, *[None] * 7)


def warn_of_eval() -> None:
    """Say that a backward leaves tables as they are, which looks like training that does not learn."""
    warnings.warn(
        "a batch was looked up in eval() and its backward leaves the tables as they are: call train() before the"
        " forward of a batch that is to train them",
        stacklevel=2,
    )


class _FlatOfParameters(torch.autograd.Function):
    """The flat buffer as a function of the parameters that are views of it: gradients are cut along the same lines."""

    @staticmethod
    def forward(ctx: Any, group: TableGroup, flat: Tensor, *parameters: Tensor) -> Tensor:
        ctx.cuts = group.cuts
        return flat.view_as(flat)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        (grad,) = grad_outputs
        found: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for segment, tables, rows in ctx.cuts:
            matrix = table_rows(grad, segment.base, segment.end_row - segment.first_row, segment.dim)
            # not views of one tensor to autograd, which lets nobody change one of several in place
            for t, part in zip(tables, torch.unsafe_split_with_sizes(matrix, rows), strict=True):
                if ctx.needs_input_grad[2 + t]:
                    found[2 + t] = part
        return tuple(found)


def flat_of_parameters(group: TableGroup, keep_rows: bool = False) -> Tensor:
    if not torch.is_grad_enabled() or not any(p.requires_grad for p in group.parameters):
        return group.flat
    # the flag, not `is_exporting()`: that is true in whatever dynamo of torch 2.9 compiles, and nothing would train
    if torch.compiler._is_exporting_flag:
        # an exported program looks up and does not train: the buffer is one of its constants
        return group.flat.detach()
    # gradients of tables need no rows, so an optimizer may step between forward and backward, as it may with
    # nn.Embedding: `.data` counts its changes apart. With `keep_rows` autograd refuses the backward after such a step
    flat = group.flat if keep_rows else group.flat.data
    return _FlatOfParameters.apply(group, flat, *group.parameters)  # type: ignore[no-any-return, no-untyped-call]

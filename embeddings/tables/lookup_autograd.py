"""Lookups of a `TableGroup` as autograd sees them: what a backward does to the tables, or to their parameters.

A table is trained by a backward if it was trained when it was looked up, and still is: not frozen by
`requires_grad_(False)` before the one nor the other, and not looked up by a module in `eval()`.
"""

from __future__ import annotations

import warnings
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.kernels import table_rows, update_index
from shardwise.kernels._op import INTERPRETED, capturing, no_second_derivative
from shardwise.kernels.configs import setting

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
            group.release_unchanged(lease)
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
            group.require_held(ctx.lease)
            group.update(
                grad, slots, offsets, per_id_weights, pooling=ctx.pooling, frozen=ctx.frozen, ids=ids, index=ctx.index
            )
        if ctx.holds and ctx.frozen is None:
            group.release_unchanged(ctx.lease)
        elif ctx.holds:
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
        grads: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        for segment, tables, rows in ctx.cuts:
            matrix = table_rows(grad, segment.base, segment.end_row - segment.first_row, segment.dim)
            # not views of one tensor to autograd, which lets nobody change one of several in place
            for t, part in zip(tables, torch.unsafe_split_with_sizes(matrix, rows), strict=True):
                if ctx.needs_input_grad[2 + t]:
                    grads[2 + t] = part
        return tuple(grads)


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


class IndexAhead:
    """The index of the batch of one lookup, for its update; nothing where updates make none, on a CPU.

    Ids are known in forward: on a GPU the index is made on a stream of its own, beside what the model does until the
    gradient comes back. Off by default (`LookupPolicy.index_in_forward`); results have the same bits.
    """

    def __init__(
        self,
        group: TableGroup,
        slots: Tensor,
        offsets: Tensor,
        per_id_weights: Tensor | None,
        ids: Tensor | None,
        *,
        pooling: str,
        frozen: tuple[bool, ...],
    ) -> None:
        self._frozen, self._done, self._segments = frozen, None, group._segment_numbers
        features = group.trained(frozen)
        batch = (slots, offsets, per_id_weights, features)
        hashed = group.seed is not None and group.flat.dtype != torch.float32
        rest = (group.dims, group._segment_numbers, pooling)
        beside = _beside(slots.device)
        if beside is None:
            self._tensors = update_index(*batch, *rest, hashed=hashed, ids=ids)
            return
        beside.wait_stream(_current(slots.device))
        with torch.cuda.stream(beside):
            self._tensors = update_index(*batch, *rest, hashed=hashed, ids=ids)
            self._done = beside.record_event()
        # if no backward comes, nobody else keeps them for the stream
        _record((*batch, ids), beside)

    def tensors(self, frozen: tuple[bool, ...], segments: list[int]) -> list[Tensor] | None:
        """The tensors of `fused_update` on the current stream.

        None if other tables are left alone now, or they lie elsewhere: `segments` are the group's.
        """
        if frozen != self._frozen or segments is not self._segments:
            return None
        if self._done is not None:
            here = _current(self._tensors[0].device)
            here.wait_event(self._done)
            _record(self._tensors, here)
        return self._tensors


def index_ahead(
    group: TableGroup,
    slots: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    ids: Tensor | None,
    *,
    pooling: str,
    frozen: tuple[bool, ...],
) -> IndexAhead | None:
    """The index of a batch that was looked up, if the group makes them in forward and nothing is compiled or captured.

    While gradients wait for a step there is no update that would take it.
    """
    if not setting("index.in_forward", group.policy.index_in_forward) or group.accumulation.waits:
        return None
    if torch.compiler.is_compiling() or not slots.shape[0] or (slots.is_cuda and capturing()):
        return None
    return IndexAhead(group, slots, offsets, per_id_weights, ids, pooling=pooling, frozen=frozen)


def _beside(device: torch.device) -> Any:
    return _stream(device) if device.type == "cuda" else None


@cache
def _stream(device: torch.device) -> Any:
    # one for all groups of a device: their indices are made one after another
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _current(device: torch.device) -> Any:
    return torch.cuda.current_stream(device)


def _record(tensors: Any, stream: Any) -> None:
    """Keep the memory of tensors until the stream is done with it."""
    for tensor in tensors:
        if tensor is not None:
            tensor.record_stream(stream)

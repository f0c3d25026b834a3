"""The lookups of a sharded collection as autograd sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwise.kernels._op import no_second_derivative

from .results import cut_gradient

if TYPE_CHECKING:
    from .collection import ShardedCollection
    from .owner import InFlight


class Finish(torch.autograd.Function):
    """Rows of the exchanged lookups; its backward is the exchange back and the fused update."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, collection: ShardedCollection, flight: InFlight, *weights: Any) -> Tensor:
        ctx.collection, ctx.flight = collection, flight
        return collection._assemble(flight)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return no_second_derivative("lookup in sharded tables", Finish.backward, ctx, grad_outputs)
        learned, watch = any(ctx.needs_input_grad[3:]), ctx.collection._exchange.watch
        try:
            sent, at_home = ctx.collection._update(ctx.flight, *grad_outputs, learned=learned)
        except BaseException as error:
            if watch is not None:
                watch.report(error, "in backward")
            raise
        return None, None, None, sent, *at_home


class CutGradient(torch.autograd.Function):
    """A tensor as it is, whose gradient is cut to +-`most`; `checked` as for `cut_gradient`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, most: float, checked: bool) -> Tensor:
        ctx.most, ctx.checked = most, checked
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        (grad,) = grad_outputs
        return cut_gradient(grad.float(), ctx.most, checked=ctx.checked).to(grad.dtype), None, None

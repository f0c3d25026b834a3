"""An exchange as a differentiable function: what `comm_ops` is made of.

A collective is one all-to-all and its transpose. Forward it starts where the function is called and finishes where the
result is waited for; backward it starts where the result was used and finishes where the input was made. Layouts before
and after it are ordinary torch. A sum over ranks is taken here, in the order of the ranks, from what they sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import reduce
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function

from shardwise.kernels._op import no_second_derivative

from ..comms.awaitable import Awaitable, NoWait
from ..comms.codecs import Codec
from ..comms.env import get_gradient_division
from ..comms.exchange import Exchange, Pending
from ..comms.qcomms import QuantizedCommCodecs, codec_pair

_sync_collectives = False


def set_use_sync_collectives(val: bool) -> None:
    """Whether functions of `comm_ops` wait for the result before they return; False at first."""
    global _sync_collectives
    _sync_collectives = val


def get_use_sync_collectives() -> bool:
    """What `set_use_sync_collectives` said."""
    return _sync_collectives


@contextmanager
def torchrec_use_sync_collectives() -> Iterator[None]:
    """Inside, functions of `comm_ops` wait for the result before they return."""
    before = _sync_collectives
    set_use_sync_collectives(True)
    try:
        yield
    finally:
        set_use_sync_collectives(before)


class _OneWay:
    """Numbers on their way between ranks, as `rows` of an exchange or its transpose takes them."""

    def __init__(
        self, rows: Callable[..., Pending], send_sizes: Sequence[int], sizes: Sequence[int], codec: Codec | None
    ) -> None:
        self._rows, self._send_sizes, self._sizes = rows, send_sizes, sizes
        self._codec = codec if codec is not None and codec.compresses else None
        self._pending: Pending | None = None

    def start(self, values: Tensor) -> None:
        flag, values = None, values.contiguous()
        if self._codec is not None:
            values = values.to(torch.float32)
            # all ranks are told of what does not fit, in the bytes of the exchange itself
            flag = self._codec.overflows(values).to(torch.int32).view(1)
        self._pending = self._rows(values, self._send_sizes, self._sizes, codec=self._codec, flag=flag)

    def finish(self) -> Tensor:
        pending, self._pending = self._pending, None
        assert pending is not None
        came = pending.wait()
        if any(pending.flags):
            assert self._codec is not None
            ranks = [rank for rank, flag in enumerate(pending.flags) if flag]
            raise OverflowError(
                f"ranks {ranks}: a number is too large for the compressed exchange ({self._codec.name}): choose a wider"
                " format or a smaller loss scale"
            )
        return came


class Request(Awaitable[Tensor]):
    """A tensor that is on its way to this rank."""

    def __init__(self, token: Tensor, ways: tuple[_OneWay, _OneWay], after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._token, self._ways, self._after = token, ways, after

    def _wait_impl(self) -> Tensor:
        return self._after(_Finish.apply(self._token, *self._ways))  # type: ignore[no-untyped-call]


def exchanged(
    exchange: Exchange,
    values: Tensor,
    send_sizes: Sequence[int],
    sizes: Sequence[int],
    after: Callable[[Tensor], Tensor],
    codecs: QuantizedCommCodecs | None,
) -> Awaitable[Tensor]:
    """Send `send_sizes[r]` numbers of `values` to each rank r; the result is `after` of the flat tensor that came."""
    if exchange.alone:
        return NoWait(values)
    codec, codec_back = (None, None) if codecs is None else codec_pair(codecs, values.device)
    ways = (
        _OneWay(exchange.rows, send_sizes, sizes, codec),
        _OneWay(exchange.rows_transpose, sizes, send_sizes, codec_back),
    )
    token: Tensor = _Start.apply(values.reshape(-1), *ways, exchange.world_size)  # type: ignore[no-untyped-call]
    kind = None if codec is None else codec.output_dtype
    request = Request(token, ways, after if kind is None else lambda came: after(came).to(kind))
    if _sync_collectives:
        request.wait()
    return request


def summed(
    exchange: Exchange, values: Tensor, sizes: Sequence[int], shape: torch.Size, codecs: QuantizedCommCodecs | None
) -> Awaitable[Tensor]:
    """The sum over ranks, in their order, of what they send here: `sizes[r]` numbers go to rank r; of this `shape`."""
    if exchange.alone:
        return NoWait(values.reshape(shape))
    local = sizes[exchange.rank]
    world = exchange.world_size
    return exchanged(
        exchange, values, sizes, [local] * world, lambda came: _in_order(came.view(world, local)).view(shape), codecs
    )


def _in_order(parts: Tensor) -> Tensor:
    """The sum of parts [W, n], rank after rank; fp16 and bf16 are added in fp32 and rounded once."""
    wide = parts.to(torch.float32 if parts.dtype.itemsize < 4 else parts.dtype)
    return reduce(torch.add, wide.unbind()).to(parts.dtype)


def copies(values: Tensor, count: int) -> Tensor:
    """Flat `values` for each of `count` ranks, one after another; gradients add up in the order of the ranks."""
    return cast(Tensor, _Copies.apply(values, count))  # type: ignore[no-untyped-call]


_EXCHANGE = "exchange of comm_ops"


class _Start(Function):
    """Sends forward, and takes the gradient backward. Its output only ties it to `_Finish`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, way: _OneWay, way_back: _OneWay, world_size: int) -> Tensor:
        ctx.way_back, ctx.world_size, ctx.dtype = way_back, world_size, values.dtype
        way.start(values)
        return values.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return no_second_derivative(_EXCHANGE, _Start.backward, ctx, grad_outputs)
        grad = ctx.way_back.finish().to(ctx.dtype)
        return grad.div_(ctx.world_size) if get_gradient_division() else grad, None, None, None


class _Finish(Function):
    """Takes forward, and sends the gradient backward."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, way: _OneWay, way_back: _OneWay) -> Tensor:
        ctx.way_back = way_back
        ctx.save_for_backward(token)
        return way.finish().to(token.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return no_second_derivative(_EXCHANGE, _Finish.backward, ctx, grad_outputs)
        (token,) = ctx.saved_tensors
        ctx.way_back.start(grad_outputs[0])
        return torch.zeros_like(token), None, None


class _Copies(Function):
    """The same numbers for every rank; gradients add up in the order of the ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, count: int) -> Tensor:
        ctx.count = count
        return values.repeat(count)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        # plain torch, and followed by autograd
        return _in_order(grad_outputs[0].view(ctx.count, -1)), None

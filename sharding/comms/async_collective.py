"""An exchange as a differentiable function: what `comm_ops` is made of.

A collective is one all-to-all and its transpose. Forward it starts where the function is called and finishes where the
result is waited for; backward it starts where the result was used and finishes where the input was made. Layouts before
and after it are ordinary torch. A sum over ranks is taken here, in the order of the ranks, from what they sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from shardwise.kernels._op import no_second_derivative

from .awaitable import Awaitable, NoWait
from .codecs import Codec
from .exchange import Exchange, Pending
from .qcomms import QuantizedCommCodecs, codec_pair

_gradient_division = True
_sync_collectives = False


def set_gradient_division(val: bool) -> None:
    """Whether backwards divide gradients by the number of ranks, as the mean over ranks of DDP does; True at first.

    Read when a backward runs.
    """
    global _gradient_division
    _gradient_division = val


def get_gradient_division() -> bool:
    """What `set_gradient_division` said."""
    return _gradient_division


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


class Request(Awaitable[Tensor]):
    """A tensor that is on its way to this rank."""

    def __init__(self, collective: PendingCollective, token: Tensor, after: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._collective, self._token, self._after = collective, token, after
        self._grad = torch.is_grad_enabled()

    def _wait_impl(self) -> Tensor:
        # whoever waits under no_grad must not take the gradient from others
        with torch.set_grad_enabled(self._grad):
            came: Tensor = _Finish.apply(self._token, self._collective)  # type: ignore[no-untyped-call]
            return self._after(came)


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
    collective = PendingCollective(exchange, list(send_sizes), list(sizes), values, codecs)
    token: Tensor = _Start.apply(values.reshape(-1), collective)  # type: ignore[no-untyped-call]
    request = Request(collective, token, after)
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

    def add(came: Tensor) -> Tensor:
        parts = came.view(exchange.world_size, local).unbind()
        return _in_order(parts).view(shape)

    return exchanged(exchange, values, sizes, [local] * exchange.world_size, add, codecs)


def _in_order(parts: Sequence[Tensor]) -> Tensor:
    """Their sum, rank after rank; fp16 and bf16 are added in fp32 and rounded once."""
    dtype = parts[0].dtype
    wide = torch.float32 if dtype.itemsize < 4 else dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total.to(dtype)


def copies(values: Tensor, count: int) -> Tensor:
    """Flat `values` for each of `count` ranks, one after another; gradients add up in the order of the ranks."""
    made: Tensor = _Copies.apply(values, count)  # type: ignore[no-untyped-call]
    return made


class PendingCollective:
    """One exchange and its transpose: where numbers go, and what is on its way."""

    def __init__(
        self,
        exchange: Exchange,
        send_sizes: list[int],
        sizes: list[int],
        like: Tensor,
        codecs: QuantizedCommCodecs | None,
    ) -> None:
        self.exchange, self.send_sizes, self.sizes = exchange, send_sizes, sizes
        self.dtype, device = like.dtype, like.device
        pair = (None, None) if codecs is None else codec_pair(codecs, device)
        self.codec, self.codec_back = (codec if codec is not None and codec.compresses else None for codec in pair)
        self._pending: Pending | None = None
        self._pending_back: Pending | None = None

    def start(self, values: Tensor) -> None:
        wide, flag = _prepared(values, self.codec)
        self._pending = self.exchange.rows(wide, self.send_sizes, self.sizes, codec=self.codec, flag=flag)

    def end(self) -> Tensor:
        pending, self._pending = self._pending, None
        assert pending is not None
        return _taken(pending, self.codec).to(self.dtype)

    def start_back(self, grad: Tensor) -> None:
        wide, flag = _prepared(grad, self.codec_back)
        self._pending_back = self.exchange.rows_transpose(
            wide, self.sizes, self.send_sizes, codec=self.codec_back, flag=flag
        )

    def end_back(self) -> Tensor:
        pending, self._pending_back = self._pending_back, None
        assert pending is not None
        grad = _taken(pending, self.codec_back).to(self.dtype)
        return grad.div_(self.exchange.world_size) if _gradient_division else grad


def _prepared(values: Tensor, codec: Codec | None) -> tuple[Tensor, Tensor | None]:
    """What is sent, and whether it fits the codec."""
    values = values.contiguous()
    if codec is None:
        return values, None
    wide = values.to(torch.float32)
    # all ranks are told of what does not fit, in the bytes of the exchange itself
    return wide, codec.overflows(wide).to(torch.int32).view(1)


def _taken(pending: Pending, codec: Codec | None) -> Tensor:
    came = pending.wait()
    if any(pending.flags):
        assert codec is not None
        ranks = [rank for rank, flag in enumerate(pending.flags) if flag]
        raise OverflowError(
            f"ranks {ranks}: a number is too large for the compressed exchange ({codec.name}): choose a wider format or"
            " a smaller loss scale"
        )
    return came


_EXCHANGE = "exchange of comm_ops"


class _Start(Function):
    """Sends forward, and takes the gradient backward. Its output only ties it to `_Finish`."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, collective: PendingCollective) -> Tensor:
        ctx.collective = collective
        collective.start(values)
        return values.new_zeros(1)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return no_second_derivative(_EXCHANGE, _Start.backward, ctx, grad_outputs)
        return ctx.collective.end_back(), None


class _Finish(Function):
    """Takes forward, and sends the gradient backward."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, collective: PendingCollective) -> Tensor:
        ctx.collective = collective
        ctx.save_for_backward(token)
        return collective.end()

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            return no_second_derivative(_EXCHANGE, _Finish.backward, ctx, grad_outputs)
        (token,) = ctx.saved_tensors
        ctx.collective.start_back(grad_outputs[0])
        return torch.zeros_like(token), None


class _Copies(Function):
    """The same numbers for every rank; gradients add up in the order of the ranks."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, count: int) -> Tensor:
        ctx.count = count
        return values.repeat(count)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        # plain torch, and followed by autograd
        return _in_order(grad_outputs[0].view(ctx.count, -1).unbind()), None

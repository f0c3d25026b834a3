"""What ranks tell each other along with rows: numbers that cannot be carried, or are none. All raise, none writes.

What comes along is whether something is wrong, found on the device and read where it arrives. Only then does a rank
look for what it was, and an exchange of its own, which a good step does not need, tells the others its number: 0 where
all is well; 1 + n where a number of lookup n does not fit the codec; 1 + L + n where the gradient of
lookup n is not finite; 1 + 2 L where a per-id weight is not. L lookups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..comms.codecs import Codec
from ..comms.exchange import Exchange
from ..comms.failures import agreed
from .routes import Routes

_KEPT = "no table of its collection changed"


def is_wrong(weights: Tensor | None, sent: Tensor, codec: Codec | None, *, checked: bool) -> Tensor:
    """Whether `number_of` finds something, int32 [1] beside what is sent; waits for nothing."""
    found = [] if codec is None else [codec.overflows(sent)]
    if checked:
        found += [~numbers.isfinite().all() for numbers in (sent, weights) if numbers is not None]
    wrong = found[0]
    for one in found[1:]:
        wrong = wrong | one
    return wrong.to(torch.int32).view(1)


def number_of(
    gradients: Sequence[Tensor],
    weights: Tensor | None,
    sent: Tensor,
    divisor: int,
    codec: Codec | None,
    *,
    checked: bool,
) -> int:
    """What is wrong in a backward: `gradients` of each lookup are `sent` after a division, `checked` for finiteness.

    Host syncs on CUDA, on the way to an error.
    """
    if checked and weights is not None and not bool(weights.isfinite().all()):
        return 1 + 2 * len(gradients)
    if checked and not bool(sent.isfinite().all()):
        finite = [bool(piece.isfinite().all()) for piece in gradients]
        # what divides by nothing can only be one lookup's as well
        return 1 + len(gradients) + finite.index(False)
    if codec is not None and bool(codec.overflows(sent)):
        fits = [not bool(codec.overflows((piece / divisor).flatten())) for piece in gradients]
        return 1 + fits.index(False) if False in fits else 1
    return 0


def numbers_of_all(exchange: Exchange, number: int, device: torch.device) -> list[int]:
    """The number of every rank, given that of this one, once all know that something is wrong."""
    return [numbers[0] for numbers in exchange.gather([number], device)]


def error_of(numbers: Sequence[int], routes: Routes, codec: Codec | None) -> Exception:
    """What all ranks raise for the first of them whose number is not 0.

    An OverflowError where a number does not fit the codec, which names rank, feature and table; a FloatingPointError
    where a gradient or a per-id weight is not finite.
    """
    rank, number = next((rank, number) for rank, number in enumerate(numbers) if number)
    kind, lookup = divmod(number - 1, max(1, len(routes.lookups)))
    if kind == 2:
        return FloatingPointError(f"rank {rank}: a per-id weight is not finite; {_KEPT}")
    feature, table = routes.lookups[lookup]
    name = f"rank {rank}: feature {feature!r} (table {routes.tables[table].name!r})"
    if kind == 1:
        return FloatingPointError(f"{name}: its gradient is not finite; {_KEPT}")
    assert codec is not None
    return OverflowError(
        f"{name}: a number is too large for the compressed exchange ({codec.name}); {_KEPT}. Choose a wider format"
        " or a smaller loss scale"
    )


def raise_after_backward(error: Exception) -> None:
    """Raise out of the backward that runs now, once all else of it is done.

    DistributedDataParallel must finish its averages, which it does at the end of a backward, or it refuses the next.
    """
    engine: Any = torch.autograd.Variable._execution_engine

    def fail() -> None:
        raise agreed(error)

    # a callback that is added by a callback comes after those of others
    engine.queue_callback(lambda: engine.queue_callback(fail))

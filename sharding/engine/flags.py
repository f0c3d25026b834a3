"""Flags that travel with rows and gradients: whether a number cannot be carried, or is none, or rows find no slots. All
raise, none writes.

A flag is found on the device and read where it arrives. Only then does a rank look for what it was, and an exchange of
its own, which a good step does not need, tells the others its fault: 0 where all is well; 1 + n where a number of
lookup n does not fit the codec; 1 + L + n where the gradient of lookup n is not finite; 1 + 2 L where a per-id weight
is not. L lookups.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from ..comms.codecs import Codec
from ..comms.exchange import Exchange
from ..comms.failures import agreed
from .routes import Routes

# of a rank that has no slots for the rows that it was asked for, beside what `flag_of` says
LACKS_SLOTS = 2
_KEPT = "no table of its collection changed"


def flag_of(sent: Tensor, codec: Codec | None, weights: Tensor | None = None, *, checked: bool = False) -> Tensor:
    """Whether `fault_of` finds something, int32 [1] beside what is sent; waits for nothing. There is a codec, or it is
    `checked`.
    """
    checks = [] if codec is None else [codec.overflows(sent)]
    if checked:
        checks += [~numbers.isfinite().all() for numbers in (sent, weights) if numbers is not None]
    return reduce(or_, checks).to(torch.int32).view(1)


def fault_of(
    gradients: Mapping[int, Tensor],
    weights: Tensor | None,
    sent: Tensor,
    codec: Codec | None,
    lookups: int,
    *,
    checked: bool,
) -> int:
    """What is wrong in a backward: `gradients` by lookup are `sent`, `checked` for finiteness.

    Host syncs on CUDA, on the way to an error.
    """
    if checked and weights is not None and not bool(weights.isfinite().all()):
        return 1 + 2 * lookups
    if checked and not bool(sent.isfinite().all()):
        # what divides by nothing can only be one lookup's as well
        return 1 + lookups + next(n for n, grad in gradients.items() if not bool(grad.isfinite().all()))
    if codec is not None and bool(codec.overflows(sent)):
        too_large = (n for n, grad in gradients.items() if bool(codec.overflows(grad.flatten())))
        return 1 + next(too_large, 0)
    return 0


def fault_error(exchange: Exchange, fault: int, routes: Routes, codec: Codec | None, device: torch.device) -> Exception:
    """What all ranks raise, once all know that something is wrong, for the first whose fault is not 0.

    An OverflowError where a number does not fit the codec, which names rank, feature and table; a FloatingPointError
    where a gradient or a per-id weight is not finite.
    """
    faults = [fault for (fault,) in exchange.gather([fault], device)]
    rank, fault = next((rank, fault) for rank, fault in enumerate(faults) if fault)
    kind, lookup = divmod(fault - 1, max(1, len(routes.lookups)))
    if kind == 2:
        return agreed(FloatingPointError(f"rank {rank}: a per-id weight is not finite; {_KEPT}"))
    feature, table = routes.lookups[lookup]
    name = f"rank {rank}: feature {feature!r} (table {routes.tables[table].name!r})"
    if kind == 1:
        return agreed(FloatingPointError(f"{name}: its gradient is not finite; {_KEPT}"))
    assert codec is not None
    return agreed(
        OverflowError(
            f"{name}: a number is too large for the compressed exchange ({codec.name}); {_KEPT}. Choose a wider format"
            " or a smaller loss scale"
        )
    )

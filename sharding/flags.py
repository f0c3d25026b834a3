"""What ranks tell each other along with rows: numbers that cannot be carried, or are none. All raise, none writes.

A flag is 0 where all is well; 1 + n where a number of lookup n does not fit the codec; 1 + L + n where the gradient of
lookup n is not finite; 1 + 2 L where a per-id weight is not. L lookups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .codecs import Codec
from .failures import agreed
from .routes import Routes

_KEPT = "no table of its collection changed"


def flag_of(
    gradients: Sequence[Tensor],
    weights: Tensor | None,
    sent: Tensor,
    divisor: int,
    codec: Codec | None,
    *,
    checked: bool,
) -> int:
    """The flag of a backward: `gradients` of each lookup, which are `sent` after a division; `checked` for finiteness.

    Host syncs on CUDA: a gradient is looked at before any rank applies it.
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


def error_of(flags: Sequence[int], routes: Routes, codec: Codec | None) -> Exception | None:
    """What all ranks raise for the first that flagged something.

    An OverflowError where a number does not fit the codec, which names rank, feature and table; a FloatingPointError
    where a gradient or a per-id weight is not finite.
    """
    for rank, flag in enumerate(flags):
        if not flag:
            continue
        kind, number = divmod(flag - 1, max(1, len(routes.lookups)))
        if kind == 2:
            return FloatingPointError(f"rank {rank}: a per-id weight is not finite; {_KEPT}")
        feature, table = routes.lookups[number]
        name = f"rank {rank}: feature {feature!r} (table {routes.tables[table].name!r})"
        if kind == 1:
            return FloatingPointError(f"{name}: its gradient is not finite; {_KEPT}")
        assert codec is not None
        return OverflowError(
            f"{name}: a number is too large for the compressed exchange ({codec.name}); {_KEPT}. Choose a wider format"
            " or a smaller loss scale"
        )
    return None


def raise_after_backward(error: Exception) -> None:
    """Raise out of the backward that runs now, once all else of it is done.

    DistributedDataParallel must finish its averages, which it does at the end of a backward, or it refuses the next.
    """
    engine: Any = torch.autograd.Variable._execution_engine

    def fail() -> None:
        raise agreed(error)

    # a callback that is added by a callback comes after those of others
    engine.queue_callback(lambda: engine.queue_callback(fail))

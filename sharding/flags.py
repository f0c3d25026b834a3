"""What ranks tell each other along with rows: numbers that cannot be carried, or are none. All raise, none writes.

A flag is 0 where all is well; 1 + n where a number of lookup n does not fit the codec; 1 + L + n where the gradient of
lookup n is not finite; 1 + 2 L where a per-id weight is not. L lookups.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .codecs import Codec
from .routes import Routes


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


def raise_flags(flags: Sequence[int], routes: Routes, codec: Codec | None) -> None:
    """Raise on all ranks what the first of them flagged.

    Raises:
        OverflowError: a number does not fit the codec; names rank, feature and table.
        FloatingPointError: a gradient or a per-id weight is not finite.
    """
    for rank, flag in enumerate(flags):
        if not flag:
            continue
        kind, number = divmod(flag - 1, max(1, len(routes.lookups)))
        if kind == 2:
            raise FloatingPointError(f"rank {rank}: a per-id weight is not finite; nothing changed")
        feature, table = routes.lookups[number]
        name = f"rank {rank}: feature {feature!r} (table {routes.tables[table].name!r})"
        if kind == 1:
            raise FloatingPointError(f"{name}: its gradient is not finite; nothing changed")
        assert codec is not None
        raise OverflowError(
            f"{name}: a number is too large for the compressed exchange ({codec.name}); nothing changed. Choose a wider"
            " format or a smaller loss scale"
        )

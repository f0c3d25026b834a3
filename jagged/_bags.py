"""What a JaggedTensor and a KeyedJaggedTensor have in common: values in bags."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._segments import lengths_of, offsets_of
from ._text import summary
from .streamable import Pipelineable, Traceable


class Bags(Traceable, Pipelineable):
    """Values [L, ...] in consecutive bags, given by lengths [N] or offsets [N + 1]; maybe a weight for each value.

    Of lengths and offsets the missing one is computed when first asked for, and kept. Subclasses set the fields.
    """

    _values: Tensor
    _weights: Tensor | None = None
    _lengths: Tensor | None = None
    _offsets: Tensor | None = None
    # True: lengths and offsets both come from the caller, and nobody compared them yet
    _both: bool = False

    def values(self) -> Tensor:
        """Values [L, ...]."""
        return self._values

    def weights(self) -> Tensor:
        """Weights [L]. Raises ValueError if there are none."""
        if self._weights is None:
            raise ValueError(f"this {type(self).__name__} has no weights; weights_or_none() asks without failing")
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        return self._weights

    def lengths(self) -> Tensor:
        """Bag sizes [N]."""
        if self._lengths is None:
            assert self._offsets is not None
            self._lengths = lengths_of(self._offsets)
        return self._lengths

    def lengths_or_none(self) -> Tensor | None:
        """Lengths if they were given or already computed."""
        return self._lengths

    def offsets(self) -> Tensor:
        """First value of each bag and the end of the last, [N + 1]; dtype of the lengths, or int64 if L needs it."""
        if self._offsets is None:
            assert self._lengths is not None
            self._offsets = offsets_of(self._lengths, self._values.shape[0])
        return self._offsets

    def offsets_or_none(self) -> Tensor | None:
        """Offsets if they were given or already computed."""
        return self._offsets

    def device(self) -> torch.device:
        return self._values.device

    def size_in_bytes(self) -> int:
        """Bytes of the tensors held now."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of every tensor until `stream` is done with it."""
        for tensor in self._tensors():
            tensor.record_stream(stream)

    def _summary(self) -> str:
        """Values and weights for a repr; reads nothing."""
        weights = "" if self._weights is None else f", weights={summary(self._weights)}"
        return f"values={summary(self._values)}{weights}"

    def _tensors(self) -> list[Tensor]:
        held = (self._values, self._weights, self._lengths, self._offsets)
        return [tensor for tensor in held if tensor is not None]


def copy_tensors(
    target: Bags, source: Bags, non_blocking: bool, more: Sequence[tuple[str, Tensor | None, Tensor | None]] = ()
) -> None:
    """Copy each tensor in place, and `more` (name, target, source); nothing is copied unless all of them fit."""
    if target._lengths is not None:
        source.lengths()
    if target._offsets is not None:
        source.offsets()
    pairs = [
        ("values", target._values, source._values),
        ("weights", target._weights, source._weights),
        ("lengths", target._lengths, None if target._lengths is None else source._lengths),
        ("offsets", target._offsets, None if target._offsets is None else source._offsets),
        *more,
    ]
    for what, mine, theirs in pairs:
        if (mine is None) != (theirs is None):
            having = "there" if mine is None else "here"
            raise ValueError(f"copy_ needs {what} on both sides or on none, they are only {having}")
        if mine is not None and theirs is not None and mine.shape != theirs.shape:
            raise ValueError(f"copy_ of {what}: shape {list(theirs.shape)} into {list(mine.shape)}")
    for _, mine, theirs in pairs:
        if mine is not None and theirs is not None:
            mine.copy_(theirs, non_blocking=non_blocking)

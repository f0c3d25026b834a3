"""What an exported program takes: the names that say which number is what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.untrusted import repeated


@dataclass(frozen=True)
class Signature:
    """Inputs and outputs of a model, by name.

    Args:
        features: the keys of its batches of ids, in their order; at least one.
        dense: the columns of its dense input, in their order; none if it has no dense input.
        weighted: whether each id comes with a weight.
        outputs: what to call its outputs. By default they are called by the keys of a dict or KeyedTensor, by the
            fields of a named tuple, by their place in a tuple, and a single tensor "output".

    Raises:
        ValueError: there are no features, or a name is there twice.
    """

    features: Sequence[str]
    dense: Sequence[str] = ()
    weighted: bool = False
    outputs: Sequence[str] | None = None

    def __post_init__(self) -> None:
        for what in ("features", "dense", "outputs"):
            names = getattr(self, what)
            if names is None:
                continue
            if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
                raise ValueError(f"Signature: {what} must be a list of names, got {names!r}")
            if twice := sorted(repeated(names)):
                raise ValueError(f"Signature: {what} repeat {', '.join(map(repr, twice))}")
            object.__setattr__(self, what, tuple(names))
        if not self.features:
            raise ValueError("Signature: a model of this kind takes at least one feature")

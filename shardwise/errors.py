"""Errors of the type that Python's users expect and of the one that programs written for TorchRec catch.

TorchRec refuses much by `assert`: what it refuses so is here a ValueError or a TypeError, and an AssertionError in one.
Such a message begins with TorchRec's words, for `pytest.raises(..., match=...)`; what can be done about it follows.
"""

from __future__ import annotations


class RefusedValueError(ValueError, AssertionError):
    """A value that does not fit; TorchRec raises AssertionError for it."""


class RefusedTypeError(TypeError, AssertionError):
    """A value of a type, or a tensor of a dtype, that does not fit; TorchRec raises AssertionError for it."""


class RefusedCallError(RuntimeError, AssertionError):
    """A call at a time when it cannot be; TorchRec raises AssertionError for it."""


class RefusedIndexError(IndexError, RuntimeError):
    """An id outside of its table; TorchRec raises RuntimeError for it, where it does not write a wrong row."""


class RefusedStateError(ValueError, RuntimeError):
    """A state dict that does not fit; torch raises RuntimeError for it."""


# as they travel between ranks
REFUSALS = (RefusedValueError, RefusedTypeError, RefusedCallError, RefusedIndexError, RefusedStateError)

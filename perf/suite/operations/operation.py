"""Operations that several libraries have: called alike, read out alike, compared.

Each call gets a state of its own, because libraries keep what they have computed.

Sizes: keys x batch, the batch being bags of each key.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Size(NamedTuple):
    """Keys and bags of each key."""

    keys: int
    batch: int

    def __str__(self) -> str:
        return f"{self.keys} x {self.batch}"


class Raised(NamedTuple):
    """An exception in the place of a result."""

    error: Exception

    def __str__(self) -> str:
        return f"{type(self.error).__name__}: {' '.join(str(self.error).split())[:120]}"

    @property
    def missing(self) -> bool:
        """Whether this is what Python raises for a name or an argument that is not there."""
        if isinstance(self.error, (AttributeError, ImportError, NotImplementedError)):
            return True
        return isinstance(self.error, TypeError) and "unexpected keyword argument" in str(self.error)


@dataclass(frozen=True)
class Operation:
    """One operation for all libraries.

    `make(lib, size)` prepares a state that nothing was done with yet, `call(lib, state)` is the operation, `read` takes
    from its result what is compared, at the sizes that `fits` accepts. Floats may differ by `tolerance` of the largest.
    `raises`: every library does.
    """

    name: str
    make: Callable[[Any, Size], Any]
    call: Callable[[Any, Any], Any]
    read: Callable[[Any], Any] = lambda result: result
    fits: Callable[[Size], bool] = lambda size: True
    tolerance: float = 0.0
    needs_cuda: bool = False
    raises: bool = False

    def result(self, lib: Any, size: Size) -> Any:
        """The library's result, read out, or Raised."""
        try:
            return contents(self.read(self.call(lib, self.make(lib, size))))
        except Exception as error:
            return Raised(error)


# What a jagged type holds, by the names of its methods that read it out. A library that lacks one holds nothing there.
KEYED_JAGGED = (
    "keys", "values", "weights_or_none", "stride", "stride_per_key", "stride_per_key_per_rank",
    "variable_stride_per_key", "inverse_indices_or_none", "lengths", "offsets", "length_per_key", "offset_per_key",
    "lengths_offset_per_key", "index_per_key",
)  # fmt: skip
JAGGED = ("values", "weights_or_none", "lengths", "offsets")
KEYED = ("keys", "values", "key_dim", "length_per_key", "offset_per_key")
TYPES = {"KeyedJaggedTensor": KEYED_JAGGED, "JaggedTensor": JAGGED, "KeyedTensor": KEYED}


def contents(result: Any) -> Any:
    """The result as tensors, numbers and strings in dicts and lists, whatever library made it."""
    if isinstance(result, (Tensor, str, int, float)) or result is None:
        return result
    if isinstance(result, Mapping):
        return {key: contents(value) for key, value in result.items()}
    names = TYPES.get(type(result).__name__)
    if names is not None:
        return {name: _read_out(result, name) for name in names}
    if dataclasses.is_dataclass(result) and not isinstance(result, type):
        return {f.name: contents(getattr(result, f.name)) for f in dataclasses.fields(result)}
    if isinstance(result, Iterable):
        return [contents(value) for value in result]
    return result


def _read_out(result: Any, name: str) -> Any:
    method = getattr(result, name, None)
    try:
        return None if method is None else contents(method())
    except Exception as error:
        return Raised(error)


def difference(ours: Any, theirs: Any, tolerance: float = 0.0, where: str = "") -> str:
    """The first place where two contents differ, with both sides; "" if they are equal.

    Dtypes and shapes are compared too; a tensor's floats may differ by `tolerance` of the largest.
    """
    at = f"{where}: " if where else ""
    if isinstance(ours, Raised) or isinstance(theirs, Raised):
        both = isinstance(ours, Raised) and isinstance(theirs, Raised)
        return "" if both else f"{at}ours {_short(ours)}, theirs {_short(theirs)}"
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return "" if (unlike := _unlike(ours, theirs, tolerance)) == "" else f"{at}{unlike}"
    if isinstance(ours, dict) and isinstance(theirs, dict) and list(ours) == list(theirs):
        inside = (difference(ours[key], theirs[key], tolerance, f"{where}[{key}]") for key in ours)
        return next(filter(None, inside), "")
    if isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        inside = (
            difference(a, b, tolerance, f"{where}[{i}]") for i, (a, b) in enumerate(zip(ours, theirs, strict=True))
        )
        return next(filter(None, inside), "")
    if type(ours) is type(theirs) and not isinstance(ours, (Tensor, dict, list)) and ours == theirs:
        return ""
    return f"{at}ours {_short(ours)}, theirs {_short(theirs)}"


def _unlike(ours: Tensor, theirs: Tensor, tolerance: float) -> str:
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return f"ours {_short(ours)}, theirs {_short(theirs)}"
    if ours.numel() == 0 or torch.equal(ours, theirs):
        return ""
    if not ours.is_floating_point():
        return f"{int((ours != theirs).sum())} of {ours.numel()} elements differ"
    same_nan = torch.equal(ours.isnan(), theirs.isnan())
    largest = theirs.nan_to_num(0.0).abs().max().clamp(min=1e-30)
    off = float((ours - theirs).nan_to_num(0.0).abs().max() / largest)
    return "" if same_nan and off <= tolerance else f"off by {off:.1e} of the largest"


def _short(content: Any) -> str:
    if isinstance(content, Tensor):
        return f"{str(content.dtype).removeprefix('torch.')} {list(content.shape)}"
    if isinstance(content, Raised):
        return f"raises {content}"
    if isinstance(content, (dict, list)):
        text = f"{type(content).__name__} of {len(content)}: {list(content)}" if content else repr(content)
        return text if len(text) < 60 else f"{text[:60]} ..."
    return repr(content)[:80]

"""What traces a program now, and hints for the one that does: sizes it may rely on, and guards it may leave out.

Names and behaviour are of `torchrec.pt2.checks`. Ours work without them: shardwise asks torch itself. Where nothing
traces a hint does nothing, and returns what it was given.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false, guard_or_true

__all__ = [
    "get_use_torchdynamo_compiling_path",
    "is_compiler_compiling",
    "is_non_strict_exporting",
    "is_pt2_compiling",
    "is_torchdynamo_compiling",
    "pt2_check_size_nonzero",
    "pt2_checks_all_is_size",
    "pt2_checks_tensor_slice",
    "pt2_guard_or_false",
    "pt2_guard_or_true",
    "set_use_torchdynamo_compiling_path",
]

_always = False


def set_use_torchdynamo_compiling_path(val: bool) -> None:
    """Have `is_torchdynamo_compiling`, and hints, answer as if torch.compile traced: for a tracer of yours.

    Of the whole process; what of shardwise works otherwise where torch.compile traces does not ask here.
    """
    global _always
    _always = val


def get_use_torchdynamo_compiling_path() -> bool:
    """What `set_use_torchdynamo_compiling_path` was given last; False before."""
    return _always


def is_compiler_compiling() -> bool:
    """Whether torch.compile or torch.export traces what runs now, as torch says."""
    return torch.compiler.is_compiling()


def is_torchdynamo_compiling() -> bool:
    """Whether torch.compile, or a strict torch.export, traces what runs now."""
    return get_use_torchdynamo_compiling_path() or torch.compiler.is_dynamo_compiling()


def is_non_strict_exporting() -> bool:
    """Whether torch.export with strict=False runs this to record it."""
    return not is_torchdynamo_compiling() and is_compiler_compiling()


def is_pt2_compiling() -> bool:
    """Whether either does."""
    return is_torchdynamo_compiling() or is_compiler_compiling()


def pt2_checks_tensor_slice(tensor: Tensor, start_offset: int, end_offset: int, dim: int = 0) -> None:
    """Tell the compiler that `start_offset:end_offset` lies inside of a dim of the tensor.

    Raises:
        RuntimeError: it does not, as far as the compiler knows; otherwise the compiled program raises it.
    """
    if is_pt2_compiling():
        for offset in (start_offset, end_offset):
            torch._check(offset >= 0)  # type: ignore[no-untyped-call]
            torch._check(offset <= tensor.size(dim))  # type: ignore[no-untyped-call]
        torch._check(end_offset >= start_offset)  # type: ignore[no-untyped-call]


def pt2_checks_all_is_size(x: list[int]) -> list[int]:
    """The list, of whose numbers the compiler is told that none is negative. Raises as `pt2_checks_tensor_slice`."""
    if is_pt2_compiling():
        for size in x:
            torch._check(size >= 0)  # type: ignore[no-untyped-call]
    return x


def pt2_check_size_nonzero(x: Tensor) -> Tensor:
    """The tensor, of which the compiler is told that no dim is empty. Raises as `pt2_checks_tensor_slice`."""
    if is_pt2_compiling():
        for dim in range(x.dim()):
            torch._check(x.size(dim) > 0)  # type: ignore[no-untyped-call]
    return x


def pt2_guard_or_false(x: bool) -> bool:
    """The condition, or where the compiler cannot know it False."""
    return guard_or_false(x) if is_pt2_compiling() else x


def pt2_guard_or_true(x: bool) -> bool:
    """The condition, or where the compiler cannot know it True."""
    return guard_or_true(x) if is_pt2_compiling() else x

"""Sums of all before, places within bags, sums of bags.

Shapes: lengths [B], offsets [B + 1] of bags in N values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise import kernels

from .registry import op

# sums of these pass what their dtype holds, or are none
_NO_SUMS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.complex64, torch.complex128)


@op("asynchronous_complete_cumsum(Tensor t_in) -> Tensor")
def asynchronous_complete_cumsum(t_in: Tensor) -> Tensor:
    """Offsets [B + 1] of lengths [B], or [K, B + 1] of [K, B]."""
    if t_in.dim() not in (1, 2):
        raise ValueError(f"t_in must have 1 or 2 dimensions, got shape {list(t_in.shape)}")
    _require_sums("t_in", t_in)
    return kernels.complete_cumsum(t_in)


@op("asynchronous_batched_complete_cumsum(Tensor values) -> Tensor")
def asynchronous_batched_complete_cumsum(values: Tensor) -> Tensor:
    """Offsets [K, B + 1] of lengths [K, B]."""
    if values.dim() != 2:
        raise ValueError(f"values must have 2 dimensions, got shape {list(values.shape)}")
    _require_sums("values", values)
    return kernels.complete_cumsum(values)


@op("asynchronous_inclusive_cumsum(Tensor t_in) -> Tensor")
def asynchronous_inclusive_cumsum(t_in: Tensor) -> Tensor:
    """Each number plus all before it, in the order of memory; the shape of `t_in`."""
    _require_sums("t_in", t_in)
    return t_in.reshape(-1).cumsum(0, dtype=t_in.dtype).view(t_in.shape)


@op("asynchronous_exclusive_cumsum(Tensor t_in) -> Tensor")
def asynchronous_exclusive_cumsum(t_in: Tensor) -> Tensor:
    """All numbers before each, in the order of memory; the shape of `t_in`."""
    _require_sums("t_in", t_in)
    return kernels.complete_cumsum(t_in.reshape(-1))[:-1].view(t_in.shape)


@op("offsets_range(Tensor offsets, SymInt range_size) -> Tensor")
def offsets_range(offsets: Tensor, range_size: int) -> Tensor:
    """The place of each of `range_size` values in its bag."""
    return kernels.offsets_range(offsets, range_size)


@op(
    "segment_sum_csr(SymInt batch_size, Tensor csr_seg, Tensor values) -> Tensor",
    differentiable=True,
    words={"offsets": "csr_seg"},
)
def segment_sum_csr(batch_size: int, csr_seg: Tensor, values: Tensor) -> Tensor:
    """Sums of segments of `values`, whose offsets are counted in `batch_size` values."""
    return kernels.segment_sum(csr_seg, values, batch_size=batch_size)


def _lengths_range_fake(t_in: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    if shape is not None:
        return t_in.new_empty(_numel(shape))
    return t_in.new_empty(torch.library.get_ctx().new_dynamic_size())


@op(
    "lengths_range(Tensor t_in, SymInt[]? shape=None) -> Tensor",
    fake=_lengths_range_fake,
    words={
        "offsets with range_size": "offsets by t_in, which end with shape,",
        "range_size": "the range by t_in and shape",
    },
)
def lengths_range(t_in: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """0, 1, ... within each bag of these lengths; `shape`, whose product is their sum, saves a wait for the device."""
    return _ranges("t_in", t_in, shape)


@op(
    "repeat_arange(Tensor lengths) -> Tensor",
    fake=lambda lengths: lengths.new_empty(torch.library.get_ctx().new_dynamic_size()),
    words={"offsets with range_size": "offsets by lengths", "range_size": "the sum of lengths"},
)
def repeat_arange(lengths: Tensor) -> Tensor:
    """0, 1, ... within each bag of these lengths."""
    return _ranges("lengths", lengths, None)


def _ranges(name: str, lengths: Tensor, shape: Sequence[int] | None) -> Tensor:
    if lengths.dim() != 1:
        raise ValueError(f"{name} must have 1 dimension, got shape {list(lengths.shape)}")
    if lengths.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} must be int32 or int64, got {lengths.dtype}")
    offsets = kernels.complete_cumsum(lengths)
    # the sizes of outputs are known on the host alone
    return kernels.offsets_range(offsets, int(offsets[-1]) if shape is None else _numel(shape))


@op("jagged_hash_size_cumsum(Tensor offsets, Tensor indices, int batch_size) -> (Tensor, Tensor)")
def jagged_hash_size_cumsum(offsets: Tensor, indices: Tensor, batch_size: int) -> tuple[Tensor, Tensor]:
    """Tables just large enough for the indices [N] of T keys, as `jagged_unique_indices` takes them.

    Shapes: offsets [T*B + 1], batch_size B.

    Returns:
        the rows of all tables before each [T + 1], and the number of tables before each [T + 1], one for each key.
    """
    if batch_size < 1 or offsets.shape[0] % batch_size != 1 % batch_size:
        raise ValueError(
            f"offsets must be [keys * {batch_size} + 1] for batch_size {batch_size}, got {offsets.shape[0]}"
        )
    if offsets.dim() != 1 or indices.dim() != 1:
        raise ValueError(
            f"offsets and indices must have one dimension, got shapes {list(offsets.shape)} and {list(indices.shape)}"
        )
    ends = offsets[batch_size::batch_size].contiguous()  # [T] of keys in indices
    place = torch.arange(indices.shape[0], dtype=ends.dtype, device=indices.device)
    key = torch.searchsorted(ends, place, right=True)  # [N], T past the last offset
    rows = offsets.new_zeros(ends.shape[0] + 1).scatter_reduce(0, key, (indices + 1).to(offsets.dtype), "amax")
    numbers = torch.arange(ends.shape[0] + 1, dtype=offsets.dtype, device=offsets.device)
    return kernels.complete_cumsum(rows[:-1]), numbers


def _require_sums(name: str, numbers: Tensor) -> None:
    """TypeError where the numbers are too narrow for their sums, which would come out wrong in silence."""
    if numbers.dtype in _NO_SUMS:
        raise TypeError(f"{name} must be int32, int64 or floating, got {numbers.dtype}")


def _numel(shape: Sequence[int]) -> int:
    size = 1
    for each in shape:
        size *= each
    return size

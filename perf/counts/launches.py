"""Count what a piece of code would launch on a GPU, without one: Triton kernels, torch's kernels, copies, host syncs.

    with use_fake_cuda(found := Counted()):
        model = EmbeddingBagCollection(tables=tables, device=CUDA)
        found.clear()
        model(batch)
    print(found.kernels)

What launches is exact: every operation is seen where torch would choose its kernel for CUDA. How many kernels one of
torch's operations launches is exact for most (one) and read in torch's sources for a few: TABLE, torch 2.13 and
CCCL 3.0. An operation that is no view and not in TABLE launches one kernel: elementwise ones, reductions, gathers,
scatters, matrix products. Not counted: memsets that cub and torch put before some of theirs.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.perf.counts.fake_cuda import (
    CUDA,
    DeviceMemory,
    Op,
    is_view,
    use_fake_cuda,
    written,
)

# up to so many elements a sort is one kernel beside its preparations (native/cuda/Sort.h)
SMALL_SORT = 4096
# tensors that one launch of a concatenation takes (native/cuda/Shape.cu)
CAT_BATCH = 128


def kernels_of(op: Op, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> int:
    """Kernels of one call; `args` may be tensors on whatever device, also without values."""
    name = op._schema.name.removeprefix("aten::")
    if is_view(op) or name in _NONE:
        return 0
    changed = [value for value in _all([result, *written(op, args, kwargs)]) if isinstance(value, Tensor)]
    if changed and not any(tensor.numel() for tensor in changed):
        return 0
    return TABLE[name](args, kwargs) if name in TABLE else 1


def waits(op: Op, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether the host waits for the device in it, to know a value or the size of the result."""
    name = op._schema.name.removeprefix("aten::")
    if name == "repeat_interleave":
        return kwargs.get("output_size") is None and len(args) < 2
    return name in _WAITS or (name in _INDEXED and any(_is_mask(index) for index in args[1]))


def _all(values: Any) -> list[Any]:
    return [leaf for value in values for leaf in (_all(value) if isinstance(value, (list, tuple)) else [value])]


def _sort(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    keys = next(argument for argument in args if isinstance(argument, Tensor))
    dim = kwargs.get("dim", -1)
    if keys.dim() == 0:
        return 2
    n = keys.shape[dim]
    if n <= SMALL_SORT:
        # numbers of the positions, written out for each row; a copy of the keys; the sort
        return 4
    if keys.numel() > n:
        raise ValueError(f"no number of kernels is known for a sort of several rows of {n} elements")
    # numbers of the positions; a histogram and its sums; a pass for every 8 bits of the key
    return 3 + keys.itemsize + (not keys.is_contiguous())


def _cumsum(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    x: Tensor = args[0]
    cast = (kwargs.get("dtype") or (x.dtype if x.is_floating_point() else torch.int64)) != x.dtype
    # of all elements: cub's, which prepares its tiles first
    return cast + (2 if x.dim() and x.numel() == x.shape[args[1]] else 1)


def _cat(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    tensors: list[Tensor] = [tensor for tensor in args[0] if tensor.dim() != 1 or tensor.numel()]
    if len(tensors) > 1 and len({tensor.dtype for tensor in tensors}) == 1 and tensors[0].dim() <= 4:
        batch = CAT_BATCH if all(tensor.is_contiguous() for tensor in tensors) else CAT_BATCH // 2
        return -(-len(tensors) // batch)
    return sum(tensor.numel() > 0 for tensor in tensors)


def _is_mask(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in (torch.bool, torch.uint8)


def _nonzero(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    x: Tensor = args[0]
    # a sum, of one tile or of many; cub's selection, which prepares its tiles first; places of more than one axis
    return (1 if x.numel() <= 4096 else 2) + 2 + (x.dim() > 1)


def _index(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    indices = [index for index in args[1] if isinstance(index, Tensor)]
    masks = sum(_nonzero([index], {}) for index in indices if _is_mask(index))
    return 1 + masks + sum(index.dtype == torch.int32 for index in indices)


def _index_put(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    accumulates = kwargs.get("accumulate", args[3] if len(args) > 3 else False)
    if not accumulates:
        return _index(args, kwargs)
    n = max(index.numel() for index in args[1] if isinstance(index, Tensor))
    # rows as numbers (wrapped, times stride, over the size of a slice), positions, sorted pairs, sums of the runs
    return 4 + (1 if n <= 2304 else 10) + 1


def _where(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    values = [value for value in args[1:] if isinstance(value, Tensor)]
    wanted = torch.result_type(*values) if len(values) == 2 else None
    return 1 + sum(value.dtype != wanted for value in values if wanted is not None)


def _repeat_interleave(args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    return 1 + _cumsum([args[0], 0], {})


# name -> kernels of a call
TABLE: dict[str, Callable[[Sequence[Any], dict[str, Any]], int]] = {
    # native/cuda/Sort.cpp, SortStable.cu; cub: dispatch_radix_sort.cuh, InvokeOnesweep
    "sort": _sort,
    # native/cuda/ScanUtils.cuh, scan_dim; cub: dispatch_scan.cuh
    "cumsum": _cumsum,
    # native/cuda/Shape.cu, cat_out_cuda
    "cat": _cat,
    # native/cuda/Nonzero.cu; cub: dispatch_reduce.cuh, dispatch_select_if.cuh
    "nonzero": _nonzero,
    "masked_select": lambda args, kwargs: _nonzero([args[1]], {}) + 1,
    # native/TensorAdvancedIndexing.cpp, native/IndexingUtils.h: masks become positions, int32 becomes int64
    "index": _index,
    "_index_put_impl_": _index_put,
    # native/TensorCompare.cpp, where_self_out: each side is cast to the common type
    "where": _where,
    # native/cuda/Repeat.cu
    "repeat_interleave": _repeat_interleave,
    # native/cuda/Bucketization.cu: a number becomes a tensor of the device
    "searchsorted": lambda args, kwargs: 1 + (not isinstance(args[1], Tensor)),
    "bucketize": lambda args, kwargs: 1 + (not isinstance(args[0], Tensor)),
    # a copy of what is written into, then the write
    **dict.fromkeys(("scatter", "scatter_add", "scatter_reduce", "index_add", "index_copy"), lambda args, kwargs: 2),
}  # fmt: skip
_NONE = {
    *("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_unsafe_view", "resize_", "set_"),
    # a copy to the host, which is counted where the host waits
    "_local_scalar_dense",
}
_INDEXED = ("index", "_index_put_impl_")
_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "unique_consecutive", "bincount"}


__all__ = ["CUDA", "Counted", "launches", "use_fake_cuda"]

_ROOT = Path(os.path.realpath(__file__)).parents[2]
_FOLDERS = ("kernels", "jagged", "embeddings", "fbgemm", "sharding", "models", "inference", "shardwise")


@dataclass
class Counted:
    """What happened on the device that is not there, by name.

    Attributes:
        kernels: launches; "torch sort" are those of torch's operation, others are Triton kernels.
        copies: between host and device, "to host" and "to device".
        syncs: the host waits for the device; named by the function of shardwise that does.
    """

    kernels: Counter[str] = field(default_factory=Counter)
    copies: Counter[str] = field(default_factory=Counter)
    syncs: Counter[str] = field(default_factory=Counter)

    def clear(self) -> None:
        """Forget what was counted."""
        for counts in (self.kernels, self.copies, self.syncs):
            counts.clear()

    def operation(self, op: Op, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        if op.namespace == "c10d":
            # a collective
            return
        name = str(op._schema.name).removeprefix("aten::")
        count = kernels_of(op, args, kwargs, result)
        if count:
            self.kernels[f"torch {name}"] += count
        if waits(op, args, kwargs):
            self.syncs[f"{name} in {caller()}"] += 1

    def kernel(self, name: str) -> None:
        self.kernels[name.removeprefix("_").removesuffix("_kernel")] += 1

    def allocation(self, memory: DeviceMemory, op: Op, dtype: torch.dtype) -> None: ...

    def copy(self, where: str, waits: bool) -> None:
        self.copies[where] += 1
        if waits:
            self.syncs[f"copy {where} in {caller()}"] += 1


def caller() -> str:
    """The innermost function of shardwise that is on the stack, perf's own left out."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        path = Path(os.path.realpath(frame.f_code.co_filename))
        if path.is_relative_to(_ROOT) and path.relative_to(_ROOT).parts[0] in _FOLDERS:
            return f"{path.relative_to(_ROOT).as_posix()} {frame.f_code.co_name}"
        frame = frame.f_back
    return "the caller"


def launches(run: Callable[[], Any]) -> Counter[str]:
    """Kernels that `run` launches by name; it is called within `use_fake_cuda` and makes its tensors on `CUDA`."""
    with use_fake_cuda(counted := Counted()):
        run()
    return counted.kernels

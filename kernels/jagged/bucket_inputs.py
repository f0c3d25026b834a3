"""What `block_bucketize` is given, checked, and as its kernels read it: a number of each feature in a tensor [F] int64.

Letters as in bucketize.py. Shapes, types and devices are checked everywhere, values on the CPU alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..lookup.bounds import require_ids


def check_bags(lengths: Tensor, ids: Tensor, block_sizes: Tensor, buckets: int, weights: Tensor | None) -> None:
    """Raise for what no batch can be, whatever its values are."""
    for name, tensor in (("lengths", lengths), ("ids", ids), ("block_sizes", block_sizes)):
        require_ids(name, tensor)
        if tensor.dim() != 1:
            raise ValueError(f"{name} must have one dimension, got shape {tuple(tensor.shape)}")
        if tensor.device != ids.device:
            raise ValueError(f"{name} is on {tensor.device}, ids on {ids.device}")
    if weights is not None:
        if weights.shape != ids.shape:
            raise ValueError(f"weights must have shape {tuple(ids.shape)} as ids, got {tuple(weights.shape)}")
        if weights.device != ids.device:
            raise ValueError(f"weights is on {weights.device}, ids on {ids.device}")
    if buckets < 1:
        raise ValueError(f"num_buckets must be positive, got {buckets}")
    if block_sizes.shape[0] == 0 and ids.shape[0] and not lengths.shape[0]:
        raise ValueError(f"{ids.shape[0]} ids of 0 features")


def of_features(numbers: Tensor | Sequence[int], name: str, block_sizes: Tensor) -> Tensor:
    """Integers [F] of features, int64 on the device of the block sizes."""
    tensor = numbers if isinstance(numbers, Tensor) else torch.tensor(numbers, dtype=torch.int64, device="cpu")
    if tensor.is_floating_point() or tensor.is_complex():
        raise TypeError(f"{name} must be integers, got {tensor.dtype}")
    if tensor.shape != block_sizes.shape:
        raise ValueError(f"{name} must have shape {tuple(block_sizes.shape)}, got {tuple(tensor.shape)}")
    return tensor.to(block_sizes.device, torch.int64, non_blocking=True).contiguous()


def ends_of_features(batch_sizes: Tensor | Sequence[int], lengths: Tensor, block_sizes: Tensor) -> Tensor:
    """Number of bags up to the end of each feature."""
    sizes = of_features(batch_sizes, "batch_sizes", block_sizes)
    ends = sizes.cumsum(0)
    # values on a device are not looked at: the kernel keeps to the features there are
    if sizes.is_cpu and not torch.compiler.is_compiling():
        # few numbers: Python adds them sooner than torch begins to
        numbers = sizes.tolist()
        if min(numbers, default=0) < 0:
            raise ValueError(f"batch_sizes must not be negative, got {numbers}")
        if sum(numbers) != lengths.shape[0]:
            raise ValueError(f"batch_sizes add up to {sum(numbers)}, but there are {lengths.shape[0]} lengths")
    return ends


def blocks_of_features(totals: Tensor | Sequence[int], block_sizes: Tensor, buckets: int) -> Tensor:
    """Blocks of each feature, [F], of which each bucket has as many."""
    blocks = of_features(totals, "total_num_blocks", block_sizes)
    if (
        blocks.is_cpu
        and not torch.compiler.is_compiling()
        and bool(((blocks < buckets) | (blocks % buckets != 0)).any())
    ):
        raise ValueError(f"total_num_blocks must be positive multiples of {buckets} buckets, got {blocks.tolist()}")
    return blocks


def stacked_borders(borders: Sequence[Tensor], block_sizes: Tensor, buckets: int) -> Tensor:
    """Borders of all features, [F, K + 1] int64."""
    if len(borders) != block_sizes.shape[0]:
        raise ValueError(f"block_bucketize_pos must be of {block_sizes.shape[0]} features, got {len(borders)}")
    for f, border in enumerate(borders):
        if border.shape != (buckets + 1,):
            raise ValueError(
                f"block_bucketize_pos[{f}] must have {buckets + 1} borders of {buckets} buckets, got shape"
                f" {tuple(border.shape)}"
            )
        if border.is_floating_point():
            raise TypeError(f"block_bucketize_pos[{f}] must be integers, got {border.dtype}")
    if not borders:
        return block_sizes.new_zeros(0, buckets + 1, dtype=torch.int64)
    stacked = torch.stack(list(borders)).to(block_sizes.device, torch.int64, non_blocking=True)
    if stacked.is_cpu and not torch.compiler.is_compiling():
        bad = (stacked[:, 0] != 0) | (stacked[:, 1:] < stacked[:, :-1]).any(1)
        if bool(bad.any()):
            f = int(bad.nonzero()[0])
            raise ValueError(f"block_bucketize_pos[{f}] must begin at 0 and not decrease, got {stacked[f].tolist()}")
    return stacked


def raise_bad_values(lengths: Tensor, ids: Tensor, block_sizes: Tensor) -> None:
    """ValueError for a negative block size or id, or for lengths that are not the ids'; on the CPU."""
    if block_sizes.shape[0] and int(block_sizes.min()) < 0:
        f = int((block_sizes < 0).nonzero()[0])
        raise ValueError(f"block_sizes[{f}] is {int(block_sizes[f])}, block sizes must not be negative")
    if lengths.shape[0] and int(lengths.min()) < 0:
        bag = int((lengths < 0).nonzero()[0])
        raise ValueError(f"lengths[{bag}] is {int(lengths[bag])}, lengths must not be negative")
    # what is added up must not overflow
    if lengths.shape[0] and int(lengths.max()) > ids.shape[0]:
        bag = int(lengths.argmax())
        raise ValueError(f"lengths[{bag}] is {int(lengths[bag])} of {ids.shape[0]} ids")
    if int(lengths.sum()) != ids.shape[0]:
        raise ValueError(f"lengths add up to {int(lengths.sum())}, but there are {ids.shape[0]} ids")
    if ids.shape[0] and int(ids.min()) < 0:
        at = int((ids < 0).nonzero()[0])
        raise ValueError(f"ids[{at}] is {int(ids[at])}, ids must not be negative")

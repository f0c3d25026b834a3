"""Ids of inference tables before they are looked up: bad ones as FBGEMM's modes have it, and rows of pruned tables.

Shapes: I [N] ids, O [F*B + 1] offsets, rows int64 [F] of the features' tables. The id -1 is a row that was pruned.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.kernels import ids_pass, require_ids
from shardwise.kernels.features import FIELDS, ROWS, batch_size, locate_ids

# a mode by the name of FBGEMM's `BoundsCheckMode`
FATAL, WARNING, IGNORE, NONE = "FATAL", "WARNING", "IGNORE", "NONE"
MODES = {FATAL: 0, WARNING: 1, IGNORE: 2, NONE: 3, "V2_IGNORE": 4, "V2_WARNING": 5, "V2_FATAL": 6}
_PRUNED = -1


def features_of(rows: Tensor) -> Tensor:
    """A feature tensor [F, 8] of which only rows are known."""
    features = torch.zeros(rows.shape[0], FIELDS, dtype=torch.int64, device=rows.device)
    features[:, ROWS] = rows
    return features


def check_ids(features: Tensor, indices: Tensor, offsets: Tensor, mode: str, warning: Tensor) -> tuple[Tensor, Tensor]:
    """Ids and offsets that can be looked up: bad ids become 0 and bad offsets what is nearest, or FATAL raises.

    The given ones stay as they are. WARNING leaves in `warning` [1] how many were bad, and warns on the CPU.

    Raises:
        TypeError: ids or offsets are not int32 or int64.
        IndexError, ValueError: a bad id or bad offsets, of FATAL on the CPU. On CUDA the device asserts, later.
    """
    if ids_pass(indices, offsets, features):
        if mode == WARNING:
            warning.zero_()
        return indices, offsets
    require_ids("indices", indices)
    require_ids("offsets", offsets)
    batch_size(offsets, features.shape[0])
    good_offsets = offsets.clamp(0, indices.shape[0]).cummax(0).values
    good_offsets[0] = 0
    good_offsets[-1] = indices.shape[0]
    _, _, valid = locate_ids(indices, good_offsets, features)
    bad = ~valid & (indices != _PRUNED)
    if mode == FATAL:
        _require_good(indices, offsets, bad, good_offsets, features)
        return indices, offsets
    if mode == WARNING:
        torch.add(bad.sum(), (offsets != good_offsets).sum(), out=warning[0])
        if not warning.is_cuda and not torch.compiler.is_compiling():
            _warn(indices, bad, int(warning))
    return indices.masked_fill(bad, 0), good_offsets


def _require_good(indices: Tensor, offsets: Tensor, bad: Tensor, good_offsets: Tensor, features: Tensor) -> None:
    if indices.is_cuda or torch.compiler.is_compiling():
        torch._assert_async((offsets == good_offsets).all(), "offsets are out of order or of range")
        torch._assert_async(~bad.any(), "an id is outside its table")
        return
    if not torch.equal(offsets, good_offsets):
        place = int((offsets != good_offsets).nonzero()[0])
        raise ValueError(
            f"offsets[{place}] is {int(offsets[place])}: offsets start at 0, do not decrease and end at the"
            f" {indices.shape[0]} ids"
        )
    if bool(bad.any()):
        position = int(bad.nonzero()[0])
        batch = batch_size(offsets, features.shape[0])
        feature = int(torch.searchsorted(offsets[1:].contiguous(), position, right=True)) // batch
        raise IndexError(
            f"feature {feature}: id {int(indices[position])} at position {position} is outside"
            f" [0, {int(features[feature, ROWS])}) and not -1, the id of a pruned row"
        )


def _warn(indices: Tensor, bad: Tensor, count: int) -> None:
    if count:
        first = f", the first is {int(indices[bad][0])}" if bool(bad.any()) else ""
        warnings.warn(f"{count} ids or offsets are out of range{first}: such ids are looked up as 0", stacklevel=5)


def remap_ids(
    indices: Tensor, offsets: Tensor, remapping: Tensor, remapping_offsets: Tensor, table_of: Tensor
) -> Tensor:
    """Rows of ids [N] by the remappings of pruned tables, one after another in `remapping`; -1 for pruned ids.

    Shapes: remapping_offsets [T + 1], table_of [F] the table of each feature. A table whose remapping is empty is not
    pruned. Ids outside of a remapping become -2, which no table has.
    """
    features = table_of.shape[0]
    batch = batch_size(offsets, features)
    positions = torch.arange(indices.shape[0], device=indices.device)
    ends = offsets[batch::batch].long().contiguous() if batch else offsets.new_zeros(features, dtype=torch.int64)
    feature = torch.searchsorted(ends, positions, right=True).clamp(max=features - 1)
    table = table_of[feature]
    begin, size = remapping_offsets[table], remapping_offsets.diff()[table]
    ids = indices.long()
    inside = (ids >= 0) & (ids < size)
    rows = remapping[torch.where(inside, begin + ids, 0)].to(indices.dtype)
    outside = torch.where(ids == _PRUNED, _PRUNED, -2).to(indices.dtype)
    return torch.where(size == 0, indices, torch.where(inside, rows, outside))


def join_remappings(remappings: Sequence[Tensor | None], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Remappings one after another, and int64 [T + 1] where each begins; None has no elements."""
    offsets = [0]
    for remapping in remappings:
        offsets.append(offsets[-1] + (0 if remapping is None else remapping.numel()))
    parts = [remapping.reshape(-1).to(dtype) for remapping in remappings if remapping is not None]
    joined = torch.cat(parts) if parts else torch.empty(0, dtype=dtype)
    return joined, torch.tensor(offsets, dtype=torch.int64)

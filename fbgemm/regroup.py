"""Columns of pooled embeddings put together anew: keys of several tensors in groups, tables of one in another order.

Shapes: pooled_embs [B, D], or several [B, D_i] in which keys lie side by side; permutes [P, 6] int32 rows (input,
output, first column there, first column here, columns, next use of the same columns). Of an order of tables,
offset_dim_list [T + 1] says where each begins, permute_list which comes where; the inverse of both is not needed here,
since gradients follow from the order itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from shardwise import kernels
from shardwise.kernels import RegroupPlan
from shardwise.kernels._op import unwatched
from shardwise.kernels.jagged import (
    Row,
    dims_of,
    of_widths,
    plan_permutes,
    plan_rows,
    plan_tables,
    regroup_apart,
)

from .registry import op

_Keys = tuple[tuple[str, ...], ...]
_Lengths = tuple[tuple[int, ...], ...]


@op(
    "kt_regroup_arguments(Tensor embs, str[][] keys, int[][] lengths, str[][] groups)"
    " -> (Tensor, Tensor, Tensor, int[])"
)
def kt_regroup_arguments(
    embs: Tensor, keys: Sequence[Sequence[str]], lengths: Sequence[Sequence[int]], groups: Sequence[Sequence[str]]
) -> tuple[Tensor, Tensor, Tensor, list[int]]:
    """What `permute_multi_embedding` needs for a tensor of each group: permutes and widths, on the device of `embs`."""
    rows, widths, out_widths = _arguments(*map(_frozen, (keys, lengths, groups)))
    permutes = torch.tensor([number for row in rows for number in row], dtype=torch.int32).view(-1, 6)
    shapes = (torch.tensor(each, dtype=torch.int32) for each in (widths, out_widths))
    permutes, in_shapes, out_shapes = (each.to(embs.device, non_blocking=True) for each in (permutes, *shapes))
    return permutes, in_shapes, out_shapes, list(out_widths)


@op(
    "regroup_keyed_tensor(Tensor[] pooled_embs, str[][] keys, int[][] lengths, str[][] groups) -> Tensor[]",
    differentiable=True,
    words={"tensors": "pooled_embs", "tensor": "pooled_embs tensor"},
)
def regroup_keyed_tensor(
    pooled_embs: Sequence[Tensor],
    keys: Sequence[Sequence[str]],
    lengths: Sequence[Sequence[int]],
    groups: Sequence[Sequence[str]],
) -> list[Tensor]:
    """For each group [B, the sum of its keys' lengths]; of a key that several tensors have, the first one's."""
    return regroup_apart(pooled_embs, _plan_groups(*map(_frozen, (keys, lengths, groups))))


@op(
    "permute_multi_embedding(Tensor[] pooled_embs, Tensor permutes, Tensor in_shapes, Tensor out_shapes,"
    " SymInt[] out_lengths) -> Tensor[]",
    fake=lambda pooled_embs, permutes, in_shapes, out_shapes, out_lengths: of_widths(pooled_embs, out_lengths),
    differentiable=True,
    words={"tensors": "pooled_embs", "tensor": "pooled_embs tensor"},
)
def permute_multi_embedding(
    pooled_embs: Sequence[Tensor], permutes: Tensor, in_shapes: Tensor, out_shapes: Tensor, out_lengths: Sequence[int]
) -> list[Tensor]:
    """Tensors [B, width] of `out_lengths`; permutes are read from the device once, and kept."""
    del in_shapes, out_shapes
    if type(permutes) is Tensor and unwatched():
        return regroup_apart(pooled_embs, plan_permutes(permutes, pooled_embs, out_lengths))
    return torch.ops.shardwise.regroup_by_permutes(  # type: ignore[no-any-return]
        list(pooled_embs), permutes, out_lengths, False
    )


def _permute(
    pooled_embs: Tensor,
    offset_dim_list: Tensor,
    permute_list: Tensor,
    inv_offset_dim_list: Tensor,
    inv_permute_list: Tensor,
) -> Tensor:
    """The same columns [B, D] with tables in another order; nothing waits for a device."""
    del inv_offset_dim_list, inv_permute_list
    _check_order(pooled_embs, offset_dim_list, permute_list)
    tables, columns = permute_list.numel(), pooled_embs.shape[1]
    if offset_dim_list.numel() - tables not in (0, 1):
        raise ValueError(
            f"permute_list must have an entry for each of the {offset_dim_list.numel() - 1} tables of offset_dim_list,"
            f" got {tables}"
        )
    if permute_list.is_cpu and type(permute_list) is Tensor and unwatched():
        order = permute_list.tolist()
        if len(set(order)) < tables:
            raise ValueError(f"permute_list must be a permutation, got {order}: permute_duplicate_pooled_embs takes it")
        return kernels.permute_pooled(pooled_embs, dims_of(offset_dim_list[:tables].tolist(), columns), order)
    offsets = torch.cat([offset_dim_list[:tables], offset_dim_list.new_full((1,), columns)])
    new_offsets = kernels.complete_cumsum(offsets.diff().index_select(0, permute_list))
    source = kernels.expand_into_jagged_permute(permute_list, offsets, new_offsets, columns)
    # what is no permutation must stop no device
    return pooled_embs.index_select(1, source.clamp(0, max(columns - 1, 0)))


def _duplicate(
    pooled_embs: Tensor,
    offset_dim_list: Tensor,
    permute_list: Tensor,
    inv_offset_dim_list: Tensor,
    inv_permute_list: Tensor,
) -> Tensor:
    """Tables in another order, of which some may come several times or not at all."""
    del inv_offset_dim_list, inv_permute_list
    _check_order(pooled_embs, offset_dim_list, permute_list)
    if type(permute_list) is Tensor and unwatched():
        return regroup_apart([pooled_embs], plan_tables(pooled_embs.shape[1], offset_dim_list, permute_list))[0]
    return torch.ops.shardwise.permute_tables(  # type: ignore[no-any-return]
        pooled_embs, offset_dim_list, permute_list
    )


def _check_order(pooled_embs: Tensor, offset_dim_list: Tensor, permute_list: Tensor) -> None:
    if pooled_embs.dim() != 2:
        raise ValueError(f"pooled_embs must have shape [B, D], got {list(pooled_embs.shape)}")
    for name, each in (("offset_dim_list", offset_dim_list), ("permute_list", permute_list)):
        if each.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64, got {each.dtype}")
        if each.dim() != 1:
            raise ValueError(f"{name} must have one dimension, got shape {list(each.shape)}")


def _duplicate_fake(pooled_embs: Tensor, *_: object) -> Tensor:
    return pooled_embs.new_empty(pooled_embs.shape[0], torch.library.get_ctx().new_dynamic_size())


for _name in ("permute_pooled_embs", "permute_duplicate_pooled_embs"):
    for _suffix in ("", "_split", "_auto_grad", "_auto_grad_split"):
        _repeats = "duplicate" in _name
        op(
            f"{_name}{_suffix}(Tensor pooled_embs, Tensor offset_dim_list, Tensor permute_list,"
            " Tensor inv_offset_dim_list, Tensor inv_permute_list) -> Tensor",
            fake=_duplicate_fake if _repeats else lambda pooled_embs, *_: torch.empty_like(pooled_embs),
            differentiable=True,
            words={"order": "permute_list"},
        )(_duplicate if _repeats else _permute)


def _frozen(lists: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, lists))


@lru_cache(maxsize=128)
def _arguments(keys: _Keys, lengths: _Lengths, groups: _Keys) -> tuple[list[Row], list[int], list[int]]:
    """Rows of permutes, columns of the inputs and of the outputs."""
    if len(keys) != len(lengths):
        raise ValueError(f"keys are of {len(keys)} tensors, lengths of {len(lengths)}")
    owners: dict[str, tuple[int, int, int]] = {}
    for tensor, (names, columns) in enumerate(zip(keys, lengths, strict=True)):
        if len(names) != len(columns):
            raise ValueError(f"tensor {tensor} has {len(names)} keys but {len(columns)} lengths")
        if any(width < 0 for width in columns):
            raise ValueError(f"lengths[{tensor}] must not be negative, got {list(columns)}")
        for name, first, width in zip(names, accumulate(columns, initial=0), columns, strict=False):
            owners.setdefault(name, (tensor, first, width))
    uses = [(output, name) for output, group in enumerate(groups) for name in group]
    rows: list[Row] = []
    out_widths = [0] * len(groups)
    last: dict[str, int] = {}
    nexts = [0] * len(uses)
    for use, (output, name) in enumerate(uses):
        if name not in owners:
            raise KeyError(f"groups[{output}] has the key {name!r}, which no tensor has")
        before = last.get(name)
        if before is not None:
            # the first use of a key has the number of its next one, others that of theirs below 0, the last the end
            nexts[before] = use if nexts[before] == 0 else -use
            nexts[use] = -len(uses)
        last[name] = use
        tensor, first, width = owners[name]
        rows.append((tensor, output, first, out_widths[output], width, 0))
        out_widths[output] += width
    return [(*row[:5], after) for row, after in zip(rows, nexts, strict=True)], list(map(sum, lengths)), out_widths


@lru_cache(maxsize=128)
def _plan_groups(keys: _Keys, lengths: _Lengths, groups: _Keys) -> RegroupPlan:
    rows, widths, out_widths = _arguments(keys, lengths, groups)
    return plan_rows(tuple(rows), tuple(widths), tuple(out_widths))

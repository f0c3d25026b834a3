"""Columns of pooled embeddings put together anew: keys of several tensors in groups, tables of one in another order.

Shapes: pooled_embs [B, D], or several [B, D_i] in which keys lie side by side; permutes [P, 6] int32 rows (input,
output, first column there, first column here, columns, next use of the same columns). Of an order of tables,
offset_dim_list [T + 1] says where each begins, permute_list which comes where; the inverse of both is not needed here,
since gradients follow from the order itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from shardwise import kernels
from shardwise.kernels import RegroupPlan
from shardwise.kernels._op import register, register_autograd, unwatched

from .registry import op

_Keys = tuple[tuple[str, ...], ...]
_Lengths = tuple[tuple[int, ...], ...]
_Row = tuple[int, int, int, int, int, int]


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
)
def regroup_keyed_tensor(
    pooled_embs: Sequence[Tensor],
    keys: Sequence[Sequence[str]],
    lengths: Sequence[Sequence[int]],
    groups: Sequence[Sequence[str]],
) -> list[Tensor]:
    """For each group [B, the sum of its keys' lengths]; of a key that several tensors have, the first one's."""
    return _regroup(pooled_embs, _plan_groups(*map(_frozen, (keys, lengths, groups))))


@op(
    "permute_multi_embedding(Tensor[] pooled_embs, Tensor permutes, Tensor in_shapes, Tensor out_shapes,"
    " SymInt[] out_lengths) -> Tensor[]",
    fake=lambda pooled_embs, permutes, in_shapes, out_shapes, out_lengths: _of_widths(pooled_embs, out_lengths),
    differentiable=True,
)
def permute_multi_embedding(
    pooled_embs: Sequence[Tensor], permutes: Tensor, in_shapes: Tensor, out_shapes: Tensor, out_lengths: Sequence[int]
) -> list[Tensor]:
    """Tensors [B, width] of `out_lengths`; permutes are read from the device once, and kept."""
    del in_shapes, out_shapes
    if type(permutes) is Tensor and unwatched():
        return _regroup(pooled_embs, _plan_permutes(permutes, pooled_embs, out_lengths))
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
        return kernels.permute_pooled(pooled_embs, _dims(offset_dim_list[:tables].tolist(), columns), order)
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
        return _regroup([pooled_embs], _plan_tables(pooled_embs.shape[1], offset_dim_list, permute_list))[0]
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
        )(_duplicate if _repeats else _permute)


def _regroup(tensors: Sequence[Tensor], plan: RegroupPlan) -> list[Tensor]:
    """`kernels.regroup`, whose outputs of no columns are views, which an op may not give."""
    outputs = kernels.regroup(tensors, plan)
    if all(plan.output_widths):
        return outputs
    return [output if output.shape[1] else output.clone() for output in outputs]


def _frozen(lists: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple(map(tuple, lists))


@lru_cache(maxsize=128)
def _arguments(keys: _Keys, lengths: _Lengths, groups: _Keys) -> tuple[list[_Row], list[int], list[int]]:
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
    rows: list[_Row] = []
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
    return _plan_rows(tuple(rows), tuple(widths), tuple(out_widths))


@lru_cache(maxsize=128)
def _plan_rows(rows: tuple[_Row, ...], widths: tuple[int, ...], out_widths: tuple[int, ...]) -> RegroupPlan:
    """A plan by rows of permutes, which have to fill every output."""
    pieces: list[list[tuple[int, int, int]]] = [[] for _ in out_widths]
    filled = [0] * len(out_widths)
    for tensor, output, first, column, columns, _ in sorted(rows, key=lambda row: row[1:4:2]):
        if not 0 <= output < len(out_widths):
            raise ValueError(f"permutes has output {output}, out_lengths has {len(out_widths)}")
        if column != filled[output]:
            raise ValueError(f"permutes: output {output} goes on at column {column}, filled up to {filled[output]}")
        pieces[output].append((tensor, first, columns))
        filled[output] += columns
    if filled != list(out_widths):
        raise ValueError(f"permutes fill {filled} columns of the outputs, out_lengths are {list(out_widths)}")
    return kernels.plan_pieces(widths, pieces)


# permutes -> its version, columns of inputs and outputs, and the plan of these
_plans: Any = WeakIdKeyDictionary()


def _plan_permutes(permutes: Tensor, tensors: Sequence[Tensor], out_widths: Sequence[int]) -> RegroupPlan:
    for i, tensor in enumerate(tensors):
        if tensor.dim() != 2:
            raise ValueError(f"pooled_embs[{i}] must have shape [B, D], got {list(tensor.shape)}")
    known = (
        None if permutes.is_inference() else permutes._version,
        tuple(tensor.shape[1] for tensor in tensors),
        tuple(out_widths),
    )
    kept: tuple[Any, RegroupPlan] | None = _plans.get(permutes)
    if kept is not None and kept[0] == known and known[0] is not None:
        return kept[1]
    if permutes.dim() != 2 or permutes.shape[1] != 6 or permutes.is_floating_point():
        raise ValueError(f"permutes must be integers of shape [P, 6], got {permutes.dtype} {list(permutes.shape)}")
    # host sync: a plan is made on the host, once
    plan = _plan_rows(_frozen(permutes.tolist()), known[1], known[2])
    _plans[permutes] = known, plan
    return plan


def _dims(offsets: Sequence[int], columns: int) -> list[int]:
    """Columns of tables that begin at these offsets."""
    return [end - begin for begin, end in pairwise([0, *offsets[1:], columns])]


def _plan_tables(columns: int, offset_dim_list: Tensor, permute_list: Tensor) -> RegroupPlan:
    # host sync: how many columns come out follows from the order
    return _plan_order(columns, tuple(offset_dim_list.tolist()), tuple(permute_list.tolist()))


@lru_cache(maxsize=128)
def _plan_order(columns: int, offsets: tuple[int, ...], order: tuple[int, ...]) -> RegroupPlan:
    dims = _dims(offsets, columns)
    for table in order:
        if not 0 <= table < len(dims):
            raise IndexError(f"permute_list: there is no table {table}, only {len(dims)}")
    starts = [0, *offsets[1:]]
    return kernels.plan_pieces([columns], [[(0, starts[table], dims[table]) for table in order]])


def _of_widths(tensors: Sequence[Tensor], widths: Sequence[int]) -> list[Tensor]:
    return [tensors[0].new_empty(tensors[0].shape[0], width) for width in widths]


def _transpose(grads: Sequence[Tensor], plan: RegroupPlan) -> list[Tensor]:
    """The gradients of a plan's inputs."""
    runs = plan.transposed()
    return torch.ops.shardwise.regroup_columns(list(grads), runs.flat, runs.repeats, runs.widths)  # type: ignore[no-any-return]


def _regroup_by_permutes(tensors: list[Tensor], permutes: Tensor, widths: list[int], transpose: bool) -> list[Tensor]:
    """`permute_multi_embedding` where it is traced, and its gradient: outputs of the widths that inputs have there."""
    if not transpose:
        return _regroup(tensors, _plan_permutes(permutes, tensors, widths))
    inputs = [tensors[0].new_empty(0, width) for width in widths]
    return _transpose(tensors, _plan_permutes(permutes, inputs, [grad.shape[1] for grad in tensors]))


def _regroup_setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    tensors, permutes, _, ctx.transpose = inputs
    ctx.save_for_backward(permutes)
    ctx.widths = [tensor.shape[1] for tensor in tensors]


def _regroup_backward(ctx: Any, grads: list[Tensor]) -> tuple[Any, ...]:
    (permutes,) = ctx.saved_tensors
    back = torch.ops.shardwise.regroup_by_permutes(list(grads), permutes, ctx.widths, not ctx.transpose)
    return back, None, None, None


register_autograd(
    register(
        "regroup_by_permutes(Tensor[] tensors, Tensor permutes, SymInt[] widths, bool transpose) -> Tensor[]",
        _regroup_by_permutes,
        lambda tensors, permutes, widths, transpose: _of_widths(tensors, widths),
    ),
    _regroup_backward,
    _regroup_setup,
)


def _permute_tables(pooled: Tensor, offsets: Tensor, permute: Tensor) -> Tensor:
    return _regroup([pooled], _plan_tables(pooled.shape[1], offsets, permute))[0]


def _tables_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pooled, offsets, permute = inputs
    ctx.save_for_backward(offsets, permute)
    ctx.columns = pooled.shape[1]


def _tables_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.shardwise.permute_tables_backward(grad, *ctx.saved_tensors, ctx.columns), None, None


def _permute_tables_backward(grad: Tensor, offsets: Tensor, permute: Tensor, columns: int) -> Tensor:
    return _transpose([grad], _plan_tables(columns, offsets, permute))[0]


register_autograd(
    register(
        "permute_tables_backward(Tensor grad, Tensor offsets, Tensor permute, SymInt columns) -> Tensor",
        _permute_tables_backward,
        lambda grad, offsets, permute, columns: grad.new_empty(grad.shape[0], columns),
    ),
    # of a second derivative: columns in their order again
    lambda ctx, grad: (torch.ops.shardwise.permute_tables(grad, *ctx.saved_tensors), None, None, None),
    lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:3]),
)
register_autograd(
    register(
        "permute_tables(Tensor pooled, Tensor offsets, Tensor permute) -> Tensor", _permute_tables, _duplicate_fake
    ),
    _tables_backward,
    _tables_setup,
)

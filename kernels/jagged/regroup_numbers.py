"""Regrouping that tensors of numbers describe, as FBGEMM's programs have them: rows of permutes, or an order of tables.

Shapes: X_i [B, D_i] inputs, Y_g [B, E_g] outputs; permutes [P, 6] int32 rows (input, output, first column there, first
column here, columns, next use of the same columns); offsets [T + 1] where tables begin among columns [B, D], permute
which comes where. Numbers are read on the host, once, and become plans (regroup_plan.py). The ops that are registered
here stand for that where it is traced: what they are told is read when the graph runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .._op import register, register_autograd
from .regroup import regroup
from .regroup_plan import RegroupPlan, plan_pieces

Row = tuple[int, int, int, int, int, int]
"""A row of `permutes`, as FBGEMM has them: input, output, their first columns, how many columns, and the next row."""


def regroup_apart(tensors: Sequence[Tensor], plan: RegroupPlan) -> list[Tensor]:
    """`regroup` of tensors [B, D_i], whose outputs of no columns are views, which an op may not give."""
    outputs = regroup(tensors, plan)
    if all(plan.output_widths):
        return outputs
    return [output if output.shape[1] else output.clone() for output in outputs]


@lru_cache(maxsize=128)
def plan_rows(rows: tuple[Row, ...], widths: tuple[int, ...], out_widths: tuple[int, ...]) -> RegroupPlan:
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
    return plan_pieces(widths, pieces)


# permutes -> its version, columns of inputs and outputs, and the plan of these
_plans: Any = WeakIdKeyDictionary()


def plan_permutes(permutes: Tensor, tensors: Sequence[Tensor], out_widths: Sequence[int]) -> RegroupPlan:
    """The plan of `permutes` [P, 6] over inputs [B, D] of these tensors' columns; kept until `permutes` changes.

    Raises:
        ValueError: `permutes` has another shape or dtype, or an input is no matrix.
    """
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
    plan = plan_rows(tuple(map(tuple, permutes.tolist())), known[1], known[2])
    _plans[permutes] = known, plan
    return plan


def dims_of(offsets: Sequence[int], columns: int) -> list[int]:
    """Columns of tables that begin at these offsets.

    Raises:
        ValueError: the offsets fall, or pass the last of `columns`.
    """
    dims = [end - begin for begin, end in pairwise([0, *offsets[1:], columns])]
    if min(dims) < 0:
        raise ValueError(
            f"offset_dim_list must go from 0 to at most {columns} columns without falling, got {[*offsets]}"
        )
    return dims


def plan_tables(columns: int, offset_dim_list: Tensor, permute_list: Tensor) -> RegroupPlan:
    """The plan that puts the tables of [B, columns], which begin at `offset_dim_list`, in the order of `permute_list`.

    Raises:
        ValueError: the offsets fall, or pass the last column.
        IndexError: `permute_list` names a table that is not there.
    """
    # host sync: how many columns come out follows from the order
    return _plan_order(columns, tuple(offset_dim_list.tolist()), tuple(permute_list.tolist()))


@lru_cache(maxsize=128)
def _plan_order(columns: int, offsets: tuple[int, ...], order: tuple[int, ...]) -> RegroupPlan:
    dims = dims_of(offsets, columns)
    for table in order:
        if not 0 <= table < len(dims):
            raise IndexError(f"permute_list: there is no table {table}, only {len(dims)}")
    starts = [0, *offsets[1:]]
    return plan_pieces([columns], [[(0, starts[table], dims[table]) for table in order]])


def of_widths(tensors: Sequence[Tensor], widths: Sequence[int]) -> list[Tensor]:
    """An unwritten tensor [B, width] for each width, of the first tensor's batch size, dtype and device."""
    return [tensors[0].new_empty(tensors[0].shape[0], width) for width in widths]


def _columns_as_data_say(pooled: Tensor, *_: object) -> Tensor:
    return pooled.new_empty(pooled.shape[0], torch.library.get_ctx().new_dynamic_size())


def _transpose(grads: Sequence[Tensor], plan: RegroupPlan) -> list[Tensor]:
    """The gradients of a plan's inputs."""
    runs = plan.transposed()
    return torch.ops.shardwise.regroup_columns(list(grads), runs.flat, runs.repeats, runs.widths)  # type: ignore[no-any-return]


def _regroup_by_permutes(tensors: list[Tensor], permutes: Tensor, widths: list[int], transpose: bool) -> list[Tensor]:
    """`permute_multi_embedding` where it is traced, and its gradient: outputs of the widths that inputs have there."""
    if not transpose:
        return regroup_apart(tensors, plan_permutes(permutes, tensors, widths))
    inputs = [tensors[0].new_empty(0, width) for width in widths]
    return _transpose(tensors, plan_permutes(permutes, inputs, [grad.shape[1] for grad in tensors]))


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
        lambda tensors, permutes, widths, transpose: of_widths(tensors, widths),
    ),
    _regroup_backward,
    _regroup_setup,
)


def _permute_tables(pooled: Tensor, offsets: Tensor, permute: Tensor) -> Tensor:
    return regroup_apart([pooled], plan_tables(pooled.shape[1], offsets, permute))[0]


def _tables_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    pooled, offsets, permute = inputs
    ctx.save_for_backward(offsets, permute)
    ctx.columns = pooled.shape[1]


def _tables_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return torch.ops.shardwise.permute_tables_backward(grad, *ctx.saved_tensors, ctx.columns), None, None


def _permute_tables_backward(grad: Tensor, offsets: Tensor, permute: Tensor, columns: int) -> Tensor:
    return _transpose([grad], plan_tables(columns, offsets, permute))[0]


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
        "permute_tables(Tensor pooled, Tensor offsets, Tensor permute) -> Tensor", _permute_tables, _columns_as_data_say
    ),
    _tables_backward,
    _tables_setup,
)

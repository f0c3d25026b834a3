"""Tables of one dtype and one optimizer in one flat buffer: their storage, lookups and fused updates.

Shapes: flat [elements], table t a view [R_t, D_t] of it; I [N] ids, O [F*B + 1] offsets, features in the order given.
Tables of equal dim lie side by side, so that one launch and one sort key serve them all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.kernels import (
    STATES,
    BoundsCheckMode,
    Feature,
    Segment,
    check_ids,
    flatten_segments,
    fused_update,
    new_guard,
    pack_features,
    pooled_lookup,
    raise_from_guard,
    sequence_lookup,
)

from .optimizers import OptimizerSpec

# 64 bytes of fp16: every segment begins on a boundary that serves the widest load
_BOUNDARY = 32


@dataclass(frozen=True)
class TableShape:
    """A table of `rows` x `dim`."""

    name: str
    rows: int
    dim: int


@dataclass(frozen=True)
class LookupFeature:
    """A feature of a group: which of its tables it looks up, and whether its bags are averaged."""

    name: str
    table: int
    mean: bool = False


class TableGroup:
    """Storage, optimizer states and lookups of some tables; knows nothing of modules or processes.

    With an `optimizer` the backward of a lookup updates the tables; without one gradients reach `parameters`.
    """

    def __init__(
        self,
        tables: Sequence[TableShape],
        features: Sequence[LookupFeature],
        *,
        dtype: torch.dtype,
        device: torch.device,
        optimizer: OptimizerSpec | None = None,
        bounds_check: BoundsCheckMode = BoundsCheckMode.FATAL,
    ) -> None:
        self.tables, self.lookups, self.optimizer = list(tables), list(features), optimizer
        self.lr = optimizer.lr if optimizer is not None else 0.0
        self.bounds_check = bounds_check
        self._bases, first_rows, self._segments, elements = _lay_out(tables)
        self._first_rows = first_rows
        self.rows = sum(table.rows for table in tables)
        self.dims = [tables[f.table].dim for f in features]
        self.pooling = "mean" if any(f.mean for f in features) else "sum"
        self.names = [f"feature {f.name!r} (table {tables[f.table].name!r})" for f in features]
        self._segment_numbers = flatten_segments(self._segments)
        self.flat = torch.empty(elements, dtype=dtype, device=device)
        self.parameters: list[nn.Parameter] = []
        self._spec = [
            Feature(self._bases[f.table], tables[f.table].rows, tables[f.table].dim, first_rows[f.table], f.mean)
            for f in features
        ]
        self._place(device, fresh=True)

    def _place(self, device: torch.device, *, fresh: bool) -> None:
        """Put what lives beside the tables on their device: optimizer states begin anew if `fresh`, else they move."""
        if fresh:
            spec = self.optimizer or OptimizerSpec("gradient")
            start = spec.initial_accumulator_value
            sizes = [self.rows if kind == "row" else self.flat.shape[0] for kind in STATES[spec.rule]]
            self.states = [torch.full((size,), start, dtype=torch.float32, device=device) for size in sizes]
            self.step = torch.zeros(1, dtype=torch.int64, device=device)
            self.hyper = replace(spec, lr=self.lr).hyper(device)
        else:
            self.states = [state.to(device) for state in self.states]
            self.step, self.hyper = self.step.to(device), self.hyper.to(device)
        self.features = pack_features(self._spec, device)
        self.guard = new_guard(device)
        # what the update hangs on in the autograd graph: no parameter, no gradient of its own
        self._anchor = torch.zeros(1, device=device, requires_grad=True)
        self._unread: _UnreadGuard | None = None

    def view(self, table: int) -> Tensor:
        """Table number `table` as [rows, dim] of the flat buffer."""
        shape, base = self.tables[table], self._bases[table]
        return self.flat[base : base + shape.rows * shape.dim].view(shape.rows, shape.dim)

    def state_views(self, table: int) -> dict[str, Tensor]:
        """Optimizer states of one table by TorchRec's names: momentum1, momentum2; [rows] or [rows, dim] fp32."""
        if self.optimizer is None:
            return {}
        shape, views = self.tables[table], {}
        kinds = STATES[self.optimizer.rule]
        for number, (kind, state) in enumerate(zip(kinds, self.states, strict=True), start=1):
            if kind == "row":
                view = state[self._first_rows[table] : self._first_rows[table] + shape.rows]
            else:
                base = self._bases[table]
                view = state[base : base + shape.rows * shape.dim].view(shape.rows, shape.dim)
            views[f"momentum{number}"] = view
        return views

    def set_lr(self, lr: float) -> None:
        """Change the learning rate from the next update on, also inside a captured graph."""
        self.lr = lr
        self.hyper[0].fill_(lr)

    def move(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply what `nn.Module._apply` applies (`.to`, `.half`, `to_empty`) to the tables; states follow the device.

        Raises:
            ValueError: tables would get a dtype in which they cannot train.
        """
        flat = fn(self.flat)
        if flat.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            names = ", ".join(table.name for table in self.tables)
            raise ValueError(f"tables {names}: cannot become {flat.dtype}; fp32, fp16 and bf16 can be trained")
        was_meta, self.flat = self.flat.is_meta, flat
        self._place(flat.device, fresh=was_meta or flat.is_meta)

    def check(self, ids: Tensor, offsets: Tensor) -> None:
        """Raise for bad ids or offsets; on CUDA those of the batch before, while this one is only marked.

        Raises:
            IndexError, ValueError, TypeError: as `shardwise.kernels.check_ids`.
        """
        if self.bounds_check is BoundsCheckMode.IGNORE or not self.lookups:
            return
        fatal = self.bounds_check is BoundsCheckMode.FATAL
        self.raise_pending()
        check_ids(ids, offsets, self.features, self.guard, names=self.names, fatal=fatal)
        if ids.is_cuda:
            self._unread = _UnreadGuard(self.guard, ids, offsets)

    def raise_pending(self) -> None:
        """Raise what an earlier batch left in the guard on CUDA; nothing of that batch was written."""
        unread, self._unread = self._unread, None
        if unread is not None and unread.is_raised():
            fatal = self.bounds_check is BoundsCheckMode.FATAL
            raise_from_guard(self.guard, unread.ids, unread.offsets, self.features, self.names, fatal=fatal)

    def pooled(self, ids: Tensor, offsets: Tensor, per_id_weights: Tensor | None = None) -> Tensor:
        """Pooled lookup of all features, fp32 [B, sum of dims]; the backward updates tables or feeds `parameters`."""
        args = (ids, offsets, per_id_weights)
        if self.optimizer is None or not torch.is_grad_enabled():
            flat = _flat_of_parameters(self) if self.optimizer is None else self.flat
            return pooled_lookup(flat, *args, self.features, self.dims, self._segment_numbers, self.pooling)
        return self._with_update(*args, self.pooling)

    def sequence(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """The row of each id, fp32 [N, dim]; all tables of the group have this dim."""
        if self.optimizer is None or not torch.is_grad_enabled():
            flat = _flat_of_parameters(self) if self.optimizer is None else self.flat
            return sequence_lookup(flat, ids, offsets, self.features, self.tables[0].dim, self._segment_numbers)
        return self._with_update(ids, offsets, None, "sequence")

    def update(
        self, grad: Tensor, ids: Tensor, offsets: Tensor, per_id_weights: Tensor | None = None, *, pooling: str
    ) -> None:
        """The fused optimizer's step for the gradient of a lookup's output."""
        assert self.optimizer is not None
        s1, s2 = [*self.states, None, None][:2]
        fused_update(
            self.flat, s1, s2, self.step, grad, ids, offsets, per_id_weights, self.features, self.dims,
            self._segment_numbers, self.optimizer.rule, self.hyper, self.guard, pooling,
        )  # fmt: skip

    def _with_update(self, ids: Tensor, offsets: Tensor, per_id_weights: Tensor | None, pooling: str) -> Tensor:
        assert self.optimizer is not None
        s1, s2 = [*self.states, None, None][:2]
        return _LookupWithUpdate.apply(  # type: ignore[no-any-return, no-untyped-call]
            self._anchor, per_id_weights, self.flat, s1, s2, self.step, self.hyper, self.guard, self.features,
            ids, offsets, self.dims, self._segment_numbers, self.optimizer.rule, pooling,
        )  # fmt: skip

    def __getstate__(self) -> dict[str, Any]:
        # parameters are views of the flat buffer and belong to the module, which gives them back
        return {**self.__dict__, "parameters": [], "_unread": None, "_anchor": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._anchor = torch.zeros(1, device=self.flat.device, requires_grad=True)


class _UnreadGuard:
    """A guard on its way to the host: read without a wait for anything but its own copy."""

    def __init__(self, guard: Tensor, ids: Tensor, offsets: Tensor) -> None:
        self.ids, self.offsets = ids, offsets
        self._host = torch.empty(2, dtype=torch.int64, pin_memory=True)
        self._host.copy_(guard, non_blocking=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copied.record()

    def is_raised(self) -> bool:
        # host sync with the check of the batch before, which ran long ago
        self._copied.synchronize()
        return bool((self._host != new_guard()).any())


class _LookupWithUpdate(torch.autograd.Function):
    """A lookup whose backward is the optimizer's step. It hangs on `anchor`; weights are no autograd input."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, per_id_weights: Tensor | None, weights: Tensor, s1: Tensor | None, s2: Tensor | None,
        step: Tensor, hyper: Tensor, guard: Tensor, features: Tensor, ids: Tensor, offsets: Tensor, dims: list[int],
        segments: list[int], rule: str, pooling: str,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(ids, offsets, per_id_weights, features)
        # not saved: updates of other lookups may come between this forward and its backward
        ctx.mutable = (weights, s1, s2, step, hyper, guard)
        ctx.dims, ctx.segments, ctx.rule, ctx.pooling = dims, segments, rule, pooling
        if pooling == "sequence":
            return sequence_lookup(weights, ids, offsets, features, dims[0], segments)
        return pooled_lookup(weights, ids, offsets, per_id_weights, features, dims, segments, pooling)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        ids, offsets, per_id_weights, features = ctx.saved_tensors
        weights, s1, s2, step, hyper, guard = ctx.mutable
        grad_p = None
        if ctx.needs_input_grad[1]:
            # before the update: this gradient is of the rows that were looked up
            grad_p = torch.ops.shardwise.per_id_weight_gradient(grad, weights, ids, offsets, features, ctx.dims)
        fused_update(
            weights, s1, s2, step, grad, ids, offsets, per_id_weights, features, ctx.dims, ctx.segments, ctx.rule,
            hyper, guard, ctx.pooling,
        )  # fmt: skip
        return (None, grad_p, *[None] * 13)


class _FlatOfParameters(torch.autograd.Function):
    """The flat buffer as a function of the parameters that are views of it: gradients are cut along the same lines."""

    @staticmethod
    def forward(ctx: Any, group: TableGroup, flat: Tensor, *parameters: Tensor) -> Tensor:
        ctx.cuts = [(base, shape) for base, shape in zip(group._bases, group.tables, strict=True)]
        return flat.view_as(flat)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        tables = [grad[base : base + s.rows * s.dim].view(s.rows, s.dim) for base, s in ctx.cuts]
        wanted = [table if needed else None for table, needed in zip(tables, ctx.needs_input_grad[2:], strict=True)]
        return (None, None, *wanted)


def _flat_of_parameters(group: TableGroup) -> Tensor:
    if not torch.is_grad_enabled() or not any(p.requires_grad for p in group.parameters):
        return group.flat
    return _FlatOfParameters.apply(group, group.flat, *group.parameters)  # type: ignore[no-any-return, no-untyped-call]


def _lay_out(tables: Sequence[TableShape]) -> tuple[list[int], list[int], list[Segment], int]:
    """Base element and first row of each table, the segments of equal dim, and the elements of the flat buffer."""
    bases, first_rows = [0] * len(tables), [0] * len(tables)
    segments: list[Segment] = []
    element = row = 0
    for t in sorted(range(len(tables)), key=lambda t: tables[t].dim):
        if not segments or segments[-1].dim != tables[t].dim:
            element = -(-element // _BOUNDARY) * _BOUNDARY
            segments.append(Segment(tables[t].dim, row, row, element))
        bases[t], first_rows[t] = element, row
        element += tables[t].rows * tables[t].dim
        row += tables[t].rows
        segments[-1] = segments[-1]._replace(end_row=row)
    return bases, first_rows, segments, element

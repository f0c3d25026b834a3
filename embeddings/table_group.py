"""Tables of one dtype and one optimizer in one flat buffer: their storage, lookups and fused updates.

Shapes: flat [elements], table t a view [R_t, D_t] of it; I [N] ids, O [F*B + 1] offsets, features in the order given.
Tables of equal dim lie side by side, so that one launch and one sort key serve them all.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.kernels import (
    BoundsCheckMode,
    Feature,
    check_gradient,
    check_ids,
    describe_gradient,
    describe_weight,
    flatten_segments,
    fused_update,
    is_clean,
    new_guard,
    pack_features,
    per_id_weight_gradient,
    pooled_lookup,
    raise_from_guard,
    rule_named,
    sequence_lookup,
    table_rows,
)
from shardwise.kernels.bounds import ids_pass
from shardwise.kernels.cpu_lookup import offsets_are_good
from shardwise.kernels.huge_pages import in_huge_pages

from .accumulation import Accumulation
from .optimizers import OptimizerSpec
from .policy import DEFAULT_POLICY, GradientCheckMode, LookupPolicy
from .row_store import ResidentRows, RowStore
from .row_sums import RowSums, add_sums, apply_sums, sum_rows
from .table_layout import LookupFeature, TableShape, lay_out
from .unread_guard import UnreadGuard, capturing, raise_replayed


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
        policy: LookupPolicy = DEFAULT_POLICY,
        store: RowStore | None = None,
    ) -> None:
        self.tables, self.lookups, self.optimizer = list(tables), list(features), optimizer
        self.lr = optimizer.lr if optimizer is not None else 0.0
        self.policy = policy
        self.store: RowStore = store or ResidentRows()
        self._bases, first_rows, self.segments, elements = lay_out(tables)
        self.first_rows = first_rows
        # rows by their own numbers, which are others than those of slots
        _, self.first_ids, self.id_segments, _ = lay_out([replace(table, slots=None) for table in tables])
        self.rows = sum(table.resident for table in tables)
        self.dims = [tables[f.table].dim for f in features]
        self.pooling = "mean" if any(f.mean for f in features) else "sum"
        self.names = [f"feature {f.name!r} (table {tables[f.table].name!r})" for f in features]
        self._segment_numbers = flatten_segments(self.segments)
        self.flat = in_huge_pages(torch.empty(elements, dtype=dtype, device=device))
        self.parameters: list[nn.Parameter] = []
        self._frozen = [False] * len(self.tables)
        self._spec = [
            Feature(self._bases[f.table], tables[f.table].resident, tables[f.table].dim, first_rows[f.table], f.mean)
            for f in features
        ]
        self.accumulation = Accumulation()
        # gradients that wait for a step, and the leases of their slots
        self.sums: list[RowSums] | None = None
        self._leases: list[Any] = []
        self._place(device, fresh=True)

    def _place(self, device: torch.device, *, fresh: bool) -> None:
        """Put what lives beside the tables on their device: optimizer states begin anew if `fresh`, else they move."""
        spec = self.optimizer or OptimizerSpec("gradient")
        if fresh:
            rule = rule_named(spec.rule)
            self.states = []
            for start, kind in zip(self._starts(), rule.states.values(), strict=True):
                size = self.rows if kind == "row" else self.flat.shape[0]
                state = in_huge_pages(torch.empty(size, dtype=torch.float32, device=device))
                self.states.append(state.fill_(start))
            self.step = torch.zeros(1, dtype=torch.int64, device=device)
            self.hyper = replace(spec, lr=self.lr).hyper(device)
            self.sums = None
        else:
            self.states = [state.to(device) for state in self.states]
            self.step, self.hyper = self.step.to(device), self.hyper.to(device)
            self.sums = None if self.sums is None else [part.to(device) for part in self.sums]
        self.seed = spec.seed_on(device, self.flat.dtype)
        self.features = pack_features(self._spec, device)
        # ids are checked before a store knows them
        by_ids = [
            one._replace(rows=self.tables[f.table].rows, first_row=self.first_ids[f.table])
            for one, f in zip(self._spec, self.lookups, strict=True)
        ]
        self.checked = pack_features(by_ids, device)
        self._pack_trained()
        # the step's guard, which every update reads before it writes; groups of a collection share one
        self.guard = new_guard(device)
        # what the update hangs on in the autograd graph: no parameter, no gradient of its own
        self._anchor = torch.zeros(1, device=device, requires_grad=True)
        self._unread: UnreadGuard | None = None
        self._spare: UnreadGuard | None = None
        # whether a graph was captured, whose replays leave their findings in the step's guard; of groups that share a
        # guard the first reads it, before a check of the same batch may lower it
        self._replayed, self.leads = False, True

    def _pack_trained(self) -> None:
        # the update sees no row of a frozen table: all ids of it lie outside and count as none
        rows = [0 if self._frozen[f.table] else one.rows for f, one in zip(self.lookups, self._spec, strict=True)]
        trained = [one._replace(rows=n) for one, n in zip(self._spec, rows, strict=True)]
        self.trained = pack_features(trained, self.features.device) if any(self._frozen) else self.features

    def freeze(self, tables: Sequence[bool]) -> None:
        """Say of each table whether updates leave it alone; lookups already under way keep what held for them."""
        if list(tables) != self._frozen:
            self._frozen = list(tables)
            self._pack_trained()

    def is_frozen(self, table: int) -> bool:
        """Whether updates leave a table alone."""
        return self._frozen[table]

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self.flat.device

    def view(self, table: int) -> Tensor:
        """Table number `table` as [rows, dim] of the flat buffer."""
        return self._cut(self.flat, table)

    def _cut(self, flat: Tensor, table: int) -> Tensor:
        """A table's part, [rows, dim], of what is laid out like the flat buffer."""
        return table_rows(flat, self._bases[table], self.tables[table].resident, self.tables[table].dim)

    def state_views(self, table: int) -> dict[str, Tensor]:
        """Optimizer states of one table by TorchRec's names: momentum1, momentum2; [rows] or [rows, dim] fp32.

        A rule that counts its steps (Adam's) has one more: step, int64 [1], one tensor for all tables of the group.
        """
        if self.optimizer is None:
            return {}
        first, views, rule = self.first_rows[table], {}, rule_named(self.optimizer.rule)
        for number, (kind, state) in enumerate(zip(rule.kinds, self.states, strict=True), start=1):
            rows = state[first : first + self.tables[table].resident] if kind == "row" else self._cut(state, table)
            views[f"momentum{number}"] = rows
        if rule.counts_steps:
            views["step"] = self.step
        return views

    def _starts(self) -> list[float]:
        """What each optimizer state of a row begins with."""
        spec = self.optimizer or OptimizerSpec("gradient")
        rule = rule_named(spec.rule)
        return [spec.initial_accumulator_value if name == rule.accumulator else 0.0 for name in rule.states]

    @torch.no_grad()
    def renew(self, table: int, rows: Tensor, values: Tensor, *, quietly: bool = False) -> None:
        """Have rows [n] of a table begin anew with `values` [n, dim], optimizer states as at the start.

        Gradients that wait for a step of these rows are dropped. With `quietly` a graph that saved the table before
        does not notice.
        """
        flat = self.flat.data if quietly else self.flat
        self._cut(flat, table)[rows] = values.to(flat)
        states = [view for name, view in self.state_views(table).items() if name != "step"]
        for start, state in zip(self._starts(), states, strict=bool(states)):
            state[rows] = start
        if self.sums is not None:
            dim, gone = self.tables[table].dim, rows + self.first_rows[table]
            self.sums = [part.without(gone) if part.segment.dim == dim else part for part in self.sums]

    @torch.no_grad()
    def take_over(self, table: int, source: TableGroup, source_table: int) -> None:
        """Copy the rows of a table of another group and, under the same optimizer, its states, steps and rate."""
        self.view(table).copy_(source.view(source_table))
        if self.optimizer is not None and self.optimizer == source.optimizer:
            mine, theirs = self.state_views(table), source.state_views(source_table)
            for name, view in mine.items():
                view.copy_(theirs[name])
            self.step.copy_(source.step)
            self.set_lr(source.lr)

    def set_lr(self, lr: float) -> None:
        """Change the learning rate from the next update on, also inside a captured graph."""
        self.lr = lr
        if self.optimizer is not None and "lr" in rule_named(self.optimizer.rule).hyper:
            self.hyper[list(rule_named(self.optimizer.rule).hyper).index("lr")].fill_(lr)

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

    def check(self, ids: Tensor, offsets: Tensor, *, padded: bool = False) -> None:
        """Raise for bad ids or offsets; on CUDA those of the batch before, while this one is only marked.

        With `padded` the ids past the last offset are nobody's and may be anything; without it there are none.

        Raises:
            IndexError, ValueError, TypeError: as `shardwise.kernels.check_ids`.
            FloatingPointError: the gradient of an earlier batch was not finite (CUDA, `GradientCheckMode.RAISE`).
        """
        if not self.lookups:
            return
        mode = self.policy.bounds_check
        if mode is BoundsCheckMode.IGNORE and (ids.is_cuda or offsets_are_good(offsets, ids.shape[0], padded)):
            # it speaks of ids; offsets out of order are an error on the CPU, and never followed outside the ids on CUDA
            if ids.is_cuda and self.policy.gradient_check is GradientCheckMode.RAISE:
                self._watch_gradients(ids, offsets)
            return
        fatal = mode is BoundsCheckMode.FATAL
        recorded = ids.is_cuda and capturing()
        if not recorded:
            self.raise_pending()
        if ids_pass(ids, offsets, self.checked, padded=padded):
            return
        if not ids.is_cuda:
            check_ids(ids, offsets, self.checked, new_guard(), names=self.names, fatal=fatal, padded=padded)
            return
        unread = None if recorded else self._take_unread()
        found = new_guard(ids.device) if unread is None else unread.guard
        # a bad id that only warns is left out by the update itself; bad offsets mask the update all the same
        check_ids(
            ids, offsets, self.checked, found, names=self.names, fatal=fatal, padded=padded, step_guard=self.guard
        )
        if unread is None:
            # a replay runs no Python that could read a guard of its own: what it finds stays in the step's
            self._replayed = True
            if self.policy.strict or not fatal:
                setting = "strict" if self.policy.strict else "bounds_check=BoundsCheckMode.WARNING"
                warnings.warn(
                    f"{setting} has no effect within a captured graph: see TableCollection.check", stacklevel=2
                )
            return
        self._send(unread, ids, offsets)

    def _watch_gradients(self, ids: Tensor, offsets: Tensor) -> None:
        """Raise for a gradient that an earlier batch had on CUDA, where no check of ids would tell of it."""
        if capturing():
            self._replayed = True
            return
        self.raise_pending()
        unread = self._take_unread()
        unread.guard[2:].copy_(self.guard[2:])
        self._send(unread, ids, offsets)

    def _take_unread(self) -> UnreadGuard:
        unread, self._spare = self._spare or UnreadGuard(new_guard(self.guard.device)), None
        return unread

    def _send(self, unread: UnreadGuard, ids: Tensor, offsets: Tensor) -> None:
        self._unread = unread.send(ids, offsets)
        if self.policy.strict:
            self.raise_pending()

    def raise_pending(self) -> None:
        """Raise what an earlier batch left in the guard on CUDA; nothing of that batch was written."""
        unread, self._unread = self._unread, None
        if unread is None or not unread.is_raised():
            # the next batch's: no other has it, whatever threads look up at once
            self._spare = unread or self._spare
            if self._replayed and self.leads:
                raise_replayed(self.guard, [table.name for table in self.tables])
            return
        fatal = self.policy.bounds_check is BoundsCheckMode.FATAL
        self.guard.copy_(new_guard())
        raise_from_guard(unread.guard, unread.ids, unread.offsets, self.checked, self.names, fatal=fatal)
        if not unread.gradient_is_finite():
            names = ", ".join(table.name for table in self.tables)
            raise FloatingPointError(f"a gradient of tables {names} was not finite; no table was updated since")

    def pooled(self, ids: Tensor, offsets: Tensor, per_id_weights: Tensor | None = None) -> Tensor:
        """Pooled lookup of all features, [B, sum of dims]; the backward updates tables or feeds `parameters`."""
        ids, lease = self.store.resolve(ids, offsets, self.step)
        args = (ids, offsets, per_id_weights)
        if self._updates():
            return self._with_update(*args, self.pooling, lease)
        keep_rows = per_id_weights is not None and per_id_weights.requires_grad
        flat = _flat_of_parameters(self, keep_rows) if self.optimizer is None else self.flat
        out = pooled_lookup(
            flat, *args, self.features, self.dims, self._segment_numbers, self.pooling, self.policy.output_dtype
        )
        self.store.release(lease)
        return out

    def sequence(self, ids: Tensor, offsets: Tensor) -> Tensor:
        """The row of each id, [N, dim]; all tables of the group have this dim."""
        ids, lease = self.store.resolve(ids, offsets, self.step)
        if self._updates():
            return self._with_update(ids, offsets, None, "sequence", lease)
        flat = _flat_of_parameters(self) if self.optimizer is None else self.flat
        out = sequence_lookup(
            flat, ids, offsets, self.features, self.tables[0].dim, self._segment_numbers, self.policy.output_dtype
        )
        self.store.release(lease)
        return out

    def look_up(self, slots: Tensor, offsets: Tensor, per_id_weights: Tensor | None, pooling: str) -> Tensor:
        """The rows of slots, pooled or, where `pooling` is "sequence", each by itself; no gradient."""
        dtype = self.policy.output_dtype
        if pooling == "sequence":
            return sequence_lookup(
                self.flat, slots, offsets, self.features, self.dims[0], self._segment_numbers, dtype
            )  # fmt: skip
        return pooled_lookup(
            self.flat, slots, offsets, per_id_weights, self.features, self.dims, self._segment_numbers, pooling, dtype
        )

    def weight_gradient(self, grad: Tensor, slots: Tensor, offsets: Tensor) -> Tensor:
        """The gradient [N] of a pooled lookup by its per-id weights, of the rows as they are now."""
        cut = None if self.optimizer is None else self.optimizer.max_gradient
        clipped = grad if cut is None else grad.clamp(-cut, cut)
        return per_id_weight_gradient(clipped, self.flat, slots, offsets, self.features, self.dims)

    def _updates(self) -> bool:
        """Whether the backward of a lookup made now trains a table."""
        return self.optimizer is not None and torch.is_grad_enabled() and not all(self._frozen)

    def update(
        self, grad: Tensor, ids: Tensor, offsets: Tensor, per_id_weights: Tensor | None = None, *, pooling: str
    ) -> None:
        """The fused optimizer's step for the gradient of a lookup's output; `ids` are slots.

        While the group accumulates, the gradient is added to those that wait for `apply_sums`, and no row changes.

        Raises:
            FloatingPointError: an element of the gradient, or a per-id weight, which scales it, is not finite (CPU,
                `GradientCheckMode.RAISE`).
        """
        assert self.optimizer is not None
        guard, spec = self.guard, self.optimizer
        if self.policy.gradient_check is not GradientCheckMode.IGNORE:
            if self.policy.gradient_check is GradientCheckMode.SKIP:
                guard = guard.clone()
            check_gradient(grad, guard)
            self._raise_if_found(guard, lambda element: describe_gradient(element, grad, self.dims, self.names))
            if per_id_weights is not None:
                used = _in_bags(per_id_weights, offsets)
                check_gradient(used, guard)
                self._raise_if_found(guard, lambda position: describe_weight(position, used, offsets, self.names))
        if self.accumulation.waits:
            self.accumulation.begin()
            # host sync on CUDA: a bad batch is left out
            if is_clean(guard):
                self.add_sums(sum_rows(self, grad, ids, offsets, per_id_weights, pooling))
            return
        fused_update(
            self.flat, self.states, self.step, grad, ids, offsets, per_id_weights,
            self.trained, self.dims, self._segment_numbers,
            spec.rule, self.hyper, guard, pooling, spec.decay, spec.max_gradient, self.seed,
        )  # fmt: skip

    def release(self, lease: Any) -> None:
        """Let the slots of a lookup go after its update; while gradients wait, after the step that applies them."""
        if self.accumulation.begun:
            self._leases.append(lease)
        else:
            self.store.release(lease)

    def add_sums(self, sums: list[RowSums]) -> None:
        """Have these gradients wait for a step, added to those that do."""
        self.sums = sums if self.sums is None else list(map(add_sums, self.sums, sums))

    @torch.no_grad()
    def apply_sums(self) -> None:
        """One step of the optimizer for the gradients that wait, if there are any."""
        if self.sums is not None:
            apply_sums(self, self.sums)
        self.drop_sums()

    def drop_sums(self) -> None:
        """No gradient waits any more."""
        leases, self.sums, self._leases = self._leases, None, []
        for lease in leases:
            self.store.release(lease)

    def _raise_if_found(self, guard: Tensor, describe: Callable[[int], str]) -> None:
        """Raise for what a gradient check found just now, where the policy says so and nothing has to be waited for."""
        if self.policy.gradient_check is GradientCheckMode.RAISE and not guard.is_cuda and not is_clean(guard):
            found = int(guard[2])
            guard.copy_(new_guard())
            raise FloatingPointError(f"{describe(found)}; nothing changed")

    def _with_update(
        self, ids: Tensor, offsets: Tensor, per_id_weights: Tensor | None, pooling: str, lease: Any
    ) -> Tensor:
        return _LookupWithUpdate.apply(  # type: ignore[no-any-return, no-untyped-call]
            self._anchor, per_id_weights, self, ids, offsets, pooling, lease
        )

    def __getstate__(self) -> dict[str, Any]:
        # parameters are views of the flat buffer and belong to the module, which gives them back
        return {**self.__dict__, "parameters": [], "_unread": None, "_spare": None, "_anchor": None, "_replayed": False}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # what was pickled before there were graphs has no word on them
        self.__dict__.update({"_spare": None, "_replayed": False, "leads": True, **state})
        self._anchor = torch.zeros(1, device=self.flat.device, requires_grad=True)


class _LookupWithUpdate(torch.autograd.Function):
    """A lookup whose backward is the optimizer's step. It hangs on `anchor`; weights are no autograd input."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, per_id_weights: Tensor | None, group: TableGroup, ids: Tensor, offsets: Tensor,
        pooling: str, lease: Any,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(ids, offsets, per_id_weights)
        # not saved: updates of other lookups may come between this forward and its backward
        ctx.group, ctx.pooling, ctx.lease = group, pooling, lease
        return group.look_up(ids, offsets, per_id_weights, pooling)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        (grad,) = grad_outputs
        ids, offsets, per_id_weights = ctx.saved_tensors
        group: TableGroup = ctx.group
        grad_p = None
        if ctx.needs_input_grad[1]:
            # before the update: this gradient is of the rows that were looked up
            grad_p = group.weight_gradient(grad, ids, offsets)
        group.update(grad, ids, offsets, per_id_weights, pooling=ctx.pooling)
        group.release(ctx.lease)
        return (None, grad_p, *[None] * 5)


class _FlatOfParameters(torch.autograd.Function):
    """The flat buffer as a function of the parameters that are views of it: gradients are cut along the same lines."""

    @staticmethod
    def forward(ctx: Any, group: TableGroup, flat: Tensor, *parameters: Tensor) -> Tensor:
        ctx.cuts = [(base, table.resident, table.dim) for base, table in zip(group._bases, group.tables, strict=True)]
        return flat.view_as(flat)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        (grad,) = grad_outputs
        tables = [table_rows(grad, *cut) for cut in ctx.cuts]
        wanted = [table if needed else None for table, needed in zip(tables, ctx.needs_input_grad[2:], strict=True)]
        return (None, None, *wanted)


def _flat_of_parameters(group: TableGroup, keep_rows: bool = False) -> Tensor:
    if not torch.is_grad_enabled() or not any(p.requires_grad for p in group.parameters):
        return group.flat
    if torch.compiler.is_exporting():
        # an exported program looks up and does not train: the buffer is one of its constants
        return group.flat.detach()
    # gradients of tables need no rows, so an optimizer may step between forward and backward, as it may with
    # nn.Embedding: `.data` counts its changes apart. With `keep_rows` autograd refuses the backward after such a step
    flat = group.flat if keep_rows else group.flat.data
    return _FlatOfParameters.apply(group, flat, *group.parameters)  # type: ignore[no-any-return, no-untyped-call]


def _in_bags(per_id_weights: Tensor, offsets: Tensor) -> Tensor:
    """The weights [N], with zeros for those past the last offset, which are nobody's."""
    position = torch.arange(per_id_weights.shape[0], device=offsets.device)
    return torch.where(position < offsets[-1], per_id_weights, 0)

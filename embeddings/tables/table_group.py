"""Tables of one dtype and one optimizer in one flat buffer: their storage, lookups and fused updates.

Shapes: flat [elements], table t a view [R_t, D_t] of it; I [N] ids, O [F*B + 1] offsets, features in the order given.
Tables of equal dim lie side by side, so that one launch and one sort key serve them all.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from shardwise.kernels import (
    BoundsCheckMode,
    Feature,
    capturing,
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
from shardwise.kernels.cpu.huge_pages import in_huge_pages
from shardwise.kernels.cpu.lookup import offsets_are_good
from shardwise.kernels.lookup.bounds import ids_pass

from ..optim.optimizers import OptimizerSpec
from ..policy import DEFAULT_POLICY, GradientCheckMode, LookupPolicy
from .accumulation import Accumulation
from .async_guard import Replays, UnreadGuard
from .index_ahead import IndexAhead
from .lookup_autograd import LookupWithUpdate, flat_of_parameters
from .row_store import ResidentRows, RowStore
from .row_sums import RowSums, add_sums, apply_sums, sum_rows
from .table_layout import LookupFeature, TableShape, cuts_of, lay_out, require_tables

# of each table of a group, whether updates leave it alone
Frozen: TypeAlias = tuple[bool, ...]


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
        # whether rows lie elsewhere than their ids say
        self.has_slots = not isinstance(self.store, ResidentRows)
        self._bases, first_rows, self.segments, elements = lay_out(tables)
        self.first_rows = first_rows
        # rows by their own numbers, which are others than those of slots
        _, self.first_ids, self.id_segments, _ = lay_out([replace(table, slots=None) for table in tables])
        self.rows = sum(table.resident for table in tables)
        self.keys = [f.name for f in features]
        self.dims = [tables[f.table].dim for f in features]
        self.pooling = "mean" if any(f.mean for f in features) else "sum"
        self.names = [f"feature {f.name!r} (table {tables[f.table].name!r})" for f in features]
        self._segment_numbers = flatten_segments(self.segments)
        self.cuts = cuts_of(tables, self.segments)
        require_tables(self.tables, elements, dtype, device)
        self.flat = in_huge_pages(torch.empty(elements, dtype=dtype, device=device))
        self.parameters: list[nn.Parameter] = []
        self._spec = [
            Feature(
                self._bases[f.table],
                tables[f.table].resident,
                tables[f.table].dim,
                first_rows[f.table],
                f.mean,
                tables[f.table].origin,
            )
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
                require_tables(self.tables, size, torch.float32, device, "an optimizer state of ")
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
        self._trained: dict[Frozen, Tensor] = {}
        # the step's guard, which every update reads before it writes; groups of a collection share one
        self.guard = new_guard(device)
        # what the update hangs on in the autograd graph: no parameter, no gradient of its own
        self._anchor = torch.zeros(1, device=device, requires_grad=True)
        self._unread: UnreadGuard | None = None
        self._spare: UnreadGuard | None = None
        # once a graph was captured; the first of groups that share a guard reads it, before a check may lower it
        self._replays: Replays | None = None
        self.leads = True

    def trained(self, frozen: Frozen | None = None) -> Tensor:
        """The features of an update that leaves some tables alone: by default those that are frozen now."""
        frozen = self.frozen() if frozen is None else frozen
        if not any(frozen):
            return self.features
        found = self._trained.get(frozen)
        if found is None:
            # the update sees no row of a frozen table: all ids of it lie outside and count as none
            rows = [0 if frozen[f.table] else one.rows for f, one in zip(self.lookups, self._spec, strict=True)]
            trained = [one._replace(rows=n) for one, n in zip(self._spec, rows, strict=True)]
            self._trained.clear()
            found = self._trained[frozen] = pack_features(trained, self.features.device)
        return found

    def frozen(self) -> Frozen:
        """Whether updates leave each table alone now: its parameter wants no gradient."""
        # a list's loop: every step asks this of every table, at its lookup and at its backward
        if False not in [param.requires_grad for param in self.parameters]:
            return (False,) * len(self.tables)
        return tuple([not param.requires_grad for param in self.parameters])

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

        A rule that counts its steps (Adam's), and rows that are rounded by them, have one more: step, int64 [1], one
        tensor for all tables of the group.
        """
        if self.optimizer is None:
            return {}
        first, views, rule = self.first_rows[table], {}, rule_named(self.optimizer.rule)
        for number, (kind, state) in enumerate(zip(rule.kinds, self.states, strict=True), start=1):
            rows = state[first : first + self.tables[table].resident] if kind == "row" else self._cut(state, table)
            views[f"momentum{number}"] = rows
        if rule.counts_steps or self.seed is not None:
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
                if name != "step":
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
            self.raise_pending(waits=False)
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
            self._replays = self._replays or Replays()
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
            self._replays = self._replays or Replays()
            return
        self.raise_pending(waits=False)
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

    def raise_pending(self, *, waits: bool = True) -> None:
        """Raise what an earlier batch left in the guard on CUDA; nothing was written since. `waits`: see `Replays`."""
        unread, self._unread = self._unread, None
        if unread is None or not unread.is_raised():
            # the next batch's: no other has it, whatever threads look up at once
            self._spare = unread or self._spare
            if self._replays is not None and self.leads:
                self._replays.raise_found(self.guard, [table.name for table in self.tables], waits=waits)
            return
        fatal = self.policy.bounds_check is BoundsCheckMode.FATAL
        self.guard.copy_(new_guard())
        raise_from_guard(unread.guard, unread.ids, unread.offsets, self.checked, self.names, fatal=fatal)
        if not unread.gradient_is_finite():
            names = ", ".join(table.name for table in self.tables)
            raise FloatingPointError(f"a gradient of tables {names} was not finite; no table was updated since")

    def pooled(
        self, ids: Tensor, offsets: Tensor, per_id_weights: Tensor | None = None, *, trains: bool = True
    ) -> Tensor:
        """Pooled lookup of all features, [B, sum of dims]; the backward updates tables or feeds `parameters`.

        Where not `trains` the backward updates nothing; without an optimizer it makes no difference.
        """
        slots, lease = self.store.resolve(ids, offsets, self.step)
        args = (slots, offsets, per_id_weights)
        frozen = self._frozen_of_update()
        if frozen is not None:
            return self._with_update(ids, *args, self.pooling, lease, frozen if trains else None)
        keep_rows = per_id_weights is not None and per_id_weights.requires_grad
        flat = flat_of_parameters(self, keep_rows) if self.optimizer is None else self.flat
        out = pooled_lookup(
            flat, *args, self.features, self.dims, self._segment_numbers, self.pooling, self.policy.output_dtype
        )
        self.store.release(lease)
        return out

    def sequence(self, ids: Tensor, offsets: Tensor, *, trains: bool = True) -> Tensor:
        """The row of each id, [N, dim]; all tables of the group have this dim. `trains` as for `pooled`."""
        slots, lease = self.store.resolve(ids, offsets, self.step)
        frozen = self._frozen_of_update()
        if frozen is not None:
            return self._with_update(ids, slots, offsets, None, "sequence", lease, frozen if trains else None)
        flat = flat_of_parameters(self) if self.optimizer is None else self.flat
        out = sequence_lookup(
            flat, slots, offsets, self.features, self.tables[0].dim, self._segment_numbers, self.policy.output_dtype
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
        clipped = grad if cut is None else grad.float().clamp(-cut, cut)
        return per_id_weight_gradient(clipped, self.flat, slots, offsets, self.features, self.dims)

    def _frozen_of_update(self) -> Frozen | None:
        """The tables that the backward of a lookup made now leaves alone, unless it is one of a module in eval().

        None if it trains no table.
        """
        if self.optimizer is None or not torch.is_grad_enabled():
            return None
        frozen = self.frozen()
        return None if all(frozen) else frozen

    def update(
        self,
        grad: Tensor,
        slots: Tensor,
        offsets: Tensor,
        per_id_weights: Tensor | None = None,
        *,
        pooling: str,
        frozen: Frozen | None = None,
        ids: Tensor | None = None,
        clips: bool = True,
        index: IndexAhead | None = None,
    ) -> None:
        """The fused optimizer's step for the gradient of a lookup's output.

        While the group accumulates, the gradient is added to those that wait for `apply_sums`, and no row changes.

        Args:
            grad, per_id_weights, pooling: as `fused_update`.
            slots, offsets: where the rows of the batch lie.
            frozen: tables that were left alone when they were looked up; those that are frozen now are too.
            ids: what `slots` are of, where rows have slots.
            clips: whether `grad` is cut to the optimizer's `max_gradient`; False of one that is already.
            index: what the lookup made of the same batch ahead, if it did.

        Raises:
            FloatingPointError: an element of the gradient, or a per-id weight, which scales it, is not finite (CPU,
                `GradientCheckMode.RAISE`).
        """
        assert self.optimizer is not None
        guard, spec, now = self.guard, self.optimizer, self.frozen()
        frozen = now if frozen is None or frozen == now else tuple(map(operator.or_, frozen, now))
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
                self.add_sums(
                    sum_rows(self, grad, slots, offsets, per_id_weights, pooling, ids, frozen=frozen, clips=clips)
                )
            return
        fused_update(
            self.flat, self.states, self.step, grad, slots, offsets, per_id_weights,
            self.trained(frozen) if any(frozen) else self.features, self.dims, self._segment_numbers,
            spec.rule, self.hyper, guard, pooling, spec.decay, spec.max_gradient if clips else None, self.seed, ids,
            None if index is None else index.tensors(frozen),
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
        self, ids: Tensor, slots: Tensor, offsets: Tensor, per_id_weights: Tensor | None, pooling: str, lease: Any,
        frozen: Frozen | None,
    ) -> Tensor:  # fmt: skip
        # ids that are not their own slots say how rows are rounded
        own = ids if self.has_slots else None
        return LookupWithUpdate.apply(  # type: ignore[no-any-return, no-untyped-call]
            self._anchor, per_id_weights, self, own, slots, offsets, pooling, lease, frozen
        )

    def __getstate__(self) -> dict[str, Any]:
        # parameters are views of the flat buffer and belong to the module, which gives them back
        return {**self.__dict__, "parameters": [], "_unread": None, "_spare": None, "_anchor": None, "_replays": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # what was pickled before there were graphs has no word on them
        self.__dict__.update({"_spare": None, "_replays": None, "leads": True, **state, "_trained": {}})
        self._anchor = torch.zeros(1, device=self.flat.device, requires_grad=True)


def _in_bags(per_id_weights: Tensor, offsets: Tensor) -> Tensor:
    """The weights [N], with zeros for those past the last offset, which are nobody's."""
    position = torch.arange(per_id_weights.shape[0], device=offsets.device)
    return torch.where(position < offsets[-1], per_id_weights, 0)

"""Tables of one dtype and one optimizer in one flat buffer: their storage, lookups and fused updates.

Shapes: flat [elements], table t a view [R_t, D_t] of it; I [N] ids, O [F*B + 1] offsets, features in the order given.
Tables of equal dim lie side by side, so that one launch and one sort key serve them all. Kernels receive slots, and a
store says which slot holds which row: weights and all optimizer states of a row share its slot.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor, nn

from shardwise.jagged.tracing import is_transformed
from shardwise.kernels import (
    Feature,
    check_gradient,
    describe_gradient,
    describe_weight,
    flatten_segments,
    fused_update,
    is_clean,
    lookup_gradient,
    new_guard,
    pack_features,
    per_id_weight_gradient,
    pooled_lookup,
    rule_named,
    sequence_lookup,
    table_rows,
)
from shardwise.kernels.huge_pages import in_huge_pages

from ..policy import DEFAULT_POLICY, GradientCheckMode, LookupPolicy
from .id_check import GuardedIdCheck
from .lookup_autograd import IndexAhead, LookupWithUpdate, flat_of_parameters
from .row_sums import Accumulation, RowSums, add_sums, apply_sums, sum_rows
from .table_layout import LookupFeature, OptimizerSpec, TableShape, blank, cuts_of, laid_out, lay_out, require_tables
from .transformed import refuse_fused, transformed_pooled, transformed_sequence


class NoFreeSlots(RuntimeError):
    """A store has too few slots for the rows of a batch beside those that leases hold; it has given out none."""


class RowStore(Protocol):
    """Brings the rows that a batch names to slots, and keeps them there until their lease is released.

    A lookup resolves once; without gradients the lease is released after the lookup, otherwise after the update. A
    pipeline that prefetches resolves a batch while the one before still has its lease.
    """

    def attach(self, group: TableGroup) -> None:
        """The group whose rows these are, once their first weights lie in it; called once, before any batch.

        `TableGroup.view` and `state_views` are where slots and their states lie, until tables are moved.
        """
        ...

    def resolve(self, ids: Tensor, offsets: Tensor, step: Tensor) -> tuple[Tensor, Any]:
        """Slots of ids [N] (offsets [F*B + 1], feature by feature) and the lease that holds them.

        An id outside its table keeps a number outside the slots; ids past the last offset are nobody's and may be
        anything. `step` [1] int64 counts the updates so far.

        Raises:
            NoFreeSlots: leases hold too many slots. A prefetch then leaves it to the lookup.
        """
        ...

    def release(self, lease: Any) -> None:
        """The rows of a lease may go: their update is done, or none will come."""
        ...


@runtime_checkable
class LookaheadStore(RowStore, Protocol):
    """A store that may be told of batches before they come, and whose rows may still be on their way when it resolves.

    Tables of such a store have fewer slots than rows: what is to be read or written goes through it, not through views
    of slots.
    """

    def announce(self, ids: Tensor, offsets: Tensor) -> Any:
        """Say that a batch will come; batches come in the order in which they were announced. For `resolve`."""
        ...

    def withdraw(self, announced: Any) -> None:
        """Say that a batch that was announced will not come."""
        ...

    def resolve(self, ids: Tensor, offsets: Tensor, step: Tensor, announced: Any = None) -> tuple[Tensor, Any]:
        """As `RowStore.resolve`; rows are in their slots once `ready` returned."""
        ...

    def ready(self, lease: Any) -> None:
        """Wait until the rows of a lease are in their slots."""
        ...

    def release_unchanged(self, lease: Any) -> None:
        """As `release`, where no update came."""
        ...

    def holds(self, lease: Any) -> bool:
        """Whether a lease was not released yet."""
        ...

    def is_in_use(self) -> bool:
        """Whether a batch holds rows, or was announced and has not come."""
        ...

    def follow(self, device: torch.device) -> None:
        """The group's buffers are on another device by now, with what they had; no batch holds rows."""
        ...

    def chunks(self, table: int) -> Iterator[tuple[int, int]]:
        """Row ranges [begin, end) that cover a table, each of bounded memory."""
        ...

    def read(self, table: int, begin: int, end: int) -> list[Tensor]:
        """Rows [begin, end) of a table on the host: [n, dim], then optimizer states [n, dim] or [n]."""
        ...

    def write_rows(self, table: int, rows: Tensor, parts: Sequence[Tensor | None]) -> None:
        """Replace distinct rows [n] of a table, ascending: weights [n, dim] and states, as `read`; None stays."""
        ...


class ResidentRows:
    """The store of tables that lie on the device as a whole: slot and row are the same number, for good."""

    def attach(self, group: TableGroup) -> None:
        """Nothing is brought from elsewhere."""

    def resolve(self, ids: Tensor, offsets: Tensor, step: Tensor) -> tuple[Tensor, None]:
        """The ids [N] themselves; arguments as `RowStore.resolve`."""
        return ids, None

    def release(self, lease: None) -> None:
        """Nothing was held."""


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
        self.lookups, self.optimizer = list(features), optimizer
        self.lr = optimizer.lr if optimizer is not None else 0.0
        self.policy = policy
        self.store: RowStore = store or ResidentRows()
        # whether rows lie elsewhere than their ids say
        self.has_slots = not isinstance(self.store, ResidentRows)
        self.lookahead = self.store if isinstance(self.store, LookaheadStore) else None
        # rows by their own numbers, which are others than those of slots
        _, self.first_ids, self.id_segments, _ = lay_out([replace(table, slots=None) for table in tables])
        self._lay_out(tables)
        self.keys = [f.name for f in features]
        self.dims = [tables[f.table].dim for f in features]
        self.pooling = "mean" if any(f.mean for f in features) else "sum"
        self.names = [f"feature {f.name!r} (table {tables[f.table].name!r})" for f in features]
        require_tables(self.tables, self._elements, dtype, device)
        self.flat = in_huge_pages(torch.empty(self._elements, dtype=dtype, device=device))
        self.parameters: list[nn.Parameter] = []
        self.accumulation = Accumulation()
        # gradients that wait for a step, and the leases of their slots
        self.sums: list[RowSums] | None = None
        self._leases: list[Any] = []
        self._place(device, fresh=True)

    def _lay_out(self, tables: Sequence[TableShape]) -> None:
        """Where these tables and their features begin."""
        self.tables = list(tables)
        self._bases, self.first_rows, self.segments, self._elements = lay_out(tables)
        self.rows = sum(table.resident for table in tables)
        self._segment_numbers = flatten_segments(self.segments)
        self.cuts = cuts_of(tables, self.segments)
        self._spec = [
            Feature(
                self._bases[f.table],
                tables[f.table].resident,
                tables[f.table].dim,
                self.first_rows[f.table],
                f.mean,
                tables[f.table].origin,
            )
            for f in self.lookups
        ]

    def _new_states(self, device: torch.device) -> list[Tensor]:
        """Memory for the optimizer states of the tables as they are laid out, as at the start."""
        spec = self.optimizer or OptimizerSpec("gradient")
        states = []
        for start, kind in zip(self.starts(), rule_named(spec.rule).states.values(), strict=True):
            size = self.rows if kind == "row" else self._elements
            require_tables(self.tables, size, torch.float32, device, "an optimizer state of ")
            states.append(in_huge_pages(torch.empty(size, dtype=torch.float32, device=device)).fill_(start))
        return states

    def _place(self, device: torch.device, *, fresh: bool) -> None:
        """Put what lives beside the tables on their device: optimizer states begin anew if `fresh`, else they move."""
        spec = self.optimizer or OptimizerSpec("gradient")
        if fresh:
            self.states = self._new_states(device)
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
        # called with the ids and offsets of every batch before its lookup
        self.check = GuardedIdCheck(
            self.names, [table.name for table in self.tables], pack_features(by_ids, device), self.policy
        )
        self._trained: dict[Frozen, Tensor] = {}
        # what the update hangs on in the autograd graph: no parameter, no gradient of its own
        self._anchor = torch.zeros(1, device=device, requires_grad=True)

    def adopt(self, flat: Tensor, states: Sequence[Tensor]) -> None:
        """Look up and train in memory that somebody else holds; the group may have been made on meta.

        Args:
            flat: [elements], the tables one after another as they lie in the group's own buffer.
            states: of the optimizer, fp32, each [rows] or [elements], in the same order.

        Raises:
            ValueError: another number of elements or states, or another dtype.
        """
        given = [(buffer.numel(), buffer.dtype) for buffer in (flat, *states)]
        own = [(buffer.numel(), buffer.dtype) for buffer in (self.flat, *self.states)]
        if given != own:
            raise ValueError(f"memory for tables and states must have sizes and dtypes {own}, got {given}")
        self.flat, self.states = flat, [state.view(-1) for state in states]
        spec, device = self.optimizer or OptimizerSpec("gradient"), flat.device
        self.hyper = replace(spec, lr=self.lr).hyper(device)
        if self.step.is_meta:
            self.step = torch.zeros(1, dtype=torch.int64, device=device)
        self._place(device, fresh=False)

    def trained(self, frozen: Frozen | None = None) -> Tensor:
        """The features [F, 8] of an update that leaves some tables alone: by default those that are frozen now."""
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

    @torch.no_grad()
    def lay_out_anew(
        self, tables: Sequence[TableShape], flat: Tensor | None = None, states: Sequence[Tensor] | None = None
    ) -> None:
        """Hold the same tables with other numbers of slots from now on, in this memory or in new one.

        `flat` [elements] and `states`, each [rows] or [elements] fp32, as the buffers of the group. The memory of
        before is not read; gradients that wait stay with the slots that they are of.
        """
        before, device = self.first_rows, self.device
        self._lay_out(tables)
        if flat is None or states is None:
            require_tables(self.tables, self._elements, self.flat.dtype, device)
            flat = in_huge_pages(torch.empty(self._elements, dtype=self.flat.dtype, device=device))
            states = self._new_states(device)
        self.flat, self.states = flat, list(states)
        self.features = pack_features(self._spec, device)
        self._trained.clear()
        if self.sums is not None:
            self.sums = [
                part.moved(segment, self.first_ids, before, self.first_rows)
                for part, segment in zip(self.sums, self.segments, strict=True)
            ]

    @torch.no_grad()
    def resize(self, slots: Sequence[int]) -> None:
        """Give tables other numbers of slots: what is in those that stay keeps its number there."""
        old = [self._slots_of(t) for t in range(len(self.tables))]
        self.lay_out_anew([replace(shape, slots=count) for shape, count in zip(self.tables, slots, strict=True)])
        for t, parts in enumerate(old):
            for source, target in zip(parts, self._slots_of(t), strict=True):
                kept = min(len(source), len(target))
                target[:kept] = source[:kept]

    def _slots_of(self, table: int) -> list[Tensor]:
        """Weights and optimizer states of a table's slots."""
        return [self.view(table), *(view for name, view in self.state_views(table).items() if name != "step")]

    @property
    def device(self) -> torch.device:
        """Where the tables are."""
        return self.flat.device

    @property
    def is_away(self) -> bool:
        """Whether only some rows of the tables are here: others see NaNs in the place of weights and states."""
        return self.lookahead is not None and any(table.slots is not None for table in self.tables)

    def shown(self, table: int) -> Tensor:
        """Table number `table` as its owner's parameter shows it, [rows, dim]."""
        if not self.is_away:
            return self.view(table)
        return blank(self.flat, (self.tables[table].rows, self.tables[table].dim))

    def view(self, table: int) -> Tensor:
        """Table number `table` as [rows, dim] of the flat buffer."""
        return self.cut(self.flat, table)

    def cut(self, flat: Tensor, table: int) -> Tensor:
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
            rows = state[first : first + self.tables[table].resident] if kind == "row" else self.cut(state, table)
            views[f"momentum{number}"] = rows
        if rule.counts_steps or self.seed is not None:
            views["step"] = self.step
        return views

    def starts(self) -> list[float]:
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
        if self.lookahead is not None and self.is_away:
            rows, order = rows.sort()
            starts = self._starts_of(table, rows.shape[0])
            self.lookahead.write_rows(table, rows, [values[order].to(self.flat), *starts])
        else:
            flat = self.flat.data if quietly else self.flat
            self.cut(flat, table)[rows] = values.to(flat)
            states = [view for name, view in self.state_views(table).items() if name != "step"]
            for start, state in zip(self.starts(), states, strict=bool(states)):
                state[rows] = start
        if self.sums is not None:
            dim, gone = self.tables[table].dim, rows + self.first_ids[table]
            self.sums = [part.without(gone) if part.segment.dim == dim else part for part in self.sums]

    def _starts_of(self, table: int, rows: int) -> list[Tensor]:
        """Optimizer states of so many new rows of a table."""
        views = [view for name, view in self.state_views(table).items() if name != "step"]
        return [view.new_full((rows, *view.shape[1:]), start) for start, view in zip(self.starts(), views, strict=True)]

    @torch.no_grad()
    def copy_from(self, table: int, source: TableGroup, source_table: int) -> None:
        """Copy the rows of a table of another group and, under the same optimizer, its states, steps and rate."""
        alike = self.optimizer is not None and self.optimizer == source.optimizer
        for begin, end in self._chunks(table, source, source_table):
            parts = source._rows_of(source_table, begin, end)
            self._put_rows(table, begin, parts if alike else parts[:1])
        if alike:
            self.step.copy_(source.step)
            self.set_lr(source.lr)

    def _chunks(self, table: int, source: TableGroup, source_table: int) -> Iterator[tuple[int, int]]:
        """The rows that `copy_from` copies at a time: all of them between tables that lie on the device."""
        for group, number in ((source, source_table), (self, table)):
            if group.lookahead is not None and group.is_away:
                return iter(group.lookahead.chunks(number))
        return iter([(0, self.tables[table].rows)])

    def _rows_of(self, table: int, begin: int, end: int) -> list[Tensor]:
        """Weights and states of rows [begin, end)."""
        if self.lookahead is not None and self.is_away:
            return self.lookahead.read(table, begin, end)
        return [part[begin:end] for part in self._slots_of(table)]

    def _put_rows(self, table: int, begin: int, parts: Sequence[Tensor]) -> None:
        """Replace rows from `begin` on: weights, and states where they are given."""
        own, rows = self._slots_of(table), torch.arange(begin, begin + parts[0].shape[0], device=self.device)
        if self.lookahead is not None and self.is_away:
            self.lookahead.write_rows(table, rows, [*parts, *[None] * (len(own) - len(parts))])
            return
        for target, part in zip(own, parts, strict=False):
            target[begin : begin + part.shape[0]] = part

    def set_lr(self, lr: float) -> None:
        """Change the learning rate from the next update on, also inside a captured graph."""
        self.lr = lr
        if self.optimizer is not None and "lr" in rule_named(self.optimizer.rule).hyper:
            self.hyper[list(rule_named(self.optimizer.rule).hyper).index("lr")].fill_(lr)

    def require_movable(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Refuse what rows below the device cannot follow.

        Raises:
            ValueError: they would have another dtype, or be on meta.
            RuntimeError: a batch that is under way holds rows that would move.
        """
        if self.lookahead is None or not self.is_away:
            return
        moved, names = fn(self.flat.new_empty(0)), ", ".join(table.name for table in self.tables)
        if moved.dtype != self.flat.dtype:
            raise ValueError(
                f"tables {names}: have a tier, whose records are {self.flat.dtype}: they cannot become {moved.dtype};"
                " save a checkpoint and load it into a model that is sharded with weights_precision"
            )
        if moved.is_meta:
            raise ValueError(f"tables {names}: have a tier: rows below a device cannot be on meta")
        if moved.device != self.device and self.lookahead.is_in_use():
            raise RuntimeError(f"tables {names}: a batch under way holds rows that would move to {moved.device}")

    def move(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply what `nn.Module._apply` applies (`.to`, `.half`, `to_empty`) to the tables; states follow the device.

        Raises:
            ValueError: tables would get a dtype in which they cannot train; or as `require_movable`.
        """
        self.require_movable(fn)
        if self.lookahead is not None and self.is_away:
            device = fn(self.flat.new_empty(0)).device
            if device != self.device:
                # not by `fn`: rows that are here are all that there is of them
                self.flat = self.flat.to(device)
                self._place(device, fresh=False)
                self.lookahead.follow(device)
            return
        flat = fn(self.flat)
        if flat.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            names = ", ".join(table.name for table in self.tables)
            raise ValueError(f"tables {names}: cannot become {flat.dtype}; fp32, fp16 and bf16 can be trained")
        was_meta, self.flat = self.flat.is_meta, flat
        self._place(flat.device, fresh=was_meta or flat.is_meta)

    def pooled(
        self, ids: Tensor, offsets: Tensor, per_id_weights: Tensor | None = None, *, trains: bool = True
    ) -> Tensor:
        """Pooled lookup of all features, [B, sum of dims]; the backward updates tables or feeds `parameters`.

        Where not `trains` the backward updates nothing; without an optimizer it makes no difference.
        """
        slots, lease = self.resolve(ids, offsets)
        args = (slots, offsets, per_id_weights)
        frozen = self._frozen_of_update()
        if is_transformed():
            dtype = self._transformed_dtype(frozen)
            return transformed_pooled(self._plain_flat(), *args, self.features, dtype)
        if frozen is not None:
            return self._with_update(ids, *args, self.pooling, lease, frozen if trains else None)
        keep_rows = per_id_weights is not None and per_id_weights.requires_grad
        flat = flat_of_parameters(self, keep_rows) if self.optimizer is None else self.flat
        out = pooled_lookup(
            flat, *args, self.features, self.dims, self._segment_numbers, self.pooling, self.policy.output_dtype
        )
        self.release_unchanged(lease)
        return out

    def sequence(self, ids: Tensor, offsets: Tensor, *, trains: bool = True) -> Tensor:
        """The row of each id, [N, dim]; all tables of the group have this dim. `trains` as for `pooled`."""
        slots, lease = self.resolve(ids, offsets)
        frozen = self._frozen_of_update()
        if is_transformed():
            return transformed_sequence(
                self._plain_flat(), slots, offsets, self.features, self._transformed_dtype(frozen)
            )
        if frozen is not None:
            return self._with_update(ids, slots, offsets, None, "sequence", lease, frozen if trains else None)
        flat = flat_of_parameters(self) if self.optimizer is None else self.flat
        out = sequence_lookup(
            flat, slots, offsets, self.features, self.tables[0].dim, self._segment_numbers, self.policy.output_dtype
        )
        self.release_unchanged(lease)
        return out

    def _transformed_dtype(self, frozen: object) -> torch.dtype:
        """The dtype of an output under a transform; refuses tables that their backward trains."""
        if frozen is not None:
            refuse_fused([table.name for table in self.tables])
        return self.policy.output_dtype or self.flat.dtype

    def _plain_flat(self) -> Tensor:
        """The rows, without the autograd function that gives each parameter its part of their gradient."""
        return laid_out(self.cuts, self.parameters) if self.parameters else self.flat

    def look_up(self, slots: Tensor, offsets: Tensor, per_id_weights: Tensor | None, pooling: str) -> Tensor:
        """The rows of slots, pooled [B, sum(dims)] or, where `pooling` is "sequence", each alone [N, dim]; no gradient.

        Shapes: slots [N], offsets [F*B + 1], per_id_weights [N].
        """
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

    def table_gradient(
        self, grad: Tensor, slots: Tensor, offsets: Tensor, per_id_weights: Tensor | None, pooling: str
    ) -> Tensor:
        """The gradient [elements] of a lookup by its tables, laid out like the flat buffer; arguments as `update`'s."""
        return lookup_gradient(
            self.flat, grad, slots, offsets, per_id_weights, self.features, self.dims, self._segment_numbers, pooling
        )

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
            grad, per_id_weights, pooling: as `fused_update`: [B, sum(dims)], or [N, dim] of a sequence; [N].
            slots: [N] where the rows of the batch lie.
            offsets: [F*B + 1] where bags begin.
            frozen: tables that were left alone when they were looked up; those that are frozen now are too.
            ids: [N] what `slots` are of, where rows have slots.
            clips: whether `grad` is cut to the optimizer's `max_gradient`; False of one that is already.
            index: what the lookup made of the same batch ahead, if it did.

        Raises:
            FloatingPointError: an element of the gradient, or a per-id weight, which scales it, is not finite (CPU,
                `GradientCheckMode.RAISE`).
        """
        assert self.optimizer is not None
        guard, spec, now = self.check.guard, self.optimizer, self.frozen()
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
            None if index is None else index.tensors(frozen, self._segment_numbers),
        )  # fmt: skip

    def resolve(self, ids: Tensor, offsets: Tensor) -> tuple[Tensor, Any]:
        """Slots [N] of a batch's ids [N] (offsets [F*B + 1]), their rows in them, and the lease that holds these."""
        slots, lease = self.store.resolve(ids, offsets, self.step)
        if self.lookahead is not None:
            self.lookahead.ready(lease)
        return slots, lease

    def require_held(self, lease: Any) -> None:
        """Refuse to update rows that may have left their slots.

        Raises:
            RuntimeError: the lease was released.
        """
        if self.lookahead is not None and not self.lookahead.holds(lease):
            raise RuntimeError(
                f"tables {[table.name for table in self.tables]}: a second backward of one lookup, whose rows may have"
                " left the device after the first (retain_graph); look the batch up again"
            )

    def release_unchanged(self, lease: Any) -> None:
        """Let the slots of a lookup go that no update follows."""
        if self.lookahead is None:
            self.store.release(lease)
        else:
            self.lookahead.release_unchanged(lease)

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
        return {**self.__dict__, "parameters": [], "_anchor": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update({**state, "_trained": {}})
        if "check" not in state:
            # what was pickled before checks were objects has a guard of its own
            tables = [table.name for table in self.tables]
            self.check = GuardedIdCheck(self.names, tables, state["checked"], self.policy)
            self.check.guard, self.check.owns_guard = state["guard"], state.get("leads", True)
        self._anchor = torch.zeros(1, device=self.flat.device, requires_grad=True)


def _in_bags(per_id_weights: Tensor, offsets: Tensor) -> Tensor:
    """The weights [N], with zeros for those past the last offset, which are nobody's."""
    position = torch.arange(per_id_weights.shape[0], device=offsets.device)
    return torch.where(position < offsets[-1], per_id_weights, 0)

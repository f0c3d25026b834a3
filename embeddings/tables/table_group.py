"""Tables of one dtype and one optimizer in one flat buffer: their storage, lookups and fused updates.

Shapes: flat [elements], table t a view [R_t, D_t] of it; I [N] ids, O [F*B + 1] offsets, features in the order given.
Tables of equal dim lie side by side, so that one launch and one sort key serve them all. Kernels receive slots, and a
store says which slot holds which row: weights and all optimizer states of a row share its slot.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeAlias

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
from .table_layout import LookupFeature, OptimizerSpec, TableShape, cuts_of, laid_out, lay_out, require_tables
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


class ResidentRows:
    """The store of tables that lie on the device as a whole: slot and row are the same number, for good."""

    def attach(self, group: TableGroup) -> None:
        """Nothing is brought from elsewhere."""

    def resolve(self, ids: Tensor, offsets: Tensor, step: Tensor) -> tuple[Tensor, None]:
        """The ids themselves."""
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
            states: of the optimizer, fp32, each with a number for every row, or for every element, in the same order.

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
        self.cut(flat, table)[rows] = values.to(flat)
        states = [view for name, view in self.state_views(table).items() if name != "step"]
        for start, state in zip(self._starts(), states, strict=bool(states)):
            state[rows] = start
        if self.sums is not None:
            dim, gone = self.tables[table].dim, rows + self.first_rows[table]
            self.sums = [part.without(gone) if part.segment.dim == dim else part for part in self.sums]

    @torch.no_grad()
    def copy_from(self, table: int, source: TableGroup, source_table: int) -> None:
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

    def pooled(
        self, ids: Tensor, offsets: Tensor, per_id_weights: Tensor | None = None, *, trains: bool = True
    ) -> Tensor:
        """Pooled lookup of all features, [B, sum of dims]; the backward updates tables or feeds `parameters`.

        Where not `trains` the backward updates nothing; without an optimizer it makes no difference.
        """
        slots, lease = self.store.resolve(ids, offsets, self.step)
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
        self.store.release(lease)
        return out

    def sequence(self, ids: Tensor, offsets: Tensor, *, trains: bool = True) -> Tensor:
        """The row of each id, [N, dim]; all tables of the group have this dim. `trains` as for `pooled`."""
        slots, lease = self.store.resolve(ids, offsets, self.step)
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
        self.store.release(lease)
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

    def table_gradient(
        self, grad: Tensor, slots: Tensor, offsets: Tensor, per_id_weights: Tensor | None, pooling: str
    ) -> Tensor:
        """The gradient of a lookup by its tables, laid out like the flat buffer; arguments as `update`'s."""
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

"""Gradients of rows that wait for a step: each row that batches named once, with the sum of its gradients.

Shapes: ids [U] distinct rows of tables of one dim, ascending, G [U, D] fp32. Rows are counted over all tables of a
group. Order of addition: within a batch that of any update (kernels/transpose.py), and what a row has from one batch
is then added to what it has from those before, one batch after another. Applied, a row's sum is its gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise.kernels import (
    Feature,
    Segment,
    flatten_segments,
    fused_update,
    new_guard,
    pack_features,
    table_rows,
    unique_ids,
)
from shardwise.kernels.features import FIRST_ROW, locate_ids

from .table_layout import TableShape, lay_out

if TYPE_CHECKING:
    from .table_group import TableGroup


@dataclass(frozen=True)
class RowSums:
    """Rows of a segment, told apart by `ids` and lying at `rows` [U], and the sums of their gradients [U, D]."""

    segment: Segment
    ids: Tensor
    rows: Tensor
    gradient: Tensor

    def without(self, ids: Tensor) -> RowSums:
        """The same but for some rows, by their ids."""
        kept = ~torch.isin(self.ids, ids)
        return RowSums(self.segment, self.ids[kept], self.rows[kept], self.gradient[kept])

    def moved(self, segment: Segment, first_ids: Sequence[int], before: Sequence[int], after: Sequence[int]) -> RowSums:
        """The same where the slots of tables begin elsewhere.

        By table: its first id, and its first slot before and after.
        """
        table = torch.bucketize(self.ids, self.ids.new_tensor(sorted(first_ids)[1:]), right=True)
        order = sorted(range(len(first_ids)), key=lambda t: (first_ids[t], before[t], after[t]))
        shift = self.rows.new_tensor([after[t] - before[t] for t in order])
        return RowSums(segment, self.ids, self.rows + shift[table], self.gradient)

    def to(self, device: torch.device) -> RowSums:
        """The same on a device."""
        return RowSums(self.segment, self.ids.to(device), self.rows.to(device), self.gradient.to(device))


def sum_rows(
    group: TableGroup,
    grad: Tensor,
    slots: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    pooling: str,
    ids: Tensor | None = None,
    *,
    frozen: tuple[bool, ...] | None = None,
    clips: bool = True,
) -> list[RowSums]:
    """Sums of row gradients that an update would give to the rule, a `RowSums` a segment; arguments as `update`'s.

    Rows are told apart, and stand in the order of, `ids`: those that a store turned into `slots`, or the slots
    themselves, which are the ids where there is no other store.
    """
    assert group.optimizer is not None
    device, rows, segments = slots.device, _numbers(slots, offsets, group.trained(frozen)), group.segments
    keys = rows
    if ids is not None:
        keys, segments = torch.where(rows >= 0, _numbers(ids, offsets, group.check.features), -1), group.id_segments
    unique = unique_ids(keys)
    ends = [0, *(segment.end_row for segment in segments)]
    # host sync on CUDA, after that of the distinct ids: how many of them each segment has
    cuts = torch.searchsorted(unique.ids, torch.tensor(ends, device="cpu").to(device)).tolist()
    shapes = [
        TableShape("", end - begin, segment.dim) for begin, end, segment in zip(cuts, cuts[1:], segments, strict=False)
    ]
    # the rows of the batch as tables of their own, which the rule "gradient" turns into sums
    bases, firsts, parts, elements = lay_out(shapes)
    sums = torch.zeros(elements, device=device)
    if elements:
        place = unique.inverse - cuts[0]
        if len(segments) > 1:
            first = torch.tensor(firsts, device="cpu").to(device)
            place = place - first[torch.bucketize(place, first[1:], right=True)]
            place = torch.where(keys >= 0, place, -1)
        number_of = {segment.dim: number for number, segment in enumerate(segments)}
        spec = [
            Feature(bases[number_of[dim]], shapes[number_of[dim]].rows, dim, firsts[number_of[dim]], lookup.mean)
            for dim, lookup in zip(group.dims, group.lookups, strict=True)
        ]
        fused_update(
            sums, [], torch.zeros(1, dtype=torch.int64, device=device), grad, place, offsets, per_id_weights,
            pack_features(spec, device), group.dims, flatten_segments(parts), "gradient",
            torch.zeros(1, dtype=torch.float64, device=device), new_guard(device), pooling,
            max_gradient=group.optimizer.max_gradient if clips else None,
        )  # fmt: skip
    where = unique.ids
    if ids is not None:
        # all places of an id have one slot, so it does not matter which is written last
        where = torch.empty_like(unique.ids)
        where[unique.inverse] = rows
    return [
        RowSums(own, unique.ids[begin:end], where[begin:end], table_rows(sums, base, shape.rows, shape.dim))
        for own, begin, end, base, shape in zip(group.segments, cuts, cuts[1:], bases, shapes, strict=False)
    ]


def add_sums(first: RowSums, second: RowSums) -> RowSums:
    """The rows of both; a row of both has the sum of the first plus that of the second."""
    # ids [U1 + U2], of which U are distinct; where each summand's rows go: [U1], [U2]
    unique, split = unique_ids(torch.cat([first.ids, second.ids])), first.ids.shape[0]
    first_at, second_at = unique.inverse[:split], unique.inverse[split:]
    rows, gradient = torch.empty_like(unique.ids), first.gradient.new_zeros(unique.ids.shape[0], first.segment.dim)
    rows[first_at], rows[second_at] = first.rows, second.rows
    gradient[first_at] = first.gradient
    # no row is here twice, so nothing is added in an order that a device chose
    gradient[second_at] += second.gradient
    return RowSums(first.segment, unique.ids, rows, gradient)


def apply_sums(group: TableGroup, sums: Sequence[RowSums]) -> None:
    """One step of the group's optimizer on rows that are told apart by their ids; it is counted once."""
    spec = group.optimizer
    assert spec is not None
    for part in sums:
        segment, device = part.segment, part.rows.device
        # tables without rows, which begin where the next one does, first
        tables = sorted(
            (first_id, shape.rows, first, shape)
            for first_id, first, shape in zip(group.first_ids, group.first_rows, group.tables, strict=True)
            if shape.dim == segment.dim
        )
        last = tables[-1][0] + tables[-1][1]
        begins = torch.tensor([*(first_id for first_id, *_ in tables), last], device="cpu").to(device)
        first_rows = torch.tensor([first for _, _, first, _ in tables], device="cpu").to(device)
        ends = torch.searchsorted(part.ids, begins)
        table = torch.bucketize(part.ids, begins[1:-1], right=True)
        features = [
            Feature(
                segment.base + (first - segment.first_row) * segment.dim, shape.resident, segment.dim, first,
                origin=shape.origin,
            )
            for _, _, first, shape in tables
        ]  # fmt: skip
        fused_update(
            group.flat, group.states, group.step if part is sums[-1] else group.step.clone(), part.gradient,
            part.rows - first_rows[table], ends, None, pack_features(features, device), [segment.dim] * len(tables),
            flatten_segments([segment]), spec.rule, group.hyper, group.check.guard, "sequence", spec.decay, None,
            group.seed, part.ids - begins[table] if group.has_slots else None,
        )  # fmt: skip


def _numbers(ids: Tensor, offsets: Tensor, features: Tensor) -> Tensor:
    """The number [N] of each id's row among those of all tables; -1 for what lies in no table."""
    _, feature, valid = locate_ids(ids, offsets, features)
    return torch.where(valid, ids.long() + features[feature, FIRST_ROW], -1)


class Accumulation:
    """The state that the groups of a collection share: while it `waits`, a backward adds gradients up and writes none.

    Attributes:
        on: every gradient waits.
        begun: some wait; those that come wait too, until the step that applies them.
        is_whole: the last came while `on` was not set: the step is due.
    """

    def __init__(self) -> None:
        self.on = self.begun = self.is_whole = False

    @property
    def waits(self) -> bool:
        """Whether a gradient that comes now waits."""
        return self.on or self.begun

    def begin(self) -> None:
        """A gradient came that waits."""
        self.begun, self.is_whole = True, not self.on

    def end(self) -> None:
        """None waits any more."""
        self.begun = self.is_whole = False


def power_of(gradients: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """The sum of |g|^p of all numbers, fp64 [1]; for p = inf the largest |g|."""
    norms = [torch.linalg.vector_norm(g, norm_type, dtype=torch.float64) for g in gradients if g.numel()]
    if not norms:
        return torch.zeros(1, dtype=torch.float64, device=device)
    norm = torch.stack(norms)
    return add_powers(norm if norm_type == math.inf else norm**norm_type, norm_type)


def add_powers(powers: Tensor, norm_type: float) -> Tensor:
    """The `power_of` all gradients together, fp64 [1], from that of each, fp64 [n]."""
    return powers.amax(0, keepdim=True) if norm_type == math.inf else powers.sum(0, keepdim=True)


def root_of(power: Tensor, norm_type: float) -> Tensor:
    """The norm of what `power_of` gave: 0-dim, fp32."""
    return (power if norm_type == math.inf else power ** (1.0 / norm_type)).float().squeeze(0)

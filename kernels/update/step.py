"""One step of an optimizer's rule on rows, by torch; letters as in update.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ..cpu.update import copy_rows
from ..features import (
    FIRST_ROW,
    ORIGIN,
    ROWS,
    Segment,
    locate_ids,
    table_rows,
)
from ..rule import Rule
from .rounding import round_stochastically, salt_of

# how weight decay enters a step: not at all; g + decay * w; w - lr * decay * w
DECAYS = ("none", "l2", "decoupled")


class SlotIds(NamedTuple):
    """A batch whose indices are slots: the ids [N] that hold them, the slots [N], and bag offsets."""

    ids: Tensor
    indices: Tensor
    offsets: Tensor


class Places:
    """Where rows of W lie in the whole tables that they are of: rows are rounded by that, whatever is around them."""

    def __init__(self, features: Tensor, slots: SlotIds | None) -> None:
        # a table without rows begins where the next one does: the last that begins there is the one with rows
        order = (2 * features[:, FIRST_ROW] + (features[:, ROWS] > 0)).argsort()
        self._first_rows, self._origins = features[order, FIRST_ROW].contiguous(), features[order, ORIGIN]
        self._of_slot: Tensor | None = None
        if slots is not None:
            _, f, valid = locate_ids(slots.indices, slots.offsets, features)
            # host sync on CUDA without Triton
            last = int((features[:, FIRST_ROW] + features[:, ROWS]).max()) if features.shape[0] else 0
            slot = torch.where(valid, slots.indices + features[f, FIRST_ROW], last)
            # all places of an id have one slot, so it does not matter which is written last
            self._of_slot = torch.empty(last + 1, dtype=torch.int64, device=features.device)
            self._of_slot[slot] = slots.ids.long() + features[f, ORIGIN]

    def of_rows(self, rows: Tensor) -> Tensor:
        """`origin_of` each, from their numbers among all rows of W."""
        if self._of_slot is not None:
            return self._of_slot[rows.long()]
        table = (torch.searchsorted(self._first_rows, rows.long(), right=True) - 1).clamp(min=0)
        return rows - self._first_rows[table] + self._origins[table]


class Step:
    """One optimizer step: what it changes, and its numbers, which come to be on the device."""

    def __init__(
        self,
        weights: Tensor,
        states: Sequence[Tensor],
        step: Tensor,
        rule: Rule,
        hyper: Tensor,
        decay: str,
        seed: Tensor | None,
        features: Tensor,
        slots: SlotIds | None = None,
    ) -> None:
        self.weights, self.states, self.rule, self.decay = weights, list(states), rule, DECAYS.index(decay)
        self.numbers = numbers_of(rule, hyper, step, decay)
        self.salt = None if seed is None or weights.dtype == torch.float32 else salt_of(seed, step)
        self.places = None if self.salt is None else Places(features, slots)

    def apply(self, segment: Segment, updates: Iterable[tuple[Tensor, Tensor]]) -> None:
        """The rule by torch, in place, for each of some (rows [U], g [U, D]).

        Rows are distinct rows of the segment, also from one pair to the next; g are their gradients in fp32.
        """
        table = table_rows(self.weights, segment.base, segment.end_row - segment.first_row, segment.dim)
        kept = [_segment_rows(state, segment, kind) for state, kind in zip(self.states, self.rule.kinds, strict=True)]
        *numbers, factor = self.numbers.unbind()
        for rows, g in updates:
            w = table.index_select(0, rows).float()
            if self.decay == 1:
                g = g + factor * w
            elif self.decay == 2:
                w = w - factor * w
            w, *new = self.rule.apply(w, g, [state.index_select(0, rows) for state in kept], numbers)
            for state, value in zip(kept, new, strict=True):
                copy_rows(state, rows, value)
            if self.salt is not None and self.places is not None:
                w = round_stochastically(w, table.dtype, self.places.of_rows(rows + segment.first_row), self.salt)
            copy_rows(table, rows, w.to(table.dtype))


def numbers_of(rule: Rule, hyper: Tensor, step: Tensor, decay: str) -> Tensor:
    """The rule's numbers and the factor of the weight decay, [K + 1] fp32."""
    if decay != "decoupled" and rule.takes_hyper:
        return hyper.float()
    return torch.cat([rule.values(hyper[:-1], step), decay_factor(rule, hyper, decay).float().view(1)])


def decay_factor(rule: Rule, hyper: Tensor, decay: str) -> Tensor:
    """The factor [] fp64 of the weight decay."""
    return hyper[-1] * hyper[list(rule.hyper).index("lr")] if decay == "decoupled" else hyper[-1]


def _segment_rows(flat: Tensor, segment: Segment, kind: str) -> Tensor:
    rows = segment.end_row - segment.first_row
    if kind == "row":
        return flat[segment.first_row : segment.end_row, None]
    return table_rows(flat, segment.base, rows, segment.dim)

"""One step of an optimizer's rule on rows, by torch; letters as in update.py."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..features import (
    FIRST_ROW,
    ORIGIN,
    ROWS,
    Lookup,
    Segment,
    locate_ids,
    table_rows,
)
from ..rule import Rule, Update
from .rounding import round_stochastically, salt_of


class Rounding:
    """How rows of W are rounded: by where they lie in the whole tables that they are of, whatever is around them."""

    def __init__(self, seed: Tensor, step: Tensor, lookup: Lookup) -> None:
        self.salt, features = salt_of(seed, step), lookup.features
        # a table without rows begins where the next one does: the last that begins there is the one with rows
        order = (2 * features[:, FIRST_ROW] + (features[:, ROWS] > 0)).argsort()
        self._first_rows, self._origins = features[order, FIRST_ROW].contiguous(), features[order, ORIGIN]
        self._of_slot: Tensor | None = None
        if lookup.ids is not None:
            _, f, valid = locate_ids(lookup.indices, lookup.offsets, features)
            # host sync on CUDA without Triton
            last = int((features[:, FIRST_ROW] + features[:, ROWS]).max()) if features.shape[0] else 0
            slot = torch.where(valid, lookup.indices + features[f, FIRST_ROW], last)
            # all places of an id have one slot, so it does not matter which is written last
            self._of_slot = torch.empty(last + 1, dtype=torch.int64, device=features.device)
            self._of_slot[slot] = lookup.ids.long() + features[f, ORIGIN]

    def of_rows(self, rows: Tensor) -> Tensor:
        """`origin_of` each, from their numbers among all rows of W."""
        if self._of_slot is not None:
            return self._of_slot[rows.long()]
        table = (torch.searchsorted(self._first_rows, rows.long(), right=True) - 1).clamp(min=0)
        return rows - self._first_rows[table] + self._origins[table]


def apply(
    update: Update,
    segment: Segment,
    numbers: Tensor,
    rounding: Rounding | None,
    updates: Iterable[tuple[Tensor, Tensor]],
) -> None:
    """The rule by torch, in place, for each of some (rows [U], g [U, D]); numbers are those of `numbers_of`.

    Rows are distinct rows of the segment, also from one pair to the next; g are their gradients in fp32.
    """
    table = table_rows(update.weights, segment.base, segment.end_row - segment.first_row, segment.dim)
    kept = [_segment_rows(state, segment, kind) for state, kind in zip(update.states, update.rule.kinds, strict=True)]
    *of_rule, factor = numbers.unbind()
    for rows, g in updates:
        w = table.index_select(0, rows).float()
        if update.decay == "l2":
            g = g + factor * w
        elif update.decay == "decoupled":
            w = w - factor * w
        w, *new = update.rule.apply(w, g, [state.index_select(0, rows) for state in kept], of_rule)
        for state, value in zip(kept, new, strict=True):
            copy_rows(state, rows, value)
        if rounding is not None:
            w = round_stochastically(w, table.dtype, rounding.of_rows(rows + segment.first_row), rounding.salt)
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


def copy_rows(table: Tensor, rows: Tensor, values: Tensor) -> None:
    """table[rows[u]] = values[u], rows distinct: table [R, D], values [U, D] of its dtype."""
    wide, values = torch.complex128, values.contiguous()
    per_wide = wide.itemsize // table.element_size()
    aligned = not (table.data_ptr() | values.data_ptr()) % wide.itemsize
    if not table.is_cuda and aligned and table.is_contiguous() and table.shape[1] % per_wide == 0:
        # an element costs the CPU the same whatever its width
        table, values = table.view(wide), values.view(wide)
    # half the time of index_copy_ on the CPU
    table.index_put_((rows,), values)

"""One step of an optimizer's rule on rows, by torch; letters as in update.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from .cpu_update import copy_rows
from .features import FIRST_ROW, Segment, table_rows
from .rounding import round_stochastically, salt_of
from .rule import Rule

# how weight decay enters a step: not at all; g + decay * w; w - lr * decay * w
DECAYS = ("none", "l2", "decoupled")


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
    ) -> None:
        self.weights, self.states, self.rule, self.decay = weights, list(states), rule, DECAYS.index(decay)
        self.numbers = numbers_of(rule, hyper, step, decay)
        self.salt = None if seed is None or weights.dtype == torch.float32 else salt_of(seed, step)
        # where each table begins: its rows are hashed by their own numbers, whatever tables lie before it
        self.first_rows = features[:, FIRST_ROW].sort().values if self.salt is not None else None

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
            if self.salt is not None:
                w = round_stochastically(w, table.dtype, self.row_in_table(rows + segment.first_row), self.salt)
            copy_rows(table, rows, w.to(table.dtype))

    def row_in_table(self, rows: Tensor) -> Tensor:
        """Numbers of rows within their tables, from their numbers among all rows of W."""
        assert self.first_rows is not None
        table = torch.searchsorted(self.first_rows, rows.long(), right=True) - 1
        return rows - self.first_rows[table.clamp(min=0)]


def numbers_of(rule: Rule, hyper: Tensor, step: Tensor, decay: str) -> Tensor:
    """The rule's numbers and the factor of the weight decay, [K + 1] fp32."""
    factor = hyper[-1:]
    if decay == "decoupled":
        factor = factor * hyper[list(rule.hyper).index("lr")]
    return torch.cat([rule.values(hyper[:-1], step), factor.float()])


def _segment_rows(flat: Tensor, segment: Segment, kind: str) -> Tensor:
    rows = segment.end_row - segment.first_row
    if kind == "row":
        return flat[segment.first_row : segment.end_row, None]
    return table_rows(flat, segment.base, rows, segment.dim)

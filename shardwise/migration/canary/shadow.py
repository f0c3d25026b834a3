"""A canary that answers nothing: ours runs beside FBGEMM on a copy of its tables, and every step is compared.

FBGEMM's output and updates are those of the job. Ours gets the same ids and the same gradient. At the end of a backward
the rows that it touched are compared and copied again, so that each step is compared by itself and differences do not
add up. Gradients of per-sample weights are FBGEMM's alone.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .batch import Batch, Span
from .fbgemm_tables import Run
from .lookup import CanaryLookup, cut
from .report import Difference

# of outputs, rows and states, against the largest number of each; rows of 16 bits are rounded, up or down by chance
TOLERANCES = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class CanaryDifference(RuntimeError):
    """A step of ours was further from FBGEMM's than the canary's tolerance."""


class Beside(torch.autograd.Function):
    """FBGEMM's output as it is; its gradient goes to our lookups too."""

    @staticmethod
    def forward(
        ctx: Any, shadow: ShadowLookup, batch: Batch, dim: int, spans: Sequence[Sequence[Span]], theirs: Tensor,
        *ours: Tensor,
    ) -> Tensor:  # fmt: skip
        ctx.shadow, ctx.batch, ctx.dim, ctx.spans = shadow, batch, dim, spans
        return theirs.view_as(theirs)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        (grad,) = grad_outputs
        shadow: ShadowLookup = ctx.shadow
        # both updates are yet to come; after the last node of this backward they are compared
        shadow.updated.append(ctx.batch)
        torch.autograd.Variable._execution_engine.queue_callback(shadow.compare_updates)
        return None, None, None, None, grad, *cut(grad, ctx.dim, ctx.spans)


class ShadowLookup(CanaryLookup):
    """Tables of one module of FBGEMM's that are looked up and trained by both libraries.

    Args:
        tolerance: the largest difference that is let pass, relative to the largest number; by default by dtype.
        on_difference: "raise" or "warn".
    """

    def __init__(
        self,
        path: str,
        tables: Any,
        numbers: Sequence[int],
        names: Sequence[str],
        *,
        tolerance: float | None,
        on_difference: str,
    ) -> None:
        super().__init__(path, tables, numbers, names, copied=True)
        self.kept = list(range(len(self.dims)))
        dtypes = (self.runs[0].group.flat.dtype, self.runs[0].group.policy.output_dtype)
        self._tolerance = max(TOLERANCES[dtype] for dtype in dtypes) if tolerance is None else tolerance
        self._on_difference = on_difference
        # of steps whose updates are not compared yet
        self.updated: list[Batch] = []
        self._steps = self._updates = self._recopied = 0
        self._worst = {"outputs": 0.0, "weights": 0.0, "states": 0.0}

    def fbgemm_holds(self, table: int) -> bool:
        """It holds them all."""
        return True

    def answer(self, batch: Batch) -> Tensor:
        """What FBGEMM gives for all tables."""
        theirs = self.call_fbgemm(batch.ids, batch, self.kept)
        batch = batch.detached()
        ours, spans, dim = self.look_up(batch), self.spans(batch), self.dim(batch)
        expected = cut(theirs.detach(), dim, spans)
        if self._off(ours, expected) > self._tolerance and self._written_elsewhere(batch):
            ours = self.look_up(batch)
        self._steps += 1
        self._compare("outputs", self._off(ours, expected))
        if not torch.is_grad_enabled():
            return theirs
        return Beside.apply(self, batch, dim, spans, theirs, *ours)  # type: ignore[no-any-return, no-untyped-call]

    def compare_updates(self) -> None:
        """Compare the rows that a backward has updated, and copy FBGEMM's.

        Raises:
            CanaryDifference: they are too far apart, and it is to be raised.
        """
        updated, self.updated = self.updated, []
        if not updated:
            return
        for run in self.runs:
            rows = self._rows_of(run, updated)
            for number, of_table in enumerate(rows):
                (own, theirs), *states = run.pairs(number)
                self._compare("weights", difference(own[of_table], theirs[of_table]))
                off = [difference(own[of_table], theirs[of_table]) for own, theirs in states]
                self._compare("states", max(off, default=0.0))
            run.copy(rows)
        self._updates += len(updated)

    def _rows_of(self, run: Run, batches: Sequence[Batch]) -> list[Tensor]:
        """The rows of each table of a run that batches named."""
        named: list[list[Tensor]] = [[] for _ in run.numbers]
        for batch in batches:
            for feature in run.features:
                ids = batch.ids.indices[batch.bounds[feature] : batch.bounds[feature + 1]]
                named[run.numbers.index(self.tables.feature_table_map[feature])].append(ids.long())
        return [torch.unique(torch.cat(of_table)) for of_table in named]

    def _written_elsewhere(self, batch: Batch) -> bool:
        """Whether rows differ before a lookup though every step's were copied: somebody wrote; then copy all."""
        changed = False
        for run in self.runs:
            rows = self._rows_of(run, [batch])
            if any(
                not torch.equal(own[rows[number]], theirs[rows[number]])
                for number in range(len(run.numbers))
                for own, theirs in run.pairs(number)
            ):
                run.copy()
                changed = True
                self._recopied += len(run.numbers)
        if changed:
            warnings.warn(
                f"{self.path}: rows are others than after the last step: a checkpoint was loaded, or something else"
                " wrote into the tables. The shadow has copied them anew",
                stacklevel=2,
            )
        return changed

    def _off(self, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
        return max(difference(a.detach(), b) for a, b in zip(ours, theirs, strict=True))

    def _compare(self, what: str, off: float) -> None:
        self._worst[what] = max(self._worst[what], off)
        if off <= self._tolerance:
            return
        names = ", ".join(self._names[t] for t in self.numbers)
        message = (
            f"{self.path} (tables {names}): {what} of ours are off by {off:.2e} of the largest of FBGEMM's after"
            f" {self._updates} updates, more than the tolerance {self._tolerance:.0e}"
        )
        if self._on_difference == "raise":
            raise CanaryDifference(f"{message}; on_difference='warn' goes on")
        warnings.warn(message, stacklevel=2)

    def worst(self) -> Difference:
        """The largest differences so far."""
        names = tuple(dict.fromkeys(self._names[t] for t in self.numbers))
        return Difference(self.path, names, self._steps, self._updates, **self._worst, recopied=self._recopied)


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference of two tensors over the largest number of the second; equal NaNs are equal."""
    if not theirs.numel():
        return 0.0
    ours, theirs = ours.double(), theirs.double()
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    # host sync: whether a step raises is decided in it
    off = torch.where(same, 0.0, (ours - theirs).abs()).max().item()
    largest = theirs.abs().nan_to_num(0.0).max().item()
    if off == 0.0:
        return 0.0
    return math.inf if math.isnan(off) or largest == 0.0 else float(off / largest)

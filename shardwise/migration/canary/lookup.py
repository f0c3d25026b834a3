"""The forward of one of FBGEMM's modules of tables while a canary is in it: some tables are ours, the others FBGEMM's.

FBGEMM is called with the whole batch, in which features of our tables have no ids, and what ours give is written into
its output; where all tables are ours it is not called. Gradients go both ways, and each library trains its own rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .batch import Batch, Ids, Sizes, Span
from .fbgemm_tables import Run, bytes_of, count_step, runs_of
from .report import Half, Stopwatch


class Assembled(torch.autograd.Function):
    """Parts of an output put together along `dim`, each into its spans of `written`, or of a new tensor of `shape`."""

    @staticmethod
    def forward(
        ctx: Any,
        shape: Sequence[int],
        dim: int,
        spans: Sequence[Sequence[Span]],
        written: Tensor | None,
        *parts: Tensor,
    ) -> Tensor:
        output = parts[0].new_empty(shape) if written is None else written
        if written is not None:
            ctx.mark_dirty(written)
        for of_part, part in zip(spans, parts, strict=True):
            for (start, end), piece in zip(
                of_part, torch.split(part, [b - a for a, b in of_part], dim=dim), strict=True
            ):
                output.narrow(dim, start, end - start).copy_(piece)
        ctx.spans, ctx.dim, ctx.writes = spans, dim, written is not None
        return output

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Any, ...]:
        (grad,) = grad_outputs
        # FBGEMM has no ids where ours wrote, so that it takes the gradient as it is
        return None, None, None, grad if ctx.writes else None, *cut(grad, ctx.dim, ctx.spans)


def cut(output: Tensor, dim: int, spans: Sequence[Sequence[Span]]) -> list[Tensor]:
    """The parts of an output, or of its gradient."""
    pieces = [[output.narrow(dim, start, end - start) for start, end in of_part] for of_part in spans]
    return [torch.cat(of_part, dim) if len(of_part) != 1 else of_part[0].contiguous() for of_part in pieces]


class CanaryLookup:
    """Tables of one module of FBGEMM's that are ours.

    Args:
        path: where the module is in the model, for messages.
        tables: FBGEMM's module.
        numbers: of the tables of it that are to be ours.
        names: of all its tables.
    """

    def __init__(self, path: str, tables: Any, numbers: Sequence[int], names: Sequence[str], *, copied: bool) -> None:
        self.path, self.tables, self._names = path, tables, list(names)
        self.runs = [Run(tables, run, names, copied=copied) for run in runs_of(tables, numbers)]
        self.numbers = sorted(numbers)
        taken, features = set(numbers), range(len(tables.feature_table_map))
        self.features = [f for f in features if tables.feature_table_map[f] in taken]
        self.kept = [f for f in features if tables.feature_table_map[f] not in taken]
        self.dims = [tables.embedding_specs[t][1] for t in tables.feature_table_map]
        self.pooled = int(tables.pooling_mode) != 2
        device = tables.split_embedding_weights()[0].device
        self.ours, self.theirs = Stopwatch(device), Stopwatch(device)
        self.fbgemm_forward: Callable[..., Tensor] = tables.forward
        # whether somebody else had put a forward of its own there
        self._replaced = tables.__dict__.get("forward")

    def attach(self) -> None:
        """Answer FBGEMM's calls from now on."""
        self.tables.forward = self.forward

    def detach(self) -> None:
        """Have FBGEMM answer them again.

        Raises:
            RuntimeError: somebody else has replaced the forward since.
        """
        if self.tables.__dict__.get("forward") != self.forward:
            raise RuntimeError(f"{self.path}: its forward was replaced after the canary: take that away first")
        del self.tables.forward
        if self._replaced is not None:
            self.tables.forward = self._replaced

    def __getstate__(self) -> dict[str, Any]:
        # of a copied or pickled model: the copy would train the rows of the first
        raise TypeError(f"{self.path}: remove() the canary before the model is copied or pickled")

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        feature_requires_grad: Tensor | None = None,
        batch_size_per_feature_per_rank: Sizes | None = None,
        total_unique_indices: int | None = None,
        hash_zch_identities: Tensor | None = None,
        hash_zch_runtime_meta: Tensor | None = None,
        vbe_output: Tensor | None = None,
        vbe_output_offsets: Tensor | None = None,
    ) -> Tensor:
        """As FBGEMM's.

        Raises:
            ValueError: `feature_requires_grad` or `vbe_output` is given.
        """
        for name, value in (("feature_requires_grad", feature_requires_grad), ("vbe_output", vbe_output)):
            if value is not None:
                raise ValueError(f"{self.path}: a canary does not serve {name}: remove() it, or call without")
        sizes = batch_size_per_feature_per_rank
        # FBGEMM's own conversions and check of ids, which puts others in the place of bad ones
        ids = Ids(*self.tables.prepare_inputs(indices, offsets, per_sample_weights, sizes)[:3])
        return self.answer(Batch(ids, len(self.dims), sizes))

    def answer(self, batch: Batch) -> Tensor:
        """What all tables give, FBGEMM's and ours."""
        theirs = self.call_fbgemm(batch.without(self.features), batch, self.kept) if self.kept else None
        if theirs is None:
            count_step(self.tables)
        ours, spans = self.look_up(batch), self.spans(batch)
        if theirs is not None and not self.pooled:
            # it has rows only of its own ids
            return Assembled.apply(  # type: ignore[no-any-return, no-untyped-call]
                self.shape(batch), 0, [*spans, batch.spans(self.kept, self.dims, pooled=False)], None, *ours, theirs
            )
        if theirs is None and len(ours) == 1:
            return ours[0]
        return Assembled.apply(self.shape(batch), self.dim(batch), spans, theirs, *ours)  # type: ignore[no-any-return, no-untyped-call]

    def call_fbgemm(self, ids: Ids, batch: Batch, features: Sequence[int]) -> Tensor:
        """FBGEMM's forward, timed; `features` have ids."""
        step = self.theirs.begin(batch.count(features))
        with self.theirs.forward(step):
            output = self.fbgemm_forward(*ids, None, batch.sizes)
        self.theirs.watch(step, output)
        return output

    def look_up(self, batch: Batch) -> list[Tensor]:
        """What our tables give, run by run, timed."""
        step, parts = self.ours.begin(batch.count(self.features)), []
        for run in self.runs:
            sizes = None if batch.sizes is None else [batch.sizes[f] for f in run.features]
            with self.ours.forward(step):
                output = run.look_up(batch.pick(run.features), sizes)
            self.ours.watch(step, output)
            parts.append(run.cut(output, sizes))
        return parts

    def spans(self, batch: Batch) -> list[list[Span]]:
        """Where the parts of `look_up` lie in the whole output."""
        return [batch.spans(run.features, self.dims, pooled=self.pooled) for run in self.runs]

    def dim(self, batch: Batch) -> int:
        """Along which the spans lie: columns of features, or what comes one after another."""
        return 1 if self.pooled and batch.sizes is None else 0

    def shape(self, batch: Batch) -> list[int]:
        """Of the whole output."""
        if not self.pooled:
            return [batch.ids.indices.numel(), self.dims[0]]
        if batch.sizes is None:
            return [batch.bags[1], sum(self.dims)]
        return [sum(sum(of_feature) * dim for of_feature, dim in zip(batch.sizes, self.dims, strict=True))]

    def halves(self) -> list[Half]:
        """What was measured of ours and of FBGEMM's."""
        of_fbgemm = [t for t in range(len(self._names)) if self.fbgemm_holds(t)]
        copied = sum(run.copied_bytes for run in self.runs)
        made = [self._half("shardwise", self.numbers, self.ours, copied)]
        return [*made, self._half("FBGEMM", of_fbgemm, self.theirs, 0)] if of_fbgemm else made

    def fbgemm_holds(self, table: int) -> bool:
        """Whether FBGEMM looks a table up."""
        return table not in self.numbers

    def _half(self, library: str, numbers: Sequence[int], watch: Stopwatch, copied: int) -> Half:
        tables, states = bytes_of(self.tables, numbers)
        names = tuple(dict.fromkeys(self._names[t] for t in numbers))
        return Half(
            self.path, library, names, watch.steps, watch.ids_per_step, *watch.medians_us(), tables, states, copied,
            watch.output_bytes,
        )  # fmt: skip

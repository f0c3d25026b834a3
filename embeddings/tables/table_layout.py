"""How tables lie in the flat buffer of a group: what a group is told of them, and where each begins.

Tables of equal dim lie side by side, so that one launch and one sort key serve them all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.kernels import Segment, origin_of, rule_named
from shardwise.kernels.memory import MANY, require_memory

# 64 bytes of fp16: every segment begins on a boundary that serves the widest load
_BOUNDARY = 32


@dataclass(frozen=True)
class TableShape:
    """A table of `rows` x `dim`, of which `slots` rows are on the device at a time (all of them if None).

    It may be a part of a larger one, in which its first element is at row and column `begin`.
    """

    name: str
    rows: int
    dim: int
    slots: int | None = None
    begin: tuple[int, int] = (0, 0)

    @property
    def origin(self) -> int:
        """`begin` as kernels read it."""
        return origin_of(*self.begin)

    @property
    def resident(self) -> int:
        """Rows on the device."""
        return self.rows if self.slots is None else self.slots


@dataclass(frozen=True)
class OptimizerSpec:
    """A fused rule and its settings; tables with equal specs share a flat buffer and an update launch.

    `others` are the rule's hyper-parameters besides lr, by name. Gradients are cut to +-`max_gradient`; rows of fp16
    and bf16 are rounded stochastically, by random numbers of `seed`, the step, and the table's row and column.
    """

    rule: str
    lr: float = 0.01
    others: tuple[tuple[str, float], ...] = ()
    weight_decay: float = 0.0
    decay: str = "none"
    initial_accumulator_value: float = 0.0
    max_gradient: float | None = None
    stochastic_rounding: bool = True
    seed: int = 0

    def hyper(self, device: torch.device) -> Tensor:
        """The rule's H hyper-parameters, lr first, and the weight decay, as kernels read them: [H + 1] fp64."""
        rule, given = rule_named(self.rule), {**dict(self.others), "lr": self.lr}
        numbers = [given.get(name, default) for name, default in rule.hyper.items()]
        return torch.tensor([*numbers, self.weight_decay], dtype=torch.float64, device=device)

    def seed_on(self, device: torch.device, dtype: torch.dtype) -> Tensor | None:
        """The seed [1] int64 where rows of `dtype` are rounded stochastically, else None."""
        rounded = self.stochastic_rounding and dtype in (torch.float16, torch.bfloat16)
        return torch.tensor([self.seed], dtype=torch.int64, device=device) if rounded else None


@dataclass(frozen=True)
class LookupFeature:
    """A feature of a group: which of its tables it looks up, and whether its bags are averaged."""

    name: str
    table: int
    mean: bool = False


def lay_out(tables: Sequence[TableShape]) -> tuple[list[int], list[int], list[Segment], int]:
    """Base element and first row of each table, the segments of equal dim, and the elements of the flat buffer."""
    bases, first_rows = [0] * len(tables), [0] * len(tables)
    segments: list[Segment] = []
    element = row = 0
    for t in sorted(range(len(tables)), key=lambda t: tables[t].dim):
        if not segments or segments[-1].dim != tables[t].dim:
            element = -(-element // _BOUNDARY) * _BOUNDARY
            segments.append(Segment(tables[t].dim, row, row, element))
        bases[t], first_rows[t] = element, row
        element += tables[t].resident * tables[t].dim
        row += tables[t].resident
        segments[-1] = segments[-1]._replace(end_row=row)
    return bases, first_rows, segments, element


def cuts_of(tables: Sequence[TableShape], segments: Sequence[Segment]) -> list[tuple[Segment, list[int], list[int]]]:
    """Each segment, the tables in the order in which they lie there, and the rows of each."""
    members = [[t for t, table in enumerate(tables) if table.dim == segment.dim] for segment in segments]
    return [(segment, ts, [tables[t].resident for t in ts]) for segment, ts in zip(segments, members, strict=True)]


def blank(like: Tensor, shape: Sequence[int]) -> Tensor:
    """NaNs of a shape, all of them one number in memory: reading them is no error, writing is."""
    return like.new_full((), math.nan).expand(tuple(shape))


def require_tables(
    tables: Sequence[TableShape], elements: int, dtype: torch.dtype, device: torch.device, part: str = ""
) -> None:
    """Raise where tables, or a part of them, are larger than the memory of their device.

    Raises:
        MemoryError: on the CPU. torch.OutOfMemoryError: on CUDA.
    """
    if elements > MANY:
        largest = max(tables, key=lambda table: table.resident * table.dim)
        among = f"{len(tables)} tables, the largest of which is " if len(tables) > 1 else ""
        what = f"{part}{among}table {largest.name!r} of {largest.resident} rows x {largest.dim}"
        require_memory(what, (elements,), dtype, device)


# rows of a table, and scales of quantized ones
_ROWS = ("weight", "weight_qscale", "weight_qbias")


def weights_bytes_in_emb_kernel(emb: nn.Module) -> int:
    """Bytes of the rows that a module of tables holds here, scales of quantized rows included, optimizer states not.

    Args:
        emb: a collection, sharded or not, quantized or not, or a module with several; a table that several modules
            share counts once.
    """
    named = chain(emb.named_parameters(), emb.named_buffers())
    rows = [tensor for name, tensor in named if name.rpartition(".")[2] in _ROWS]
    sizes = {(t.untyped_storage().data_ptr(), t.storage_offset()): t.element_size() * t.numel() for t in rows}
    return sum(sizes.values())


class TableBatchedEmbeddingSlice(nn.Parameter):
    """A part of a flat buffer of several tables, as a parameter; its gradient is that part of the buffer's gradient.

    It needs a gradient if the buffer does. What is written into it, or into its gradient, is in the buffer.

    Args:
        data: the buffer.
        start_offset, end_offset: the part.
        num_embeddings, embedding_dim: its shape.

    Raises:
        RuntimeError: the part has not so many elements.

    Example:
        >>> flat = torch.zeros(6, requires_grad=True)
        >>> TableBatchedEmbeddingSlice(flat, 2, 6, 2, 2).shape
        torch.Size([2, 2])
    """

    def __new__(
        cls, data: Tensor, start_offset: int, end_offset: int, num_embeddings: int, embedding_dim: int
    ) -> TableBatchedEmbeddingSlice:
        part = data[start_offset:end_offset].view(num_embeddings, embedding_dim)
        return part.as_subclass(cls)

    def __init__(
        self, data: Tensor, start_offset: int, end_offset: int, num_embeddings: int, embedding_dim: int
    ) -> None:
        super().__init__()
        self._buffer, self._bounds = data, (start_offset, end_offset)
        # a gradient that was given before the buffer has one
        self._given: Tensor | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> TableBatchedEmbeddingSlice:
        if id(self) not in memo:
            buffer = self._buffer.detach().clone().requires_grad_(self._buffer.requires_grad)
            memo[id(self)] = TableBatchedEmbeddingSlice(buffer, *self._bounds, *self.shape)
        copied: TableBatchedEmbeddingSlice = memo[id(self)]
        return copied

    def _part_of_gradient(self) -> Tensor | None:
        whole = self._buffer.grad
        return self._given if whole is None else whole[slice(*self._bounds)].view(self.shape)

    def _set_gradient(self, value: Tensor | None) -> None:
        self._given = value
        if value is None:
            self._buffer.grad = None
        elif self._buffer.grad is not None:
            self._buffer.grad[slice(*self._bounds)] = value.reshape(-1)

    # torch declares them as attributes
    grad: Any = property(_part_of_gradient, _set_gradient, doc="The part of the buffer's gradient.")
    grad_fn: Any = property(lambda self: None, doc="None: to a module it is a parameter.")


def laid_out(cuts: Sequence[tuple[Segment, list[int], list[int]]], weights: Sequence[Tensor]) -> Tensor:
    """The weights where a group's tables lie, as a function of them; `cuts` as `cuts_of`."""
    pieces: list[Tensor] = []
    end = 0
    for segment, tables, _ in cuts:
        if segment.base > end:
            pieces.append(weights[0].new_zeros(segment.base - end))
        pieces += [weights[t].reshape(-1) for t in tables]
        end = segment.base + sum(weights[t].numel() for t in tables)
    return torch.cat(pieces)

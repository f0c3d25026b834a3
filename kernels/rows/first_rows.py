"""Rows that were never needed before, made in their slots: first values of their weights, and what states begin with.

Shapes: parts are what a row has on the device, each contiguous: weights [S, D], then optimizer states [S, w] or [S];
slots, rows [M] int64, fresh [M] bool.
Bytes moved: 17 a row that comes, and the bytes of each one that is fresh once.

Nothing waits for a device: what is not fresh, or lies in no slot of this table, is left out where it is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

from .._op import INTERPRETED, next_power_of_2, register, runs_kernel, tl, triton
from ..persistent_grid import PERSISTENT_PROGRAMS, persistent_programs
from .initial_rows import REST_BITS, first_values, initial_rows, scale_of, table_on

# rows of a tile, and columns of one at most
_ROWS, _COLUMNS = (4, 32) if INTERPRETED else (8, 128)


def make_rows_ref(
    parts: Sequence[Tensor], slots: Tensor, rows: Tensor, fresh: Tensor, first_slot: int, shift: int, seed: int,
    first_column: int, kind: str, low: float, high: float, starts: Sequence[float],
) -> None:  # fmt: skip
    """Of those that are fresh and have a slot here."""
    weights, *states = parts
    own = fresh & (slots >= first_slot) & (slots < first_slot + weights.shape[0])
    to, seeds = slots[own] - first_slot, torch.tensor([seed], dtype=torch.int64, device=rows.device)
    weights[to] = initial_rows(
        rows[own] + shift, seeds, first_column, weights.shape[1], kind, low, high, weights.dtype
    )  # fmt: skip
    for state, start in zip(states, starts, strict=True):
        state[to] = start


@triton.jit(
    do_not_specialize=[
        "M", "S", "first_slot", "shift", "seed", "first_column", "first", "step", "least", "most", "programs"
    ],
    do_not_specialize_on_alignment=["slots", "rows", "fresh"],
)  # fmt: skip
def _make_rows_kernel(  # type: ignore[no-untyped-def]
    parts,
    slots,
    rows,
    fresh,
    table,
    starts,
    M,
    S,
    first_slot,
    shift,
    seed,
    first_column,
    first,
    step,
    least,
    most,
    programs,
    NORMAL: tl.constexpr,
    REST: tl.constexpr,
    WIDTHS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    for begin in range(tl.program_id(0) * BLOCK_M, M, programs * BLOCK_M):
        m = begin + tl.arange(0, BLOCK_M)
        slot = tl.load(slots + m, mask=m < M, other=-1) - first_slot
        live = (slot >= 0) & (slot < S) & (tl.load(fresh + m, mask=m < M, other=0) != 0)
        # once all rows of a table were needed there are none
        if tl.max(live.to(tl.int32), 0) > 0:
            row = tl.load(rows + m, mask=live, other=0) + shift
            for i in tl.static_range(len(WIDTHS)):
                for at in range(0, WIDTHS[i], BLOCK_D):
                    d = at + tl.arange(0, BLOCK_D)
                    place = (slot * WIDTHS[i])[:, None] + d[None, :]
                    inside = live[:, None] & (d < WIDTHS[i])[None, :]
                    if i == 0:
                        y = first_values(
                            row, tl.cast(seed, tl.int64), first_column + d, table, first, step, least, most, NORMAL,
                            REST, parts[i].dtype.element_ty == tl.bfloat16,
                        )  # fmt: skip
                    else:
                        y = tl.zeros((BLOCK_M, BLOCK_D), tl.float32) + starts[i]
                    tl.store(parts[i] + place, y.to(parts[i].dtype.element_ty), mask=inside)


def make_rows(
    parts: Sequence[Tensor], slots: Tensor, rows: Tensor, fresh: Tensor, first_slot: int, shift: int, seed: int,
    first_column: int, kind: str, low: float, high: float, starts: Sequence[float],
) -> None:  # fmt: skip
    """Have `fresh` rows [M] begin in their slots [M], which count over several tables: this one's begin at first_slot.

    Weights are `initial_rows` of the rows' numbers plus `shift`, from `first_column` on, and of `seed`, `kind`, `low`
    and `high`; states begin with `starts`, one each. A negative slot, and one of another table, is left out.
    """
    torch.ops.shardwise.make_rows(
        list(parts), slots, rows, fresh, first_slot, shift, seed, first_column, kind, low, high, list(starts)
    )


def _make_rows(
    parts: Sequence[Tensor], slots: Tensor, rows: Tensor, fresh: Tensor, first_slot: int, shift: int, seed: int,
    first_column: int, kind: str, low: float, high: float, starts: Sequence[float],
) -> None:  # fmt: skip
    weights, count = parts[0], slots.shape[0]
    if not runs_kernel(weights):
        make_rows_ref(parts, slots, rows, fresh, first_slot, shift, seed, first_column, kind, low, high, starts)
        return
    if not count or not weights.numel():
        return
    widths = tuple(prod(part.shape[1:]) for part in parts)
    block_d = min(_COLUMNS, next_power_of_2(max(widths)))
    programs = min(triton.cdiv(count, _ROWS), PERSISTENT_PROGRAMS or persistent_programs(weights.device))
    _make_rows_kernel[(programs,)](
        tuple(parts), slots.contiguous(), rows.contiguous(), fresh.contiguous().view(torch.uint8),
        table_on(weights.device), (0.0, *starts), count, weights.shape[0], first_slot, shift,
        seed, first_column, *scale_of(kind, low, high, weights.dtype), programs, kind == "normal", REST_BITS, widths,
        _ROWS, block_d, enable_fp_fusion=False,
    )  # fmt: skip


register(
    "make_rows(Tensor(a!)[] parts, Tensor slots, Tensor rows, Tensor fresh, SymInt first_slot, SymInt shift, int seed,"
    " SymInt first_column, str kind, float low, float high, float[] starts) -> ()",
    _make_rows,
    lambda parts, *rest: None,
)

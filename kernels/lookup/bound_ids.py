"""Ids put inside their tables, in place: what lies outside becomes 0, and how many did.

Shapes: ids [N] of T tables, begins [T + 1] the first id of each and the end; rows [T] of the tables.
Bytes moved: each id once, and those outside a second time; begins and rows stay in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .._op import INTERPRETED, register, runs_kernel, tl, triton
from ..features import segment_of_position

_BLOCK = 64 if INTERPRETED else 128


def bound_ids_ref(ids: Tensor, rows: Tensor, begins: Tensor, correct: bool) -> Tensor:
    """How many ids [N] are outside their tables, [1] int64: neither -1 nor below its rows; with `correct` they are 0.

    Ids before the first begin are in no table, those past the last one in the last.
    """
    place = torch.arange(ids.shape[0], device=ids.device, dtype=begins.dtype)
    table = torch.searchsorted(begins.contiguous(), place, right=True) - 1
    most = rows[table.clamp(0, rows.shape[0] - 1)]
    outside = ((ids < -1) | (ids >= most)) & (table >= 0)
    if correct:
        ids.masked_fill_(outside, 0)
    return outside.sum().view(1)


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=["I", "O"])
def _bound_ids_kernel(  # type: ignore[no-untyped-def]
    I,
    R,
    O,
    C,
    N,
    T,
    steps,
    CORRECT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    here = i < N
    id = tl.load(I + i, mask=here, other=-1).to(tl.int64)
    t = segment_of_position(O, i, T, steps)
    here &= tl.load(O + t, mask=here, other=0) <= i
    outside = here & ((id < -1) | (id >= tl.load(R + t, mask=here, other=0)))
    tl.store(C + tl.program_id(0), tl.sum(outside.to(tl.int32), 0))
    if CORRECT:
        tl.store(I + i, tl.zeros((BLOCK,), I.dtype.element_ty), mask=outside)


def _bound_ids(ids: Tensor, rows: Tensor, begins: Tensor, correct: bool) -> Tensor:
    if not runs_kernel(ids):
        return bound_ids_ref(ids, rows, begins, correct)
    n, tables = ids.shape[0], rows.shape[0]
    if not n:
        return torch.zeros(1, dtype=torch.int64, device=ids.device)
    # ids that lie apart are corrected in a copy
    given, blocks = ids.contiguous(), triton.cdiv(n, _BLOCK)
    counts = torch.empty(blocks, dtype=torch.int32, device=ids.device)
    _bound_ids_kernel[(blocks,)](
        given, rows.contiguous(), begins.contiguous(), counts, n, tables, tables.bit_length() + 1, correct, _BLOCK
    )
    if correct and given is not ids:
        ids.copy_(given)
    return counts.sum(0, keepdim=True)


register(
    "bound_ids(Tensor(a!) ids, Tensor rows, Tensor begins, bool correct) -> Tensor",
    _bound_ids,
    lambda ids, rows, begins, correct: ids.new_empty(1, dtype=torch.int64),
)

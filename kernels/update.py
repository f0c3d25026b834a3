"""Backward of a lookup fused with the optimizer: a pooled lookup over the transposed index, the update as epilogue.

Shapes: W flat tables, S1/S2 optimizer states (flat like W, or one number per row), G upstream gradient ([B, sum of
dims] pooled, [N, D] sequence), I, O, P, FT as in pooled.py; hyper [4] fp32 = lr, eps, beta1, beta2 on the device, so
that a captured graph follows a schedule. Duplicate ids are added first and applied once.
Bytes moved: N * D * 4 (gradient rows) + 2 * U * D * itemsize(W) (+ states) for U touched rows, about 96 N for the sort.

Formulas: SGD; Adagrad (Duchi et al. 2011); rowwise Adagrad, one accumulator of mean(g^2) a row (Mudigere et al. 2022,
arXiv:2104.05158); Adam (Kingma and Ba 2015) on the touched rows only, bias corrections by the table group's step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ._op import PERSISTENT_PROGRAMS, next_power_of_2, register, runs_kernel, tl, triton
from .bounds import OK, new_guard
from .features import (
    COLUMN,
    FIRST_ROW,
    MEAN,
    ROWS,
    Segment,
    batch_size,
    column_offsets,
    row_alignment,
    table_rows,
    unflatten_segments,
)
from .pooled import bag_sums
from .transpose import CHUNK, Chunks, Transposed, chunks_of, levels_for, position_in_run, transpose_index

# rule -> number in the kernel. "gradient" writes the row sums instead of applying them.
RULES = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 2, "adam": 3, "gradient": 4}
# optimizer states of each rule: "element" is laid out like W, "row" holds one fp32 a row
STATES: dict[str, tuple[str, ...]] = {
    "sgd": (),
    "adagrad": ("element",),
    "rowwise_adagrad": ("row",),
    "adam": ("element", "element"),
    "gradient": (),
}
# Rows that the CPU path sums and updates at a time: 1 MB of gradients
_CPU_BLOCK_ELEMENTS = 1 << 18


def fused_update_ref(
    weights: Tensor,
    state1: Tensor | None,
    state2: Tensor | None,
    step: Tensor,
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    dims: Sequence[int],
    segments: Sequence[int],
    rule: str,
    hyper: Tensor,
    guard: Tensor,
    pooling: str,
) -> None:
    """Add every gradient row into a dense fp32 buffer, then apply the rule to the rows that some id named."""
    if guard.tolist() != [OK, OK]:
        return
    step += 1
    batch, columns = batch_size(offsets, len(dims)), column_offsets(dims)
    for segment in unflatten_segments(segments):
        dense = torch.zeros(segment.end_row - segment.first_row, segment.dim, device=grad.device)
        touched = torch.zeros(len(dense), dtype=torch.bool, device=grad.device)
        for f, (first_row, rows) in enumerate(features[:, [FIRST_ROW, ROWS]].tolist()):
            if not segment.first_row <= first_row < segment.end_row or dims[f] != segment.dim:
                continue
            for b in range(batch):
                begin, end = offsets[f * batch + b : f * batch + b + 2].tolist()
                for i in range(begin, end):
                    row = int(indices[i])
                    if not 0 <= row < rows:
                        continue
                    g = grad[i] if pooling == "sequence" else grad[b, columns[f] : columns[f + 1]]
                    g = g.float() * (per_id_weights[i].float() if per_id_weights is not None else 1)
                    dense[first_row - segment.first_row + row] += g / ((end - begin) if features[f, MEAN] else 1)
                    touched[first_row - segment.first_row + row] = True
        rows_hit = torch.nonzero(touched).squeeze(1)
        apply_rule(weights, state1, state2, step, segment, rows_hit, dense[rows_hit], rule, hyper)


def apply_rule(
    weights: Tensor,
    state1: Tensor | None,
    state2: Tensor | None,
    step: Tensor,
    segment: Segment,
    rows: Tensor,
    g: Tensor,
    rule: str,
    hyper: Tensor,
) -> None:
    """Apply one optimizer step in place: rows [U] distinct rows of the segment, g [U, D] fp32 their gradients."""
    lr, eps, beta1, beta2 = hyper.unbind()
    kinds = STATES[rule]
    table = _segment_rows(weights, segment, "element")
    s1 = _segment_rows(state1, segment, kinds[0]) if state1 is not None and kinds else None
    s2 = _segment_rows(state2, segment, kinds[1]) if state2 is not None and len(kinds) > 1 else None
    w = table.index_select(0, rows).float()
    if rule == "sgd":
        w -= lr * g
    elif rule == "adagrad":
        assert s1 is not None
        total = s1.index_select(0, rows) + g * g
        s1.index_copy_(0, rows, total)
        w -= lr * g / (total.sqrt() + eps)
    elif rule == "rowwise_adagrad":
        assert s1 is not None
        total = s1.index_select(0, rows) + (g * g).mean(1)
        s1.index_copy_(0, rows, total)
        w -= (lr / (total.sqrt() + eps))[:, None] * g
    elif rule == "adam":
        assert s1 is not None and s2 is not None
        bias1, bias2 = _bias_corrections(hyper, step).unbind()
        m = beta1 * s1.index_select(0, rows) + (1 - beta1) * g
        v = beta2 * s2.index_select(0, rows) + (1 - beta2) * (g * g)
        s1.index_copy_(0, rows, m)
        s2.index_copy_(0, rows, v)
        w -= lr * (m / bias1) / ((v / bias2).sqrt() + eps)
    else:
        w = g
    table.index_copy_(0, rows, w.to(table.dtype))


def _segment_rows(flat: Tensor, segment: Segment, kind: str) -> Tensor:
    rows = segment.end_row - segment.first_row
    if kind == "row":
        return flat[segment.first_row : segment.end_row]
    return table_rows(flat, segment.base, rows, segment.dim)


def _bias_corrections(hyper: Tensor, step: Tensor) -> Tensor:
    """[1 - beta1^step, 1 - beta2^step] in fp32, on the device."""
    return (1 - hyper[2:4].double() ** step).float()


@triton.jit
def _gradient_rows(grad, src, scale, at, d, live, in_row, ALIGN: tl.constexpr, HAS_SCALE: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    begin = tl.load(src + at, mask=live, other=0).to(tl.int64) * ALIGN
    row = tl.load(grad + begin[:, None] + d[None, :], mask=live[:, None] & in_row[None, :], other=0.0).to(tl.float32)
    if HAS_SCALE:
        row = row * tl.load(scale + at, mask=live, other=0.0)[:, None]
    return row


@triton.jit(do_not_specialize=["low"])
def _update_kernel(W, S1, S2, partial, start, row_of, slot_of, n_chunks, src, scale, grad, hyper, bias, guard, low, D, NONE: tl.constexpr, RULE: tl.constexpr, HAS_SCALE: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_D: tl.constexpr, ALIGN: tl.constexpr, SRC_ALIGN: tl.constexpr):  # type: ignore[no-untyped-def]  # fmt: skip  # noqa: E501
    # a bad batch changes no row: it has no chunks
    clean = (tl.load(guard) == NONE) & (tl.load(guard + 1) == NONE)
    n = tl.where(clean, tl.load(n_chunks), 0).to(tl.int32)
    lr = tl.load(hyper)
    eps = tl.load(hyper + 1)
    # the compiler takes this as the multiple it is; it ignores tl.multiple_of on an argument, and D = 1 is no tensor
    D = D // ALIGN * ALIGN
    d = tl.arange(0, BLOCK_D)
    in_row = d < D
    for c0 in range(tl.program_id(0) * BLOCK_C, n, tl.num_programs(0) * BLOCK_C):
        c = c0 + tl.arange(0, BLOCK_C)
        live = c < n
        begin = tl.load(start + c, mask=live, other=0)
        length = (tl.load(start + c + 1, mask=live, other=0) - begin).to(tl.int32)
        g = tl.zeros((BLOCK_C, BLOCK_D), tl.float32)
        for i in range(0, tl.max(length, 0), 4):
            g0 = _gradient_rows(grad, src, scale, begin + i, d, i < length, in_row, SRC_ALIGN, HAS_SCALE)
            g1 = _gradient_rows(grad, src, scale, begin + i + 1, d, i + 1 < length, in_row, SRC_ALIGN, HAS_SCALE)
            g2 = _gradient_rows(grad, src, scale, begin + i + 2, d, i + 2 < length, in_row, SRC_ALIGN, HAS_SCALE)
            g3 = _gradient_rows(grad, src, scale, begin + i + 3, d, i + 3 < length, in_row, SRC_ALIGN, HAS_SCALE)
            g = (((g + g0) + g1) + g2) + g3
        slot = tl.load(slot_of + c, mask=live, other=-1)
        whole = live & (slot < 0)
        row = tl.load(row_of + c, mask=live, other=0).to(tl.int64)
        at = (((row - low) * D)[:, None]) + d[None, :]
        mask = whole[:, None] & in_row[None, :]
        w = g if RULE == 4 else tl.load(W + at, mask=mask, other=0.0).to(tl.float32)
        if RULE == 0:
            w -= lr * g
        if RULE == 1:
            total = tl.load(S1 + at, mask=mask, other=0.0) + g * g
            tl.store(S1 + at, total, mask=mask)
            w -= lr * g / (tl.sqrt_rn(total) + eps)
        if RULE == 2:
            # the order inside tl.sum follows the tile, and the tile follows D alone
            total = tl.load(S1 + row, mask=whole, other=0.0) + tl.sum(g * g, 1) / D
            tl.store(S1 + row, total, mask=whole)
            w -= (lr / (tl.sqrt_rn(total) + eps))[:, None] * g
        if RULE == 3:
            beta1 = tl.load(hyper + 2)
            beta2 = tl.load(hyper + 3)
            m = beta1 * tl.load(S1 + at, mask=mask, other=0.0) + (1 - beta1) * g
            v = beta2 * tl.load(S2 + at, mask=mask, other=0.0) + (1 - beta2) * (g * g)
            tl.store(S1 + at, m, mask=mask)
            tl.store(S2 + at, v, mask=mask)
            w -= lr * (m / tl.load(bias)) / (tl.sqrt_rn(v / tl.load(bias + 1)) + eps)
        tl.store(W + at, w.to(W.dtype.element_ty), mask=mask)
        left = (live & (slot >= 0))[:, None] & in_row[None, :]
        tl.store(partial + (slot.to(tl.int64) * D)[:, None] + d[None, :], g, mask=left)


def fused_update(
    weights: Tensor,
    state1: Tensor | None,
    state2: Tensor | None,
    step: Tensor,
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    dims: Sequence[int],
    segments: Sequence[int],
    rule: str,
    hyper: Tensor,
    guard: Tensor,
    pooling: str,
) -> None:
    """One optimizer step on the rows that a batch touched, in place, given the gradient of the lookup's output.

    Shapes: weights and element states flat 1-D, row states [rows of all segments] fp32, step [1] int64 (advanced),
    grad [N, dim] where `pooling` is "sequence", else [B, sum(dims)]: "sum" where all features are summed, "mean" where
    some are averaged; hyper [4] fp32 (lr, eps, beta1, beta2); guard [2] int64: where it reports a bad batch nothing is
    written.

    Raises:
        ValueError: the rule is unknown, or its states are missing.
    """
    if rule not in RULES:
        raise ValueError(f"unknown optimizer rule {rule!r}: expected one of {', '.join(RULES)}")
    given = sum(state is not None for state in (state1, state2))
    if given != len(STATES[rule]):
        raise ValueError(f"optimizer rule {rule!r} has {len(STATES[rule])} states, got {given}")
    torch.ops.shardwise.fused_update(
        weights, state1, state2, step, grad, indices, offsets, per_id_weights, features, list(dims), list(segments),
        rule, hyper, guard, pooling,
    )  # fmt: skip


def _fused_update(
    weights: Tensor,
    state1: Tensor | None,
    state2: Tensor | None,
    step: Tensor,
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    dims: list[int],
    segments: list[int],
    rule: str,
    hyper: Tensor,
    guard: Tensor,
    pooling: str,
) -> None:
    if rule != "gradient":
        step += (guard == OK).all().to(step.dtype)
    if indices.shape[0] == 0 or not segments or grad.shape[0] == 0:
        return
    # kernels read the guard themselves; the torch path may wait for it
    if not runs_kernel(weights) and guard.tolist() != [OK, OK]:
        return
    grad = grad.contiguous()
    batch, columns, parts = batch_size(offsets, len(dims)), column_offsets(dims), unflatten_segments(segments)
    index = transpose_index(indices, offsets, features, parts)
    pooled = pooling != "sequence"
    scale = _scale_of_ids(index, offsets, per_id_weights, features, batch, pooling)
    for segment in parts:
        states = [_states_of(state, segment, kind) for state, kind in zip((state1, state2), STATES[rule], strict=False)]
        if runs_kernel(weights):
            source = _source_elements(index, features, batch, columns[-1]) if pooled else index.position * segment.dim
            align = _source_alignment(grad, dims, segment.dim) if pooled else row_alignment(segment.dim, 4)
            _launch(weights, states, step, grad, index.keys, source, align, scale, segment, rule, hyper, guard)
        else:
            for rows, g in _row_gradients(index, grad.float(), scale, segment, dims, batch, pooled):
                apply_rule(weights, state1, state2, step, segment, rows, g, rule, hyper)


def _states_of(state: Tensor | None, segment: Segment, kind: str) -> Tensor:
    assert state is not None
    return state if kind == "row" else state[segment.base :]


def _scale_of_ids(
    index: Transposed, offsets: Tensor, per_id_weights: Tensor | None, features: Tensor, batch: int, pooling: str
) -> Tensor | None:
    """Factor of each id's gradient row, in row order: its weight, over its bag's length where bags are averaged."""
    scale = None if per_id_weights is None else per_id_weights[index.position].float()
    if pooling != "mean":
        return scale
    averaged = features[index.bag // batch, MEAN]
    lengths = torch.where(averaged != 0, offsets.diff()[index.bag], 1).clamp(min=1)
    return 1 / lengths.float() if scale is None else scale / lengths


def _source_elements(index: Transposed, features: Tensor, batch: int, columns: int) -> Tensor:
    """First element of each id's gradient row in G [B, columns], in row order."""
    return (index.bag % batch) * columns + features[index.bag // batch, COLUMN]


def _source_alignment(grad: Tensor, dims: Sequence[int], dim: int) -> int:
    """Elements to which the gradient rows of features of this dim are aligned, other dims beside them."""
    columns = column_offsets(dims)
    starts = [columns[f] for f, other in enumerate(dims) if other == dim and columns[f]]
    return min(row_alignment(n, 4) for n in (dim, columns[-1], *starts))


def update_tile(dim: int) -> tuple[int, int, int]:
    """Chunks, columns and warps of an update program: a function of the row's width alone, never tuned.

    The sum over a row's columns (rowwise rules) adds in the order of this tile, so the tile is part of the contract.
    """
    block_d = next_power_of_2(dim)
    # 32 chunks of 4 to 16 columns crash the compiler of triton 3.7.1 (for gfx942, sm_80, sm_90)
    chunks = max(1, min(16, 512 // block_d))
    elements = chunks * block_d
    return chunks, block_d, max(1, min(4, elements // 128)) if elements <= 1024 else min(16, elements // 256)


def _launch(
    weights: Tensor,
    states: list[Tensor],
    step: Tensor,
    grad: Tensor,
    keys: Tensor,
    source: Tensor,
    source_align: int,
    scale: Tensor | None,
    segment: Segment,
    rule: str,
    hyper: Tensor,
    guard: Tensor,
) -> None:
    dim = segment.dim
    align = row_alignment(dim, 4)
    block_c, block_d, warps = update_tile(dim)
    table = weights[segment.base :]
    s1 = states[0] if states else table
    s2 = states[1] if len(states) > 1 else table
    bias = _bias_corrections(hyper, step) if rule == "adam" else hyper
    if grad.data_ptr() % 16:
        source_align = 1
    for _ in range(levels_for(keys.shape[0])):
        chunks: Chunks = chunks_of(keys, segment.first_row, segment.end_row)
        partial = torch.empty(chunks.next_keys.shape[0], dim, device=grad.device)
        grid = (min(triton.cdiv(keys.shape[0], block_c), PERSISTENT_PROGRAMS),)
        _update_kernel[grid](
            table, s1, s2, partial, chunks.start, chunks.row, chunks.slot, chunks.total, source // source_align,
            scale if scale is not None else hyper, grad, hyper, bias, guard, segment.first_row, dim,
            OK, RULES[rule], scale is not None, block_c, block_d, align, source_align, num_warps=warps,
        )  # fmt: skip
        keys, grad, scale, source_align = chunks.next_keys, partial, None, align
        source = torch.arange(keys.shape[0], device=keys.device) * dim


def _row_gradients(
    index: Transposed,
    grad: Tensor,
    scale: Tensor | None,
    segment: Segment,
    dims: Sequence[int],
    batch: int,
    pooled: bool,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Distinct rows of the segment [u] and their summed gradients [u, dim], added in the contract's order.

    They come in blocks that fit a core's cache, so that the update finds them there.
    """
    low, high = torch.searchsorted(index.keys, index.keys.new_tensor([segment.first_row, segment.end_row])).tolist()
    keys = index.keys[low:high].long() - segment.first_row
    scale = None if scale is None else scale[low:high]
    if pooled:
        matrix, source = _gradient_matrix(index.bag[low:high], grad, segment.dim, dims, batch)
    else:
        matrix, source = grad, index.position[low:high]
    block = max(1, _CPU_BLOCK_ELEMENTS // segment.dim)
    while keys.shape[0]:
        head = (position_in_run(keys)[1] % CHUNK == 0).nonzero().squeeze(1)
        bounds = torch.cat([head, head.new_tensor([keys.shape[0]])])
        keys = keys[head]
        same_as_last = torch.zeros(keys.shape[0] + 1, dtype=torch.bool, device=keys.device)
        same_as_last[1:-1] = keys[1:] == keys[:-1]
        long = same_as_last[:-1] | same_as_last[1:]
        partial = []
        sums = matrix[:0]
        for first in range(0, keys.shape[0], block):
            cuts, inner = bounds[first : first + block + 1], long[first : first + block]
            ids = slice(int(cuts[0]), int(cuts[-1]))
            sums = bag_sums(matrix, source[ids], cuts - cuts[0], None if scale is None else scale[ids])
            if bool(inner.any()):
                partial.append(sums[inner])
                yield keys[first : first + block][~inner], sums[~inner]
            else:
                yield keys[first : first + block], sums
        keys, scale = keys[long], None
        matrix, source = torch.cat([*partial, sums[:0]]), torch.arange(keys.shape[0], device=keys.device)


def _gradient_matrix(bag: Tensor, grad: Tensor, dim: int, dims: Sequence[int], batch: int) -> tuple[Tensor, Tensor]:
    """G as rows of this dim, and the row of each bag: a view where all features have this dim."""
    f, b = bag // batch, bag % batch
    if all(other == dim for other in dims):
        return grad.reshape(-1, dim), b * len(dims) + f
    columns = column_offsets(dims)
    mine = [j for j, other in enumerate(dims) if other == dim]
    number = f.new_zeros(len(dims))
    number[mine] = torch.arange(len(mine), device=f.device)
    return torch.cat([grad[:, columns[j] : columns[j] + dim] for j in mine]), number[f] * batch + b


def lookup_gradient(
    weights: Tensor,
    grad: Tensor,
    indices: Tensor,
    offsets: Tensor,
    per_id_weights: Tensor | None,
    features: Tensor,
    dims: list[int],
    segments: list[int],
    pooling: str,
) -> Tensor:
    """Dense gradient of the flat tables, for those who bring their own optimizer: zeros where no id points."""
    dense = torch.zeros_like(weights)
    nothing = torch.zeros(4, device=weights.device)
    _fused_update(
        dense, None, None, torch.zeros(1, dtype=torch.int64, device=weights.device), grad, indices, offsets,
        per_id_weights, features, dims, segments, "gradient", nothing, new_guard(weights.device), pooling,
    )  # fmt: skip
    return dense


register(
    "fused_update(Tensor(a!) weights, Tensor(b!)? state1, Tensor(c!)? state2, Tensor(d!) step, Tensor grad,"
    " Tensor indices, Tensor offsets, Tensor? per_id_weights, Tensor features, int[] dims, int[] segments, str rule,"
    " Tensor hyper, Tensor guard, str pooling) -> ()",
    _fused_update,
    lambda *args: None,
)
register(
    "lookup_gradient(Tensor weights, Tensor grad, Tensor indices, Tensor offsets, Tensor? per_id_weights,"
    " Tensor features, int[] dims, int[] segments, str pooling) -> Tensor",
    lookup_gradient,
    lambda weights, *args: torch.empty_like(weights),
)

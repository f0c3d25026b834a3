"""Backward of a lookup fused with the optimizer: a pooled lookup over the transposed index, the rule as epilogue.

Shapes: W flat tables, S optimizer states (flat like W, or one number a row), G upstream gradient ([B, sum of dims]
pooled, [N, D] sequence), I, O, P, FT as in lookup/pooled.py; hyper [H + 1] fp64 on the device: the rule's
hyper-parameters and the weight decay, so that a captured graph follows a schedule. Duplicate ids are added first and
applied once. Bytes moved: N * D * 4 (gradient rows) + 2 * U * D * itemsize(W) (+ states) for U touched rows, about 96 N
for the sort, and 2 * D * 4 for each partial sum of a row that more than 32 ids hit: one for every 32 of them, and of
those again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import configs
from .._op import (
    INTERPRETED,
    direct,
    launch_options,
    next_power_of_2,
    register,
    register_autograd,
    runs_kernel,
    triton,
)
from ..cpu import update as cpu_update
from ..cpu.update import row_gradients, transpose_index_cpu
from ..features import (
    FIRST_ROW,
    MEAN,
    ROWS,
    Lookup,
    Segment,
    batch_size,
    column_offsets,
    row_alignment,
    same_length,
    unflatten_segments,
)
from ..launch_plans import source_alignment
from ..lookup.bounds import OK, is_clean, new_guard
from ..persistent_grid import persistent_programs, resident_programs
from ..rule import (
    DECAYS,
    Rule,
    Update,
    rule_named,
)
from ..transpose import CHUNK, Transposed, transpose_index
from .kernel import _update_kernel
from .rounding import rounds
from .row_chunks import HASH, ROW, SLOT, SOURCE, RowChunks, row_chunks
from .row_keys import count_step
from .step import (
    Rounding,
    apply,
    decay_factor,
    numbers_of,
)

# registers of a thread at most, where its 4 elements are of one row, so that 8 programs of 4 warps fit, or of several
# rows, each of them with addresses of its own; and where it has more elements
REGISTERS, ROWS_REGISTERS, WIDE_REGISTERS = 64, 112, 128
# as many programs fit with these: for rules without states, whose loads ptxas parts otherwise (triton 3.9.0), and for
# tables off 16 bytes, of whose rows it spills two words otherwise (triton 3.6.0 and 3.9.0)
FEWER_REGISTERS = 60


def fused_update_ref(
    weights: Tensor,
    states: Sequence[Tensor],
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
    decay: str = "none",
    max_gradient: float | None = None,
    seed: Tensor | None = None,
    ids: Tensor | None = None,
) -> None:
    """Add every gradient row into a dense fp32 buffer, then apply the rule to the rows that some id named."""
    if not is_clean(guard):
        return
    step += 1
    batch, columns = batch_size(offsets, len(dims)), column_offsets(dims)
    update = Update(weights, states, step, guard, rule_named(rule), hyper, decay, seed)
    lookup = Lookup(indices, offsets, per_id_weights, features, unflatten_segments(segments), pooling, dims, ids)
    numbers = numbers_of(update.rule, hyper, step, decay)
    rounding = None if seed is None or weights.dtype == torch.float32 else Rounding(seed, step, lookup)
    grad = grad.float() if max_gradient is None else grad.float().clamp(-max_gradient, max_gradient)
    for segment in lookup.segments:
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
                    g = g * (per_id_weights[i].float() if per_id_weights is not None else 1)
                    dense[first_row - segment.first_row + row] += g / ((end - begin) if features[f, MEAN] else 1)
                    touched[first_row - segment.first_row + row] = True
        rows_hit = torch.nonzero(touched).squeeze(1)
        apply(update, segment, numbers, rounding, [(rows_hit, dense[rows_hit])])


def fused_update(
    weights: Tensor,
    states: Sequence[Tensor],
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
    decay: str = "none",
    max_gradient: float | None = None,
    seed: Tensor | None = None,
    ids: Tensor | None = None,
    index: Sequence[Tensor] | None = None,
) -> None:
    """One optimizer step on the rows that a batch touched, in place, given the gradient of the lookup's output.

    Shapes: weights and element states flat 1-D, row states [rows of all segments] fp32, step [1] int64 (advanced),
    grad [N, dim] where `pooling` is "sequence", else [B, sum(dims)]: "sum" where all features are summed, "mean" where
    some are averaged; hyper [H + 1] fp64: the hyper-parameters in the order of the rule, then the weight decay, which
    `decay` adds to the gradient ("l2"), takes from the row ("decoupled") or ignores ("none"). Elements of `grad` are
    cut to +-`max_gradient`, before weights and averages scale them; with `seed` [1] int64 rows of fp16 and bf16 are
    rounded stochastically, by their places in the whole tables (`Feature.origin`), for which `ids` [N] are needed where
    `indices` are slots of a store. guard [3] int64: where it reports a bad batch nothing is written. `index` is what
    `update_index` made of the same batch before, if it was asked.

    Raises:
        ValueError: the rule or the decay is unknown, or states or hyper-parameters are missing.
    """
    chosen = rule_named(rule)
    if len(states) != len(chosen.states):
        raise ValueError(f"optimizer rule {rule!r} has {len(chosen.states)} states, got {len(states)}")
    if hyper.shape != (len(chosen.hyper) + 1,) or hyper.dtype != torch.float64:
        raise ValueError(
            f"optimizer rule {rule!r} takes {list(chosen.hyper)} and the weight decay as fp64, got {hyper.dtype}"
            f" {list(hyper.shape)}"
        )
    if decay not in DECAYS:
        raise ValueError(f"unknown weight decay {decay!r}: expected one of {', '.join(DECAYS)}")
    past = direct(weights, *states, step, grad, indices, offsets, per_id_weights, features, hyper, guard, seed, ids)
    update = _fused_update if past else torch.ops.shardwise.fused_update
    update(
        weights, list(states), step, grad, indices, offsets, per_id_weights, features, list(dims), list(segments),
        rule, hyper, guard, pooling, decay, max_gradient, seed, ids, list(index) if index else None,
    )  # fmt: skip


def _fused_update(
    weights: Tensor,
    states: list[Tensor],
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
    decay: str,
    max_gradient: float | None,
    seed: Tensor | None,
    ids: Tensor | None = None,
    index: list[Tensor] | None = None,
) -> None:
    same_length(per_id_weights, indices)
    update = Update(weights, states, step, guard, rule_named(rule), hyper, decay, seed)
    lookup = Lookup(indices, offsets, per_id_weights, features, unflatten_segments(segments), pooling, dims, ids)
    if runs_kernel(weights):
        _launch_update(update, lookup, grad, max_gradient, index)
        return
    if not is_clean(guard):
        return
    step += 1
    if indices.shape[0] == 0 or not segments or grad.shape[0] == 0:
        return
    grad = grad.contiguous() if max_gradient is None else _cut(grad, max_gradient)
    numbers = numbers_of(update.rule, hyper, step, decay)
    if cpu_update.update(update, numbers, grad, lookup):
        return
    transpose = transpose_index if weights.is_cuda else transpose_index_cpu
    by_row = transpose(indices, offsets, features, lookup.segments)
    rounding = None if seed is None or weights.dtype == torch.float32 else Rounding(seed, step, lookup)
    batch = batch_size(offsets, len(dims))
    scale = _scale_of_ids(by_row, lookup, batch)
    for segment in lookup.segments:
        sums = row_gradients(by_row, grad.float(), scale, segment, lookup, batch)
        apply(update, segment, numbers, rounding, sums)


def _cut(grad: Tensor, most: float | None) -> Tensor:
    # as fp32, in which a bound of any size is itself: a gradient of fp16 or bf16 would be cut to its neighbour
    return (grad if most is None else grad.float().clamp(-most, most)).contiguous()


def _scale_of_ids(index: Transposed, lookup: Lookup, batch: int) -> Tensor | None:
    """Factor of each id's gradient row, in row order: its weight, over its bag's length where bags are averaged."""
    scale = None if lookup.per_id_weights is None else lookup.per_id_weights[index.position].float()
    if lookup.pooling != "mean":
        return scale
    averaged = lookup.features[index.bag // batch, MEAN]
    lengths = torch.where(averaged != 0, lookup.offsets.diff()[index.bag], 1).clamp(min=1)
    return 1 / lengths.float() if scale is None else scale / lengths


def _source_alignment(grad: Tensor, dims: Sequence[int], dim: int) -> int:
    """Elements to which the gradient rows of features of this dim are aligned, other dims beside them.

    At most 4 of any dtype: threads that held 8 would add up the columns of a row in another order.
    """
    return 1 if grad.data_ptr() % 16 else source_alignment(tuple(dims), dim)


def update_tile(dim: int, scale: int = 1) -> tuple[int, int, int]:
    """Chunks, columns and warps of an update program; `scale` up to 4 times the chunks and the warps where it can.

    The sum over a row's columns (rowwise rules) adds in the order in which threads hold them. That order is part of the
    contract: it follows the columns for each warp, a function of the row's width alone. So chunks and warps are tuned
    together, never one of them, and not where more warps would share a row's columns.
    """
    block_d = next_power_of_2(dim)
    # 32 chunks of 1 to 64 columns crash the compiler of triton 3.7.1 (for gfx942, sm_80, sm_90)
    chunks = max(1, min(16, 512 // block_d))
    elements = chunks * block_d
    # 16 warps on 4096 columns make ptxas spill
    warps = max(1, min(4, elements // 128)) if elements <= 1024 else min(16, max(8, elements // 512))
    fits = block_d <= 32 * row_alignment(dim, 4) * warps
    scale = min(scale, 16 // chunks) if fits else 1
    return chunks * scale, block_d, warps * scale


def _is_wide(chunks: int, columns: int, warps: int) -> bool:
    """Whether a thread has more than 4 elements: W and states beside four gradient rows would not fit its registers."""
    return chunks * columns > 128 * warps


def _registers(chunks: int, columns: int, warps: int, align: int, fewer: bool) -> int:
    """Registers of a thread at most: for what it has of a row, of four gradient rows, of their sum and of states.

    Without a bound a compiler keeps more in registers than pays, and fewer programs fit a multiprocessor.
    """
    if _is_wide(chunks, columns, warps):
        return WIDE_REGISTERS
    # that share a row
    threads = columns // min(align, columns)
    if chunks * threads > 32 * warps:
        return ROWS_REGISTERS
    return FEWER_REGISTERS if fewer else REGISTERS


def _launch_update(
    update: Update, lookup: Lookup, grad: Tensor, max_gradient: float | None, index: list[Tensor] | None
) -> None:
    seed = None if update.weights.dtype == torch.float32 else update.seed
    if not grad.shape[0] or not lookup.segments:
        # a batch without a gradient is a step on no row
        lookup = lookup._replace(indices=lookup.indices[:0])
    if index and lookup.indices.shape[0]:
        count_step(update.guard, update.step)
        chunks = RowChunks.of_tensors(index)
    else:
        chunks = row_chunks(lookup, grad.shape[1], update.guard, update.step, hashed=seed is not None)
    if lookup.indices.shape[0] == 0:
        return
    grad = _cut(grad, max_gradient)
    numbers = _kernel_numbers(update.rule, update.hyper, update.step, update.decay)
    for segment in lookup.segments:
        _launch_segment(segment, update._replace(seed=seed), numbers, grad, chunks, lookup)


def _kernel_numbers(rule: Rule, hyper: Tensor, step: Tensor, decay: str) -> Tensor:
    """`numbers_of` in fp64: the kernel rounds them."""
    if rule.takes_hyper and decay != "decoupled":
        return hyper
    return torch.stack([*rule.exact_values(hyper[:-1], step), decay_factor(rule, hyper, decay)])


def _launch_segment(
    segment: Segment, update: Update, numbers: Tensor, grad: Tensor, row_chunks: RowChunks, lookup: Lookup
) -> None:
    weights, states, step, guard, rule, _, decay, seed = update
    dims = lookup.dims if lookup.pooling != "sequence" else [segment.dim]
    alone = len(lookup.segments) == 1
    dim, scale = segment.dim, row_chunks.scale
    align, source_align = row_alignment(dim, 4), _source_alignment(grad, dims, dim)
    table = weights[segment.base :]
    heuristic = update_tile(dim)
    usual = persistent_programs(table.device)
    block_c, block_d, warps, most = configs.update_tile(rule.name, heuristic, usual, table.dtype, align, table.device)
    given = tuple(
        state if kind == "row" else state[segment.base :] for state, kind in zip(states, rule.kinds, strict=True)
    )
    fewer = not rule.kinds or table.data_ptr() % 16 != 0
    registers = configs.setting("update.registers", _registers(block_c, block_d, warps, align, fewer))
    if waves := configs.setting("update.waves", 0):
        most = waves * resident_programs(table.device, warps, registers)
    options, wide = launch_options(warps, registers), _is_wide(block_c, block_d, warps)
    ways = (
        configs.setting("update.next_entries", False),
        # of PTX
        configs.setting("update.prefetch", False) and not INTERPRETED and not torch.version.hip,
        configs.setting("update.contiguous", False),
    )
    for number, level in enumerate(row_chunks.levels):
        partial = torch.empty(level.slots, dim, dtype=torch.float32, device=grad.device)
        programs = min(triton.cdiv(level.capacity, block_c), most)
        _update_kernel[(programs,)](
            table, given, partial, level.chunks, row_chunks.totals[number:], row_chunks.source,
            numbers if scale is None else scale, grad, numbers, step if seed is None else seed, step, guard,
            segment.first_row, segment.end_row,
            level.chunks.shape[1], level.capacity.bit_length(), programs, dim,
            OK, rule.in_triton, rule.kinds, numbers.shape[0], rule.takes_row, DECAYS.index(decay),
            rounds(table.dtype, seed), scale is not None and number == 0, number > 0, alone,
            CHUNK, ROW, SLOT, HASH, SOURCE,
            block_c, block_d, align, source_align if number == 0 else align, dim == block_d,
            number == 0 and not wide, *ways, **options,
        )  # fmt: skip
        grad = partial


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
    """Dense gradient of the flat tables, for those who bring their own optimizer: zeros where no id points.

    Shapes as in `fused_update`: weights and what it returns 1-D, grad [B, sum(dims)] or of a sequence [N, dim], indices
    and per_id_weights [N], offsets [F*B + 1], features [F, 8].
    """
    dense = torch.zeros_like(weights)
    nothing = torch.zeros(1, dtype=torch.float64, device=weights.device)
    _fused_update(
        dense, [], torch.zeros(1, dtype=torch.int64, device=weights.device), grad, indices, offsets, per_id_weights,
        features, dims, segments, "gradient", nothing, new_guard(weights.device), pooling, "none", None, None,
    )  # fmt: skip
    return dense


register(
    "fused_update(Tensor(a!) weights, Tensor(b!)[] states, Tensor(c!) step, Tensor grad, Tensor indices,"
    " Tensor offsets, Tensor? per_id_weights, Tensor features, int[] dims, int[] segments, str rule, Tensor hyper,"
    " Tensor guard, str pooling, str decay, float? max_gradient, Tensor? seed, Tensor? ids=None,"
    " Tensor[]? index=None) -> ()",
    _fused_update,
    lambda *args: None,
)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *tensors, ctx.dims, ctx.segments, ctx.pooling = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, upstream: Tensor) -> tuple[Any, ...]:
    grad, indices, offsets, per_id_weights, features = ctx.saved_tensors
    by_grad = by_p = None
    # linear in the gradient and in the per-id weights: `upstream` [flat] is looked up like a table
    where, upstream = (indices, offsets), upstream.contiguous()
    layout = (features, ctx.dims, ctx.segments)
    if ctx.needs_input_grad[1] and ctx.pooling == "sequence":
        by_grad = torch.ops.shardwise.sequence_lookup(
            upstream, *where, features, grad.shape[1], ctx.segments, grad.dtype
        )
    elif ctx.needs_input_grad[1]:
        by_grad = torch.ops.shardwise.pooled_lookup(upstream, *where, per_id_weights, *layout, ctx.pooling, grad.dtype)
    if per_id_weights is not None and ctx.needs_input_grad[4]:
        by_p = torch.ops.shardwise.per_id_weight_gradient(grad, upstream, *where, *layout, ctx.pooling)
        by_p = by_p.to(per_id_weights.dtype)
    return None, by_grad, None, None, by_p, *[None] * 4


register_autograd(
    register(
        "lookup_gradient(Tensor weights, Tensor grad, Tensor indices, Tensor offsets, Tensor? per_id_weights,"
        " Tensor features, int[] dims, int[] segments, str pooling) -> Tensor",
        lookup_gradient,
        lambda weights, *args: torch.empty_like(weights),
    ),
    _backward,
    _setup_context,
)

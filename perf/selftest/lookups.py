"""Checks of lookups, of updates by every rule, of what looks at ids and gradients, and of quantized rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels import (
    ROW_FORMATS,
    RULES,
    Feature,
    check_gradient,
    check_ids,
    dequantize_pooled,
    dequantize_rows,
    fused_update,
    is_clean,
    new_guard,
    pack_features,
    pooled_lookup,
    quantize_pooled,
    quantize_rows,
    quantized_pooled_lookup,
    quantized_sequence_lookup,
    sequence_lookup,
    update_index,
)
from shardwise.kernels.lookup import bounds, finite, pooled, sequence
from shardwise.kernels.quantized import pooled_lookup as quantized_pooled, rows, sequence_lookup as quantized_sequence
from shardwise.kernels.row_formats import TABLE_BOUNDARY, dequantize_rows_ref
from shardwise.kernels.update import update
from shardwise.kernels.update.rules import BUILT_IN

from .check import Check, check, on
from .flat_tables import Batch
from .tolerances import AVERAGED, DOT, RULE, SAME

# tables of several dims, rows on 16 bytes and not, features summed and averaged
MIXED = Batch(((11, 8), (6, 3), (1, 16), (9, 8), (5, 20)), tuple((t, t % 2 == 1) for t in range(5)), bags=4)
WIDE = Batch()
HALVES = (torch.float16, torch.bfloat16)
HYPER = {
    "lr": 0.1, "eps": 1e-6, "beta1": 0.9, "beta2": 0.99, "momentum": 0.5, "nesterov": 0.0, "weight_decay": 0.125,
    "eta": 0.25, "l1": 0.01, "l2": 0.5, "beta": 1.0,
}  # fmt: skip


def checks() -> Iterator[Check]:
    """Lookups first, then updates, then the checks before them, then quantized rows."""
    yield from _lookups()
    yield from _updates()
    yield from _guards()
    yield from _quantized()


def _lookups() -> Iterator[Check]:
    family, ops = "pooled lookup", "pooled_lookup"
    for words, batch in {
        "fp32, 5 tables": MIXED,
        "fp32, D=128": WIDE,
        **{f"{str(dtype)[6:]}, D=128": replace(WIDE, dtype=dtype) for dtype in HALVES},
    }.items():
        leaves = (0,) if batch.dtype == torch.float32 else ()
        yield check(
            family, words, f"{ops} lookup_gradient" if leaves else ops, partial(_pooled, batch, pooled_lookup),
            partial(_pooled, batch, None), partial(_pooled_inputs, batch), leaves=leaves,
            tolerance=AVERAGED if leaves and batch is MIXED else SAME,
        )  # fmt: skip
    weighted = replace(WIDE, weighted=True)
    yield check(
        family, "per-id weights and their gradient", f"{ops} lookup_gradient per_id_weight_gradient",
        partial(_pooled, weighted, pooled_lookup), partial(_pooled, weighted, None), partial(_pooled_inputs, weighted),
        leaves=(0, 3), tolerance=DOT,
    )  # fmt: skip
    for words, batch in {"fp32, D=20": replace(WIDE, tables=((9, 20), (7, 20))), "fp32, D=128": WIDE}.items():
        yield check(
            "sequence lookup", words, "sequence_lookup lookup_gradient", partial(_sequence, batch, sequence_lookup),
            partial(_sequence, batch, None), partial(_pooled_inputs, batch), leaves=(0,),
        )  # fmt: skip


def _pooled_inputs(batch: Batch) -> Sequence[Any]:
    ids, offsets, weights = batch.bag_ids()
    # between tables lies what no lookup may read
    tables = batch.weights().nan_to_num(0.0)
    return tables, ids, offsets, weights, batch.table_features


def _pooled(
    batch: Batch, op: Any, weights: Tensor, ids: Tensor, offsets: Tensor, per_id: Tensor | None, features: Tensor
) -> Tensor:
    where = (weights, ids, offsets, per_id, features, batch.dims)
    return op(*where, batch.segments, batch.pooling) if op else pooled.pooled_lookup_ref(*where)


def _sequence(
    batch: Batch, op: Any, weights: Tensor, ids: Tensor, offsets: Tensor, per_id: Tensor | None, features: Tensor
) -> Tensor:
    where = (weights, ids, offsets, features, batch.dims[0])
    return op(*where, batch.segments) if op else sequence.sequence_lookup_ref(*where)


def _updates() -> Iterator[Check]:
    small = Batch(((9, 20), (4, 20)), ((0, False), (1, False)), bags=6)
    # most ids are of two rows: their gradients are added up in chunks, and these again
    hot = Batch(((40, 8), (9, 8)), ((0, False), (1, False)), bags=110, lengths=(8, 14), hot=0.9)
    for rule in BUILT_IN:
        yield _update("fused update", f"{rule}, D=20", small, rule)
    for rule, words, batch in (
        ("rowwise_adagrad", "averaged bags", MIXED),
        ("rowwise_adagrad", "hot rows", hot),
        ("rowwise_adagrad", "float16, stochastic rounding", replace(small, dtype=torch.float16)),
        ("sgd", "per-id weights", replace(small, weighted=True)),
    ):
        yield _update("fused update", f"{rule}, {words}", batch, rule)
    yield _update("index of an update", "adam, made before the gradient", small, "adam", "update_index fused_update")


def _update(family: str, name: str, batch: Batch, rule: str, ops: str = "fused_update") -> Check:
    def run(device: torch.device) -> Sequence[Any]:
        given = [on(device, value) for value in _update_inputs(batch, rule)]
        more: dict[str, Any] = {}
        if "update_index" in ops:
            ids, offsets, per_id, features, dims, segments = given[4:10]
            of_batch = (ids, offsets, per_id, features, dims, segments, batch.pooling)
            more["index"] = update_index(*of_batch, hashed=batch.dtype != torch.float32)
        fused_update(*given, **more)
        return [given[0].cpu(), *(state.cpu() for state in given[1]), given[2].cpu()]

    def reference() -> Sequence[Any]:
        given = _update_inputs(batch, rule)
        update.fused_update_ref(*given)
        return [given[0], *given[1], given[2]]

    return Check(
        family, name, tuple(ops.split()), run, reference, AVERAGED if batch.pooling == "mean" else RULE
    )  # fmt: skip


def _update_inputs(batch: Batch, rule: str) -> tuple[Any, ...]:
    """The third step of a rule, whose states are not what they begin with."""
    weights, generator = batch.weights(), batch.random(4)
    kinds = RULES[rule].kinds
    states = [torch.rand(batch.rows if kind == "row" else len(weights), generator=generator) for kind in kinds]
    numbers = [HYPER.get(name, default) for name, default in RULES[rule].hyper.items()] + [0.125]
    ids, offsets, per_id = batch.bag_ids()
    seed = None if batch.dtype == torch.float32 else torch.full((1,), 7, dtype=torch.int64)
    return (
        weights, states, torch.full((1,), 2, dtype=torch.int64), batch.gradient(), ids, offsets, per_id,
        batch.table_features, batch.dims, batch.segments, rule, torch.tensor(numbers, dtype=torch.float64),
        new_guard(), batch.pooling, "none", None, seed,
    )  # fmt: skip


def _guards() -> Iterator[Check]:
    names = [f"f{f}" for f in range(len(MIXED.features))]
    for words, bad in (("no fault", False), ("an id beyond its table", True)):
        yield check(
            "checks of ids", words, "check_ids", partial(_checked, names), partial(_checked, None),
            partial(_id_inputs, bad),
        )  # fmt: skip
    for words, bad in (("finite", False), ("with a NaN", True)):
        yield check(
            "checks of gradients", words, "check_gradient", partial(_finite, check_gradient),
            partial(_finite, None), partial(_gradient_inputs, bad),
        )  # fmt: skip


def _id_inputs(bad: bool) -> Sequence[Any]:
    ids, offsets, _ = MIXED.bag_ids()
    if bad:
        ids[5] = 10**6
    return ids, offsets, MIXED.table_features, new_guard()


def _checked(names: Sequence[str] | None, ids: Tensor, offsets: Tensor, features: Tensor, guard: Tensor) -> bool:
    """Whether the ids are good. On a CPU bad ones raise at once, on a GPU the guard remembers them."""
    if names is None:
        bounds.check_ids_ref(ids, offsets, features, guard)
    else:
        try:
            check_ids(ids, offsets, features, guard, names=names)
        except IndexError:
            return False
    return is_clean(guard)


def _gradient_inputs(bad: bool) -> Sequence[Any]:
    grad = torch.ones(9000)
    if bad:
        grad[[4098, 8999]] = float("nan")
    return grad, new_guard()


def _finite(op: Any, grad: Tensor, guard: Tensor) -> Tensor:
    (op or finite.check_gradient_ref)(grad, guard)
    return guard


def _quantized() -> Iterator[Check]:
    for format, kind in ROW_FORMATS.items():
        # rows without scales are cast by torch
        if kind.parts:
            yield check(
                "quantized rows", f"{format} there and back", "quantize_rows dequantize_rows",
                partial(_there_and_back, format, quantize_rows, dequantize_rows),
                partial(_there_and_back, format, rows.quantize_rows_ref, dequantize_rows_ref), _some_rows,
            )  # fmt: skip
        yield check(
            "quantized pooled lookup", format, "quantized_pooled_lookup",
            partial(_quantized_pooled, format, quantized_pooled_lookup),
            partial(_quantized_pooled, format, quantized_pooled.quantized_pooled_lookup_ref),
            partial(_quantized_inputs, format),
        )  # fmt: skip
        yield check(
            "quantized sequence lookup", format, "quantized_sequence_lookup",
            partial(_quantized_sequence, format, quantized_sequence_lookup),
            partial(_quantized_sequence, format, quantized_sequence.quantized_sequence_lookup_ref),
            partial(_quantized_inputs, format),
        )  # fmt: skip
    yield check(
        "quantized rows", "pooled rows sent between ranks", "quantize_rows dequantize_rows",
        lambda sent: dequantize_pooled(quantize_pooled(sent, [20, 4]), [20, 4]), _sent, lambda: [_some_rows()[0]],
    )  # fmt: skip


def _sent(sent: Tensor) -> Tensor:
    kind = ROW_FORMATS["int8"].scale_dtypes[-1]
    parts = torch.split_with_sizes(sent, [20, 4], 1)
    return torch.cat(
        [dequantize_rows_ref(*rows.quantize_rows_ref(part, "int8", kind), part.shape[1], "int8") for part in parts], 1
    )


def _some_rows() -> Sequence[Any]:
    drawn = torch.randn(11, 24, generator=torch.Generator().manual_seed(0))
    # a row of one value, and one of zeros
    drawn[3], drawn[4] = 0.75, 0.0
    return [drawn]


def _there_and_back(format: str, to: Any, back: Any, drawn: Tensor) -> Sequence[Tensor]:
    payload, scales = to(drawn, format, ROW_FORMATS[format].scale_dtype)
    return payload, scales, back(payload, scales, drawn.shape[1], format)


def _quantized_inputs(format: str) -> Sequence[Any]:
    """Payload, scales, ids, offsets and features of two tables of 20 columns."""
    drawn = torch.randn(14, 20, generator=torch.Generator().manual_seed(0))
    payload, scales = rows.quantize_rows_ref(drawn, format, ROW_FORMATS[format].scale_dtype)
    sizes, parts, base = (9, 5), [], [0]
    for part in torch.split_with_sizes(payload, sizes):
        parts.append(torch.nn.functional.pad(part.flatten(), (0, -part.numel() % 64), value=255))
        base.append(base[-1] + len(parts[-1]))
    listed = [Feature(base[0], 9, 20, 0, False), Feature(base[1], 5, 20, 9, True)]
    batch = Batch(((9, 20), (5, 20)), ((0, False), (1, True)), bags=4)
    ids, offsets, _ = batch.bag_ids()
    return torch.cat(parts), scales.flatten(), ids, offsets, pack_features(listed, boundary=TABLE_BOUNDARY)


def _quantized_pooled(
    format: str, op: Any, payload: Tensor, scales: Tensor, ids: Tensor, offsets: Tensor, features: Tensor
) -> Tensor:
    return op(payload, scales, ids, offsets, None, features, [20, 20], format)  # type: ignore[no-any-return]


def _quantized_sequence(
    format: str, op: Any, payload: Tensor, scales: Tensor, ids: Tensor, offsets: Tensor, features: Tensor
) -> Tensor:
    return op(payload, scales, ids, offsets, features, 20, format)  # type: ignore[no-any-return]

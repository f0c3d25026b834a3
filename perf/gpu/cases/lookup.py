"""Cases of the lookups of float tables, of their gradient for per-id weights, and of the checks before them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from shardwise.kernels import (
    check_gradient,
    check_ids,
    new_guard,
    per_id_weight_gradient,
    pooled_lookup,
    raise_from_guard,
    sequence_lookup,
)
from shardwise.kernels.lookup import bounds
from shardwise.kernels.lookup.bounds import check_ids_ref
from shardwise.kernels.lookup.pooled import pooled_lookup_ref
from shardwise.kernels.lookup.sequence import sequence_lookup_ref
from shardwise.kernels.lookup.weight_gradient import per_id_weight_gradient_ref
from shardwise.perf.selftest.flat_tables import Batch
from shardwise.perf.selftest.tolerances import DOT, SAME, WEIGHTED

from .case import Case, name_of

# tables of several classes of dim, rows on 16 bytes and not, features summed and averaged
MIXED = Batch(((11, 8), (6, 3), (1, 16), (9, 8), (5, 20)), tuple((t, t % 2 == 1) for t in range(5)), bags=4)
POOLED, SEQUENCE = ("lookup.pooled.pooled_lookup",), ("lookup.sequence.resolve", "lookup.sequence.gather")


def cases() -> Iterator[Case]:
    """Every dtype and class of dim, bags that are empty, long or one, and ids of each dtype."""
    yield from (
        *_pooled(),
        *_sequences(),
        *_weight_gradients(),
        *_checks(),
    )  # fmt: skip


def _one_table(dim: int, **changes: Any) -> Batch:
    return replace(Batch(((7, dim),), ((0, False),), bags=4), **changes)


def _pooled() -> Iterator[Case]:
    halves = (torch.float16, torch.bfloat16)
    listed = {
        "D=128, sum and mean": Batch(features=((0, False), (1, True))),
        "fp16 D=128": Batch(dtype=torch.float16, bags=9),
        "mixed dims weighted": replace(MIXED, weighted=True),
        **{f"D={dim}": _one_table(dim) for dim in (1, 2, 3, 4, 5, 20, 64, 256)},
        "D=1023": Batch(((3, 1023),), ((0, True),), bags=3),
        "D=4096": Batch(((2, 4096),), ((0, False),), bags=2, lengths=(0, 3)),
        **{f"{name_of(dtype)} mixed dims": replace(MIXED, dtype=dtype) for dtype in halves},
        **{f"{name_of(dtype)} D=128 into its own": Batch(dtype=dtype, output=dtype) for dtype in halves},
        **{f"fp32 D=128 into {name_of(dtype)}": Batch(output=dtype) for dtype in halves},
        "D=128 weighted mean": Batch(features=((0, True), (1, True)), weighted=True),
        "fp16 D=20 weighted": _one_table(20, dtype=torch.float16, weighted=True),
        "one row, one id": Batch(((1, 8),), ((0, False),), bags=1, lengths=(1, 1)),
        "empty bags": _one_table(8, bags=9, lengths=(0, 1)),
        "no ids": _one_table(8, bags=3, lengths=(0, 0)),
        "long bags": _one_table(64, bags=3, lengths=(30, 70)),
        "int32 ids": _one_table(128, ids=torch.int32),
        "int32 offsets": replace(MIXED, offsets=torch.int32),
        "int32 ids and offsets weighted": _one_table(64, ids=torch.int32, offsets=torch.int32, weighted=True),
        "last row": Batch(((50, 8), (20, 8)), ((0, False), (1, True)), last=True),
        "shifted D=128": _one_table(128, shifted=True),
        "shifted fp16 D=64": _one_table(64, shifted=True, dtype=torch.float16),
        "shared table": Batch(((9, 8), (4, 8)), ((0, False), (1, True), (0, True), (0, False))),
        "many bags": _one_table(4, bags=300, lengths=(0, 3)),
    }
    yield from (
        Case(
            f"pooled lookup, {words}", POOLED, partial(_look_up, batch, pooled_lookup),
            WEIGHTED if batch.weighted else SAME, quick=number < 3,
            reference=partial(_look_up, batch, None),
        )
        for number, (words, batch) in enumerate(listed.items())
    )  # fmt: skip


def _look_up(batch: Batch, op: Any) -> Sequence[Any]:
    ids, offsets, weights = batch.bag_ids()
    where = (batch.weights(), ids, offsets, weights, batch.table_features, batch.dims)
    if op is None:
        return [pooled_lookup_ref(*where, batch.output)]
    return [op(*where, batch.segments, batch.pooling, batch.output)]


def _sequences() -> Iterator[Case]:
    listed = {
        "D=20": _one_table(20),
        "fp16 D=128": Batch(dtype=torch.float16, output=torch.float16),
        **{f"D={dim}": _one_table(dim) for dim in (1, 3, 4, 64, 128, 1023)},
        "bf16 D=6 into fp32": _one_table(6, dtype=torch.bfloat16),
        "fp32 D=128 into bf16": _one_table(128, output=torch.bfloat16),
        "int32 ids": _one_table(64, ids=torch.int32),
        "int32 offsets": Batch(offsets=torch.int32),
        "shifted D=128": _one_table(128, shifted=True),
        "last row": _one_table(8, last=True),
        "many ids": Batch(((40, 4), (30, 4)), bags=200),
        "one id": _one_table(8, bags=1, lengths=(1, 1)),
    }
    yield from (
        Case(
            f"sequence lookup, {words}", SEQUENCE, partial(_sequence, batch, sequence_lookup), SAME, quick=number < 2,
            reference=partial(_sequence, batch, None),
        )
        for number, (words, batch) in enumerate(listed.items())
    )  # fmt: skip


def _sequence(batch: Batch, op: Any) -> Sequence[Any]:
    ids, offsets, _ = batch.bag_ids()
    where = (batch.weights(), ids, offsets, batch.table_features, batch.dims[0])
    if op is None:
        return [sequence_lookup_ref(*where, batch.output)]
    return [op(*where, batch.segments, batch.output)]


def _weight_gradients() -> Iterator[Case]:
    listed = {
        "mixed dims": MIXED,
        **{f"D={dim}": _one_table(dim) for dim in (1, 4, 20, 64, 128, 1023)},
        **{f"{name_of(dtype)} D=128": Batch(dtype=dtype, output=dtype) for dtype in (torch.float16, torch.bfloat16)},
        "int32 ids and offsets, mean": replace(
            Batch(features=((0, True), (1, True))), ids=torch.int32, offsets=torch.int32
        ),
        "shifted D=128": _one_table(128, shifted=True),
        "long bags": _one_table(64, bags=3, lengths=(30, 50)),
    }
    yield from (
        Case(
            f"gradient of per-id weights, {words}", ("lookup.weight_gradient.weight_gradient",),
            partial(_weight_gradient, batch, per_id_weight_gradient), DOT, quick=number < 1,
            reference=partial(_weight_gradient, batch, None),
        )
        for number, (words, batch) in enumerate(listed.items())
    )  # fmt: skip


def _weight_gradient(batch: Batch, op: Any) -> Sequence[Any]:
    ids, offsets, _ = batch.bag_ids()
    where = (batch.gradient(), batch.weights(), ids, offsets, batch.table_features, batch.dims)
    if op is None:
        return [per_id_weight_gradient_ref(*where)]
    return [op(*where, batch.segments, batch.pooling)]


def _checks() -> Iterator[Case]:
    usual, narrow = MIXED, replace(MIXED, ids=torch.int32, offsets=torch.int32)
    long = Batch(((40, 4), (30, 4)), bags=700)
    # what is wrong: a position and an id there, or a place in the offsets and by how much it is off
    yield from (
        *(
            Case(
                f"check of ids, {words}", ("lookup.bounds.check_ids",),
                partial(_check, batch, bad_id, bad_offset, **options),
                SAME, quick=words in ("no fault", "the last id of many, for later updates"),
                reference=partial(_check, batch, bad_id, bad_offset, **options, by_reference=True),
            )
            for words, batch, bad_id, bad_offset, options in (
                ("no fault", usual, None, None, {}),
                ("an id of the table's size", usual, (5, 10**6), None, {}),
                ("a negative id", narrow, (0, -1), None, {}),
                ("an offset that falls", usual, None, (3, -9), {}),
                ("ids past the last offset", usual, None, (-1, -1), {"padded": True}),
                ("the last id of many, for later updates", long, (-1, 30), None, {"steps": True}),
                ("warned of, for later updates", long, (700, 10**9), None, {"steps": True, "fatal": False}),
                ("an offset, for later updates", long, None, (900, 10**7), {"steps": True}),
            )
        ),
        *(
            Case(
                f"check of a gradient, {words}", ("lookup.finite.check_gradient",),
                partial(_check_gradient, dtype, count, bad),
                SAME, quick="NaN" in words,
            )
            for words, dtype, count, bad in (
                ("fp32", torch.float32, 3000, ()),
                ("fp32 with a NaN", torch.float32, 9000, (8999, 4098)),
                ("fp16 with an infinity", torch.float16, 777, (3,)),
                ("bf16", torch.bfloat16, 20, ()),
                ("fp32 of one element", torch.float32, 1, (0,)),
            )
        ),
    )  # fmt: skip


def _check(
    batch: Batch,
    bad_id: tuple[int, int] | None,
    bad_offset: tuple[int, int] | None,
    padded: bool = False,
    steps: bool = False,
    fatal: bool = True,
    by_reference: bool = False,
) -> Sequence[Any]:
    ids, offsets, _ = batch.bag_ids()
    if bad_id:
        ids[bad_id[0]] = bad_id[1]
    if bad_offset:
        offsets[bad_offset[0]] += bad_offset[1]
    guard, step_guard = new_guard(), new_guard() if steps else None
    names = [f"feature {f}" for f in range(len(batch.dims))]
    where = (ids, offsets, batch.table_features)
    if by_reference:
        check_ids_ref(*where, guard, padded, step_guard, fatal)
    else:
        # the guard is left as on a GPU, where it is read later
        with patch.object(bounds, "raise_from_guard"):
            check_ids(*where, guard, names=names, fatal=fatal, padded=padded, step_guard=step_guard)
    message = ""
    try:
        raise_from_guard(guard.clone(), *where, names)
    except (IndexError, ValueError) as error:
        message = str(error)
    return [guard, message, *([step_guard] if steps else [])]


def _check_gradient(dtype: torch.dtype, count: int, bad: Sequence[int]) -> Sequence[Any]:
    grad = torch.randn(count, 1, generator=torch.Generator().manual_seed(0)).to(dtype)
    for place in bad:
        grad[place] = float("inf") if dtype == torch.float16 else float("nan")
    guard = new_guard()
    check_gradient(grad, guard)
    return [guard]

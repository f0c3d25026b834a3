"""Cases of the optimizer step: every rule, dtype, decay and pooling; runs of one id and of thousands; few programs.

Gradients and per-id weights are multiples of 1/8: sums over a row's ids are exact in every order, so that what differs
from the reference is what the rule rounds. Cases of averaged bags are the exception.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch

from shardwise.kernels import RULES, configs, fused_update, new_guard
from shardwise.kernels.update.index_op import update_index
from shardwise.kernels.update.rules import BUILT_IN
from shardwise.kernels.update.update import fused_update_ref
from shardwise.perf.selftest.flat_tables import Batch
from shardwise.perf.selftest.tolerances import AVERAGED, RULE, RULE_BY_STEPS, SAME

from .case import Case, name_of

UPDATE = "update.kernel.update"
INDEX = ("update.row_keys.row_keys", "update.row_chunks.chunk_alone")
SMALL = (*INDEX, UPDATE)
# an index of several blocks, and a step of several levels
LARGE = (
    "update.row_keys.row_keys",
    "update.row_chunks.mark",
    "update.row_chunks.block_sums",
    "update.row_chunks.chunk",
    UPDATE,
)
# an index that was made before, and a step that is counted by itself
AHEAD = ("update.row_keys.count_step",)
HALVES = (torch.float16, torch.bfloat16)
HYPER = {
    "lr": 0.1, "eps": 1e-6, "beta1": 0.9, "beta2": 0.99, "momentum": 0.5, "nesterov": 0.0, "weight_decay": 0.125,
    "eta": 0.25, "l1": 0.01, "l2": 0.5, "beta": 1.0,
}  # fmt: skip
MIXED = Batch(((11, 8), (6, 3), (1, 16), (9, 8), (5, 20)), tuple((t, t % 2 == 1) for t in range(5)), bags=4)


def cases() -> Iterator[Case]:
    """Rules first, then what is done around them, then batches that the index and the levels are hard on."""
    yield from (
        *_rules(),
        *_unfused(),
        *_settings(),
        *_batches(),
    )  # fmt: skip


def _of(dim: int, **changes: Any) -> Batch:
    return replace(Batch(((9, dim), (4, dim)), ((0, False), (1, False)), bags=6), **changes)


def _case(words: str, batch: Batch, rule: str, kernels: Sequence[str] = SMALL, **more: Any) -> Case:
    own = {name: more.pop(name) for name in ("quick", "programs") if name in more}
    tolerance = more.pop("tolerance", RULE)
    return Case(
        f"update by {rule}, {words}", tuple(kernels), partial(_update, batch, rule, by=fused_update, **more),
        tolerance, **own, reference=partial(_update, batch, rule, by=None, **more),
    )  # fmt: skip


def _rules() -> Iterator[Case]:
    for rule in BUILT_IN:
        yield from (
            _case(f"D={dim}", _of(dim), rule, quick=dim == 20 and rule in ("rowwise_adagrad", "adam", "lamb"))
            for dim in (128, 1, 3, 20, 64, 1023)
        )  # fmt: skip
        for dtype in HALVES:
            yield from (
                _case(f"{name_of(dtype)} D=64", _of(64, dtype=dtype, output=dtype), rule),
                _case(f"{name_of(dtype)} D=64 rounded", _of(64, dtype=dtype), rule, rounds=True),
            )  # fmt: skip
        yield _case("loops", _of(20, tables=((90, 20), (40, 20)), bags=60), rule, programs=1)
    yield from (
        _case("D=4096", Batch(((2, 4096),), ((0, False),), bags=2), rule)
        for rule in ("sgd", "rowwise_adagrad", "adam")
    )  # fmt: skip


def _unfused() -> Iterator[Case]:
    for rule in BUILT_IN:
        # a sum over a row has an order
        tolerance = RULE if RULES[rule].takes_row else RULE_BY_STEPS
        yield replace(_case("D=64, not fused", _of(64), rule), fuses=False, tolerance=tolerance)


def _settings() -> Iterator[Case]:
    for rule, decay in product(BUILT_IN, ("l2", "decoupled")):
        if decay == "l2" or "lr" in RULES[rule].hyper:
            yield _case(f"{decay} decay", _of(20), rule, decay=decay)
    for rule in ("sgd", "rowwise_adagrad"):
        yield from (
            _case("weighted", _of(64, weighted=True), rule),
            _case("mean", MIXED, rule, tolerance=AVERAGED),
            _case(
                "weighted mean, fp16",
                replace(MIXED, weighted=True, dtype=torch.float16),
                rule,
                rounds=True,
                tolerance=AVERAGED,
            ),
            _case("gradients cut", _of(20), rule, most=0.5),
            _case("gradients of fp16", _of(64, output=torch.float16), rule),
            _case("gradients of bf16", _of(3, output=torch.bfloat16), rule),
            _case("of a sequence", Batch(((9, 20),), ((0, False),), bags=7), rule, sequence=True),
            _case("shifted", _of(128, shifted=True), rule),
        )  # fmt: skip
        for ids, offsets in product((torch.int32, torch.int64), repeat=2):
            words = f"{name_of(ids)} ids, {name_of(offsets)} offsets"
            yield _case(words, _of(8, ids=ids, offsets=offsets), rule)
        yield _case("a bad batch", _of(20), rule, bad=True)
    yield _case("nesterov", _of(64), "momentum_sgd", hyper={"nesterov": 1.0})


def _batches() -> Iterator[Case]:
    # rows 0 have most ids: runs of more than 32 have partial sums, and of more than 1,024 two levels of them
    hot = Batch(((40, 8), (9, 8)), ((0, False), (1, False)), bags=110, lengths=(8, 14), hot=0.9)
    for rule in ("sgd", "rowwise_adagrad"):
        for words, batch in (
            ("2,400 ids, most of two rows", hot),
            ("mean of mixed dims, hot rows", replace(MIXED, bags=40, lengths=(5, 30), hot=0.8)),
            ("600 ids, one block", Batch(((400, 4), (3, 4)), bags=120, lengths=(0, 5))),
            ("1,500 ids, one block", Batch(((400, 4), (3, 4)), bags=150, lengths=(0, 10))),
        ):
            large = SMALL if "one block" in words else LARGE
            quick = rule == "rowwise_adagrad" and "2,400" in words
            tolerance = AVERAGED if batch.pooling == "mean" else RULE
            yield _case(words, batch, rule, large, programs=3, quick=quick, tolerance=tolerance)
        yield from (
            _case("5,000 ids of one row", replace(hot, bags=250, lengths=(10, 10), hot=1.0), rule, LARGE, programs=2),
            _case("many rows", Batch(((3000, 4), (500, 4)), bags=900, lengths=(0, 6)), rule, LARGE, programs=5),
        )  # fmt: skip
        # 256 blocks: what all of them counted stands at a place that their sums go around once more for
        full = Batch(((3000, 4), (500, 4)), bags=1024, lengths=(4, 4))
        small = {"index.block": 32, "index.warps": 1}
        yield from (
            _case("8,192 ids in 256 blocks", full, rule, LARGE, programs=5, settings=small),
            _case("weighted, hot rows", replace(hot, weighted=True), rule, LARGE, programs=2),
            _case("bf16, hot rows", replace(hot, dtype=torch.bfloat16), rule, LARGE, programs=2, rounds=True),
            _case("last rows", _of(8, last=True), rule),
            _case("one id", Batch(((5, 8),), ((0, False),), bags=1, lengths=(1, 1)), rule),
            _case("no ids", _of(8, lengths=(0, 0)), rule, INDEX[:1]),
            _case("empty bags", _of(8, bags=30, lengths=(0, 1)), rule),
        )  # fmt: skip
    for rule in ("rowwise_adagrad", "adam"):
        quick = rule == "adam"
        yield from (
            _case("index ahead", _of(20), rule, (*SMALL, *AHEAD), quick=quick, ahead=True),
            _case("index ahead, hot rows", hot, rule, (*LARGE, *AHEAD), programs=2, ahead=True),
            _case("index ahead, rounded", _of(64, dtype=HALVES[0]), rule, (*SMALL, *AHEAD), ahead=True, rounds=True),
            _case("index ahead, a bad batch", _of(20), rule, (*SMALL, *AHEAD), ahead=True, bad=True),
        )  # fmt: skip
    yield _case("sums of gradients, hot rows", hot, "gradient", LARGE, programs=2, tolerance=SAME)


def _update(
    batch: Batch,
    rule: str,
    *,
    by: Any,
    decay: str = "none",
    rounds: bool = False,
    most: float | None = None,
    sequence: bool = False,
    bad: bool = False,
    ahead: bool = False,
    hyper: dict[str, float] | None = None,
    settings: Mapping[str, configs.Setting] | None = None,
) -> Sequence[Any]:
    """The third step of a rule, whose states are not what they begin with: weights, states and count of steps."""
    chosen, weights, generator = RULES[rule], batch.weights(), batch.random(4)
    states = [torch.rand(batch.rows if kind == "row" else len(weights), generator=generator) for kind in chosen.kinds]
    step, guard = torch.full((1,), 2, dtype=torch.int64), new_guard()
    if bad:
        guard[0] = 3
    known = {**HYPER, **(hyper or {})}
    numbers = [known.get(name, default) for name, default in chosen.hyper.items()] + [0.125]
    seed = torch.full((1,), 7, dtype=torch.int64) if rounds else None
    ids, offsets, per_id = batch.bag_ids()
    pooling = "sequence" if sequence else batch.pooling
    arguments = (
        weights, states, step, batch.row_gradient() if sequence else batch.gradient(), ids, offsets, per_id,
        batch.table_features, batch.dims, batch.segments, rule, torch.tensor(numbers, dtype=torch.float64), guard,
        pooling, decay, most, seed,
    )  # fmt: skip
    with configs.variant(settings or {}):
        if by is None:
            fused_update_ref(*arguments)
        elif ahead:
            of_batch = (ids, offsets, per_id, batch.table_features, batch.dims, batch.segments, pooling)
            by(*arguments, index=update_index(*of_batch, hashed=rounds))
        else:
            by(*arguments)
    return [weights, *states, step]

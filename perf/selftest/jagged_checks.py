"""Checks of the ops on jagged values: offsets, segments, padding, products, selections, buckets, bins and columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from math import log
from typing import Any

import torch
from torch import Tensor

from shardwise import kernels as ops
from shardwise.kernels.jagged import (
    bmm,
    bucketize,
    calibration,
    elementwise,
    index_add,
    index_select,
    offsets as offset_ops,
    padded,
    permute,
    regroup,
    regroup_numbers,  # noqa: F401  # has ops of its own
    segments,
    softmax,
    unary_embeddings,
    unique,
    vector_product,
)

from .check import LENGTHS, Check, check, eighths, normal, offsets_of, random
from .tolerances import CALIBRATION, EXPONENTIAL, PRODUCT, SUM

ROUTED: Any = torch.ops.shardwise
ROWS = sum(LENGTHS)


def checks() -> Iterator[Check]:
    """In the order of the folder `kernels/jagged`."""
    for part in (_offsets, _segments, _padded, _products, _bags, _selections, _ids, _columns):
        yield from part()


def _offsets() -> Iterator[Check]:
    family = "offsets"
    yield check(
        family, "of 3,000 lengths", "complete_cumsum", lambda lengths: ROUTED.complete_cumsum(lengths),
        offset_ops.complete_cumsum_ref, lambda: [torch.randint(0, 9, (3000,), generator=random(1))],
    )  # fmt: skip
    yield check(
        family, "inverse of an order", "invert_permute", ops.invert_permute, offset_ops.invert_permute_ref,
        lambda: [torch.randperm(3000, generator=random(1))],
    )  # fmt: skip
    yield check(
        family, "places in bags", "offsets_range", ops.offsets_range, offset_ops.offsets_range_ref,
        lambda: [offsets_of()[:-1], ROWS],
    )  # fmt: skip


def _segments() -> Iterator[Check]:
    family, order = "segments in another order", torch.tensor([5, 0, 3, 3, 6])
    into = offsets_of([LENGTHS[i] for i in order.tolist()])
    total = int(into[-1])
    for words, row in (("numbers", ()), ("rows of 20", (20,))):
        yield check(
            family, words, "move_segments", lambda *given: ROUTED.move_segments(*given),
            segments.move_segments_ref, partial(_moved_inputs, row, order, into, total),
        )  # fmt: skip
        yield check(
            family, f"gradient of {words}", "move_segments collect_segments", _permuted, _permuted_ref,
            partial(_values_and_order, row), leaves=(1,), tolerance=SUM,
        )  # fmt: skip
    yield check(
        family, "sources", "expand_into_jagged_permute", ops.expand_into_jagged_permute,
        permute.expand_into_jagged_permute_ref, lambda: [order, offsets_of(), into, total],
    )  # fmt: skip
    for words, row in (("numbers", ()), ("rows of 20", (20,))):
        yield check(
            "sums of segments", words, "segment_sum segment_spread", ops.segment_sum, offset_ops.segment_sum_ref,
            partial(_values_in_segments, row), leaves=(1,), tolerance=SUM,
        )  # fmt: skip


def _moved_inputs(row: tuple[int, ...], order: Tensor, into: Tensor, total: int) -> Sequence[Any]:
    return [eighths(ROWS, *row)], order, offsets_of(), into, total


def _values_and_order(row: tuple[int, ...]) -> Sequence[Any]:
    return torch.tensor([5, 0, 3, 3, 6, 3]), eighths(ROWS, *row), torch.tensor(LENGTHS)


def _permuted(order: Tensor, values: Tensor, lengths: Tensor) -> Any:
    chosen, moved, _ = ops.permute_1d(order, lengths, values)
    return moved, chosen


def _permuted_ref(order: Tensor, values: Tensor, lengths: Tensor) -> Any:
    parts = torch.split_with_sizes(values, lengths.tolist())
    return torch.cat([parts[i] for i in order.tolist()]), lengths[order]


def _values_in_segments(row: tuple[int, ...]) -> Sequence[Any]:
    return offsets_of((*LENGTHS, 100)), eighths(ROWS + 100, *row)


# ops of the backward of each
_BACKWARD = {
    "jagged_dense_add": "padded_dense_to_jagged",
    "jagged_dense_add_jagged": "jagged_to_padded_dense",
    "jagged_dense_mul": "padded_jagged_product",
}


def _padded() -> Iterator[Check]:
    family = "padded"
    for words, lengths, extents, row in (
        ("rows of 20", ((3, 0, 2, 5),), [4], (20,)),
        ("numbers", ((3, 0, 2, 5),), [4], ()),
        ("2 jagged dims", ((2, 0, 3), (1, 2, 0, 3, 1)), [2, 2], (4,)),
    ):
        values, dense = partial(_jagged, lengths, row), (len(lengths[0]), *extents, *row)
        yield check(
            family, f"{words} to dense", "jagged_to_padded_dense padded_dense_to_jagged",
            lambda values, offsets, extents: ops.jagged_to_padded_dense(values, offsets, extents, 2.0),
            lambda values, offsets, extents: padded.jagged_to_padded_dense_ref(values, offsets, extents, 2.0),
            partial(_followed_by, values, extents), leaves=(0,),
        )  # fmt: skip
        yield check(
            family, f"{words} from dense", "padded_dense_to_jagged jagged_to_padded_dense",
            ops.padded_dense_to_jagged, padded.padded_dense_to_jagged_ref,
            partial(_dense_first, values, dense), leaves=(0,),
        )  # fmt: skip
        for name in ("jagged_dense_add", "jagged_dense_add_jagged", "jagged_dense_mul"):
            yield check(
                "jagged and dense", f"{name}, {words}", f"{name} {_BACKWARD[name]}", getattr(ops, name),
                getattr(elementwise, f"{name}_ref"), partial(_with_dense, values, dense), leaves=(0, 2),
                tolerance=SUM,
            )  # fmt: skip


def _jagged(lengths: Sequence[Sequence[int]], row: tuple[int, ...]) -> tuple[Tensor, list[Tensor]]:
    return eighths(sum(lengths[-1]), *row), [offsets_of(part) for part in lengths]


def _followed_by(values: Any, last: Any) -> Sequence[Any]:
    return *values(), last


def _dense_first(values: Any, shape: tuple[int, ...]) -> Sequence[Any]:
    jagged, offsets = values()
    return eighths(*shape, seed=2), offsets, len(jagged)


def _with_dense(values: Any, shape: tuple[int, ...]) -> Sequence[Any]:
    return *values(), eighths(*shape, seed=2)


def _products() -> Iterator[Check]:
    for left, right in ((20, 12), (64, 64)):
        yield check(
            "jagged products", f"jagged times dense, {left} x {right}", "jagged_dense_bmm jagged_jagged_bmm",
            ops.jagged_dense_bmm, bmm.jagged_dense_bmm_ref, partial(_dense_operands, left, right), leaves=(0, 2),
            tolerance=PRODUCT,
        )  # fmt: skip
        yield check(
            "jagged products", f"jagged times jagged, {left} x {right}", "jagged_jagged_bmm jagged_dense_bmm",
            ops.jagged_jagged_bmm, bmm.jagged_jagged_bmm_ref, partial(_jagged_operands, left, right), leaves=(0, 1),
            tolerance=PRODUCT,
        )  # fmt: skip


def _dense_operands(left: int, right: int) -> Sequence[Any]:
    return normal(ROWS, left), offsets_of(), normal(len(LENGTHS), left, right, seed=2), 30


def _jagged_operands(left: int, right: int) -> Sequence[Any]:
    return normal(ROWS, left), normal(ROWS, right, seed=2), offsets_of(), 30


def _bags() -> Iterator[Check]:
    for dim in (20, 128):
        yield check(
            "softmax of bags", f"D={dim}", "jagged_softmax jagged_softmax_gradient", ops.jagged_softmax,
            softmax.jagged_softmax_ref, partial(_rows_in_bags, dim), leaves=(0,), tolerance=EXPONENTIAL,
        )  # fmt: skip
        yield check(
            "vectors times bags", f"D={dim}",
            "jagged_vector_product jagged_vector_product_by_rows jagged_vector_product_by_vectors",
            ops.jagged_vector_product, vector_product.jagged_vector_product_ref, partial(_vectors, dim),
            leaves=(0, 1), tolerance=PRODUCT,
        )  # fmt: skip
    yield check(
        "unary embeddings", "2 tasks, 3 tables", "batched_unary_embeddings batched_unary_embeddings_gradient",
        ops.batched_unary_embeddings, unary_embeddings.batched_unary_embeddings_ref, _unary_inputs, leaves=(0,),
        tolerance=SUM,
    )  # fmt: skip


def _rows_in_bags(dim: int) -> Sequence[Any]:
    return normal(ROWS, dim), offsets_of()


def _vectors(dim: int) -> Sequence[Any]:
    """Two heads, each with its own half of the columns, and vectors that are shorter than the longest bag."""
    return normal(2 * len(LENGTHS), 30), normal(ROWS, 2 * dim, seed=2), offsets_of()


def _unary_inputs() -> Sequence[Any]:
    rows, hits = (5, 1, 9), 45
    ids = torch.cat([torch.randint(0, n, (4 * hits,), generator=random(n)) for n in rows])
    return eighths(2, sum(rows), 1), offsets_of(rows), torch.arange(13) * hits, ids


def _selections() -> Iterator[Check]:
    chosen = torch.tensor([3, 5, 3, 1, 0, 3])
    for words, row in (("numbers", ()), ("rows of 20", (20,))):
        yield check(
            "selected bags", words, "jagged_index_select jagged_index_add", ops.jagged_index_select,
            index_select.jagged_index_select_ref, partial(_selected, row, chosen), leaves=(0,), tolerance=SUM,
        )  # fmt: skip
        yield check(
            "added bags", words, "jagged_index_add jagged_index_select", ops.jagged_index_add,
            index_add.jagged_index_add_ref, partial(_added, row, chosen), leaves=(0,), tolerance=SUM,
        )  # fmt: skip
    yield check(
        "selected bags", "samples of 2 keys, weighted", "jagged_index_select", _keyed(ops.keyed_jagged_index_select),
        _keyed(index_select.keyed_jagged_index_select_ref), _keyed_inputs,
    )  # fmt: skip


def _selected(row: tuple[int, ...], chosen: Tensor) -> Sequence[Any]:
    return eighths(ROWS, *row), torch.tensor(LENGTHS), chosen


def _added(row: tuple[int, ...], chosen: Tensor) -> Sequence[Any]:
    into = torch.tensor(LENGTHS)
    lengths = into[chosen]
    return eighths(int(lengths.sum()), *row), lengths, chosen, into


def _keyed(op: Any) -> Any:
    return lambda values, lengths, offsets, chosen, weights: op(values, lengths, offsets, chosen, 7, weights)


def _keyed_inputs() -> Sequence[Any]:
    lengths = [*LENGTHS, *reversed(LENGTHS)]
    return (
        torch.arange(2 * ROWS), torch.tensor(lengths), offsets_of(lengths), torch.tensor([3, 5, 3, 0]),
        eighths(2 * ROWS),
    )  # fmt: skip


def _ids() -> Iterator[Check]:
    yield check(
        "ids in buckets", "with weights and positions", "block_bucketize", _bucketized(ops.block_bucketize),
        _bucketized(bucketize.block_bucketize_ref), _ids_and_weights,
    )  # fmt: skip
    yield check(
        "distinct ids", "of one list", "unique_ids", lambda ids: [*ops.unique_ids(ids, return_counts=True)],
        lambda ids: torch.unique(ids, return_inverse=True, return_counts=True),
        lambda: [torch.randint(0, 50, (900,), generator=random(1))],
    )  # fmt: skip
    yield check(
        "distinct ids", "of 3 features over 2 tables", "jagged_unique",
        lambda ids, offsets: [*ops.jagged_unique(ids, offsets, [50, 60], [0, 0, 1])],
        lambda ids, offsets: [*unique.jagged_unique_ref(ids, offsets, [50, 60], [0, 0, 1])],
        lambda: [torch.randint(0, 50, (51,), generator=random(1)), offsets_of((3, 0, 1, 7, 0, 40))],
    )  # fmt: skip
    for words in ("plain", "by feature"):
        yield check(
            "calibration", words, "histogram_binning", _calibrated, _calibrated_ref,
            partial(_predictions, words == "by feature"), tolerance=CALIBRATION,
        )  # fmt: skip


def _bucketized(op: Any) -> Any:
    return lambda lengths, ids, sizes, weights: [
        *op(lengths, ids, sizes, 3, weights=weights, bucketize_pos=True, sequence=True)
    ]


def _ids_and_weights() -> Sequence[Any]:
    lengths = torch.tensor((3, 0, 1, 7, 0, 40))
    ids = torch.randint(0, 130, (51,), generator=random(1))
    return lengths, ids, torch.tensor([40, 30]), torch.arange(51) / 8


BINS = 8
NUMBERS: dict[str, Any] = {"positive_weight": 0.5, "bin_ctr_in_use_after": 10, "bin_ctr_weight_value": 0.75}


def _predictions(by_feature: bool) -> Sequence[Any]:
    count, generator = 300, random(1)
    logit = torch.randn(count, generator=generator)
    examples = torch.randint(0, 40, (4 * BINS if by_feature else BINS,), generator=generator).double()
    positives = (examples * torch.rand(len(examples), generator=generator, dtype=torch.float64)).floor()
    lengths = torch.randint(0, 3, (count,), generator=generator)
    value = torch.randint(0, 5, (int(lengths.sum()),), generator=generator)
    return (logit, examples, positives, value, lengths) if by_feature else (logit, examples, positives, None, None)


def _calibrated(
    logit: Tensor, examples: Tensor, positives: Tensor, value: Tensor | None, lengths: Tensor | None
) -> Any:
    if value is None or lengths is None:
        return [*ops.histogram_binning_calibration(logit, examples, positives, **NUMBERS)]
    by_feature: Any = ops.histogram_binning_calibration_by_feature
    return [*by_feature(logit, value, lengths, 3, examples, positives, BINS, **NUMBERS)]


def _calibrated_ref(
    logit: Tensor, examples: Tensor, positives: Tensor, value: Tensor | None, lengths: Tensor | None
) -> Any:
    return calibration.histogram_binning_ref(
        logit, value, lengths, 0 if value is None else 3, examples, positives, None, BINS,
        log(NUMBERS["positive_weight"]), 0.0, 1 / BINS, 10, NUMBERS["bin_ctr_weight_value"],
    )  # fmt: skip


def _columns() -> Iterator[Check]:
    # input, first column and columns of the pieces of each output
    pieces = (((0, 0, 8), (1, 0, 16)), ((0, 0, 8), (0, 4, 12)), ((0, 0, 16),))
    yield check(
        "regrouped columns", "3 outputs of 2 inputs", "regroup_columns", _regrouped(ops.regroup, pieces),
        _regrouped(regroup.regroup_ref, pieces), lambda: [eighths(9, 16), eighths(9, 16, seed=2)], leaves=(0, 1),
        tolerance=SUM,
    )  # fmt: skip
    # by FBGEMM's names: tables of 2, 1 and 3 columns in another order, one of them twice; and its rows of numbers
    order = [torch.tensor([0, 2, 3, 6]), torch.tensor([2, 0, 2])]
    yield check(
        "regrouped columns", "tables by offsets and an order", "permute_tables permute_tables_backward",
        lambda pooled, offsets, order: ROUTED.permute_tables(pooled, offsets, order),
        lambda pooled, offsets, order: torch.cat([pooled[:, 3:], pooled[:, :2], pooled[:, 3:]], 1),
        lambda: [eighths(9, 6), *order], leaves=(0,), tolerance=SUM,
    )  # fmt: skip
    moves = torch.tensor([[1, 0, 0, 0, 2, 0], [0, 0, 1, 2, 2, 0], [0, 1, 0, 0, 1, 0]], dtype=torch.int32)
    yield check(
        "regrouped columns", "2 outputs of 2 inputs by rows of numbers", "regroup_by_permutes",
        lambda a, b, moves: torch.cat(ROUTED.regroup_by_permutes([a, b], moves, [4, 1], False), 1),
        lambda a, b, moves: torch.cat([b, a[:, 1:], a[:, :1]], 1),
        lambda: [eighths(9, 3), eighths(9, 2, seed=2), moves], leaves=(0, 1), tolerance=SUM,
    )  # fmt: skip


def _regrouped(op: Any, pieces: Any) -> Any:
    # all outputs side by side, so that all of them have a gradient
    return lambda *tensors: torch.cat(list(op(tensors, pieces)), 1)

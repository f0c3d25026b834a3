"""Cases for the compiler: the launches of the jagged ops; cases.py reads `MODULES` and `launches`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ...kernels.jagged import (
    bmm as jagged_bmm,
    bucketize,
    calibration,
    elementwise,
    index_add,
    index_select,
    offsets as jagged,
    padded,
    permute,
    regroup as regrouping,
    segments,
    softmax,
    unary_embeddings,
    unique,
    vector_product,
)
from ...kernels.jagged.regroup_plan import plan_pieces

# kernel files whose launches are noted
MODULES: tuple[ModuleType, ...] = (
    bucketize,
    calibration,
    elementwise,
    index_add,
    index_select,
    jagged,
    jagged_bmm,
    padded,
    permute,
    regrouping,
    segments,
    softmax,
    unary_embeddings,
    unique,
    vector_product,
)

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)

# a run, its label, and what rows it reads where the order of a sum over a row is promised ("" where it is not)
Launch = tuple[Callable[[], object], str, str]


def launches() -> Iterator[Launch]:
    """Runs of every jagged op."""
    yield from (
        *_segments(),
        *_buckets(),
        *_dense(),
        *_select(),
        *_bmm(),
    )  # fmt: skip


def _segments() -> Iterator[Launch]:
    halves = [(dim, torch.float16) for dim in (1, 4, 128)] + [(dim, torch.bfloat16) for dim in (6, 1023)]
    yield from (
        *(
            (partial(_move_and_sum, (4, dim), dtype), f"segments D={dim} {_name(dtype)}", "")
            for dim, dtype in [(dim, torch.float32) for dim in (1, 3, 4, 20, 64, 128, 1023, 4096)] + halves
        ),
        *(
            (partial(_move_and_sum, (4,), dtype), f"segments {_name(dtype)}", "")
            for dtype in (torch.float32, torch.float16, torch.int64, torch.int32)
        ),
        (partial(_move_and_sum, (16,), torch.int64), "segments 16 i64", ""),
        (partial(_move_and_sum, (4,), torch.int64, torch.int32), "segments i64 i32 offsets", ""),
        (partial(_move_and_sum, (4, 128), torch.float32, torch.int32), "segments D=128 fp32 i32 offsets", ""),
    )  # fmt: skip
    for dtype in (torch.int32, torch.int64):
        offsets = torch.arange(0, 5, 2, dtype=dtype)
        ops = torch.ops.shardwise
        yield from (
            (partial(ops.invert_permute, offsets), _name(dtype), ""),
            (partial(ops.offsets_range, offsets, 4), f"places {_name(dtype)}", ""),
            *(
                (partial(ops.complete_cumsum, torch.zeros(count, dtype=dtype)), f"{count} {_name(dtype)}", "")
                for count in (3, 1664)
            ),
        )  # fmt: skip
        expand = partial(ops.expand_into_jagged_permute, offsets[:2], offsets, offsets, 4)
        yield expand, f"sources {_name(dtype)}", ""


def _move_and_sum(shape: tuple[int, ...], dtype: torch.dtype, index: torch.dtype = torch.int64) -> None:
    """Segments of 2 values each, swapped; where they lie together with fp32 weights, as in a batch of ids."""
    values = torch.zeros(shape, dtype=dtype)
    offsets, order = torch.arange(0, shape[0] + 1, 2, dtype=index), torch.arange(shape[0] // 2, dtype=index)
    both = [values, torch.zeros(shape[0])] if dtype == torch.int64 else [values]
    torch.ops.shardwise.move_segments(both, order, offsets, offsets, shape[0])
    if dtype.is_floating_point:
        torch.ops.shardwise.collect_segments(both, order, offsets, offsets, shape[0])
        torch.ops.shardwise.segment_spread(offsets, values[: shape[0] // 2], shape[0], 1)
    torch.ops.shardwise.segment_sum(offsets, values, 1)


def _buckets() -> Iterator[Launch]:
    integers = {"i32": torch.int32, "i64": torch.int64}
    for ids, lengths in product(integers, integers):
        yield from (
            *(
                (partial(_bucketize, integers[ids], integers[lengths], options), f"{ids} {lengths}{words}", "")
                for words, options in _DIVISIONS.items()
            ),
            (partial(_bucketize, integers[ids], integers[lengths], {}, 300), f"{ids} {lengths} 300 buckets", ""),
        )  # fmt: skip
        for rows in (16, 2**31):
            offsets = torch.arange(17, dtype=integers[lengths])
            call = partial(unique.jagged_unique, torch.zeros(16, dtype=integers[ids]), offsets, [rows, rows])
            yield call, f"{ids} {lengths} {rows} rows", ""
    logits = {"fp32": torch.float32, "fp64": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16}
    for kind, grouped, borders in product(logits, (False, True), (False, True)):
        words = " segments" * grouped + " borders" * borders
        yield partial(_calibrate, logits[kind], grouped, borders), f"{kind}{words}", ""


_DIVISIONS: dict[str, dict[str, Any]] = {
    "": {},
    " weighted": {"weights": torch.zeros(16), "bucketize_pos": True, "sequence": True},
    " half weights": {"weights": torch.zeros(16, dtype=torch.bfloat16), "sequence": True},
    " batches": {"batch_sizes": [4, 12]},
    " borders": {"block_bucketize_pos": [torch.arange(9), torch.arange(9)], "keep_orig_idx": [True, False]},
    " blocks": {"total_num_blocks": [16, 32], "keep_orig_idx": True},
}


def _bucketize(ids: torch.dtype, lengths: torch.dtype, options: dict[str, Any], buckets: int = 8) -> None:
    bags = torch.ones(16, dtype=lengths)
    bucketize.block_bucketize(
        bags, torch.zeros(16, dtype=ids), torch.full((2,), 16, dtype=torch.int64), buckets, **options
    )


def _calibrate(kind: torch.dtype, segments: bool, borders: bool) -> None:
    logit, bins = torch.zeros(16, dtype=kind), torch.zeros(48, dtype=torch.float64)
    value, lengths = torch.zeros(16, dtype=torch.int64), torch.ones(16, dtype=torch.int64)
    calibration._histogram_binning(
        logit, value if segments else None, lengths if segments else None, 2, bins, bins,
        bins[:15] if borders else None, 16, 0.5, 0.0, 0.0625, 10, 0.5,
    )  # fmt: skip


def _dense() -> Iterator[Launch]:
    """Values there and back, summed and multiplied: every class of dims, types, and one to five jagged dims."""
    yield from (_padded_run(dim, torch.float32) for dim in (1, 2, 3, 4, 5, 16, 20, 64, 128, 1023, 4096))
    for dtype in (torch.float16, torch.bfloat16, torch.int32, torch.int64):
        yield from (_padded_run(dim, dtype) for dim in (1, 6, 128))
    for dims in (2, 3, 5):
        yield from (
            _padded_run(128, torch.float32, dims=dims),
            _padded_run(1, torch.int64, dims=dims),
        )  # fmt: skip
    yield from (
        _padded_run(128, torch.float32, ends=torch.int32),
        _padded_run(128, torch.float32, most=5),
        _padded_run(128, torch.float32, filling=1.0),
        _padded_run(3, torch.float32, filling=1.0),
    )  # fmt: skip
    for dim, dtype in ((128, torch.float32), (3, torch.float32), (1, torch.float32), (128, torch.bfloat16)):
        yield from (
            _padded_run(dim, dtype, mode=mode, words=words)
            for mode, words in ((padded.ADD, "sum"), (padded.MULTIPLY, "product"))
        )  # fmt: skip


def _padded_run(
    dim: int,
    dtype: torch.dtype,
    *,
    dims: int = 1,
    ends: torch.dtype = torch.int64,
    most: int = 4,
    filling: float = 0.0,
    mode: int = padded.MOVE,
    words: str = "",
) -> Launch:
    label = f"D={dim} {_name(dtype)}"
    label += f" {dims} jagged dims" * (dims > 1) + " i32 offsets" * (ends == torch.int32) + f" M={most}" * (most != 4)
    label += " filled" * (filling != 0) + f" {words}" * bool(words)
    return partial(_move_padded, dim, dtype, dims, ends, most, filling, mode), label, ""


def _move_padded(
    dim: int, dtype: torch.dtype, dims: int, ends: torch.dtype, most: int, filling: float, mode: int
) -> None:
    """Eight bags of one bag ... of one value, to padded and back."""
    offsets, extents = [torch.arange(9, dtype=ends)] * dims, [most] * dims
    values, dense = torch.zeros(8, dim, dtype=dtype), torch.zeros(8, *extents, dim, dtype=dtype)
    other: Tensor | None = {padded.MOVE: None, padded.ADD: dense, padded.MULTIPLY: values}[mode]
    padded.launch_to_padded(values, other, offsets, extents, filling, mode)
    padded.launch_to_jagged(dense, None if mode == padded.MOVE else values, offsets, 8, mode)


def _select() -> Iterator[Launch]:
    wide, halves = (1, 3, 4, 20, 64, 128, 1023), (torch.float16, torch.bfloat16)
    for dim, dtype in [*((dim, torch.float32) for dim in wide), *((128, dtype) for dtype in halves), (6, halves[1])]:
        label = f"D={dim} {_name(dtype)}"
        yield from (
            (partial(_select_bags, (8, dim), dtype), f"select {label}", ""),
            # an element is a sum of its own, whatever the tile
            (partial(_add_bags, (8, dim), dtype), label, ""),
        )  # fmt: skip
    yield partial(_select_bags, (8, 128), torch.float32, torch.int32), "select D=128 fp32 i32 ids", ""
    for dtype in (torch.int32, torch.int64, torch.float32, *halves):
        for weighted in (False, True):
            words = f"{_name(dtype)}{' weighted' * weighted}"
            yield partial(_select_bags, (8,), dtype, torch.int64, weighted), f"select {words}", ""
    yield from (
        (partial(_select_bags, (8,), torch.int64, torch.int32), "select i64 i32 ids", ""),
        (partial(_add_bags, (8,), torch.float64), "D=1 fp64", ""),
    )  # fmt: skip
    for dtype, unit, inputs, outputs, repeats in (
        *((torch.float32, unit, 2, 2, 1) for unit in (1, 2, 4)),
        *((dtype, unit, 2, 2, 1) for dtype in halves for unit in (1, 2, 8)),
        *((dtype, unit, 2, 2, 3) for dtype in (torch.float32, *halves) for unit in (1, 8)),
        *((torch.float32, 4, *tensors, 1) for tensors in ((1, 1), (10, 2), (2, 10), (16, 16))),
    ):
        label = f"{_name(dtype)} by {unit} from {inputs} to {outputs}{f' {repeats} times' * (repeats > 1)}"
        yield partial(_regroup, dtype, unit, inputs, outputs, repeats), label, ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("bfloat", "bf").replace("float", "fp").replace("int", "i")


def _select_bags(
    shape: tuple[int, ...], dtype: torch.dtype, ids: torch.dtype = torch.int64, weighted: bool = False
) -> None:
    """Eight bags of one value, each selected once."""
    ends = torch.arange(shape[0] + 1, dtype=ids)
    weights = torch.ones(shape[0]) if weighted else None
    index_select._select(torch.zeros(shape, dtype=dtype), weights, ends, ends[:-1], shape[0], ids, shape[0])


def _add_bags(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    ends = torch.arange(shape[0] + 1)
    index_add._add(torch.zeros(shape, dtype=dtype), ends, ends[:-1], ends, shape[0], shape[0])


def _regroup(dtype: torch.dtype, unit: int, inputs: int, outputs: int, repeats: int) -> None:
    """Every input in every output; with `repeats` the gradient of a column that is in so many places."""
    width = 128 + unit if unit < 8 else 128
    every = [(tensor, 0, width) for tensor in reversed(range(inputs))]
    runs = plan_pieces([width] * inputs, [every] * outputs).runs
    if repeats > 1:
        flat = [number for row in runs.rows() for number in (*row, *row[3:] * (repeats - 1))]
        runs = runs._replace(flat=tuple(flat), repeats=repeats)
    tensors = [torch.zeros(8, width, dtype=dtype) for _ in range(inputs)]
    regrouping._regroup_columns(tensors, list(runs.flat), runs.repeats, list(runs.widths))


def _bmm() -> Iterator[Launch]:
    """Products, softmax, pooling by weights and unary lookups of bags of rows; a bag has 8 rows, or 100 "long"."""
    sizes = [(64, 64), (3, 20), (128, 256), (64, 1023)]
    for (left, right), dtype in product(sizes, _FLOATS):
        label = f"M={left} K={right} {_name(dtype)}"
        yield partial(_multiply, left, right, dtype), label, ""
        if left in (64, 128):
            yield partial(_multiply, left, right, dtype, 100), f"{label} long", ""
    yield from (
        (partial(_multiply, 64, 64, torch.float32, 8, torch.int32), "M=64 K=64 fp32 i32 offsets", ""),
        *(
            (partial(_pool, dim, dtype), f"D={dim} {_name(dtype)}", "")
            for dim, dtype in product((1, 4, 20, 32, 128, 1023), _FLOATS)
        ),
        (partial(_pool, 128, torch.float32, torch.int32), "D=128 fp32 i32 offsets", ""),
        *((partial(_look_up_unary, dtype), _name(dtype), "") for dtype in _FLOATS),
        (partial(_look_up_unary, torch.float32, torch.int32), "fp32 i32 ids i32 offsets", ""),
        (partial(_look_up_unary, torch.float32, torch.int64, 40), "fp32 two levels", ""),
    )  # fmt: skip


def _multiply(
    left: int, right: int, dtype: torch.dtype, rows: int = 8, offset_dtype: torch.dtype = torch.int64
) -> None:
    """A product of each of two bags with its matrix, which leaves the note of the one with its transpose."""
    x, y, offsets = torch.zeros(2 * rows, left, dtype=dtype), torch.zeros(2 * rows, right, dtype=dtype), _ends(2, rows)
    dense = torch.zeros(2, left, right, dtype=dtype)
    offsets = offsets.to(offset_dtype)
    # the last of a kernel's launches is noted: transposed and long by turns
    if rows == 8:
        jagged_bmm._dense_bmm(y, offsets, dense, None, True)
    else:
        jagged_bmm._dense_bmm(x, offsets, dense, None, False)
    jagged_bmm._jagged_bmm(x, y, offsets, None)


def _pool(dim: int, dtype: torch.dtype, offset_dtype: torch.dtype = torch.int64) -> None:
    """A softmax of rows of `dim` columns, a product with two heads' weights of as many, and their gradients."""
    offsets, rows = _ends(3, 8).to(offset_dtype), torch.zeros(24, dim, dtype=dtype)
    softmax._softmax(rows, offsets, None)
    softmax._softmax_gradient(rows, rows, offsets, None)
    vectors, grad = torch.zeros(6, 8, dtype=dtype), torch.zeros(6, dim, dtype=dtype)
    values = torch.zeros(24, 2 * dim, dtype=dtype)
    vector_product._product(vectors, values, offsets)
    vector_product._by_rows(grad, vectors, offsets, 24)
    vector_product._by_vectors(grad, values, offsets, 8)


def _look_up_unary(dtype: torch.dtype, index_dtype: torch.dtype = torch.int64, hits: int = 1) -> None:
    """Three tables of two rows, two bags each, for two tasks; `hits` more than 32 need two levels of chunks."""
    tables, offsets = _ends(3, 2), _ends(6, hits).to(index_dtype)
    ids, grad = torch.zeros(6 * hits, dtype=index_dtype), torch.zeros(2, 2, 3, dtype=dtype)
    unary_embeddings._lookup(torch.zeros(2, 6, 1, dtype=dtype), tables, offsets, ids)
    unary_embeddings._gradient(grad, tables, offsets, ids, 6)


def _ends(bags: int, rows: int) -> torch.Tensor:
    return torch.arange(bags + 1) * rows

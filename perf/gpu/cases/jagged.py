"""Cases of the jagged ops and their backwards: segments, buckets, padded tensors, products, selections and columns.

Values are small whole numbers or multiples of 1/8 where a sum's order should not show.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from shardwise import kernels as ops
from shardwise.perf.selftest.agreement import Tolerance
from shardwise.perf.selftest.tolerances import EXPONENTIAL, PRODUCT, SAME, SUM

from .case import Case, name_of

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int64, torch.int32)
# bags of a batch: empty ones, one value, and one longer than a tile
LENGTHS = (3, 0, 1, 7, 0, 40, 2)
ROUTED: Any = torch.ops.shardwise


def cases() -> Iterator[Case]:
    """Each op in its dtypes and shapes; the first of each kind is quick."""
    for part in (_orders, _segments, _padded, _products, _pooling, _selections, _columns):
        yield from part()


def _case(
    name: str, files: str, run: Callable[[], Sequence[Any]], tolerance: Tolerance = SAME, quick: bool = False
) -> Case:
    return Case(name, tuple(files.split()), run, tolerance, quick)


def _random(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _eighths(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    numbers = torch.randint(-16, 17, shape, generator=_random(seed))
    return (numbers / 8).to(dtype) if dtype.is_floating_point else numbers.to(dtype)


def _normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=_random(seed)).to(dtype)


def _offsets(lengths: Sequence[int] = LENGTHS, dtype: torch.dtype = torch.int64) -> Tensor:
    ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
    return torch.cat([ends.new_zeros(1), ends]).to(dtype)


def _both_ways(op: Callable[..., Any], leaves: Sequence[int], inputs: Callable[[], Sequence[Any]]) -> Sequence[Any]:
    """An op's results, and the gradients of its inputs at `leaves` for a fixed gradient of the first result."""
    given = [x.requires_grad_() if i in leaves else x for i, x in enumerate(inputs())]
    result = op(*given)
    parts = [*result] if isinstance(result, (tuple, list)) else [result]
    if not leaves:
        return parts
    upstream = _eighths(*parts[0].shape, seed=9, dtype=parts[0].dtype)
    return [*parts, *torch.autograd.grad(parts[0], [given[i] for i in leaves], upstream)]


def _orders() -> Iterator[Case]:
    for dtype, count in product(INTEGERS, (5, 1, 3000)):
        yield from (
            _case(
                f"offsets of {count} lengths, {name_of(dtype)}", "jagged.offsets.cumsum",
                partial(_sums_before, (count,), dtype), quick=count == 3000 and dtype == torch.int32,
            ),
            _case(
                f"inverse of an order of {count}, {name_of(dtype)}", "jagged.offsets.invert",
                partial(_inverse, count, dtype), quick=count == 3000 and dtype == torch.int64,
            ),
            _case(
                f"places in {count + 3} bags, {name_of(dtype)}", "jagged.segments.locate",
                partial(_places, (0, 3, 3, *(LENGTHS[k % 7] for k in range(count))), dtype),
                quick=count == 5 and dtype == torch.int32,
            ),
        )  # fmt: skip
    yield from (
        _case("offsets of 3 rows of lengths", "jagged.offsets.cumsum", partial(_sums_before, (3, 70), torch.int64)),
        *(
            _case(f"sources of moved segments, {name_of(dtype)}", "jagged.segments.locate", partial(_expand, dtype))
            for dtype in INTEGERS
        ),
    )  # fmt: skip


def _sums_before(shape: tuple[int, ...], dtype: torch.dtype) -> Sequence[Any]:
    return [ROUTED.complete_cumsum(torch.randint(0, 9, shape, generator=_random(1), dtype=dtype))]


def _inverse(count: int, dtype: torch.dtype) -> Sequence[Any]:
    return [ops.invert_permute(torch.randperm(count, generator=_random(1), dtype=dtype))]


def _places(lengths: Sequence[int], dtype: torch.dtype) -> Sequence[Any]:
    return [ops.offsets_range(_offsets(lengths, dtype)[:-1], sum(lengths))]


def _expand(dtype: torch.dtype) -> Sequence[Any]:
    order = torch.tensor([5, 0, 3, 3], dtype=dtype)
    into = _offsets([LENGTHS[i] for i in order.tolist()], dtype)
    return [ops.expand_into_jagged_permute(order, _offsets(dtype=dtype), into, int(into[-1]))]


def _segments() -> Iterator[Case]:
    columns: tuple[tuple[int, ...], ...] = ((), (1,), (20,), (128,))
    floats = (*FLOATS, torch.float64)
    numbers = (*floats, *INTEGERS, torch.int16, torch.uint8)
    yield from (
        *(
            _case(
                f"moved values, {name_of(dtype)}, {name_of(index)} offsets", "jagged.segments.move",
                partial(_move, (dtype,), (), index), quick=dtype == torch.int16,
            )
            for dtype, index in (*((dtype, torch.int64) for dtype in numbers), (FLOATS[0], INTEGERS[1]))
        ),
        _case(
            "moved values, ids and weights", "jagged.segments.move",
            partial(_move, (torch.int64, torch.float32), (), INTEGERS[0]),
        ),
        *(
            _case(
                f"moved rows, {name_of(dtype)} D={dim}", "jagged.segments.locate lookup.sequence.gather",
                partial(_move, (dtype,), (dim,), INTEGERS[0]), quick=dim == 20,
            )
            for dim, dtype in (
                (20, torch.float32), (1, torch.float32), (3, torch.float16), (128, torch.bfloat16), (5, torch.int64),
            )
        ),
        *(
            _case(
                f"moved values and their gradient, {name_of(dtype)} {shape}", "jagged.segments.collect",
                partial(_both_ways, _permuted, (1,), partial(_values_and_order, shape, dtype)),
                SAME if dtype == torch.float64 else SUM, quick=shape == (20,) and dtype == torch.float16,
            )
            for shape, dtype in product(columns, floats)
        ),
        *(
            _case(
                f"sums of segments and their gradient, {name_of(dtype)} {shape}",
                "jagged.offsets.segment_sum" if shape in ((), (1,)) else "jagged.offsets.segment_rows",
                partial(_both_ways, ops.segment_sum, (1,), partial(_values_in_segments, shape, dtype)), SUM,
                quick=shape in ((), (20,)) and dtype == torch.float32,
            )
            for shape, dtype in product((*columns, (3,), (1023,)), floats)
        ),
        *(
            _case(
                f"sums of segments, {name_of(dtype)}, {name_of(index)} offsets", "jagged.offsets.segment_sum",
                partial(_both_ways, ops.segment_sum, (), partial(_values_in_segments, (), dtype, index)),
            )
            for dtype, index in product(INTEGERS, INTEGERS)
        ),
        _case(
            "sums of segments of a batch of 3", "jagged.offsets.segment_sum",
            lambda: [ops.segment_sum(_offsets(), _eighths(3 * sum(LENGTHS)), batch_size=3)], SUM,
        ),
    )  # fmt: skip


def _move(dtypes: Sequence[torch.dtype], row: tuple[int, ...], index: torch.dtype) -> Sequence[Any]:
    order = torch.tensor([5, 0, 3, 3, 6], dtype=index)
    into = _offsets([LENGTHS[i] for i in order.tolist()], index)
    values = [_eighths(sum(LENGTHS), *row, seed=k, dtype=dtype) for k, dtype in enumerate(dtypes)]
    return [*ROUTED.move_segments(values, order, _offsets(dtype=index), into, int(into[-1]))]


def _permuted(order: Tensor, values: Tensor, lengths: Tensor) -> Any:
    chosen, moved, _ = ops.permute_1d(order, lengths, values)
    return moved, chosen


def _values_and_order(row: tuple[int, ...], dtype: torch.dtype) -> Sequence[Any]:
    return torch.tensor([5, 0, 3, 3, 6, 3]), _eighths(sum(LENGTHS), *row, dtype=dtype), torch.tensor(LENGTHS)


def _values_in_segments(row: tuple[int, ...], dtype: torch.dtype, index: torch.dtype = torch.int64) -> Sequence[Any]:
    return _offsets((*LENGTHS, 100), index), _eighths(sum(LENGTHS) + 100, *row, dtype=dtype)


def _padded() -> Iterator[Case]:
    # lengths of the bags of each jagged dim, extents of the dense, columns of a value, values in no bag
    shapes: dict[str, tuple[tuple[tuple[int, ...], ...], tuple[int, ...], tuple[int, ...], int]] = {
        "rows of 20": (((3, 0, 2, 5),), (4,), (20,), 0),
        "numbers": (((3, 0, 2, 5),), (4,), (), 2),
        **{f"rows of {dim}": (((3, 0, 2, 5),), (4,), (dim,), 0) for dim in (1, 3, 4, 128, 1023)},
        "rows of 2 x 3": (((2, 1),), (2,), (2, 3), 0),
        "none cut": (((3, 0, 2, 5),), (6,), (3,), 1),
        "empty bags": (((0, 0),), (3,), (3,), 0),
        "2 jagged dims": (((2, 0, 3), (1, 2, 0, 3, 1)), (2, 2), (4,), 0),
        "2 jagged dims of numbers": (((2, 0, 3), (1, 2, 0, 3, 1)), (2, 2), (), 1),
        "3 jagged dims": (((2, 1), (1, 2, 1), (2, 1, 0, 3)), (2, 2, 2), (2,), 0),
        "5 jagged dims": (((2, 1), (1, 2, 1), (1, 1, 1, 1), (1, 0, 2, 1), (2, 1, 0, 3)), (2, 2, 1, 2, 2), (2,), 0),
        "many bags": ((tuple(LENGTHS * 20),), (9,), (4,), 0),
    }
    for words, shape in shapes.items():
        for dtype in (*FLOATS, *INTEGERS, torch.int8) if words in ("rows of 20", "numbers") else (torch.float32,):
            leaves, filled = (0,) if dtype.is_floating_point else (), words != "empty bags"
            label = f"{words}, {name_of(dtype)}"
            yield from (
                _case(
                    f"padded, {label}",
                    "jagged.padded.to_padded" + " jagged.padded.to_jagged" * bool(leaves and filled),
                    partial(_both_ways, _to_padded, leaves, partial(_padded_inputs, shape, dtype, False)),
                    quick=words == "rows of 20" and dtype == torch.float32,
                ),
                _case(
                    f"from padded, {label}", "jagged.padded.places jagged.padded.to_jagged" if filled else "",
                    partial(
                        _both_ways, ops.padded_dense_to_jagged, leaves, partial(_padded_inputs, shape, dtype, True)
                    ),
                    quick=words == "numbers" and dtype == torch.float32,
                ),
            )  # fmt: skip
    narrow = partial(_padded_inputs, shapes["rows of 4"], FLOATS[0], False, INTEGERS[1])
    yield from (
        _case("padded, int32 offsets", "jagged.padded.to_padded", partial(_both_ways, _to_padded, (0,), narrow)),
        *(
            _case(
                f"{name}, {words}, {name_of(dtype)}", "jagged.padded.to_padded",
                partial(_both_ways, partial(_with_dense, name), (0, 3), partial(_with_inputs, shapes[words], dtype)),
                SUM, quick=words == "2 jagged dims" and dtype == torch.float32 and name.endswith("mul"),
            )
            for words, dtype in product(("rows of 20", "rows of 1", "2 jagged dims", "numbers"), FLOATS)
            for name in ("jagged_dense_add", "jagged_dense_add_jagged", "jagged_dense_mul")
        ),
    )  # fmt: skip


def _padded_inputs(shape: Any, dtype: torch.dtype, dense: bool, index: torch.dtype = torch.int64) -> Sequence[Any]:
    lengths, extents, row, past = shape
    total = sum(lengths[-1]) + past
    values = _eighths(*((len(lengths[0]), *extents) if dense else (total,)), *row, dtype=dtype)
    return values, [_offsets(part, index) for part in lengths], total if dense else list(extents)


def _to_padded(values: Tensor, offsets: list[Tensor], extents: list[int]) -> Any:
    return ops.jagged_to_padded_dense(values, offsets, extents, 2.0)


def _with_inputs(shape: Any, dtype: torch.dtype) -> Sequence[Any]:
    values, offsets, extents = _padded_inputs(shape, dtype, False)
    dense, _, _ = _padded_inputs(shape, dtype, True)
    return values, offsets, extents, dense


def _with_dense(name: str, values: Tensor, offsets: list[Tensor], extents: list[int], dense: Tensor) -> Any:
    return getattr(ops, name)(values, offsets, dense)


def _products() -> Iterator[Case]:
    for (left, right), dtype in product(((20, 12), (64, 64), (3, 20), (128, 70)), FLOATS):
        label = f"M={left} K={right} {name_of(dtype)}"
        yield from (
            _case(
                f"jagged times dense, {label}", "jagged.bmm.dense_bmm jagged.bmm.jagged_bmm",
                partial(_both_ways, ops.jagged_dense_bmm, (0, 2), partial(_bmm_inputs, left, right, dtype)), PRODUCT,
                quick=left == 20,
            ),
            _case(
                f"jagged times jagged, {label}", "jagged.bmm.jagged_bmm jagged.bmm.dense_bmm",
                partial(_both_ways, ops.jagged_jagged_bmm, (0, 1), partial(_jagged_inputs, left, right, dtype)),
                PRODUCT, quick=left == 20 and dtype == torch.float16,
            ),
        )  # fmt: skip


def _bmm_inputs(left: int, right: int, dtype: torch.dtype) -> Sequence[Any]:
    lengths = (*LENGTHS, 70)
    # rows past the last offset: some of a tile of 16, and all that the next one has
    rows = _normal(sum(lengths) + 12, left, dtype=dtype)
    return rows, _offsets(lengths), _normal(len(lengths), left, right, seed=2, dtype=dtype), 60


def _jagged_inputs(left: int, right: int, dtype: torch.dtype) -> Sequence[Any]:
    rows = sum(LENGTHS)
    return _normal(rows, left, dtype=dtype), _normal(rows, right, seed=2, dtype=dtype), _offsets(), 30


def _pooling() -> Iterator[Case]:
    # a tile has 128 columns at most: of 256 loops over columns go around
    for dim, dtype in product((20, 1, 4, 32, 128, 256), FLOATS):
        quick = dim == 20 and dtype == torch.float32
        label = f"D={dim} {name_of(dtype)}"
        yield from (
            _case(
                f"softmax, {label}", "jagged.softmax.softmax jagged.softmax.softmax_gradient",
                partial(_both_ways, ops.jagged_softmax, (0,), partial(_rows_in_bags, dim, dtype)), EXPONENTIAL, quick,
            ),
            _case(
                f"vectors times bags, {label}",
                "jagged.vector_product.vector_product jagged.vector_product.by_rows jagged.vector_product.by_vectors",
                partial(_both_ways, ops.jagged_vector_product, (0, 1), partial(_vector_inputs, dim, dtype)), PRODUCT,
                quick,
            ),
        )  # fmt: skip
    yield from (
        _case(
            f"unary tables, {name_of(dtype)}, {name_of(index)} ids, {hits} a bag",
            "jagged.unary_embeddings.unary jagged.unary_embeddings.unary_chunk",
            partial(_both_ways, ops.batched_unary_embeddings, (0,), partial(_unary_inputs, dtype, index, hits)), SUM,
            quick=hits == 45,
        )
        for dtype, index, hits in (
            *((dtype, INTEGERS[0], 2) for dtype in FLOATS), (FLOATS[0], INTEGERS[1], 3), (FLOATS[0], INTEGERS[0], 45),
        )
    )  # fmt: skip


def _rows_in_bags(dim: int, dtype: torch.dtype) -> Sequence[Any]:
    return _normal(sum(LENGTHS), dim, dtype=dtype), _offsets()


def _vector_inputs(dim: int, dtype: torch.dtype) -> Sequence[Any]:
    """Two heads, each with its own half of the columns, and vectors shorter than the longest bag."""
    heads = 2
    return (
        _normal(heads * len(LENGTHS), 30, dtype=dtype),
        _normal(sum(LENGTHS), heads * dim, seed=2, dtype=dtype),
        _offsets(),
    )


def _unary_inputs(dtype: torch.dtype, index: torch.dtype, hits: int) -> Sequence[Any]:
    """Two tasks, three tables of some rows, four bags for each table."""
    rows = torch.tensor([5, 1, 9])
    ids = torch.cat([torch.randint(0, int(n), (4 * hits,), generator=_random(int(n))) for n in rows])
    weights = _eighths(2, int(rows.sum()), 1, dtype=dtype)
    return weights, _offsets(rows.tolist()), (torch.arange(13) * hits).to(index), ids.to(index)


def _selections() -> Iterator[Case]:
    for row, dtype, index in (
        ((20,), torch.float32, torch.int64), ((), torch.float32, torch.int64), ((1,), torch.float32, torch.int64),
        ((4,), torch.float16, torch.int32), ((128,), torch.bfloat16, torch.int64), ((3,), torch.float32, torch.int32),
        ((), torch.float16, torch.int32),
    ):  # fmt: skip
        label = f"{name_of(dtype)} {row or 'numbers'}, {name_of(index)} indices"
        files = "jagged.index_add.owners jagged.index_add.index_add"
        yield from (
            _case(
                f"selected bags, {label}",
                f"jagged.index_select.bags {files} jagged.index_select.{'sources' if row else 'select'}",
                partial(_both_ways, ops.jagged_index_select, (0,), partial(_select_inputs, row, dtype, index)), SUM,
                quick=row in ((), (20,)) and index == torch.int64,
            ),
            _case(
                f"added bags, {label}", files,
                partial(_both_ways, ops.jagged_index_add, (0,), partial(_add_inputs, row, dtype, index)), SUM,
            ),
        )  # fmt: skip
    yield from (
        _case(
            f"selected samples of keys, {'weighted, ' * weighted}{name_of(index)} indices",
            "jagged.index_select.bags jagged.index_select.select", partial(_keyed, weighted, index),
            quick=weighted and index == torch.int64,
        )
        for weighted, index in product((False, True), INTEGERS)
    )  # fmt: skip


def _select_inputs(row: tuple[int, ...], dtype: torch.dtype, index: torch.dtype) -> Sequence[Any]:
    values = _eighths(sum(LENGTHS), *row, dtype=dtype)
    return values, torch.tensor(LENGTHS, dtype=index), torch.tensor([3, 5, 3, 1, 0, 3], dtype=index)


def _add_inputs(row: tuple[int, ...], dtype: torch.dtype, index: torch.dtype) -> Sequence[Any]:
    into, indices = torch.tensor(LENGTHS, dtype=index), torch.tensor([3, 5, 3, 1, 0, 3], dtype=index)
    lengths = into[indices.long()]
    return _eighths(int(lengths.sum()), *row, dtype=dtype), lengths, indices, into


def _keyed(weighted: bool, index: torch.dtype) -> Sequence[Any]:
    lengths = torch.tensor([*LENGTHS, *reversed(LENGTHS)], dtype=index)
    offsets = _offsets(lengths.tolist(), index)
    values, weights = torch.arange(2 * sum(LENGTHS)), _eighths(2 * sum(LENGTHS)) if weighted else None
    parts = ops.keyed_jagged_index_select(values, lengths, offsets, torch.tensor([3, 5, 3, 0], dtype=index), 7, weights)
    return [part for part in parts if part is not None]


def _columns() -> Iterator[Case]:
    # input, first column and columns of the pieces of each output
    plans: dict[str, tuple[tuple[int, ...], tuple[tuple[tuple[int, int, int], ...], ...]]] = {
        "by 4": ((12, 8), (((1, 0, 8), (0, 4, 8)), ((0, 0, 4),))),
        "by 1": ((7, 5), (((1, 1, 3), (0, 2, 5)), ((0, 0, 1), (1, 0, 1)))),
        "a column in three places": ((16, 16), (((0, 0, 8), (1, 0, 16)), ((0, 0, 8), (0, 4, 12)), ((0, 0, 16),))),
        "10 inputs": ((4,) * 10, (tuple((i, 0, 4) for i in reversed(range(10))),)),
        "20 outputs": ((40, 8), tuple(((0, 2 * i, 2), (1, 0, 8)) for i in range(20))),
    }
    yield from (
        *(
            _case(
                f"regrouped columns, {words}, {name_of(dtype)}", "jagged.regroup.regroup",
                partial(
                    _both_ways, partial(_regrouped, pieces), tuple(range(len(widths))),
                    partial(_column_inputs, widths, dtype),
                ),
                SUM, quick=words == "a column in three places" and dtype == torch.float32,
            )
            for words, (widths, pieces) in plans.items()
            for dtype in (*FLOATS, torch.float64)
        ),
        _case(
            "tables in another order", "jagged.regroup.regroup",
            partial(
                _both_ways, lambda pooled: ops.permute_pooled(pooled, [8, 3, 12], [2, 0, 1, 0]), (0,),
                lambda: [_eighths(9, 23)],
            ), SUM,
        ),
    )  # fmt: skip


def _column_inputs(widths: Sequence[int], dtype: torch.dtype) -> Sequence[Any]:
    return [_eighths(9, width, seed=k, dtype=dtype) for k, width in enumerate(widths)]


def _regrouped(pieces: Any, *tensors: Tensor) -> Any:
    # all outputs side by side, so that all of them have a gradient
    return torch.cat(ops.regroup(tensors, pieces), 1)

"""The jagged ops that are compared with FBGEMM's: a call for each library.

FBGEMM has no CPU op for the keyed index select and for unique ids, and no gradient of batched_unary_embeddings there.

Shapes: F keys, B bags of each; lengths [F * B], values [N], rows of floats [N, D]; M is the longest bag.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from .inputs import (
    IDS,
    batch,
    columns,
    dims,
    rows_of,
)
from .operation import Operation, Size

# columns of rows, and of both sides of a product
D, NARROW = 64, 16
# the longest bag, buckets, rows of a unary table, bins of the calibration
M, BUCKETS, UNARY, BINS = 6, 8, 1000, 5000
# sums of some floats in another order, in units of the largest
TOLERANCE = 1e-5

Inputs = Callable[[Size], Sequence[Any]]
Call = Callable[..., Any]


def _op(
    name: str,
    inputs: Inputs,
    theirs: Call,
    ours: Call,
    *,
    leaves: Sequence[int] = (),
    fits: Callable[[Size], bool] | None = None,
    tolerance: float = TOLERANCE,
) -> Iterator[Operation]:
    """The forward; and forward and backward together, where inputs at `leaves` have gradients."""
    more: dict[str, Any] = {"tolerance": tolerance} | ({} if fits is None else {"fits": fits})

    def call(lib: Any, state: Sequence[Any]) -> Any:
        return (theirs if lib.peer else ours)(lib, *state)

    yield Operation(name, lambda lib, size: inputs(size), call, read=_parts, **more)
    if not leaves:
        return

    def make(lib: Any, size: Size) -> Any:
        return [x.detach().requires_grad_() if i in leaves else x for i, x in enumerate(inputs(size))]

    def both_ways(lib: Any, state: Sequence[Any]) -> Any:
        out = _parts(call(lib, state))[0]
        return torch.autograd.grad(out, [state[i] for i in leaves], out.detach())

    yield Operation(f"{name}, forward and backward", make, both_ways, **more)


def _parts(result: Any) -> list[Any]:
    """The tensors of a result without those that are not there, and without lists of offsets handed back."""
    parts = result if isinstance(result, (tuple, list)) else [result]
    return [part for part in parts if isinstance(part, Tensor)]


def _first(result: Any) -> Any:
    """What an op computed, when it hands its offsets back too."""
    return result[0] if isinstance(result, (tuple, list)) else result


def _rows_fit(size: Size) -> bool:
    return size.keys * size.batch <= 26 * 8192


def _random(*shape: int, seed: int = 4) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@lru_cache(maxsize=2)
def _order(n: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(5)).int()


@lru_cache(maxsize=2)
def _chosen(n: int, below: int) -> Tensor:
    return torch.randint(0, below, (n,), generator=torch.Generator().manual_seed(6))


@lru_cache(maxsize=2)
def _per_key(size: Size) -> tuple[Tensor, Tensor, int]:
    """Offsets of the keys' ids before and after the keys were reordered, and the number of ids."""
    counts = batch(size).lengths.view(*size).sum(1)
    zero = counts.new_zeros(1)
    after = torch.cat([zero, counts[_order(size.keys).long()].cumsum(0)])
    # FBGEMM wants the dtype of the order
    return torch.cat([zero, counts.cumsum(0)]).int(), after.int(), int(counts.sum())


@lru_cache(maxsize=2)
def _padded(size: Size, dim: int) -> Tensor:
    return _random(size.keys * size.batch, M, dim)


@lru_cache(maxsize=2)
def _nested(size: Size) -> tuple[Tensor, list[Tensor], list[int]]:
    """Rows in bags in lists of bags, both sizes' offsets, and the longest of each."""
    b, bags = batch(size), size.keys * size.batch
    cuts = torch.cat([_chosen(bags // 2 - 1, bags + 1).sort().values, torch.tensor([bags])])
    outer = torch.cat([torch.zeros(1, dtype=torch.int64), cuts])
    return rows_of(size), [outer, b.offsets], [int(outer.diff().max()), M]


def _orders() -> Iterator[Operation]:
    yield from _op(
        "complete_cumsum", lambda size: [batch(size).lengths],
        lambda k, *a: k.asynchronous_complete_cumsum(*a), lambda k, *a: k.complete_cumsum(*a),
    )  # fmt: skip
    for words, weighted in (("", False), (", weighted", True)):

        def keyed(size: Size, weighted: bool = weighted) -> list[Any]:
            b = batch(size)
            return [_order(size.keys), b.lengths.view(*size), b.values, b.weights if weighted else None]

        def flat(size: Size, weighted: bool = weighted) -> list[Any]:
            b = batch(size)
            return [_order(len(b.lengths)), b.lengths, b.values, b.weights if weighted else None]

        yield from _op(
            f"permute_2d{words}", keyed,
            lambda k, *a: k.permute_2D_sparse_data(*a), lambda k, *a: k.permute_2d(*a),
        )  # fmt: skip
        yield from _op(
            f"permute_1d{words}", flat,
            lambda k, *a: k.permute_1D_sparse_data(*a), lambda k, *a: k.permute_1d(*a),
        )  # fmt: skip
    yield from _op(
        "expand_into_jagged_permute", lambda size: [_order(size.keys), *_per_key(size)],
        lambda k, *a: k.expand_into_jagged_permute(*a), lambda k, *a: k.expand_into_jagged_permute(*a),
    )  # fmt: skip
    yield from _op(
        "invert_permute", lambda size: [_order(size.keys * size.batch)],
        lambda k, *a: k.invert_permute(*a), lambda k, *a: k.invert_permute(*a),
    )  # fmt: skip
    yield from _op(
        "segment_sum", lambda size: [torch.arange(size.keys + 1) * size.batch, batch(size).lengths],
        lambda k, *a: k.segment_sum_csr(1, *a), lambda k, *a: k.segment_sum(*a, batch_size=1),
    )  # fmt: skip
    yield from _op(
        "offsets_range", lambda size: [batch(size).offsets[:-1], len(batch(size).values)],
        lambda k, *a: k.offsets_range(*a), lambda k, *a: k.offsets_range(*a),
    )  # fmt: skip


def _buckets() -> Iterator[Operation]:
    for words, weighted, positions, sequence, variable in (
        ("", False, False, False, False),
        (", sequence", False, False, True, False),
        (", weighted, positions", True, True, False, False),
        (", weighted, positions, sequence", True, True, True, False),
        (", variable, sequence", False, False, True, True),
    ):

        def inputs(size: Size, weighted: bool = weighted, variable: bool = variable) -> list[Any]:
            b = batch(size, variable=variable)
            blocks = torch.full((size.keys,), -(-IDS // BUCKETS))
            sizes = torch.tensor(b.bags) if variable else None
            return [b.lengths, b.values, blocks, b.weights if weighted else None, sizes, max(b.bags)]

        def theirs(
            k: Any, lengths: Any, ids: Any, blocks: Any, weights: Any, sizes: Any, most: int,
            positions: bool = positions, sequence: bool = sequence,
        ) -> Any:  # fmt: skip
            longest = -1 if sizes is None else most
            return k.block_bucketize_sparse_features(
                lengths, ids, positions, sequence, blocks, BUCKETS, weights, sizes, longest
            )

        def ours(
            k: Any, lengths: Any, ids: Any, blocks: Any, weights: Any, sizes: Any, most: int,
            positions: bool = positions, sequence: bool = sequence,
        ) -> Any:  # fmt: skip
            return k.block_bucketize(
                lengths, ids, blocks, BUCKETS,
                weights=weights, batch_sizes=sizes, bucketize_pos=positions, sequence=sequence,
            )  # fmt: skip

        yield from _op(f"block_bucketize{words}", inputs, theirs, ours)


def _padding() -> Iterator[Operation]:
    yield from _op(
        "jagged_to_padded_dense, ids", lambda size: [batch(size).values, [batch(size).offsets], [M], -1.0],
        lambda k, *a: k.jagged_to_padded_dense(*a), lambda k, *a: k.jagged_to_padded_dense(*a),
    )  # fmt: skip
    yield from _op(
        "jagged_to_padded_dense, rows", lambda size: [rows_of(size, D), [batch(size).offsets], [M], 0.5],
        lambda k, *a: k.jagged_to_padded_dense(*a), lambda k, *a: k.jagged_to_padded_dense(*a),
        leaves=[0], fits=_rows_fit,
    )  # fmt: skip
    yield from _op(
        "jagged_to_padded_dense, bags of bags", lambda size: [*_nested(size), 0.0],
        lambda k, *a: k.jagged_to_padded_dense(*a), lambda k, *a: k.jagged_to_padded_dense(*a),
        leaves=[0], fits=lambda size: size.keys * size.batch <= 856 * 64,
    )  # fmt: skip
    yield from _op(
        "padded_dense_to_jagged", lambda size: [_padded(size, D), [batch(size).offsets]],
        lambda k, *a: k.dense_to_jagged(*a)[0], lambda k, *a: _first(k.padded_dense_to_jagged(*a)),
        leaves=[0], fits=_rows_fit,
    )  # fmt: skip
    yield from _op(
        "pack_segments", lambda size: [rows_of(size, D), batch(size).lengths, M],
        lambda k, *a: k.pack_segments(*a), lambda k, *a: k.pack_segments(*a), leaves=[0], fits=_rows_fit,
    )  # fmt: skip


def _dense() -> Iterator[Operation]:
    def inputs(size: Size) -> list[Any]:
        return [rows_of(size, D), [batch(size).offsets], _padded(size, D)]

    yield from _op(
        "jagged_dense_add", inputs, lambda k, *a: k.jagged_dense_elementwise_add(*a),
        lambda k, *a: k.jagged_dense_add(*a), leaves=[0, 2], fits=_rows_fit,
    )  # fmt: skip
    yield from _op(
        "jagged_dense_add_jagged", inputs, lambda k, *a: k.jagged_dense_elementwise_add_jagged_output(*a)[0],
        lambda k, *a: _first(k.jagged_dense_add_jagged(*a)), leaves=[0, 2], fits=_rows_fit,
    )  # fmt: skip
    yield from _op(
        "jagged_dense_mul", inputs, lambda k, *a: k.jagged_dense_elementwise_mul(*a)[0],
        lambda k, *a: _first(k.jagged_dense_mul(*a)), leaves=[0, 2], fits=_rows_fit,
    )  # fmt: skip


def _products() -> Iterator[Operation]:
    yield from _op(
        "jagged_dense_bmm",
        lambda size: [rows_of(size), batch(size).offsets, _random_for(size, NARROW, NARROW), M],
        lambda k, *a: k.jagged_dense_bmm(*a)[0], lambda k, *a: _first(k.jagged_dense_bmm(*a)),
        leaves=[0, 2], fits=_rows_fit,
    )  # fmt: skip
    yield from _op(
        "jagged_jagged_bmm",
        lambda size: [rows_of(size), rows_of(size).flip(1), batch(size).offsets, M],
        lambda k, *a: k.jagged_jagged_bmm(*a), lambda k, *a: _first(k.jagged_jagged_bmm(*a)),
        leaves=[0, 1], fits=_rows_fit,
    )  # fmt: skip
    yield from _op(
        "jagged_softmax", lambda size: [rows_of(size, D), batch(size).offsets, M],
        lambda k, *a: k.jagged_softmax(*a)[0], lambda k, *a: _first(k.jagged_softmax(*a)),
        leaves=[0], fits=_rows_fit,
    )  # fmt: skip
    # 4 vectors a bag, each with its quarter of the columns
    yield from _op(
        "jagged_vector_product",
        lambda size: [_random_for(size, 4, M).view(-1, M), rows_of(size, D), batch(size).offsets],
        lambda k, *a: k.batched_dense_vec_jagged_2d_mul(*a), lambda k, *a: _first(k.jagged_vector_product(*a)),
        leaves=[0, 1], fits=_rows_fit,
    )  # fmt: skip


@lru_cache(maxsize=2)
def _random_for(size: Size, *shape: int) -> Tensor:
    return _random(size.keys * size.batch, *shape)


@lru_cache(maxsize=2)
def _unary(size: Size) -> list[Any]:
    """Weights of two tasks, where each key's table begins, and the batch."""
    b = batch(size)
    return [_random(2, UNARY * size.keys, 1), torch.arange(size.keys + 1) * UNARY, b.offsets, b.values % UNARY]


@lru_cache(maxsize=2)
def _pooled(size: Size) -> list[Any]:
    """Values, widths of their keys, the reversed order, and what FBGEMM asks for besides."""
    widths, order = dims(size), list(range(size.keys))[::-1]
    lists = [torch.tensor([0, *widths]).cumsum(0), torch.tensor(order)]
    inverse = [torch.tensor([0, *widths[::-1]]).cumsum(0), torch.tensor(order)]
    return [columns(size, 0), widths, order, lists, inverse]


def _selections() -> Iterator[Operation]:
    def select(size: Size) -> list[Any]:
        bags = size.keys * size.batch
        return [rows_of(size, D), batch(size).lengths, _chosen(bags, bags)]

    yield from _op(
        "jagged_index_select", select, lambda k, *a: k.jagged_index_select(*a),
        lambda k, *a: k.jagged_index_select(*a), leaves=[0], fits=_rows_fit,
    )  # fmt: skip

    yield from _op(
        "permute_pooled", _pooled,
        lambda k, pooled, widths, order, lists, inverse: k.permute_pooled_embs_auto_grad(pooled, *lists, *inverse),
        lambda k, pooled, widths, order, lists, inverse: k.permute_pooled(pooled, widths, order), leaves=[0],
    )  # fmt: skip
    yield from _op(
        "batched_unary_embeddings", _unary, lambda k, *a: k.batched_unary_embeddings(*a),
        lambda k, *a: k.batched_unary_embeddings(*a),
    )  # fmt: skip

    numbers = {
        "positive_weight": 0.4, "lower_bound": 0.0, "upper_bound": 1.0, "bin_ctr_in_use_after": 6000,
        "bin_ctr_weight_value": 0.9995,
    }  # fmt: skip

    def bins(size: Size) -> list[Any]:
        positives = torch.arange(BINS, dtype=torch.float64)
        return [_random_for(size), positives * 3, positives]

    yield from _op(
        "histogram_binning_calibration", bins,
        lambda k, *a: k.histogram_binning_calibration(*a, **numbers),
        lambda k, *a: k.histogram_binning_calibration(*a, **numbers),
    )  # fmt: skip


OPERATIONS = [*_orders(), *_buckets(), *_padding(), *_dense(), *_products(), *_selections()]

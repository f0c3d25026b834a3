"""The jagged ops that are compared with FBGEMM's: a call for each library.

FBGEMM has no CPU op for the keyed index select and for unique ids, and no gradient of batched_unary_embeddings there.

Shapes: F keys, B bags of each; lengths [F * B], values [N], rows of floats [N, D]; M is the longest bag.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
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
# an op by its name, or a call of it with what it wants besides the inputs
Call = str | Callable[..., Any]


def _op(
    name: str,
    inputs: Inputs,
    of_fbgemm: Call = "",
    of_shardwise: Call = "",
    *,
    leaves: Sequence[int] = (),
    fits: Callable[[Size], bool] | None = None,
    first: bool = False,
    tolerance: float = TOLERANCE,
) -> Iterator[Operation]:
    """The forward; and forward and backward together, where inputs at `leaves` have gradients.

    The name begins with the op's where a library's call is not given; of what hands its offsets back, `first` is kept.
    """
    more: dict[str, Any] = {"tolerance": tolerance} | ({} if fits is None else {"fits": fits})

    def call(lib: Any, state: Sequence[Any]) -> Any:
        how = (of_fbgemm if lib.peer else of_shardwise) or name.split(",")[0]
        result = getattr(lib, how)(*state) if isinstance(how, str) else how(lib, *state)
        return result[0] if first and isinstance(result, (tuple, list)) else result

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


def _rows_fit(size: Size) -> bool:
    return size.keys * size.batch <= 26 * 8192


@lru_cache(maxsize=2)
def _random(size: Size, *shape: int) -> Tensor:
    """For each bag."""
    return torch.randn(size.keys * size.batch, *shape, generator=torch.Generator().manual_seed(4))


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
def _nested(size: Size) -> tuple[Tensor, list[Tensor], list[int]]:
    """Rows in bags in lists of bags, both sizes' offsets, and the longest of each."""
    b, bags = batch(size), size.keys * size.batch
    cuts = torch.cat([_chosen(bags // 2 - 1, bags + 1).sort().values, torch.tensor([bags])])
    outer = torch.cat([torch.zeros(1, dtype=torch.int64), cuts])
    return rows_of(size), [outer, b.offsets], [int(outer.diff().max()), M]


def _segments(size: Size, flat: bool, weighted: bool) -> list[Any]:
    """An order of the keys, or of all bags, with lengths, ids and weights."""
    b = batch(size)
    lengths = b.lengths if flat else b.lengths.view(*size)
    return [_order(len(lengths)), lengths, b.values, b.weights if weighted else None]


def _buckets(words: str) -> Iterator[Operation]:
    """Operations of a bucketize op; the words of its name say which arguments it gets."""
    weighted, positions, sequence, variable = (
        option in words for option in ("weighted", "positions", "sequence", "variable")
    )

    def inputs(size: Size) -> list[Any]:
        b = batch(size, variable=variable)
        blocks = torch.full((size.keys,), -(-IDS // BUCKETS))
        sizes = torch.tensor(b.bags) if variable else None
        return [b.lengths, b.values, blocks, b.weights if weighted else None, sizes, max(b.bags)]

    def of_fbgemm(k: Any, lengths: Any, ids: Any, blocks: Any, weights: Any, sizes: Any, most: int) -> Any:
        longest = -1 if sizes is None else most
        return k.block_bucketize_sparse_features(
            lengths, ids, positions, sequence, blocks, BUCKETS, weights, sizes, longest
        )

    def of_shardwise(k: Any, lengths: Any, ids: Any, blocks: Any, weights: Any, sizes: Any, most: int) -> Any:
        return k.block_bucketize(
            lengths, ids, blocks, BUCKETS,
            weights=weights, batch_sizes=sizes, bucketize_pos=positions, sequence=sequence,
        )  # fmt: skip

    return _op(f"block_bucketize{words}", inputs, of_fbgemm, of_shardwise)


def _with_dense(size: Size) -> list[Any]:
    return [rows_of(size, D), [batch(size).offsets], _random(size, M, D)]


@lru_cache(maxsize=2)
def _unary(size: Size) -> list[Any]:
    """Weights of two tasks, where each key's table begins, and the batch."""
    b = batch(size)
    weights = torch.randn(2, UNARY * size.keys, 1, generator=torch.Generator().manual_seed(4))
    return [weights, torch.arange(size.keys + 1) * UNARY, b.offsets, b.values % UNARY]


@lru_cache(maxsize=2)
def _pooled(size: Size) -> list[Any]:
    """Values, widths of their keys, the reversed order, and what FBGEMM asks for besides."""
    widths, order = dims(size), list(range(size.keys))[::-1]
    lists = [torch.tensor([0, *widths]).cumsum(0), torch.tensor(order)]
    inverse = [torch.tensor([0, *widths[::-1]]).cumsum(0), torch.tensor(order)]
    return [columns(size, 0), widths, order, lists, inverse]


def _selected(size: Size) -> list[Any]:
    bags = size.keys * size.batch
    return [rows_of(size, D), batch(size).lengths, _chosen(bags, bags)]


def _bins(size: Size) -> list[Any]:
    """Logits, and the examples of each bin; and the numbers of the calibration."""
    positives = torch.arange(BINS, dtype=torch.float64)
    return [_random(size), positives * 3, positives]


def _calibrate(k: Any, *inputs: Any) -> Any:
    return k.histogram_binning_calibration(
        *inputs, positive_weight=0.4, lower_bound=0.0, upper_bound=1.0, bin_ctr_in_use_after=6000,
        bin_ctr_weight_value=0.9995,
    )  # fmt: skip


OPERATIONS: list[Operation] = [
    *_op("complete_cumsum", lambda size: [batch(size).lengths], "asynchronous_complete_cumsum"),
    *(
        operation
        for words, weighted in (("", False), (", weighted", True))
        for op, flat in (("permute_2d", False), ("permute_1d", True))
        for operation in _op(
            f"{op}{words}", partial(_segments, flat=flat, weighted=weighted),
            "permute_1D_sparse_data" if flat else "permute_2D_sparse_data",
        )
    ),
    *_op("expand_into_jagged_permute", lambda size: [_order(size.keys), *_per_key(size)]),
    *_op("invert_permute", lambda size: [_order(size.keys * size.batch)]),
    *_op(
        "segment_sum", lambda size: [torch.arange(size.keys + 1) * size.batch, batch(size).lengths],
        lambda k, *a: k.segment_sum_csr(1, *a), lambda k, *a: k.segment_sum(*a, batch_size=1),
    ),
    *_op("offsets_range", lambda size: [batch(size).offsets[:-1], len(batch(size).values)]),
    *_buckets(""), *_buckets(", sequence"), *_buckets(", weighted, positions"),
    *_buckets(", weighted, positions, sequence"), *_buckets(", variable, sequence"),
    *_op("jagged_to_padded_dense, ids", lambda size: [batch(size).values, [batch(size).offsets], [M], -1.0]),
    *_op(
        "jagged_to_padded_dense, rows", lambda size: [rows_of(size, D), [batch(size).offsets], [M], 0.5],
        leaves=[0], fits=_rows_fit,
    ),
    *_op(
        "jagged_to_padded_dense, bags of bags", lambda size: [*_nested(size), 0.0],
        leaves=[0], fits=lambda size: size.keys * size.batch <= 856 * 64,
    ),
    *_op(
        "padded_dense_to_jagged", lambda size: [_random(size, M, D), [batch(size).offsets]], "dense_to_jagged",
        leaves=[0], fits=_rows_fit, first=True,
    ),
    *_op("pack_segments", lambda size: [rows_of(size, D), batch(size).lengths, M], leaves=[0], fits=_rows_fit),
    *_op("jagged_dense_add", _with_dense, "jagged_dense_elementwise_add", leaves=[0, 2], fits=_rows_fit),
    *_op(
        "jagged_dense_add_jagged", _with_dense, "jagged_dense_elementwise_add_jagged_output",
        leaves=[0, 2], fits=_rows_fit, first=True,
    ),
    *_op(
        "jagged_dense_mul", _with_dense, "jagged_dense_elementwise_mul", leaves=[0, 2], fits=_rows_fit, first=True
    ),
    *_op(
        "jagged_dense_bmm", lambda size: [rows_of(size), batch(size).offsets, _random(size, NARROW, NARROW), M],
        leaves=[0, 2], fits=_rows_fit, first=True,
    ),
    *_op(
        "jagged_jagged_bmm", lambda size: [rows_of(size), rows_of(size).flip(1), batch(size).offsets, M],
        leaves=[0, 1], fits=_rows_fit, first=True,
    ),
    *_op(
        "jagged_softmax", lambda size: [rows_of(size, D), batch(size).offsets, M],
        leaves=[0], fits=_rows_fit, first=True,
    ),
    # 4 vectors a bag, each with its quarter of the columns
    *_op(
        "jagged_vector_product",
        lambda size: [_random(size, 4, M).view(-1, M), rows_of(size, D), batch(size).offsets],
        "batched_dense_vec_jagged_2d_mul", leaves=[0, 1], fits=_rows_fit, first=True,
    ),
    *_op("jagged_index_select", _selected, leaves=[0], fits=_rows_fit),
    *_op(
        "permute_pooled", _pooled,
        lambda k, pooled, widths, order, lists, inverse: k.permute_pooled_embs_auto_grad(pooled, *lists, *inverse),
        lambda k, pooled, widths, order, lists, inverse: k.permute_pooled(pooled, widths, order), leaves=[0],
    ),
    *_op("batched_unary_embeddings", _unary),
    *_op("histogram_binning_calibration", _bins, _calibrate, _calibrate),
]  # fmt: skip

"""Calls of ops that divide ids among buckets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .draw import Call, Draw, calls


class _Batch:
    """Ids of some features, and the optional arguments of their division, as FBGEMM takes them: dtypes alike."""

    def __init__(self, draw: Draw) -> None:
        features, self.buckets = draw.between(1, 4), draw.between(1, 4)
        self.bag_dtype, self.dtype = draw.index_dtype(), draw.index_dtype()
        self.batch_sizes: Tensor | None = None
        if draw.coin(0.3):
            self.batch_sizes = draw.ints(features, 0, 3, self.bag_dtype)
            bags = int(self.batch_sizes.sum())
        else:
            bags = features * draw.between(1, 3)
        self.lengths = draw.lengths(bags, dtype=self.bag_dtype)
        self.size = int(self.lengths.sum())
        self.block_sizes = draw.ints(features, 1, 6, self.dtype)
        self.totals: Tensor | None = None
        if draw.coin(0.25):
            self.totals = self.buckets * draw.ints(features, 1, 3, self.dtype)
        self.borders: list[Tensor] | None = None
        if draw.coin(0.25):
            ends = [torch.cumsum(draw.ints(self.buckets, 0, 5), 0) for _ in range(features)]
            self.borders = [
                torch.tensor([0, *(end + end[-1:].clamp(max=0)).tolist()], dtype=self.dtype) for end in ends
            ]
        if draw.coin(0.25):
            raw = draw.ints(features, 0, 1, self.dtype)
            self.block_sizes = self.block_sizes * raw
        largest = 24 if draw.coin(0.8) else 2**31 - 1
        self.ids = draw.ints(self.size, -(2**31) if draw.coin(0.15) else 0, largest, self.dtype)
        if self.dtype == torch.int64 and draw.coin(0.1):
            self.ids = draw.ints(self.size, -(2**62), 2**62)
        self.keep = draw.coin(0.2)
        self.keep_per_feature = draw.ints(features, 0, 1).bool() if draw.coin(0.2) else None

    def options(self, draw: Draw, *before_keep: Any) -> list[Any]:
        """Arguments from `batch_size_per_feature` on."""
        return [
            self.batch_sizes,
            -1 if self.batch_sizes is None else int(self.batch_sizes.max()),
            [draw.layout(each) for each in self.borders] if self.borders is not None else draw.choice((None, [])),
            *before_keep,
            self.keep,
            None if self.totals is None else draw.layout(self.totals),
            self.keep_per_feature,
        ]


def _weights(draw: Draw, size: int, dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)) -> Tensor | None:
    return draw.layout(draw.floats(size, draw.choice(dtypes))) if draw.coin() else None


@calls("block_bucketize_sparse_features", "block_bucketize_sparse_features_inference")
def _block_bucketize(draw: Draw) -> Call:
    batch = _Batch(draw)
    args = [draw.layout(batch.lengths), draw.layout(batch.ids), draw.coin(), draw.coin(), batch.block_sizes]
    args += [batch.buckets, _weights(draw, batch.size)]
    if draw.op == "block_bucketize_sparse_features":
        return Call(args + batch.options(draw), packed=True)
    mapping = draw.coin()
    # it does not write the mapping without `sequence`
    defined = None if args[3] or not mapping else lambda outputs: outputs[:-1]
    return Call(args + batch.options(draw, mapping), packed=True, compared=defined)


@calls("block_bucketize_sparse_features_2d_weights")
def _weights_2d(draw: Draw) -> Call:
    batch, dim = _Batch(draw), draw.between(1, 3)
    dtype = draw.choice((torch.float32, torch.float32, torch.float64, torch.float16, torch.bfloat16))
    weights = draw.layout(draw.floats((batch.size, dim), dtype))
    args = [draw.layout(batch.lengths), draw.layout(batch.ids), draw.coin(), draw.coin(), batch.block_sizes]
    return Call([*args, batch.buckets, weights, dim, *batch.options(draw)], packed=True)


@calls("bucketize_sparse_features")
def _bucketize(draw: Draw) -> Call:
    lengths = draw.lengths(draw.below(8), dtype=draw.index_dtype())
    size = int(lengths.sum())
    low = -(2**31) if draw.coin(0.2) else 0
    ids = draw.ints(size, low, draw.choice((24, 2**31 - 1)), lengths.dtype)
    args = [draw.layout(lengths), draw.layout(ids), draw.coin(), draw.between(1, 5)]
    return Call([*args, _weights(draw, size, (torch.float32,))] if draw.coin() else args, packed=True)


@calls("populate_bucketized_permute")
def _populate(draw: Draw) -> Call:
    buckets = draw.between(1, 4)
    lengths = draw.lengths(draw.between(1, 8), dtype=draw.index_dtype())
    size, bags = int(lengths.sum()), len(lengths)
    mapping = draw.ints(size, 0, buckets - 1, draw.index_dtype())
    run = mapping.long() * bags + torch.arange(bags).repeat_interleave(lengths.long())
    counts = torch.bincount(run, minlength=buckets * bags).to(lengths.dtype)
    return Call([draw.layout(lengths), draw.layout(counts), draw.layout(mapping)])

"""Ragged rows in padded storage: what a `KeyedJaggedTensorPool` keeps, and how it goes in and out.

Shapes: n rows of F features, L = the sum of the features' longest lengths, P rows of a pool.
A row's values lie one feature after another without gaps, and zeros behind them: that is how TorchRec stores them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.errors import RefusedTypeError, RefusedValueError
from shardwise.jagged import KeyedJaggedTensor

from .object_pool import deterministic_dedup, require_device


@dataclass(frozen=True)
class PaddedRows:
    """Rows of a pool: values [P, L], key_lengths [P, F] int32, weights [P, L] fp32 or None."""

    values: Tensor
    key_lengths: Tensor
    weights: Tensor | None


class KeepsPaddedRows:
    """What a pool says of the padded rows that it has as buffers, all of them or a block."""

    values: Tensor
    key_lengths: Tensor
    weights: Tensor
    _feature_max_lengths: dict[str, int]
    _is_weighted: bool

    @property
    def feature_max_lengths(self) -> dict[str, int]:
        """How many values a row may have, by feature."""
        return self._feature_max_lengths

    @property
    def values_dtype(self) -> torch.dtype:
        """That of the values."""
        return self.values.dtype

    @property
    def is_weighted(self) -> bool:
        """Whether values have weights."""
        return self._is_weighted

    @property
    def _rows(self) -> PaddedRows:
        return PaddedRows(self.values, self.key_lengths, self.weights if self._is_weighted else None)


@dataclass(frozen=True)
class RaggedRows:
    """Rows without padding: lengths [n, F], values [sum], weights [sum] or None, row by row."""

    lengths: Tensor
    values: Tensor
    weights: Tensor | None


def pick_segments(flat: Tensor, starts: Tensor, lengths: Tensor) -> Tensor:
    """`flat[starts[i] : starts[i] + lengths[i]]` of each i, one after another."""
    ends = lengths.cumsum(0)
    # host sync on CUDA: how many values there are
    shifts = torch.repeat_interleave(starts - (ends - lengths), lengths)
    return flat[shifts + torch.arange(shifts.shape[0], device=flat.device)]


def _starts(lengths: Tensor) -> Tensor:
    """Where each segment begins [m] of lengths [m]."""
    return lengths.cumsum(0) - lengths


def read_padded(pool: PaddedRows, ids: Tensor) -> RaggedRows:
    """The rows of `ids` [n]."""
    rows = ids.long()
    lengths = pool.key_lengths[rows]  # [n, F]
    sizes = lengths.sum(1, dtype=torch.int64)
    starts = rows * pool.values.shape[1]
    values = pick_segments(pool.values.view(-1), starts, sizes)
    weights = None if pool.weights is None else pick_segments(pool.weights.view(-1), starts, sizes)
    return RaggedRows(lengths, values, weights)


def write_padded(pool: PaddedRows, ids: Tensor, rows: RaggedRows) -> None:
    """Overwrite the rows of `ids` [n]; the last one of an id stays."""
    unique, last = deterministic_dedup(ids)
    rows = select_rows(rows, last)
    unique = unique.long()
    width = pool.values.shape[1]
    full = torch.arange(width, device=unique.device) < rows.lengths.sum(1, keepdim=True)  # [m, L]
    pairs = [(pool.values, rows.values), (pool.weights, rows.weights)]
    for stored, given in pairs:
        if stored is not None and given is not None:
            padded = torch.zeros(unique.shape[0], width, dtype=stored.dtype, device=stored.device)
            padded[full] = given
            stored[unique] = padded
    pool.key_lengths[unique] = rows.lengths.to(pool.key_lengths.dtype)


def select_rows(rows: RaggedRows, order: Tensor) -> RaggedRows:
    """Rows `order` [m] of ragged ones."""
    sizes = rows.lengths.sum(1, dtype=torch.int64)
    starts, sizes = _starts(sizes)[order], sizes[order]
    values, weights = (t if t is None else pick_segments(t, starts, sizes) for t in (rows.values, rows.weights))
    assert values is not None
    return RaggedRows(rows.lengths[order], values, weights)


def to_keyed(rows: RaggedRows, keys: list[str]) -> KeyedJaggedTensor:
    """Ragged rows as a batch of n: all of the first feature, then all of the second."""
    segments = rows.lengths.long()  # [n, F]
    starts = _starts(segments.flatten()).view_as(segments).t().flatten()
    lengths = segments.t().flatten()
    values, weights = (t if t is None else pick_segments(t, starts, lengths) for t in (rows.values, rows.weights))
    assert values is not None
    return KeyedJaggedTensor(keys, values, weights, lengths.to(rows.lengths.dtype), stride=segments.shape[0])


def row_major(
    batch: KeyedJaggedTensor,
    ids: Tensor,
    feature_max_lengths: Mapping[str, int],
    values_dtype: torch.dtype,
    is_weighted: bool,
    device: torch.device,
) -> RaggedRows:
    """A batch of n as the rows of `ids` [n], in the order of `feature_max_lengths`; other keys are left out.

    Raises:
        RefusedTypeError: no KeyedJaggedTensor, or values or weights of another dtype.
        RefusedValueError: a feature is missing or too long, a weighted pool gets no weights, the batch has not a row
            for each id, or lies on another device.
    """
    if not isinstance(batch, KeyedJaggedTensor):
        raise RefusedTypeError(f"values of a KeyedJaggedTensorPool are a KeyedJaggedTensor, got {type(batch).__name__}")
    keys = batch.keys()
    missing = [key for key in feature_max_lengths if key not in keys]
    if missing:
        raise RefusedValueError(f"values lack {missing}: the pool has {list(feature_max_lengths)}, they have {keys}")
    if batch.variable_stride_per_key() or batch.stride() != ids.shape[0]:
        strides = batch.stride_per_key()
        raise RefusedValueError(f"values must have a row for each of {ids.shape[0]} ids, got {strides} rows by key")
    kept = batch.permute([keys.index(key) for key in feature_max_lengths])
    values, weights = kept.values(), kept.weights_or_none() if is_weighted else None
    require_device("values", values, device)
    if values.dtype is not values_dtype:
        raise RefusedTypeError(f"values of {values.dtype}, the pool has values of {values_dtype}")
    if is_weighted and (weights is None or weights.dtype is not torch.float32):
        got = "none" if weights is None else weights.dtype
        raise RefusedTypeError(f"a weighted pool needs weights of torch.float32, got {got}")
    lengths = kept.lengths().view(len(feature_max_lengths), -1)  # [F, n]
    limits = torch.tensor(list(feature_max_lengths.values()), device="cpu").to(device)
    # host sync on CUDA: a longer one would run into the next row
    if bool((lengths > limits[:, None]).any()):
        key, limit, longest = next(
            (key, limit, longest)
            for (key, limit), longest in zip(feature_max_lengths.items(), lengths.amax(1).tolist(), strict=True)
            if longest > limit
        )
        raise RefusedValueError(
            f"input KJT has a feature that exceeds specified max lengths: {key!r} has {longest} values in a row, the"
            f" pool keeps {limit}; cut them before"
        )
    segments = lengths.long()
    starts = _starts(segments.flatten()).view_as(segments).t().flatten()
    by_row = segments.t().flatten()
    return RaggedRows(
        lengths.t().to(torch.int32),
        pick_segments(values, starts, by_row),
        None if weights is None else pick_segments(weights, starts, by_row),
    )

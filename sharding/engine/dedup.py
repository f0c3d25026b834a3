"""Each id of a batch travels once: the rows that come back are repeated here, their gradients added here first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.embeddings.tables.variable_batch import select_rows
from shardwise.jagged import KeyedJaggedTensor
from shardwise.kernels import jagged_unique

from .owner import Batch


def dedup_ids(given: KeyedJaggedTensor, padded: KeyedJaggedTensor, used: Sequence[int], rows: Sequence[int]) -> Batch:
    """The keys `used` of a batch with each id once a key, as one bag; `rows` of the table of each of them."""
    picked = padded if len(used) == len(padded.keys()) else padded.permute(list(used))
    values = picked.values()[: sum(picked.length_per_key())]
    ends = torch.tensor(picked.offset_per_key(), device="cpu").to(values.device)
    found = jagged_unique(values, ends, list(rows))
    routed = KeyedJaggedTensor(picked.keys(), found.ids, lengths=found.lengths)
    return Batch(given, padded, routed, found.inverse)


def expand_rows(batch: Batch, key: str, rows: Tensor) -> Tensor:
    """The row of each id of `key`, from the rows [u, dim] of its distinct ids. Differentiable, in a fixed order."""
    if batch.inverse is None:
        return rows
    sent, begin = batch.routed, 0
    sizes = dict(zip(batch.padded.keys(), batch.padded.length_per_key(), strict=True))
    keys = sent.keys()
    for name in keys:
        size = sizes[name]
        if name == key:
            mine = batch.inverse[begin : begin + size] - sent.offset_per_key()[keys.index(key)]
            return select_rows(rows, mine)
        begin += size
    raise AssertionError(f"{key} was not sent")

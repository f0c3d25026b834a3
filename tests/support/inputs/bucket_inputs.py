"""Batches for the tests of bucketing, deduplication and calibration, and what they should give, in lists of Python.

Besides `DEVICES` these ops run on "numba", the loops of the CPU; "cpu" is torch alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kernel_inputs import torch_device
from torch import Tensor

from shardwise.kernels.cpu import buckets as cpu_buckets

CPU_PATHS = ["cpu", "numba"]
OPS = torch.ops.shardwise


@contextmanager
def running_on(path: str) -> Iterator[torch.device]:
    """The device of a path, on which ops run as the path says."""
    device = torch_device(path)
    if path == "numba":
        pytest.importorskip("numba")
        yield device
    else:
        with patch.object(cpu_buckets, "loops", lambda: None):
            yield device


@dataclass(frozen=True)
class Bags:
    """A batch to be divided: `bags[f][b]` are ids, and how."""

    bags: list[list[list[int]]]
    block_sizes: list[int]
    buckets: int
    borders: list[list[int]] | None = None
    totals: list[int] | None = None
    keep: bool | list[bool] = False
    ids_dtype: torch.dtype = torch.int64
    lengths_dtype: torch.dtype = torch.int64
    weighted: bool = False
    variable: bool = field(default=False)

    @property
    def flat(self) -> list[int]:
        return [id for feature in self.bags for bag in feature for id in bag]

    def tensors(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor, int]:
        """Lengths, ids, block sizes and buckets."""
        lengths = [len(bag) for feature in self.bags for bag in feature]
        return (
            torch.tensor(lengths, dtype=self.lengths_dtype, device=device),
            torch.tensor(self.flat, dtype=self.ids_dtype, device=device),
            torch.tensor(self.block_sizes, dtype=self.ids_dtype, device=device),
            self.buckets,
        )

    def options(self, device: torch.device) -> dict[str, Any]:
        """Keyword arguments, everything asked for."""
        found: dict[str, Any] = {"bucketize_pos": True, "sequence": True, "keep_orig_idx": self.keep}
        if self.weighted:
            found["weights"] = torch.arange(len(self.flat), device=device) + 0.5
        if self.variable:
            found["batch_sizes"] = torch.tensor(
                [len(feature) for feature in self.bags], dtype=torch.int64, device=device
            )
        if self.borders is not None:
            found["block_bucketize_pos"] = [torch.tensor(border, device=device) for border in self.borders]
        if self.totals is not None:
            found["total_num_blocks"] = torch.tensor(self.totals, dtype=torch.int64, device=device)
        return found

    def model(self) -> dict[str, list[Any]]:
        """The fields of the result."""
        at = 0
        placed: list[list[list[tuple[int, int, int]]]] = [[] for _ in range(self.buckets)]
        for f, feature in enumerate(self.bags):
            kept = self.keep if isinstance(self.keep, bool) else self.keep[f]
            for bag in feature:
                for bucket in placed:
                    bucket.append([])
                for place, id in enumerate(bag):
                    bucket, row = self._owner(f, id)
                    placed[bucket][-1].append((id if kept else row, place, at))
                    at += 1
        order = [entry for bucket in placed for bag in bucket for entry in bag]
        came_from = [old for _, _, old in order]
        return {
            "lengths": [len(bag) for bucket in placed for bag in bucket],
            "ids": [id for id, _, _ in order],
            "positions": [place for _, place, _ in order],
            "unbucketize_permute": [came_from.index(old) for old in range(at)],
            "weights": [old + 0.5 for old in came_from],
        }

    def _owner(self, f: int, id: int) -> tuple[int, int]:
        size, blocks = self.block_sizes[f], self.buckets if self.totals is None else self.totals[f]
        each = blocks // self.buckets
        if self.borders is not None:
            borders = self.borders[f]
            inside = id % blocks * borders[-1] // blocks if size == 0 else id
            for bucket in range(self.buckets):
                if borders[bucket] <= inside < borders[bucket + 1]:
                    return bucket, id // blocks if size == 0 else id - borders[bucket]
            return id % self.buckets, id // blocks if size == 0 else id // self.buckets
        if id < size * blocks:
            return id // (size * each), id % (size * each)
        return id % blocks // each, id // blocks


_ALL: dict[str, Any] = {"weighted": True, "variable": True}
_SOME = [[[0, 7, 3, 3], [], [12]], [[5, 1], [2, 2, 9], []]]
CASES = {
    "even": Bags(_SOME, [4, 3], 3),
    "outside and raw": Bags([[[100, 3, 7, 12, 11]], [[1, 2, 3, 10**9]]], [4, 0], 3, **_ALL),
    "borders": Bags(_SOME, [4, 0], 3, borders=[[0, 1, 1, 8], [0, 5, 6, 10]], keep=[False, True], **_ALL),
    "several blocks": Bags(_SOME, [2, 1], 3, totals=[6, 3], ids_dtype=torch.int32, weighted=True),
    "one bucket": Bags(_SOME, [4, 3], 1, keep=True, lengths_dtype=torch.int32),
    "300 buckets": Bags(_SOME, [1, 1], 300, weighted=True),
    "varying batches": Bags([[[1, 5]], [], [[], [4], [3, 3]]], [2, 2, 2], 3, **_ALL),
    "long bag": Bags([[[i * 7 % 50 for i in range(200)]]], [10], 4, weighted=True),
    "no ids": Bags([[[], []], [[], []]], [4, 4], 3, weighted=True),
    "no batch": Bags([[], []], [4, 4], 3),
    "no features": Bags([], [], 3),
    "int64 ids": Bags([[[2**62, 2**40 + 5, 0]]], [2**60], 4, keep=False),
}


def lists(tensors: Sequence[Any]) -> list[Any]:
    """Tensors as lists, what is None left as it is."""
    return [tensor.tolist() if isinstance(tensor, Tensor) else tensor for tensor in tensors]


def op_calls(device: torch.device) -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Name -> op and arguments of the ops of this topic, with gradients wanted where the op gives them."""
    batch = Bags(_SOME, [4, 3], 3)
    lengths, ids, sizes, buckets = batch.tensors(device)
    weights = torch.rand(len(ids), device=device).requires_grad_()
    offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    logit, bins = torch.randn(7, device=device), torch.rand(24, dtype=torch.float64, device=device)
    value, per_logit = torch.tensor([0, 1, 9], device=device), torch.tensor([0, 1, 0, 0, 1, 1, 0], device=device)
    numbers = (0.5, 0.0, 0.125, 0, 0.9)
    return {
        "block_bucketize": (
            OPS.block_bucketize.default,
            (lengths, ids, sizes, buckets, weights, None, sizes * 0 + 6, None, False, sizes, True, True),
        ),
        "block_bucketize plain": (
            OPS.block_bucketize.default,
            (lengths, ids, sizes, buckets, None, None, None, None, True, None, False, False),
        ),
        "unique_ids": (OPS.unique_ids.default, (ids, True)),
        "unique_ids uncounted": (OPS.unique_ids.default, (ids, False)),
        "jagged_unique": (OPS.jagged_unique.default, (ids, offsets, [20, 30], [0, 1])),
        "histogram_binning": (
            OPS.histogram_binning.default,
            (logit, value, per_logit, 2, bins, bins, None, 8, *numbers),
        ),
        "histogram_binning plain": (
            OPS.histogram_binning.default,
            (logit, None, None, 0, bins[:8], bins[:8], None, 8, *numbers),
        ),
    }

"""Ragged arrays in numpy: many slices of one array, and their way into a KeyedJaggedTensor.

Letters: V values [N], lengths [B] of the bags, starts and stops [B] of slices of V.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from shardwise.jagged import KeyedJaggedTensor

Ints: TypeAlias = npt.NDArray[np.int64]
# (values [sum of lengths], lengths [B])
Bags: TypeAlias = tuple[Ints, Ints]


def slices(values: npt.NDArray[Any], starts: Ints, stops: Ints) -> Bags:
    """`values[starts[b]:stops[b]]` of all bags b, end to end, and their lengths."""
    lengths = stops - starts
    return values[spread(lengths) + np.repeat(starts, lengths)], lengths


def spread(lengths: Ints) -> Ints:
    """The position of each value in its bag: lengths 2, 0, 3 give 0, 1, 0, 1, 2."""
    ends = np.cumsum(lengths)
    return np.arange(lengths.sum(), dtype=np.int64) - np.repeat(ends - lengths, lengths)


def single(values: Ints) -> Bags:
    """One id a bag."""
    return values, np.ones(len(values), dtype=np.int64)


def keyed_jagged(bags: Mapping[str, Bags]) -> KeyedJaggedTensor:
    """A KeyedJaggedTensor of int64 ids with the features of `bags` in their order."""
    values = np.concatenate([values for values, _ in bags.values()])
    lengths = np.concatenate([lengths for _, lengths in bags.values()])
    return KeyedJaggedTensor(keys=list(bags), values=torch.from_numpy(values), lengths=torch.from_numpy(lengths))

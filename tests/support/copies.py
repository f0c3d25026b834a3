"""Copies of modules and states by every way there is, and whether two are the same."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch
from torch import Tensor


def by_pickle(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def by_torch_save(value: Any, *, weights_only: bool = False) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


def same(one: Any, other: Any) -> bool:
    """Whether dicts and lists, nested or not, hold the same bits and values."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, Tensor) else bool(one == other)

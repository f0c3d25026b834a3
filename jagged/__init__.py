"""Ragged batches: JaggedTensor (bags), KeyedJaggedTensor (bags of ids per feature), KeyedTensor (dense)."""

from .jagged_tensor import JaggedTensor
from .keyed_jagged_tensor import KeyedJaggedTensor
from .keyed_tensor import KeyedTensor

__all__ = ["JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"]

"""Storage of one part of a pool: rows that are written and read by their numbers, without a check of what comes.

A pool over the devices of one process has one for each device. Programs that store rows in another way derive from
`TensorPoolLookup` or `KeyedJaggedTensorPoolLookup`.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from shardwise.jagged import JaggedTensor

from .keyed_jagged_tensor_pool import padded_buffers
from .object_pool import warn_of_host_memory
from .ragged_rows import PaddedRows, RaggedRows, read_padded, write_padded
from .tensor_pool import write_rows


class TensorPoolLookup(nn.Module, abc.ABC):
    """Rows of `dim` numbers each."""

    def __init__(self, pool_size: int, dim: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self._pool_size, self._dim, self._dtype, self._device = pool_size, dim, dtype, torch.device(device)

    @abc.abstractmethod
    def lookup(self, ids: Tensor) -> Tensor:
        """Rows [n, dim] of `ids` [n]."""

    @abc.abstractmethod
    def update(self, ids: Tensor, values: Tensor) -> None:
        """Overwrite the rows of `ids` [n] by `values` [n, dim]."""

    def forward(self, ids: Tensor) -> Tensor:
        """`lookup(ids)`: rows [n, dim] of ids [n]."""
        return self.lookup(ids)

    @abc.abstractmethod
    def states_to_register(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor, [pool_size, ...], of what is to be saved."""

    @abc.abstractmethod
    def set_state(self, loaded_values: Tensor) -> None:
        """Overwrite all rows by `loaded_values` [pool_size, dim]."""


class TensorLookup(TensorPoolLookup):
    """Rows in one tensor on the device; `enable_uvm` has no effect but a warning. Zeros at first."""

    _pool: Tensor

    def __init__(
        self, pool_size: int, dim: int, dtype: torch.dtype, device: torch.device, enable_uvm: bool = False
    ) -> None:
        super().__init__(pool_size, dim, dtype, device)
        warn_of_host_memory(enable_uvm, "TensorLookup")
        self.register_buffer("_pool", torch.zeros(pool_size, dim, dtype=dtype, device=device))

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows [n, dim] of `ids` [n]."""
        return self._pool[ids]

    @torch.no_grad()
    def update(self, ids: Tensor, values: Tensor) -> None:
        """Overwrite the rows of `ids` [n] by `values` [n, dim]; the last one of an id stays."""
        write_rows(self._pool, ids, values)

    @torch.no_grad()
    def set_state(self, loaded_values: Tensor) -> None:
        """Overwrite all rows by `loaded_values` [pool_size, dim]."""
        self._pool.copy_(loaded_values)

    def states_to_register(self) -> Iterator[tuple[str, Tensor]]:
        """The rows [pool_size, dim], as "_pool"."""
        yield "_pool", self._pool


class KeyedJaggedTensorPoolLookup(nn.Module, abc.ABC):
    """Rows of several ragged features. Batches come row by row, and in a row feature by feature."""

    def __init__(
        self, pool_size: int, feature_max_lengths: Mapping[str, int], is_weighted: bool, device: torch.device
    ) -> None:
        super().__init__()
        self._pool_size, self._feature_max_lengths = pool_size, dict(feature_max_lengths)
        self._is_weighted, self._device = is_weighted, torch.device(device)

    @abc.abstractmethod
    def lookup(self, ids: Tensor) -> JaggedTensor:
        """n x features bags, of `ids` [n]."""

    @abc.abstractmethod
    def update(self, ids: Tensor, values: JaggedTensor) -> None:
        """Overwrite the rows of `ids` [n] by n x features bags."""

    def forward(self, ids: Tensor) -> JaggedTensor:
        """`lookup(ids)` of ids [n]."""
        return self.lookup(ids)

    @abc.abstractmethod
    def states_to_register(self) -> Iterator[tuple[str, Tensor]]:
        """Name and tensor, [pool_size, ...], of what is to be saved."""


class TensorJaggedIndexSelectLookup(KeyedJaggedTensorPoolLookup):
    """Rows in padded tensors on the device: `_values`, `_key_lengths`, and `_weights` where it is weighted."""

    _values: Tensor
    _key_lengths: Tensor
    _weights: Tensor

    def __init__(
        self,
        pool_size: int,
        values_dtype: torch.dtype,
        feature_max_lengths: Mapping[str, int],
        is_weighted: bool,
        device: torch.device,
    ) -> None:
        super().__init__(pool_size, feature_max_lengths, is_weighted, device)
        buffers = padded_buffers(pool_size, feature_max_lengths, values_dtype, is_weighted, self._device)
        for name, buffer in buffers.items():
            self.register_buffer(f"_{name}", buffer)

    @property
    def rows(self) -> PaddedRows:
        """The rows themselves."""
        return PaddedRows(self._values, self._key_lengths, self._weights if self._is_weighted else None)

    def lookup(self, ids: Tensor) -> JaggedTensor:
        """n x features bags, of `ids` [n]."""
        rows = read_padded(self.rows, ids)
        return JaggedTensor(rows.values, rows.weights, rows.lengths.flatten())

    @torch.no_grad()
    def update(self, ids: Tensor, values: JaggedTensor) -> None:
        """Overwrite the rows of `ids` [n] by n x features bags; the last one of an id stays."""
        lengths = values.lengths().view(-1, len(self._feature_max_lengths))
        write_padded(self.rows, ids, RaggedRows(lengths, values.values(), values.weights_or_none()))

    def states_to_register(self) -> Iterator[tuple[str, Tensor]]:
        """Values and lengths, and weights where there are some, by their names in a pool's state dict.

        Each [pool_size, ...]: values and weights by the sum of the features' longest lengths, lengths by features.
        """
        yield "values", self._values
        yield "key_lengths", self._key_lengths
        if self._is_weighted:
            yield "weights", self._weights

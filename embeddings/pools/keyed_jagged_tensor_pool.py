"""`KeyedJaggedTensorPool`: rows of several ragged features, a user's history say, written and read by id."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from shardwise.errors import RefusedValueError
from shardwise.jagged import KeyedJaggedTensor

from .object_pool import ObjectPool, check_ids, warn_of_host_memory
from .ragged_rows import KeepsPaddedRows, read_padded, row_major, to_keyed, write_padded


class KeyedJaggedTensorPool(KeepsPaddedRows, ObjectPool[KeyedJaggedTensor]):
    """A store of `pool_size` rows, each with some values of each feature; no values at first.

    Its state dict has, with L = the sum of `feature_max_lengths`: "values" [pool_size, L], "key_lengths"
    [pool_size, features] int32, and "weights" [pool_size, L] fp32 of a weighted pool.

    Args:
        feature_max_lengths: how many values a row may have of each feature; a batch comes out in this order.
        values_dtype: that of the values, integers or floats.
        is_weighted: whether values have weights. A pool that is not leaves out those of a batch.
        device: meta unless given: such a pool only says what a sharder is to make.
        enable_uvm: has no effect but a warning: host memory is not served.

    Raises:
        RefusedValueError: a size below 1, or no feature.

    Example:
        >>> pool = KeyedJaggedTensorPool(10, {"seen": 2, "bought": 3}, device=torch.device("cpu"))
        >>> batch = KeyedJaggedTensor(["bought", "seen"], torch.tensor([7, 8, 9]), lengths=torch.tensor([1, 0, 0, 2]))
        >>> pool.update(torch.tensor([4, 1]), batch)
        >>> pool.lookup(torch.tensor([1, 4]))["seen"].to_dense()
        [tensor([8, 9]), tensor([], dtype=torch.int64)]
    """

    def __init__(
        self,
        pool_size: int,
        feature_max_lengths: Mapping[str, int],
        values_dtype: torch.dtype = torch.int64,
        is_weighted: bool = False,
        device: torch.device | None = None,
        enable_uvm: bool = False,
    ) -> None:
        super().__init__()
        if pool_size < 1:
            raise RefusedValueError(f"pool_size must be positive, got {pool_size}")
        warn_of_host_memory(enable_uvm, "KeyedJaggedTensorPool")
        self._feature_max_lengths, self._enable_uvm = dict(feature_max_lengths), enable_uvm
        self._is_weighted = is_weighted
        buffers = padded_buffers(
            pool_size, self._feature_max_lengths, values_dtype, is_weighted, torch.device(device or "meta")
        )
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    @property
    def pool_size(self) -> int:
        """How many rows there are."""
        return self.values.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self.values.device

    def lookup(self, ids: Tensor) -> KeyedJaggedTensor:
        """The rows of `ids` [n] as a batch of n. Raises as `check_ids`."""
        check_ids(ids, self.pool_size, self.device)
        return to_keyed(read_padded(self._rows, ids), list(self._feature_max_lengths))

    @torch.no_grad()
    def update(self, ids: Tensor, values: KeyedJaggedTensor) -> None:
        """Overwrite the rows of `ids` [n] by a batch of n; of an id that comes twice the last one stays.

        Raises:
            RefusedTypeError, RefusedValueError: as `row_major`; nothing is written then.
            RefusedIndexError: as `check_ids`; nothing is written then.
        """
        check_ids(ids, self.pool_size, self.device)
        rows = row_major(values, ids, self._feature_max_lengths, self.values_dtype, self._is_weighted, self.device)
        write_padded(self._rows, ids, rows)


def padded_buffers(
    rows: int,
    feature_max_lengths: Mapping[str, int],
    values_dtype: torch.dtype,
    is_weighted: bool,
    device: torch.device,
) -> dict[str, Tensor]:
    """Storage of empty rows, by its names in a state dict.

    Raises:
        RefusedValueError: a feature without a positive length, or no feature.
    """
    if not feature_max_lengths or min(feature_max_lengths.values()) < 1:
        raise RefusedValueError(
            f"feature_max_lengths must have a positive length for each feature, got {dict(feature_max_lengths)}"
        )
    size = rows, sum(feature_max_lengths.values())
    buffers = {
        "values": torch.zeros(size, dtype=values_dtype, device=device),
        "key_lengths": torch.zeros(rows, len(feature_max_lengths), dtype=torch.int32, device=device),
    }
    if is_weighted:
        buffers["weights"] = torch.zeros(size, dtype=torch.float32, device=device)
    return buffers

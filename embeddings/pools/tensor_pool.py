"""`TensorPool`: rows of one width and dtype, written and read by id.

Shapes: pool [pool_size, dim], ids [n], values [n, dim].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwise.errors import RefusedTypeError, RefusedValueError

from .object_pool import ObjectPool, check_ids, deterministic_dedup, require_device, warn_of_host_memory


class TensorPool(ObjectPool[Tensor]):
    """A store of tensors [dim], zeros at first. Its state dict has them as "_pool" [pool_size, dim].

    Args:
        device: meta unless given: such a pool only says what a sharder is to make.
        loaded_values: [pool_size, dim], in the place of the zeros; the pool takes the tensor itself where it can.
        enable_uvm: has no effect but a warning: host memory is not served.

    Raises:
        RefusedValueError, RefusedTypeError: a size below 1, or `loaded_values` that do not fit.

    Example:
        >>> pool = TensorPool(10, 2, torch.float32, torch.device("cpu"))
        >>> pool.update(torch.tensor([1, 9]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        >>> pool.lookup(torch.tensor([9, 0]))
        tensor([[3., 4.],
                [0., 0.]])
    """

    _pool: Tensor

    def __init__(
        self,
        pool_size: int,
        dim: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        loaded_values: Tensor | None = None,
        enable_uvm: bool = False,
    ) -> None:
        super().__init__()
        for what, size in (("pool_size", pool_size), ("dim", dim)):
            if size < 1:
                raise RefusedValueError(f"{what} must be positive, got {size}")
        warn_of_host_memory(enable_uvm, "TensorPool")
        self._enable_uvm = enable_uvm
        where = torch.device(device or "meta")
        if loaded_values is None:
            loaded_values = torch.zeros(pool_size, dim, dtype=dtype, device=where)
        elif loaded_values.shape != (pool_size, dim) or loaded_values.dtype is not dtype:
            raise RefusedValueError(
                f"loaded_values must be [{pool_size}, {dim}] of {dtype}, got {list(loaded_values.shape)} of"
                f" {loaded_values.dtype}"
            )
        # without a device they stay where they are
        self.register_buffer("_pool", loaded_values.detach() if device is None else loaded_values.detach().to(where))

    @property
    def pool_size(self) -> int:
        """How many rows there are."""
        return self._pool.shape[0]

    @property
    def dim(self) -> int:
        """The width of a row."""
        return self._pool.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """That of the rows."""
        return self._pool.dtype

    @property
    def device(self) -> torch.device:
        """Where the rows are."""
        return self._pool.device

    @property
    def pool(self) -> Tensor:
        """All rows [pool_size, dim], themselves."""
        return self._pool

    def lookup(self, ids: Tensor) -> Tensor:
        """Rows [n, dim] of `ids` [n]. Raises as `check_ids`."""
        check_ids(ids, self.pool_size, self.device)
        return self._pool[ids]

    @torch.no_grad()
    def update(self, ids: Tensor, values: Tensor) -> None:
        """Overwrite the rows of `ids` [n] by `values` [n, dim]; of an id that comes twice the last one stays.

        Raises:
            RefusedTypeError, RefusedValueError: as `check_rows`; nothing is written then.
            RefusedIndexError: as `check_ids`; nothing is written then.
        """
        check_ids(ids, self.pool_size, self.device)
        check_rows(ids, values, self.dim, self.dtype, self.device)
        write_rows(self._pool, ids, values)


def check_rows(ids: Tensor, values: Any, dim: int, dtype: torch.dtype, device: torch.device) -> None:
    """Raise unless `values` [n, dim] can be the rows of `ids` [n].

    Raises:
        RefusedTypeError: they are of another dtype, or no tensor.
        RefusedValueError: they have another shape, or lie on another device.
    """
    if not isinstance(values, Tensor) or values.dtype is not dtype:
        raise RefusedTypeError(f"values of {getattr(values, 'dtype', type(values))}, the pool has rows of {dtype}")
    if values.shape != (ids.shape[0], dim):
        raise RefusedValueError(
            f"values must be [{ids.shape[0]}, {dim}], a row of the pool for each id, got {list(values.shape)}"
        )
    require_device("values", values, device)


def write_rows(pool: Tensor, ids: Tensor, values: Tensor) -> None:
    """Overwrite rows of `pool` [P, D]; the last one of an id stays."""
    unique, last = deterministic_dedup(ids)
    pool[unique.long()] = values[last].to(pool.device)

"""Where the rows of a table group live: kernels receive slots, and a store says which slot holds which row.

Weights and all optimizer states of a row share its slot. `ResidentRows` is the store of tables that lie on the device
as a whole: slot and row are the same number. Caches over host memory are stores too.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class NoFreeSlots(RuntimeError):
    """A store has too few slots for the rows of a batch beside those that leases hold; it has given out none."""


class RowStore(Protocol):
    """Brings the rows that a batch names to slots, and keeps them there until their lease is released.

    A lookup resolves once; without gradients the lease is released after the lookup, otherwise after the update. A
    pipeline that prefetches resolves a batch while the one before still has its lease.
    """

    def resolve(self, ids: Tensor, offsets: Tensor, step: Tensor) -> tuple[Tensor, Any]:
        """Slots of ids [N] (offsets [F*B + 1], feature by feature) and the lease that holds them.

        An id outside its table keeps a number outside the slots; ids past the last offset are nobody's and may be
        anything. `step` [1] int64 counts the updates so far.

        Raises:
            NoFreeSlots: leases hold too many slots. A prefetch then leaves it to the lookup.
        """
        ...

    def release(self, lease: Any) -> None:
        """The rows of a lease may go: their update is done, or none will come."""
        ...


class ResidentRows:
    """The identity: every row has its slot for good."""

    def resolve(self, ids: Tensor, offsets: Tensor, step: Tensor) -> tuple[Tensor, None]:
        """The ids themselves."""
        return ids, None

    def release(self, lease: None) -> None:
        """Nothing was held."""

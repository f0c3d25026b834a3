"""Memory for what travels, taken for a part of a step and given back.

Fresh memory is faulted in page by page, which takes as long as filling it; what travels in a step needs as much as the
output, several times over. A GPU's allocator keeps memory by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shardwise.kernels.cpu.huge_pages import in_huge_pages

# numbers up to which fresh memory is as good, and buffers that are kept
_SMALL, _MOST = 1 << 15, 4


class Buffers:
    """Flat fp32 buffers of one collection on one rank."""

    def __init__(self) -> None:
        self._free: list[torch.UntypedStorage] = []

    def take(self, size: int, device: torch.device) -> Tensor:
        """[size] fp32, not initialised."""
        if device.type != "cpu" or size < _SMALL:
            return torch.empty(size, device=device)
        for number, storage in enumerate(self._free):
            if storage.nbytes() >= 4 * size:
                del self._free[number]
                return torch.empty(0, device="cpu").set_(storage, 0, (size,), (1,))
        return in_huge_pages(torch.empty(size, device="cpu"))

    def give_unless(self, tensor: Tensor, used: Tensor) -> None:
        """Take the memory of `tensor` back, of which nobody else has a view, unless `used` may be one."""
        if tensor.device.type != "cpu" or tensor.numel() < _SMALL:
            return
        storage = tensor.untyped_storage()
        for other in (used.untyped_storage(), *self._free):
            if storage.data_ptr() == other.data_ptr():
                return
        self._free.append(storage)
        if len(self._free) > _MOST:
            self._free.sort(key=lambda kept: kept.nbytes())
            del self._free[0]

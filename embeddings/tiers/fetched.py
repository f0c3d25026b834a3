"""Numbers of a device on their way to the host: `Fetched`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Fetched:
    """A tensor's values as they are once the current stream has come here, read on the host later."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._copied: Any = None
        if tensor.is_cuda:
            pinned = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
            self._tensor = pinned.copy_(tensor, non_blocking=True)
            self._copied = torch.cuda.current_stream(tensor.device).record_event()

    def is_here(self) -> bool:
        """Whether nobody would wait."""
        return self._copied is None or bool(self._copied.query())

    def get(self) -> Tensor:
        """The values; waits until they are here."""
        if not self.is_here():
            # host sync on CUDA: what was given to the stream later is not waited for
            self._copied.synchronize()
        return self._tensor

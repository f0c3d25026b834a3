"""What a check of ids on CUDA found, read by a later lookup instead of waiting for it."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor

from shardwise.kernels import is_clean, new_guard


class UnreadGuard:
    """A batch's own guard and its way to the host: read without a wait for anything but its own copy.

    One that was read and is clean may serve another batch, but for one that belongs to a captured graph.
    """

    def __init__(self, guard: Tensor) -> None:
        self.guard, self.is_captured = guard, torch.cuda.is_current_stream_capturing()
        self._host = torch.empty(3, dtype=torch.int64, pin_memory=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, ids: Tensor, offsets: Tensor) -> UnreadGuard:
        """Have the findings about a batch come to the host."""
        self.ids, self.offsets = ids, offsets
        self._host.copy_(self.guard, non_blocking=True)
        self._copied.record()
        return self

    def is_raised(self) -> bool:
        # host sync with the check of the batch before, which ran long ago
        self._copied.synchronize()
        return not is_clean(self._host)

    def gradient_is_finite(self) -> bool:
        """Whether the gradients so far were finite; only after `is_raised`."""
        return bool(self._host[2] == new_guard()[2])


def next_raised(unread: deque[UnreadGuard]) -> UnreadGuard | None:
    """The first guard that is raised, taken out with those before it; None if there is none.

    Threads that look up at once add their guards to one deque and read from it: each guard is read by one of them.
    """
    while True:
        try:
            guard = unread.popleft()
        except IndexError:
            return None
        if guard.is_raised():
            return guard

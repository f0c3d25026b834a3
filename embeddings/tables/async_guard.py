"""What a check of ids on CUDA found, read by a later lookup instead of waiting for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.kernels import is_clean, new_guard


class UnreadGuard:
    """A batch's own guard and its way to the host: read without a wait for anything but its own copy.

    One that was read and is clean may serve another batch.
    """

    def __init__(self, guard: Tensor) -> None:
        self.guard = guard
        self._host = torch.empty(3, dtype=torch.int64, pin_memory=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, ids: Tensor, offsets: Tensor) -> UnreadGuard:
        """Have the findings about a batch come to the host."""
        self.ids, self.offsets = ids, offsets
        self._host.copy_(self.guard, non_blocking=True)
        # the copy went to the stream of the guard's device, which need not be the current one
        self._copied.record(torch.cuda.current_stream(self.guard.device))
        return self

    def is_raised(self) -> bool:
        # host sync with the check of the batch before, which ran long ago
        self._copied.synchronize()
        return not is_clean(self._host)

    def gradient_is_finite(self) -> bool:
        """Whether the gradients so far were finite; only after `is_raised`."""
        return bool(self._host[2] == new_guard()[2])


class Replays:
    """What replays of a captured graph left in a step's guard, where none of their Python runs to read it."""

    def __init__(self) -> None:
        self._sent: UnreadGuard | None = None

    def raise_found(self, guard: Tensor, tables: Sequence[str], *, waits: bool) -> None:
        """Raise and clear what is in the guard, as `raise_replayed`.

        Unless it `waits` for the device, what it looks at is how the guard was at the call before: an eager step that
        follows a capture waits for nothing either, and what a replay left is raised one step later.
        """
        sent, self._sent = self._sent, None
        if waits or (sent is not None and sent.is_raised()):
            raise_replayed(guard, tables)
        if not waits:
            known = sent if sent is not None and sent.guard is guard else UnreadGuard(guard)
            self._sent = known.send(guard, guard)


def raise_replayed(guard: Tensor, tables: Sequence[str]) -> None:
    """Raise and clear what replays of a captured graph left in a step's guard, if anything; waits for the device.

    The batch is not known any more: its buffers may hold another by now.

    Raises:
        IndexError, ValueError, FloatingPointError: an id, an offset, a gradient was bad.
    """
    # host sync: nothing of a replay comes to the host by itself
    if is_clean(guard):
        return
    bad_id, bad_offset, _ = (place != found for place, found in zip(guard.tolist(), new_guard().tolist(), strict=True))
    guard.copy_(new_guard())
    what = f"a captured graph was replayed with a batch that is bad, and tables {', '.join(tables)} stayed as they were"
    if bad_id:
        raise IndexError(f"{what}: an id is outside its table")
    if bad_offset:
        raise ValueError(f"{what}: offsets decrease, do not begin at 0, or do not end at the number of ids")
    raise FloatingPointError(f"{what}: a gradient is not finite")


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

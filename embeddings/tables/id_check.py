"""The check of a batch's ids before its lookup: what it asks by mode, device and padding, and when it raises.

On the CPU a bad id or offset raises at once. On CUDA it is left in a guard that comes to the host beside the work, and
raises at the next check; within a compiled graph nobody reads it, and its ids count as none.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import RefusedIndexError
from shardwise.kernels import (
    BoundsCheckMode,
    capturing,
    check_ids,
    is_clean,
    new_guard,
    raise_from_guard,
    require_ids,
)
from shardwise.kernels.cpu import offsets_are_good
from shardwise.kernels.lookup import ids_pass

from ..policy import GradientCheckMode, LookupPolicy


class PendingCheck:
    """A batch's own guard and its way to the host: read without a wait for anything but its own copy.

    One that was read and is clean may serve another batch.
    """

    def __init__(self, guard: Tensor) -> None:
        self.guard = guard
        self._host = torch.empty(3, dtype=torch.int64, pin_memory=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def send(self, ids: Tensor, offsets: Tensor) -> PendingCheck:
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
        self._sent: PendingCheck | None = None

    def raise_found(self, guard: Tensor, tables: Sequence[str], *, waits: bool) -> None:
        """Raise and clear what is in the guard, as `raise_replayed`.

        Unless it `waits` for the device, what it looks at is how the guard was at the call before: an eager step that
        follows a capture waits for nothing either, and what a replay left is raised one step later.
        """
        sent, self._sent = self._sent, None
        if waits or (sent is not None and sent.is_raised()):
            raise_replayed(guard, tables)
        if not waits:
            known = sent if sent is not None and sent.guard is guard else PendingCheck(guard)
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
        raise RefusedIndexError(f"{what}: an id is outside its table")
    if bad_offset:
        raise ValueError(f"{what}: offsets decrease, do not begin at 0, or do not end at the number of ids")
    raise FloatingPointError(f"{what}: a gradient is not finite")


def next_raised(pending: deque[PendingCheck]) -> PendingCheck | None:
    """The first guard that is raised, taken out with those before it; None if there is none.

    Threads that look up at once add their guards to one deque and read from it: each guard is read by one of them.
    """
    while True:
        try:
            guard = pending.popleft()
        except IndexError:
            return None
        if guard.is_raised():
            return guard


def mark_bad_ids(
    ids: Tensor,
    offsets: Tensor,
    features: Tensor,
    names: Sequence[str],
    mode: BoundsCheckMode,
    *,
    padded: bool,
    traced: bool = False,
    guard: Tensor | None = None,
    step_guard: Tensor | None = None,
) -> Tensor | None:
    """Raise or warn for bad ids or offsets on the CPU; on CUDA mark them in a guard, which the caller has to read.

    All collections decide here what a batch may be. Shapes and the guards as of `shardwise.kernels.check_ids`, but that
    by default a `guard` is made. None is returned where nothing is left to read. `IGNORE` speaks of ids: offsets out of
    order are an error on the CPU, unless the call is `traced`, and are never followed outside the ids on CUDA. A
    `step_guard` is lowered on CUDA alone: on the CPU what is bad raises here, and masks no later update.

    Raises:
        IndexError, ValueError, TypeError: as `check_ids`.
    """
    if not names:
        return None
    if ids.is_meta:
        require_ids("feature ids", ids)
        return None
    if mode is BoundsCheckMode.IGNORE:
        require_ids("feature ids", ids)
        if ids.is_cuda or traced or offsets_are_good(offsets, ids.shape[0], padded):
            return None
    elif ids_pass(ids, offsets, features, padded=padded):
        return None
    guard = new_guard(ids.device) if guard is None else guard
    check_ids(
        ids, offsets, features, guard, names=names, fatal=mode is BoundsCheckMode.FATAL, padded=padded,
        step_guard=step_guard if ids.is_cuda else None,
    )  # fmt: skip
    return guard if ids.is_cuda else None


class IdCheck:
    """The check of lookups that train nothing; on CUDA it raises at the next one, unless the policy is strict.

    Attributes:
        features: ids of each feature by their own numbers, as `pack_features` lays them out.
    """

    def __init__(self, names: list[str], features: Tensor, policy: LookupPolicy) -> None:
        self._names, self.features = names, features
        self._mode, self._strict = policy.bounds_check, policy.strict
        # several where threads look up at once
        self._pending: deque[PendingCheck] = deque()

    def __call__(self, ids: Tensor, offsets: Tensor, *, padded: bool = False) -> None:
        """Raise for bad ids or offsets, of a batch on any device.

        With `padded` the ids past the last offset are nobody's and may be anything; without it there are none.

        Raises:
            IndexError, ValueError, TypeError: as `shardwise.kernels.check_ids`.
        """
        traced = torch.compiler.is_compiling()
        if not traced and self._pending:
            self.raise_pending()
        features = self.features.to(ids.device)
        guard = mark_bad_ids(ids, offsets, features, self._names, self._mode, padded=padded, traced=traced)
        # a graph has nobody to read what it left in a guard
        if guard is not None and not traced:
            self._pending.append(PendingCheck(guard).send(ids, offsets))
            if self._strict:
                self.raise_pending()

    def raise_pending(self) -> None:
        """Raise what earlier batches left in their guards on CUDA."""
        while (pending := next_raised(self._pending)) is not None:
            fatal, features = self._mode is BoundsCheckMode.FATAL, self.features.to(pending.ids.device)
            raise_from_guard(pending.guard, pending.ids, pending.offsets, features, self._names, fatal=fatal)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pending": deque()}


class GuardedIdCheck:
    """The check of lookups whose backward updates the tables: what is bad also stops the updates, by the step's guard.

    Attributes:
        features: as of `IdCheck`.
        guard: the step's, which every update reads before it writes; groups of a collection share one.
        owns_guard: whether this check is the one, of those that share a guard, that reads it after a graph's replays,
            before another may lower it.
    """

    def __init__(self, names: list[str], tables: Sequence[str], features: Tensor, policy: LookupPolicy) -> None:
        self._names, self._tables, self.features, self._policy = names, tables, features, policy
        self.guard, self.owns_guard = new_guard(features.device), True
        self._pending: PendingCheck | None = None
        self._spare: PendingCheck | None = None
        # once a graph was captured
        self._replays: Replays | None = None

    def share(self, owner: GuardedIdCheck) -> None:
        """Stop the updates of all that share the owner's guard."""
        self.guard, self.owns_guard = owner.guard, self is owner

    def __call__(self, ids: Tensor, offsets: Tensor, *, padded: bool = False) -> None:
        """Raise for bad ids or offsets; on CUDA those of the batch before, while this one is only marked.

        With `padded` the ids past the last offset are nobody's and may be anything; without it there are none.

        Raises:
            IndexError, ValueError, TypeError: as `shardwise.kernels.check_ids`.
            FloatingPointError: the gradient of an earlier batch was not finite (CUDA, `GradientCheckMode.RAISE`).
        """
        policy, mode, pending = self._policy, self._policy.bounds_check, None
        if ids.is_cuda and mode is not BoundsCheckMode.IGNORE and not capturing():
            self.raise_pending(waits=False)
            pending = self._take_spare()
        own = None if pending is None else pending.guard
        # a bad id that only warns is left out by the update itself; bad offsets mask the update all the same
        guard = mark_bad_ids(
            ids, offsets, self.features, self._names, mode, padded=padded, guard=own, step_guard=self.guard
        )
        if guard is None:
            if ids.is_cuda and policy.gradient_check is GradientCheckMode.RAISE:
                self._watch_gradients(ids, offsets)
        elif pending is not None:
            self._send(pending, ids, offsets)
        else:
            # a replay runs no Python that could read a guard of its own: what it finds stays in the step's
            self._replays = self._replays or Replays()
            if policy.strict or mode is not BoundsCheckMode.FATAL:
                setting = "strict" if policy.strict else "bounds_check=BoundsCheckMode.WARNING"
                warnings.warn(
                    f"{setting} has no effect within a captured graph: see TableCollection.check", stacklevel=2
                )

    def _watch_gradients(self, ids: Tensor, offsets: Tensor) -> None:
        """Raise for a gradient that an earlier batch had on CUDA, where no check of ids would tell of it."""
        if capturing():
            self._replays = self._replays or Replays()
            return
        self.raise_pending(waits=False)
        pending = self._take_spare()
        pending.guard[2:].copy_(self.guard[2:])
        self._send(pending, ids, offsets)

    def _take_spare(self) -> PendingCheck:
        pending, self._spare = self._spare or PendingCheck(new_guard(self.guard.device)), None
        return pending

    def _send(self, pending: PendingCheck, ids: Tensor, offsets: Tensor) -> None:
        self._pending = pending.send(ids, offsets)
        if self._policy.strict:
            self.raise_pending()

    def raise_pending(self, *, waits: bool = True) -> None:
        """Raise what an earlier batch left in the guard on CUDA; nothing was written since. `waits`: see `Replays`."""
        pending, self._pending = self._pending, None
        if pending is None or not pending.is_raised():
            # the next batch's: no other has it, whatever threads look up at once
            self._spare = pending or self._spare
            if self._replays is not None and self.owns_guard:
                self._replays.raise_found(self.guard, self._tables, waits=waits)
            return
        fatal = self._policy.bounds_check is BoundsCheckMode.FATAL
        self.guard.copy_(new_guard())
        raise_from_guard(pending.guard, pending.ids, pending.offsets, self.features, self._names, fatal=fatal)
        if not pending.gradient_is_finite():
            tables = ", ".join(self._tables)
            raise FloatingPointError(f"a gradient of tables {tables} was not finite; no table was updated since")

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pending": None, "_spare": None, "_replays": None}

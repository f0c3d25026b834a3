"""The watch over a process group: it hears in a second that a rank failed, and ends what this rank waits for.

A rank that fails leaves its peers in collectives that nothing else would end before the group's own timeout. So every
rank has a thread that looks into the group's store now and then, and times the exchange that the rank waits in. Whoever
finds something wrong raises the alarm there, and every thread answers the roll call: where its rank is, and what it
raised. What the answers mean is said in failures.py. Then the thread hangs up: the collectives of this rank end, and
who waits in them learns why. A step costs nothing more: the thread sleeps meanwhile.

The keys that the ranks speak under are of no group before them: torchrun keeps one store over its restarts, so workers
find there what their dead predecessors left, an alarm for one. No count of restarts tells the generations apart, as
ranks of one generation may have died at different points. So each rank writes a token of its own, and rank 0 repeats
the tokens of all beside its own, which names the keys (`Rendezvous`). A rank that reads its token there knows that a
rank 0 is alive with it.
"""

from __future__ import annotations

import atexit
import copy
import json
import math
import os
import secrets
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from .env import is_alone
from .failures import (
    RankFailure,
    RankStatus,
    closed_by,
    diagnose,
    format_error,
    is_agreed,
    is_failure,
    is_of_group,
    store_lost,
)

_ROSTER = "shardwise/roster"


class Rendezvous:
    """How this rank finds its group's keys in the store: `advance` now and then until `over`.

    Attributes:
        prefix: begins the keys of this group; None while rank 0 has not answered.
        over: whether nothing further is needed, here or by another rank.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size
        self._token = secrets.token_hex(8)
        self.prefix = f"shardwise/{self._token}" if rank == 0 else None
        self.over = False

    def advance(self, store: Store) -> None:
        """Say what this rank knows and read what the others said; never waits."""
        if self.over:
            return
        others = range(1, self._world_size)
        if self._rank == 0:
            said = [_read(store, f"shardwise/token{rank}") for rank in others]
            store.set(_ROSTER, json.dumps([self._token, *said]))
            self.over = store.check([f"{self.prefix}/met{rank}" for rank in others])
            return
        store.set(f"shardwise/token{self._rank}", self._token)
        roster = json.loads(_read(store, _ROSTER) or "[]")
        if len(roster) == self._world_size and roster[self._rank] == self._token:
            self.prefix, self.over = f"shardwise/{roster[0]}", True
            store.set(f"{self.prefix}/met{self._rank}", "")


def _read(store: Store, key: str) -> str:
    """What stands there, nothing if the key is not there."""
    return store.get(key).decode() if store.check([key]) else ""


# how long a wait lasts before Python may look at signals, Ctrl-C for one
SLICE = timedelta(seconds=1)
# most seconds between two looks into the store, and for a roll call
_LOOK_S, _ROLL_CALL_S = 0.5, 5.0
_BEFORE = "before its first exchange"


class Watch:
    """The watch of this rank over `group` and others among the same ranks; `timeout_s` bounds each wait in them.

    `hang_up` closes this rank's connections in a group, which ends its collectives there.
    """

    def __init__(self, group: dist.ProcessGroup, hang_up: Callable[[dist.ProcessGroup], None]) -> None:
        self.rank, self.world_size = dist.get_rank(group), dist.get_world_size(group)
        self.timeout_s: float | None = None
        # the exchange that this rank waits in, the one before, and how many there were
        self.at: str | None = None
        self.last: str | None = None
        self.waits = 0
        self.is_closed = False
        self._group = weakref.ref(group)
        self._groups: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet([group])
        self._hang_up = hang_up
        # a group made anew may find the keys of the one before in its store
        self._rendezvous = Rendezvous(self.rank, self.world_size)
        self._host = _host_of_store(group)
        self._alarm: str | None = None
        self._error: RankStatus | None = None
        self._failure: RankFailure | None = None
        self._wake, self._over, self._ending = threading.Event(), threading.Event(), False
        # blocks of `over` that this rank is in
        self._blocks = 0
        self._timed = (0, 0.0)
        self._thread = threading.Thread(target=self._run, name="shardwise watch", daemon=True)
        self._thread.start()

    def __deepcopy__(self, memo: object) -> Watch:
        # copies of a model share its processes
        return self

    def cover(self, group: dist.ProcessGroup) -> None:
        """Watch over a group of some of these ranks as well."""
        self._groups.add(group)
        _watches[group] = self

    def wait_or_fail(self, work: Any) -> None:
        """Wait on for what `SLICE` was too short for, or what failed.

        Raises:
            RankFailure: a rank failed, or did not come in time.
        """
        # the thread times this wait; it may itself be held up by the store
        limit = math.inf if self.timeout_s is None else self.timeout_s - self._roll_call_s()
        end = time.monotonic() + limit - SLICE.total_seconds()
        try:
            while True:
                done = work.is_completed() or time.monotonic() > end
                try:
                    work.wait(SLICE)
                    return
                except RuntimeError as error:
                    if done:
                        raise self.failure(error) from error
        finally:
            # the traceback of the failure has this frame, and the work would keep the tensors that it sent
            del work

    def failure(self, error: BaseException) -> RankFailure:
        """What this rank raises for an error of the group, after a roll call."""
        self._raise_alarm(f"{self._where()} I got {format_error(error)}")
        # the store may be gone without a word, and the thread with it
        if not self._over.wait(self._roll_call_s() + 4 * self._look_s() + 1) or self._failure is None:
            self._close(store_lost(f"it got {format_error(error)}", self._where(), self.rank, self._host))
        return copy.copy(cast(RankFailure, self._failure))

    def report(self, error: BaseException, where: str) -> None:
        """See to an error that leaves this rank's step: tell the others, unless they know or are its cause.

        Raises:
            RankFailure: another rank is the cause.
        """
        ordinary_end = isinstance(error, StopIteration | GeneratorExit)
        if ordinary_end or is_agreed(error) or is_failure(error) or self._error is not None:
            return
        self.translate(error)
        self._error = RankStatus(f"{where}, {self._where()}", error=format_error(error))
        self._raise_alarm(f"{self._where()} I failed")
        self._over.wait(self._roll_call_s())
        self._close(closed_by(self.rank, self._error))

    def require_open(self) -> None:
        """Refuse an exchange of a group that is closed, in which gloo would wait for nobody.

        Raises:
            RankFailure: it is; says why.
        """
        if self.is_closed:
            raise copy.copy(cast(RankFailure, self._failure))

    def translate(self, error: BaseException) -> None:
        """Raise RankFailure for an error of the process group, of which another rank is the cause."""
        if is_of_group(error) and not is_failure(error):
            raise self.failure(error) from error

    @contextmanager
    def over(self, where: str) -> Iterator[None]:
        """`report` for what a block raises."""
        self._blocks += 1
        try:
            yield
        except BaseException as error:
            self.report(error, where)
            raise
        finally:
            self._blocks -= 1

    def end(self) -> threading.Thread:
        """Let the thread go; returns it."""
        self._ending = True
        self._wake.set()
        return self._thread

    def _where(self) -> str:
        if self.at is not None:
            return f"in the exchange of {self.at}"
        return _BEFORE if self.last is None else f"in its own code after the exchange of {self.last}"

    def _look_s(self) -> float:
        return _LOOK_S if self.timeout_s is None else min(_LOOK_S, self.timeout_s / 16)

    def _roll_call_s(self) -> float:
        return _ROLL_CALL_S if self.timeout_s is None else min(_ROLL_CALL_S, self.timeout_s / 4)

    def _raise_alarm(self, why: str) -> None:
        self._alarm = self._alarm or why
        self._wake.set()

    def _run(self) -> None:
        """The thread's work: look, until something is wrong or the group is no more."""
        try:
            while True:
                self._wake.wait(self._look_s() / (1 if self._rendezvous.over else 4))
                group = self._group()
                if self._ending or group is None:
                    return
                store = _store_of(group)
                del group
                self._time_the_wait()
                alarm, end = self._alarm, time.monotonic() + self._roll_call_s()
                self._rendezvous.advance(store)
                while alarm is not None and self._rendezvous.prefix is None and time.monotonic() < end:
                    time.sleep(0.02)
                    self._rendezvous.advance(store)
                prefix = self._rendezvous.prefix
                if alarm is not None:
                    if prefix is None:
                        # nobody is there to ask
                        self._failure = diagnose(alarm, {self.rank: self._status()}, self.rank, self.world_size)
                        return
                    if not store.check([f"{prefix}/alarm"]):
                        store.set(f"{prefix}/alarm", f"rank {self.rank} said: {alarm}")
                if prefix is not None and store.check([f"{prefix}/alarm"]):
                    self._call_the_roll(store)
                    return
                del store
        except KeyError:
            # the group was destroyed, and says so by having no store
            return
        except RuntimeError as error:
            # the store went with its process: wait as long as a rank may need that ended well, and takes its last rows
            self._over.wait(0 if self._alarm else self._roll_call_s())
            if self._alarm or self._blocks or self.at is not None:
                why = self._alarm or f"the store said {format_error(error)}"
                self._failure = store_lost(why, self._where(), self.rank, self._host)
        finally:
            self._over.set()
            # an error of its own closes the groups once it was reported
            if self._failure is not None and self._error is None:
                self._close(self._failure)

    def _time_the_wait(self) -> None:
        """Raise the alarm where this rank has been in one exchange for too long."""
        limit = math.inf if self.timeout_s is None else self.timeout_s - self._roll_call_s() - 2 * self._look_s()
        if self._timed[0] != self.waits:
            self._timed = (self.waits, time.monotonic())
        elif self.at is not None and time.monotonic() - self._timed[1] > limit:
            self._raise_alarm(f"{self._where()} I waited for {self.timeout_s:g} s (timeout_s)")

    def _status(self) -> RankStatus:
        return self._error or RankStatus(self._where(), waits=self.at is not None)

    def _call_the_roll(self, store: Store) -> None:
        """Say where this rank is, hear the others, and know what happened."""
        prefix, own = self._rendezvous.prefix, self._status()
        store.set(f"{prefix}/word{self.rank}", own.encode())
        statuses, end = {self.rank: own}, time.monotonic() + self._roll_call_s()
        while len(statuses) < self.world_size and time.monotonic() < end:
            for rank in set(range(self.world_size)) - set(statuses):
                if store.check([f"{prefix}/word{rank}"]):
                    statuses[rank] = RankStatus.decode(store.get(f"{prefix}/word{rank}"))
            if self._error is None and any(status.error is not None for status in statuses.values()):
                break
            if self._error is not None and self._host != self.rank:
                return
            # who has not met the others yet does so now
            self._rendezvous.advance(store)
            time.sleep(0.02)
        why = store.get(f"{prefix}/alarm").decode()
        self._failure = diagnose(why, statuses, self.rank, self.world_size)

    def _close(self, failure: RankFailure) -> None:
        """End what this rank waits for; exchanges from now on raise `failure`."""
        self._failure, self.is_closed = failure, True
        for group in list(self._groups):
            self._hang_up(group)


# every watch of this process by the groups it covers
_watches: weakref.WeakKeyDictionary[dist.ProcessGroup, Watch] = weakref.WeakKeyDictionary()


def watch_of(group: dist.ProcessGroup | None) -> Watch | None:
    """The watch over a group, if there is one."""
    return None if group is None else _watches.get(group)


def watch_over(
    groups: Sequence[dist.ProcessGroup | None],
    timeout_s: float | None,
    hang_up: Callable[[dist.ProcessGroup], None],
) -> Watch | None:
    """Watch over groups from now on, the first of which has all ranks; None where one rank is alone.

    A group that is watched already keeps its watch and gets this timeout.

    Raises:
        ValueError: the timeout is not positive.
    """
    if timeout_s is not None and not timeout_s > 0:
        raise ValueError(f"timeout_s must be positive, or None for no limit but the process group's, got {timeout_s}")
    first = groups[0]
    if first is None or is_alone(first):
        return None
    watch = _watches.get(first) or Watch(first, hang_up)
    watch.timeout_s = timeout_s
    for group in groups:
        if group is not None:
            watch.cover(group)
    return watch


def _store_of(group: dist.ProcessGroup) -> Store:
    """The store that the ranks of a group share; KeyError once the group is destroyed."""
    return dist.distributed_c10d._get_process_group_store(group)


def _host_of_store(group: dist.ProcessGroup) -> int | None:
    """The rank of a group whose process keeps its store; None where that is a process of its own, or a file."""
    store: Any = _store_of(group)
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    own = isinstance(store, TCPStore) and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    ranks = dist.get_process_group_ranks(group)
    return ranks.index(0) if own and 0 in ranks else None


@atexit.register
def _end_all() -> None:
    # a thread that is in C++ when the interpreter goes would take the process down
    for thread in [watch.end() for watch in set(_watches.values())]:
        thread.join(2)

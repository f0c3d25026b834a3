"""How a checkpoint comes to be there all at once in a store, which renames nothing and has no locks.

Files are written where they stay; the manifest comes last, as one object that must not be there yet. What has no
manifest is no checkpoint, and the next save removes it. One job saves into a folder at a time: it has made the lock
object with the highest number, and writes into that every few seconds that it is alive. A lock that nobody writes into
is dead, and the next save makes the one after it. Locks only count up, so that whoever wakes up late sees that another
came.

Ranks tell each other how far they are by keys of their process group's store, never by a collective, and count there to
show that they live.
"""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store

from shardwise.sharding.comms.failures import RankFailure

from .folder import Attempt, next_name
from .manifest import FILE_NAME, NAME, STEP, Manifest, to_bytes
from .places import Place, Url
from .storage import StoreError, cat, create_alone, delete, listing, overwrite, storage_of

_LOCK = re.compile(r"\.lock-(\d{9})")
# how often a lock is written into, and for how long it is not until it is dead
_RENEW_SECONDS, _LEASE_SECONDS = 10.0, 60.0
# how often a lock is looked at that another process has
_LOOK_SECONDS = 2.0
# how often a rank counts on, and for how long it does not until it is dead
_BEAT_SECONDS, _DEAD_SECONDS = 1.0, 30.0
# how long rank 0 waits for others to see that a save is done
_LEAVE_SECONDS = 10.0
_MOST_LOCK_BYTES = 2000
# tokens of the locks that this process has
_held: set[str] = set()


def attempt_in(folder: Place) -> type[Attempt]:
    """How a save comes to be in a folder."""
    return ObjectAttempt if isinstance(folder, Url) else Attempt


class Lease:
    """The right to save into a folder of a store, while it is renewed.

    Attributes:
        beyond: the number of the last lock here that was taken from a holder who seemed dead, and may not know; 0 if
            none ever was. Steps get a name that no save before it writes to.

    Raises:
        BlockingIOError: somebody else has it, and is alive.
        StoreError: the store cannot be asked.
    """

    def __init__(self, folder: Url) -> None:
        self._folder, self._count, self._token = folder, 0, secrets.token_hex(8)
        self._holder = {
            "holder": f"process {os.getpid()} on {socket.gethostname()}", "machine": _machine(), "pid": os.getpid(),
            "token": self._token,
        }  # fmt: skip
        last, self.beyond = max(_locks(listing(folder)), default=0), 0
        self.number = last + 1
        if last > 0 and self._wait_for_death(last):
            self.beyond = self.number
        try:
            create_alone(self._file(self.number), self._content())
        except FileExistsError:
            raise self._refusal(self._read(self.number)) from None
        _held.add(self._token)

    def renew(self) -> None:
        """Show that this process lives."""
        self._count += 1
        overwrite(self._file(self.number), self._content())

    def release(self) -> None:
        """Let others save; one that cannot be released is dead once this process is, or no longer writes into it."""
        _held.discard(self._token)
        try:
            overwrite(self._file(self.number), json.dumps({"released": True, "beyond": self.beyond}).encode())
        except OSError as error:
            # a warning may be made an error, which rank 0 would raise alone
            logging.getLogger("shardwise").warning("the next save waits for a lock that was not released: %s", error)

    def require_shown(self, sizes: dict[str, int]) -> None:
        """Raise where a listing of the folder has not this lock: what else is there it may not have either."""
        if _name(self.number) not in sizes:
            raise StoreError(
                f"{self._file(self.number)} was written and is not in the list of the folder: lists of this store lag"
                " behind, or it was removed by hand; nothing is written"
            )

    def require_held(self, sizes: dict[str, int]) -> None:
        """Raise where a listing of the folder has a later lock."""
        if max(_locks(sizes), default=0) > self.number:
            raise StoreError(f"{self._folder}: another save took this one for dead and began: nothing is written")

    def clear(self, sizes: dict[str, int]) -> None:
        """Remove the locks before this one."""
        delete(self._folder, [_name(number) for number in _locks(sizes) if number < self.number])

    def _wait_for_death(self, number: int) -> bool:
        """Whether the holder of a lock is dead; False if it has released it.

        Raises:
            BlockingIOError: it lives.
        """
        first, begin = self._read(number), time.monotonic()
        seen = first
        while seen and not seen.get("released"):
            if _is_here(seen):
                if seen.get("pid") == os.getpid() and seen.get("token") in _held:
                    raise self._refusal(seen)
                if seen.get("pid") == os.getpid() or not _is_running(seen.get("pid")):
                    return True
            if seen != first:
                raise self._refusal(seen)
            if time.monotonic() - begin > _LEASE_SECONDS:
                return True
            time.sleep(_LOOK_SECONDS)
            seen = self._read(number)
        beyond = seen.get("beyond")
        if type(beyond) is int and 0 < beyond <= number:
            self.beyond = beyond
        return False

    def _refusal(self, holder: dict[str, Any]) -> BlockingIOError:
        who = str(holder.get("holder", "another process"))[:200]
        return BlockingIOError(
            f"{self._folder}: another save is under way there, by {who}: give each job a folder of its own"
        )

    def _read(self, number: int) -> dict[str, Any]:
        """What a lock says; nothing if it is gone."""
        try:
            content = json.loads(cat(self._file(number), 0, _MOST_LOCK_BYTES))
        except FileNotFoundError:
            return {}
        except ValueError:
            content = None
        return content if isinstance(content, dict) else {"holder": "another process"}

    def _content(self) -> bytes:
        return json.dumps({**self._holder, "count": self._count, "beyond": self.beyond}).encode()

    def _file(self, number: int) -> Url:
        return self._folder / _name(number)


def _name(number: int) -> str:
    return f".lock-{number:09d}"


def _locks(sizes: dict[str, int]) -> list[int]:
    """The numbers of the locks in a listing."""
    return [int(match[1]) for match in map(_LOCK.fullmatch, sizes) if match is not None]


def _machine() -> str | None:
    """What numbers of processes are valid in, until the next boot; None where nothing says."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None


def _is_here(holder: dict[str, Any]) -> bool:
    """Whether a lock's holder is, or was, a process beside this one."""
    return holder.get("machine") is not None and holder["machine"] == _machine() and type(holder.get("pid")) is int


def _is_running(pid: Any) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True


class ObjectAttempt(Attempt):
    """A save into a store that is under way, as one rank sees it."""

    _poll_seconds = 0.05

    def __init__(
        self,
        folder: Url,
        token: str,
        name: str,
        *,
        rank: int,
        world_size: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(folder, token, name, rank=rank, world_size=world_size, group=group)
        self.data = self.target
        self._lease: Lease | None = None
        self._keys: Store | None = None
        self._over = threading.Event()
        self._beats: threading.Thread | None = None
        # how far each rank had counted when this one looked, and when it saw that first
        self._counts: dict[int, tuple[bytes, float]] = {}

    @classmethod
    def begin(cls, folder: Any, step: int, *, world_size: int, group: dist.ProcessGroup | None = None) -> Attempt:
        """On rank 0: take the folder, clear what dead saves left there.

        Raises:
            BlockingIOError, StoreError: as `Lease`.
        """
        lease = Lease(folder)
        try:
            sizes = listing(folder)
            # two saves may have come and gone, lock and all, since this one looked for the highest number
            lease.require_held(sizes)
            lease.require_shown(sizes)
            lease.clear(sizes)
            clear_unfinished(folder, sizes)
            # who was taken for dead may still write into the folder of its step, and remove it
            name = next_name([name.split("/")[0] for name in sizes], step, beyond=lease.beyond)
            if _is_there(folder / name / NAME):
                raise StoreError(
                    f"{folder / name} is there and was not in the list of the folder: lists of this store lag behind;"
                    " nothing is written"
                )
            attempt = cls(folder, secrets.token_hex(8), name, rank=0, world_size=world_size, group=group)
        except BaseException:
            lease.release()
            raise
        attempt._lease = lease
        return attempt

    def join(self) -> None:
        """Show that this rank is alive, until `leave`."""
        if self.world_size == 1:
            self._keys = HashStore()
        else:
            assert self.group is not None
            store = dist.distributed_c10d._get_process_group_store(self.group)
            self._keys = PrefixStore(f"shardwise/save/{self.token}", store)
        # a rank that cannot reach the store says so before anything is written
        storage_of(self.folder).files(self.folder)
        self._say("alive", b"0")
        self._beats = threading.Thread(target=self._beat, name=f"alive in {self.target.name}", daemon=True)
        self._beats.start()

    def leave(self) -> None:
        """Let everything go; what a failed save wrote is removed, by each rank its own and by rank 0 the rest."""
        self._over.set()
        if self._beats is not None:
            self._beats.join()
        done = False
        with suppress(Exception):
            done = self._has_said(0, "done")
        if self._lease is None:
            if not done:
                with suppress(OSError):
                    delete(self.target, [_file_of(self.rank)])
            with suppress(Exception):
                self._say("left", b"")
            return
        if done:
            with suppress(Exception):
                self._forget()
        else:
            with suppress(OSError):
                storage_of(self.target).remove(self.target, NAME)
        self._lease.release()

    def drop(self, name: str) -> None:
        """Nothing yet: `leave` removes it."""

    def _forget(self) -> None:
        """Remove the keys of this save, once all others have seen the end."""
        end = time.monotonic() + _LEAVE_SECONDS
        while not all(self._has_said(rank, "left") for rank in range(1, self.world_size)):
            if time.monotonic() > end:
                return
            time.sleep(self._poll_seconds)
        assert self._keys is not None
        for rank in range(self.world_size):
            for what in ("alive", "json", "failed", "done", "left"):
                self._keys.delete_key(f"{rank}.{what}")

    def _commit(self, manifest: Manifest) -> None:
        self._require_whole(manifest)
        create_alone(self.target / NAME, to_bytes(manifest))
        # stopped between the two, it was taken for dead, and its files were removed: no later lock now, none was then
        self._require_whole(manifest)

    def _require_whole(self, manifest: Manifest) -> None:
        """Raise unless this save has the folder, and all its files are there."""
        assert self._lease is not None
        sizes = listing(self.folder)
        self._lease.require_held(sizes)
        for facts in manifest.files:
            there = sizes.get(f"{self.target.name}/{facts.name}")
            if there != facts.bytes:
                have = "is gone" if there is None else f"has {there} bytes"
                raise StoreError(f"{self.target / facts.name} {have}, {facts.bytes} bytes were written")

    def _beat(self) -> None:
        """Count, and renew the lock; a failure here shows when the save commits."""
        count, renewed = 0, time.monotonic()
        while not self._over.wait(_BEAT_SECONDS):
            count += 1
            with suppress(Exception):
                self._say("alive", str(count).encode())
            if self._lease is not None and time.monotonic() - renewed > _RENEW_SECONDS:
                renewed = time.monotonic()
                with suppress(Exception):
                    self._lease.renew()

    def _say(self, what: str, data: bytes) -> None:
        assert self._keys is not None
        # no store tells an empty value from none
        self._keys.set(f"{self.rank}.{what}", "=" + data.decode())

    def _has_said(self, rank: int, what: str) -> bool:
        assert self._keys is not None
        try:
            return self._keys.check([f"{rank}.{what}"])
        except RuntimeError as error:
            raise self._without_store() from error

    def _said(self, rank: int, what: str) -> bytes:
        assert self._keys is not None
        try:
            return self._keys.get(f"{rank}.{what}")[1:]
        except RuntimeError as error:
            raise self._without_store() from error

    def _without_store(self) -> RankFailure:
        return RankFailure(
            f"the store of the process group is gone, and with it the rank that kept it, in the save of {self.target};"
            " older checkpoints are untouched", [0],
        )  # fmt: skip

    def _is_alive(self, rank: int) -> bool:
        count = self._said(rank, "alive")
        seen = self._counts.get(rank)
        if seen is None or seen[0] != count:
            self._counts[rank] = count, time.monotonic()
            return True
        return time.monotonic() - seen[1] < _DEAD_SECONDS


def clear_unfinished(folder: Url, sizes: dict[str, int]) -> None:
    """Remove what dead saves left: files of ranks in folders of steps that have no manifest, and nothing else."""
    names = [name for name in sizes if "/" in name and _is_unfinished(name, sizes)]
    # a list may lag behind, an object does not
    finished = {step for step in {name.split("/")[0] for name in names} if _is_there(folder / step / NAME)}
    delete(folder, [name for name in names if name.split("/")[0] not in finished])


def _is_unfinished(name: str, sizes: dict[str, int]) -> bool:
    step, file = name.split("/")
    return bool(STEP.fullmatch(step) and FILE_NAME.fullmatch(file)) and f"{step}/{NAME}" not in sizes


def _is_there(file: Url) -> bool:
    """Whether there is an object, by asking for it."""
    try:
        cat(file, 0, 1)
    except FileNotFoundError:
        return False
    return True


def _file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"

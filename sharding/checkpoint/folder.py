"""A folder of checkpoints: which steps it has, which are good, and how a new one comes to be there all at once.

What follows is of folders on this machine; `object_saves.py` has what is different in a store. A save lies in
`.saving-<token>/data` until it is whole, and is then renamed. Its ranks tell each other how far they are by small files
beside `data`, never by a collective: they may be threads while the main threads train. Who lives holds a lock on a
file, which the kernel lets go when the process dies.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import shutil
import socket
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch.distributed as dist

from shardwise.sharding.comms.failures import RankFailure
from shardwise.untrusted import require_regular

from .errors import ERRORS, CheckpointDamaged
from .files import check_checksum, check_header, check_size
from .manifest import NAME, STEP, Manifest, read_with_notes, to_bytes
from .places import Place, locate
from .storage import REMOVING, files_in, storage_of, sync_folder

_SAVING, _LOCK = ".saving-", ".lock"
# how often a rank looks how far the others are
_POLL_SECONDS = 0.01
# how long rank 0 waits for others to see that a save is done; what stays is removed by the next
_LEAVE_SECONDS = 10.0
# a lock file says who has the lock
_HOLDER_BYTES = 200


def steps(folder: str | os.PathLike[str]) -> list[Path | Any]:
    """The step folders, oldest first, good or not; none if there is no such folder. In a store those with a manifest.

    They are Paths, or for a folder with a scheme `Url`s, which have a `name` and are taken wherever a path is.

    Raises:
        OSError: a store cannot be asked.
    """
    place = locate(folder)
    named = [(STEP.fullmatch(name), name) for name in storage_of(place).step_names(place, NAME)]
    numbered = [(int(match[1]), int(match[2] or 0), name) for match, name in named if match is not None]
    return [place / name for _, _, name in sorted(numbered)]


def latest(folder: str | os.PathLike[str]) -> Path | Any | None:
    """The newest good checkpoint: its manifest can be read, and its files have their sizes. None if there is none.

    A Path, or for a folder with a scheme a `Url`.

    Raises:
        OSError: a store cannot be asked; nothing is passed over then.
    """
    return next((path for path in reversed(steps(folder)) if is_complete(path)), None)


def is_complete(path: Place) -> bool:
    """Whether all files of a checkpoint are there in their sizes; `verify` looks closer."""
    try:
        manifest, _ = read_with_notes(path)
        files = files_in(path)
        for facts in manifest.files:
            check_size(files, facts)
    except (CheckpointDamaged, FileNotFoundError):
        return False
    return True


def verify(path: str | os.PathLike[str]) -> list[str]:
    """The faults of a checkpoint, each with the name of its file; an empty list if it is good. Reads all of it.

    A manifest without a checksum of its own, as they were written at first, is loaded, and named here.
    """
    place = locate(path)
    try:
        manifest, unchecked = read_with_notes(place)
    except (CheckpointDamaged, FileNotFoundError) as error:
        return [str(error)]
    faults, files = [unchecked] if unchecked else [], files_in(place)
    for facts in manifest.files:
        try:
            check_checksum(files, facts)
            check_header(files, facts, manifest.by_file[facts.name])
        except CheckpointDamaged as error:
            faults.append(str(error))
    return faults


def step_of(path: Place) -> int:
    """The step in the name of a step folder."""
    match = STEP.fullmatch(path.name)
    assert match is not None
    return int(match[1])


class FolderLock:
    """The right to save into a folder, one holder at a time; the kernel takes it back from a process that died.

    Raises:
        BlockingIOError: somebody else has it, and is alive.
        OSError: the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        lock = folder / _LOCK
        if os.path.lexists(lock):
            # a pipe would be one that nobody else can hold
            require_regular(lock, follow=False)
        self._file: int | None = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._file, _HOLDER_BYTES).decode(errors="replace").strip() or "another process"
            os.close(self._file)
            if not isinstance(error, BlockingIOError):
                raise
            raise BlockingIOError(
                f"{folder}: another save is under way there, by {holder}: give each job a folder of its own"
            ) from None
        # in one go, over what the holder before wrote; a full disk is met where it matters
        with suppress(OSError):
            holder = f"process {os.getpid()} on {socket.gethostname()}"
            os.write(self._file, holder.encode()[:_HOLDER_BYTES].ljust(_HOLDER_BYTES))

    def release(self) -> None:
        """Let others save."""
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            os.close(self._file)
            self._file = None


class Attempt:
    """A save that is under way, as one rank sees it.

    Rank 0 begins it with `begin`, and tells the others `token` and the name of the step folder, who `join`.
    """

    _poll_seconds = _POLL_SECONDS

    def __init__(
        self,
        folder: Any,
        token: str,
        name: str,
        *,
        rank: int,
        world_size: int,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.folder, self.token, self.target = folder, token, folder / name
        self.rank, self.world_size, self.group = rank, world_size, group
        # where this save's files are written
        self.data: Any = folder / f"{_SAVING}{token}" / "data"
        self._lock: FolderLock | None = None
        self._alive: BinaryIO | None = None

    @classmethod
    def begin(cls, folder: Any, step: int, *, world_size: int, group: dist.ProcessGroup | None = None) -> Attempt:
        """On rank 0: take the folder, clear what dead saves left there, and make room for this one.

        Raises:
            BlockingIOError, OSError: as `FolderLock`.
        """
        folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder)
        try:
            clear_leftovers(folder)
            name = next_name([path.name for path in steps(folder)], step)
            attempt = cls(folder, secrets.token_hex(8), name, rank=0, world_size=world_size, group=group)
            attempt.data.mkdir(parents=True)
        except BaseException:
            lock.release()
            raise
        attempt._lock = lock
        return attempt

    def join(self) -> None:
        """Show that this rank is alive, until `leave`."""
        self._alive = os.fdopen(os.open(self._signal(self.rank, "alive"), os.O_WRONLY | os.O_CREAT, 0o666), "wb")
        fcntl.flock(self._alive, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def report(self, message: dict[str, Any]) -> None:
        """Tell rank 0 that this rank's part is on the disk."""
        self._say("json", json.dumps(message).encode())

    def fail(self, error: Exception) -> None:
        """Tell the others that this rank cannot go on."""
        self._say("failed", ERRORS.encode(error))

    def drop(self, name: str) -> None:
        """Remove a file of this rank: the room is needed to say that it failed."""
        (self.data / name).unlink(missing_ok=True)

    def settle(self, compose: Callable[[list[dict[str, Any]]], Manifest], keep_last: int | None) -> None:
        """Wait until all ranks have reported; rank 0 then composes the manifest of it all and commits.

        Raises:
            RankFailure: a rank's process is gone.
            Exception: what a rank failed with.
        """
        if self.rank:
            while not self._has_said(0, "done"):
                self._raise_failures()
                time.sleep(self._poll_seconds)
            return
        while not all(self._has_said(rank, "json") for rank in range(self.world_size)):
            self._raise_failures()
            time.sleep(self._poll_seconds)
        messages = [json.loads(self._said(rank, "json")) for rank in range(self.world_size)]
        self._commit(compose(messages))
        try:
            keep(self.folder, self.target, keep_last)
        except Exception as error:
            # a warning that is made an error, say: what is committed stays, and all ranks go on alike
            logging.getLogger("shardwise").warning("older checkpoints in %s stay: %s", self.folder, error)
        finally:
            self._say("done", b"")

    def leave(self) -> None:
        """Let everything go; rank 0 removes what lies beside a checkpoint that is done, or half of one that failed."""
        if self._lock is not None:
            shutil.rmtree(self.data, ignore_errors=True)
            if self._has_said(0, "done") and self._others_left():
                shutil.rmtree(self.data.parent, ignore_errors=True)
            self._lock.release()
        if self._alive is not None:
            # a process forked meanwhile, of a data loader say, has the file open as well
            fcntl.flock(self._alive, fcntl.LOCK_UN)
            self._alive.close()

    def _others_left(self) -> bool:
        """Whether all others have seen the end; waits a little."""
        end = time.monotonic() + _LEAVE_SECONDS
        while any(self._is_alive(rank) for rank in range(1, self.world_size)):
            if time.monotonic() > end:
                return False
            time.sleep(self._poll_seconds)
        return True

    def _commit(self, manifest: Manifest) -> None:
        with open(self.data / NAME, "xb") as file:
            file.write(to_bytes(manifest))
            file.flush()
            os.fsync(file.fileno())
        sync_folder(self.data)
        os.rename(self.data, self.target)
        sync_folder(self.folder)

    def failure_of_others(self) -> Exception | None:
        """The error that another rank reported by `fail`, if one did."""
        failed = (rank for rank in range(self.world_size) if rank != self.rank and self._has_said(rank, "failed"))
        return next((ERRORS.decode(self._said(rank, "failed"), rank) for rank in failed), None)

    def _raise_failures(self) -> None:
        failure = self.failure_of_others()
        if failure is not None:
            raise failure
        for rank in range(self.world_size):
            # who reported may be gone, but for rank 0, which commits
            if rank != self.rank and (rank == 0 or not self._has_said(rank, "json")):
                self._raise_if_dead(rank)

    def _raise_if_dead(self, rank: int) -> None:
        # it may have reported between our looks
        if self._is_alive(rank) or any(
            self._has_said(rank, end) for end in ("failed", "done" if rank == 0 else "json")
        ):
            return
        raise RankFailure(f"rank {rank} died in the save of {self.target}; older checkpoints are untouched", [rank])

    def _is_alive(self, rank: int) -> bool:
        try:
            with open(self._signal(rank, "alive"), "rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            pass
        return False

    def _say(self, what: str, data: bytes) -> None:
        """Let the other ranks know."""
        _write_whole(self._signal(self.rank, what), data)

    def _has_said(self, rank: int, what: str) -> bool:
        return self._signal(rank, what).exists()

    def _said(self, rank: int, what: str) -> bytes:
        return self._signal(rank, what).read_bytes()

    def _signal(self, rank: int, what: str) -> Path:
        signal: Path = self.data.parent / f"rank-{rank:05d}.{what}"
        return signal


def next_name(present: Sequence[str], step: int, *, beyond: int = 0) -> str:
    """The name of a step that is saved, perhaps once more: beside the old one until it goes, numbered from `beyond`."""
    named = (STEP.fullmatch(name) for name in present)
    again = [int(match[2] or 0) for match in named if match is not None and int(match[1]) == step]
    number = max(1 + max(again, default=-1), beyond)
    return f"step-{step:012d}" + (f".{number}" if number else "")


def keep(folder: Place, saved: Place, keep_last: int | None) -> None:
    """Remove checkpoints older than the newest `keep_last` good ones, never `saved`, and older forms of its step.

    What cannot be removed stays, with a warning: the new one is there.
    """
    try:
        gone = _unwanted(folder, saved, keep_last)
    except OSError as error:
        warnings.warn(f"older checkpoints stay, nothing says which there are: {error}", stacklevel=2)
        return
    for path in gone:
        try:
            storage_of(path).remove(path, NAME)
        except OSError as error:
            warnings.warn(f"{path} is no longer wanted and cannot be removed: {error}", stacklevel=2)


def _unwanted(folder: Place, saved: Place, keep_last: int | None) -> list[Place]:
    """What `keep` removes."""
    present = [path for path in steps(folder) if path != saved]
    gone = [path for path in present if step_of(path) == step_of(saved)]
    if keep_last is not None:
        others = [path for path in present if path not in gone]
        kept = [path for path in reversed(others) if is_complete(path)][: keep_last - 1]
        oldest = min([step_of(path) for path in kept], default=step_of(saved))
        gone += [p for p in others if p not in kept and (step_of(p) < oldest or is_complete(p))]
    return gone


def remove(path: str | os.PathLike[str]) -> None:
    """Remove a checkpoint, good or not: at once for all who look, then its bytes.

    Raises:
        FileNotFoundError: there is none: nothing with a manifest, nor with the name of a step.
        OSError: it cannot be removed.
    """
    place = locate(path)
    if STEP.fullmatch(place.name) is None:
        files_in(place).size(NAME)
    storage_of(place).remove(place, NAME)


def clear_leftovers(folder: Path) -> None:
    """Remove what dead saves left; who calls this holds the lock, so none is alive."""
    for entry in os.scandir(folder):
        if entry.name.startswith((_SAVING, REMOVING)) and entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)


def _write_whole(path: Path, data: bytes) -> None:
    """Write a small file such that nobody sees a part of it."""
    with open(path.with_name(f"{path.name}.part"), "wb") as file:
        file.write(data)
    os.rename(path.with_name(f"{path.name}.part"), path)

"""Scratch files of this process: never state, without a name, gone with the process however that ends.

The folder shows only a lock for each name, which says who has it; the system takes it back from a process that died.
Disk space is reserved when a file is made, so that a run which starts does not meet a full disk later.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import re
import shutil
import socket
import sys
import tempfile
import warnings
import weakref
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

_GIB = 1 << 30
_HOLDER_BYTES = 512
# past what says who holds it: on Windows nobody reads what is locked
_LOCKED_BYTE = 1 << 20
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
# a folder that cannot be one of scratch files
_NO_FOLDER = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENOENT, errno.ELOOP,
    errno.ENAMETOOLONG,
)  # fmt: skip
_HELD_BY_OTHERS = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES, errno.EDEADLK)

# by path: its lock and how many scratch files of this process need it
_locks: dict[Path, tuple[int, int]] = {}
_open: weakref.WeakSet[ScratchFile] = weakref.WeakSet()


class ScratchFile:
    """A file of `nbytes` zeros in a folder, which is made where it is missing; its name there is nobody's business.

    `name` is what it is for, "user" for a table: it names the lock, and errors. Two processes cannot have the same name
    in one folder at a time; one process can.

    Raises:
        BlockingIOError: another process has this name in this folder.
        OSError: the folder cannot be made or written, or its disk has too little room.
    """

    def __init__(self, folder: str | os.PathLike[str], *, name: str, nbytes: int) -> None:
        self.name, self.nbytes = name, nbytes
        self.folder = Path(folder).absolute()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            self.fail(error, "the folder cannot be made")
        self._require_space(nbytes)
        try:
            lock = _take_lock(self.folder, name)
        except BlockingIOError:
            raise
        except OSError as error:
            self.fail(error, "its lock in the folder cannot be taken")
        try:
            # has no name, or goes when it is closed: a process that is killed leaves nothing
            self._file = tempfile.TemporaryFile(dir=self.folder, prefix="shardwise-", buffering=0)  # noqa: SIM115
            # before anything can fail: who drops this object gives both back
            self._release = weakref.finalize(self, _release, self._file, lock, os.getpid())
        except OSError as error:
            _drop_lock(lock)
            self.fail(error, "no file can be made in the folder")
        _open.add(self)
        try:
            self._extend(nbytes)
        except BaseException:
            self.close()
            raise

    def fileno(self) -> int:
        """Its number in this process.

        Raises:
            ValueError: it is closed; in a forked process it is.
        """
        if self._file.closed:
            raise ValueError(f"table {self.name!r}: its scratch file in {self.folder} is closed in this process")
        return self._file.fileno()

    def grow(self, nbytes: int) -> None:
        """Have so many bytes, no fewer than before.

        Raises:
            OSError: the disk has too little room; the file is as it was.
        """
        self._require_space(nbytes - self.nbytes)
        self._extend(nbytes)
        self.nbytes = nbytes

    def close(self) -> None:
        """Give the disk space and the lock back; closing again does nothing."""
        self._release()
        _open.discard(self)

    def fail(self, error: OSError, what: str) -> NoReturn:
        """Raise the error again, with the table, the folder and what can be done."""
        number = error.errno or errno.EIO
        text = f"table {self.name!r}: {what}: {error.strerror or error}. {self._way_out(number)}"
        raise OSError(number, text, str(self.folder)) from error

    def fail_short(self) -> NoReturn:
        """Raise for a file that ends before its end."""
        text = (
            f"table {self.name!r}: its scratch file ends before its {self.nbytes:,} bytes: something truncated it, or"
            " the disk is damaged. What it held is lost: start again from the last checkpoint"
        )
        raise OSError(errno.EIO, text, str(self.folder))

    def _way_out(self, number: int) -> str:
        if number in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
            free = _gib(_free_bytes(self.folder))
            return (
                f"It needs {_gib(self.nbytes)} in all, {free} are free: make room or choose another folder, then"
                " start again from the last checkpoint"
            )
        if number == errno.EFBIG:
            return f"It needs {_gib(self.nbytes)}, which `ulimit -f` or the file system does not allow in one file"
        if number in _NO_FOLDER:
            return "Choose a folder that this process may write"
        return "Its rows are lost: look at the disk, or choose another folder, and start again from the last checkpoint"

    def _require_space(self, more: int) -> None:
        """Raise where the disk has no room for so many bytes beside those that its open files still need."""
        free = _free_bytes(self.folder)
        disk = os.stat(self.folder).st_dev
        files = [file for file in _open if os.stat(file.fileno()).st_dev == disk]
        unfilled = sum(max(0, file.nbytes - _filled_bytes(file.fileno())) for file in files)
        if more > free - unfilled:
            kept = f", {_gib(unfilled)} of them for open files that are still to be filled" if unfilled else ""
            text = (
                f"table {self.name!r}: its rows need {_gib(more)} in a scratch file, {_gib(free)} are free{kept}:"
                " make room or choose another folder"
            )
            raise OSError(errno.ENOSPC, text, str(self.folder))

    def _extend(self, nbytes: int) -> None:
        try:
            if not _reserve(self.fileno(), nbytes):
                os.truncate(self.fileno(), nbytes)
        except OSError as error:
            self.fail(error, f"a scratch file of {_gib(nbytes)} cannot be made")


def _release(file: IO[bytes], lock: Path | None, process: int) -> None:
    # a forked process has neither
    if os.getpid() == process:
        file.close()
        if lock is not None:
            _drop_lock(lock)


def _free_bytes(folder: Path) -> int:
    # a folder that is not there, or not any more, would lie on its parent's disk
    while True:
        try:
            return shutil.disk_usage(folder).free
        except (FileNotFoundError, NotADirectoryError):
            folder = folder.parent


def _filled_bytes(file: int) -> int:
    status = os.stat(file)
    # where there are no blocks to count, files have their space from the beginning
    return getattr(status, "st_blocks", status.st_size // 512) * 512


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GIB:.2f} GiB"


@cache
def _fallocate() -> Any:
    """`fallocate` of Linux; posix_fallocate would write a byte a block where the file system cannot reserve."""
    function = getattr(ctypes.CDLL(None, use_errno=True), "fallocate64", None) if sys.platform == "linux" else None
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return function


def _reserve(file: int, nbytes: int) -> bool:
    """Have the disk set space aside for all of the file; False where it cannot, and nothing was done."""
    fallocate = _fallocate()
    while fallocate is not None and fallocate(file, 0, 0, nbytes):
        number = ctypes.get_errno()
        if number in (errno.EOPNOTSUPP, errno.ENOSYS):
            return False
        if number != errno.EINTR:
            raise OSError(number, os.strerror(number))
    return fallocate is not None


def _take_lock(folder: Path, name: str) -> Path | None:
    """Take the lock of a name in a folder for this process, once more if it has it; None where there are no locks."""
    path = folder / f"{_file_name(name)}.lock"
    if path in _locks:
        file, holders = _locks[path]
        _locks[path] = file, holders + 1
        return path
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
        try:
            _lock(file)
        except OSError as error:
            holder = os.read(file, _HOLDER_BYTES).decode(errors="replace").strip() or "another process"
            os.close(file)
            if error.errno in _NO_LOCKS:
                warnings.warn(f"{folder} has no file locks: two jobs that share it are not told apart", stacklevel=4)
                return None
            if error.errno not in _HELD_BY_OTHERS:
                raise
            text = f"table {name!r}: {holder} has its scratch file in this folder: give each job a folder of its own"
            raise BlockingIOError(errno.EWOULDBLOCK, text, str(folder)) from None
        if _is_at(path, file):
            break
        # its last holder removed it between our two calls
        os.close(file)
    with suppress(OSError):
        # over all that a holder before wrote
        this = f"process {os.getpid()} on {socket.gethostname()}".encode()[:_HOLDER_BYTES]
        os.write(file, this.ljust(_HOLDER_BYTES))
    _locks[path] = file, 1
    return path


def _drop_lock(path: Path | None) -> None:
    if path is None or path not in _locks:
        return
    file, holders = _locks.pop(path)
    if holders > 1:
        _locks[path] = file, holders - 1
        return
    # while it is held, so that nobody takes a file that is about to go
    with suppress(OSError):
        path.unlink()
    os.close(file)
    # Windows removes no open file
    with suppress(OSError):
        if sys.platform == "win32":
            path.unlink()


def _file_name(name: str) -> str:
    """A name as one of a file: any table's, and no two the same."""
    plain = re.sub(r"[^\w.-]", "_", name, flags=re.ASCII)[:100]
    return plain if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _is_at(path: Path, file: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(file))
    except FileNotFoundError:
        return False


def _lock(file: int) -> None:
    if sys.platform == "win32":
        os.lseek(file, _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
        finally:
            os.lseek(file, 0, os.SEEK_SET)
    else:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _forget() -> None:
    """In a forked process: what its parent has is the parent's, and the disk and the locks go with that one."""
    for scratch in [*_open]:
        scratch._file.close()
    _open.clear()
    for file, _ in _locks.values():
        os.close(file)
    _locks.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)

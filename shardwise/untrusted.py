"""Files and JSON that others wrote, read as if by an enemy: regular files of bounded size, every check linear in it.

The standard library alone: whatever reads a file that a user names, or that lies in a folder, may import this.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from typing import Any, BinaryIO, TypeVar

T = TypeVar("T", bound=Hashable)

# of a file that is read as a whole: a plan, facts about a model, a configuration
MAX_BYTES = 256 * 2**20
_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISLNK, "a symbolic link"),
    (stat.S_ISFIFO, "a named pipe (FIFO)"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)
# of platforms that have these: opening a pipe does not wait for a writer, and no child process gets the file
_OPEN = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def open_regular(path: str | os.PathLike[str], *, follow: bool = True) -> BinaryIO:
    """A regular file, opened to read its bytes unbuffered. Never waits: what is no regular file is not opened.

    Args:
        path: the file.
        follow: whether a symbolic link is followed; otherwise it is refused too.

    Raises:
        OSError: it is a folder, a pipe, a socket or a device, is not there or cannot be read; names it.
    """
    require_regular(path, follow=follow)
    file = os.open(path, _OPEN | (0 if follow else getattr(os, "O_NOFOLLOW", 0)))
    try:
        # it may have been replaced since
        _require_regular(os.fstat(file), path)
        return open(file, "rb", buffering=0)
    except BaseException:
        os.close(file)
        raise


def require_regular(path: str | os.PathLike[str], *, follow: bool = True) -> os.stat_result:
    """What the file system knows of a regular file, without opening it. For libraries that open by name.

    Raises:
        OSError: as `open_regular`.
    """
    status = os.stat(path, follow_symlinks=follow)
    _require_regular(status, path)
    return status


def read_regular(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES, follow: bool = True) -> bytes:
    """All bytes of a regular file; a larger one than `max_bytes` is refused unread.

    Raises:
        OSError: as `open_regular`.
        ValueError: it is too large; names it.
    """
    with open_regular(path, follow=follow) as file:
        size = os.fstat(file.fileno()).st_size
        # one more, as it may grow; files of /proc and /sys have no size and still bytes
        data = b"" if size > max_bytes else _read(file, min(max(size, 2**16), max_bytes) + 1, max_bytes + 1)
    if max(size, len(data)) > max_bytes:
        raise ValueError(f"{path} has {max(size, len(data))} bytes, at most {max_bytes} are read of such a file")
    return data


def read_text(path: str | os.PathLike[str], *, max_bytes: int = MAX_BYTES) -> str:
    """A regular file as text, of UTF-8.

    Raises:
        OSError: as `open_regular`.
        ValueError: as `read_regular`; or it is no UTF-8.
    """
    return read_regular(path, max_bytes=max_bytes).decode("utf-8")


def parse_json(data: bytes | str, *, allow_nan: bool = False) -> Any:
    """JSON without keys that stand twice in an object, of which one would be lost.

    Args:
        data: it, bytes as UTF-8.
        allow_nan: whether NaN and Infinity are numbers, as Python writes them and JSON has them not.

    Raises:
        ValueError: it is not; also where it is nested too deeply.
    """
    text = data.decode("utf-8") if isinstance(data, bytes) else data
    try:
        return json.loads(text, object_pairs_hook=_no_key_twice, parse_constant=float if allow_nan else _no_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def repeated(names: Iterable[T]) -> list[T]:
    """Those of `names` that stand there more than once, each once, by their first place. Linear in their number."""
    return [name for name, count in Counter(names).items() if count > 1]


def _read(file: BinaryIO, first: int, most: int) -> bytes:
    """The bytes up to the end, at most `most`; a read takes `first` or fewer."""
    blocks: list[bytes] = []
    while most > 0 and (block := file.read(min(first, most))):
        blocks.append(block)
        most -= len(block)
    return b"".join(blocks)


def _require_regular(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(status.st_mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(status.st_mode)), "something else")
        number = errno.EISDIR if stat.S_ISDIR(status.st_mode) else errno.EINVAL
        raise OSError(number, f"no regular file but {kind}", os.fspath(path))


def _no_key_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError(f"key {repeated(name for name, _ in pairs)[0][:80]!r} is there twice")
    return content


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")

"""Where checkpoints lie: folders of this machine's file systems, and stores that a URL names, as one interface.

A place is a `Path` or a `Url` (`places.py`). `storage_of` has what either can do; nothing else asks which of the two a
place is, but for how a save comes to be there all at once (`folder.py`, `object_saves.py`). Paths never go through
fsspec.

A store keeps objects, each of which is there whole or not at all; it renames nothing, and folders are but beginnings
of names. A checkpoint is there once its manifest is, which is written last and removed first. No failing network looks
like a lost file: what the store does not answer is a StoreError.
"""

from __future__ import annotations

import io
import os
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from glob import has_magic
from pathlib import Path
from typing import Any, BinaryIO, Protocol, cast

import safetensors

from shardwise._version import how_to_install
from shardwise.untrusted import open_regular, read_regular, require_regular

from .places import Place, Url

# how the name of a checkpoint begins that is being removed
REMOVING = ".removing-"
# what is sent at once, at least, and what is read of a file whose header is wanted
_PART_BYTES, _AHEAD_BYTES = 16 * 2**20, 8 * 2**10
# longer ranges are read in pieces of this size at the same time, but not one of which only the beginning may be there
_PIECE_BYTES, _MOST_BYTES = 4 * 2**20, 128 * 2**20
# what is to be installed for a scheme
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}


class StoreError(OSError):
    """A store could not be asked, or refused: no word on what lies there. The message begins with the URL."""


class Files(Protocol):
    """The files of one folder, to be read. `costly` says whether a look at one is a request to another machine.

    Raises:
        FileNotFoundError, OSError: a file is not there, or is none; names it.
        StoreError: nobody can say.
    """

    path: Place
    costly: bool

    def size(self, name: str) -> int:
        """Of a regular file."""
        ...

    def read(self, name: str, max_bytes: int) -> bytes:
        """All of it; ValueError if it is larger."""
        ...

    def open(self, name: str) -> AbstractContextManager[BinaryIO]:
        """To be read from its beginning on."""
        ...

    def map(self, name: str) -> Any | None:
        """Its tensors, as `safetensors.safe_open` gives them; None where it is read by `range`."""
        ...

    def range(self, name: str, begin: int, end: int) -> bytes:
        """Bytes [begin, end) of it."""
        ...


class Storage(Protocol):
    """What checkpoints need of where they lie. Raises as `Files`."""

    def step_names(self, folder: Any, manifest: str) -> list[str]:
        """Names of the folders in `folder`, those of steps that may be checkpoints among them; none if there is none.

        Of a store those that have a `manifest`: others are not finished.
        """
        ...

    def files(self, path: Any) -> Files:
        """Of a step folder."""
        ...

    def create(self, file: Any, size: int) -> AbstractContextManager[Any]:
        """A new file of `size` bytes, to be written; safe on the disk at the end of the block."""
        ...

    def replace(self, file: Any, size: int) -> AbstractContextManager[Any]:
        """As `create`, of a file that may be there already and is replaced at once or not at all."""
        ...

    def remove(self, path: Any, manifest: str) -> None:
        """Remove a checkpoint: at once for all who look, then its bytes."""
        ...


class LocalFiles:
    """Files of a folder on this machine; links are not followed."""

    costly = False

    def __init__(self, path: Path) -> None:
        self.path: Place = path
        self._path = path

    def size(self, name: str) -> int:
        """As `Files`."""
        return require_regular(self._path / name, follow=False).st_size

    def read(self, name: str, max_bytes: int) -> bytes:
        """As `Files`."""
        return read_regular(self._path / name, max_bytes=max_bytes, follow=False)

    def open(self, name: str) -> AbstractContextManager[BinaryIO]:
        """As `Files`."""
        return open_regular(self._path / name, follow=False)

    def map(self, name: str) -> Any | None:
        """As `Files`."""
        return safetensors.safe_open(self._path / name, framework="pt", device="cpu")

    def range(self, name: str, begin: int, end: int) -> bytes:
        """As `Files`."""
        raise NotImplementedError(f"{self._path / name} is mapped")


class LocalStorage:
    """Folders of this machine."""

    def step_names(self, folder: Path, manifest: str) -> list[str]:
        """As `Storage`."""
        if not folder.is_dir():
            return []
        # not asked of the entry, which raises for a link that leads to itself
        return [entry.name for entry in os.scandir(folder) if os.path.isdir(entry.path)]

    def files(self, path: Path) -> Files:
        """As `Storage`."""
        return LocalFiles(path)

    @contextmanager
    def create(self, file: Path, size: int) -> Iterator[Any]:
        """As `Storage`; FileExistsError if it is there."""
        with open(file, "xb", buffering=0) as opened:
            yield opened
            os.fsync(opened.fileno())

    @contextmanager
    def replace(self, file: Path, size: int) -> Iterator[Any]:
        """As `Storage`."""
        part = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
        try:
            with self.create(part, size) as opened:
                yield opened
            os.replace(part, file)
            sync_folder(file.parent)
        finally:
            part.unlink(missing_ok=True)

    def remove(self, path: Path, manifest: str) -> None:
        """As `Storage`."""
        hidden = path.parent / f"{REMOVING}{secrets.token_hex(8)}"
        os.rename(path, hidden)
        shutil.rmtree(hidden, ignore_errors=True)


class ObjectFiles:
    """Files of a folder in a store. Sizes are those of one listing, made when the first is asked for."""

    costly = True

    def __init__(self, path: Url) -> None:
        # a scheme that cannot be used is refused before a file is asked for
        file_system(path)
        self.path: Place = path
        self._path = path
        self._sizes: dict[str, int] | None = None

    def size(self, name: str) -> int:
        """As `Files`."""
        if self._sizes is None:
            self._sizes = listing(self._path, below=False)
        if name not in self._sizes:
            raise FileNotFoundError(f"the store has no object {self._path / name}")
        return self._sizes[name]

    def read(self, name: str, max_bytes: int) -> bytes:
        """As `Files`."""
        file = self._path / name
        data = cat(file, 0, max_bytes + 1)
        if len(data) > max_bytes:
            raise ValueError(f"{file} has more than {max_bytes} bytes, at most as many are read of such a file")
        return data

    def open(self, name: str) -> AbstractContextManager[BinaryIO]:
        """As `Files`."""
        return cast(BinaryIO, _Reader(self, name))

    def map(self, name: str) -> Any | None:
        """As `Files`."""
        return None

    def range(self, name: str, begin: int, end: int) -> bytes:
        """As `Files`."""
        data = cat(self._path / name, begin, end)
        if len(data) != end - begin:
            raise StoreError(f"{self._path / name}: {len(data)} bytes came from byte {begin} on, not {end - begin}")
        return data


class _Reader(io.RawIOBase):
    """A file from its beginning on; the first request brings a header's worth."""

    def __init__(self, files: ObjectFiles, name: str) -> None:
        super().__init__()
        self._files, self._name, self._at = files, name, 0
        self._size, self._ahead = files.size(name), b""

    def readable(self) -> bool:
        """It is."""
        return True

    def read(self, size: int = -1, /) -> bytes:
        """The next bytes, fewer at the end."""
        end = self._size if size < 0 else min(self._at + size, self._size)
        if end > self._at + len(self._ahead):
            begin = self._at + len(self._ahead)
            far = min(max(end, _AHEAD_BYTES), self._size)
            self._ahead += self._files.range(self._name, begin, far)
        data, self._ahead = self._ahead[: end - self._at], self._ahead[end - self._at :]
        self._at = end
        return data


class ObjectStorage:
    """Stores that fsspec knows."""

    def step_names(self, folder: Url, manifest: str) -> list[str]:
        """As `Storage`."""
        names = (name.split("/") for name in listing(folder))
        return [parts[0] for parts in names if parts[1:] == [manifest]]

    def files(self, path: Url) -> Files:
        """As `Storage`."""
        return ObjectFiles(path)

    @contextmanager
    def create(self, file: Url, size: int) -> Iterator[Any]:
        """As `Storage`; sent in parts, of which one is in memory, and there at the end or not at all."""
        fs, path = file_system(file)
        # the part's size is that of a store which takes 10,000 of them
        part = max(_PART_BYTES, -(-size // 9_000 // 2**20) * 2**20)
        with _named(file, "begin"):
            opened = in_its_folder(fs, path, lambda: fs.open(path, "wb", block_size=part))
        try:
            yield _Writer(file, opened)
            with _named(file, "write"):
                opened.close()
        except BaseException:
            # closed, it would be there in part
            with suppress(Exception):
                opened.discard()
            with suppress(Exception):
                opened.closed = True
            raise

    @contextmanager
    def replace(self, file: Url, size: int) -> Iterator[Any]:
        """As `Storage`."""
        fs, path = file_system(file)
        move = _mover(fs)
        if _is_flat(fs) or move is None:
            with self.create(file, size) as opened:
                yield opened
            return
        # what has folders mostly opens a file under its name, empty
        part = file.parent / f".{file.name}.{secrets.token_hex(4)}"
        _, part_path = file_system(part)
        try:
            with self.create(part, size) as opened:
                yield opened
            with _named(file, "replace"):
                move(part_path, path)
                fs.invalidate_cache()
                if move == fs.mv and fs.exists(part_path):
                    # as HDFS does where the name is taken
                    raise FileExistsError("the store did not rename the new file")
        finally:
            with suppress(Exception):
                fs.rm_file(part_path)

    def remove(self, path: Url, manifest: str) -> None:
        """As `Storage`; FileNotFoundError if nothing is there."""
        fs, below = file_system(path)
        fs.invalidate_cache()
        first = f"{below}/{manifest}"
        with _named(path, "remove"):
            names = [entry["name"] for entry in _entries(fs, below, True)]
            if not names and _is_flat(fs):
                raise FileNotFoundError("the store has nothing there")
            with suppress(FileNotFoundError):
                fs.rm_file(first)
            with suppress(FileNotFoundError):
                if _is_flat(fs) or has_magic(below):
                    _remove_all(fs, [name for name in names if name.lstrip("/") != first.lstrip("/")])
                else:
                    fs.rm(below, recursive=True)
        with _named(path, "list"):
            fs.invalidate_cache()


class _Writer:
    """What is written to: errors of the store name the file."""

    def __init__(self, file: Url, opened: Any) -> None:
        self._file, self._opened = file, opened

    def write(self, data: Any) -> int:
        """Take all of it."""
        with _named(self._file, "write"):
            self._opened.write(data)
        return len(data)


def file_system(url: Url) -> tuple[Any, str]:
    """fsspec's file system of a URL, and the name that it has there.

    Raises:
        ImportError: the library for it is not installed.
        ValueError: no library is known for the scheme, or it lacks a setting.
        StoreError: it cannot be reached.
    """
    fs = url.opened.get(os.getpid())
    try:
        if fs is None:
            from fsspec.core import url_to_fs

            fs, path = url_to_fs(url.text)
            url.opened[os.getpid()] = fs
        else:
            path = fs._strip_protocol(url.text)
    except ImportError as error:
        scheme = url.text.partition(":")[0]
        extra = _EXTRAS.get(scheme)
        way = how_to_install(extra) if extra else "install the library that it names"
        raise ImportError(f"{url}: {error}: {way}") from error
    except ValueError as error:
        raise ValueError(f"{url}: {error}") from error
    except OSError as error:
        raise StoreError(f"{url}: cannot reach it: {type(error).__name__}: {error}") from error
    except Exception as error:
        raise ValueError(
            f"{url}: {type(error).__name__}: {error}: what a store has to be told stands in fsspec's configuration"
        ) from error
    return fs, path.rstrip("/")


def listing(folder: Url, *, below: bool = True) -> dict[str, int]:
    """Names of objects in a folder, with `below` also of those in its folders, and their sizes.

    One request for each thousand of them where the store lists flat, or else one for each folder of a step.

    Raises:
        FileNotFoundError: there is no such bucket.
        StoreError: nobody can say.
    """
    fs, root = file_system(folder)
    with _named(folder, "list"):
        fs.invalidate_cache()
        try:
            entries = _entries(fs, root, below)
        except FileNotFoundError:
            bucket = root.lstrip("/").split("/")[0]
            # of a file system with folders, none that was never written to
            if _is_flat(fs) and not fs.exists(bucket):
                raise
            entries = []
    sizes = {entry["name"][len(root) :].lstrip("/"): entry["size"] or 0 for entry in entries}
    return {name: size for name, size in sizes.items() if name and name.count("/") <= below}


def _is_flat(fs: Any) -> bool:
    """Whether it lists all that begins with a name at once; others walk, and pass over what they cannot list."""
    from fsspec.asyn import AsyncFileSystem

    return isinstance(fs, AsyncFileSystem) and type(fs)._find is not AsyncFileSystem._find


def _mover(fs: Any) -> Any | None:
    """What moves or copies a file to a name that may be taken; fsspec's own mv takes names for patterns."""
    from fsspec import AbstractFileSystem

    kind = type(fs)
    if kind.mv is not AbstractFileSystem.mv:
        return fs.mv
    return fs.cp_file if kind.cp_file is not AbstractFileSystem.cp_file else None


def _entries(fs: Any, root: str, below: bool) -> list[dict[str, Any]]:
    if _is_flat(fs) and below:
        return [entry for entry in fs.find(root, detail=True).values() if entry["type"] == "file"]
    entries = fs.ls(root, detail=True)
    found = [entry for entry in entries if entry["type"] == "file"]
    for entry in entries:
        if below and entry["type"] == "directory":
            with suppress(FileNotFoundError):
                found += [each for each in fs.ls(entry["name"], detail=True) if each["type"] == "file"]
    return found


def _remove_all(fs: Any, names: Sequence[str]) -> None:
    """Remove objects by their names, in as few requests as the store allows."""
    if any(has_magic(name) for name in names):
        # fsspec would take the names for patterns, and remove what else they match
        for name in names:
            with suppress(FileNotFoundError):
                fs.rm_file(name)
    elif names:
        fs.rm(list(names))


def cat(file: Url, begin: int, end: int) -> bytes:
    """Bytes [begin, end) of an object, fewer at its end; long ranges in pieces at the same time.

    Raises:
        FileNotFoundError, StoreError: as `Files`.
    """
    fs, path = file_system(file)
    with _named(file, "read"):
        if end - begin <= _PIECE_BYTES or end - begin > _MOST_BYTES:
            try:
                return bytes(fs.cat_file(path, start=begin, end=end))
            except Exception as error:
                # an empty object has no range for S3
                if begin or isinstance(error, FileNotFoundError) or not _is_empty_object(fs, path):
                    raise
                return b""
        begins = [*range(begin, end, _PIECE_BYTES)]
        ends = [min(at + _PIECE_BYTES, end) for at in begins]
        return b"".join(fs.cat_ranges([path] * len(begins), begins, ends, on_error="raise"))


def _is_empty_object(fs: Any, path: str) -> bool:
    with suppress(Exception):
        fs.invalidate_cache()
        return bool(fs.info(path)["size"] == 0)
    return False


def create_alone(file: Url, data: bytes) -> None:
    """Write a small object that must not be there yet; of two who do so at once one fails, where the store can tell.

    Raises:
        FileExistsError: it is there.
        StoreError: it cannot be written.
    """
    fs, path = file_system(file)
    try:
        with _named(file, "write"):
            in_its_folder(fs, path, lambda: fs.pipe_file(path, data, mode="create"))
    except FileExistsError:
        # where the first answer was lost on the way, a client that asks again is refused by what it wrote itself
        if cat(file, 0, len(data) + 1) != data:
            raise


def overwrite(file: Url, data: bytes) -> None:
    """Write a small object. Raises as `create_alone`, but for FileExistsError."""
    fs, path = file_system(file)
    with _named(file, "write"):
        fs.pipe_file(path, data)


def delete(folder: Url, names: Sequence[str]) -> None:
    """Remove objects, in as few requests as the store allows."""
    if names:
        fs, root = file_system(folder)
        with _named(folder, "remove from"), suppress(FileNotFoundError):
            _remove_all(fs, [f"{root}/{name}" for name in names])
        fs.invalidate_cache()


def in_its_folder(fs: Any, path: str, write: Any) -> Any:
    """What `write` gives, once the folders are there that some file systems need; no bucket is made."""
    try:
        return write()
    except FileNotFoundError:
        parts = path.split("/")
        if _is_flat(fs):
            raise
        for depth in range(2, len(parts)):
            with suppress(FileExistsError):
                fs.mkdir("/".join(parts[:depth]), create_parents=False)
        return write()


@contextmanager
def _named(url: Url, what: str) -> Iterator[None]:
    """Errors of a store as those of files, with the URL first."""
    try:
        yield
    except StoreError:
        raise
    except (FileNotFoundError, FileExistsError) as error:
        if str(error).startswith(url.text):
            raise
        raise type(error)(f"{url}: {error}") from error
    except Exception as error:
        text = " ".join(str(error).split())
        raise StoreError(f"{url}: cannot {what} it: {type(error).__name__}: {text}") from error


_LOCAL, _OBJECTS = LocalStorage(), ObjectStorage()


def storage_of(place: Place) -> Storage:
    """What there is to do with a place."""
    return _OBJECTS if isinstance(place, Url) else _LOCAL


def files_in(place: Place | Files) -> Files:
    """The files of a step folder, or those that were opened already."""
    return storage_of(place).files(place) if isinstance(place, (Path, Url)) else place


def is_empty(folder: Place) -> bool:
    """Whether nothing lies in a folder, which need not be there."""
    if not isinstance(folder, Url):
        return not folder.exists() or not any(folder.iterdir())
    return not listing(folder)


def has(place: Place, name: str) -> bool:
    """Whether there is a file of that name, or a link that leads nowhere."""
    if not isinstance(place, Url):
        return os.path.lexists(place / name)
    return name in listing(place, below=False)


def sync_folder(folder: Path) -> None:
    """See the names in a folder onto the disk."""
    opened = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)

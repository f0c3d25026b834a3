"""A store in memory that counts what is asked of it and fails at one request or from one on, and one with folders."""

from __future__ import annotations

from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

# a request fails before it is done, after it was (its answer is lost), or it and all that come
BEFORE, AFTER, FROM_THEN_ON = "before", "after", "from then on"


class _File(MemoryFile):
    """A file whose writes are requests."""

    def write(self, data: Any, /) -> int:
        return self.fs.request("write", lambda: super(_File, self).write(data))  # type: ignore[no-any-return]


class FailingStore(MemoryFileSystem):
    """Like memory://, as failing://. Its state is that of the class."""

    protocol = "failing"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    at, how, requests = 0, BEFORE, 0
    names: list[str] = []
    bytes_read = 0

    @classmethod
    def reset(cls, at: int = 0, how: str = BEFORE) -> None:
        """Fail at the request of that number, from 1 on; 0 is none."""
        cls.at, cls.how, cls.requests, cls.names, cls.bytes_read = at, how, 0, [], 0

    def request(self, name: str, do: Any) -> Any:
        """Do what is asked for, or fail."""
        cls = FailingStore
        cls.requests += 1
        cls.names.append(name)
        if cls.at and (cls.requests == cls.at or (cls.how == FROM_THEN_ON and cls.requests > cls.at)):
            if cls.how == AFTER:
                do()
            raise ConnectionResetError(f"request {cls.requests}, {name}, was cut off")
        return do()

    def _open(self, path: str, mode: str = "rb", *arguments: Any, **kwargs: Any) -> Any:
        if "b" in mode and mode[0] in "wx":
            if mode[0] == "x" and self.exists(path):
                raise FileExistsError(path)
            return self.request("open", lambda: self._made(path, kwargs.get("data")))
        return super()._open(path, mode, *arguments, **kwargs)

    def _made(self, path: str, data: bytes | None) -> _File:
        file = _File(self, self._strip_protocol(path), data)
        file.commit()
        return file

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        data: bytes = self.request("get", lambda: super(FailingStore, self).cat_file(path, start, end, **kwargs))
        FailingStore.bytes_read += len(data)
        return data

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        return self.request("list", lambda: super(FailingStore, self).ls(path, detail, **kwargs))

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        self.request("copy", lambda: super(FailingStore, self).cp_file(path1, path2, **kwargs))

    def rm_file(self, path: str) -> None:
        self.request("delete", lambda: super(FailingStore, self).rm_file(path))

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        self.request("delete many", lambda: super(FailingStore, self).rm(path, recursive, maxdepth))


class FolderStore(LocalFileSystem):
    """A file system with folders, as those of other machines: this one's, as folders://, since file:// is a path."""

    protocol = "folders"


fsspec.register_implementation("failing", FailingStore, clobber=True)
fsspec.register_implementation("folders", FolderStore, clobber=True)

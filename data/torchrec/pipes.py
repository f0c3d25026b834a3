"""Streams of text files as torch's `IterDataPipe`s: opened, read as CSV, cut short, and read by a loader's workers.

They have torch's functional forms (`pipe.batch(2)`, `.map(fn)`, `.shuffle()`, ...), and `pipe.limit(n)`.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from math import ceil
from typing import IO, Any, TypeAlias, TypeVar

from torch.utils.data import IterDataPipe, get_worker_info

from ..paths import PATH_MANAGER_KEY, open_path

T = TypeVar("T")
D = TypeVar("D")
Pipes: TypeAlias = Sequence[IterDataPipe[Any]]

_MODES = ("b", "t", "rb", "rt", "r")
# set while a `ParallelReadConcat` reads the pipes that are its worker's
_divided: ContextVar[bool] = ContextVar("divided", default=False)


class UnknownLength(TypeError, NotImplementedError):
    """Python's error for what has no length, by which `list` passes over it; TorchRec's is NotImplementedError."""


def safe_cast(val: T, dest_type: Callable[[T], D], default: D) -> D:
    """`dest_type(val)`, or `default` where that is a ValueError."""
    try:
        return dest_type(val)
    except ValueError:
        return default


class Limit(IterDataPipe[T]):
    """The first `limit` samples of a stream; also `pipe.limit(n)`. No sample after them is read."""

    def __init__(self, datapipe: Iterable[T], limit: int) -> None:
        super().__init__()
        if limit < 0:
            raise ValueError(f"limit must not be negative, got {limit}")
        self.datapipe, self.limit = datapipe, limit

    def __iter__(self) -> Iterator[T]:
        # the numbers come first, or zip would read a sample more
        return (sample for _, sample in zip(range(self.limit), self.datapipe, strict=False))


# TorchRec's own, where a process has imported both, does the same
if "limit" not in IterDataPipe.functions:
    IterDataPipe.register_datapipe_as_function("limit", Limit)


class LoadFiles(IterDataPipe[tuple[str, IO[Any]]]):
    """Pairs of a path and its opened file, for a stream of paths; `shardwise.data.paths` says who opens it.

    `open_kw` are arguments of `open`. `length` is what `len` says.

    Raises:
        ValueError: an unknown mode.
        TypeError: a path is neither a str nor an os.PathLike; `len` without a `length`.
    """

    def __init__(
        self,
        datapipe: Iterable[str | os.PathLike[str]],
        mode: str = "b",
        length: int = -1,
        path_manager_key: str = PATH_MANAGER_KEY,
        **open_kw: Any,
    ) -> None:
        super().__init__()
        if mode not in _MODES:
            raise ValueError(f"Invalid mode {mode}: must be one of {', '.join(_MODES)}")
        self.datapipe, self.mode, self.length = datapipe, f"r{mode}" if mode in ("b", "t") else mode, length
        self.path_manager_key, self.open_kw = path_manager_key, open_kw

    def __iter__(self) -> Iterator[tuple[str, IO[Any]]]:
        for path in self.datapipe:
            if not isinstance(path, (str, os.PathLike)):
                raise TypeError(f"Expected string type for pathname, but got {type(path)}")
            yield (
                os.fspath(path),
                open_path(path, self.mode, path_manager_key=self.path_manager_key, **self.open_kw),
            )

    def __len__(self) -> int:
        if self.length == -1:
            raise UnknownLength("LoadFiles without length: how many paths its stream has is not known")
        return self.length


class ReadLinesFromCSV(IterDataPipe[list[str]]):
    """The fields of each line of the files of a `LoadFiles`, or of other pairs of a name and lines.

    `kw` are arguments of `csv.reader`; TypeError for one that it lacks. `skip_first_line` passes over a header.
    """

    def __init__(self, datapipe: Iterable[tuple[str, Iterable[str]]], skip_first_line: bool = False, **kw: Any) -> None:
        super().__init__()
        csv.reader((), **kw)
        self.datapipe, self.skip_first_line, self.kw = datapipe, skip_first_line, kw

    def __iter__(self) -> Iterator[list[str]]:
        for _, lines in self.datapipe:
            reader = csv.reader(lines, **self.kw)
            if self.skip_first_line:
                next(reader, None)
            yield from reader
            # nobody else has a file that was opened for this stream
            if isinstance(self.datapipe, LoadFiles):
                lines.close()  # type: ignore[attr-defined]


def share_of_worker(pipes: Pipes) -> Pipes:
    """The pipes that are this loader worker's, side by side and as many for each as can be; all of them without one.

    Raises:
        ValueError: more workers than pipes.
    """
    worker = get_worker_info()
    if worker is None:
        return pipes
    if worker.num_workers > len(pipes):
        raise ValueError(
            f"Number of workers {worker.num_workers} exceeds number of datapipes ({len(pipes)}): a worker would have"
            " nothing to read"
        )
    first = 0
    for before in range(worker.id):
        first += ceil((len(pipes) - first) / (worker.num_workers - before))
    return pipes[first : first + ceil((len(pipes) - first) / (worker.num_workers - worker.id))]


class ParallelReadConcat(IterDataPipe[Any]):
    """One pipe after the other; in a DataLoader's worker only those that `dp_selector` gives that worker.

    A pipe of Criteo's files inside is not divided among the workers a second time: TorchRec's are, so that all but the
    first worker read nothing of pipes of a single file.
    """

    def __init__(self, *datapipes: IterDataPipe[Any], dp_selector: Callable[[Pipes], Pipes] = share_of_worker) -> None:
        super().__init__()
        self.datapipes, self.dp_selector = datapipes, dp_selector

    def __iter__(self) -> Iterator[Any]:
        for pipe in self.dp_selector(self.datapipes):
            with _dividing():
                samples = iter(pipe)
            while True:
                # not around the yield, which runs others' code
                with _dividing():
                    try:
                        sample = next(samples)
                    except StopIteration:
                        break
                yield sample


def files_of_worker(paths: Iterable[T]) -> Iterable[T]:
    """Every n-th path, for a loader with n workers; all of them without one, or below a `ParallelReadConcat`."""
    worker = get_worker_info()
    if worker is None or _divided.get():
        return paths
    return (path for number, path in enumerate(paths) if number % worker.num_workers == worker.id)


@contextmanager
def _dividing() -> Iterator[None]:
    token = _divided.set(True)
    try:
        yield
    finally:
        _divided.reset(token)

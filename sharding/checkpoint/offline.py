"""Checkpoints that one process writes from what is on disk, in bounded memory: re-cut, converted."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from shardwise.planner.layout import Span

from .files import TensorFiles, check_checksum, row_blocks, write_streams
from .folder import Attempt, latest
from .manifest import NAME, FileFacts, Manifest, Stored, read_manifest, require_whole


def checkpoint_at(path: str | os.PathLike[str]) -> Path:
    """The step folder that a path means: itself, or the newest good checkpoint of a folder of steps.

    Raises:
        FileNotFoundError: it is neither.
    """
    path = Path(path)
    # also a link that leads nowhere, which is named then
    if os.path.lexists(path / NAME):
        return path
    newest = latest(path)
    if newest is None:
        raise FileNotFoundError(f"{path} is no checkpoint, and no folder that has a good one")
    return newest


def file_of(rank: int) -> str:
    """The name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


class Source:
    """A checkpoint that is read by address, wherever its files have the cells. Use it in a `with`.

    Raises:
        CheckpointDamaged: a file is not what was saved; what is written anew would look sound.
        FileNotFoundError: as `checkpoint_at`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = checkpoint_at(path)
        self.manifest = read_manifest(self.path)
        for facts in self.manifest.files:
            check_checksum(self.path, facts)
        self._files = TensorFiles(self.path, self.manifest)

    def __enter__(self) -> Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def blocks(self, wanted: Stored) -> Iterator[Tensor]:
        """The cells of a tensor in order, some MiB at a time.

        A number per row that no block of just these columns has is the mean over its columns of those that there are.
        """
        pieces = self.manifest.by_address[wanted.kind, wanted.name, wanted.state]
        if wanted.rows is None or wanted.columns is None:
            for _, block in self._files.blocks(pieces[0], tuple((0, n) for n in pieces[0].shape)):
                yield block
            return
        row_bytes = wanted.dtype.itemsize * math.prod(wanted.shape[1:])
        for rows in row_blocks(wanted.rows, row_bytes):
            yield self._cells(pieces, wanted, rows, wanted.columns)

    def _cells(self, pieces: Sequence[Stored], wanted: Stored, rows: Span, columns: Span) -> Tensor:
        per_row, height = len(wanted.shape) == 1, rows[1] - rows[0]
        if per_row:
            exact = [one for one in pieces if one.columns == columns]
            if not exact:
                return self._mean(pieces, wanted, rows, columns)
            pieces = exact
        found = torch.empty((height, *wanted.shape[1:]), dtype=wanted.dtype)
        for one in pieces:
            assert one.rows is not None and one.columns is not None
            lines, across = _shared(one.rows, rows), _shared(one.columns, columns)
            if lines is None or across is None:
                continue
            read, place = [_within(lines, one.rows)], [_within(lines, rows)]
            if not per_row:
                read.append(_within(across, one.columns))
                place.append(_within(across, columns))
            found[tuple(slice(*span) for span in place)] = self._files.read(one, tuple(read))
        return found

    def _mean(self, pieces: Sequence[Stored], wanted: Stored, rows: Span, columns: Span) -> Tensor:
        found = torch.zeros(rows[1] - rows[0])
        for one in pieces:
            assert one.rows is not None and one.columns is not None
            lines, across = _shared(one.rows, rows), _shared(one.columns, columns)
            if lines is not None and across is not None:
                share = (across[1] - across[0]) / (columns[1] - columns[0])
                values = self._files.read(one, (_within(lines, one.rows),))
                found[slice(*_within(lines, rows))].add_(values.float(), alpha=share)
        return found.to(wanted.dtype)


def write_offline(
    folder: str | os.PathLike[str], manifest: Manifest, blocks: Callable[[Stored], Iterable[Tensor]]
) -> Path:
    """Write a checkpoint into a folder of steps, as `save` does; `blocks` gives each tensor's cells in order.

    `manifest` has no files yet: each tensor says which one it goes to.

    Raises:
        ValueError: the tensors do not make up the tables.
        BlockingIOError, OSError: as `save`.
    """
    names = sorted({one.file for one in manifest.tensors})
    require_whole(replace(manifest, files=tuple(FileFacts(name, 0, "") for name in names)))
    attempt = Attempt.begin(Path(folder), manifest.step, world_size=1)
    try:
        attempt.join()
        files = tuple(
            write_streams(attempt.data / name, [(one, blocks(one)) for one in manifest.tensors if one.file == name])
            for name in names
        )
        attempt.report({})
        attempt.settle(lambda _: replace(manifest, files=files), None)
    finally:
        attempt.leave()
    return attempt.target


def _shared(a: Span, b: Span) -> Span | None:
    low, high = max(a[0], b[0]), min(a[1], b[1])
    return (low, high) if low < high else None


def _within(span: Span, of: Span) -> Span:
    return span[0] - of[0], span[1] - of[0]

"""Checkpoints that one process writes from what is on disk, in bounded memory: re-cut, converted, exported."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwise.planner.layout import Span

from .files import TensorFiles, check_checksum, row_blocks, write_named, write_streams
from .folder import latest
from .manifest import DENSE, NAME, OPTIMIZER, TABLE, WEIGHT, FileFacts, Manifest, Stored, read_manifest, require_whole
from .object_saves import attempt_in
from .places import absolute, locate
from .storage import files_in, has


def checkpoint_at(path: str | os.PathLike[str]) -> Path | Any:
    """The step folder that a path means: itself, or the newest good checkpoint of a folder of steps.

    Raises:
        FileNotFoundError: it is neither.
    """
    place = locate(path)
    if has(place, NAME):
        return place
    newest = latest(place)
    if newest is None:
        raise FileNotFoundError(f"{place} is no checkpoint, and no folder that has a good one")
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
        files = files_in(self.path)
        for facts in self.manifest.files:
            check_checksum(files, facts)
        self._files = TensorFiles(files, self.manifest)

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
            exact = [piece for piece in pieces if piece.columns == columns]
            if not exact:
                return self._mean(pieces, wanted, rows, columns)
            pieces = exact
        cells = torch.empty((height, *wanted.shape[1:]), dtype=wanted.dtype)
        for piece in pieces:
            assert piece.rows is not None and piece.columns is not None
            lines, across = _shared(piece.rows, rows), _shared(piece.columns, columns)
            if lines is None or across is None:
                continue
            read, place = [_within(lines, piece.rows)], [_within(lines, rows)]
            if not per_row:
                read.append(_within(across, piece.columns))
                place.append(_within(across, columns))
            cells[tuple(slice(*span) for span in place)] = self._files.read(piece, tuple(read))
        return cells

    def _mean(self, pieces: Sequence[Stored], wanted: Stored, rows: Span, columns: Span) -> Tensor:
        mean = torch.zeros(rows[1] - rows[0])
        for piece in pieces:
            assert piece.rows is not None and piece.columns is not None
            lines, across = _shared(piece.rows, rows), _shared(piece.columns, columns)
            if lines is not None and across is not None:
                share = (across[1] - across[0]) / (columns[1] - columns[0])
                values = self._files.read(piece, (_within(lines, piece.rows),))
                mean[slice(*_within(lines, rows))].add_(values.float(), alpha=share)
        return mean.to(wanted.dtype)


def write_offline(
    folder: str | os.PathLike[str], manifest: Manifest, blocks: Callable[[Stored], Iterable[Tensor]]
) -> Path | Any:
    """Write a checkpoint into a folder of steps, as `save` does; `blocks` gives each tensor's cells in order.

    `manifest` has no files yet: each tensor says which one it goes to.

    Raises:
        ValueError: the tensors do not make up the tables.
        BlockingIOError, OSError: as `save`.
    """
    names = sorted({tensor.file for tensor in manifest.tensors})
    require_whole(replace(manifest, files=tuple(FileFacts(name, 0, "") for name in names)))
    place = locate(folder)
    attempt = attempt_in(place).begin(place, manifest.step, world_size=1)
    try:
        attempt.join()
        files = tuple(
            write_streams(
                attempt.data / name, [(tensor, blocks(tensor)) for tensor in manifest.tensors if tensor.file == name]
            )
            for name in names
        )
        attempt.report({})
        attempt.settle(lambda _: replace(manifest, files=files), None)
    finally:
        attempt.leave()
    target: Path | Any = attempt.target
    return target


def _shared(a: Span, b: Span) -> Span | None:
    low, high = max(a[0], b[0]), min(a[1], b[1])
    return (low, high) if low < high else None


def _within(span: Span, of: Span) -> Span:
    return span[0] - of[0], span[1] - of[0]


def export(path: str | os.PathLike[str], target: str | os.PathLike[str], *, states: bool = False) -> Path | Any:
    """Write a checkpoint's tables, dense parameters and buffers, whole, by the names of the unsharded model.

    `model.load_state_dict(safetensors.torch.load_file(target))` loads it into that model, or into a sharded one.

    Args:
        path: a step folder, or a folder of them, of which the newest good one is taken.
        target: the file; one that is there is replaced at once or not at all.
        states: also the states of all optimizers, as `<parameter>/<state>`. Numbers per row of several column blocks
            are `<parameter>/<state>/<first column>:<last column + 1>`.

    Raises:
        CheckpointDamaged, FileNotFoundError, OSError: the checkpoint cannot be read, or the file not be written.
    """
    place = absolute(target)
    with Source(path) as source:
        whole = [(name, stored, source.blocks(stored)) for name, stored in _whole(source.manifest, states)]
        write_named(place, whole, replace=True)
    return place


def _whole(manifest: Manifest, states: bool) -> Iterator[tuple[str, Stored]]:
    """The tensors of the file: as if each lay in one piece."""
    names: dict[str, list[str]] = {}
    for alias, name in manifest.aliases.items():
        names.setdefault(name, []).append(alias)
    for (kind, name, state), pieces in manifest.by_address.items():
        if not states and (kind == OPTIMIZER or state != WEIGHT):
            continue
        for stored in _joined(manifest, pieces) if kind == TABLE else pieces[:1]:
            if state == WEIGHT and kind in (TABLE, DENSE):
                # a parameter of several names is there by each of them, as in a state dict
                yield from ((known, stored) for known in (name, *names.get(name, ())))
            else:
                blocks = {piece.columns for piece in pieces}
                place = f"/{stored.columns[0]}:{stored.columns[1]}" if stored.columns and len(blocks) > 1 else ""
                yield f"{name}/{state}{place}", stored


def _joined(manifest: Manifest, pieces: list[Stored]) -> list[Stored]:
    """The pieces as one, or as one for each column block where there are numbers per row."""
    facts, first = manifest.tables[pieces[0].name], pieces[0]
    if len(first.shape) == 2:
        return [replace(first, shape=(facts.rows, facts.dim), rows=(0, facts.rows), columns=(0, facts.dim))]
    blocks = sorted({piece.columns for piece in pieces if piece.columns is not None})
    return [replace(first, shape=(facts.rows,), rows=(0, facts.rows), columns=columns) for columns in blocks]

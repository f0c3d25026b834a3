"""Writing of a checkpoint of ours as a folder of torch.distributed.checkpoint."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from shardwise.kernels import rule_named

from .files import BLOCK_BYTES
from .manifest import DENSE, OPTIMIZER, TABLE, WEIGHT, Manifest, Stored
from .offline import Source
from .places import Place, Url
from .torchrec_names import STEP, their_state

# pieces of the folder have at most so many bytes, or one row: one is in memory at a time
PIECE_BYTES = 4 * BLOCK_BYTES


def writer_of(folder: Place) -> FileSystemWriter:
    """What writes into a folder, a file for each piece: it keeps all pieces of a file in memory."""
    if isinstance(folder, Url):
        return FsspecWriter(folder.text, single_file_per_rank=False)  # type: ignore[no-untyped-call,unused-ignore]
    return FileSystemWriter(folder, single_file_per_rank=False)


class Planner(SavePlanner):
    """Tells the writer what there is, and reads each piece when it is asked for."""

    def __init__(self, source: Source, names: str, model: str | None, optimizer: str | None) -> None:
        self._source, self._torchrec, self._optimizer = source, names == "torchrec", optimizer
        self._model = () if model is None else (model,)
        self._items: list[WriteItem] = []
        self._paths: dict[str, tuple[Any, ...]] = {}
        self._content: dict[MetadataIndex, Stored | Tensor | io.BytesIO] = {}
        manifest = source.manifest
        for (kind, name, state), pieces in manifest.by_address.items():
            if kind == TABLE:
                self._table(manifest, name, state, pieces)
            elif kind == DENSE:
                for known in (name, *(alias for alias, original in manifest.aliases.items() if original == name)):
                    self._tensor((*self._model, known), pieces[0].shape, [((0,) * len(pieces[0].shape), pieces[0])])
            elif kind == OPTIMIZER and optimizer is not None:
                where = (optimizer, "state", name, *state.split("/"))
                self._tensor(where, pieces[0].shape, [((0,) * len(pieces[0].shape), pieces[0])])
        if optimizer is not None:
            self._optimizers(manifest, optimizer)
        for key, value in {**manifest.extra, STEP: manifest.step}.items():
            self._value((key,), value)

    def _table(self, manifest: Manifest, name: str, state: str, pieces: list[Stored]) -> None:
        facts = manifest.tables[name]
        if state == WEIGHT:
            for known in (name, *(alias for alias, original in manifest.aliases.items() if original == name)):
                self._tensor((*self._model, known), (facts.rows, facts.dim), _placed(pieces))
            return
        if self._optimizer is None:
            return
        saved = their_state(state) if self._torchrec else state
        if saved is None:
            raise ValueError(f"{name}: TorchRec has no counterpart of the state {state!r} of {facts.rule}")
        where = (self._optimizer, "state", name, f"{facts.table}.{saved}")
        if len(pieces[0].shape) == 2:
            self._tensor(where, (facts.rows, facts.dim), _placed(pieces))
        else:
            blocks = sorted({piece.cells[1] for piece in pieces})
            # [rows] of each column block, one block after another
            placed: list[tuple[tuple[int, ...], Stored]] = []
            for piece in pieces:
                rows, columns = piece.cells
                placed.append(((blocks.index(columns) * facts.rows + rows[0],), piece))
            self._tensor(where, (facts.rows * len(blocks),), placed)

    def _optimizers(self, manifest: Manifest, optimizer: str) -> None:
        """The parts of optimizers that are no tensor of ours: counts, settings, plain values."""
        for name, values in manifest.values.items():
            for state, value in values.items():
                self._value((optimizer, "state", name, *state.split("/")), value)
        if self._torchrec:
            return
        for name, facts in manifest.tables.items():
            if facts.rule is not None and rule_named(facts.rule).counts_steps:
                where, count = (optimizer, "state", name, f"{facts.table}.{STEP}"), torch.tensor([facts.steps])
                stored = Stored(OPTIMIZER, name, STEP, (1,), count.dtype)
                self._content[self._item(where, (1,), (0,), stored)] = count
        groups = [{k: v for k, v in group.items() if k != "optimizer"} for group in (*manifest.fused, *manifest.dense)]
        self._value((optimizer, "param_groups"), tuple(groups))

    def _tensor(
        self, path: tuple[Any, ...], size: tuple[int, ...], pieces: list[tuple[tuple[int, ...], Stored]]
    ) -> None:
        for offsets, piece in pieces:
            for shift, part in _parts(piece):
                begin = (offsets[0] + shift, *offsets[1:]) if offsets else offsets
                self._content[self._item(path, size, begin, part)] = part

    def _item(
        self, path: tuple[Any, ...], size: tuple[int, ...], offsets: tuple[int, ...], stored: Stored
    ) -> MetadataIndex:
        key = self._key(path)
        index = MetadataIndex(key, torch.Size(offsets))
        chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(stored.shape))
        data = TensorWriteData(chunk, TensorProperties(stored.dtype), torch.Size(size))
        self._items.append(WriteItem(index, WriteItemType.SHARD, tensor_data=data))
        return index

    def _value(self, path: tuple[Any, ...], value: Any) -> None:
        index = MetadataIndex(self._key(path))
        self._items.append(WriteItem(index, WriteItemType.BYTE_IO))
        data = io.BytesIO()
        torch.save(value, data)
        self._content[index] = data

    def _key(self, path: tuple[Any, ...]) -> str:
        key = ".".join(map(str, path))
        if self._paths.setdefault(key, path) != path:
            raise ValueError(f"{key} would be there twice, as {self._paths[key]} and {path}")
        return key

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """All is known already."""

    def create_local_plan(self) -> SavePlan:
        """Everything."""
        return SavePlan(self._items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """As it is, with the paths of all keys."""
        plans, metadata = create_default_global_save_plan(all_plans)
        return plans, replace(metadata, planner_data=self._paths)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """As it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        """A piece, read now."""
        content = self._content[write_item.index]
        if not isinstance(content, Stored):
            return content
        blocks = list(self._source.blocks(content))
        if not blocks:
            return torch.empty(content.shape, dtype=content.dtype)
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def _placed(pieces: list[Stored]) -> list[tuple[tuple[int, ...], Stored]]:
    """Where pieces of [rows, columns] begin."""
    return [((rows[0], columns[0]), piece) for piece in pieces for rows, columns in (piece.cells,)]


def _parts(piece: Stored) -> Iterator[tuple[int, Stored]]:
    """A piece in parts of `PIECE_BYTES`, each with its first row within the piece."""
    if piece.rows is None:
        yield 0, piece
        return
    low, high = piece.rows
    row_bytes = max(1, piece.dtype.itemsize * torch.Size(piece.shape[1:]).numel())
    step = max(1, PIECE_BYTES // row_bytes)
    for at in range(low, high, step):
        end = min(at + step, high)
        yield at - low, replace(piece, rows=(at, end), shape=(end - at, *piece.shape[1:]))

"""Reading of torch.distributed.checkpoint folders, of TorchRec say, as a checkpoint of ours.

The format keeps its table of contents, and all that is no tensor, as pickles: reading it runs what they say. That is
why `from_dcp_trusted` has the name that it has.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem

from shardwise._version import __version__
from shardwise.planner.layout import Shard, Span
from shardwise.untrusted import require_regular

from .manifest import DENSE, OPTIMIZER, TABLE, WEIGHT, Manifest, Stored, TableFacts
from .offline import file_of
from .places import Place, Url
from .torchrec_names import STEP, our_state, rule_of, steps_of, table_in

_RANK = re.compile(r"__(\d+)_\d+\.distcp")
# where something is in the nested dict that was saved
Keys = tuple[Any, ...]


@dataclass(frozen=True)
class _Chunk:
    """Cells [low, high) of a saved tensor, which all lie in one piece of it."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    # of a tensor of one dimension that holds several column blocks: the part of the piece that is wanted
    part: Span | None = None


class Saved:
    """A folder of torch.distributed.checkpoint: what it has by path, and its tensors piece by piece.

    Raises:
        OSError: a file is not there, or no regular one; names it.
    """

    def __init__(self, folder: Place) -> None:
        self._reader = FsspecReader(folder.text) if isinstance(folder, Url) else FileSystemReader(folder)
        self._metadata: Metadata = self._reader.read_metadata()
        # torch opens them by name, and would wait for who writes into a pipe
        for name in {info.relative_path for info in (self._metadata.storage_data or {}).values()}:
            if not isinstance(folder, Url):
                require_regular(folder / name)
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        paths = self._metadata.planner_data
        named = paths if isinstance(paths, Mapping) else {}
        self.paths: dict[Keys, str] = {tuple(named.get(k, (k,))): k for k in self._metadata.state_dict_metadata}

    def tensor(self, key: str) -> TensorStorageMetadata | None:
        """Metadata of a tensor; None if the key has something else."""
        metadata = self._metadata.state_dict_metadata[key]
        return None if isinstance(metadata, BytesStorageMetadata) else metadata

    def rank_of(self, key: str, chunk: ChunkStorageMetadata) -> int:
        """The rank that wrote a piece."""
        where = self._metadata.storage_data[MetadataIndex(key, chunk.offsets)].relative_path
        match = _RANK.fullmatch(where)
        return 0 if match is None else int(match[1])

    def piece(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Tensor:
        """One piece of a tensor."""
        known = self.tensor(key)
        assert known is not None
        tensor = torch.empty(tuple(sizes), dtype=known.properties.dtype)
        index = MetadataIndex(key, torch.Size(offsets))
        none = torch.Size([0] * len(sizes))
        item = ReadItem(LoadItemType.TENSOR, index, torch.Size(offsets), index, none, torch.Size(sizes))
        self._reader.read_data(LoadPlan([item]), _Into(tensor)).wait()
        return tensor

    def value(self, key: str) -> Any:
        """A value that is no tensor, unpickled."""
        index = MetadataIndex(key)
        none = torch.Size([0])
        into = _Into(None)
        item = ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none)
        self._reader.read_data(LoadPlan([item]), into).wait()
        return into.value


class _Into(LoadPlanner):
    """Takes the one thing that is read."""

    def __init__(self, tensor: Tensor | None) -> None:
        self._tensor, self.value = tensor, None

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing to set up."""

    def create_local_plan(self) -> LoadPlan:
        """The plan is made by who reads."""
        return LoadPlan([])

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """As it is."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """As it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Unpickle, which the caller has said to trust."""
        self.value = torch.load(value, weights_only=False)

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Where the piece goes."""
        assert self._tensor is not None
        return self._tensor

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """It is there."""


class Content:
    """A saved state dict as the content of a checkpoint of ours."""

    def __init__(self, saved: Saved, model: str | None, optimizer: str | None, aliases: dict[str, str]) -> None:
        top = sorted({str(path[0]) for path in saved.paths})
        if model is not None and model not in top:
            raise ValueError(f"model={model!r}: the folder has {top}; None says that there is none")
        # torch keeps nothing of an optimizer without states, as all of SGD; tensors under another key are refused
        self._saved, self._aliases, self._has_optimizer = saved, aliases, optimizer in top
        self._weights: dict[str, str] = {}
        self._states: dict[str, dict[str, str]] = {}
        self._groups: dict[Keys, Any] = {}
        self._values: dict[str, dict[str, Any]] = {}
        self._extra: dict[str, Any] = {}
        self._chunks: dict[Stored, _Chunk] = {}
        for path, key in saved.paths.items():
            self._sort(path, key, model, optimizer)

    def _sort(self, path: Keys, key: str, model: str | None, optimizer: str | None) -> None:
        is_tensor = self._saved.tensor(key) is not None
        if optimizer is not None and path[0] == optimizer:
            if len(path) > 1 and path[1] == "param_groups":
                self._groups[path[2:]] = _item(self._saved.piece(key, (), ())) if is_tensor else self._saved.value(key)
            elif len(path) > 3 and path[1] == "state":
                state = "/".join(map(str, path[3:]))
                if is_tensor:
                    self._states.setdefault(str(path[2]), {})[state] = key
                else:
                    self._values.setdefault(str(path[2]), {})[state] = _plain(key, self._saved.value(key))
            elif is_tensor or self._saved.value(key):
                raise ValueError(f"{key}: an optimizer's state dict has 'state' by parameter and 'param_groups'")
        elif model is None or path[0] == model:
            name = ".".join(map(str, path if model is None else path[1:]))
            if not is_tensor:
                raise ValueError(f"{key}: an extra state of a module, which is no tensor, has no place in a checkpoint")
            if name not in self._aliases:
                self._weights[name] = key
        elif is_tensor:
            known = self._saved.tensor(key)
            if known is None or known.size.numel() != 1:
                raise ValueError(f"{key}: a tensor that is of neither the model nor the optimizer has no place here")
            self._extra[".".join(map(str, path))] = _item(self._saved.piece(key, (0,) * len(known.size), known.size))
        else:
            self._extra[".".join(map(str, path))] = _plain(key, self._saved.value(key))

    def blocks(self, stored: Stored) -> Iterator[Tensor]:
        """The cells of a tensor."""
        chunk = self._chunks[stored]
        tensor = self._saved.piece(chunk.key, chunk.offsets, chunk.sizes)
        yield tensor if chunk.part is None else tensor[slice(*chunk.part)]

    def manifest(self, rules: Mapping[str, str] | str | None, steps: int | None, step: int | None) -> Manifest:
        """All but the tensors."""
        tables = {}
        for name, key in self._weights.items():
            known = self._known(key)
            table = table_in(name)
            if table is None or len(known.size) != 2:
                self._whole(DENSE, name, WEIGHT, key)
            else:
                tables[name] = self._table(name, table, key, rules, steps)
        for name, states in self._states.items():
            for state, key in states.items():
                self._whole(OPTIMIZER, name, state, key)
        if step is None:
            step = self._extra.pop("step", 0)
            if not isinstance(step, int):
                raise ValueError(f"'step' was saved as {step!r}: say step=")
        tensors = list(self._chunks)
        ranks = 1 + max((int(stored.file[5:-12]) for stored in tensors), default=0)
        fused, dense = self._param_groups(set(tables))
        versions = {"shardwise": __version__, "torch": torch.__version__, "from": "torch.distributed.checkpoint"}
        return Manifest(
            step, ranks, versions, self._extra, tables, tuple(tensors), (), fused, dense, self._values, self._aliases
        )

    def _known(self, key: str) -> TensorStorageMetadata:
        known = self._saved.tensor(key)
        assert known is not None
        return known

    def _whole(self, kind: str, name: str, state: str, key: str) -> None:
        """A dense tensor; one in pieces (of FSDP) is refused."""
        known = self._known(key)
        if len(known.chunks) != 1:
            raise ValueError(f"{key} is in {len(known.chunks)} pieces: only tables are, save dense layers whole")
        shape = tuple(known.size)
        self._chunks[Stored(kind, name, state, shape, known.properties.dtype, file=file_of(0))] = _Chunk(
            key, (0,) * len(shape), shape
        )

    def _table(
        self, name: str, table: str, key: str, rules: Mapping[str, str] | str | None, steps: int | None
    ) -> TableFacts:
        known = self._known(key)
        rows, dim = known.size
        shards = []
        for chunk in known.chunks:
            (row, column), (height, width) = chunk.offsets, chunk.sizes
            shards.append(
                Shard(table, self._saved.rank_of(key, chunk), (row, row + height), (column, column + width))
            )  # fmt: skip
            self._add(name, WEIGHT, key, chunk, shards[-1].rows, shards[-1].cols)
        shards = [shard for shard in shards if shard.rows[0] < shard.rows[1] and shard.cols[0] < shard.cols[1]]
        # a table that an ordinary optimizer trains has that optimizer's states
        fused = {s: k for s, k in self._states.get(name, {}).items() if s.startswith(f"{table}.")}
        counted, dims, row_state = None, {}, "shard"
        for state_key, saved_key in fused.items():
            self._states[name].pop(state_key)
            state, of_state = our_state(name, state_key), self._known(saved_key)
            if state == STEP:
                counted = int(self._saved.piece(saved_key, (0,) * len(of_state.size), of_state.size))
                continue
            dims[state] = len(of_state.size)
            blocks = sorted({shard.cols for shard in shards})
            if dims[state] == 1 and tuple(of_state.size) == (rows,) and len(blocks) > 1:
                blocks, row_state = [(0, dim)], "table"
            self._state(name, state, saved_key, (rows, dim), blocks)
        rule = rule_of(name, [dims[state] for state in sorted(dims)], rules)
        # a table without states has an optimizer in its backward, SGD, unless an ordinary one trains it
        in_backward = fused or rules or (self._has_optimizer and name not in self._states)
        trained = rule if in_backward else None
        return TableFacts(
            table, rows, dim, known.properties.dtype, row_state, trained, {},
            steps_of(name, rule, counted, steps), tuple(sorted(shards, key=lambda s: (s.cols, s.rows, s.rank))),
        )  # fmt: skip

    def _state(self, name: str, state: str, key: str, size: tuple[int, int], blocks: list[Span]) -> None:
        rows, _ = size
        known = self._known(key)
        wanted = (rows * len(blocks),) if len(known.size) == 1 else size
        if tuple(known.size) != wanted:
            raise ValueError(f"{key} has shape {list(known.size)}, the table has {list(size)} in {len(blocks)} blocks")
        for chunk in known.chunks:
            low, high = chunk.offsets[0], chunk.offsets[0] + chunk.sizes[0]
            if len(known.size) == 2:
                column = chunk.offsets[1]
                self._add(name, state, key, chunk, (low, high), (column, column + chunk.sizes[1]))
                continue
            for number, columns in enumerate(blocks):
                # a piece may run over the end of a block
                begin, end = max(low, number * rows), min(high, (number + 1) * rows)
                if begin < end:
                    inside = begin - number * rows, end - number * rows
                    self._add(name, state, key, chunk, inside, columns, part=(begin - low, end - low))

    def _add(
        self, name: str, state: str, key: str, chunk: ChunkStorageMetadata, rows: Span, columns: Span,
        *, part: Span | None = None,
    ) -> None:  # fmt: skip
        known, file = self._known(key), file_of(self._saved.rank_of(key, chunk))
        shape = (rows[1] - rows[0],) if part else (rows[1] - rows[0], columns[1] - columns[0])
        stored = Stored(TABLE, name, state, shape, known.properties.dtype, rows, columns, file)
        if 0 not in shape:
            self._chunks[stored] = _Chunk(key, tuple(chunk.offsets), tuple(chunk.sizes), part)

    def _param_groups(self, tables: set[str]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Settings of the tables' optimizers and of the others."""
        fused: list[dict[str, Any]] = []
        dense: list[dict[str, Any]] = []
        for group in _nested(self._groups) or ():
            settings = {key: _plain(f"param_groups: {key}", value) for key, value in group.items() if key != "params"}
            for names, groups in (
                ([name for name in group["params"] if name in tables], fused),
                ([name for name in group["params"] if name not in tables], dense),
            ):
                if names:
                    groups.append({**settings, "params": names})
        return fused, dense


def _nested(flat: Mapping[Keys, Any]) -> Any:
    """The dicts and lists that paths like (0, "lr") lead into; None for no path."""
    if () in flat:
        return flat[()]
    nested: dict[Any, Any] = {}
    for path in flat:
        below = {rest[1:]: value for rest, value in flat.items() if rest[0] == path[0]}
        nested[path[0]] = _nested(below)
    if nested and all(isinstance(key, int) for key in nested):
        return [nested[key] for key in sorted(nested)]
    return nested or None


def _item(tensor: Tensor) -> Any:
    return tensor.item()


def _plain(what: str, value: Any) -> Any:
    """A value as JSON has it.

    Raises:
        ValueError: JSON has not.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError):
        raise ValueError(f"{what} is a {type(value).__name__}, neither tensor nor JSON: it has no place here") from None

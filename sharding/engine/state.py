"""Weights and optimizer states of sharded tables as users save and load them.

A value is a tensor in pieces over the ranks. Outside it is a `ShardedTensor` or DTensor of live views where it is cut,
and a plain tensor where every rank holds it. The names do not depend on the plan. Nothing here talks to other ranks.
States per row of a table that is cut by columns are one number a row and column block ("strip"), as in TorchRec: in one
dimension, strip after strip, of rows x strips numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.embeddings import TableGroup

from ...planner.layout import Shard, Span
from ..comms.env import ShardingEnv
from .routes import Routes, Table

if TYPE_CHECKING:
    from .collection import ShardedCollection
    from .tables import LocalTables

Box = tuple[Span, ...]


@dataclass(frozen=True)
class Piece:
    """A rank's part of a value: [lo, hi) of each dimension."""

    rank: int
    box: Box

    @property
    def shape(self) -> tuple[int, ...]:
        """Its size."""
        return tuple(high - low for low, high in self.box)


@dataclass(frozen=True)
class Value:
    """A tensor of `size` that lies in pieces over the ranks; `local` has this rank's, as views.

    Where it is `replicated` each rank has all of it, and `local` one or more copies. `rows` is the table's number of
    rows where the value has numbers per row, and `alike` says that those of all strips are the same.
    """

    size: tuple[int, ...]
    pieces: tuple[Piece, ...]
    local: tuple[tuple[Piece, Tensor], ...]
    dtype: torch.dtype
    device: torch.device
    replicated: bool = False
    rows: int | None = None
    alike: bool = False


class States:
    """What a rank publishes of its tables; `shards` are those of all ranks, by table."""

    def __init__(self, routes: Routes, local_tables: LocalTables, env: ShardingEnv) -> None:
        self.tables = {table.name: table for table in routes.tables}
        self.shards = shards_by_table(routes)
        self.env, self._tables = env, local_tables
        self._homes: dict[str, list[tuple[Shard, TableGroup, int]]] = {}
        for group, part in zip(local_tables.all_groups(), local_tables.members, strict=True):
            for number, shard in enumerate(part.shards):
                # groups of replicas name one rank for all
                self._homes.setdefault(shard.table, []).append((replace(shard, rank=env.rank), group, number))

    def homes(self, table: str) -> list[tuple[Shard, TableGroup, int]]:
        """This rank's shards of a table that are not empty: each with its group, and its number there."""
        return [home for home in self._homes.get(table, []) if not _is_empty(home[0])]

    def is_replicated(self, table: str) -> bool:
        """Whether every rank holds all of it."""
        return self.shards[table][0].replica

    def weight(self, name: str) -> Value:
        """A table's rows."""
        table, replica = self.tables[name], self.is_replicated(name)
        pieces = tuple(Piece(shard.rank, _cells(shard)) for shard in self.shards[name])
        local = tuple((Piece(shard.rank, _cells(shard)), group.view(n)) for shard, group, n in self.homes(name))
        return Value((table.rows, table.dim), pieces, local, table.dtype, self._tables.device, replica)

    def states(self, name: str) -> dict[str, Value]:
        """A table's optimizer states by TorchRec's names; none of a table without rows on this rank."""
        homes = [(shard, group.state_views(n)) for shard, group, n in self.homes(name)]
        keys = homes[0][1] if homes else ()
        return {key: self._state(name, key, [(shard, views[key]) for shard, views in homes]) for key in keys}

    def _state(self, name: str, key: str, local: Sequence[tuple[Shard, Tensor]]) -> Value:
        table, first = self.tables[name], local[0][1]
        if key == "step":
            count = Piece(self.env.rank, ((0, 1),))
            return Value((1,), (count,), tuple((count, view) for _, view in local), first.dtype, first.device, True)
        strips, replicated = self.strips(name), self.is_replicated(name)
        size: tuple[int, ...]
        place: Callable[[Shard], Box]
        if first.dim() == 2:
            size, place = (table.rows, table.dim), _cells
        elif self._rows_agree(table, strips):
            size, place = (table.rows,), _rows
            replicated = replicated or len(strips) > 1
        else:
            size, place = (table.rows * len(strips),), _rows_of(strips, table.rows)
        pieces = tuple(Piece(shard.rank, place(shard)) for shard in self.shards[name])
        own_pieces = tuple((Piece(shard.rank, place(shard)), view) for shard, view in local)
        rows = table.rows if first.dim() == 1 else None
        alike = table.options.row_state == "table"
        return Value(size, pieces, own_pieces, first.dtype, self._tables.device, replicated, rows, alike)

    def strips(self, name: str) -> list[Span]:
        """A table's column blocks."""
        return sorted({shard.cols for shard in self.shards[name]})

    def _rows_agree(self, table: Table, strips: Sequence[Span]) -> bool:
        """Whether a number of a row is one for the whole row, and each rank that has some of a cut row has all rows."""
        if len(strips) == 1:
            return True
        return table.options.row_state == "table" and all(s.rows == (0, table.rows) for s in self.shards[table.name])


def shards_by_table(routes: Routes) -> dict[str, list[Shard]]:
    """The shards of each table that are not empty, by columns and rows."""
    by_table: dict[str, list[Shard]] = {table.name: [] for table in routes.tables}
    for rank, serving in enumerate(routes.serving):
        for group in (*serving.groups, *routes.dense):
            for shard in group.shards:
                if not _is_empty(shard):
                    by_table[shard.table].append(replace(shard, rank=rank))
    return {name: sorted(shards, key=lambda s: (s.cols, s.rows, s.rank)) for name, shards in by_table.items()}


def _is_empty(shard: Shard) -> bool:
    return shard.rows[0] >= shard.rows[1] or shard.cols[0] >= shard.cols[1]


def _cells(shard: Shard) -> Box:
    return shard.rows, shard.cols


def _rows(shard: Shard) -> Box:
    return (shard.rows,)


def _rows_of(strips: Sequence[Span], rows: int) -> Callable[[Shard], Box]:
    def place(shard: Shard) -> Box:
        begin = strips.index(shard.cols) * rows
        return ((begin + shard.rows[0], begin + shard.rows[1]),)

    return place


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes share, or None."""
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(low < high for low, high in common) else None


def part_of(tensor: Tensor, box: Box, part: Box) -> Tensor:
    """The view of `tensor`, which fills `box`, that fills `part`."""
    for dim, ((begin, _), (low, high)) in enumerate(zip(box, part, strict=True)):
        tensor = tensor.narrow(dim, low - begin, high - low)
    return tensor


def publish(value: Value, env: ShardingEnv) -> Tensor:
    """The value as others see it: live, but where one process without a process group holds several column blocks."""
    if value.replicated:
        return value.local[0][1]
    if env.process_group is None:
        if len(value.local) == 1:
            return value.local[0][1]
        whole = value.local[0][1].new_empty(value.size)
        for piece, tensor in value.local:
            part_of(whole, tuple((0, n) for n in value.size), piece.box).copy_(tensor)
        return whole
    if env.output_dtensor:
        dim = _even_dim(value, env.world_size)
        if dim is not None:
            return _dtensor(value, env, dim)
    return _sharded_tensor(value, env)


def _even_dim(value: Value, world_size: int) -> int | None:
    """The dimension that a DTensor over all ranks would cut into just these pieces."""
    for dim, size in enumerate(value.size):
        block = -(-size // world_size)
        cuts = [(low, min(low + block, size)) for low in range(0, size, block)]
        whole = [(0, n) for n in value.size]
        wanted = [(r, (*whole[:dim], cut, *whole[dim + 1 :])) for r, cut in enumerate(cuts)]
        if sorted((piece.rank, piece.box) for piece in value.pieces) == wanted:
            return dim
    return None


def _dtensor(value: Value, env: ShardingEnv, dim: int) -> Tensor:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Shard as Along

    assert env.process_group is not None
    mesh = DeviceMesh.from_group(env.process_group, value.device.type)
    empty = [0 if d == dim else n for d, n in enumerate(value.size)]
    local = value.local[0][1] if value.local else torch.empty(empty, dtype=value.dtype, device=value.device)
    stride = torch.empty(value.size, device="meta").stride()
    size = torch.Size(value.size)
    return DTensor.from_local(local, mesh, [Along(dim)], run_check=False, shape=size, stride=stride)


def _sharded_tensor(value: Value, env: ShardingEnv) -> Tensor:
    from torch.distributed._shard.metadata import ShardMetadata
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
    from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard
    from torch.distributed._shard.sharding_spec.api import EnumerableShardingSpec

    assert env.process_group is not None
    ranks, kind = dist.get_process_group_ranks(env.process_group), value.device.type

    def described(piece: Piece) -> ShardMetadata:
        # where other ranks compute is a guess, and only told
        device = "cpu" if kind == "cpu" else f"{kind}:{piece.rank % env.local_world_size}"
        where = str(value.device) if piece.rank == env.rank else device
        return ShardMetadata([low for low, _ in piece.box], list(piece.shape), f"rank:{ranks[piece.rank]}/{where}")

    pieces = [described(piece) for piece in value.pieces]
    metadata = ShardedTensorMetadata(pieces, torch.Size(value.size), TensorProperties(dtype=value.dtype))
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [LocalShard(tensor, described(piece)) for piece, tensor in value.local],
        metadata,
        process_group=env.process_group,
        sharding_spec=EnumerableShardingSpec(pieces),
    )


def publish_weights(collection: ShardedCollection, destination: dict[str, Any], prefix: str, _: Any) -> None:
    """After `state_dict`: the cut tables of a collection as others see them, in place of this rank's parameters."""
    states = collection.states
    for name in states.tables:
        key = f"{prefix}{collection.parameter_name(name)}"
        if key in destination and not states.is_replicated(name):
            destination[key] = publish(states.weight(name), states.env)


def take_weights(collection: ShardedCollection, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before `load_state_dict`: fill this rank's tables, which then load what they have."""
    filled = check_weights(collection, state_dict, prefix)
    for name, fill in filled.items():
        fill()
        # the very parameter, also with assign=True
        state_dict[f"{prefix}{collection.parameter_name(name)}"] = collection.parameter(name)


def check_weights(
    collection: ShardedCollection, state_dict: Mapping[str, Any], prefix: str
) -> dict[str, Callable[[], None]]:
    """What fills each table that a state dict has.

    Raises:
        ValueError: as `take`.
    """
    fills, states = {}, collection.states
    for name in states.tables:
        key = f"{prefix}{collection.parameter_name(name)}"
        if key in state_dict:
            fills[name] = take(f"table {name!r} ({key})", states.weight(name), state_dict[key], states.env)
    return fills


@dataclass(frozen=True)
class _Given:
    """What a rank has of a tensor that is to be loaded; `pieces` of all ranks, where that is known."""

    size: tuple[int, ...]
    local: list[tuple[Box, Tensor]]
    pieces: list[Piece] | None = None

    @property
    def is_whole(self) -> bool:
        """Whether each rank has all of it."""
        return len(self.local) == 1 and self.local[0][0] == tuple((0, n) for n in self.size)


def take(what: str, value: Value, given: Any, env: ShardingEnv, *, resplit: str | None = None) -> Callable[[], None]:
    """Check that this rank's pieces can be filled from `given`; what is returned fills them.

    `given` is all of the value, or a ShardedTensor or DTensor that has on each rank what that rank needs.

    Raises:
        ValueError: it has another size or is cut otherwise, or a state per row of the whole table is to become one per
            column block and `resplit` is not "mean".
    """
    if not isinstance(given, Tensor):
        if math.prod(value.size) == 1 and isinstance(given, int | float):
            return lambda: _fill(value, [(value.local[0][0].box, torch.full(value.size, given))])
        raise ValueError(f"{what} is a tensor of shape {value.size}, loaded {type(given).__name__}")
    loaded = _given(given, env)
    if loaded.size != value.size:
        if value.rows is None or loaded.size != (value.rows,) or not loaded.is_whole:
            raise ValueError(f"{what} has shape {value.size}, loaded {loaded.size}")
        if not value.alike and resplit != "mean":
            raise ValueError(
                f"{what} has a number for each row and column block, {value.size}, loaded one for each whole row,"
                f" {loaded.size}: set resplit = 'mean' on the optimizer to give each block that number, or shard by"
                " row_state='table'"
            )
        whole = loaded.local[0][1]
        shifts = range(0, value.size[0], value.rows)
        return lambda: _fill(value, [(((at, at + loaded.size[0]),), whole) for at in shifts])
    pieces = loaded.pieces
    wanted = value.pieces if pieces is not None else [piece for piece, _ in value.local]
    for piece in wanted:
        have = [box for box, _ in loaded.local] if pieces is None else [p.box for p in pieces if p.rank == piece.rank]
        if sum(volume(overlap(piece.box, box)) for box in have) < volume(piece.box):
            raise ValueError(
                f"{what}: rank {piece.rank} needs {_text(piece.box)} and has {[_text(box) for box in have]} of what is"
                " loaded, which another plan cut: torch.distributed.checkpoint saves and loads across plans, and so"
                " does a tensor of the whole"
            )
    return lambda: _fill(value, loaded.local)


@torch.no_grad()
def _fill(value: Value, sources: Sequence[tuple[Box, Tensor]]) -> None:
    for piece, tensor in value.local:
        for box, source in sources:
            shared = overlap(piece.box, box)
            if shared is not None:
                part_of(tensor, piece.box, shared).copy_(part_of(source.detach(), box, shared))


def _given(given: Any, env: ShardingEnv) -> _Given:
    local = local_pieces(given)
    if not hasattr(given, "local_shards"):
        return _Given(tuple(given.shape), local)
    ranks = [0] if env.process_group is None else dist.get_process_group_ranks(env.process_group)
    size, shards = tuple(given.metadata().size), given.metadata().shards_metadata
    placed = [(shard.placement.rank(), box_of(shard.shard_offsets, shard.shard_sizes)) for shard in shards]
    return _Given(size, local, [Piece(ranks.index(rank), box) for rank, box in placed if rank in ranks])


def local_pieces(value: Any) -> list[tuple[Box, Tensor]]:
    """This rank's pieces of a ShardedTensor or a DTensor, and where they lie; any other tensor is whole."""
    if hasattr(value, "local_shards"):
        return [
            (box_of(piece.metadata.shard_offsets, piece.tensor.shape), piece.tensor) for piece in value.local_shards()
        ]
    if not hasattr(value, "to_local"):
        return [(tuple((0, n) for n in value.shape), value)]
    here = value.to_local()
    if hasattr(here, "local_shards"):
        places = zip(here.local_offsets(), here.local_shards(), strict=True)
        return [(box_of(offset, piece.shape), piece) for offset, piece in places]
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return [(box_of(offset, here.shape), here)]


def box_of(offsets: Sequence[int], sizes: Sequence[int]) -> Box:
    return tuple((offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def volume(box: Box | None) -> int:
    """How many elements it has, none if there is none."""
    return 0 if box is None else math.prod(high - low for low, high in box)


def _text(box: Box) -> str:
    return " x ".join(f"[{low}, {high})" for low, high in box)

"""Weights and optimizer states of sharded tables as users save and load them.

A value is a tensor in pieces over the ranks. Outside it is a `ShardedTensor` or DTensor of live views where it is cut
(the latter of a `LocalShardsWrapper`, unless it is cut evenly), and a plain tensor where every rank holds it. The names
do not depend on the plan. Nothing here talks to other ranks.
States per row of a table that is cut by columns are one number a row and column block ("strip"), as in TorchRec: in one
dimension, strip after strip, of rows x strips numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.embeddings.tables.table_layout import blank
from shardwise.embeddings.tiers import RowPart, parts_of
from shardwise.errors import RefusedStateError

from ...planner.layout import Shard, Span
from ..comms.env import ShardingEnv
from .routes import Routes

if TYPE_CHECKING:
    from .collection import ShardedCollection
    from .tables import Home, LocalTables

Box = tuple[Span, ...]
# numbers of a shard: a view, or of tables with a tier what reads and writes them chunk by chunk
Numbers: TypeAlias = Tensor | RowPart


@dataclass(frozen=True)
class Piece:
    """A rank's part of a value: [lo, hi) of each dimension."""

    rank: int
    box: Box


@dataclass(frozen=True)
class Value:
    """A tensor of `size` that lies in pieces over the ranks; `local` has this rank's, as views or `RowPart`.

    Where it is `replicated` each rank has all of it, and `local` one or more copies. `rows` is the table's number of
    rows where the value has numbers per row, and `alike` says that those of all strips are the same.
    """

    size: tuple[int, ...]
    pieces: tuple[Piece, ...]
    local: tuple[tuple[Piece, Numbers], ...]
    dtype: torch.dtype
    device: torch.device
    replicated: bool = False
    rows: int | None = None
    alike: bool = False

    def tensors(self) -> list[tuple[Piece, Tensor]]:
        """What is local, where nothing of it lies below the device."""
        return [(piece, numbers) for piece, numbers in self.local if isinstance(numbers, Tensor)]


class States:
    """What a rank publishes of its tables; `shards` are those of all ranks that are not empty, by table."""

    def __init__(self, routes: Routes, local_tables: LocalTables, env: ShardingEnv) -> None:
        self.tables = {table.name: table for table in routes.tables}
        self.env, self._tables = env, local_tables
        # by columns and rows; groups of replicas name one rank for all
        self.shards: dict[str, list[Shard]] = {name: [] for name in self.tables}
        of_all_ranks = (
            replace(shard, rank=rank)
            for rank, serving in enumerate(routes.serving)
            for group in (*serving.groups, *routes.dense)
            for shard in group.shards
        )
        for shard in sorted(of_all_ranks, key=lambda shard: (shard.cols, shard.rows, shard.rank)):
            if volume((shard.rows, shard.cols)):
                self.shards[shard.table].append(shard)
        self._homes: dict[str, list[Home]] = {name: [] for name in self.tables}
        for shard, group, number in local_tables.homes:
            if volume((shard.rows, shard.cols)):
                self._homes[shard.table].append((replace(shard, rank=env.rank), group, number))

    def homes(self, table: str) -> list[Home]:
        """This rank's shards of a table that are not empty: each with its group, and its number there."""
        return self._homes[table]

    def is_replicated(self, table: str) -> bool:
        """Whether every rank holds all of it."""
        return self.shards[table][0].replica

    def strips(self, name: str) -> list[Span]:
        """A table's column blocks."""
        return sorted({shard.cols for shard in self.shards[name]})

    def weight(self, name: str) -> Value:
        """A table's rows."""
        table = self.tables[name]
        pieces = tuple(Piece(shard.rank, (shard.rows, shard.cols)) for shard in self.shards[name])
        local = tuple(
            (Piece(shard.rank, (shard.rows, shard.cols)), parts_of(group, number)[0])
            for shard, group, number in self.homes(name)
        )
        device = torch.device("cpu") if self._is_below(name) else self._tables.device
        return Value((table.rows, table.dim), pieces, local, table.dtype, device, self.is_replicated(name))

    def _is_below(self, name: str) -> bool:
        """Whether a table's numbers are read and written through a store, on the CPU."""
        homes = self.homes(name)
        return homes[0][1].is_away if homes else self.tables[name].options.tier is not None

    def states(self, name: str) -> dict[str, Value]:
        """A table's optimizer states by TorchRec's names; none of a table without rows on this rank."""
        of_shards: list[dict[str, Numbers]] = []
        for _, group, number in self.homes(name):
            numbers = iter(parts_of(group, number)[1:])
            views = group.state_views(number).items()
            of_shards.append({key: view if key == "step" else next(numbers) for key, view in views})
        keys = of_shards[0] if of_shards else ()
        return {key: self._state(name, key, [views[key] for views in of_shards]) for key in keys}

    def _state(self, name: str, key: str, views: Sequence[Numbers]) -> Value:
        """A state of which `views` are the parts in this rank's shards."""
        table, weight, first = self.tables[name], self.weight(name), views[0]
        if key == "step":
            count = Piece(self.env.rank, ((0, 1),))
            return Value((1,), (count,), tuple((count, view) for view in views), first.dtype, first.device, True)
        own = list(zip([piece for piece, _ in weight.local], views, strict=True))
        if first.dim() == 2:
            return replace(weight, local=tuple(own), dtype=first.dtype)
        begins = {strip: number * table.rows for number, strip in enumerate(self.strips(name))}
        alike, replicated = table.options.row_state == "table", weight.replicated
        if alike and len(begins) > 1 and all(shard.rows == (0, table.rows) for shard in self.shards[name]):
            # one number for the whole row, and each rank that has some of a cut row has all rows
            begins, replicated = dict.fromkeys(begins, 0), True

        def of_rows(piece: Piece) -> Piece:
            (low, high), strip = piece.box
            return Piece(piece.rank, ((begins[strip] + low, begins[strip] + high),))

        local = tuple((of_rows(piece), view) for piece, view in own)
        return Value(
            (max(begins.values()) + table.rows,), tuple(map(of_rows, weight.pieces)), local, first.dtype, weight.device,
            replicated, table.rows, alike,
        )  # fmt: skip


def overlap(a: Box, b: Box) -> Box | None:
    """What two boxes share, or None."""
    common = tuple((max(x[0], y[0]), min(x[1], y[1])) for x, y in zip(a, b, strict=True))
    return common if all(low < high for low, high in common) else None


def part_of(tensor: Tensor, box: Box, part: Box) -> Tensor:
    """The view of `tensor`, which fills `box`, that fills `part`."""
    return tensor[tuple(slice(low - begin, high - begin) for (begin, _), (low, high) in zip(box, part, strict=True))]


def publish(value: Value, env: ShardingEnv) -> Tensor:
    """The value as others see it: live, but where one process without a process group holds several column blocks."""
    local = value.tensors()
    assert len(local) == len(value.local), "what lies below is copied before it is published"
    if value.replicated or (env.process_group is None and len(local) == 1):
        return local[0][1]
    if env.process_group is None:
        whole = local[0][1].new_empty(value.size)
        _fill([(tuple((0, n) for n in value.size), whole)], [(piece.box, tensor) for piece, tensor in local])
        return whole
    return _dtensor(value, env) if env.output_dtensor else _sharded_tensor(value, env)


def copied(value: Value) -> Value:
    """The value in memory of its own, which is the host's where rows lie below the device."""
    return replace(
        value,
        local=tuple(
            (piece, numbers.whole() if isinstance(numbers, RowPart) else numbers.detach().clone())
            for piece, numbers in value.local
        ),
    )


def hidden(value: Value) -> Tensor:
    """NaNs in the place of a value that is away."""
    return blank(torch.empty(0, dtype=value.dtype, device=value.device), value.size)


def _even_dim(value: Value, world_size: int) -> int | None:
    """The dimension that a DTensor over all ranks would cut into just these pieces."""
    placed = sorted((piece.rank, piece.box) for piece in value.pieces)
    for dim, size in enumerate(value.size):
        block, box = -(-size // world_size), tuple((0, n) for n in value.size)
        cuts = [(low, min(low + block, size)) for low in range(0, size, block)]
        if placed == [(rank, (*box[:dim], cut, *box[dim + 1 :])) for rank, cut in enumerate(cuts)]:
            return dim
    return None


def _dtensor(value: Value, env: ShardingEnv) -> Tensor:
    """A plain DTensor where it is cut evenly over all ranks, else one of this rank's pieces as they lie."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard as Along

    assert env.process_group is not None
    mesh = DeviceMesh.from_group(env.process_group, value.device.type)
    whole, dim, placement = torch.empty(value.size, device="meta"), _even_dim(value, env.world_size), None
    if dim is None:
        from ..plan.local_shards import LocalShardsWrapper

        boxes = [[low for low, _ in piece.box] for piece, _ in value.local]
        local: Tensor = LocalShardsWrapper([tensor for _, tensor in value.tensors()], boxes, dtype=value.dtype)
        # the last dimension that is cut; a value that one rank holds is replicated in TorchRec's words
        cut = [d for piece in value.pieces for d, span in enumerate(piece.box) if span != (0, value.size[d])]
        placement = Along(max(cut)) if cut else Replicate()
    else:
        empty = [0 if d == dim else n for d, n in enumerate(value.size)]
        local = value.tensors()[0][1] if value.local else torch.empty(empty, dtype=value.dtype, device=value.device)
        placement = Along(dim)
    return DTensor.from_local(local, mesh, [placement], run_check=False, shape=whole.shape, stride=whole.stride())


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
        numbered = kind not in ("cpu", "meta") and piece.rank != env.rank
        where = f"{kind}:{piece.rank % env.local_world_size}" if numbered else value.device
        offsets, sizes = [low for low, _ in piece.box], [high - low for low, high in piece.box]
        return ShardMetadata(offsets, sizes, f"rank:{ranks[piece.rank]}/{where}")

    pieces = [described(piece) for piece in value.pieces]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        [LocalShard(tensor, described(piece)) for piece, tensor in value.tensors()],
        ShardedTensorMetadata(pieces, torch.Size(value.size), TensorProperties(dtype=value.dtype)),
        process_group=env.process_group,
        sharding_spec=EnumerableShardingSpec(pieces),
    )


def weight_holders(collection: ShardedCollection) -> dict[str, Any]:
    """The module whose `weight` is each table's parameter: its child, or the collection itself where it has none."""
    children = collection._modules.get(collection._children_name)
    own = collection._tables.parameters
    return dict.fromkeys(own, collection) if children is None else dict(children._modules)


def take_over(collection: ShardedCollection) -> None:
    """Make parameters that were put in the place of this rank's own the tables'; nothing where there are none.

    Raises:
        ValueError: as `LocalTables.follow`.
    """
    own = collection._tables.parameters
    given = {
        name: holder._parameters["weight"]
        for name, holder in weight_holders(collection).items()
        if holder._parameters["weight"] is not own[name]
    }
    if not given:
        return
    with collection.shards.whole(keep=True):
        moved = collection._tables.follow(given)
    collection._dense_parameters = collection._tables.dense_parameters()
    if moved:
        collection._forget()


def publish_weights(collection: ShardedCollection, destination: dict[str, Any], prefix: str, _: Any) -> None:
    """After `state_dict`: the cut tables of a collection as others see them, in place of this rank's parameters.

    Live views, but copies where replicas keep parts of the tables, whose memory goes again, and on the CPU of tables
    with a tier.
    """
    take_over(collection)
    states = collection.states
    away = {name for name in states.tables if collection.shards.is_away(name)}
    with collection.shards.assembled():
        for name in states.tables:
            apart = name in away
            key = f"{prefix}{collection.parameter_name(name)}"
            if key in destination and (apart or not states.is_replicated(name)):
                weight = states.weight(name)
                destination[key] = publish(copied(weight) if apart else weight, states.env)


def take_weights(collection: ShardedCollection, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Before `load_state_dict`: fill this rank's tables, which then load what they have."""
    with collection.shards.assembled(keep=True):
        for name, fill in check_weights(collection, state_dict, prefix).items():
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
    take_over(collection)
    states = collection.states
    keys = {name: f"{prefix}{collection.parameter_name(name)}" for name in states.tables}
    return {
        name: take(f"table {name!r} ({key})", states.weight(name), state_dict[key], states.env)
        for name, key in keys.items()
        if key in state_dict
    }


def take(what: str, value: Value, given: Any, env: ShardingEnv, *, resplit: str | None = None) -> Callable[[], None]:
    """Check that this rank's pieces can be filled from `given`; what is returned fills them.

    `given` is all of the value, or a ShardedTensor or DTensor that has on each rank what that rank needs.

    Raises:
        RefusedStateError: it has another size.
        ValueError: it is cut otherwise, or a state per row of the whole table is to become one per
            column block and `resplit` is not "mean".
    """
    targets = [(piece.box, tensor) for piece, tensor in value.local]
    # a ShardedTensor tells the pieces of all ranks
    metadata = given.metadata() if hasattr(given, "local_shards") else None
    if not isinstance(given, Tensor):
        if math.prod(value.size) == 1 and isinstance(given, int | float):
            return partial(_fill, targets, [(tuple((0, n) for n in value.size), torch.full(value.size, given))])
        raise ValueError(f"{what} is a tensor of shape {value.size}, loaded {type(given).__name__}")
    sources = local_pieces(given)
    if metadata is not None:
        size, wanted = tuple(metadata.size), value.pieces
        ranks = [0] if env.process_group is None else dist.get_process_group_ranks(env.process_group)
        pieces = [
            Piece(ranks.index(rank), box_of(shard.shard_offsets, shard.shard_sizes))
            for shard in metadata.shards_metadata
            if (rank := shard.placement.rank()) in ranks
        ]
    else:
        size, wanted = tuple(given.shape), tuple(piece for piece, _ in value.local)
        pieces = [Piece(env.rank, box) for box, _ in sources]
    if size != value.size:
        if value.rows is None or size != (value.rows,) or [box for box, _ in sources] != [((0, value.rows),)]:
            raise RefusedStateError(f"size mismatch: {what} has shape {value.size}, loaded {size}")
        if not value.alike and resplit != "mean":
            raise ValueError(
                f"{what} has a number for each row and column block, {value.size}, loaded one for each whole row,"
                f" {size}: set resplit = 'mean' on the optimizer to give each block that number, or shard by"
                " row_state='table'"
            )
        begins = range(0, value.size[0], value.rows)
        return partial(_fill, targets, [(((at, at + value.rows),), sources[0][1]) for at in begins])
    for piece in wanted:
        boxes = [loaded.box for loaded in pieces if loaded.rank == piece.rank]
        if sum(volume(overlap(piece.box, box)) for box in boxes) < volume(piece.box):
            needs, *has = (" x ".join(f"[{low}, {high})" for low, high in box) for box in (piece.box, *boxes))
            raise ValueError(
                f"{what}: rank {piece.rank} needs {needs} and has {has} of what is loaded, which another plan cut:"
                " torch.distributed.checkpoint saves and loads across plans, and so does a tensor of the whole"
            )
    return partial(_fill, targets, sources)


@torch.no_grad()
def _fill(targets: Sequence[tuple[Box, Numbers]], sources: Sequence[tuple[Box, Tensor]]) -> None:
    for place, target in targets:
        for box, source in sources:
            shared = overlap(place, box)
            if shared is None:
                continue
            values = part_of(source.detach(), box, shared)
            if isinstance(target, RowPart):
                within = zip(shared, place, strict=True)
                target.put(tuple((low - begin, high - begin) for (low, high), (begin, _) in within), values)
            else:
                part_of(target, place, shared).copy_(values)


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
        return [
            (box_of(offset, piece.shape), piece)
            # a rank without pieces has the place of none
            for offset, piece in zip(here.local_offsets(), here.local_shards(), strict=False)
        ]
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    return [(box_of(offset, here.shape), here)]


def box_of(offsets: Sequence[int], sizes: Sequence[int]) -> Box:
    return tuple((offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def volume(box: Box | None) -> int:
    """How many elements it has, none if there is none."""
    return 0 if box is None else math.prod(high - low for low, high in box)

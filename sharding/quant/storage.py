"""Quantized tables in pieces on several devices: where each lies, filling and reading them, and their lookups.

A piece with all rows of its columns is looked up where it is, and what comes out is brought home, the device of
outputs: scales are those of whole rows, so that columns side by side are those of the whole. Of a table that is cut by
rows the raw rows that a batch asks for are brought home, and looked up there as a table of which each id has a row of
its own. Either way the same rows meet in the same order in the same op as in one uncut table: the same bits.

One process holds all pieces. A shard's placement names its device; its rank only numbers it. Columns are cut between
bytes: several numbers of a 4- or 2-bit row share one.

Shapes: I [N] ids, O [F*B + 1] offsets, Y [B, D] of a lookup pooled, [N, D] unpooled.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata

from shardwise.embeddings import pick_features
from shardwise.embeddings.quant import QuantizedTable, QuantizedTables
from shardwise.embeddings.tables.table_layout import LookupFeature
from shardwise.jagged import KeyedJaggedTensor
from shardwise.kernels import (
    Feature,
    pack_features,
    quantized_pooled_lookup,
    quantized_sequence_lookup,
    row_format,
)
from shardwise.planner.layout import (
    SERVED_SETTINGS,
    Shard,
    Span,
    check_settings,
    validate,
)
from shardwise.sharding.plan.device_fallback import device_here, is_missing
from shardwise.sharding.plan.plan import ParameterSharding, shard_of

# kernels of quantized tables: on the device of the shard; in the memory of the host, where the CPU looks them up
QUANT_KERNELS = ("quant", "quant_uvm", "quant_uvm_caching")
_ON_HOST = QUANT_KERNELS[1:]
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class Piece:
    """A part of a table and the device that it is on."""

    shard: Shard
    device: torch.device


def pieces_of(table: QuantizedTable, one: ParameterSharding, world_size: int | None = None) -> list[Piece]:
    """The pieces that a `ParameterSharding` describes, without empty ones; one whole piece if it is data_parallel.

    A piece of a replicated table has the device "meta": it goes where outputs are.

    Args:
        table: what is cut.
        one: its plan.
        world_size: how many ranks there are; None if several kinds of devices have ranks of their own.

    Raises:
        ValueError: the kernel is not for quantized tables, a shard has no device, a cut of columns is inside a byte,
            the shards do not cover the table, or the plan sets `output_dtype`; names the table.
    """
    name, sizes = table.name, (table.rows, table.dim)
    if one.compute_kernel not in QUANT_KERNELS:
        raise ValueError(
            f"table {name!r}: compute_kernel {one.compute_kernel!r} trains; that of a quantized table is 'quant'"
        )
    for what, reason in check_settings(name, one, SERVED_SETTINGS).items():
        warnings.warn(f"the plan's {what} (table {name!r}) has no effect: {reason}", stacklevel=4)
    if one.compute_kernel == "quant_uvm_caching":
        warnings.warn(
            f"table {name!r}: kernel 'quant_uvm_caching' has no cache here: it is served as 'quant_uvm', whose rows the"
            " CPU looks up in the memory of the host",
            stacklevel=4,
        )
    if one.sharding_spec is None:
        return [Piece(Shard(name, 0, (0, sizes[0]), (0, sizes[1])), torch.device("meta"))]
    pieces = [_piece(table, one, cut) for cut in one.sharding_spec.shards]
    known = max((piece.shard.rank for piece in pieces), default=0) + 1
    validate([piece.shard for piece in pieces], {name: sizes}, known if world_size is None else world_size)
    spans = [(piece, *piece.shard.rows, *piece.shard.cols) for piece in pieces]
    # of a table without rows one piece stays
    return [piece for piece, top, bottom, left, right in spans if top < bottom and left < right] or pieces[:1]


def _piece(table: QuantizedTable, one: ParameterSharding, cut: ShardMetadata) -> Piece:
    shard, placement = shard_of(table.name, cut), cut.placement
    if shard is None or placement is None or isinstance(placement, str):
        raise ValueError(f"table {table.name!r}: a shard's placement names no rank and device: {placement}")
    device = _CPU if one.compute_kernel in _ON_HOST else placement.device()
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", shard.rank)
    byte_span(table, shard.cols)
    return Piece(shard, device)


def byte_span(table: QuantizedTable, cols: Span) -> Span:
    """Bytes [lo, hi) of a row of payload that hold columns [lo, hi).

    Raises:
        ValueError: a cut is inside a byte.
    """
    bits = row_format(table.format).bits
    for edge in cols:
        if edge * bits % 8 and edge != table.dim:
            raise ValueError(
                f"table {table.name!r}: columns [{cols[0]}, {cols[1]}) of {table.format} rows begin or end inside a"
                f" byte: cut at multiples of {8 // bits} columns"
            )
    return cols[0] * bits // 8, -(-cols[1] * bits // 8)


def reachable(home: torch.device, pieces: Iterable[Piece]) -> tuple[torch.device, list[Piece]]:
    """`home` and the pieces; those of a GPU on the CPU where there is no GPU, with one warning."""
    found = list(pieces)
    lacking = next((device for device in (home, *(piece.device for piece in found)) if is_missing(device)), None)
    if lacking is None:
        return home, found
    device_here(lacking, stacklevel=4)
    return (
        _CPU if is_missing(home) else home,
        [replace(piece, device=_CPU) if is_missing(piece.device) else piece for piece in found],
    )


def first_device(pieces: Sequence[Sequence[Piece]]) -> torch.device:
    """Where outputs go unless somebody says: the device of the lowest rank, a GPU before the CPU."""
    placed = [piece for of in pieces for piece in of if piece.device.type != "meta"]
    first = min(placed, key=lambda piece: (piece.device.type == "cpu", piece.shard.rank), default=None)
    return _CPU if first is None else first.device


@dataclass(frozen=True)
class ServedTable:
    """A table and the features that look it up, averaged or added."""

    table: QuantizedTable
    features: tuple[str, ...]
    mean: bool
    scale_dtype: torch.dtype


class TableValues(NamedTuple):
    """A whole table: payload uint8 [rows, row_bytes], scales [rows, parts], the row of each id if it is pruned."""

    payload: Tensor
    scales: Tensor
    remapping: Tensor | None = None


@dataclass
class Part:
    """Pieces of one format on one device; `device` is where they are to be while they are on meta."""

    device: torch.device
    held: QuantizedTables

    def materialize(self) -> None:
        """Allocate zeros where there is no memory yet."""
        if self.held.payload.is_meta:
            self.held.move(partial(torch.zeros_like, device=self.device))


@dataclass(frozen=True)
class Place:
    """A piece of a table: table number `number` of a part."""

    shard: Shard
    part: Part
    number: int


@dataclass(frozen=True)
class SpreadBatch:
    """A batch of B samples where it is looked up: by number of a part, and at home by number of a cut table."""

    of_parts: dict[int, KeyedJaggedTensor]
    of_cut: dict[int, KeyedJaggedTensor]
    samples: int
    weighted: bool


class ShardedTables:
    """Storage and lookups of tables in pieces; knows nothing of modules, and checks no ids.

    Args:
        tables, pieces: the tables, and the pieces of each.
        home: the device of outputs, and of pieces that have none of their own.
        pooled: whether lookups pool.
        meta: allocate nothing until values come.
    """

    def __init__(
        self,
        tables: Sequence[ServedTable],
        pieces: Sequence[Sequence[Piece]],
        home: torch.device,
        *,
        pooled: bool,
        meta: bool,
    ) -> None:
        self.tables = list(tables)
        # a tensor, so that whatever moves the tables moves it too
        self._marker = torch.empty(0, device=home)
        # "cuda" is one of its devices by now
        home = self.home
        self._cut = [t for t, of in enumerate(pieces) if any(p.shard.rows != (0, tables[t].table.rows) for p in of)]
        # ids of pruned tables that are cut by rows are remapped at home
        self._remappings = {
            t: torch.empty(count, dtype=torch.int32, device="meta" if meta else home)
            for t in self._cut
            if (count := tables[t].table.ids) is not None
        }
        members: dict[object, list[tuple[int, Piece]]] = {}
        for t, (served, of) in enumerate(zip(tables, pieces, strict=True)):
            for piece in of:
                device = home if piece.device.type == "meta" else piece.device
                width = 0 if pooled else piece.shard.cols[1] - piece.shard.cols[0]
                remaps = served.table.ids is not None and t not in self._cut
                key = device, served.table.format, served.scale_dtype, width, remaps
                members.setdefault(key, []).append((t, replace(piece, device=device)))
        self.parts: list[Part] = []
        self.places: list[list[Place]] = [[] for _ in tables]
        # where the blocks of columns of each output come from: (source, lookup), sources being parts, then cut tables
        blocks: dict[tuple[int, int, int], tuple[int, int]] = {}
        for found in members.values():
            part = self._part(found, meta)
            lookups = iter(range(len(part.held.lookups)))
            for number, (t, piece) in enumerate(found):
                self.places[t].append(Place(piece.shard, part, number))
                for j in range(0 if t in self._cut else len(tables[t].features)):
                    blocks[t, j, piece.shard.cols[0]] = len(self.parts), next(lookups)
            self.parts.append(part)
        for source, t in enumerate(self._cut, start=len(self.parts)):
            blocks |= {(t, j, 0): (source, j) for j in range(len(tables[t].features))}
        outputs: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for t, j, column in sorted(blocks):
            outputs.setdefault((t, j), []).append(blocks[t, j, column])
        self._outputs = list(outputs.values())
        # what one part finds is the output then
        self._is_one = self._outputs == [[(0, n)] for n in range(len(self.features))] and len(self.parts) == 1

    def _part(self, found: Sequence[tuple[int, Piece]], meta: bool) -> Part:
        tables, features = [], []
        for number, (t, piece) in enumerate(found):
            served, ((first, last), (left, right)) = self.tables[t], (piece.shard.rows, piece.shard.cols)
            ids = None if t in self._cut else served.table.ids
            tables.append(QuantizedTable(served.table.name, last - first, right - left, served.table.format, ids))
            if t not in self._cut:
                features += [LookupFeature(feature, number, served.mean) for feature in served.features]
        device, scale_dtype = found[0][1].device, self.tables[found[0][0]].scale_dtype
        held = QuantizedTables(tables, features, scale_dtype=scale_dtype, device="meta" if meta else device)
        return Part(device, held)

    @property
    def home(self) -> torch.device:
        """The device of outputs."""
        return self._marker.device

    @property
    def features(self) -> list[str]:
        """The features in the order of outputs."""
        return [feature for served in self.tables for feature in served.features]

    @property
    def empty(self) -> list[str]:
        """Tables of which a piece is on meta."""
        on_meta = [t for t, places in enumerate(self.places) if any(p.part.held.payload.is_meta for p in places)]
        return [self.tables[t].table.name for t in on_meta]

    def move(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Apply what `nn.Module._apply` applies, to all pieces and to where outputs are.

        Pieces on several devices stay there: a model that goes to one device with its dense layers would take them all.
        """
        is_spread = len({part.device for part in self.parts}) > 1
        for part in self.parts:
            payload = part.held.payload
            if is_spread and not payload.is_meta and not fn(payload[:0]).is_meta:
                continue
            part.held.move(fn)
            if not part.held.payload.is_meta:
                part.device = part.held.payload.device
        self._remappings = {t: fn(remapping) for t, remapping in self._remappings.items()}
        marker = fn(self._marker)
        if not marker.is_meta:
            self._marker = marker

    def planes(self, place: Place) -> tuple[Tensor, Tensor]:
        """Payload uint8 [rows, bytes] and scales [rows, parts] of a piece, views."""
        return place.part.held.payload_of(place.number), place.part.held.scales_of(place.number)

    def remapping(self, t: int) -> Tensor | None:
        """The row of each id of a pruned table, int32 [ids]."""
        if self.tables[t].table.ids is None:
            return None
        first = self.places[t][0]
        return self._remappings[t] if t in self._cut else first.part.held.remapping_of(first.number)

    def whole(self, t: int) -> TableValues:
        """A whole table: views of the piece if there is one alone, else a copy in the memory of the host."""
        if len(self.places[t]) == 1:
            return TableValues(*self.planes(self.places[t][0]), self.remapping(t))
        served = self.tables[t]
        table, device = served.table, "meta" if self.empty else "cpu"
        payload = torch.empty(table.rows, table.row_bytes, dtype=torch.uint8, device=device)
        scales = torch.empty(table.rows, row_format(table.format).parts, dtype=served.scale_dtype, device=device)
        for place in self.places[t]:
            rows, part_of_row = slice(*place.shard.rows), slice(*byte_span(table, place.shard.cols))
            own = self.planes(place)
            payload[rows, part_of_row], scales[rows] = own[0].to(device), own[1].to(device)
        return TableValues(payload, scales, self.remapping(t))

    @staticmethod
    def require_fit(served: ServedTable, values: TableValues) -> None:
        """ValueError if values are not those of such a table; names it."""
        table = served.table
        shapes = (table.rows, table.row_bytes), (table.rows, row_format(table.format).parts)
        for what, given, shape, dtype in (
            ("payload", values.payload, shapes[0], torch.uint8),
            ("scales", values.scales, shapes[1], served.scale_dtype),
            ("index_remapping", values.remapping, (table.ids,), torch.int32),
        ):
            if given is not None and (tuple(given.shape), given.dtype) != (shape, dtype):
                raise ValueError(
                    f"table {table.name!r}: {what} of {table.format} rows is {dtype} {list(shape)}, got {given.dtype}"
                    f" {list(given.shape)}"
                )

    @torch.no_grad()
    def fill(self, t: int, values: TableValues) -> None:
        """Copy a whole table into its pieces, which come to life if they are on meta; those of one part together.

        Raises:
            ValueError: as `require_fit`.
        """
        self.require_fit(self.tables[t], values)
        table = self.tables[t].table
        if values.payload.is_meta:
            return
        for place in self.places[t]:
            place.part.materialize()
            own = self.planes(place)
            rows, part_of_row = slice(*place.shard.rows), slice(*byte_span(table, place.shard.cols))
            own[0].copy_(values.payload[rows, part_of_row])
            own[1].copy_(values.scales[rows])
            if values.remapping is not None and t not in self._cut:
                place.part.held.remapping_of(place.number).copy_(values.remapping)
        if t in self._remappings and values.remapping is not None:
            self._remappings[t] = values.remapping.to(self.home, copy=True)

    def spread(self, features: KeyedJaggedTensor, weighted: bool = False) -> SpreadBatch:
        """What each part looks up of a batch with equal batch sizes, on its device; ids of cut tables go home."""
        of_parts = {
            source: self._picked(features, part.held.keys, part.device)
            for source, part in enumerate(self.parts)
            if part.held.lookups
        }
        of_cut = {t: self._picked(features, self.tables[t].features, self.home) for t in self._cut}
        return SpreadBatch(of_parts, of_cut, features.stride(), weighted)

    def pooled(self, batch: SpreadBatch, dtype: torch.dtype) -> dict[int, Tensor]:
        """What each source finds, by its number: sums [B, its columns], on its device; those of cut tables at home."""
        found: dict[int, Tensor] = {}
        # all devices are at work before what is waited for
        for source, of_part in batch.of_parts.items():
            weights = of_part.weights() if batch.weighted else None
            found[source] = self.parts[source].held.pooled(of_part.values(), of_part.offsets(), weights, dtype)
        for source, t in enumerate(self._cut, start=len(self.parts)):
            of_table, table = batch.of_cut[t], self.tables[t].table
            weights = of_table.weights().detach() if batch.weighted else None
            payload, scales, ids, packed = self._gathered(t, of_table)
            found[source] = quantized_pooled_lookup(
                payload, scales, ids, of_table.offsets(), weights, packed, self._dims(t), table.format, dtype
            )
        return found

    def sequence(self, batch: SpreadBatch, dtype: torch.dtype) -> dict[int, Tensor]:
        """What each source finds: rows [n, dim], where `pooled` has sums."""
        found: dict[int, Tensor] = {}
        for source, of_part in batch.of_parts.items():
            found[source] = self.parts[source].held.sequence(of_part.values(), of_part.offsets(), dtype)
        for source, t in enumerate(self._cut, start=len(self.parts)):
            of_table, table = batch.of_cut[t], self.tables[t].table
            payload, scales, ids, packed = self._gathered(t, of_table)
            found[source] = quantized_sequence_lookup(
                payload, scales, ids, of_table.offsets(), packed, table.dim, table.format, dtype
            )
        return found

    def joined_sums(self, batch: SpreadBatch, found: Mapping[int, Tensor], dtype: torch.dtype) -> Tensor:
        """Y of all lookups side by side, [B, sum of dims], at home."""
        if self._is_one:
            return _moved(found[0], self.home)
        pieces: dict[int, Sequence[Tensor]] = {}
        for source, sums in found.items():
            is_part = source < len(self.parts)
            dims = self.parts[source].held.dims if is_part else self._dims(self._cut[source - len(self.parts)])
            pieces[source] = torch.split(_moved(sums, self.home), dims, dim=1)
        blocks = [pieces[source][number] for output in self._outputs for source, number in output]
        return torch.cat(blocks, dim=1) if blocks else torch.empty(batch.samples, 0, dtype=dtype, device=self.home)

    def joined_rows(self, batch: SpreadBatch, found: Mapping[int, Tensor], dtype: torch.dtype) -> Tensor:
        """Y of all lookups one below another, [N, dim], at home."""
        if self._is_one:
            return _moved(found[0], self.home)
        pieces: dict[int, Sequence[Tensor]] = {}
        for source, rows in found.items():
            is_part = source < len(self.parts)
            of_source = batch.of_parts[source] if is_part else batch.of_cut[self._cut[source - len(self.parts)]]
            pieces[source] = _split(_moved(rows, self.home), of_source.length_per_key())
        outputs = [[pieces[source][number] for source, number in output] for output in self._outputs]
        joined = [blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1) for blocks in outputs]
        return torch.cat(joined) if joined else torch.empty(0, 0, dtype=dtype, device=self.home)

    def _dims(self, t: int) -> list[int]:
        """The columns of each lookup in a table."""
        return [self.tables[t].table.dim] * len(self.tables[t].features)

    @staticmethod
    def _picked(features: KeyedJaggedTensor, names: Sequence[str], device: torch.device) -> KeyedJaggedTensor:
        return pick_features(features, names).to(device, non_blocking=_follows(features.device(), device))

    def _gathered(self, t: int, batch: KeyedJaggedTensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What ids of a batch need of a table cut by rows, as a table at home that has a row for each of them.

        Returns:
            Flat payload and scales; the row of each id there, -1 where it has none; the feature tensor of a lookup.
        """
        served, remapping = self.tables[t], self._remappings.get(t)
        rows = batch.values()
        if remapping is not None:
            is_known = (rows >= 0) & (rows < remapping.shape[0])
            rows = torch.where(is_known, remapping[torch.where(is_known, rows, 0)], -1)
        numbers, count = torch.full_like(rows, -1), 0
        payloads, scales = [], []
        for low, high, places in self._row_ranges(t):
            # waits for a GPU: nobody else knows how many rows travel
            wanted = ((rows >= low) & (rows < high)).nonzero().squeeze(1)
            numbers[wanted] = torch.arange(count, count + wanted.shape[0], dtype=rows.dtype, device=rows.device)
            count += wanted.shape[0]
            at = [_moved(rows[wanted] - place.shard.rows[0], place.part.device) for place in places]
            planes = [self.planes(place) for place in places]
            blocks = [_moved(own[0].index_select(0, one), self.home) for own, one in zip(planes, at, strict=True)]
            payloads.append(blocks[0] if len(blocks) == 1 else torch.cat(blocks, dim=1))
            # every piece of a row has the scales of the whole row
            scales.append(_moved(planes[0][1].index_select(0, at[0]), self.home))
        packed = pack_features([Feature(0, count, served.table.dim, 0, served.mean)] * len(served.features), self.home)
        return torch.cat(payloads).view(-1), torch.cat(scales).view(-1), numbers, packed

    def _row_ranges(self, t: int) -> Iterator[tuple[int, int, list[Place]]]:
        """Ranges of rows of a table between which no piece is cut, and the pieces of each by columns."""
        edges = sorted({edge for place in self.places[t] for edge in place.shard.rows})
        by_column = sorted(self.places[t], key=lambda place: place.shard.cols)
        for low, high in pairwise(edges):
            yield low, high, [p for p in by_column if p.shard.rows[0] <= low and high <= p.shard.rows[1]]


def _split(rows: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    """Rows of each lookup; what is over is padding."""
    return torch.split(rows[: sum(sizes)], list(sizes))


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    return tensor.to(device, non_blocking=_follows(tensor.device, device))


def _follows(source: torch.device, target: torch.device) -> bool:
    """Whether a copy need not be waited for: from GPU to GPU, where streams see to the order."""
    return source.type == target.type == "cuda"

"""From the plan of a quantized table to its pieces: which rows and columns lie on which device.

One process holds all pieces. A shard's placement names its device; its rank only numbers it. Columns are cut between
bytes: several numbers of a 4- or 2-bit row share one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch.distributed._shard.metadata import ShardMetadata

from shardwise.embeddings.quant import QuantizedTable
from shardwise.kernels import row_format
from shardwise.planner.layout import (
    SERVED_SETTINGS,
    Shard,
    Span,
    check_settings,
    validate,
)
from shardwise.sharding.comms.device_fallback import device_here, is_missing
from shardwise.sharding.plan.plan import ParameterSharding

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
    (row, col), (height, width) = cut.shard_offsets, cut.shard_sizes
    placement = cut.placement
    rank = None if placement is None or isinstance(placement, str) else placement.rank()
    if placement is None or isinstance(placement, str) or rank is None:
        raise ValueError(f"table {table.name!r}: a shard's placement names no rank and device: {placement}")
    device = _CPU if one.compute_kernel in _ON_HOST else placement.device()
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", rank)
    shard = Shard(table.name, rank, (row, row + height), (col, col + width))
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

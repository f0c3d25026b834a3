"""The cost model of a training step in this library's engine: `cost="shardwise"`.

A step has phases between exchanges: ids are packed where they come from and travel to the ranks that hold rows; these
look them up and send the results back, which are put together; gradients take the same way, and rows are updated. All
wait for the slowest rank, whose time is the sum of what it does. What every rank does for its own batch whatever the
plan is `base_ms`; what holders of a table do is `price`.

Per step, for one block of w columns at place s of its span (all constants: `constants_measured.py`):

    N = W n        ids of all ranks, n of them from each;   N_s = N * share of row range s
    U_s            different rows among them (`shares`);   G = W b  bags of all ranks
    e, q           bytes of an element and of the optimizer's state of a row of w columns
    input_comms    N_s ids of 4 bytes (8 above 2^31 rows, 4 more with weights) and G lengths, from other ranks
    fwd_compute    N_s id_ns + G bag_ns + U_s w e / row_gb_s + (N_s - U_s) w e / again_gb_s + 4 G w / copy_gb_s
    fwd_comms      4 G w bytes to other ranks (rows, 4 N_s w, where nothing is pooled)
    bwd_comms      as fwd_comms, the other way
    bwd_compute    N_s (update_id_ns + 4 w / again_gb_s) + U_s (update_row_ns + 2 (w e + q) / row_gb_s)
                   + 4 G w / copy_gb_s
    overhead       stream_us for each feature

Where nothing is pooled the 4 G w bytes that are written and read are 5 times 4 N_s w at fresh_gb_s: rows are also
brought into the order of their sources, or of slots, and packed.

Row ranges hold partial sums of all bags: every source adds them (S - 1 times 12 b w bytes, in fwd_compute) after it
divided its ids (cut_id_ns, in overhead). Where the span is one of several hosts, sums are added within the host first:
4 G w bytes travel inside, and only 4 b w W / L bytes to and from counterparts. A replicated table with an optimizer is
looked up at home; then every rank gets the ids and gradients of all. One without is trained by its dense gradient: a
ring's all-reduce of R w numbers. What a block makes every source do in addition to `base_ms` is charged to the ranks
that hold it, times W / S, so that the work of all ranks together is right.

A cut table of kernel "dense" trains by its gradient: R w numbers more are filled, and read by an optimizer that reads
and writes the rows (_STEPPED times R w at copy_gb_s, in bwd_compute), and are held.

A table with rows below the device (`Tier`) has on it what cache.py says, and brings the rows that miss: prefetch, which
is counted in full, as in a step that hides nothing.

A served table (`Table.served`) is looked up by one process, which has the batch: n ids, not W n, travel to a device and
results back to the first. Of row ranges the rows of the table travel instead, and are pooled there. No backward.

Bytes: rows and states are exact but for alignment (64 bytes for each group of tables that share a buffer). What a step
needs besides is an estimate of the peak, that of the backward: ids of all ranks as they came and in order with their
offsets, the gradient of their results, the sort.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardwise._names import did_you_mean

from ..constants import HBM_TO_DDR_MEM_BW, SSD_MEM_BW
from ..constants_measured import CARDS, Constants
from ..constraints import ParameterConstraints
from ..layout import Tier
from ..search.problem import (
    PARTS,
    Cached,
    Choice,
    Floats,
    Ints,
)
from ..tables import STATES, Table, state_bytes
from ..topology import Topology
from .cache import ROW_BYTES, SLOT_BYTES, Caches, Links, MissCurve, record_bytes, slot_bytes, smallest
from .draws import shares
from .ways import Way, ways_of


def optimizer_named(name: str) -> str:
    """The class name of an optimizer that is known, in any case.

    Raises:
        ValueError: none has this name; says which was meant, or which there are.
    """
    optimizer = {known.lower(): known for known in STATES}.get(name.lower())
    if optimizer is None:
        raise ValueError(f"optimizer {name!r} is unknown{did_you_mean(name, STATES) or ': ' + ', '.join(STATES)}")
    return optimizer


def block_bytes(table: Table, way: Way, width: int, world_size: int, batch_size: int) -> Ints:
    """Bytes at each place of a block's span [S]."""
    rows = np.array(way.rows, np.int64)
    # 4-bit rows fill whole bytes
    held = (rows * int(8 * width * table.element_bytes) + 7) // 8
    if table.served:
        held += rows * table.scale_bytes + served_bytes(table, way, width, batch_size)
        # the one copy of a replicated table is where the outputs are
        return held * (np.arange(way.span) == 0) if way.replica else held
    held += rows * state_bytes(table.optimizer, width)
    if way.replica and table.optimizer is None:
        # the dense gradient, and the bucket that it is reduced in
        return held + 2 * 4 * table.num_embeddings * width
    if way.compute_kernel == "dense" and not way.replica:
        # the optimizer and its states are the user's, the gradient is as wide as the rows
        held += rows * (int(width * table.element_bytes) - state_bytes(table.optimizer, width))
    return held + step_bytes(table, way, width, world_size, batch_size)


def served_bytes(table: Table, way: Way, width: int, batch_size: int) -> Ints:
    """Bytes at each place that a lookup needs besides rows: ids, and what comes out or, of row ranges, rows."""
    ids = table.ids(batch_size)
    share = 1.0 if way.replica else shares(table.num_embeddings, ids, table.skew, way.rows)[0]
    cut = way.span > 1 and not way.replica
    row = width * table.element_bytes + table.scale_bytes if cut else 4.0 * width
    results = ids * share if cut or not table.pooled else table.bags(batch_size)
    return np.broadcast_to(np.ceil(ids * share * 8 + results * row), (way.span,)).astype(np.int64)


def step_bytes(table: Table, way: Way, width: int, world_size: int, batch_size: int) -> Ints:
    """Bytes at each place that a step needs besides rows and states."""
    ids, bags = world_size * table.ids(batch_size), world_size * table.bags(batch_size)
    share = 1.0 if way.replica else shares(table.num_embeddings, ids, table.skew, way.rows)[0]
    # as they came and in order as int32; sort keys, places and bags of each
    of_ids = ids * share * (2 * 4 + 16 + 8 * table.weighted)
    results = bags if table.pooled else ids * share
    # lengths and offsets; the gradient as it came, and as the update reads it. Rows are also moved into other orders
    copies = 2 if table.pooled else 5
    total = np.ceil(of_ids + bags * 12 + copies * 4 * results * width)
    return np.broadcast_to(total, (way.span,)).astype(np.int64)


# results and their gradients travel as fp32
_RESULT = 4
_EXCHANGES = 4
# How often each number of a result is read or written, pooled (True) or row by row. At its source: put together, its
# gradient packed and divided by the ranks. Where it is looked up: written; rows are also brought into the order of
# their sources, and packed. In the backward there: read; rows also brought into the order of slots.
_SOURCE, _FORWARD, _BACKWARD = {True: 6, False: 8}, {True: 1, False: 5}, {True: 1, False: 5}
# how often each number of a table that trains by its gradient is read or written besides: filled, read by the
# optimizer, which reads and writes the row
_STEPPED = 4
# milliseconds of a nanosecond and of a microsecond; also GB/s of a byte per millisecond
_NS, _US = 1e-6, 1e-3
_DEFAULTS = inspect.signature(Topology.__init__).parameters


@dataclass(frozen=True)
class ShardwiseCost:
    """Prices ways for machines with these constants, by default those of an H100 or of a CPU.

    Bandwidths that the user gave the topology replace those of the constants.

    Args:
        batch_size: of one rank.
        caches: what is known of tables with rows below the device.
    """

    topology: Topology
    batch_size: int
    constants: Constants = None  # type: ignore[assignment]
    caches: Caches = Caches()
    _priced: dict[Any, Choice] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        preset = "cpu" if self.topology.compute_device == "cpu" else "h100"
        constants = self.constants or CARDS[preset].constants
        object.__setattr__(self, "constants", constants.with_(**given_bandwidths(self.topology, constants)))

    @property
    def name(self) -> str:
        """ "shardwise"."""
        return "shardwise"

    def ways(self, table: Table, constraint: ParameterConstraints | None = None) -> Sequence[Way]:
        """The ways that the engine can do and the constraint allows, see `ways_of`; where the constraint has a `Tier`
        of no slots, each with several."""
        ways = ways_of(table, self.topology, constraint)
        if constraint is None or constraint.tier is None or constraint.tier.slots is not None or table.served:
            return ways
        sizes = self.caches.sizes(table, self.curve(table))
        return [sized for way in ways for sized in (way.sized(sizes) if way.tier is not None else [way])]

    def curve(self, table: Table) -> MissCurve:
        """The misses of a table's cache, of a step of all ranks."""
        return self.caches.curve(table, self.topology.world_size * table.ids(self.batch_size))

    def with_slots(self, slots: Mapping[str, int]) -> ShardwiseCost:
        """The same with further sizes of caches among those that are chosen from, by table."""
        return dataclasses.replace(self, caches=dataclasses.replace(self.caches, slots={**self.caches.slots, **slots}))

    def base_ms(self, tables: Sequence[Table]) -> float:
        """Every rank's time in a step for its own batch: ids checked and packed, outputs put together and split."""
        constants, world = self.constants, self.topology.world_size
        total = 0.0
        for table in tables:
            ids, rows = table.ids(self.batch_size), self._results(table)
            total += len(table.features) * constants.feature_us * _US + ids * constants.sent_id_ns * _NS
            total += self._moved(table, _SOURCE[table.pooled] * rows * table.embedding_dim)
        exchanges = _EXCHANGES * constants.exchange_us if world > 1 else 0.0
        collections = len({table.module for table in tables})
        return total + collections * (constants.step_us + exchanges) * _US

    def price(self, table: Table, way: Way) -> Choice:
        """Time and bytes of one way; tables that differ by their names alone share the result."""
        plain = tuple(dataclasses.replace(f, name="") for f in table.features)
        # of caches the misses may be known by the table's name
        name = "" if way.tier is None else table.name
        key = dataclasses.replace(table, name=name, module="", features=plain), way
        choice = self._priced.get(key)
        if choice is None:
            choice = self._priced[key] = self._choice(table, way)
        return choice

    def _moved(self, table: Table, numbers: Any) -> Any:
        """Time to read or write fp32 numbers one after another."""
        bandwidth = self.constants.copy_gb_s if table.pooled else self.constants.fresh_gb_s
        return numbers * _RESULT / bandwidth * _NS

    def _results(self, table: Table) -> float:
        """Rows of the output that one rank gets."""
        return table.bags(self.batch_size) if table.pooled else table.ids(self.batch_size)

    def _choice(self, table: Table, way: Way) -> Choice:
        by_width = {width: self._block(table, way, width) for width in dict.fromkeys(way.widths)}
        memory = {
            width: block_bytes(table, way, width, self.topology.world_size, self.batch_size) for width in by_width
        }
        parts = np.stack([by_width[width] for width in way.widths], axis=1)  # [P, K, S]
        held = np.stack([memory[width] for width in way.widths])  # [K, S]
        none = np.zeros_like(held)
        if way.tier is not None:
            return self._cached(table, way, parts, held)
        on_host = self.topology.compute_device == "cpu" or way.compute_kernel.startswith("quant_uvm")
        hbm, ddr = (none, held) if on_host else (held, none)
        return Choice(way.sharding_type, way.compute_kernel, way.widths, parts, hbm, ddr, way.one_host)

    def _cached(self, table: Table, way: Way, parts: Floats, held: Ints) -> Choice:
        """A way with rows below the device: `parts` [P, K, S] and bytes [K, S] are those of all rows on it."""
        tier, rows = way.tier, np.array(way.rows, np.int64)
        assert tier is not None
        curve, links = self.curve(table), self.links
        slots = Tier.rows_of(tier.slots, table.num_embeddings) or smallest(curve, table.num_embeddings)
        share = rows / max(1, table.num_embeddings)  # [S]
        of_shard = np.minimum(np.ceil(slots * share), rows)
        on_disk = tier.below == "file"
        below = np.zeros_like(held)
        for block, width in enumerate(way.widths):
            record, row = record_bytes(table, width), width * table.element_bytes + state_bytes(table.optimizer, width)
            held[block] += np.ceil(of_shard * (row + SLOT_BYTES) + rows * ROW_BYTES - rows * row).astype(np.int64)
            kept = rows
            if on_disk:
                in_ram = [
                    Tier.rows_of(tier.ram_rows, *pair) or 0 for pair in zip(way.rows, share.tolist(), strict=True)
                ]
                kept = np.array(in_ram, np.int64)
            below[block] = kept * record
            wanted, misses = curve.wanted * share, curve.misses_at(slots) * share
            before = max(slots, Tier.rows_of(tier.ram_rows, table.num_embeddings) or 0)
            from_disk = curve.misses_at(before) * share * on_disk
            parts[PARTS.index("prefetch"), block] = [
                links.prefetch_ms(m, w, record, from_disk=f) for m, w, f in zip(misses, wanted, from_disk, strict=True)
            ]
        on_host = self.topology.compute_device == "cpu"
        hbm, ddr = (np.zeros_like(held), held + below) if on_host else (held, below)
        cached = Cached(
            slots, curve.wanted, curve.misses_at(slots), slot_bytes(table, table.embedding_dim), way.is_sized,
            curve.source,
        )  # fmt: skip
        return Choice(way.sharding_type, way.compute_kernel, way.widths, parts, hbm, ddr, way.one_host, cached)

    @property
    def links(self) -> Links:
        """How fast rows come and go: as the topology says, where the user said something, else as `Links` has it."""
        links, topology = self.caches.links, self.topology
        given = {
            name: bandwidth * _NS
            for name, bandwidth, usual in (
                ("link_gb_s", topology.hbm_to_ddr_mem_bw, HBM_TO_DDR_MEM_BW),
                ("disk_gb_s", topology.ssd_mem_bw, SSD_MEM_BW),
            )
            if bandwidth != usual
        }
        if topology.compute_device == "cpu" and "link_gb_s" not in given:
            # from memory to memory: read and written
            given["link_gb_s"] = self.constants.copy_gb_s / 2
        return dataclasses.replace(links, **given)

    def _block(self, table: Table, way: Way, width: int) -> Floats:
        """Time by `PARTS` [P, S] of a block."""
        if table.served:
            return _stacked(self._served(table, way, width), way.span)
        if way.replica:
            times = self._replica(table) if table.optimizer is not None else self._dense(table)
            return np.repeat(_stacked(times, 1), way.span, axis=1)
        return _stacked(self._cut(table, way, width), way.span)

    def _cut(self, table: Table, way: Way, width: int) -> dict[str, Any]:
        constants, world, span = self.constants, self.topology.world_size, way.span
        rank_ids, bags = table.ids(self.batch_size), world * table.bags(self.batch_size)
        share, distinct = shares(table.num_embeddings, world * rank_ids, table.skew, way.rows)  # [S], [S]
        ids, streams = world * rank_ids * share, len(table.features)
        block = bags * width * _RESULT
        results = block if table.pooled else ids * width * _RESULT
        times: dict[str, Any] = {
            "input_comms": self._wire(ids * _id_bytes(table) + self._length_bytes(table)),
            "fwd_compute": self._lookup(table, width, ids, distinct, bags),
            "bwd_compute": self._update(table, width, ids, distinct, bags),
            "overhead": streams * constants.stream_us * _US,
        }
        exchange = self._wire(results)
        # how often each rank of the span does what every source does for this block
        sources = world / span
        if way.compute_kernel == "dense":
            stepped = _STEPPED * np.array(way.rows) * width * table.element_bytes
            times["bwd_compute"] = times["bwd_compute"] + stepped / constants.copy_gb_s * _NS
        if span > 1:
            times["overhead"] += sources * rank_ids * constants.cut_id_ns * _NS
        if table.pooled and span > 1:
            inside = self._is_host(way)
            if inside:
                exchange = self._through_host(block)
            added = block if inside else (span - 1) * sources * table.bags(self.batch_size) * width * _RESULT
            times["fwd_compute"] = times["fwd_compute"] + 3 * added / constants.copy_gb_s * _NS
        if len(way.widths) > 1:
            # ids travel once for each block: all but one packing of them is more than base_ms has
            again = (len(way.widths) - 1) / len(way.widths)
            times["overhead"] += again * sources * (rank_ids * constants.sent_id_ns * _NS)
        return {**times, "fwd_comms": exchange, "bwd_comms": exchange}

    def _served(self, table: Table, way: Way, width: int) -> dict[str, Any]:
        constants, bags = self.constants, table.bags(self.batch_size)
        rows = (table.num_embeddings,) if way.replica else way.rows
        share, distinct = shares(table.num_embeddings, table.ids(self.batch_size), table.skew, rows)
        ids = table.ids(self.batch_size) * share
        if way.replica:
            # it is where the outputs are, and there alone
            times = {"fwd_compute": self._lookup(table, width, ids, distinct, bags)}
            return {part: time * (np.arange(way.span) == 0) for part, time in times.items()}
        row = width * table.element_bytes + table.scale_bytes
        results = ids * row if way.span > 1 else (bags if table.pooled else ids) * width * _RESULT
        # other devices than the first send and receive
        moved = 1 - 1 / self.topology.world_size
        compute = self._lookup(table, width, ids, distinct, bags)
        if way.span > 1:
            compute = compute + 3 * ids * row / constants.copy_gb_s * _NS
        return {
            "input_comms": moved * ids * _id_bytes(table) / constants.intra_gb_s * _NS,
            "fwd_compute": compute,
            "fwd_comms": moved * results / constants.intra_gb_s * _NS,
            "overhead": len(table.features) * constants.stream_us * _US,
        }

    def _lookup(self, table: Table, width: int, ids: Any, distinct: Any, bags: float) -> Any:
        """A forward on the rank that holds the rows."""
        constants, row = self.constants, width * table.element_bytes
        written = _FORWARD[table.pooled] * (bags if table.pooled else ids) * width
        loops = bags * constants.bag_ns if table.pooled else 0.0
        rows = distinct * row / constants.row_gb_s + (ids - distinct) * row / constants.again_gb_s
        return (ids * constants.id_ns + loops + rows) * _NS + self._moved(table, written)

    def _update(self, table: Table, width: int, ids: Any, distinct: Any, bags: float) -> Any:
        """A backward there."""
        constants = self.constants
        row = width * table.element_bytes + state_bytes(table.optimizer, width)
        came = _BACKWARD[table.pooled] * (bags if table.pooled else ids) * width
        reads = ids * (constants.update_id_ns + width * _RESULT / constants.again_gb_s)
        return (reads + distinct * (constants.update_row_ns + 2 * row / constants.row_gb_s)) * _NS + self._moved(
            table, came
        )

    def _replica(self, table: Table) -> dict[str, Any]:
        """Looked up at home; ids and gradients of all ranks come here, where every replica makes the same update."""
        world, width = self.topology.world_size, table.embedding_dim
        rank_ids, bags = table.ids(self.batch_size), table.bags(self.batch_size)
        (_,), (near,) = shares(table.num_embeddings, rank_ids, table.skew, (table.num_embeddings,))
        (_,), (all_of,) = shares(table.num_embeddings, world * rank_ids, table.skew, (table.num_embeddings,))
        results = world * self._results(table) * width * _RESULT
        return {
            "input_comms": self._wire(world * rank_ids * _id_bytes(table) + self._length_bytes(table)),
            "fwd_compute": self._lookup(table, width, rank_ids, near, bags),
            "bwd_compute": self._update(table, width, world * rank_ids, all_of, world * bags),
            "bwd_comms": self._wire(results),
            # ids and gradients are packed for every rank
            "overhead": len(table.features) * self.constants.stream_us * _US
            + (world - 1) * rank_ids * self.constants.sent_id_ns * _NS
            + self._moved(table, (4 if table.pooled else 6) * (world - 1) * self._results(table) * width),
        }

    def _dense(self, table: Table) -> dict[str, Any]:
        """Looked up at home; the dense gradient is averaged over ranks, and an ordinary optimizer steps all rows."""
        constants, world, width = self.constants, self.topology.world_size, table.embedding_dim
        rank_ids, bags = table.ids(self.batch_size), table.bags(self.batch_size)
        (_,), (near,) = shares(table.num_embeddings, rank_ids, table.skew, (table.num_embeddings,))
        gradient = table.num_embeddings * width * _RESULT
        # filled, reduced into a bucket, read by the optimizer, which reads and writes the rows
        dense = 5 * gradient / constants.copy_gb_s * _NS
        return {
            "fwd_compute": self._lookup(table, width, rank_ids, near, bags),
            "bwd_compute": self._update(table, width, rank_ids, near, bags) + dense,
            # a ring sends and receives twice all but one part, through the slowest link that it has
            "bwd_comms": 2 * gradient * (world - 1) / world / self._slowest_gb_s() * _NS,
            "overhead": len(table.features) * constants.stream_us * _US,
        }

    def _length_bytes(self, table: Table) -> float:
        """Lengths of the bags of all ranks; one number for each rank and feature where nothing is pooled."""
        world = self.topology.world_size
        return 4 * world * (table.bags(self.batch_size) if table.pooled else len(table.features))

    def _is_host(self, way: Way) -> bool:
        """Whether the row ranges fill one of several hosts."""
        local = self.topology.local_world_size
        return 1 < way.span == local < self.topology.world_size

    def _wire(self, data: Any) -> Any:
        """Time that bytes of all ranks, this one's among them, take to come here."""
        world, local = self.topology.world_size, self.topology.local_world_size
        inside, outside = self._links()
        return data * ((local - 1) / world / inside + (world - local) / world / outside) * _NS

    def _through_host(self, data: Any) -> Any:
        """Time of sums that are added inside the host first: of all ranks there, and then of the counterparts."""
        world, local = self.topology.world_size, self.topology.local_world_size
        inside, outside = self._links()
        return data * ((local - 1) / local / inside + (world - local) / world / local / outside) * _NS

    def _slowest_gb_s(self) -> float:
        inside, outside = self._links()
        return inside if self.topology.local_world_size == self.topology.world_size else min(inside, outside)

    def _links(self) -> tuple[float, float]:
        """Bandwidth inside a host and between hosts, GB/s."""
        return self.constants.intra_gb_s, self.constants.inter_gb_s


def given_bandwidths(topology: Topology, constants: Constants) -> dict[str, float]:
    """Constants replaced by the topology's bandwidths (bytes per millisecond), where those are not its defaults."""
    memory = "ddr_mem_bw" if topology.compute_device == "cpu" else "hbm_mem_bw"
    changes: dict[str, float] = {}
    for what, names in (
        (memory, ("copy_gb_s", "row_gb_s", "again_gb_s")),
        ("intra_host_bw", ("intra_gb_s",)),
        ("inter_host_bw", ("inter_gb_s",)),
    ):
        given, usual = getattr(topology, what, None), _DEFAULTS.get(what)
        if given is not None and usual is not None and given != usual.default:
            # rows are read as much slower than memory in order as before
            changes |= {name: given * _NS / getattr(constants, names[0]) * getattr(constants, name) for name in names}
    return changes


def _id_bytes(table: Table) -> float:
    """Bytes of an id on its way, and of its weight."""
    return (4 if table.num_embeddings < 2**31 else 8) + 4 * table.weighted


def _stacked(times: dict[str, Any], span: int) -> Floats:
    parts = np.zeros((len(PARTS), span))
    for number, part in enumerate(PARTS):
        parts[number] = times.get(part, 0.0)
    return parts

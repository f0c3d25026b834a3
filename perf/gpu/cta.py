"""One CTA as it runs: registers as vectors over its threads, its shared memory, and its accesses with their checks."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .barriers import SEVERAL, Around
from .faults import Fault, Finding
from .memory import SPACING_BITS, Buffer, Memory, Sharing, requests
from .ptx import Entry, Instruction
from .races import Clock, Tracker
from .rounding import Array
from .shared import BASE, Shared


class NotReady(Exception):
    """A register without a value was read: the kind of finding, and what it says."""


class NoValue:
    """Stands in a register that has no value yet, or waits for a product: a read raises NotReady."""

    def __init__(self, kind: str, why: str) -> None:
        self.kind, self.why = kind, why

    def view(self, *_: object) -> Array:
        raise NotReady(self.kind, self.why)

    astype = view


@dataclass
class Record:
    """Counts and findings of a launch, over all its CTAs."""

    entry: Entry
    memory: Memory
    parameters: Array
    shared_bytes: int
    # bytes of the smallest access to global and to shared memory
    global_piece: int
    shared_piece: int
    grid: tuple[int, int, int]
    counts_requests: bool = True
    # a barrier that was taken out, which is told who touches what
    around: Around | None = None
    faults: list[Finding] = field(default_factory=list)
    # requests, bytes, sectors by place of the instruction and what it does to which buffer
    counted: dict[tuple[int, str], list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0, 0]))
    sharing: dict[int, Sharing] = field(default_factory=dict)
    trackers: dict[int, Tracker] = field(default_factory=dict)
    time: int = 0
    seen: set[tuple[str, str, int]] = field(default_factory=set)
    # registers and special registers of a CTA at its start
    blank: list[NoValue] = field(init=False)
    special: dict[str, Array] = field(init=False)

    def __post_init__(self) -> None:
        self.blank = [NoValue("unwritten", f"{name} is read before it has a value") for name in self.entry.registers]
        self.special = _special(self.entry)


class Cta:
    """The CTA at `place` of the grid; `at` is the instruction that it executes."""

    def __init__(self, record: Record, place: tuple[int, int, int]) -> None:
        self.record, self.place = record, place
        entry = record.entry
        x, y, z = entry.threads
        self.size = x * y * z
        self.threads = np.arange(self.size)
        self.warps = self.threads // 32
        # from one: zero is nobody in what CTAs share
        self.number = 1 + place[0] + record.grid[0] * (place[1] + record.grid[1] * place[2])
        self.registers: list[Any] = list(record.blank)
        # later than any time of the CTAs before, in memory that they share
        self.clock = Clock(self.size, record.time + 1)
        self.shared = Shared(record.shared_bytes, record.shared_piece, self.clock, self.size)
        if record.around is not None:
            self.shared.touched, self.shared.copied = self._touch, self._copied
        self.exited: Array | None = None
        self.at = 0
        self.products: list[Any] = []
        self.products_committed = 0
        self.special = dict(record.special)
        for i, axis in enumerate("xyz"):
            for name, value in (("ctaid", place[i]), ("clusterid", place[i]), ("nctaid", record.grid[i])):
                self.special[f"%{name}.{axis}"] = np.full(self.size, value, np.uint32)

    @property
    def instruction(self) -> Instruction:
        return self.record.entry.code[self.at]

    def report(self, kind: str, text: str, thread: int | None = None, address: int | None = None) -> Finding:
        """Note a fault, the first of its kind at this instruction."""
        finding = Finding(kind, text, self.instruction, self.place, thread, address)
        key = (kind, text, self.at)
        if key not in self.record.seen:
            self.record.seen.add(key)
            self.record.faults.append(finding)
        return finding

    def _touch(self, threads: Array, pieces: Array) -> None:
        if self.record.around is not None:
            # four warps read what one product takes
            owners = np.full_like(threads, SEVERAL) if self.instruction.parts[0] == "wgmma" else threads
            self.record.around.come(self.at, self.clock.cta_since, threads)
            self.record.around.note(self.at, 0, owners, pieces, len(self.shared.written))

    def _copied(self, threads: Array, sources: Array, size: int) -> None:
        """A copy reads what it is of until its thread has waited."""
        piece, around = self.record.global_piece, self.record.around
        for number in np.unique(sources[sources != 0] >> SPACING_BITS).tolist():
            buffer = self.record.memory.find(number << SPACING_BITS)
            if around is not None and buffer is not None:
                own = sources >> SPACING_BITS == number
                places = ((sources[own] - buffer.origin) // piece)[:, None] + np.arange(max(size // piece, 1))
                around.note(self.at, buffer.origin, threads[own] // 32 * 32, places, len(buffer.bytes) // piece)

    def running(self, live: Array | None) -> Array:
        """Numbers of the threads that execute an instruction."""
        return self.threads if live is None else np.flatnonzero(live)

    # --- global memory
    def load_global(self, threads: Array, addresses: Array, size: int, count: int, atomic: bool = False) -> Array:
        """[threads, count] unsigned integers of `size` bytes."""
        data = np.empty((len(threads), count), f"u{size}")
        for part, buffer, offsets in self._buffers(threads, addresses, size * count, "load"):
            self._note(buffer, "atomic" if atomic else "read", threads[part], offsets, size * count)
            self._require_written(buffer, threads[part], offsets, size * count)
            data[part] = buffer.view(size)[(offsets // size)[:, None] + np.arange(count)]
        return data

    def store_global(self, threads: Array, addresses: Array, size: int, data: Array, atomic: bool = False) -> None:
        """Write [threads, count] unsigned integers of `size` bytes."""
        count = data.shape[1]
        for part, buffer, offsets in self._buffers(threads, addresses, size * count, "store"):
            self._note(buffer, "atomic" if atomic else "write", threads[part], offsets, size * count)
            buffer.view(size)[(offsets // size)[:, None] + np.arange(count)] = data[part]
            if buffer.written is not None:
                buffer.written[offsets[:, None] + np.arange(size * count)] = True

    def atomic_cells(self, threads: Array, addresses: Array, size: int) -> list[tuple[Array, Array, Array]]:
        """For an atomic access: which of the threads, memory as integers of `size` bytes, and their places in it."""
        cells = []
        for part, buffer, offsets in self._buffers(threads, addresses, size, "atomic"):
            self._note(buffer, "atomic", threads[part], offsets, size)
            self._require_written(buffer, threads[part], offsets, size)
            cells.append((np.arange(len(threads))[part], buffer.view(size), offsets // size))
        return cells

    def prefetch(self, threads: Array, addresses: Array) -> None:
        """Counted as one byte a thread; an address in no buffer does nothing."""
        for number in np.unique(addresses >> SPACING_BITS).tolist():
            buffer = self.record.memory.find(number << SPACING_BITS)
            if buffer is not None:
                part = addresses >> SPACING_BITS == number
                self._count("prefetch", buffer, threads[part], addresses[part], 1)

    def _buffers(self, threads: Array, addresses: Array, size: int, access: str) -> list[tuple[Any, Buffer, Array]]:
        """Threads, buffer and offsets from its origin of an access, checked for alignment and bounds."""
        if not len(threads):
            return []
        if (low := addresses & (size - 1)).any():
            first = int((low != 0).argmax())
            self.report("misaligned", f"{size} bytes at once", int(threads[first]), int(addresses[first]))
            # the address before is as good; it may lie before the buffer, where there is memory of nobody
            addresses = addresses - low
        least, most = int(addresses.min()), int(addresses.max())
        parts: list[tuple[Any, int]] = [(slice(None), least >> SPACING_BITS)]
        if most >> SPACING_BITS != least >> SPACING_BITS:
            numbers = addresses >> SPACING_BITS
            parts = [(np.flatnonzero(numbers == number), int(number)) for number in np.unique(numbers)]
        checked: list[tuple[Any, Buffer, Array]] = []
        for part, number in parts:
            own = addresses[part]
            buffer = self.record.memory.find(number << SPACING_BITS)
            if buffer is None:
                raise self._outside("in no buffer", threads[part], own, np.ones(len(own), np.bool_))
            begin, end = buffer.base, buffer.base + buffer.size
            if low.any():
                begin = min(begin, buffer.base & -size)
            if least < begin or most + size > end or len(parts) > 1:
                outside = (own < begin) | (own + size > end)
                if outside.any():
                    where = f"outside of {buffer.name}, {buffer.size} bytes at {buffer.base:#x}"
                    raise self._outside(where, threads[part], own, outside)
            if self.record.counts_requests:
                self._count(access, buffer, threads[part], own, size)
            checked.append((part, buffer, own - buffer.origin))
        return checked

    def _outside(self, where: str, threads: Array, addresses: Array, outside: Array) -> Fault:
        first = int(outside.argmax())
        text = f"{int(outside.sum())} threads are {where}"
        return Fault(self.report("outside", text, int(threads[first]), int(addresses[first])))

    def _count(self, access: str, buffer: Buffer, threads: Array, addresses: Array, size: int) -> None:
        counted = self.record.counted[self.at, f"{access} {buffer.name}"]
        for i, value in enumerate(requests(addresses, threads // 32, size)):
            counted[i] += value

    def _note(self, buffer: Buffer, access: str, threads: Array, offsets: Array, size: int) -> None:
        """Compare an access, a "read", "write" or "atomic", with those of other CTAs and of other warps."""
        if self.size > 32 or self.record.around is not None:
            self._track(buffer, access, threads, offsets, size)
        if self.record.grid == (1, 1, 1):
            return
        sharing = self.record.sharing.get(buffer.origin)
        if sharing is None:
            sharing = self.record.sharing[buffer.origin] = Sharing(buffer, self.record.global_piece)
        collides = sharing.note(access, offsets, size, self.number)
        if collides is not None:
            first = int(collides.argmax())
            other = {"read": "writes", "write": "reads or writes", "atomic": "reads or writes plainly"}[access]
            self.report(
                "shared word", f"{access} of {buffer.name} where another CTA of the launch {other}",
                int(threads[first]), int(offsets[first]) + buffer.origin,
            )  # fmt: skip

    def _track(self, buffer: Buffer, access: str, threads: Array, offsets: Array, size: int) -> None:
        piece = self.record.global_piece
        tracker = self.record.trackers.get(buffer.origin)
        if tracker is None:
            tracker = self.record.trackers[buffer.origin] = Tracker(buffer.name, len(buffer.bytes) // piece, self.clock)
        tracker.clock = self.clock
        # lanes of a warp go through a kernel's straight code in step
        leaders = threads // 32 * 32
        places = (offsets // piece)[:, None] + np.arange(size // piece)
        if self.record.around is not None:
            self.record.around.come(self.at, self.clock.cta_since, threads)
            self.record.around.note(self.at, buffer.origin, leaders, places, len(tracker.writer))

        def report(kind: str, text: str, first: int) -> None:
            self.report(kind, text, int(threads[first]), int(offsets[first]) + buffer.origin)

        if access == "read":
            tracker.read(leaders, places, report)
        else:
            tracker.write(leaders, places, report, access == "atomic")

    def _require_written(self, buffer: Buffer, threads: Array, offsets: Array, size: int) -> None:
        if buffer.written is None:
            return
        lacking = ~buffer.written[offsets[:, None] + np.arange(size)].all(axis=1)
        if lacking.any():
            first = int(lacking.argmax())
            self.report(
                "unwritten", f"{buffer.name} is read where nothing was written", int(threads[first]),
                int(offsets[first]) + buffer.origin,
            )  # fmt: skip

    # --- shared memory
    def shared_offsets(self, threads: Array, addresses: Array, size: int) -> Array:
        """Offsets of an access in shared memory, checked for alignment and bounds."""
        offsets = addresses - BASE
        if (low := offsets & (size - 1)).any():
            first = int((low != 0).argmax())
            self.report(
                "misaligned", f"{size} bytes of shared memory at once", int(threads[first]), int(addresses[first])
            )
            offsets = offsets - low
        outside = self.shared.outside(offsets, size)
        if outside.any():
            where = f"outside of {self.record.shared_bytes} bytes of shared memory"
            raise self._outside(where, threads, addresses, outside)
        return offsets

    def shared_report(self, threads: Array, offsets: Array) -> Any:
        """The function that shared memory calls with the place of the first fault of an access."""

        def report(kind: str, text: str, first: int) -> None:
            self.report(kind, text, int(threads[first]), int(offsets[first]) + BASE)

        return report

    def load_shared(self, threads: Array, addresses: Array, size: int, count: int) -> Array:
        offsets = self.shared_offsets(threads, addresses, size * count)
        return self.shared.load(threads, offsets, size, count, self.shared_report(threads, offsets))

    def store_shared(self, threads: Array, addresses: Array, size: int, data: Array) -> None:
        offsets = self.shared_offsets(threads, addresses, size * data.shape[1])
        self.shared.store(threads, offsets, size, data, self.shared_report(threads, offsets))

    # --- parameters
    def load_parameter(self, offsets: Array, size: int, count: int) -> Array:
        """[T, count] values, where each thread's offset tells; the parameters are read by all."""
        if (offsets < 0).any() or (offsets + size * count > len(self.record.parameters)).any():
            raise Fault(self.report("outside", "an address outside of the parameters"))
        places = offsets[:, None] + np.arange(size * count)
        return np.ascontiguousarray(self.record.parameters[places]).view(f"u{size}")


def _special(entry: Entry) -> dict[str, Array]:
    """Special registers, those of the place in the grid as in a grid of one CTA."""
    x, y, z = entry.threads
    threads = np.arange(x * y * z)

    def same(value: int) -> Array:
        return np.full(len(threads), value, np.uint32)

    lane = (threads % 32).astype(np.uint32)
    own = np.uint32(1) << lane
    values = {
        "%tid.x": (threads % x).astype(np.uint32), "%tid.y": (threads // x % y).astype(np.uint32),
        "%tid.z": (threads // (x * y)).astype(np.uint32), "%laneid": lane, "%warpid": (threads // 32).astype(np.uint32),
        "%nwarpid": same(len(threads) // 32), "%lanemask_eq": own, "%lanemask_lt": own - np.uint32(1),
        "%lanemask_le": own | (own - np.uint32(1)), "%lanemask_gt": ~(own | (own - np.uint32(1))),
        "%lanemask_ge": ~(own - np.uint32(1)), "%smid": same(0), "%nsmid": same(1), "%cluster_ctarank": same(0),
        "%cluster_nctarank": same(1), "%clock": same(0), "%clock_hi": same(0), "%clock64": same(0),
        "%globaltimer": same(0),
    }  # fmt: skip
    for i, axis in enumerate("xyz"):
        values[f"%ntid.{axis}"] = same(entry.threads[i])
        zeros, ones = ("ctaid", "clusterid", "cluster_ctaid"), ("nctaid", "nclusterid", "cluster_nctaid")
        values |= {f"%{name}.{axis}": same(0) for name in zeros} | {f"%{name}.{axis}": same(1) for name in ones}
    return values


SPECIAL = frozenset(_special(Entry("", (), (32, 1, 1), {}, {}, 0, (), {})))

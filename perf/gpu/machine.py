"""Kernels and launches: threads of a CTA in lockstep as numpy vectors, CTAs one after another.

Of the threads of a CTA those run first that are furthest behind in the code, so that branches meet again. A barrier
holds threads until all that have not left are there. The order of instructions of different warps is one of many that
a GPU may choose; races are found from what lies between two accesses, not from what the order made of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np

from .barriers import Around
from .cta import Cta, NotReady, Record
from .decode import Decoder, Step
from .faults import Fault, Finding
from .memory import Memory
from .ptx import SIZES, Entry, Instruction, ParseError, parse
from .rounding import Array

STEP_LIMIT = 5_000_000
_STEP, _BRANCH, _EXIT, _BARRIER, _REMOVED = range(5)


class Kernel:
    """The kernel of a PTX text, ready to run. Raises ParseError with the line of what is not supported.

    `code` are its instructions, `labels` the places in it that labels stand before, `barriers` those of barriers of
    the CTA and of a warp. `threads` of a CTA; `params` are (type, name).
    """

    def __init__(self, ptx: str) -> None:
        self.ptx = ptx
        self.entry: Entry = parse(ptx)
        decoder = Decoder(self.entry)
        self.slots = decoder.slots
        self.kinds = [_kind(instruction) for instruction in self.entry.code]
        self.steps: list[Step | None] = []
        self.targets: list[int] = []
        # slot of the guard, or -1, and what it has to be
        self.guards: list[tuple[int, bool]] = []
        for instruction, kind in zip(self.entry.code, self.kinds, strict=True):
            self.steps.append(decoder.step(instruction) if kind == _STEP else None)
            self.targets.append(self.entry.labels[instruction.operands[0]] if kind == _BRANCH else -1)
            if kind == _BARRIER:
                self._check_barrier(instruction)
            if instruction.guard is not None and instruction.guard not in self.slots:
                raise ParseError("the guard is not declared", instruction.line, str(instruction))
            slot = self.slots[instruction.guard] if instruction.guard else -1
            self.guards.append((slot, not instruction.negated))

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def params(self) -> list[tuple[str, str]]:
        return [(parameter.type, parameter.name) for parameter in self.entry.parameters]

    @property
    def threads(self) -> int:
        x, y, z = self.entry.threads
        return x * y * z

    @property
    def code(self) -> tuple[Instruction, ...]:
        return self.entry.code

    @property
    def labels(self) -> dict[str, int]:
        return self.entry.labels

    @property
    def barriers(self) -> list[int]:
        return [i for i, instruction in enumerate(self.code) if instruction.parts[0] in ("bar", "barrier")]

    def without_barrier(self, i: int) -> Kernel:
        """The kernel without its i-th barrier, which must be found out."""
        place = self.barriers[i]
        other = object.__new__(Kernel)
        other.__dict__.update(self.__dict__)
        removed = replace(self.code[place], opcode="removed." + self.code[place].opcode)
        other.entry = replace(self.entry, code=(*self.code[:place], removed, *self.code[place + 1 :]))
        other.kinds = [*self.kinds[:place], _REMOVED, *self.kinds[place + 1 :]]
        return other

    def _check_barrier(self, instruction: Instruction) -> None:
        count = instruction.operands[1:]
        if "sync" not in instruction.parts or instruction.operands[0].startswith("%"):
            raise ParseError("only bar.sync of a fixed barrier is supported", instruction.line, str(instruction))
        if count and count != (str(self.threads),):
            raise ParseError("a barrier of a part of the CTA is not supported", instruction.line, str(instruction))


def _kind(instruction: Instruction) -> int:
    name = instruction.parts[0]
    if name == "bra":
        return _BRANCH
    if name in ("ret", "exit"):
        return _EXIT
    return _BARRIER if name in ("bar", "barrier") and "warp" not in instruction.parts else _STEP


class Launch:
    """A launch of `kernel` with `args`, one for each parameter in the order of the signature, on `memory`.

    Addresses come from `memory.put`; scalars are Python numbers. Parameters that Triton adds at the end and that no
    kernel here uses may be left out. `shared_bytes` are those that the launch asks for.

    `faults` are the findings, at most one of a kind for each instruction. `requests` counts requests, bytes and
    32-byte sectors by "load X", "store X", "atomic X" or "prefetch X" for the buffer X; `instruction_requests` by
    the place of the instruction too. `executed` counts instructions by their opcode's first part, `steps` by place.
    `around` is told who touches what, for a kernel without one of its barriers.
    """

    def __init__(
        self,
        kernel: Kernel,
        memory: Memory,
        shared_bytes: int,
        args: Sequence[Any],
        sectors: bool = True,
        around: Around | None = None,
    ) -> None:
        self.kernel, self.memory = kernel, memory
        entry = kernel.entry
        accesses = [(instruction.parts, _access(instruction)) for instruction in kernel.code]
        sizes = {
            space: [size for parts, (kind, size) in accesses if kind == space and size]
            for space in ("global", "shared")
        }
        self.record = Record(
            entry, memory, _pack(entry, args), entry.static_bytes + shared_bytes, min(sizes["global"], default=4),
            min([16, *sizes["shared"]]), (1, 1, 1), sectors, around,
        )  # fmt: skip
        self.steps = [0] * len(kernel.code)

    @property
    def faults(self) -> list[Finding]:
        return self.record.faults

    @property
    def requests(self) -> dict[str, Counter[str]]:
        counted: dict[str, Counter[str]] = {}
        for (_, name), counts in self.instruction_requests.items():
            counted.setdefault(name, Counter()).update(counts)
        return counted

    @property
    def instruction_requests(self) -> dict[tuple[int, str], Counter[str]]:
        names = ("requests", "bytes", "sectors")
        return {key: Counter(dict(zip(names, counts, strict=True))) for key, counts in self.record.counted.items()}

    @property
    def executed(self) -> Counter[str]:
        counted: Counter[str] = Counter()
        for instruction, times in zip(self.kernel.code, self.steps, strict=True):
            if times:
                counted[instruction.parts[0]] += times
        return counted

    def run(self, grid: Sequence[int], shuffle: int | None = None, step_limit: int = STEP_LIMIT) -> Launch:
        """Run the CTAs of a grid of one to three numbers, in an order that the seed `shuffle` chooses.

        Raises Fault where a CTA cannot go on; what was found until then is in `faults`.
        """
        x, y, z = (*grid, 1, 1)[:3]
        self.record.grid = (x, y, z)
        self.record.sharing.clear()
        places = [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]
        if shuffle is not None:
            Random(shuffle).shuffle(places)
        with np.errstate(all="ignore"):
            for place in places:
                cta = Cta(self.record, place)
                self._run_cta(cta, step_limit)
                self.record.time = cta.clock.time
        return self

    def _run_cta(self, cta: Cta, limit: int) -> None:
        try:
            self._run_threads(cta, limit)
        except NotReady as reason:
            raise Fault(cta.report(*reason.args)) from None

    def _run_threads(self, cta: Cta, limit: int) -> None:
        """Groups of threads by their place in the code; the lowest place goes on until it meets the next."""
        kernel = self.kernel
        kinds, steps, guards, targets, counts = kernel.kinds, kernel.steps, kernel.guards, kernel.targets, self.steps
        registers, size, end = cta.registers, cta.size, len(kernel.code)
        groups: dict[int, Array | None] = {0: None}
        waiting: dict[int, Array] = {}
        left = limit
        while groups or waiting:
            if not groups:
                place = max(waiting)
                groups[place + 1] = self._release(cta, waiting)
                continue
            place = min(groups)
            mask = groups.pop(place)
            meeting = min(groups, default=end)
            while place < meeting:
                cta.at = place
                counts[place] += 1
                left -= 1
                if left < 0:
                    raise Fault(cta.report("endless", f"more than {limit} instructions of one CTA"))
                slot, wanted = guards[place]
                live = mask
                if slot >= 0:
                    live = registers[slot].view(np.bool_)
                    live = live if wanted else ~live
                    if mask is not None:
                        live = live & mask
                    count = np.count_nonzero(live)
                    if count == 0:
                        place += 1
                        continue
                    if count == size:
                        live = None
                kind = kinds[place]
                if kind == _STEP:
                    steps[place](cta, live)  # type: ignore[misc]
                    place += 1
                elif kind == _REMOVED:
                    if self.record.around is not None:
                        self.record.around.go_by(cta.clock.cta_since, cta.running(live))
                    place += 1
                elif kind == _BRANCH:
                    rest = _without(mask, live)
                    _join(groups, targets[place], live)
                    if rest is not None:
                        _join(groups, place + 1, rest)
                    break
                else:
                    rest = _without(mask, live)
                    running = np.ones(size, np.bool_) if live is None else live
                    if kind == _BARRIER:
                        waiting[place] = waiting[place] | running if place in waiting else running
                    else:
                        cta.exited = running if cta.exited is None else cta.exited | running
                    if rest is not None:
                        _join(groups, place + 1, rest)
                    break
            else:
                if place < end:
                    _join(groups, place, mask)
                else:
                    running = np.ones(size, np.bool_) if mask is None else mask
                    cta.exited = running if cta.exited is None else cta.exited | running

    def _release(self, cta: Cta, waiting: dict[int, Array]) -> Array | None:
        """All threads that have not left wait: let them go on, past one barrier."""
        cta.at = max(waiting)
        if len(waiting) > 1:
            lines = ", ".join(
                f"{int(mask.sum())} threads at PTX line {self.kernel.code[place].line}"
                for place, mask in sorted(waiting.items())
            )
            thread = int(waiting[min(waiting)].argmax())
            raise Fault(cta.report("missing", f"threads of a CTA meet at different barriers: {lines}", thread))
        ((_, mask),) = waiting.items()
        waiting.clear()
        cta.clock.barrier()
        return None if mask.all() else mask


def _without(mask: Array | None, live: Array | None) -> Array | None:
    """The threads of a group that an instruction leaves behind, None where there are none."""
    if live is None or live is mask:
        return None
    rest = ~live if mask is None else mask & ~live
    return rest if rest.any() else None


def _join(groups: dict[int, Array | None], place: int, mask: Array | None) -> None:
    other = groups.get(place)
    if place not in groups:
        groups[place] = mask
    else:
        joined = None if mask is None or other is None else mask | other
        groups[place] = None if joined is None or joined.all() else joined


def _access(instruction: Instruction) -> tuple[str, int]:
    """The memory that an instruction accesses, "" for none, and the bytes of its accesses."""
    parts = instruction.parts
    if parts[0] in ("ld", "st", "atom", "red", "ldu"):
        space = "shared" if any(part.startswith("shared") for part in parts) else "global"
        space = "" if "param" in parts else space
        count = next((int(part[1:]) for part in parts if part in ("v2", "v4", "v8")), 1)
        return space, SIZES[parts[-1]] * count
    if parts[0] == "cp" and len(instruction.operands) > 2:
        return "shared", int(instruction.operands[2].rstrip("U"), 0)
    return ("shared", 16) if parts[0] in ("ldmatrix", "stmatrix", "wgmma") else ("", 0)


def _pack(entry: Entry, args: Sequence[Any]) -> Array:
    """The memory of the parameters."""
    own = entry.parameters
    missing = own[len(args) :]
    if len(args) > len(own) or any(parameter.size != 8 for parameter in missing) or len(missing) > 2:
        raise ValueError(f"{entry.name} takes {len(own)} arguments, got {len(args)}")
    memory = np.zeros(own[-1].offset + own[-1].size if own else 0, np.uint8)
    for parameter, value in zip(own, args, strict=False):
        if isinstance(value, bytes):
            data = value
        elif isinstance(value, float):
            data = np.array(value, f"f{parameter.size}").tobytes()
        else:
            data = (int(value) & ((1 << parameter.size * 8) - 1)).to_bytes(parameter.size, "little")
        if len(data) != parameter.size:
            raise ValueError(f"{parameter.name} has {parameter.size} bytes, got {len(data)}")
        memory[parameter.offset : parameter.offset + parameter.size] = np.frombuffer(data, np.uint8)
    return memory

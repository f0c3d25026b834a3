"""Waits of a compiled loop: an in-order model of one warp alone, over the SASS that `nvdisasm -c` prints.

The model takes one pass of the longest loop, which holds the others, in the order of its text: inner loops once, both
sides of a branch. Long waits are counted in a pass that goes through no inner loop, as an update's of short runs. It
issues an instruction a cycle, and stops at one that needs what is not there yet. A load from global memory takes
LATENCY cycles, one of a line that the same pass loaded before HIT (or until that line is there), and one of a line that
was prefetched L2_HIT.

Lines are told apart without addresses: two loads lie in one line where their addresses are made in the same way of the
same arguments and loaded values, whatever thread and turn of the loop add, and their offsets are less than 128 bytes
apart. So a row's number that several threads load for themselves is one line; rows of different ids are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

# cycles: of a load that finds its line nowhere near, in the second level, in the first
LATENCY, L2_HIT, HIT = 600, 270, 35
_LINE = 128
# a shorter stop is no wait for a load: other instructions all but hid it
_STALL = 100
_CYCLES = {"LDS": 30, "SHFL": 25, "MUFU": 25, "REDUX": 30, "I2F": 15, "F2I": 15}
_USUAL, _BARRIER = 5, 25
# passes before the one that is counted: what one pass loads for the next is there
_WARM = 2

_NO_RESULT = (
    "ST", "BRA", "EXIT", "BSSY", "BSYNC", "NOP", "BAR", "RET", "CALL", "WARPSYNC", "CCTL", "RED.", "REDG", "DEPBAR",
    "LDGSTS", "LDGDEPBAR",
)  # fmt: skip
# loads from global memory into registers, and prefetches
_GLOBAL = ("LDG.", "LD.", "CCTL")
_PREDICATES_ONLY = ("ISETP", "FSETP", "DSETP", "HSETP2", "PLOP3", "PSETP", "UISETP", "UPLOP3", "UPSETP")
_COPIES = ("MOV", "IMAD.MOV", "UMOV", "ULDC", "LDC", "LDCU", "R2UR")

# what an address is made of: ("c", place of an argument), ("l", number of a load), ("turn", how often a counter was
# stepped), (operation, numbers, of what)
Terms = frozenset[tuple[object, ...]]
# terms of one value at most: what is made of more has a term for each load, argument and counter in it
_TERMS = 256
Register = tuple[str, int]


@dataclass(frozen=True)
class Waits:
    """The waits of one warp alone in one pass of a kernel's longest loop.

    `latencies`: the time in which it waits for loads, in LATENCY. `long`: how many times it waits for a load that
    misses the first level and was issued after the wait before, where no inner loop is gone through. `gathers_first`:
    whether every load whose address takes the most loads one after another is issued before one of them is used; None
    where no address is loaded. `stops`: the cycles of each wait of more than 100, and the instruction that waits.
    """

    latencies: float = 0.0
    long: int = 0
    gathers_first: bool | None = None
    stops: tuple[tuple[int, str], ...] = ()


class Instruction(NamedTuple):
    """One line of SASS: its predicate and operation, and the registers that it writes and reads."""

    text: str
    op: str
    writes: tuple[Register, ...]
    reads: tuple[Register, ...]
    # registers, arguments and numbers that make up the result, and an address with its offset in bytes
    made_of: tuple[Register | str, ...]
    address: tuple[Register, ...]
    offset: int


@dataclass
class _Line:
    """A line that a load or a prefetch brings: where it was asked for, when it is there, after how many long waits."""

    terms: Terms
    offset: int
    ready: int
    epoch: int
    load: int
    prefetched: bool


@dataclass
class _Machine:
    time: int = 0
    long: int = 0
    ready: dict[Register, int] = field(default_factory=dict)
    terms: dict[Register, Terms] = field(default_factory=dict)
    # registers that a load fills: its number, and the waits that were over when its line was asked for
    loaded: dict[Register, tuple[int, int]] = field(default_factory=dict)
    # of each load how many the last of its chain of loads is: 1 if no loaded value is in its address
    depth: list[int] = field(default_factory=list)


def waits(sass: str) -> Waits:
    """The waits of the kernel in this text, none where it has no loop."""
    instructions, labels = _parse(sass)
    loop = max(_loops(instructions, labels), key=lambda loop: loop[1] - loop[0], default=None)
    if loop is None:
        return Waits()
    before, places = instructions[: loop[0]], range(loop[0], loop[1] + 1)
    inner = {i for begin, end in _loops(instructions, labels) if loop[0] < begin and end < loop[1]
             for i in range(begin, end + 1)}  # fmt: skip
    through = _passes(before, [instructions[i] for i in places])
    past = _passes(before, [instructions[i] for i in places if i not in inner]) if inner else through
    return replace(through, long=past.long)


def _passes(before: Sequence[Instruction], body: Sequence[Instruction]) -> Waits:
    """The waits of a pass after others."""
    machine, counters = _Machine(), _counters(body)
    _pass(before, machine, {})
    for _ in range(_WARM):
        _pass(body, machine, counters)
    return _pass(body, machine, counters)


def _parse(sass: str) -> tuple[list[Instruction], dict[str, int]]:
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif text := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", line):
            instructions.append(_instruction(text[1]))
    return instructions, labels


def _instruction(text: str) -> Instruction:
    parts = re.match(r"(?:@(!?U?P\w+)\s+)?(\S+)\s*(.*)", text)
    assert parts, text
    predicate, op, rest = parts[1] or "", parts[2], re.sub(r"desc\[\w+\]", "", parts[3])
    operands = [operand.strip() for operand in rest.split(",")] if rest else []
    count = 0 if op.startswith(_NO_RESULT) else _results(op, operands)
    writes = [register for operand in operands[:count] for register in _registers(operand)]
    sources = operands[count:]
    reads = [register for operand in (*sources, predicate) for register in _registers(operand)]
    plain = [name for name in writes if name[0] in ("R", "UR")]
    wide = _width(op)
    writes += [(name, number + i) for name, number in plain for i in range(1, wide)]
    if wide > 1 and not op.startswith(("LD", "CS2R", "F2F", "I2F")):
        # of a product and a sum only the sum has two registers
        of = sources[-1:] if "WIDE" in op else sources
        reads += [(name, number + 1) for operand in of for name, number in _registers(operand) if name in ("R", "UR")]
    place = re.search(r"\[((?:U?R\d+[.\w]*\+?)+)(-?0x[0-9a-f]+)?\]", rest) if op.startswith(_GLOBAL) else None
    address = tuple((name, int(number)) for name, number in re.findall(r"(U?R)(\d+)", place[1])) if place else ()
    offset = int(place[2] or "0", 16) if place else 0
    return Instruction(text, op, tuple(writes), tuple(reads), tuple(_parts(sources)), address, offset)


def _results(op: str, operands: Sequence[str]) -> int:
    """How many operands an operation writes: predicates before or behind its register, or these alone."""
    before = next((i for i, operand in enumerate(operands) if not re.fullmatch(r"U?P[T\d]", operand)), len(operands))
    if op.startswith(_PREDICATES_ONLY):
        return min(2, before)
    behind = (i for i, operand in enumerate(operands) if i > before and not re.fullmatch(r"U?P\d", operand))
    return next(behind, before + 1)


def _registers(operand: str) -> Iterator[Register]:
    for name, number, pair in re.findall(r"\b(UR|R|UP|P)(\d+)(\.64)?", operand):
        yield name, int(number)
        if pair:
            yield name, int(number) + 1


def _width(op: str) -> int:
    """Registers of a result."""
    if match := re.search(r"\.(64|128|256)\b", op):
        return int(match[1]) // 32
    return 2 if "WIDE" in op or op.startswith(("CS2R", "DADD", "DMUL", "DFMA")) or op.startswith("F2F.F64") else 1


def _parts(sources: Sequence[str]) -> Iterator[Register | str]:
    for operand in sources:
        if place := re.search(r"c\[0x\d+\]\[(?:U?R\w+\+)?(0x[0-9a-f]+)\]", operand):
            yield f"c{place[1]}"
        elif re.fullmatch(r"-?0x[0-9a-f]+", operand):
            yield operand
        else:
            yield from (register for register in _registers(operand) if register[0] in ("R", "UR"))


def _loops(instructions: Sequence[Instruction], labels: dict[str, int]) -> list[tuple[int, int]]:
    """First and last instructions; a branch back over the end of the kernel is code that was put behind it."""
    ends = [i for i, instruction in enumerate(instructions) if instruction.text.split(".")[0] in ("EXIT", "RET")]
    loops = []
    for i, instruction in enumerate(instructions):
        if instruction.op.startswith("BRA") and (label := re.search(r"\.L_x_\d+", instruction.text)):
            begin = labels.get(label[0], i)
            if begin < i and not any(begin <= end < i for end in ends):
                loops.append((begin, i))
    return loops


def _counters(body: Sequence[Instruction]) -> dict[int, Register]:
    """Where in a loop a register that goes on from turn to turn is stepped: it is read before it is written."""
    read: set[Register] = set()
    written: set[Register] = set()
    counters = {}
    for place, instruction in enumerate(body):
        read.update(instruction.reads)
        for register in instruction.writes:
            if register in read and register in instruction.reads and register not in written:
                counters[place] = register
        written.update(instruction.writes)
    return counters


def _pass(body: Sequence[Instruction], machine: _Machine, counters: Mapping[int, Register]) -> Waits:
    """One pass, in which time and what registers hold go on from the pass before; lines of that are gone."""
    lines: list[_Line] = []
    issued: list[tuple[int, int]] = []  # place and number of each load
    used: dict[int, int] = {}  # load -> place of the first instruction that reads what it brought
    waited, before, stops = 0, machine.long, []
    for place, instruction in enumerate(body):
        touched = (*instruction.reads, *instruction.writes)
        needed = max((machine.ready.get(register, 0) for register in touched), default=0)
        stall = max(0, needed - machine.time)
        late = [machine.loaded[r] for r in touched if r in machine.loaded and machine.ready[r] == needed]
        waited += stall if late else 0
        if stall > _STALL:
            stops.append((stall, instruction.text))
            # of loads that were on their way together only the first is waited for
            machine.long += any(epoch == machine.long for _, epoch in late)
        machine.time = max(machine.time, needed)
        for register in instruction.reads:
            if register in machine.loaded:
                used.setdefault(machine.loaded[register][0], place)
        stepped = machine.terms.get(counters[place], frozenset()) if place in counters else None
        _issue(instruction, place, machine, lines, issued)
        if stepped is not None:
            machine.terms[counters[place]] = _next_turn(stepped)
        machine.time += 1 + (_BARRIER if instruction.op.startswith("BAR") else 0)
    depths = [machine.depth[load] for _, load in issued]
    first: bool | None = None
    if depths and max(depths) > min(depths):
        deepest = [(place, load) for place, load in issued if machine.depth[load] == max(depths)]
        first = max(place for place, _ in deepest) < min(used.get(load, len(body)) for _, load in deepest)
    return Waits(round(waited / LATENCY, 2), machine.long - before, first, tuple(stops))


def _issue(
    instruction: Instruction, place: int, machine: _Machine, lines: list[_Line], issued: list[tuple[int, int]]
) -> None:
    """Note when what the instruction writes is there, and what it is made of."""
    if not instruction.address:
        cycles = next((n for op, n in _CYCLES.items() if instruction.op.startswith(op)), _USUAL)
        machine.terms.update(dict.fromkeys(instruction.writes, _made(instruction, machine)))
        for register in instruction.writes:
            machine.ready[register] = machine.time + cycles
            machine.loaded.pop(register, None)
        return
    terms = frozenset[tuple[object, ...]]().union(*(machine.terms.get(part, ()) for part in instruction.address))
    line = _line(instruction, terms, machine, lines)
    if instruction.writes:
        number = len(machine.depth)
        loads = [load for kind, load in _leaves(terms) if kind == "l" and isinstance(load, int)]
        machine.depth.append(1 + max((machine.depth[load] for load in loads), default=0))
        issued.append((place, number))
        # the same address again gives the same value
        origin = (
            line.load if not line.prefetched and (line.terms, line.offset) == (terms, instruction.offset) else number
        )
        machine.terms.update(dict.fromkeys(instruction.writes, frozenset({("l", origin)})))
        there = max(line.ready, machine.time + (L2_HIT if line.prefetched else HIT))
        # a line that is there already makes no long wait
        epoch = line.epoch if line.ready > machine.time else -1
        for register in instruction.writes:
            machine.ready[register], machine.loaded[register] = there, (number, epoch)


def _line(instruction: Instruction, terms: Terms, machine: _Machine, lines: list[_Line]) -> _Line:
    """The line that holds the address: one of this pass, or one that is asked for now."""
    for line in lines:
        if line.prefetched and _leaves(line.terms) == _leaves(terms):
            return line
        if not line.prefetched and line.terms == terms and abs(line.offset - instruction.offset) < _LINE:
            return line
    ready, load = machine.time + LATENCY, len(machine.depth)
    lines.append(_Line(terms, instruction.offset, ready, machine.long, load, prefetched=not instruction.writes))
    return lines[-1]


def _made(instruction: Instruction, machine: _Machine) -> Terms:
    """The terms that the result of an instruction is made of."""
    terms = machine.terms
    of: set[tuple[object, ...]] = set()
    numbers = []
    for part in instruction.made_of:
        if not isinstance(part, str):
            of |= terms.get(part, frozenset())
        elif part[0] == "c":
            of.add(("c", part[1:]))
        else:
            numbers.append(part)
    if numbers and not instruction.op.startswith(_COPIES):
        op = ".".join(instruction.op.split(".")[:2])
        of = {term if term[0] == "turn" else (op, tuple(numbers), term) for term in of}
    if len(of) > _TERMS:
        # each step of a hash doubles them
        of = {(instruction.text, (machine.time,), leaf) for leaf in _leaves(frozenset(of))}
    return frozenset(of)


def _next_turn(terms: Terms) -> Terms:
    """Of a counter after a step: however long it is, the threads of a turn count from the same number."""
    turns = [int(str(term[1])) for term in terms if term[0] == "turn"]
    return frozenset(term for term in terms if term[0] != "turn") | {("turn", max(turns, default=0) + 1)}


def _leaves(terms: Terms) -> Terms:
    """The arguments and loads alone."""
    leaves: set[tuple[object, ...]] = set()
    for term in terms:
        leaf: Any = term
        while leaf[0] not in ("c", "l", "turn"):
            leaf = leaf[2]
        leaves.add(leaf)
    return frozenset(leaves)

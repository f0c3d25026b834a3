"""Shares of the 32-byte sectors that they touch, as the streams of a compiled kernel use them.

A stream is what a kernel loads or stores one after another: the address of element i of a tile is an argument's, more
or less what is equal for all of them, and i elements on. Where a thread holds several neighbours and moves each for
itself, as compilers do under a mask of which they cannot tell that the neighbours share it, the lanes of one request
lie as far apart as a thread's elements reach, and most of each sector is asked for in vain, and again.

Read from what Triton prints on its way: the layout of each tile from the GPU dialect of its IR, the width of each
access from the PTX, and which belong together from the lines of the source that both name. Letters: w bytes that a
thread moves at once, h bytes that it holds one after another: w / min(h, 32) of the sectors are used.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_SECTOR = 32
_BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "f16": 2, "bf16": 2, "f32": 4, "f64": 8}

# file, line and column of a call in the source
Place = tuple[str, int, int]

# a step from the element before: of sums and differences it adds up, and other operations have none
_SUMS = ("arith.addi", "tt.addptr")
_SAME = ("arith.extsi", "arith.extui", "arith.trunci", "ttg.convert_layout", "tt.bitcast")


class Access(NamedTuple):
    """A tile that is loaded or stored: what and of which argument, where, bytes of an element and of a thread's."""

    name: str
    place: Place
    element: int
    held: int


def sector_shares(ttgir: str, ptx: str) -> dict[str, float]:
    """ "load" or "store" and an argument -> the share of their sectors that its streams use, of several the least."""
    widths = _widths(ptx)
    shares: dict[str, float] = {}
    for name, place, element, thread_bytes in _streams(ttgir):
        # where the compiler moved an access to another line, nothing is known of it
        if at_once := widths.get((name.split()[0], place, element == 8)):
            share = 1.0 if at_once >= thread_bytes else at_once / min(thread_bytes, _SECTOR)
            shares[name] = min(share, shares.get(name, 1.0))
    return shares


def _streams(ttgir: str) -> Iterator[Access]:
    """The tiles of one dimension that lie one after another in memory."""
    per_thread = {
        name: int(size)
        for name, size in re.findall(r"^(#\w+) = #ttg\.blocked<\{sizePerThread = \[(\d+)\],", ttgir, re.M)
    }
    places = _places(ttgir)
    arguments = dict(re.findall(r'(%\w+): [^,)]*?loc\("([^"]+)"', ttgir))
    steps: dict[str, int | None] = {}
    bases: dict[str, str] = {}
    for line in ttgir.splitlines():
        if definition := re.match(r"\s*(%[\w#]+) = (\S+) (.*)", line):
            result, op, rest = definition[1], definition[2], definition[3]
            operands = re.findall(r"%[\w#]+", rest.split(" : ")[0])
            steps[result] = _step(op, rest, operands, steps)
            if op in ("tt.addptr", "tt.splat", *_SAME) and operands:
                bases[result] = bases.get(operands[0]) or operands[0]
        access = re.search(r"tt\.(load|store) (%[\w#]+).* : tensor<\d+x!tt\.ptr<(\w+)>, (#\w+)> loc\((#\w+)\)", line)
        if access and access[4] in per_thread and steps.get(access[2]) == 1 and access[5] in places:
            base = bases.get(access[2], access[2])
            name = f"{access[1]} {arguments.get(base, base.strip('%'))}"
            element = _BYTES.get(access[3], 1)
            yield Access(name, places[access[5]], element, element * per_thread[access[4]])


def _step(op: str, rest: str, operands: list[str], steps: Mapping[str, int | None]) -> int | None:
    """By how much an element of the result is more than the one before it; None where that is not one number."""
    if op == "tt.make_range":
        return 1
    if op in ("tt.splat", "arith.constant", "tt.get_program_id"):
        return 0
    of = [steps.get(operand, 0 if not rest.count("tensor") else None) for operand in operands]
    if op in _SUMS:
        return None if None in of else sum(step for step in of if step is not None)
    if op == "arith.subi" and len(of) == 2 and of[0] is not None and of[1] is not None:
        return of[0] - of[1]
    if op in _SAME:
        return of[0]
    return 0 if of and all(step == 0 for step in of) else None


def _places(ttgir: str) -> dict[str, Place]:
    """Where in the source each of the IR's numbered locations is, of an inlined function in that."""
    texts = dict(re.findall(r"^(#loc\d*) = loc\((.*)\)$", ttgir, re.M))
    places = {}
    for name in texts:
        text = texts[name]
        for _ in range(16):
            if place := re.match(r'"([^"]+)":(\d+):(\d+)', text):
                places[name] = (place[1], int(place[2]), int(place[3]))
                break
            if not (inner := re.search(r"#loc\d*", text)):
                break
            text = texts.get(inner[0], "")
    return places


def _widths(ptx: str) -> dict[tuple[str, Place, bool], int]:
    """Widths of accesses by kind, place and whether in words of 8 bytes, which a loop over tensors mixes with others.

    The value: the fewest bytes of a thread at once.
    """
    files = dict(re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]+)"', ptx, re.M))
    place: Place | None = None
    widths: dict[tuple[str, Place, bool], int] = {}
    for line in ptx.splitlines():
        if at := re.match(r"\s*\.loc\s+(\d+) (\d+) (\d+)", line):
            place = (files.get(at[1], ""), int(at[2]), int(at[3]))
        elif (access := re.search(r"\b(ld|st)\.global[\w.:]*?(?:\.v(\d))?\.[busf](\d+)\b", line)) and place:
            key = ("load" if access[1] == "ld" else "store", place, access[3] == "64")
            width = int(access[2] or 1) * int(access[3]) // 8
            widths[key] = min(width, widths.get(key, width))
    return widths

"""Redundant barriers: what a barrier orders that nothing else does, and whether any of it has to be ordered.

Two accesses to shared memory need a barrier between them where two threads touch one piece and one of them writes; in
global memory two warps. A compiler places barriers by buffers, not by pieces: some lie between accesses of which each
thread has its own pieces. Such a barrier is redundant. That is shown in two halves: the code says between which
accesses it is the only barrier (`pairs_at`), and runs without it say who touches which piece in each (`Around`). A run
that shows no race is no such proof: a loop that went around once never came to the pair at all. Nor is it enough that
both accesses ran, but not one before and the other behind the barrier's place: in another turn of the loop they may
touch other pieces, unless their addresses follow from the thread alone (`fixed_places`). Pieces that only other
numbers, or a third turn, would touch are not known.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .ptx import REGISTER, WHOLE_WARP, Instruction
from .rounding import Array

if TYPE_CHECKING:
    from .machine import Kernel

Pair = tuple[int, int]
_NOBODY, SEVERAL = -1, -2
# what an instruction does to a memory: products read while they are under way, which no run shows, so that what lies
# beside their waits is never found apart; a copy writes when it begins, and for others when its thread has waited
_ASYNC = {"cp": {"shared": "write", "global": "read"}, "wgmma": {"shared": "read"}}
# what gives the same result each time for the same operands
_FOLLOWS = (
    "abs", "add", "and", "bfe", "bfi", "brev", "clz", "cvt", "cvta", "div", "lop3", "mad", "max", "min", "mov", "mul",
    "neg", "not", "or", "popc", "prmt", "rem", "sad", "selp", "setp", "shf", "shl", "shr", "sub", "xor",
)  # fmt: skip
_MATRIX = {"ldmatrix": "read", "stmatrix": "write"}


@dataclass
class Around:
    """A barrier that was taken out: the `pairs` of places that have it alone between them, and what launches showed.

    `apart` are pairs of which some launch made one access, passed the barrier's place and made the other, or made both
    in any order if they are `fixed`, and nobody touched a piece in one that somebody else touched in the other; of
    `meeting` pairs somebody did.
    """

    pairs: frozenset[Pair]
    fixed: frozenset[int] = frozenset()
    apart: set[Pair] = field(default_factory=set)
    meeting: set[Pair] = field(default_factory=set)
    # of the launch under way: by place and memory, who touched each piece
    owners: dict[int, dict[int, Array]] = field(default_factory=dict)
    ordered: set[Pair] = field(default_factory=set)
    # since the last barrier, at `time`: places of accesses, those behind which somebody passed, and who passed
    time: int = -1
    since: set[int] = field(default_factory=set)
    before: set[int] = field(default_factory=set)
    passed: set[int] = field(default_factory=set)

    @property
    def redundant(self) -> bool:
        return self.apart == self.pairs and not self.meeting

    def come(self, place: int, time: int, threads: Array) -> None:
        """Threads come to an access; the last barrier began the `time`."""
        self._begin(time)
        if self.before and not self.passed.isdisjoint(threads.tolist()):
            self.ordered.update((earlier, place) for earlier in self.before)
        self.since.add(place)

    def go_by(self, time: int, threads: Array) -> None:
        """Threads come to where the barrier was."""
        self._begin(time)
        self.passed.update(threads.tolist())
        self.before |= self.since

    def _begin(self, time: int) -> None:
        if time != self.time:
            self.time = time
            for kept in (self.since, self.before, self.passed):
                kept.clear()

    def note(self, place: int, memory: int, owners: Array, pieces: Array, count: int) -> None:
        """`owners`, or SEVERAL for each, touched `pieces` [owners, n] of the `count` of a memory, 0 if it is shared."""
        owner = np.full(count, _NOBODY, np.int32)
        own = np.broadcast_to(owners[:, None].astype(np.int32), pieces.shape)
        owner[pieces] = own
        # of several owners of one piece the last stands there
        owner[pieces[owner[pieces] != own]] = SEVERAL
        kept = self.owners.setdefault(place, {})
        before = kept.get(memory)
        if before is not None:
            owner = np.where(
                before == _NOBODY, owner, np.where((owner == _NOBODY) | (owner == before), before, SEVERAL)
            )
        kept[memory] = owner

    def end_launch(self) -> None:
        """Keep of a launch which pairs met."""
        for first, second in self.pairs:
            if first in self.owners and second in self.owners:
                if any(self._meet(first, second, memory) for memory in self.owners[first]):
                    self.meeting.add((first, second))
                elif (first, second) in self.ordered or {first, second} <= self.fixed:
                    self.apart.add((first, second))
        self.owners.clear()
        self.ordered.clear()
        self._begin(-1)

    def join(self, other: Around) -> None:
        """Add what other launches of the same program showed."""
        self.apart |= other.apart
        self.meeting |= other.meeting

    def _meet(self, first: int, second: int, memory: int) -> bool:
        if memory not in self.owners[second]:
            return False
        a, b = self.owners[first][memory], self.owners[second][memory]
        both = (a != _NOBODY) & (b != _NOBODY)
        return bool((both & ((a != b) | (a == SEVERAL))).any())


def pairs_at(kernel: Kernel, i: int) -> frozenset[Pair]:
    """Places of two accesses to one memory, one a write, that may have the `i`-th barrier alone between them."""
    barriers = kernel.barriers
    place = barriers[i]
    # a barrier of a warp orders the lanes of that warp only
    of_warp = "warp" in kernel.code[place].parts or kernel.threads == 32
    stops = {
        other
        for other in barriers
        # one with a guard lets threads pass
        if other != place and kernel.code[other].guard is None and (of_warp or "warp" not in kernel.code[other].parts)
        # as does one of a part of a warp
        if "warp" not in kernel.code[other].parts or kernel.code[other].operands[0] in WHOLE_WARP
    }
    follows = [_next(kernel, at) for at in range(len(kernel.code))]
    precedes: list[list[int]] = [[] for _ in kernel.code]
    for at, behind in enumerate(follows):
        for other in behind:
            precedes[other].append(at)
    before, behind_it = _reached(precedes, place, stops), _reached(follows, place, stops)
    kinds = {at: _touched(kernel.code[at]) for at in before | behind_it}
    return frozenset(
        (first, second)
        for first in before
        for second in behind_it
        for memory in kinds[first].keys() & kinds[second].keys()
        if "write" in (kinds[first][memory], kinds[second][memory])
    )


def fixed_places(kernel: Kernel) -> frozenset[int]:
    """Places of accesses by threads, and at addresses, that are the same each time that a CTA comes there."""
    writes = [REGISTER.findall(_target(instruction)) for instruction in kernel.code]
    times = Counter(name for names in writes for name in names)
    varying = {name for name, count in times.items() if count > 1}
    count_before = -1
    while count_before != len(varying):
        count_before = len(varying)
        for instruction, names in zip(kernel.code, writes, strict=True):
            reads = REGISTER.findall(" ".join([*instruction.operands[1:], instruction.guard or ""]))
            if not varying.isdisjoint(reads) or not _follows(instruction):
                varying.update(names)
    return frozenset(
        at
        for at, instruction in enumerate(kernel.code)
        if instruction.parts[0] in ("ld", "st", "ldmatrix", "stmatrix")
        and varying.isdisjoint(REGISTER.findall(f"{_address(instruction)} {instruction.guard}"))
    )


def _target(instruction: Instruction) -> str:
    return "" if instruction.parts[0] in ("st", "red", "stmatrix", "bra") else "".join(instruction.operands[:1])


def _address(instruction: Instruction) -> str:
    return next(operand for operand in instruction.operands if operand.startswith("["))


def _follows(instruction: Instruction) -> bool:
    """Whether a result follows from the operands alone."""
    return "param" in instruction.parts or instruction.parts[0] in _FOLLOWS


def _next(kernel: Kernel, place: int) -> list[int]:
    instruction = kernel.code[place]
    on = [place + 1] if place + 1 < len(kernel.code) else []
    if instruction.parts[0] in ("ret", "exit"):
        return on if instruction.guard else []
    if instruction.parts[0] == "bra":
        return [kernel.targets[place], *(on if instruction.guard else [])]
    return on


def _reached(edges: list[list[int]], start: int, stops: set[int]) -> set[int]:
    """Places on the ways from `start`, up to the next stops; a way may come back to the start."""
    reached: set[int] = set()
    left = list(edges[start])
    while left:
        at = left.pop()
        if at not in reached and at not in stops:
            reached.add(at)
            left += edges[at]
    return reached


def _touched(instruction: Instruction) -> dict[str, str]:
    """How an instruction touches shared and global memory: "read" or "write"."""
    parts = instruction.parts
    name = parts[0]
    if name in _ASYNC:
        return {} if "commit_group" in parts else _ASYNC[name]
    if name in _MATRIX:
        return {"shared": _MATRIX[name]}
    if name not in ("ld", "st", "atom", "red", "ldu") or "param" in parts:
        return {}
    memory = "shared" if any(part.startswith("shared") for part in parts) else "global"
    return {memory: "read" if name in ("ld", "ldu") else "write"}

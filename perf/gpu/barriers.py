"""What a barrier orders that nothing else does, and whether any of it has to be ordered.

Two accesses to shared memory need a barrier between them where two threads touch one piece and one of them writes; in
global memory two warps. A compiler places barriers by buffers, not by pieces: some lie between accesses of which each
thread has its own pieces. Such a barrier is redundant. That is shown in two halves: the code says between which
accesses it is the only barrier (`pairs_at`), and runs without it say who touches which piece in each (`Around`). A run
that shows no race is no such proof: a loop that went around once never came to the pair at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from .ptx import Instruction
from .rounding import Array

if TYPE_CHECKING:
    from .machine import Kernel

Pair = tuple[int, int]
_NOBODY, SEVERAL = -1, -2
# what an instruction does to a memory: products read while they are under way, which no run shows, so that what lies
# beside their waits is never found apart; a copy writes when it begins, and for others when its thread has waited
_ASYNC = {"cp": {"shared": "write", "global": "read"}, "wgmma": {"shared": "read"}}
_MATRIX = {"ldmatrix": "read", "stmatrix": "write"}


@dataclass
class Around:
    """A barrier that was taken out: the `pairs` of places that have it alone between them, and what launches showed.

    `apart` are pairs of which some launch made both accesses, and nobody touched a piece in one that somebody else
    touched in the other; of `meeting` pairs somebody did.
    """

    pairs: frozenset[Pair]
    apart: set[Pair] = field(default_factory=set)
    meeting: set[Pair] = field(default_factory=set)
    # of the launch under way: by place and memory, who touched each piece
    owners: dict[int, dict[int, Array]] = field(default_factory=dict)

    @property
    def redundant(self) -> bool:
        return self.apart == self.pairs and not self.meeting

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
        for one, other in self.pairs:
            if one in self.owners and other in self.owners:
                met = any(self._meet(one, other, memory) for memory in self.owners[one])
                (self.meeting if met else self.apart).add((one, other))
        self.owners.clear()

    def join(self, other: Around) -> None:
        """Add what other launches of the same program showed."""
        self.apart |= other.apart
        self.meeting |= other.meeting

    def _meet(self, one: int, other: int, memory: int) -> bool:
        if memory not in self.owners[other]:
            return False
        a, b = self.owners[one][memory], self.owners[other][memory]
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
    }
    follows = [_next(kernel, at) for at in range(len(kernel.code))]
    precedes: list[list[int]] = [[] for _ in kernel.code]
    for at, behind in enumerate(follows):
        for other in behind:
            precedes[other].append(at)
    before, behind_it = _reached(precedes, place, stops), _reached(follows, place, stops)
    kinds = {at: _touched(kernel.code[at]) for at in before | behind_it}
    return frozenset(
        (one, other)
        for one in before
        for other in behind_it
        for memory in kinds[one].keys() & kinds[other].keys()
        if "write" in (kinds[one][memory], kinds[other][memory])
    )


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

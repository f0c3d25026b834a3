"""Faults that the executor reports: findings of a launch, and the exceptions that end one."""

from __future__ import annotations

from dataclasses import dataclass

from .ptx import Instruction

# what a finding is about
KINDS = {
    "outside": "an address in no buffer, or outside of the CTA's shared memory",
    "misaligned": "an access whose address is no multiple of its size",
    "race": "shared memory that two threads touch, or global memory that two warps touch, one of them writing, with no"
    " barrier between",
    "unwritten": "memory that is read and that nobody wrote",
    "shared word": "global memory that one CTA writes and another reads or writes in the same launch",
    "missing": "threads that do not come to a barrier, a shuffle or another instruction of the whole warp",
    "in flight": "memory that is touched while an asynchronous copy or product still uses it",
    "unfenced": "shared memory that wgmma reads and that was written with no fence.proxy.async since",
    "endless": "a CTA that does not end",
    "trap": "an assertion of the kernel",
}


@dataclass(frozen=True)
class Finding:
    """Something that a GPU would do wrong, or might: `kind` is of KINDS, `thread` and `address` are the first."""

    kind: str
    what: str
    instruction: Instruction | None
    cta: tuple[int, int, int]
    thread: int | None = None
    address: int | None = None

    def __str__(self) -> str:
        parts = [f"{self.kind}: {self.what}"]
        if self.instruction is not None:
            source = f"; {self.instruction.source}" if self.instruction.source else ""
            text = str(self.instruction)
            # products name dozens of registers
            text = text if len(text) <= 120 else f"{text[:80]} ... {text[-35:]}"
            parts.append(f"by `{text}` (PTX line {self.instruction.line}{source})")
        thread = f", thread {self.thread}" if self.thread is not None else ""
        place = f", address {self.address:#x}" if self.address is not None else ""
        return " ".join([*parts, f"in CTA {self.cta}{thread}{place}"])


class Fault(Exception):
    """The launch cannot go on; `finding` says why, where the launch found it."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(str(finding))
        self.finding = finding

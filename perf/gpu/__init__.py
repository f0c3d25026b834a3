"""Run Triton's PTX without a GPU, and see what an interpreter of Triton's language cannot.

    kernel, memory = Kernel(compiled.asm["ptx"]), Memory()
    address = memory.put(array, "X")
    launch = Launch(kernel, memory, compiled.metadata.shared, [address, len(array)]).run((4,))
    launch.faults, launch.requests, memory.get(address)

`KINDS` lists what is found: addresses, alignments, races in shared memory, words that CTAs or warps of one CTA
share, memory that nobody wrote, threads that miss a barrier, copies that were not waited for, loops without an end. Not
looked at: ptxas and its code, time, the order of memory between launches, weak memory.
"""

from .faults import KINDS, Fault, Finding
from .machine import Kernel, Launch
from .memory import Memory
from .ptx import ParseError

__all__ = ["KINDS", "Fault", "Finding", "Kernel", "Launch", "Memory", "ParseError"]

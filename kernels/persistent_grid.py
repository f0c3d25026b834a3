"""The size of a persistent grid: so many programs for each multiprocessor of the device that it is launched on."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch

from ._op import INTERPRETED

# programs of each multiprocessor, on any device: more than any of them holds at once, so that a part of them can end
# before others. Whether as many as fit, or a multiple of these, take less time is for a device to say
PROGRAMS = 16
# programs of any device in place of these: few, and more than one, in the interpreter; else (0) as the device asks
PERSISTENT_PROGRAMS = 4 if INTERPRETED else 0
# programs that a multiprocessor of sm_80, sm_90 or sm_100 holds at most, whatever they need
RESIDENT = 32
_WARP = 32
# registers are given to warps by so many for each thread
_REGISTER_UNIT = 8


class Multiprocessors(NamedTuple):
    """How many a device has, and the registers and threads of each."""

    number: int
    registers: int
    threads: int


# of a device that is not at hand: an H100's
_USUAL = Multiprocessors(132, 65_536, 2048)


@cache
def multiprocessors(device: torch.device) -> Multiprocessors:
    """The device's multiprocessors as its driver lists them; an H100's where it is no GPU."""
    if device.type != "cuda":
        return _USUAL
    properties: Any = torch.cuda.get_device_properties(device)
    return Multiprocessors(
        properties.multi_processor_count,
        getattr(properties, "regs_per_multiprocessor", _USUAL.registers),
        getattr(properties, "max_threads_per_multi_processor", _USUAL.threads),
    )


def persistent_programs(device: torch.device) -> int:
    """Programs of a persistent grid, at most, on this device."""
    return PERSISTENT_PROGRAMS or multiprocessors(device).number * PROGRAMS


def resident_programs(device: torch.device, warps: int, registers: int) -> int:
    """Programs of so many warps, whose threads take so many registers, that the device holds at once."""
    each = multiprocessors(device)
    a_thread = -(-registers // _REGISTER_UNIT) * _REGISTER_UNIT or 1
    by_registers = each.registers // (a_thread * _WARP * warps)
    return each.number * max(1, min(RESIDENT, each.threads // (_WARP * warps), by_registers))

"""Profiles of a step on a GPU: microseconds by name of kernel, idle gaps, and what each kernel needs.

A step is the check of ids, the lookup and the fused update; of the smallest shape also that of a collection. Gaps are
the times between the end of a kernel and the beginning of the next in which nothing ran. What a kernel needs is read
from the code that was loaded: registers, spills and shared memory, and the warps of a multiprocessor that follow.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from shardwise.perf.gpu_scripts.gpu_shapes import (
    PROFILED,
    SHAPES,
    Shape,
    batches_of,
    calls_of,
    memory_of,
    sized,
)
from shardwise.perf.gpu_scripts.gpu_sizes import Sizes
from shardwise.perf.suite.case import in_a_line

STEPS = 5
# kernels of a step that are listed by name; the others are added up
LISTED = 24


@dataclass(frozen=True)
class Limits:
    """Of a multiprocessor: threads, registers, bytes of shared memory; and what it hands out at a time."""

    threads: int
    registers: int
    shared_bytes: int
    blocks: int = 32
    # registers are given to warps in units, and each block takes some shared memory for the system
    register_unit: int = 256
    reserved_bytes: int = 1024


# an H100's and an H200's
HOPPER = Limits(2048, 65536, 233472)


@dataclass(frozen=True)
class Span:
    """What ran on the device, in microseconds since some moment."""

    name: str
    begin: float
    end: float


def resident(limits: Limits, warps: int, registers: int, shared_bytes: int) -> int:
    """Programs of a kernel that a multiprocessor holds at once; `registers` of a thread."""
    per_warp = -(-max(registers, 1) * 32 // limits.register_unit) * limits.register_unit
    by_registers = limits.registers // per_warp // warps
    by_shared = limits.shared_bytes // (shared_bytes + limits.reserved_bytes)
    return min(limits.threads // 32 // warps, by_registers, by_shared, limits.blocks)


def limits_of(device: str) -> Limits:
    """The card's, as far as torch says; an H100's where there is none."""
    if device != "cuda":
        return HOPPER
    properties: Any = torch.cuda.get_device_properties(0)
    names = ("max_threads_per_multi_processor", "regs_per_multiprocessor", "shared_memory_per_multiprocessor")
    usual = (HOPPER.threads, HOPPER.registers, HOPPER.shared_bytes)
    return Limits(*(int(getattr(properties, name, value)) for name, value in zip(names, usual, strict=True)))


def by_name(spans: Sequence[Span], steps: int) -> dict[str, Any]:
    """Launches, microseconds by name and idle gaps of a step, the mean of `steps` that follow one another."""
    totals: dict[str, list[float]] = {}
    for span in spans:
        totals.setdefault(short(span.name), []).append(span.end - span.begin)
    kernels: list[dict[str, Any]] = [
        {"kernel": name, "launches": round(len(taken) / steps, 2), "us": round(sum(taken) / steps, 2)}
        for name, taken in totals.items()
    ]
    kernels.sort(key=lambda kernel: -float(kernel["us"]))
    gaps, end = [], None
    for span in sorted(spans, key=lambda each: each.begin):
        if end is not None and span.begin > end:
            gaps.append(span.begin - end)
        end = span.end if end is None else max(end, span.end)
    busy = sum(float(kernel["us"]) for kernel in kernels)
    return {
        "launches": round(len(spans) / steps, 1), "busy_us": round(busy, 2), "idle_us": round(sum(gaps) / steps, 2),
        "largest_gap_us": round(max(gaps, default=0.0), 2), "kernels": kernels[:LISTED],
        "others_us": round(sum(float(kernel["us"]) for kernel in kernels[LISTED:]), 2),
    }  # fmt: skip


def short(name: str) -> str:
    """A kernel's name without the arguments of its templates, which fill pages."""
    plain = name.split("(")[0].removeprefix("void ").split("<")[0]
    return plain.strip() or name[:80]


def spans_of(calls: Sequence[Callable[[], object]], device: str) -> list[Span]:
    """What ran on the device (on a CPU: torch's outermost operations) in the calls, one after the other."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device == "cuda" else [])]
    with profile(activities=activities) as trace:
        for call in calls:
            call()
        if device == "cuda":
            torch.cuda.synchronize()
    wanted = DeviceType.CUDA if device == "cuda" else DeviceType.CPU
    return [
        Span(event.name, float(event.time_range.start), float(event.time_range.end))
        for event in trace.events() or ()
        if event.device_type == wanted and (device == "cuda" or event.cpu_parent is None)
    ]


def loaded_kernels(limits: Limits) -> list[dict[str, Any]]:
    """What each kernel of the library that this process launched needs, and its programs and warps a multiprocessor."""
    listed = []
    for name, kernel in _compiled():
        registers, spills = getattr(kernel, "n_regs", None), getattr(kernel, "n_spills", None)
        warps, shared = int(kernel.metadata.num_warps), int(kernel.metadata.shared)
        programs = resident(limits, warps, registers or 1, shared)
        bound = getattr(kernel.metadata, "maxnreg", None)
        listed.append(
            {
                "kernel": name,
                "registers": registers,
                "bound": bound,
                "spills": spills,
                "shared_bytes": shared,
                "warps": warps,
                "programs_resident": programs,
                "warps_resident": programs * warps,
            }  # fmt: skip
        )
    unique = {tuple(entry.items()): entry for entry in listed}
    return sorted(unique.values(), key=lambda entry: (str(entry["kernel"]), str(entry)))


def _compiled() -> Iterator[tuple[str, Any]]:
    """Names and loaded code of the kernels in the library's modules."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("shardwise.")]
    kernels = {id(value): value for module in modules for value in list(vars(module).values()) if _has_caches(value)}
    for kernel in kernels.values():
        for caches in kernel.device_caches.values():
            for code in caches[0].values():
                # a kernel that was compiled and never launched is not loaded
                if getattr(code, "function", None) is not None:
                    yield kernel.fn.__name__, code


def _has_caches(value: Any) -> bool:
    return type(value).__name__ == "JITFunction" and hasattr(value, "device_caches")


def profiles(device: str, sizes: Sizes) -> dict[str, Any]:
    """Each decisive shape: a step by kernel; and what each kernel that ran needs."""
    shapes: list[dict[str, Any]] = []
    failed, deadline = [], time.monotonic() + sizes.profile_s
    for name in PROFILED:
        if device == "cuda":
            # the next shape's tables are of another size
            torch.cuda.empty_cache()
        shape = sized(SHAPES[name], memory_of(device), small=sizes.small)
        for call in ("step", "module") if name == "64 x 26" else ("step",):
            if time.monotonic() > deadline:
                failed.append(f"{name}, {call}: no time was left")
                continue
            try:
                shapes.append(_profile(shape, call, device))
            # a profiler that is not allowed to look fails in its own ways
            except Exception as error:
                failed.append(f"{name}, {call}: {in_a_line(error)}")
    return {"steps": STEPS, "shapes": shapes, "kernels": loaded_kernels(limits_of(device)), "failed": failed} | {
        "limits": asdict(limits_of(device))
    }


def _profile(shape: Shape, call: str, device: str) -> dict[str, Any]:
    calls = calls_of(batches_of(shape, device), call)
    for step in calls:
        step()
    # the first profile of a process starts the profiler
    spans_of(calls[:1], device)
    spans = spans_of(list(_steps(calls)), device)
    if not spans:
        raise RuntimeError("the profiler saw nothing")
    return {"shape": shape.name, "call": call, "scaled": shape.scaled, **by_name(spans, STEPS)}


def _steps(calls: Iterable[Callable[[], object]]) -> Iterator[Callable[[], object]]:
    every = list(calls)
    for number in range(STEPS):
        yield every[number % len(every)]

"""The CPU and the GPUs of this machine, and which path ops take on each, and why."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from shardwise.kernels import _op, configs, numba_loops

from ..suite import machine
from .findings import NOTE, OK, Finding
from .proven import PROVEN
from .versions import amd_driver, nvidia_driver

GIB = 1 << 30


def devices(chosen: list[str]) -> Iterator[Finding]:
    """Of the CPU, whatever the devices chosen, since the host feeds the others; then of the GPUs among them."""
    yield _cpu()
    yield _path_on_cpu()
    if not torch.cuda.is_available():
        yield Finding(OK, "GPU", "none that torch can use")
    for name in chosen:
        if name != "cpu":
            yield from _gpu(torch.device(name))


def present() -> list[str]:
    """Every device that tensors can be on here: "cpu", then "cuda:0" and so on."""
    return ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count() if torch.cuda.is_available() else 0))]


def _cpu() -> Finding:
    name, cores, threads = machine.device_name("cpu"), machine.cores(), torch.get_num_threads()
    capability = torch.backends.cpu.get_cpu_capability()
    free = machine.memory_bytes("cpu")
    total = total_memory()
    text = f"{name}, {capability}; {_several(cores, 'core')}, torch uses {_several(threads, 'thread')}"
    if total:
        text += f"; {total / GIB:.0f} GiB of memory" + (f", {free / GIB:.0f} free" if free else "")
    data = {
        "name": name, "capability": capability, "cores": cores, "threads": threads, "memory_bytes": total,
        "free_bytes": free,
    }  # fmt: skip
    quota = core_quota()
    if quota is not None and threads > quota:
        text += f"; the container may use {quota:g} cores, fewer than threads"
        return Finding(NOTE, "CPU", text, f"export OMP_NUM_THREADS={max(1, int(quota))}", data)
    return Finding(OK, "CPU", text, data=data)


def _several(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def total_memory() -> int | None:
    """Bytes that the machine has; None where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def core_quota() -> float | None:
    """Cores' worth of time that the container may take, where cgroups of version 2 say so."""
    try:
        limit, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        return None


def _path_on_cpu() -> Finding:
    """What does the work of an op on CPU tensors."""
    if _op.INTERPRETED:
        text = "ops on the CPU run in Triton's interpreter, a thousand times slower, since TRITON_INTERPRET=1"
        return Finding(NOTE, "path, CPU", text, "unset TRITON_INTERPRET", {"path": "interpreter"})
    if numba_loops.compiles():
        text = "loops that numba compiles where there are some, torch for the rest"
        return Finding(OK, "path, CPU", text, data={"path": "numba"})
    if not _op.NUMBA:
        why, mend = "SHARDWISE_NUMBA=0", "unset SHARDWISE_NUMBA"
    elif importlib.util.find_spec("numba") is None:
        why, mend = "numba is not installed", "see numba above"
    elif os.environ.get("NUMBA_DISABLE_JIT", "0") not in ("", "0"):
        why, mend = "NUMBA_DISABLE_JIT is set", "unset NUMBA_DISABLE_JIT"
    else:
        why, mend = "numba does not work here", "see numba above"
    return Finding(NOTE, "path, CPU", f"torch alone, since {why}", mend, {"path": "torch"})


def _gpu(device: torch.device) -> Iterator[Finding]:
    subject = f"GPU {device.index}"
    properties: Any = torch.cuda.get_device_properties(device)
    name, architecture = configs.identity(device)
    free, total = torch.cuda.mem_get_info(device)
    driver = _driver()
    text = f"{name}, {architecture}; {total / GIB:.0f} GiB of memory, {free / GIB:.0f} free"
    text += f"; {properties.multi_processor_count} multiprocessors" + (f"; driver {driver}" if driver else "")
    data = {
        "name": name, "architecture": architecture, "memory_bytes": total, "free_bytes": free, "driver": driver,
        "multiprocessors": properties.multi_processor_count,
    }  # fmt: skip
    yield Finding(OK, subject, text, data=data)
    yield kernels_for(subject, architecture)
    by = "Triton's kernels" if _op.HAS_TRITON else "torch alone, since triton is not installed: slower"
    if _op.INTERPRETED:
        by = "Triton's interpreter, since TRITON_INTERPRET=1: a thousand times slower"
    good = _op.HAS_TRITON and not _op.INTERPRETED
    mend = "" if good else "unset TRITON_INTERPRET" if _op.INTERPRETED else "see triton above"
    yield Finding(OK if good else NOTE, f"path, {subject}", by, mend)


def kernels_for(subject: str, architecture: str) -> Finding:
    """Whether the kernels compile for a GPU of this architecture, as far as the project has tried."""
    how = PROVEN.how_compiled(architecture)
    subject = f"kernels, {subject}"
    if how == "whole":
        return Finding(OK, subject, f"every kernel is compiled and checked for {architecture}")
    if how == "part":
        text = f"each kernel is compiled and checked for {architecture} at two widths; the others should do"
        if architecture == "sm_75":
            text += "; products of fp16 and bf16 jagged tensors are not supported there"
        return Finding(OK, subject, text)
    known = ", ".join((*PROVEN.whole, *PROVEN.part))
    text = f"nobody has compiled the kernels for {architecture}; they are for {known}. The self-test below says more"
    return Finding(NOTE, subject, text, "run models there once the self-test has passed, and please report it")


def _driver() -> str:
    """The version of the GPU's driver, as far as it says so."""
    if torch.version.hip:
        return amd_driver()
    if driver := nvidia_driver():
        return driver
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.splitlines()[0].strip() if done.returncode == 0 and done.stdout.strip() else ""

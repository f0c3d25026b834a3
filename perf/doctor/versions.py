"""Versions of what shardwise runs on, whether they are supported, and what to do where they are not.

torch is imported here under guard, since a check-up has to tell of one that does not import. Nothing else of this file
needs it.
"""

from __future__ import annotations

import os
import platform
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from shardwise._version import __version__, how_to_install, in_checkout

from .findings import NOTE, OK, PROBLEM, Finding
from .proven import PROVEN


def _numbers(text: str) -> tuple[int, ...]:
    """(3, 7, 1) of "3.7.1+git"."""
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:3])


# oldest and newest Python, oldest torch, oldest and newest triton that it is tested on
PYTHON = ((3, 10), (3, 14))
TORCH = (2, 9)
# what hides GPUs from torch
VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
TRITON = tuple(_numbers(f([*PROVEN.compiled], key=_numbers))[:2] for f in (min, max))


def versions() -> Iterator[Finding]:
    """Of shardwise, Python, torch, triton and numba."""
    folder = Path(__file__).resolve().parents[2]
    kind = "a checkout" if in_checkout() else "installed"
    yield Finding(OK, "shardwise", f"{__version__}, {kind} in {folder}", data={"version": __version__})
    yield _python()
    torch, broken = _torch()
    yield broken or _of_torch(torch)
    yield _triton(torch)
    yield _numba()


def torch_or_error() -> tuple[Any, str]:
    """torch, or None and why it cannot be imported."""
    try:
        return import_module("torch"), ""
    except Exception as error:
        # an ImportError where it is missing, an OSError where a library of it does not load
        return None, " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _python() -> Finding:
    here = sys.version_info[:2]
    text = f"{platform.python_version()}, {platform.system()} {platform.machine()}"
    if PYTHON[0] <= here <= PYTHON[1]:
        return Finding(OK, "Python", text)
    low, high = (".".join(map(str, release)) for release in PYTHON)
    return Finding(NOTE, "Python", f"{text}: shardwise is tested on {low} to {high}", f"use Python {low} to {high}")


def _torch() -> tuple[Any, Finding | None]:
    torch, error = torch_or_error()
    if torch is None:
        missing = "No module named 'torch'" in error
        low = ".".join(map(str, TORCH))
        mend = (
            f'pip install "torch>={low}"' if missing else "install torch anew: https://pytorch.org/get-started/locally"
        )
        return None, Finding(PROBLEM, "torch", "is not installed" if missing else f"does not import: {error}", mend)
    return torch, None


def _of_torch(torch: Any) -> Finding:
    """Its version, what it was built for, and whether that fits the machine."""
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else ""
    built = built or (f"ROCm {torch.version.hip}" if torch.version.hip else "the CPU alone")
    text = f"{torch.__version__}, built for {built}"
    data = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    if _numbers(torch.__version__)[:2] < TORCH:
        low = ".".join(map(str, TORCH))
        return Finding(PROBLEM, "torch", f"{text}: shardwise needs {low} or newer", f'pip install "torch>={low}"', data)
    driver = nvidia_driver()
    if driver and not (torch.version.cuda or torch.version.hip):
        return Finding(
            NOTE, "torch", f"{text}, and this machine has an NVIDIA driver ({driver}): its GPU cannot be used",
            "install a CUDA build of torch: https://pytorch.org/get-started/locally", data,
        )  # fmt: skip
    if (torch.version.cuda or torch.version.hip) and not torch.cuda.is_available():
        return Finding(NOTE, "torch", f"{text}, and finds no GPU: {_why_no_gpu(torch)}", _to_find_one(), data)
    return Finding(OK, "torch", text, data=data)


def nvidia_driver() -> str:
    """The version of the NVIDIA driver that is loaded, empty where there is none."""
    try:
        match = re.search(r"Kernel Module.*?(\d+\.[\d.]+)", Path("/proc/driver/nvidia/version").read_text())
    except OSError:
        return ""
    return match[1] if match else "of unknown version"


def amd_driver() -> str:
    """The version of AMD's driver where it is a module of its own, empty where there is none."""
    try:
        return Path("/sys/module/amdgpu/version").read_text().strip()
    except OSError:
        return ""


def cores() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _why_no_gpu(torch: Any) -> str:
    try:
        torch.cuda.init()
    except Exception as error:
        return " ".join(str(error).split())[:200]
    return "there is none"


def _to_find_one() -> str:
    """How torch may come to see a GPU."""
    hidden = next((name for name in VISIBLE if name in os.environ), "")
    if hidden:
        return f"unset {hidden}, which is {os.environ[hidden]!r}"
    if nvidia_driver() or Path("/dev/kfd").exists():
        return "install a torch that was built for what the driver supports: https://pytorch.org/get-started/locally"
    return "without a GPU nothing is to be done; with one, install its driver, or give it to the container"


def _triton(torch: Any) -> Finding:
    """Where a GPU needs it, and whether torch and the kernels get on with this version."""
    needed = torch is not None and torch.cuda.is_available()
    installed = _version_of("triton", "pytorch-triton", "pytorch-triton-rocm")
    asked = asked_by_torch()
    low, high = (".".join(map(str, release)) for release in TRITON)
    bounds = f"=={asked}" if asked else f">={low},<{TRITON[1][0]}.{TRITON[1][1] + 1}"
    right = f'pip install "triton{bounds}"'
    if find_spec("triton") is None:
        if needed:
            return Finding(NOTE, "triton", "not installed: a GPU runs the slower torch path", right)
        return Finding(OK, "triton", "not installed: kernels on a GPU need it, nothing else does")
    text, data = installed or "installed, of unknown version", {"version": installed}
    if installed and asked and _numbers(installed)[:2] != _numbers(asked)[:2]:
        mark = PROBLEM if needed else NOTE
        return Finding(mark, "triton", f"{text}: this torch was made for triton {asked}", right, data)
    if installed and not TRITON[0] <= _numbers(installed)[:2] <= TRITON[1]:
        text += f": the kernels were compiled by {low} to {high} alone"
        mend = "" if asked else right
        return Finding(NOTE, "triton", text, mend or "a torch that comes with one of these has it", data)
    return Finding(OK, "triton", text, data=data)


def asked_by_torch() -> str:
    """The version of triton that the installed torch names in its metadata, as CUDA builds do; else empty."""
    try:
        lines = requires("torch") or []
    except PackageNotFoundError:
        return ""
    matches = (re.match(r"(?:pytorch-)?triton(?:-rocm)?\s*\(?==\s*([\w.+]+)", line) for line in lines)
    return next((match[1] for match in matches if match), "")


def _numba() -> Finding:
    """Missing it costs speed on a CPU, no more."""
    installed = _version_of("numba")
    mend = how_to_install("cpu")
    if find_spec("numba") is None:
        return Finding(NOTE, "numba", "not installed: on a CPU ops run on torch alone, which is slower", mend)
    try:
        import_module("numba")
    except Exception as error:
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        text = f"{installed} does not work: {why}; ops run on torch alone"
        return Finding(NOTE, "numba", text, f"{mend}, or SHARDWISE_NUMBA=0 to be warned no more")
    return Finding(OK, "numba", str(installed), data={"version": installed})


def _version_of(*names: str) -> str | None:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None

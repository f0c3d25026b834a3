"""The machine of a measurement: device, threads, versions of everything, the commit."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import warnings
from collections.abc import Sequence
from datetime import datetime, timezone
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from shardwise import __version__
from shardwise.kernels import numba_loops

PACKAGES = {"triton": "triton", "numba": "numba", "fbgemm": "fbgemm-gpu", "torchrec": "torchrec", "numpy": "numpy"}
# of packages that come under several names
OTHER_NAMES = {"fbgemm": ("fbgemm-gpu-cpu", "fbgemm-gpu-nightly", "fbgemm-gpu-genai"), "triton": ("pytorch-triton",)}
# what has to be importable for a peer; torch always is
MODULES = {"fbgemm": "fbgemm_gpu", "torchrec": "torchrec"}


def cores() -> int:
    """CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def importable_peers() -> frozenset[str]:
    """The peers that import here, torch apart: one that was built for another torch is there and does not load."""
    return frozenset(peer for peer, module in MODULES.items() if _imports(module))


@cache
def _imports(module: str) -> bool:
    if find_spec(module) is None:
        return False
    try:
        import_module(module)
    except Exception as error:
        warnings.warn(f"{module} is installed and does not load: {error!r}"[:300], stacklevel=3)
        return False
    return True


def memory_bytes(device: str) -> int | None:
    """Memory that is free now, on the GPU or of the host; None where the system does not say."""
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return _of_proc("/proc/meminfo", "MemAvailable:")


def memory_for_tables(device: str) -> int:
    """Bytes that the tables of a case may take: peers hold as much again each, and a gradient may be as large."""
    free = memory_bytes(device)
    if device == "cuda":
        return (free or 0) * 2 // 5
    return min(8 << 30, free // 5) if free else 2 << 30


def versions() -> dict[str, str | None]:
    """Versions by package, None of what is not installed, and of numba where its loops are turned off."""
    by_package: dict[str, str | None] = {
        "shardwise": __version__, "torch": torch.__version__, "python": platform.python_version()
    }  # fmt: skip
    for name, package in PACKAGES.items():
        by_package[name] = _installed((package, *OTHER_NAMES.get(name, ())))
    if not numba_loops.compiles():
        by_package["numba"] = None
    by_package["cuda"] = torch.version.cuda
    return by_package


def device_name(device: str) -> str:
    """The GPU's name, or the CPU's."""
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def described(device: str, threads: int) -> dict[str, Any]:
    """The facts that two runs have to share to be compared, and those that they had better share."""
    description: dict[str, Any] = {
        "device": device, "device_name": device_name(device), "threads": threads, "cores": cores(),
        "versions": versions(),
    }  # fmt: skip
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        description["memory_gib"] = round(properties.total_memory / 2**30, 1)
        description["multiprocessors"] = properties.multi_processor_count
    return description


def machine_info(device: str, threads: int) -> dict[str, Any]:
    """As pytest-benchmark writes it, and what is above under "shardwise"."""
    return {
        # a name of the machine is nobody's business
        "node": "",
        "processor": platform.processor(),
        "machine": platform.machine(),
        "python_compiler": platform.python_compiler(),
        "python_implementation": platform.python_implementation(),
        "python_implementation_version": platform.python_version(),
        "python_version": platform.python_version(),
        "python_build": list(platform.python_build()),
        "release": platform.release(),
        "system": platform.system(),
        "cpu": {"brand_raw": device_name("cpu"), "count": os.cpu_count()},
        "shardwise": described(device, threads),
    }


def commit_info() -> dict[str, Any]:
    """As pytest-benchmark writes it; of the checkout that holds this file."""
    commit = _git("rev-parse", "HEAD")
    return {
        "id": commit or "unversioned",
        "time": _git("show", "-s", "--pretty=format:%cI"),
        "author_time": _git("show", "-s", "--pretty=format:%aI"),
        "dirty": bool(_git("status", "--porcelain", "--untracked-files=no")),
        "project": "shardwise",
        "branch": _git("rev-parse", "--abbrev-ref", "HEAD") or "(unknown)",
    }


def now() -> str:
    """The time in UTC, as ISO 8601 has it."""
    return datetime.now(timezone.utc).isoformat()


def load() -> float | None:
    """Processes that ran or wanted to during the last minute, on average."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def _git(*arguments: str) -> str | None:
    root = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def _installed(names: Sequence[str]) -> str | None:
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _of_proc(path: str, key: str) -> int | None:
    try:
        for line in Path(path).read_text().splitlines():
            if line.startswith(key):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None

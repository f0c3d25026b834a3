"""Traps of the environment that have cost people an afternoon. Imports no torch: some keep torch from working."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from .findings import NOTE, OK, PROBLEM, Finding

MIB, GIB = 1 << 20, 1 << 30
# what NCCL, and loaders that share tensors between processes, ask of /dev/shm at the least
SHARED_MEMORY = GIB
# files that a process may have open: ranks, loaders and shards of a checkpoint take some each
OPEN_FILES = 1024
SUB_PACKAGES = (
    *("data", "embeddings", "fbgemm", "inference", "jagged", "kernels", "models", "perf"),
    *("planner", "sharding"),
)


def traps(cores: int) -> Iterator[Finding]:
    """Each trap that is open here; one line where none is. `cores` are those that this process may use."""
    checks: tuple[Callable[[], Finding | None], ...] = (
        _copies, _parts, _variables, _triton_interpret, lambda: _threads(cores), _numba_cache, _triton_cache,
        _shared_memory, _open_files, _huge_pages, _store_of_torchrun,
    )  # fmt: skip
    findings = [finding for check in checks if (finding := check()) is not None]
    yield from findings or [Finding(OK, "environment", "no trap that this project knows of is open")]


def _copies() -> Finding | None:
    """Two copies of shardwise that Python could import: whichever comes first on the path is it."""
    here = Path(__file__).resolve().parents[2]
    places = [Path(entry or ".") / "shardwise" for entry in sys.path]
    places += [Path(str(distribution.locate_file("shardwise"))) for distribution in distributions(name="shardwise")]
    roots = {place.resolve() for place in places if (place / "__init__.py").is_file()}
    # this file lies in perf/ of a checkout, or in shardwise/perf of what is installed
    own = {here, here / "shardwise"}
    others = sorted(str(root) for root in roots - own)
    if not others:
        return None
    text = f"two copies of shardwise can be imported; the one in {here} is used, not {others[0]}"
    return Finding(NOTE, "copies", text, "pip uninstall shardwise, or leave the folder of the other one")


def _parts() -> Finding | None:
    """Sub-packages that are missing, or are text where git or an archive could not make a link."""
    package = importlib.util.find_spec("shardwise")
    folder = Path(str(package.origin)).parent if package and package.origin else None
    missing = [name for name in SUB_PACKAGES if importlib.util.find_spec(f"shardwise.{name}") is None]
    if missing:
        text = f"shardwise lacks {', '.join(missing)}: it was copied in part"
        return Finding(PROBLEM, "parts", text, "install it anew, or clone it anew")
    texts = [name for name in SUB_PACKAGES if folder and (folder / name).is_file()]
    if texts:
        text = f"shardwise/{texts[0]} is a text file where a link should be: it works here, type checkers do not see it"
        return Finding(NOTE, "links", text, "git config core.symlinks true; git checkout -- shardwise")
    return None


def _variables() -> Finding | None:
    """Values of our own variables that are none."""
    value = os.environ.get("SHARDWISE_NUMBA", "")
    if value not in ("", "0", "1"):
        return Finding(PROBLEM, "SHARDWISE_NUMBA", f"is {value!r}: shardwise does not import", "set it to 0 or 1")
    tuned = os.environ.get("SHARDWISE_TUNED", "")
    if tuned and not Path(tuned).exists():
        return Finding(NOTE, "SHARDWISE_TUNED", f"names {tuned}, which is not there", "unset SHARDWISE_TUNED")
    return None


def _triton_interpret() -> Finding | None:
    if os.environ.get("TRITON_INTERPRET", "0") in ("", "0"):
        return None
    text = "is set: kernels are interpreted, a thousand times slower, also on a GPU"
    return Finding(NOTE, "TRITON_INTERPRET", text, "unset TRITON_INTERPRET")


def _threads(cores: int) -> Finding | None:
    asked = os.environ.get("OMP_NUM_THREADS", "")
    # OpenMP takes a number for each level of nesting too, "4,2"
    if asked and not re.fullmatch(r"\s*0*[1-9]\d*(\s*,\s*0*[1-9]\d*)*\s*", asked):
        text = f"is {asked!r}, which is no number of threads: it is passed over, all {cores} cores are taken"
        return Finding(NOTE, "OMP_NUM_THREADS", text, f"export OMP_NUM_THREADS={cores}")
    if asked.isdecimal() and int(asked) > cores:
        text = f"is {asked} on {cores} cores: threads wait for one another"
        return Finding(NOTE, "OMP_NUM_THREADS", text, f"export OMP_NUM_THREADS={cores}")
    if not asked and cores > 1:
        text = f"is not set: each of several ranks under plain python takes all {cores} cores (torchrun gives each one)"
        return Finding(NOTE, "OMP_NUM_THREADS", text, f"with R ranks, export OMP_NUM_THREADS={cores}/R")
    return None


def _numba_cache() -> Finding | None:
    """Where numba keeps what it compiled: without a place every process compiles for a minute."""
    if importlib.util.find_spec("numba") is None or os.environ.get("SHARDWISE_NUMBA") == "0":
        return None
    package = importlib.util.find_spec("shardwise.kernels")
    if package is None or package.origin is None:
        return None
    beside = Path(package.origin).parent / "cpu"
    given = os.environ.get("NUMBA_CACHE_DIR", "")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    places = [Path(given)] if given else [beside / "__pycache__", home]
    if any(_writable(place) for place in places):
        return None
    text = f"neither {places[0]} nor {home} can be written: every process compiles its loops anew, for a minute"
    if given:
        text = f"NUMBA_CACHE_DIR={given} cannot be written: every process compiles its loops anew, for a minute"
    return Finding(NOTE, "numba's cache", text, "export NUMBA_CACHE_DIR=<a folder that can be written>")


def _triton_cache() -> Finding | None:
    """Where Triton keeps kernels; asked where there is a GPU's driver alone."""
    if importlib.util.find_spec("triton") is None or not any(map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd"))):
        return None
    place = Path(os.environ.get("TRITON_CACHE_DIR") or Path.home() / ".triton" / "cache")
    if _writable(place):
        return None
    text = f"{place} cannot be written: no kernel can be compiled"
    return Finding(PROBLEM, "Triton's cache", text, "export TRITON_CACHE_DIR=<a folder that can be written>")


def _writable(place: Path) -> bool:
    """Whether files can be made in a folder, which may have to be made itself."""
    while not place.exists() and place.parent != place:
        place = place.parent
    return place.is_dir() and os.access(place, os.W_OK)


def _shared_memory() -> Finding | None:
    try:
        seen: Any = os.statvfs("/dev/shm")
    except (AttributeError, OSError):
        return None
    size, free = seen.f_blocks * seen.f_frsize, seen.f_bavail * seen.f_frsize
    if size >= SHARED_MEMORY and free >= SHARED_MEMORY // 4:
        return None
    text = f"/dev/shm has {size // MIB} MiB, {free // MIB} free: loaders' workers and NCCL fail when it is full"
    return Finding(NOTE, "shared memory", text, "docker run --shm-size=8g, or --ipc=host")


def _open_files() -> Finding | None:
    try:
        import resource
    except ImportError:
        return None
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= OPEN_FILES:
        return None
    text = f"a process may open {soft} files: ranks, loaders and large checkpoints take more"
    most = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    return Finding(NOTE, "ulimit -n", text, f"ulimit -n {most if most == 'unlimited' else min(int(most), 65536)}")


def _huge_pages() -> Finding | None:
    path = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    try:
        if "[never]" not in path.read_text():
            return None
    except OSError:
        return None
    text = "are off: large tables are looked up more slowly on the CPU (1.2 times, where it was measured)"
    return Finding(NOTE, "huge pages", text, f"echo madvise | sudo tee {path}")


def _store_of_torchrun() -> Finding | None:
    if os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1":
        return None
    text = "is not set: with torchrun --max-restarts a restarted rank may wait for a dead one for half an hour"
    return Finding(
        NOTE, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", text, "export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
    )  # fmt: skip

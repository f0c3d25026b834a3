"""Counts of a step: what it calls, allocates, launches and waits for, the same in every run.

`python calls` and `allocations` are of the path of the CPU, with numba and on torch alone; `kernels`, `copies` and
`host syncs` of the path of CUDA, without a GPU. A step is made anew for each and counted after WARM_UP turns.
"""

from __future__ import annotations

import gc
import importlib.util
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from shardwise.kernels import numba_loops
from shardwise.kernels._op import HAS_TRITON, INTERPRETED
from shardwise.perf.counts.calls import allocations, collectives, python_calls
from shardwise.perf.counts.counted_steps import Step
from shardwise.perf.counts.launches import CUDA, Counted, use_fake_cuda
from shardwise.perf.suite import ranks
from shardwise.perf.suite.case import Call
from shardwise.perf.suite.libraries import without_numba
from shardwise.perf.suite.timing import collector_off
from shardwise.sharding.comms.exchange import Exchange

WARM_UP = 3
# of sharded steps the cheapest of so many: now and then one looks through what earlier collectives were lent
TURNS = 3

_HERE = Path(__file__).resolve().parent
_ROOT = _HERE.parents[1]
_TORCH = str(Path(torch.__file__).parent)


@dataclass(frozen=True)
class Count:
    """A number, and what it is made up of where that is known."""

    total: int
    parts: Mapping[str, int] = field(default_factory=dict)

    @staticmethod
    def of(parts: Mapping[str, int]) -> Count:
        """The sum of parts."""
        return Count(sum(parts.values()), dict(sorted(parts.items())))


# by what is counted
Counts = dict[str, Count]


def missing() -> list[str]:
    """Why some counts cannot be made here; nothing where all can."""
    reasons = []
    if importlib.util.find_spec("numba") is None:
        reasons.append("numba is not installed: no counts of the CPU path with it")
    elif not numba_loops.compiles():
        reasons.append(
            "loops are turned off (SHARDWISE_NUMBA, NUMBA_DISABLE_JIT): no counts of the CPU path with numba"
        )
    if not HAS_TRITON:
        reasons.append("triton is not installed: no kernels, copies and host syncs")
    return reasons


def counts_of(step: Step) -> Counts:
    """All counts of a step that can be made here.

    Raises:
        RuntimeError: kernels are interpreted in this process.
    """
    if INTERPRETED:
        raise RuntimeError(
            "TRITON_INTERPRET is set: unset it, counts are of the paths that run without the interpreter"
        )
    return _on_all_paths(step, on_host)


def _on_all_paths(step: Step, of_path: Callable[[Step, str], Counts]) -> Counts:
    """Counts of the paths of the CPU, each by `of_path`, and of that of CUDA."""
    counts: Counts = {}
    with one_thread():
        if importlib.util.find_spec("numba") is not None and numba_loops.compiles():
            counts |= of_path(step, "numba")
        with torch_alone():
            counts |= of_path(step, "torch alone")
        if HAS_TRITON and step.cuda:
            counts |= on_device(step)
    return counts


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread: work is divided among more by calls that would count."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def torch_alone() -> Iterator[None]:
    """Numba is hidden, and what any kernel file keeps of it is forgotten."""
    with without_numba():
        _forget()
        yield
    _forget()


def _forget() -> None:
    for name, module in list(sys.modules.items()):
        for value in list(vars(module).values()) if name.startswith("shardwise.kernels.") else ():
            # triton's stand-in has every attribute, as None
            if clear := getattr(value, "cache_clear", None):
                clear()


def on_host(step: Step, path: str) -> Counts:
    """Counts of the path of the CPU; `path` is in their names."""
    prepare = step.make(torch.device("cpu"))
    for turn in range(WARM_UP):
        prepare(turn)()
    with collector_off():
        calls, memory = prepare(WARM_UP), prepare(WARM_UP + 1)
        called = by_folder(calls)
        allocated = allocations(memory)
    return {
        f"python calls, {path}": Count.of(called),
        f"allocations, {path}": Count(len(allocated)),
        f"bytes allocated, {path}": Count(sum(allocated)),
    }


def by_folder(call: Call) -> Counter[str]:
    """Python calls by the folder of shardwise, torch or Python they are of; those of perf do not count."""
    counts: Counter[str] = Counter()
    for called, n in python_calls(call).items():
        path = Path(called.file)
        folder = "others"
        if called.file.startswith(_TORCH):
            folder = "torch"
        elif path.is_absolute() and (inside := path.resolve()).is_relative_to(_ROOT):
            folder = inside.relative_to(_ROOT).parts[0]
        # an environment may lie in the checkout
        counts["others" if folder.startswith(".") else folder] += n
    del counts["perf"]
    return counts


def on_device(step: Step) -> Counts:
    """Counts of the path that CUDA takes."""
    with use_fake_cuda(seen := Counted()):
        prepare = step.make(CUDA)
        for turn in range(WARM_UP):
            prepare(turn)()
        call = prepare(WARM_UP)
        seen.clear()
        with collector_off():
            call()
    return {
        "kernels": Count.of(seen.kernels),
        "copies host to device and back": Count.of(seen.copies),
        "host syncs": Count.of(seen.syncs),
    }


def of_ranks(step: Step) -> Counts:
    """Counts of a step of all ranks of the process group, the same on each; every rank calls this.

    Collectives are those of the rank that calls most; all else is of all ranks together.
    """
    counted = _on_all_paths(step, _of_rank)
    by_rank = ranks.of_ranks(counted)
    return {name: _together(name, [counts[name] for counts in by_rank]) for name in counted}


def _of_rank(step: Step, path: str) -> Counts:
    prepare = step.make(torch.device("cpu"))
    for turn in range(WARM_UP):
        prepare(turn)()
    call, before = prepare(WARM_UP), _sent()
    with collector_off(), collectives() as called:
        call()
    sent = _sent() - before
    turns = []
    for turn in range(TURNS):
        call = prepare(WARM_UP + 1 + turn)
        with collector_off():
            turns.append(by_folder(call))
    python = min(turns, key=lambda calls: calls.total())
    return {"collectives": Count.of(called), "bytes sent": Count(sent), f"python calls, {path}": Count.of(python)}


def _together(name: str, counts: Sequence[Count]) -> Count:
    if name == "collectives":
        return max(counts, key=lambda count: count.total)
    parts: Counter[str] = Counter()
    for count in counts:
        parts.update(count.parts)
    return Count.of(parts) if parts else Count(sum(count.total for count in counts))


def _sent() -> int:
    """Bytes that all exchanges of this process have sent."""
    return sum(item.sent for item in gc.get_objects() if type(item) is Exchange)

"""Count what a piece of code calls: functions of Python, and collectives of torch.distributed."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

# collectives that a step may call; those of DDP run below Python
COLLECTIVES = (
    "all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_reduce",
    "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast", "broadcast_object_list",
    "gather", "gather_object", "isend", "irecv", "recv", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter",
    "scatter_object_list", "send",
)  # fmt: skip


class Called(NamedTuple):
    """A function of Python."""

    file: str
    line: int
    name: str


def python_calls(run: Callable[[], object]) -> Counter[Called]:
    """How often `run()` calls each function of Python, counted by `sys.setprofile`; a generator counts at each step."""
    counts: Counter[Called] = Counter()

    def seen(frame: Any, event: str, argument: object) -> None:
        if event == "call":
            code = frame.f_code
            counts[Called(code.co_filename, code.co_firstlineno, getattr(code, "co_qualname", code.co_name))] += 1

    before = sys.getprofile()
    sys.setprofile(seen)
    try:
        run()
    finally:
        sys.setprofile(before)
    return counts


def of_folder(calls: Counter[Called], folder: str) -> Counter[Called]:
    """Calls of functions whose file lies below a folder, by the path it was imported from."""
    inside = folder + os.sep
    return Counter({called: n for called, n in calls.items() if called.file.startswith(inside)})


def listed(calls: Counter[Called], most: int) -> list[str]:
    """The functions that are called most, one a line."""
    return [
        f"{n:5} {'/'.join(called.file.split('/')[-2:])}:{called.line} {called.name}"
        for called, n in calls.most_common(most)
    ]


@contextmanager
def collectives(names: Sequence[str] = COLLECTIVES) -> Iterator[Counter[str]]:
    """Count calls of torch.distributed's collectives by name while this is open."""
    counts: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in names:
            # under both names; what torch calls inside itself goes through the second and would count twice
            function = getattr(distributed_c10d, name)
            stack.enter_context(patch.object(dist, name, counted(name, function)))
        yield counts


def allocations(run: Callable[[], object]) -> list[int]:
    """Bytes of each piece of memory that `run()` has torch's allocator of the CPU give out, in order.

    Those are tensors, and what operations need for themselves; numpy's and numba's own memory is not among them.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiled:
        run()
    recorded: Any = profiled.profiler
    return [
        event.nbytes()
        for event in recorded.kineto_results.events()
        if event.name() == "[memory]" and event.nbytes() > 0
    ]


def peak_bytes(run: Callable[[], object]) -> int:
    """Most bytes that torch's allocator of the CPU had given out at a time since `run()` began, and not back."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiled:
        run()
    recorded: Any = profiled.profiler
    events = [event for event in recorded.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate((int(event.nbytes()) for event in events), initial=0))

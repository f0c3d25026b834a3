"""Run a sharded step of both sides in turn: time, collectives, Python calls, and where our time goes.

Everything here runs on every rank of a process group at once.
"""

from __future__ import annotations

import importlib
import resource
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..counts.calls import (
    Called,
    collectives,
    of_folder,
    python_calls,
)
from .sharded_sides import Shape, Side, batch_of, forward_of, sharded_of

# batches that turns go through, so that no side finds its rows in the cache because it just had them
BATCHES = 4
# stages of our step -> functions of shardwise that make them up, as module:name. What one of them calls of another
# counts there alone.
STAGES: Mapping[str, Sequence[str]] = {
    "check ids": ("sharding.collection:ShardedCollection._check",),
    "pick": ("sharding.collection:route",),
    "exchange headers": ("sharding.header:tell", "sharding.header:Told.hear"),
    "exchange ids": ("sharding.exchange:Exchange.ids",),
    "arrange": ("sharding.departure:arrange",),
    "look up": ("embeddings.table_group:TableGroup.look_up",),
    "exchange rows": ("sharding.exchange:Exchange.rows", "sharding.exchange:Pending.wait"),
    "assemble": ("sharding.results:Columns.cut", "sharding.results:Columns.put_together"),
    "pack gradients": ("sharding.results:Columns.gradients",),
    # the exchange of rows where the backward calls it
    "exchange gradients": (),
    "update": ("embeddings.table_group:TableGroup.update",),
    "rest of forward": ("sharding.modules:ShardedEmbeddingBagCollection.forward",),
    "rest of backward": ("sharding.collection:ShardedCollection._update",),
}


class Stepper:
    """One side's sharded collection, and a step of it at a time."""

    def __init__(self, side: Side, shape: Shape, strategy: str, optimizer: str) -> None:
        self.side, self.shape = side, shape
        self.model: nn.Module = sharded_of(side, shape, strategy, optimizer)
        self._batches = [batch_of(shape, dist.get_rank(), n) for n in range(BATCHES)]
        self._grad = torch.randn(shape.B, shape.T * shape.D, generator=torch.Generator().manual_seed(5))

    def forward(self, turn: int) -> Callable[[], Tensor]:
        """The forward of a turn's batch, which is new to the library."""
        return forward_of(self.side, self.model, self.shape, *self._batches[turn % BATCHES])

    def step(self, turn: int) -> tuple[float, float]:
        """Seconds of the forward and of the whole step, from when all ranks begin; and the CPU's for this process."""
        forward = self.forward(turn)
        dist.barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        values = forward()
        torch.autograd.backward(values, self._grad)
        return time.perf_counter() - begin, time.process_time() - cpu


def turns(steppers: Sequence[Stepper], count: int, warm_up: int = 3) -> dict[str, list[tuple[float, float]]]:
    """Seconds (clock, CPU) of each side in each of `count` turns, in which every side has a step, in changing order."""
    found: dict[str, list[tuple[float, float]]] = {one.side.name: [] for one in steppers}
    for turn in range(count + warm_up):
        for one in steppers if turn % 2 else reversed(steppers):
            seconds = one.step(turn)
            if turn >= warm_up:
                found[one.side.name].append(seconds)
    return found


class Used(NamedTuple):
    """Of this process, all threads: seconds of the clock and the CPU, minor page faults, involuntary switches."""

    clock: float
    cpu: float
    faults: int
    switches: int


def used_in_turns(steps: Mapping[str, Callable[[int], object]], count: int, warm_up: int = 3) -> dict[str, list[Used]]:
    """What each of `count` turns takes, in which each of `steps` runs once, in changing order, after a barrier."""
    found: dict[str, list[Used]] = {name: [] for name in steps}
    for turn in range(count + warm_up):
        order = list(steps.items())
        for name, step in order if turn % 2 else reversed(order):
            dist.barrier()
            before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            step(turn)
            clock, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            if turn >= warm_up:
                found[name].append(
                    Used(clock, cpu, after.ru_minflt - before.ru_minflt, after.ru_nivcsw - before.ru_nivcsw)
                )
    return found


def exchange_alone(numbers: int) -> Callable[[int], None]:
    """A step that sends so many fp32 numbers to each rank, from memory that is there, and does so a second time."""
    world = dist.get_world_size()
    mine, other = torch.zeros(world * numbers), torch.zeros(world * numbers)
    sizes = [numbers] * world

    def step(turn: int) -> None:
        for _ in range(2):
            dist.all_to_all_single(other, mine, sizes, sizes)

    return step


def collectives_of_step(stepper: Stepper) -> Counter[str]:
    """Collectives of one step, by name; the barrier before it is not one of them."""
    stepper.step(0)
    with collectives() as found:
        stepper.step(1)
    found["barrier"] -= 1
    return +found


def calls_of_forward(stepper: Stepper) -> tuple[Counter[Called], Counter[Called]]:
    """Calls of Python functions of the third forward plus `.values()`: all, and those of the library's own code."""
    stepper.forward(0)()
    stepper.forward(1)()
    forward = stepper.forward(2)
    calls = python_calls(forward)
    # the closure that stands for the user's line
    for one in [one for one in calls if one.file.endswith("sharded_sides.py")]:
        del calls[one]
    return calls, of_folder(calls, stepper.side.folder)


@contextmanager
def stage_times(
    stages: Mapping[str, Sequence[str]] = STAGES, clock: Callable[[], float] = time.perf_counter
) -> Iterator[dict[str, float]]:
    """Seconds of our stages while this is open, by `clock`, each without the stages that it calls."""
    found: dict[str, float] = defaultdict(float)
    inner: list[float] = [0.0]
    open_stages: list[str] = []

    def timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            back = stage == "exchange rows" and "rest of backward" in open_stages
            open_stages.append(stage)
            inner.append(0.0)
            begin = clock()
            try:
                return function(*args, **kwargs)
            finally:
                seconds = clock() - begin
                found["exchange gradients" if back else stage] += seconds - inner.pop()
                inner[-1] += seconds
                open_stages.pop()

        return call

    with ExitStack() as stack:
        for stage, places in stages.items():
            for place in places:
                module, _, path = place.partition(":")
                owner: Any = importlib.import_module(f"shardwise.{module}")
                *classes, name = path.split(".")
                for one in classes:
                    owner = getattr(owner, one)
                stack.enter_context(patch.object(owner, name, timed(stage, getattr(owner, name))))
        yield found

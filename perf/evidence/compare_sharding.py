"""Train sharded tables with TorchRec and with shardwise, in turn in the same two processes over gloo.

docs/evidence/beside_torchrec_sharding.md tells how and keeps what was printed. Not as it has to be: losses differ, or
there is more time or are more calls than there may be.
"""

from __future__ import annotations

import argparse
import logging
import os
import resource
import statistics
import sys
import time
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist

from shardwise.embeddings.tables import table_group
from shardwise.perf.counts.calls import (
    Called,
    collectives,
    listed,
    of_folder,
    python_calls,
)
from shardwise.perf.evidence.report import Report, Section, report_of
from shardwise.perf.suite import libraries
from shardwise.perf.suite.cases import sharded_sides
from shardwise.perf.suite.cases.sharded_sides import (
    STRATEGIES,
    Shape,
    Stepper,
    losses,
    turns,
    worst_difference,
)
from shardwise.perf.suite.libraries import ours, torchrec
from shardwise.perf.suite.options import Options
from shardwise.perf.suite.ranks import of_ranks, on_ranks
from shardwise.sharding.comms import consensus, exchange
from shardwise.sharding.engine import collection, wire
from shardwise.sharding.modules import sharded_collections as modules

RANKS, STEPS, LOSS_BOUND = 2, 50, 1e-6
SMALL = Shape(4, 50, 64, 8, 3)
# shapes that are timed, and the largest ratio of our time to theirs
TIMED = {Shape(26, 100_000, 64, 2048, 1): 0.7, Shape(26, 100_000, 64, 2048, 20): 1.0}
# calls of Python in a forward: all, and of our own functions
CALLS = (300, 150)


# stages of our step -> functions of shardwise that make them up, as (module, name). What one of them calls of another
# counts there alone.
STAGES: Mapping[str, Sequence[tuple[Any, str]]] = {
    "check ids": ((collection, "mark_bad_ids"),),
    "pick": ((collection, "route"),),
    "exchange headers": ((collection, "send_header"), (consensus, "PendingHeader.receive")),
    "exchange ids": ((collection, "pack_ids"), (exchange, "Exchange.all_to_all")),
    "arrange": ((collection, "unpack_ids"),),
    "look up": ((table_group, "TableGroup.look_up"),),
    "exchange rows": ((exchange, "Exchange.rows"), (exchange, "Pending.wait")),
    "assemble": ((wire, "PooledWire.unpack_rows"),),
    "pack gradients": ((wire, "PooledWire.pack_gradients"),),
    # the exchange of rows where the backward calls it
    "exchange gradients": (),
    "update": ((table_group, "TableGroup.update"),),
    "rest of forward": ((modules, "ShardedEmbeddingBagCollection.forward"),),
    "rest of backward": ((collection, "ExchangedLookup.backward"),),
}


def loss_section(steps: int) -> Section:
    """Losses of both sides for each strategy and optimizer."""
    lines = [
        "## Losses", "",
        f"Largest difference over {steps} steps and {RANKS} ranks, {SMALL} on average and a head of two layers;"
        f" bound {LOSS_BOUND:g}.", "",
        "| strategy | optimizer | loss of rank 0, first and last | difference |", "| --- | --- | --- | --- |",
    ]  # fmt: skip
    bad = []
    for strategy in STRATEGIES:
        for optimizer in ("sgd", "rowwise_adagrad"):
            # replicas in TorchRec have the dense optimizer of the head
            name = "adagrad" if (strategy, optimizer) == ("data_parallel", "rowwise_adagrad") else optimizer
            both = [losses(side, SMALL, strategy, optimizer, steps) for side in (ours(), torchrec())]
            all_ranks = of_ranks(both)
            worst = worst_difference([own for own, _ in all_ranks], [peer for _, peer in all_ranks])
            first = all_ranks[0][0]
            lines.append(f"| {strategy} | {name} | {first[0]:.4f}, {first[-1]:.4f} | {worst:.1e} |")
            if not worst <= LOSS_BOUND:
                bad.append(f"losses of {strategy}, {optimizer} differ by {worst:.1e}")
    return Section([*lines, ""], bad)


def time_section(shape: Shape, bound: float, count: int) -> Section:
    """Time, collectives, calls and stages of both sides at one shape."""
    steppers = [Stepper(side, shape, "table_wise", "rowwise_adagrad") for side in (ours(), torchrec())]
    own, peer = steppers
    names = [stepper.side.label for stepper in steppers]
    gathered = of_ranks(turns(steppers, count))
    lines = [f"## {str(shape)[:1].upper()}{str(shape)[1:]}", "", f"table_wise, rowwise Adagrad, {count} turns.", ""]
    lines += [f"| | {names[0]} ms | {names[1]} ms | ratio, quartiles |", "| --- | --- | --- | --- |"]
    bad = []
    for number, quantity in enumerate(("clock", "CPU of all threads")):
        # a step takes as long as its slowest rank
        a, b = ([max(rank[name][n][number] for rank in gathered) for n in range(count)] for name in names)
        low, ratio, high = statistics.quantiles([x / y for x, y in zip(a, b, strict=True)], n=4)
        lines.append(
            f"| {quantity} | {1e3 * statistics.median(a):.1f} | {1e3 * statistics.median(b):.1f}"
            f" | {ratio:.2f} ({low:.2f}-{high:.2f}) |"
        )
        if number == 0 and not ratio <= bound:
            bad.append(f"{shape}: {ratio:.2f} of TorchRec's time, bound {bound}")
    called = [collectives_of_step(stepper) for stepper in steppers]
    lines.append(f"| collectives | {called[0].total()} | {called[1].total()} | |")
    counted = [calls_of_forward(stepper) for stepper in steppers]
    for number, quantity in enumerate(("Python calls, third forward", "of them in its own code")):
        lines.append(f"| {quantity} | {counted[0][number].total()} | {counted[1][number].total()} | |")
    if shape.L == 1:
        bad += [
            f"{calls.total()} calls of Python, bound {most}"
            for calls, most in zip(counted[0], CALLS, strict=True)
            if calls.total() > most
        ]
    lines += ["", *stage_table(own, count)]
    lines += ["Called most:", "", "```", *listed(counted[0][0], 25), "```", ""]
    return Section(lines, bad)


def row_wise_section(shape: Shape, count: int) -> Section:
    """Our row-wise step beside our table-wise one and beside nothing but the exchange of its sums and gradients.

    Row-wise every rank has a part of every bag: with W ranks each sends B * T * D * 4 bytes to every other, W times
    what it sends table-wise, and the same back. TorchRec on a CPU has no row-wise pooled tables.
    """
    steppers = [Stepper(ours(), shape, kind, "rowwise_adagrad") for kind in ("table_wise", "row_wise")]
    of_all = shape.B * shape.T * shape.D
    columns: dict[str, tuple[Callable[[int], object], int]] = {
        "table-wise step": (steppers[0].step, of_all // RANKS),
        "row-wise step": (steppers[1].step, of_all),
        "table-wise, exchange alone": (exchange_alone(of_all // RANKS), of_all // RANKS),
        "row-wise, exchange alone": (exchange_alone(of_all), of_all),
    }
    used = used_in_turns({name: step for name, (step, _) in columns.items()}, count)
    gathered = of_ranks(used)
    lines = [
        f"## Row-wise: {shape}", "",
        f"{count} turns; a step of the clock is that of its slowest rank, the rest is rank 0's.", "",
        "| | sent to each other rank MB | clock ms, quartiles | CPU of all threads ms, quartiles | page faults"
        " | involuntary switches |", "| --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for name, (_, numbers) in columns.items():
        clock = [max(1e3 * rank[name][n].clock for rank in gathered) for n in range(count)]
        cpu = [1e3 * usage.cpu for usage in gathered[0][name]]
        faults, switches = (statistics.median(getattr(usage, field) for usage in gathered[0][name])
                            for field in ("faults", "switches"))  # fmt: skip
        spread = [statistics.quantiles(values, n=4) for values in (clock, cpu)]
        cells = [f"{middle:.1f} ({low:.1f}-{high:.1f})" for low, middle, high in spread]
        sent = 2 * 4e-6 * numbers
        lines.append(f"| {name} | {sent:.1f} | {cells[0]} | {cells[1]} | {faults:.0f} | {switches:.0f} |")
    for part in ("step", "exchange alone"):
        join = " " if part == "step" else ", "
        ratios = {
            number: statistics.median(
                getattr(b, number) / getattr(a, number)
                for a, b in zip(
                    gathered[0][f"table-wise{join}{part}"], gathered[0][f"row-wise{join}{part}"], strict=True
                )
            )
            for number in ("clock", "cpu")
        }
        lines += [
            "",
            f"Row-wise over table-wise, {part}: {ratios['clock']:.2f} of the clock, {ratios['cpu']:.2f} of the CPU.",
        ]
    return Section([*lines, ""], [])


def stage_table(stepper: Stepper, count: int) -> list[str]:
    """Where our step's time goes on rank 0, by the CPU time of its main thread; waiting does not count."""
    steps = []
    for turn in range(count):
        with stage_times(clock=time.thread_time) as times:
            stepper.step(turn)
        steps.append(times)
    dist.barrier()
    middle = {stage: 1e3 * statistics.median([step[stage] for step in steps]) for stage in STAGES}
    whole = sum(middle.values())
    rows = [f"| {stage} | {ms:.2f} | {100 * ms / whole:.0f} % |" for stage, ms in middle.items()]
    return ["| stage of ours | ms of the main thread | |", "| --- | --- | --- |", *rows, ""]


class Used(NamedTuple):
    """Of this process, all threads: seconds of the clock and the CPU, minor page faults, involuntary switches."""

    clock: float
    cpu: float
    faults: int
    switches: int


def used_in_turns(steps: Mapping[str, Callable[[int], object]], count: int, warm_up: int = 3) -> dict[str, list[Used]]:
    """What each of `count` turns takes, in which each of `steps` runs once, in changing order, after a barrier."""
    used: dict[str, list[Used]] = {name: [] for name in steps}
    for turn in range(count + warm_up):
        order = list(steps.items())
        for name, step in order if turn % 2 else reversed(order):
            dist.barrier()
            before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
            step(turn)
            clock, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
            cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            if turn >= warm_up:
                used[name].append(
                    Used(clock, cpu, after.ru_minflt - before.ru_minflt, after.ru_nivcsw - before.ru_nivcsw)
                )
    return used


def exchange_alone(numbers: int) -> Callable[[int], None]:
    """A step that sends so many fp32 numbers to each rank, from memory that is there, and does so a second time."""
    world = dist.get_world_size()
    sent, received = torch.zeros(world * numbers), torch.zeros(world * numbers)
    sizes = [numbers] * world

    def step(turn: int) -> None:
        for _ in range(2):
            dist.all_to_all_single(received, sent, sizes, sizes)

    return step


@contextmanager
def stage_times(
    stages: Mapping[str, Sequence[tuple[Any, str]]] = STAGES, clock: Callable[[], float] = time.perf_counter
) -> Iterator[dict[str, float]]:
    """Seconds of our stages while this is open, by `clock`, each without the stages that it calls."""
    totals: dict[str, float] = defaultdict(float)
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
                totals["exchange gradients" if back else stage] += seconds - inner.pop()
                inner[-1] += seconds
                open_stages.pop()

        return call

    with ExitStack() as stack:
        for stage, places in stages.items():
            for owner, path in places:
                *classes, name = path.split(".")
                for attribute in classes:
                    owner = getattr(owner, attribute)
                stack.enter_context(patch.object(owner, name, timed(stage, getattr(owner, name))))
        yield totals


def collectives_of_step(stepper: Stepper) -> Counter[str]:
    """Collectives of one step, by name; the barrier before it is not one of them."""
    stepper.step(0)
    with collectives() as counts:
        stepper.step(1)
    counts["barrier"] -= 1
    return +counts


def calls_of_forward(stepper: Stepper) -> tuple[Counter[Called], Counter[Called]]:
    """Calls of Python functions of the third forward plus `.values()`: all, and those of the library's own code."""
    stepper.forward(0)()
    stepper.forward(1)()
    forward = stepper.forward(2)
    calls = python_calls(forward)
    # the closure that stands for the user's line
    for called in [called for called in calls if called.file == sharded_sides.__file__]:
        del calls[called]
    return calls, of_folder(calls, stepper.side.folder)


def sections(steps: int, count: int) -> list[Section]:
    """All sections, on every rank."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    makers: list[Callable[[], Section]] = [lambda: loss_section(steps)]
    makers += [partial(time_section, shape, bound, count) for shape, bound in TIMED.items()]
    makers.append(lambda: row_wise_section(next(iter(TIMED)), count))
    made = []
    for make in makers:
        made.append(make())
        if dist.get_rank() == 0:
            print("\n".join(made[-1].lines), file=sys.stderr, flush=True)
    return made


OPTIONS: Options = {
    "--turns": {"type": int, "default": 15},
    "--steps": {"type": int, "default": STEPS, "help": "of the losses"},
    "--note": {"default": "", "help": "a word on the machine, printed with the versions"},
}


def run(options: argparse.Namespace) -> Report:
    """Train and print.

    Raises:
        ImportError: TorchRec is not installed.
    """
    libraries.torchrec()
    made = on_ranks(RANKS, sections, options.steps, options.turns)
    how = f"{RANKS} ranks x 1 thread over gloo, load of the machine {os.getloadavg()[1]:.1f}"
    return report_of(made, f"{how}; {options.note}" if options.note else how)

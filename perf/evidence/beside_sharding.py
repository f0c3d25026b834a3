"""Train sharded tables with TorchRec and with shardwise, in turn in the same two processes over gloo.

Run as `python -m shardwise.perf.evidence.beside_sharding [--write docs/beside_torchrec_sharding.md]` where TorchRec 1.8.0 is
installed; that document tells how and keeps what was printed. Exit status 1: losses differ, or there is more time or
are more calls than there may be; 2: no TorchRec.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from ..counts.calls import listed
from .parity import versions
from .sharded_sides import STRATEGIES, Shape, losses, ours, theirs, worst_difference
from .sharded_turns import (
    STAGES,
    Stepper,
    calls_of_forward,
    collectives_of_step,
    exchange_alone,
    stage_times,
    turns,
    used_in_turns,
)

MARK = "<!-- below: as perf/evidence/beside_sharding.py printed it -->"
RANKS, STEPS, LOSS_BOUND = 2, 50, 1e-6
SMALL = Shape(4, 50, 64, 8, 3)
# shapes that are timed, and the largest ratio of our time to theirs
TIMED = {Shape(26, 100_000, 64, 2048, 1): 0.7, Shape(26, 100_000, 64, 2048, 20): 1.0}
# calls of Python in a forward: all, and of our own functions
CALLS = (300, 150)


class Section(NamedTuple):
    """Lines to print, and what in them is not as it has to be."""

    lines: list[str]
    bad: list[str]


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
            both = [losses(side, SMALL, strategy, optimizer, steps) for side in (ours(), theirs())]
            all_ranks: list[Any] = [None] * RANKS
            dist.all_gather_object(all_ranks, both)
            worst = worst_difference([mine for mine, _ in all_ranks], [their for _, their in all_ranks])
            first = all_ranks[0][0]
            lines.append(f"| {strategy} | {name} | {first[0]:.4f}, {first[-1]:.4f} | {worst:.1e} |")
            if not worst <= LOSS_BOUND:
                bad.append(f"losses of {strategy}, {optimizer} differ by {worst:.1e}")
    return Section([*lines, ""], bad)


def time_section(shape: Shape, bound: float, count: int) -> Section:
    """Time, collectives, calls and stages of both sides at one shape."""
    steppers = [Stepper(side, shape, "table_wise", "rowwise_adagrad") for side in (ours(), theirs())]
    mine, their = steppers
    names = [one.side.name for one in steppers]
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, turns(steppers, count))
    lines = [f"## {str(shape)[:1].upper()}{str(shape)[1:]}", "", f"table_wise, rowwise Adagrad, {count} turns.", ""]
    lines += [f"| | {names[0]} ms | {names[1]} ms | ratio, quartiles |", "| --- | --- | --- | --- |"]
    bad = []
    for number, what in enumerate(("clock", "CPU of all threads")):
        # a step takes as long as its slowest rank
        a, b = ([max(rank[name][n][number] for rank in gathered) for n in range(count)] for name in names)
        low, ratio, high = statistics.quantiles([x / y for x, y in zip(a, b, strict=True)], n=4)
        lines.append(
            f"| {what} | {1e3 * statistics.median(a):.1f} | {1e3 * statistics.median(b):.1f}"
            f" | {ratio:.2f} ({low:.2f}-{high:.2f}) |"
        )
        if number == 0 and not ratio <= bound:
            bad.append(f"{shape}: {ratio:.2f} of TorchRec's time, bound {bound}")
    called = [collectives_of_step(one) for one in steppers]
    lines.append(f"| collectives | {called[0].total()} | {called[1].total()} | |")
    counted = [calls_of_forward(one) for one in steppers]
    for number, what in enumerate(("Python calls, third forward", "of them in its own code")):
        lines.append(f"| {what} | {counted[0][number].total()} | {counted[1][number].total()} | |")
    if shape.L == 1:
        bad += [
            f"{found.total()} calls of Python, bound {most}"
            for found, most in zip(counted[0], CALLS, strict=True)
            if found.total() > most
        ]
    lines += ["", *stage_table(mine, count)]
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
    gathered: list[Any] = [None] * RANKS
    dist.all_gather_object(gathered, used)
    lines = [
        f"## Row-wise: {shape}", "",
        f"{count} turns; a step of the clock is that of its slowest rank, the rest is rank 0's.", "",
        "| | sent to each other rank MB | clock ms, quartiles | CPU of all threads ms, quartiles | page faults"
        " | involuntary switches |", "| --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    for name, (_, numbers) in columns.items():
        clock = [max(1e3 * rank[name][n].clock for rank in gathered) for n in range(count)]
        cpu = [1e3 * one.cpu for one in gathered[0][name]]
        faults, switches = (statistics.median(getattr(one, what) for one in gathered[0][name])
                            for what in ("faults", "switches"))  # fmt: skip
        spread = [statistics.quantiles(values, n=4) for values in (clock, cpu)]
        told = [f"{middle:.1f} ({low:.1f}-{high:.1f})" for low, middle, high in spread]
        sent = 2 * 4e-6 * numbers
        lines.append(f"| {name} | {sent:.1f} | {told[0]} | {told[1]} | {faults:.0f} | {switches:.0f} |")
    for what in ("step", "exchange alone"):
        join = " " if what == "step" else ", "
        ratios = {
            number: statistics.median(
                getattr(b, number) / getattr(a, number)
                for a, b in zip(
                    gathered[0][f"table-wise{join}{what}"], gathered[0][f"row-wise{join}{what}"], strict=True
                )
            )
            for number in ("clock", "cpu")
        }
        lines += [
            "",
            f"Row-wise over table-wise, {what}: {ratios['clock']:.2f} of the clock, {ratios['cpu']:.2f} of the CPU.",
        ]
    return Section([*lines, ""], [])


def stage_table(stepper: Stepper, count: int) -> list[str]:
    """Where our step's time goes on rank 0, by the CPU time of its main thread; waiting does not count."""
    steps = []
    for turn in range(count):
        with stage_times(clock=time.thread_time) as found:
            stepper.step(turn)
        steps.append(found)
    dist.barrier()
    middle = {stage: 1e3 * statistics.median([one[stage] for one in steps]) for stage in STAGES}
    whole = sum(middle.values())
    rows = [f"| {stage} | {ms:.2f} | {100 * ms / whole:.0f} % |" for stage, ms in middle.items()]
    return ["| stage of ours | ms of the main thread | |", "| --- | --- | --- |", *rows, ""]


def _rank(rank: int, store: str, answer: Any, options: argparse.Namespace) -> None:
    """What each process does; rank 0 answers with the sections."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS), LOCAL_WORLD_SIZE=str(RANKS))
    c10d: Any = dist
    dist.init_process_group("gloo", store=c10d.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    work: list[Callable[[], Section]] = [lambda: loss_section(options.steps)]
    work += [lambda s=shape, b=bound: time_section(s, b, options.turns) for shape, bound in TIMED.items()]  # type: ignore[misc]
    work.append(lambda: row_wise_section(next(iter(TIMED)), options.turns))
    found = []
    for one in work:
        found.append(one())
        if rank == 0:
            print("\n".join(found[-1].lines), file=sys.stderr, flush=True)
    if rank == 0:
        answer.put(found)
    dist.barrier()
    dist.destroy_process_group()


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help=f"also put it into FILE, below the line {MARK!r}")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--steps", type=int, default=STEPS, help="of the losses")
    parser.add_argument("--note", default="", help="a word on the machine, printed with the versions")
    options = parser.parse_args(argv)
    if options.write and MARK not in options.write.read_text():
        parser.error(f"{options.write} has no line {MARK}")
    try:
        importlib.import_module("torchrec")
        fbgemm = str(importlib.import_module("fbgemm_gpu").__version__)
    except ImportError as error:
        print(
            f"perf/evidence/beside_sharding.py needs TorchRec ({error}): docs/beside_torchrec.md tells how",
            file=sys.stderr,
        )
        return 2
    context = mp.get_context("spawn")
    answer = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        processes: Any = mp
        processes.spawn(_rank, (f"{folder}/store", answer, options), nprocs=RANKS)
        found: list[Section] = answer.get()
    bad = [fault for section in found for fault in section.bad]
    how = f"{RANKS} ranks x 1 thread over gloo, load of the machine {os.getloadavg()[1]:.1f}"
    head = [f"{versions(fbgemm)}; {how}", *([options.note] if options.note else []), ""]
    head += [f"Not as it has to be: {len(bad)}.", "", *(f"- {fault}" for fault in bad), *([""] if bad else [])]
    text = "\n".join([*head, *(line for section in found for line in section.lines)]).rstrip() + "\n"
    print(text)
    if options.write:
        options.write.write_text(f"{options.write.read_text().partition(MARK)[0]}{MARK}\n\n{text}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

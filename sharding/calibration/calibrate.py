"""Measures the constants of the planner's cost model on the machine at hand, in real training steps of small workloads.

Three kinds of measurement, all on all ranks at once: whole steps of `cases`, the lookup of those alone, and exchanges
of several sizes. Each predicts a time that is linear in the constants (in one over them for bandwidths), so the
constants are a least-squares fit that keeps them positive, of relative errors. A time is the median of interleaved
rounds, of the slowest rank.

`cases` are small workloads that differ in one thing at a time, each cut in several ways. Letters: F features of a
table, R rows, D columns, L mean length, B samples of one rank.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.planner.constants_measured import CARDS, FORMAT, NUMBERS, Constants
from shardwise.planner.constraints import ParameterConstraints
from shardwise.planner.cost.cache import Links
from shardwise.planner.cost.shardwise import ShardwiseCost
from shardwise.planner.cost.ways import Way, ways_of
from shardwise.planner.search.problem import PARTS, Floats
from shardwise.planner.tables import Feature, Skew, Table
from shardwise.planner.topology import Topology

from ..comms.env import ShardingEnv
from ..comms.exchange import Exchange
from .trial import Placed, Step, timed

_UNIFORM, _HOT = Skew(), Skew(1.05)


@dataclass(frozen=True)
class Case:
    """A batch size, and tables with the type that each is cut by; whole tables begin at rank `first` and go around."""

    name: str
    batch_size: int
    tables: tuple[tuple[Table, str], ...]
    # the rank of whole tables; None spreads them
    first: int | None = None

    @property
    def is_apart(self) -> bool:
        """Whether a rank's lookup and update are all that the model counts as its computing."""
        return self.first is None and {kind for _, kind in self.tables} <= {"table_wise", "column_wise"}

    def placed(self, topology: Topology) -> list[Placed]:
        """The tables, cut and placed."""
        placed = []
        for number, (table, kind) in enumerate(self.tables):
            way = way_of(table, kind, topology)
            here = (number % topology.world_size) if self.first is None else self.first
            if way.span > 1:
                starts: tuple[int, ...] = (0,) * len(way.widths)
            else:
                starts = tuple((here + block) % topology.world_size for block in range(len(way.widths)))
            placed.append(Placed(table, way, starts))
        return placed


def way_of(table: Table, kind: str, topology: Topology) -> Way:
    """The way of this type that has the most blocks."""
    asked = ParameterConstraints(sharding_types=[kind], min_partition=4)
    return ways_of(table, topology, asked)[-1]


def _tables(
    count: int,
    R: int = 20_000,
    D: int = 64,
    L: float = 4,
    F: int = 1,
    *,
    optimizer: str | None = "RowWiseAdagrad",
    pooled: bool = True,
    skew: Skew = _UNIFORM,
) -> list[Table]:
    return [
        Table(
            f"t{t}", R, D, features=tuple(Feature(f"t{t}f{f}", L) for f in range(F)), pooled=pooled,
            optimizer=optimizer, skew=skew,
        )
        for t in range(count)
    ]  # fmt: skip


def _all(tables: Sequence[Table], kind: str) -> tuple[tuple[Table, str], ...]:
    return tuple((table, kind) for table in tables)


# the case that is next to no work
NOTHING = "nothing"
_CUTS = ("table_wise", "row_wise", "column_wise", "data_parallel")


def cases() -> list[Case]:
    """All of them."""
    all_cases = [Case(NOTHING, 1, _all(_tables(1, R=100, D=4, L=1), "table_wise"))]
    shapes: dict[str, tuple[int, list[Table]]] = {
        "one id": (1024, _tables(8, L=1)),
        "bags": (1024, _tables(4, L=20)),
        "narrow": (1024, _tables(8, D=8, L=10)),
        "wide": (512, _tables(2, D=256, L=10)),
        "few rows": (1024, _tables(4, R=500, L=20)),
        "many rows": (2048, _tables(2, R=300_000, D=32, L=10)),
        "hot": (1024, _tables(4, L=20, skew=_HOT)),
        "sequences": (256, _tables(4, L=20, pooled=False)),
    }
    for name, (batch, tables) in shapes.items():
        all_cases += [Case(f"{name}, {kind}", batch, _all(tables, kind)) for kind in _CUTS]
        all_cases.append(Case(f"{name}, on rank 0", batch, _all(tables, "table_wise"), first=0))
    all_cases += [Case(f"many features, {kind}", 16, _all(_tables(40, R=1000, D=8, L=1), kind)) for kind in _CUTS]
    all_cases += [
        Case("many features of a table", 16, _all(_tables(4, R=1000, D=8, L=1, F=10), "table_wise")),
        Case("Adam", 1024, _all(_tables(4, L=10, optimizer="Adam"), "table_wise")),
        Case("dense gradients", 512, _all(_tables(4, R=5000, L=4, optimizer=None), "data_parallel")),
    ]
    return all_cases


Progress = Callable[[int, int], None]

# fp32 numbers that each rank sends to each
_SIZES = (1, 1 << 12, 1 << 15, 1 << 18, 1 << 20)
_WARM_UP, _FEWEST_ROUNDS = 2, 3
# a constant that costs nothing that could be measured: a bandwidth of so many GB/s
_MOST_GB_S = 1e4
# the relative error that a constant twice its preset counts as
_NEAR = 0.03


@dataclass(frozen=True)
class Measured:
    """A time and what it is of: a case's "step", or its "lookup" or "update" alone; an "exchange" of `numbers`."""

    what: str
    name: str
    ms: float
    numbers: int = 0


def calibrate(
    world_size: int = 2,
    device: str = "cpu",
    *,
    seconds: float = 60.0,
    out: str | Path | None = None,
    progress: Progress | None = None,
    threads: int = 1,
    chosen: Sequence[Case] | None = None,
) -> Constants:
    """The constants of this machine, measured by `world_size` processes on it that are started here.

    Args:
        device: "cpu" (gloo) or "cuda" (NCCL; process r takes GPU r).
        seconds: about how long to measure, after models were built.
        out: JSON file to write, with the measurements.
        progress: told how many rounds are done, of how many.
        threads: of each process.
        chosen: cases, by default all of `cases`.

    Raises:
        ValueError: fewer than two processes, or fewer GPUs than processes.
        RuntimeError: a process ended.
    """
    if world_size < 2:
        raise ValueError(f"calibration measures exchanges: it needs 2 processes or more, got {world_size}")
    if device == "cuda" and torch.cuda.device_count() < world_size:
        raise ValueError(f"{world_size} processes need as many GPUs, there are {torch.cuda.device_count()}")
    context: Any = torch.multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="calibrate") as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, world_size, device, folder, seconds, threads, chosen, theirs))
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        theirs.close()
        try:
            measured = _receive(ours, ranks, progress)
        finally:
            for process in ranks:
                process.join(10)
                if process.is_alive():
                    process.kill()
    constants = fit(measured, Topology(world_size, device), f"{world_size} {device} ranks of {threads} threads", chosen)
    if out is not None:
        constants.save(out, {"times": [asdict(measurement) for measurement in measured]})
    return constants


def _receive(conn: Connection, ranks: Sequence[Any], progress: Progress | None) -> list[Measured]:
    """Measurements of rank 0; its reports of progress are passed on meanwhile."""
    while True:
        if not conn.poll(1.0):
            ended = [rank for rank, process in enumerate(ranks) if process.exitcode not in (None, 0)]
            if ended:
                raise RuntimeError(f"calibration: the process of rank {ended[0]} ended, see its output")
            continue
        try:
            kind, payload = conn.recv()
        except EOFError:
            raise RuntimeError("calibration: the processes ended, see their output") from None
        if kind == "found":
            return list(payload)
        if progress is not None:
            progress(*payload)


def _rank(
    rank: int,
    world_size: int,
    device: str,
    folder: str,
    seconds: float,
    threads: int,
    chosen: Sequence[Case] | None,
    conn: Connection,
) -> None:
    """One process."""
    torch.set_num_threads(threads)
    os.environ.setdefault("LOCAL_RANK", str(rank))
    here = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(here)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo", f"file://{folder}/store", rank=rank, world_size=world_size
    )
    try:
        assert dist.group.WORLD is not None
        env = ShardingEnv.from_process_group(dist.group.WORLD)
        report: Progress | None = (lambda *done: conn.send(("progress", done))) if rank == 0 else None
        measured = measure(env, here, seconds=seconds, progress=report, chosen=chosen)
        if rank == 0:
            conn.send(("found", measured))
    finally:
        dist.destroy_process_group()


def measure(
    env: ShardingEnv,
    device: torch.device,
    *,
    seconds: float,
    progress: Progress | None = None,
    chosen: Sequence[Case] | None = None,
) -> list[Measured]:
    """Times of all measurements, in milliseconds of the slowest rank; all ranks call it together.

    Rounds go over all cases, until `seconds` are over on rank 0; at least three.
    """
    topology = Topology(env.world_size, device.type, local_world_size=env.local_world_size)
    exchange = Exchange(env.process_group)
    picked = cases() if chosen is None else list(chosen)
    steps: list[Step] = []
    calls: list[tuple[str, str, int, Callable[[], object]]] = []
    for size in _SIZES:
        sent = torch.zeros(size * env.world_size, device=device)
        each = [size] * env.world_size
        calls.append(("exchange", f"{size} numbers", size, partial(_exchange, exchange, sent, each)))
    for case in picked:
        step = Step(case.placed(topology), case.batch_size, env, device)
        calls.append(("step", case.name, 0, step))
        steps.append(step)
    times: list[list[float]] = [[] for _ in calls]
    # of each case whose lookup and update are of one rank's own making
    apart = {n: (list[float](), list[float]()) for n, case in enumerate(picked) if case.is_apart}
    begin, rounds, planned = time.perf_counter(), 0, _WARM_UP + _FEWEST_ROUNDS
    while rounds < planned:
        for (_, _, _, call), samples in zip(calls, times, strict=True):
            exchange.numbers(torch.zeros(env.world_size, device=device)).wait()
            samples.append(timed(call, device))
        for n, both in apart.items():
            exchange.numbers(torch.zeros(env.world_size, device=device)).wait()
            for samples, ms in zip(both, steps[n].alone(device), strict=True):
                samples.append(ms)
        rounds += 1
        if rounds == _WARM_UP:
            begin = time.perf_counter()
        if rounds > _WARM_UP:
            each_s = (time.perf_counter() - begin) / (rounds - _WARM_UP)
            # rank 0 says how many there will be
            more = torch.tensor([max(0, (seconds - (time.perf_counter() - begin)) // each_s)], device=device)
            planned = max(planned, rounds + int(exchange.numbers(more.repeat(env.world_size)).wait()[0]))
            if progress is not None:
                progress(rounds - _WARM_UP, planned - _WARM_UP)
    named = [(what, name, size, samples) for (what, name, size, _), samples in zip(calls, times, strict=True)]
    for n, both in apart.items():
        named += [(what, picked[n].name, 0, samples) for what, samples in zip(("lookup", "update"), both, strict=True)]
    own = torch.tensor([median(samples[_WARM_UP:]) for *_, samples in named], device=device)  # [M]
    of_all = exchange.numbers(own.repeat(env.world_size)).wait().view(env.world_size, -1)  # [W, M]
    slowest = of_all.max(dim=0).values.tolist()
    return [Measured(what, name, ms, size) for (what, name, size, _), ms in zip(named, slowest, strict=True)]


def _exchange(exchange: Exchange, sent: Tensor, each: Sequence[int]) -> None:
    exchange.rows(sent, each, each).wait()


def fit(
    measured: Sequence[Measured], topology: Topology, where: str, chosen: Sequence[Case] | None = None
) -> Constants:
    """The constants, at least 0, with the least sum of squared relative errors.

    A constant that the measurements say little of stays near the device's preset: that it leaves it counts as a small
    error too. Where all ranks are on one host, other hosts are taken to be as near.
    """
    by_name = {case.name: case for case in (cases() if chosen is None else chosen)}
    parts = {name: _linear(case, topology) for name, case in by_name.items()}
    measured = _without_calls(measured)
    ranks = [_of_ranks(measurement, parts, topology) for measurement in measured]  # M of [W, C]
    target = np.array([measurement.ms for measurement in measured])  # [M]
    now = preset = _vector(CARDS["cpu" if topology.compute_device == "cpu" else "h100"].constants)
    near = _NEAR * np.eye(len(preset))  # [C, C]
    wanted = np.concatenate([np.ones(len(target)), _NEAR * np.ones(len(preset))])
    # which rank is the slowest depends on the constants
    for _ in range(8):
        rows = np.stack([of_case[int(np.argmax(of_case @ now))] for of_case in ranks])  # [M, C]
        now = preset * least_squares(np.concatenate([rows / target[:, None] * preset, near]), wanted)
    constants = _constants(now, f"measured: {where}")
    several = topology.local_world_size < topology.world_size
    return constants if several else constants.with_(inter_gb_s=constants.intra_gb_s)


@dataclass(frozen=True)
class Brought:
    """What a cached table's batch took more than that of a table which is on the device as a whole.

    Args:
        wanted, missed: its distinct rows, and those of them that had no slot.
        record_bytes: of a row below the device.
        ms: more, in milliseconds.
        share: of the whole step, to which errors are relative.
    """

    wanted: float
    missed: float
    record_bytes: int
    ms: float
    share: float = 1.0


def fit_links(measured: Sequence[Brought]) -> Links:
    """How fast rows come and go, at least 0, with the least sum of squared errors relative to whole steps."""
    rows = np.array([[m.missed * m.record_bytes, m.missed, m.wanted, 1.0] for m in measured])
    whole = np.array([m.ms / m.share for m in measured])
    of_byte, of_miss, of_row, of_batch = least_squares(
        rows / whole[:, None], np.array([m.share for m in measured])
    ).tolist()
    link = min(_MOST_GB_S, 1e-6 / of_byte) if of_byte > 0 else _MOST_GB_S
    return Links(link_gb_s=link, find_ns=1e6 * of_row, miss_ns=1e6 * of_miss, batch_us=1e3 * of_batch)


def _linear(case: Case, topology: Topology) -> Floats:
    """Each constant's coefficient in each part of each rank's time, of 1 / bandwidth: [P, W, constants]."""
    placed = case.placed(topology)
    units = [rank_ms(placed, ShardwiseCost(topology, case.batch_size, unit)) for unit in _UNITS]
    return np.stack(units, axis=2)


def _of_ranks(measurement: Measured, parts: Mapping[str, Floats], topology: Topology) -> Floats:
    """Each constant's coefficient in the time of each rank: [W, constants]."""
    if measurement.what == "exchange":
        terms = np.zeros((1, len(NUMBERS)))
        received = 4 * measurement.numbers * (topology.world_size - 1)
        terms[0, NUMBERS.index("exchange_us")], terms[0, NUMBERS.index("intra_gb_s")] = 1e-3, received * 1e-6
        return terms
    picked = {"lookup": [PARTS.index("fwd_compute")], "update": [PARTS.index("bwd_compute")]}.get(measurement.what)
    of_case = parts[measurement.name]
    total: Floats = (of_case if picked is None else of_case[picked]).sum(axis=0)
    return total


def _vector(constants: Constants) -> Floats:
    """The constants as times are linear in them, 1 / bandwidth: [constants]."""
    values = {name: getattr(constants, name) for name in NUMBERS}
    return np.array([1 / value if name.endswith("_gb_s") else value for name, value in values.items()])


def _without_calls(measured: Sequence[Measured]) -> list[Measured]:
    """Lookups and updates without what one takes that has nothing to do: that is part of the step's own time.

    Those that take little more are left out.
    """
    least = {measurement.what: measurement.ms for measurement in measured if measurement.name == NOTHING}
    corrected = []
    for measurement in measured:
        if measurement.what not in ("lookup", "update"):
            corrected.append(measurement)
        elif measurement.ms > 2 * least.get(measurement.what, 0.0):
            corrected.append(replace(measurement, ms=measurement.ms - least.get(measurement.what, 0.0)))
    return corrected


def rank_ms(placed: Sequence[Placed], cost: ShardwiseCost) -> Floats:
    """Time of each rank by `PARTS` [P, W] that the model predicts for placed tables."""
    total = np.zeros((len(PARTS), cost.topology.world_size))
    total[PARTS.index("overhead")] += cost.base_ms([item.table for item in placed])
    for item in placed:
        choice = cost.price(item.table, item.way)
        for block, start in enumerate(item.starts):
            total[:, start : start + choice.span] += choice.parts_ms[:, block]
    return total


# constants of which one is 1 and all others cost nothing
_FREE = {name: 1e30 if name.endswith("_gb_s") else 0.0 for name in NUMBERS}
_UNITS = [Constants.from_json({"format": FORMAT, **_FREE, name: 1.0}) for name in NUMBERS]


def _constants(solution: Floats, source: str) -> Constants:
    values: dict[str, Any] = {}
    for name, value in zip(NUMBERS, solution.tolist(), strict=True):
        values[name] = (min(_MOST_GB_S, 1 / value) if value > 0 else _MOST_GB_S) if name.endswith("_gb_s") else value
    return Constants(**values, source=source)


def least_squares(rows: Floats, target: Floats) -> Floats:
    """x >= 0 with the least |rows x - target| [constants], by active sets (Lawson and Hanson 1974)."""
    scale = np.maximum(np.abs(rows).max(axis=0), 1e-300)
    scaled = rows / scale
    chosen = np.zeros(rows.shape[1], bool)
    x = np.zeros(rows.shape[1])
    for _ in range(3 * rows.shape[1]):
        slope = scaled.T @ (target - scaled @ x)
        slope[chosen] = -np.inf
        best = int(np.argmax(slope))
        if slope[best] <= 1e-10:
            break
        chosen[best] = True
        while True:
            trial = np.zeros_like(x)
            trial[chosen] = np.linalg.lstsq(scaled[:, chosen], target, rcond=None)[0]
            below = chosen & (trial <= 0)
            if not below.any():
                break
            # as far as the first one that becomes 0
            step = float((x[below] / (x[below] - trial[below])).min())
            x = x + step * (trial - x)
            chosen &= x > 1e-15
            x[~chosen] = 0
        x = trial
    result: Floats = x / scale
    return result

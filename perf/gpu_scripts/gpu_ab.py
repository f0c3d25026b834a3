"""Time the variants of gpu_variants.py beside the default on the shapes that decide, interleaved, and say what to take.

For a shape every variant first has to give the default's bits, on the same batch over small tables; one that does not,
that fails, or that no launch asks for is dropped and named. The others are captured in CUDA graphs and replayed in
turn, round by round, on inputs that rotate and after a read of four times the L2, so that what disturbs the machine
disturbs all. A round's ratio is a variant's time over the default's of the same input in the same round.
"""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import median
from typing import Any

import torch

from shardwise.kernels._op import HAS_TRITON, INTERPRETED
from shardwise.perf.gpu_scripts.gpu_shapes import (
    RULE,
    SHAPES,
    Call,
    Shape,
    batches_of,
    calls_of,
    checked,
    memory_of,
    results_of,
    sized,
)
from shardwise.perf.gpu_scripts.gpu_sizes import Sizes
from shardwise.perf.gpu_scripts.gpu_variants import VARIANTS, Variant
from shardwise.perf.suite.batches import lookup_bytes, update_bytes
from shardwise.perf.suite.case import in_a_line
from shardwise.perf.suite.timing import (
    CudaTurns,
    four_digits,
    gb_per_s,
    graphs_of,
)
from shardwise.perf.suite.workloads import Workload
from shardwise.perf.tune.tuner import same_bits

# a variant is taken that is so much faster on one shape and on no other slower by more
GAIN, LOSS = 0.98, 1.01
OTHER_BITS = "gives other bits than the default"
CONTROL = "the default again"
# of the time of a shape that may go into compiling and checking variants
CHECKED_SHARE = 0.6
# what is executed on a CPU: runs of one id and of many, more ids than one program indexes
EXECUTED = Shape(
    "A", "two tables of 60 and 3000 rows", Workload("executed", (60, 3000), 128, 56, (20.0, 20.0), fixed=False)
)
# to execute a kernel takes longer than to launch it
EXECUTED_SHARE = 4
# rounds after which a shape may be left for want of time
FEWEST_ROUNDS = 3


@dataclass(frozen=True)
class Row:
    """A variant on a shape: median time, and median, tenth and ninetieth percentile of the ratios to the default."""

    variant: str
    call: str
    shape: str
    us: float
    ratio: float
    p10: float
    p90: float
    rounds: int


@dataclass(frozen=True)
class Dropped:
    """A variant that was not timed on a shape, and why."""

    variant: str
    call: str
    shape: str
    why: str


@dataclass
class Compared:
    """What an A/B found."""

    shapes: list[dict[str, Any]] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    dropped: list[Dropped] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def ab(device: str, sizes: Sizes) -> dict[str, Any]:
    """Compare on all shapes within `sizes.ab_s` seconds; has the rows, what was dropped, and a verdict a variant."""
    compared, deadline = Compared(), time.monotonic() + sizes.ab_s
    shapes = [shape for shape in SHAPES.values() if any(shape.name in variant.shapes for variant in VARIANTS)]
    not_run = []
    for place, shape in enumerate(shapes):
        left = deadline - time.monotonic()
        if left <= 0:
            not_run.append(shape.name)
            continue
        fitting = sized(shape, memory_of(device), small=sizes.small)
        compare(compared, fitting, device, sizes.ab_rounds, time.monotonic() + left / (len(shapes) - place))
        if device == "cuda":
            # the next shape's tables are of another size
            torch.cuda.empty_cache()
    return {
        "shapes": compared.shapes,
        "rows": [asdict(row) for row in compared.rows],
        "dropped": [asdict(entry) for entry in compared.dropped],
        "verdicts": verdicts(compared.rows),
        "noise": noise(compared.rows),
        "shapes_not_run": not_run,
        "notes": compared.notes,
        "rule": (
            f"take: the same bits, {1 - GAIN:.0%} faster on a shape and beyond its noise, on none slower by more than"
            f" {LOSS - 1:.0%}"
        ),
    }


def executed(sizes: Sizes) -> dict[str, Any]:
    """The variants' bits beside the default's, every launch compiled for sm_90 and executed on this machine's CPU."""
    launches: Any = importlib.import_module("shardwise.perf.gpu.launches")
    compared, deadline = Compared(), time.monotonic() + EXECUTED_SHARE * sizes.ab_s
    variants = [_fewer_programs(v) for v in VARIANTS if EXECUTED.name in v.shapes and v.call != "module"]
    with launches.executed() as log:
        kept = with_the_same_bits(compared, EXECUTED, "cpu", variants, deadline, launches=True)
        same = [f"{variant.call}: {variant.name}" for variant in kept]
    return {
        "executed": same, "dropped": [asdict(entry) for entry in compared.dropped], "launches": len(log.launches),
        "failed": sorted({*log.faults, *(str(entry) for entry in compared.dropped if entry.why == OTHER_BITS)}),
    }  # fmt: skip


def _fewer_programs(variant: Variant) -> Variant:
    """So many programs fewer as there are fewer rows: a program then has several parts of the work, as on a device."""
    settings = dict(variant.settings)
    programs = settings.get("update.programs")
    if isinstance(programs, int):
        settings["update.programs"] = max(1, programs // 264)
    return replace(variant, settings=settings)


def compare(compared: Compared, shape: Shape, device: str, rounds: int, deadline: float) -> None:
    """Check and time the variants of one shape."""
    variants = [variant for variant in VARIANTS if shape.name in variant.shapes]
    now = time.monotonic()
    # on CPU tensors torch does the work, which asks for no settings
    launches = (device != "cpu" and HAS_TRITON) or INTERPRETED
    until = now + (deadline - now) * CHECKED_SHARE
    kept = list(with_the_same_bits(compared, checked(shape), device, variants, until, launches))
    batches = batches_of(shape, device)
    about: dict[str, Any] = {
        "shape": shape.name, "about": shape.about, "scaled": shape.scaled, "inputs": len(batches), "ids": shape.ids,
        "tables_gb": round(batches[0].weights.numel() * batches[0].weights.itemsize / 1e9, 2), "default": {},
    }  # fmt: skip
    moved = {"forward": lookup_bytes(batches[0]), "backward": update_bytes(batches[0], RULE)}
    for call in dict.fromkeys(variant.call for variant in variants):
        timed = [variant for variant in kept if variant.call == call]
        if call == "module":
            # a collection has tables of its own, and a card may not hold both
            batches = [replace(batch, weights=batch.weights[:1].clone()) for batch in batches]
            if device == "cuda":
                torch.cuda.empty_cache()
        default, rows = _timed(compared, shape, call, timed, calls_of(batches, call), device, rounds, deadline)
        about["default"][call] = {"us": four_digits(default)}
        if call in moved:
            about["default"][call] |= {"bytes": int(moved[call]), "gb_per_s": gb_per_s(moved[call], default)}
        compared.rows += rows
    compared.shapes.append(about)


def with_the_same_bits(
    compared: Compared, shape: Shape, device: str, variants: Sequence[Variant], deadline: float, launches: bool
) -> Iterator[Variant]:
    """The variants that give the default's bits on a batch of the shape; why not is noted of the others.

    Where kernels are launched, one that forces what no launch asks for is none.
    """
    batch = batches_of(shape, device, 1)[0]
    expected = {call: results_of(batch, call) for call in {variant.call for variant in variants}}
    for variant in variants:
        why = ""
        if time.monotonic() > deadline:
            why = "no time was left to check it"
        else:
            try:
                with variant.forced():
                    got = results_of(batch, variant.call)
                    unread = variant.unread
            # a compiler may fail in any way, and the others are still worth their time
            except Exception as error:
                why = f"fails: {in_a_line(error)}"
            else:
                if launches and unread:
                    why = f"no launch asks for {', '.join(unread)}"
                elif not all(map(same_bits, got, expected[variant.call])):
                    why = OTHER_BITS
        if why:
            compared.dropped.append(Dropped(variant.name, variant.call, shape.name, why))
        else:
            yield variant


def _timed(
    compared: Compared,
    shape: Shape,
    call: str,
    variants: Sequence[Variant],
    calls: Sequence[Call],
    device: str,
    rounds: int,
    deadline: float,
) -> tuple[float, list[Row]]:
    """Median microseconds of the default, and the rows of the variants."""
    # one for all graphs: none is replayed beside another, and none reads what another leaves
    pool = torch.cuda.graph_pool_handle() if device == "cuda" else None
    try:
        default = _ready(None, calls, pool)
    # what cannot be captured is timed as it is, its launches hidden behind the read of the cache where they fit
    except Exception as error:
        torch.cuda.synchronize()
        compared.notes.append(f"{shape.name} {call} is not captured: {in_a_line(error)}")
        pool, default = None, calls
    entries: list[tuple[Variant | None, Sequence[Call]]] = [(None, default)]
    for variant in variants:
        try:
            entries.append((variant, _ready(variant, calls, pool)))
        except Exception as error:
            compared.dropped.append(Dropped(variant.name, call, shape.name, in_a_line(error)))
    times: list[list[float]] = [[] for _ in entries]
    turns = CudaTurns() if device == "cuda" else None
    for number in range(rounds):
        if number >= FEWEST_ROUNDS and time.monotonic() > deadline:
            break
        # each begins a round in turn
        first = number % len(entries)
        order = [*range(first, len(entries)), *range(first)]
        for place, us in zip(order, _round([entries[place] for place in order], number, turns), strict=True):
            times[place].append(us)
    rows = []
    for (timed, _), taken in zip(entries, times, strict=True):
        if timed is not None:
            ratios = sorted(us / base for us, base in zip(taken, times[0], strict=True))
            low, high = (ratios[round(q * (len(ratios) - 1))] for q in (0.1, 0.9))
            rows.append(
                Row(
                    timed.name,
                    call,
                    shape.name,
                    four_digits(median(taken)),
                    round(median(ratios), 4),
                    round(low, 4),
                    round(high, 4),
                    len(taken),
                )  # fmt: skip
            )
    return median(times[0]), rows


def _ready(variant: Variant | None, calls: Sequence[Call], pool: Any) -> Sequence[Call]:
    """The calls as graphs with the variant in them; without a pool of graphs, calls that force it each time."""
    if variant is None:
        return graphs_of(calls, pool) if pool else calls
    if pool:
        with variant.forced():
            return graphs_of(calls, pool)

    def under(call: Call) -> Call:
        def forced() -> None:
            with variant.forced():
                call()

        return forced

    return [under(call) for call in calls]


def _round(
    entries: Sequence[tuple[Variant | None, Sequence[Call]]], number: int, turns: CudaTurns | None
) -> list[float]:
    """Microseconds of one call of each, all on the same input."""
    if turns is not None:
        for _, calls in entries:
            turns.begin(calls[number % len(calls)], eager=False)
        return [1e6 * seconds for seconds in turns.finish()]
    return [_wall_us(calls[number % len(calls)]) for _, calls in entries]


def _wall_us(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def verdicts(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Of each variant "take", "leave" or "no difference", and the largest gain and loss; those to take come first.

    A gain counts that is more than twice as far from 1 as the default is from itself on that shape.
    """
    decisions, apart = [], noise(rows)
    for call, name in dict.fromkeys((row.call, row.variant) for row in rows if row.variant != CONTROL):
        ratios = {row.shape: row.ratio for row in rows if (row.call, row.variant) == (call, name)}
        best, worst = min(ratios.values()), max(ratios.values())
        gains = any(ratio <= min(GAIN, 1 - 2 * apart.get(f"{shape} {call}", 0.0)) for shape, ratio in ratios.items())
        decision = "leave" if worst > LOSS else "take" if gains else "no difference"
        mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        decisions.append(
            {
                "variant": name,
                "call": call,
                "verdict": decision,
                "best": best,
                "worst": worst,
                "mean": round(mean, 4),
                "shapes": len(ratios),
            }  # fmt: skip
        )
    order = ("take", "leave", "no difference")
    return sorted(decisions, key=lambda entry: (entry["call"], order.index(str(entry["verdict"])), entry["mean"]))


def noise(rows: Sequence[Row]) -> Mapping[str, float]:
    """How far the default is from itself on each shape and call."""
    return {f"{row.shape} {row.call}": round(abs(row.ratio - 1), 4) for row in rows if row.variant == CONTROL}

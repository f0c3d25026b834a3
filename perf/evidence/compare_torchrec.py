"""The operations of TorchRec's jagged types and of FBGEMM's jagged ops on both libraries: equal, different, slower?

What is compared and timed are the cases of the suite "operations" (perf/suite/cases/operations.py), which `perf run
--suite operations --peers` measures too. docs/evidence/beside_torchrec.md tells how and keeps what was printed. Not as
it has to be: a result differs that DIFFERENT does not name, an operation is missing or a bound is broken.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.kernels import numba_loops
from shardwise.perf.evidence.report import Report, grid, versions
from shardwise.perf.suite import libraries
from shardwise.perf.suite.case import OURS, Setting, chosen
from shardwise.perf.suite.cases import operations
from shardwise.perf.suite.cases.operations import (
    OPERATIONS,
    SIZES,
    name_of,
    reason,
)
from shardwise.perf.suite.measure import Budget, run as measure
from shardwise.perf.suite.operations.operation import Operation, Size
from shardwise.perf.suite.options import FLAG, Options
from shardwise.perf.suite.record import Record, median, ratio

PEER = "torchrec"
# a call of ours that takes less is fast enough, whatever TorchRec's takes
FREE_US = 20.0
BUDGET = Budget(laps=1, rounds=25, seconds=0.25, limit_s=math.inf)


@dataclass(frozen=True)
class Bounds:
    """Largest ratios of our time to theirs that are allowed.

    `mean`: geometric mean of everything; `each`: every operation at every size; `operation`: geometric mean of an
    operation over its sizes. The last two leave out calls of ours under FREE_US.
    """

    mean: float = math.inf
    each: float = math.inf
    operation: float = math.inf

    def __str__(self) -> str:
        words = {"geometric mean of all": self.mean, "of an operation": self.operation, "each ratio": self.each}
        return ", ".join(f"{label} {bound:g}" for label, bound in words.items() if bound < math.inf)


TYPES = Bounds(mean=0.8, each=1.3)
# with numba, and on torch alone
OPS = {True: Bounds(operation=1.0), False: Bounds(operation=3.0)}
TITLES = {"types": "Operations of the jagged types", "ops": "Jagged ops"}


@dataclass(frozen=True)
class Row:
    """What one operation gave at one size. `wrong` is "" where the results are equal; times are medians, in us."""

    operation: str
    size: Size
    wrong: str = ""
    ours_us: float = math.nan
    theirs_us: float = math.nan
    ratios: tuple[float, float, float] = (math.nan, math.nan, math.nan)

    @property
    def ratio(self) -> float:
        """Median of our time over theirs."""
        return self.ratios[1]

    @property
    def timed(self) -> bool:
        return not math.isnan(self.ratio)

    @property
    def free(self) -> bool:
        """Whether only the mean of everything counts this row."""
        return not self.timed or self.ours_us < FREE_US

    def __str__(self) -> str:
        low, middle, high = self.ratios
        return (
            f"{self.operation}, {self.size}: {self.ours_us:.4g} us, theirs {self.theirs_us:.4g} us,"
            f" ratio {middle:.2f} ({low:.2f}-{high:.2f})"
        )


def rows_of(
    listed: Sequence[Operation], records: Mapping[str, Record], failures: Mapping[str, str]
) -> dict[str, list[Row]]:
    """What was measured of each operation, at all its sizes."""
    by_operation: dict[str, list[Row]] = {}
    for operation in listed:
        for size in SIZES:
            name = name_of(operation, size)
            if name in failures:
                row = Row(operation.name, size, failures[name].removeprefix("AssertionError: "))
            elif name in records and (ratios := ratio(records[name], PEER)):
                times = [1e6 * median(records[name], who) for who in (OURS, PEER)]
                wrong = "differs" if "different" in records[name].notes else ""
                row = Row(operation.name, size, wrong, times[0], times[1], ratios)
            else:
                continue
            by_operation.setdefault(operation.name, []).append(row)
    return by_operation


def verdict(rows: Sequence[Row], bounds: Bounds) -> str:
    """What is said of one operation at all its sizes; in capitals what makes the exit status 1."""
    wrong, why = next((row for row in rows if row.wrong), None), reason(rows[0].operation)
    if wrong is not None and wrong.wrong.startswith("missing"):
        return f"MISSING {wrong.wrong.removeprefix('missing: ')}"
    if wrong is not None and not why:
        return f"DIFFERENT at {wrong.size}: {wrong.wrong}"
    if slow := slow_rows(rows, bounds):
        return f"SLOWER ({geometric_mean(slow):.2f}) at {', '.join(str(row.size) for row in slow)}"
    return f"different: {why}" if wrong is not None else "equal"


def slow_rows(rows: Sequence[Row], bounds: Bounds) -> list[Row]:
    """What of an operation is beyond its bound: a size, or all that count where its mean is."""
    counted = [row for row in rows if not row.free]
    if counted and geometric_mean(counted) > bounds.operation:
        return counted
    return [row for row in counted if row.ratio > bounds.each]


def geometric_mean(rows: Sequence[Row]) -> float:
    """Of the ratios; nan without any."""
    ratios = [row.ratio for row in rows if row.timed]
    return statistics.geometric_mean(ratios) if ratios else math.nan


def table(title: str, rows: Mapping[str, Sequence[Row]], bounds: Bounds) -> tuple[list[str], bool]:
    """A section as lines of text, and whether it is as it has to be."""
    everything = [row for of_operation in rows.values() for row in of_operation]
    statuses = {name: verdict(of_operation, bounds) for name, of_operation in rows.items()}
    bad = [name for name in rows if statuses[name].split()[0].isupper()]
    sizes = [size for size in SIZES if any(row.size == size for row in everything)]
    of_sizes = [[row for row in everything if row.size == size] for size in sizes]
    means = [geometric_mean(of_size) for of_size in (*of_sizes, everything)]
    cells = [
        [name, *(_ratio([row for row in of_operation if row.size == size]) for size in sizes), statuses[name]]
        for name, of_operation in rows.items()
    ]
    slow = [row for row in everything if not row.free and row.ratio > TYPES.each]
    lines = [
        f"## {title}", "",
        f"{len(rows)} operations, {len(bad)} of them missing, different or slower than they may be. Our time over"
        f" TorchRec's, median and quartiles. Bounds: {bounds}; a call of ours that takes less than"
        f" {FREE_US:g} us counts in the mean of all alone.", "",
        *grid(["operation", *map(str, sizes), "verdict"], cells),
        "", *grid(["geometric mean", *map(str, sizes), "all"], [["ratio", *(f"{mean:.2f}" for mean in means)]]), "",
        *_list(f"Above {TYPES.each:g} and not under {FREE_US:g} us", sorted(slow, key=lambda row: -row.ratio)),
        *_list("Different as docs/reference/differences.md says",
               (f"{name}: {reason(name)}" for name in rows if statuses[name].startswith("different"))),
    ]  # fmt: skip
    return lines, not bad and not means[-1] > bounds.mean


def _list(title: str, items: Any) -> list[str]:
    lines = [f"- {line}" for line in items]
    return [f"{title}: {len(lines)}.", "", *lines, *([""] if lines else [])]


def _ratio(rows: Sequence[Row]) -> str:
    if not rows or not rows[0].timed:
        return ""
    low, middle, high = rows[0].ratios
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def report(sections: Sequence[str], compiled: bool, only: str = "", budget: Budget = BUDGET) -> tuple[str, bool]:
    """Measure what matches `only`, a regular expression for the names of cases; the tables, and whether all is good."""
    try:
        cases = chosen(operations.CASES, ["operations"], "cpu", only)
    except ValueError:
        return f"No operation matches {only!r}.\n", False

    def print_case(name: str, lap: int, place: int) -> None:
        print(f"{place + 1} of {len(cases)}: {name}", file=sys.stderr)

    measured = measure(cases, Setting(peers=frozenset({PEER})), budget, tell=print_case)
    records = {record.name: record for record in measured.records}
    failures = {failure.name: failure.error for failure in measured.failures}
    bounds = {"types": TYPES, "ops": OPS[compiled]}
    tables = [
        table(TITLES[name], rows, bounds[name])
        for name in sections
        if (rows := rows_of(OPERATIONS[name], records, failures))
    ]
    text = "\n".join("\n".join(lines) for lines, _ in tables).rstrip() + "\n"
    return text, bool(tables) and all(good for _, good in tables)


OPTIONS: Options = {
    "--only": {"default": "", "metavar": "REGEX", "help": "of 'operations: fresh operation, keys x batch'"},
    "--sections": {"nargs": "+", "choices": list(TITLES), "default": list(TITLES)},
    "--threads": {"type": int, "default": 2},
    "--torch-alone": {**FLAG, "help": "ours without numba"},
}


def run(options: argparse.Namespace) -> Report:
    """Measure and print.

    Raises:
        ImportError: TorchRec is not installed.
    """
    libraries.torchrec()
    torch.set_num_threads(options.threads)
    with ExitStack() as stack:
        if options.torch_alone:
            stack.enter_context(libraries.without_numba())
        compiled = numba_loops.loops("update_loops") is not None
        text, good = report(options.sections, compiled, options.only)
    how = f"{options.threads} threads, ours {'with numba' if compiled else 'on torch alone'}"
    return Report(f"{versions()}; {how}, load of the machine {os.getloadavg()[1]:.1f}\n\n{text}", good)

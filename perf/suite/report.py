"""Reports of measurements: a table for the terminal and rows for the page (perf/suite/report_html.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from shardwise.perf.suite import record
from shardwise.perf.suite.case import PEERS
from shardwise.perf.suite.compare import Change, Comparison, Verdict
from shardwise.perf.suite.record import Record
from shardwise.perf.suite.storage import Stored

if TYPE_CHECKING:
    from rich.table import Table


@dataclass(frozen=True)
class Row:
    """A case in words: columns by name, empty where there is nothing to say."""

    group: str
    name: str
    cells: Mapping[str, str]


def duration(seconds: float) -> str:
    """With a unit that fits."""
    unit, of = next((pair for pair in (("s", 1.0), ("ms", 1e-3)) if seconds >= pair[1]), ("us", 1e-6))
    return f"{seconds / of:.3g} {unit}"


def size(nbytes: float) -> str:
    """Bytes, with a unit that fits."""
    units = (("GB", 1e9), ("MB", 1e6), ("kB", 1e3))
    return next((f"{nbytes / of:.4g} {unit}" for unit, of in units if nbytes >= of), f"{nbytes:.0f} B")


def amount(value: float, unit: str) -> str:
    """A time or a size."""
    return duration(value) if unit == "s" else size(value)


def times(ratio: float) -> str:
    """A ratio: 0.47x."""
    return f"{ratio:.0f}x" if ratio >= 10 else f"{ratio:.2f}x" if ratio >= 0.1 else f"{ratio:.2g}x"


def columns(stored: Sequence[Stored]) -> list[str]:
    """Of the table, peers that nobody measured left out; with a set of its own for each of several files."""
    names_of_columns = []
    for place, run in enumerate(stored):
        records = run.measured.records
        names = ["median", "IQR"]
        names += ["GB/s", "% of copy", "floor"] if place == len(stored) - 1 else []
        names += [f"/ {peer}" for peer in PEERS if any(peer in record.peers(each) for each in records)]
        names_of_columns += [column(name, place, stored) for name in names]
    return names_of_columns


def column(name: str, place: int, stored: Sequence[Stored]) -> str:
    """The name of a column of one of several files."""
    return name if len(stored) == 1 else f"{name} [{place + 1}]"


def rows(stored: Sequence[Stored]) -> list[Row]:
    """A row for each case that any of the files has, also those that failed or were not run."""
    cells_of: dict[str, tuple[str, dict[str, str]]] = {}
    for place, run in enumerate(stored):
        for each in record.split(run.measured.records):
            cells = cells_of.setdefault(each.name, (each.group, {}))[1]
            cells.update({column(name, place, stored): text for name, text in _cells(each).items()})
        for failure in run.measured.failures:
            cells = cells_of.setdefault(failure.name, (failure.group, {}))[1]
            cells[column("median", place, stored)] = "failed"
        for name in run.measured.not_run:
            cells_of.setdefault(name, ("", {}))[1][column("median", place, stored)] = "not run"
    return [Row(group, name, cells) for name, (group, cells) in cells_of.items()]


def _cells(case: Record) -> dict[str, str]:
    middle = record.median(case)
    cells = {"median": amount(middle, case.unit)}
    if case.unit != "s":
        return cells
    cells["IQR"] = f"{100 * record.relative_iqr(record.values(case)):.0f} %"
    for name, value, how in (
        ("GB/s", record.gb_per_s(case), "{:.1f}"), ("% of copy", record.percent_of_copy(case), "{:.0f}")
    ):  # fmt: skip
        if value is not None:
            cells[name] = how.format(value)
    floor = record.floor_s(case)
    if floor is not None:
        cells["floor"] = duration(floor)
    for peer in record.peers(case):
        quartiles = record.ratio(case, peer)
        if quartiles:
            first, middle, third = quartiles
            cells[f"/ {peer}"] = f"{times(middle)} ({first:.2g}-{third:.2g})"
    return cells


def table(stored: Sequence[Stored]) -> Table:
    """For rich to print."""
    from rich.table import Table

    names = columns(stored)
    printed = Table(box=None, pad_edge=False)
    for name in ("group", "case"):
        printed.add_column(name, overflow="fold")
    for name in names:
        printed.add_column(name, justify="right", no_wrap=True)
    for row in rows(stored):
        printed.add_row(row.group, row.name, *(row.cells.get(name, "") for name in names))
    return printed


def dispensable(stored: Sequence[Stored]) -> list[str]:
    """Columns that a narrow terminal does without, the first to go first; medians and peers stay longest."""
    names = columns(stored)
    order = ("floor", "% of copy", "IQR", "GB/s")
    dropped = [name for kind in order for name in names if name.split(" [")[0] == kind]
    beside = [name for peer in reversed(PEERS) for name in reversed(names) if name.split(" [")[0] == f"/ {peer}"]
    return [*dropped, "group", *beside]


def as_data(stored: Sequence[Stored]) -> list[dict[str, Any]]:
    """The same for programs: of each file the machine, the numbers of each case in seconds or bytes, what failed."""
    return [
        {
            "file": run.path, "machine": {**run.machine}, "about": {**run.about},
            "cases": [_numbers(each) for each in record.split(run.measured.records)],
            "failed": [{"group": bad.group, "name": bad.name, "error": bad.error} for bad in run.measured.failures],
            "not_run": [*run.measured.not_run],
        }
        for run in stored
    ]  # fmt: skip


def _numbers(case: Record) -> dict[str, Any]:
    quartiles = {peer: ratios for peer in record.peers(case) if (ratios := record.ratio(case, peer))}
    timed = case.unit == "s"
    return {
        "group": case.group, "name": case.name, "unit": case.unit, "median": record.median(case),
        "relative_iqr": record.relative_iqr(record.values(case)) if timed else 0.0,
        "gb_per_s": record.gb_per_s(case) if timed else None,
        "percent_of_copy": record.percent_of_copy(case) if timed else None,
        "floor_s": record.floor_s(case) if timed else None,
        "beside": {peer: dict(zip(("q1", "median", "q3"), ratios, strict=True)) for peer, ratios in quartiles.items()},
        "notes": {**case.notes},
    }  # fmt: skip


def heading(run: Stored) -> str:
    """A line on the machine, the versions, the commit and the time of a run."""
    versions = ", ".join(f"{name} {version}" for name, version in run.machine.get("versions", {}).items() if version)
    dirty = " with changes" if run.about.get("dirty") else ""
    commit = str(run.about.get("commit") or "unknown")[:12]
    where = f"{run.machine.get('device_name')}, {run.machine.get('threads', '?')} threads"
    load = "" if run.about.get("load") is None else f"; load {run.about['load']}"
    return f"{where}; {versions}; commit {commit}{dirty}; {str(run.about.get('datetime'))[:19]}{load}"


def remarks(run: Stored) -> list[str]:
    """Sentences below the table: what failed, what was not run, whom the machine disturbed."""
    sentences = [f"failed: {failure.name}: {failure.error}" for failure in run.measured.failures]
    if run.measured.not_run:
        sentences.append(f"not run, the time was up: {', '.join(run.measured.not_run)}")
    busy = [each.name for each in run.measured.records if each.unit == "s" and not record.calm_laps(each)]
    if busy:
        sentences.append(
            f"other processes took the cores all the time in {len(busy)} cases, whose times mean little: "
            f"{', '.join(busy[:8])}{', ...' if len(busy) > 8 else ''}"
        )
    sentences += [f"{each.name}: {aside}" for each in record.split(run.measured.records) if (aside := _aside(each))]
    return sentences


def _aside(case: Record) -> str:
    """A remark on what a case had cut to fit the machine, and who is not beside it."""
    kept = {
        name: value for name, value in case.notes.items() if name.startswith("no ") or (name == "cut" and value != 1)
    }
    kept |= {name: value for name, value in case.notes.items() if "/" in str(value) and name not in kept}
    kept |= {name: value for name, value in case.notes.items() if name == "budget"}
    return ", ".join(f"{name} {value}" for name, value in kept.items())


def compared(comparison: Comparison) -> list[str]:
    """A comparison in lines, the worst first."""
    lines = [f"differs: {difference}" for difference in comparison.differences]
    if abs(comparison.pace - 1) > 0.02:
        lines.append(
            f"the machine: peers and yardsticks took {100 * (comparison.pace - 1):+.0f} % of their time in the base"
        )
    lines += [_judged(verdict) for verdict in comparison.of("faster")]
    if comparison.added:
        lines.append(f"only in the new run: {', '.join(comparison.added)}")
    if comparison.failing:
        lines.append(f"failing in both runs: {', '.join(comparison.failing)}")
    lines += [
        f"unsettled: {verdict.name}: {verdict.why}; {_change(verdict.changes[0], verdict.unit)}"
        for verdict in comparison.of("unsettled")
    ]
    lines += [f"lost: {name}: {reason}" for name, reason in comparison.lost.items()]
    lines += [f"failed: {name}: {reason}" for name, reason in comparison.failed.items()]
    lines += [_judged(verdict) for verdict in comparison.of("slower")]
    counts = {name: len(comparison.of(name)) for name in ("same", "faster", "unsettled", "slower")}
    counts |= {"lost": len(comparison.lost), "failed": len(comparison.failed)}
    summary = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    known = "no regression" if comparison.judged else "nothing is known"
    lines.append(f"{summary or 'no case in common'}: {known if comparison.good else 'REGRESSION'}")
    return lines


def _judged(verdict: Verdict) -> str:
    steadiest = min(verdict.changes, key=lambda change: change.threshold)
    outcome = {"s": verdict.outcome}.get(verdict.unit, "larger" if verdict.outcome == "slower" else "smaller")
    others = "".join(f", {change.measure} {change.percent:+.1f} %" for change in verdict.changes[1:])
    by = f"threshold {steadiest.threshold:.1f} % of its {steadiest.measure}"
    return f"{outcome}: {verdict.name}: {_change(verdict.changes[0], verdict.unit)}{others} ({by})"


def _change(change: Change, unit: str) -> str:
    return f"{amount(change.base, unit)} -> {amount(change.new, unit)} ({change.percent:+.1f} %)"

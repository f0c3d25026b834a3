"""What was measured, as a table for the terminal and rows for the page (perf/suite/report_html.py)."""

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
    found = []
    for place, one in enumerate(stored):
        records = one.measured.records
        names = ["median", "IQR"]
        names += ["GB/s", "% of copy", "floor"] if place == len(stored) - 1 else []
        names += [f"/ {peer}" for peer in PEERS if any(peer in record.peers(each) for each in records)]
        found += [column(name, place, stored) for name in names]
    return found


def column(name: str, place: int, stored: Sequence[Stored]) -> str:
    """The name of a column of one of several files."""
    return name if len(stored) == 1 else f"{name} [{place + 1}]"


def rows(stored: Sequence[Stored]) -> list[Row]:
    """A row for each case that any of the files has, also those that failed or were not run."""
    found: dict[str, tuple[str, dict[str, str]]] = {}
    for place, one in enumerate(stored):
        for each in record.split(one.measured.records):
            cells = found.setdefault(each.name, (each.group, {}))[1]
            cells.update({column(name, place, stored): text for name, text in _cells(each).items()})
        for failure in one.measured.failures:
            cells = found.setdefault(failure.name, (failure.group, {}))[1]
            cells[column("median", place, stored)] = "failed"
        for name in one.measured.not_run:
            found.setdefault(name, ("", {}))[1][column("median", place, stored)] = "not run"
    return [Row(group, name, cells) for name, (group, cells) in found.items()]


def _cells(one: Record) -> dict[str, str]:
    middle = record.median(one)
    found = {"median": amount(middle, one.unit)}
    if one.unit != "s":
        return found
    found["IQR"] = f"{100 * record.relative_iqr(record.values(one)):.0f} %"
    for name, value, how in (
        ("GB/s", record.gb_per_s(one), "{:.1f}"), ("% of copy", record.percent_of_copy(one), "{:.0f}")
    ):  # fmt: skip
        if value is not None:
            found[name] = how.format(value)
    floor = record.floor_s(one)
    if floor is not None:
        found["floor"] = duration(floor)
    for peer in record.peers(one):
        quartiles = record.ratio(one, peer)
        if quartiles:
            first, middle, third = quartiles
            found[f"/ {peer}"] = f"{times(middle)} ({first:.2g}-{third:.2g})"
    return found


def table(stored: Sequence[Stored]) -> Table:
    """For rich to print."""
    from rich.table import Table

    names = columns(stored)
    found = Table(box=None, pad_edge=False)
    for name in ("group", "case"):
        found.add_column(name, overflow="fold")
    for name in names:
        found.add_column(name, justify="right", no_wrap=True)
    for row in rows(stored):
        found.add_row(row.group, row.name, *(row.cells.get(name, "") for name in names))
    return found


def dispensable(stored: Sequence[Stored]) -> list[str]:
    """Columns that a narrow terminal does without, the first to go first; medians and peers stay longest."""
    names = columns(stored)
    order = ("floor", "% of copy", "IQR", "GB/s")
    found = [name for kind in order for name in names if name.split(" [")[0] == kind]
    beside = [name for peer in reversed(PEERS) for name in reversed(names) if name.split(" [")[0] == f"/ {peer}"]
    return [*found, "group", *beside]


def as_data(stored: Sequence[Stored]) -> list[dict[str, Any]]:
    """The same for programs: of each file the machine, the numbers of each case in seconds or bytes, what failed."""
    return [
        {
            "file": one.path, "machine": {**one.machine}, "about": {**one.about},
            "cases": [_numbers(each) for each in record.split(one.measured.records)],
            "failed": [{"group": bad.group, "name": bad.name, "error": bad.error} for bad in one.measured.failures],
            "not_run": [*one.measured.not_run],
        }
        for one in stored
    ]  # fmt: skip


def _numbers(one: Record) -> dict[str, Any]:
    quartiles = {peer: found for peer in record.peers(one) if (found := record.ratio(one, peer))}
    timed = one.unit == "s"
    return {
        "group": one.group, "name": one.name, "unit": one.unit, "median": record.median(one),
        "relative_iqr": record.relative_iqr(record.values(one)) if timed else 0.0,
        "gb_per_s": record.gb_per_s(one) if timed else None,
        "percent_of_copy": record.percent_of_copy(one) if timed else None,
        "floor_s": record.floor_s(one) if timed else None,
        "beside": {peer: dict(zip(("q1", "median", "q3"), found, strict=True)) for peer, found in quartiles.items()},
        "notes": {**one.notes},
    }  # fmt: skip


def heading(one: Stored) -> str:
    """What was measured when and on what, in a line."""
    versions = ", ".join(f"{name} {version}" for name, version in one.machine.get("versions", {}).items() if version)
    dirty = " with changes" if one.about.get("dirty") else ""
    commit = str(one.about.get("commit") or "unknown")[:12]
    where = f"{one.machine.get('device_name')}, {one.machine.get('threads', '?')} threads"
    load = "" if one.about.get("load") is None else f"; load {one.about['load']}"
    return f"{where}; {versions}; commit {commit}{dirty}; {str(one.about.get('datetime'))[:19]}{load}"


def remarks(one: Stored) -> list[str]:
    """Sentences below the table: what failed, what was not run, whom the machine disturbed."""
    found = [f"failed: {failure.name}: {failure.error}" for failure in one.measured.failures]
    if one.measured.not_run:
        found.append(f"not run, the time was up: {', '.join(one.measured.not_run)}")
    busy = [each.name for each in one.measured.records if each.unit == "s" and not record.calm_laps(each)]
    if busy:
        found.append(
            f"other processes took the cores all the time in {len(busy)} cases, whose times mean little: "
            f"{', '.join(busy[:8])}{', ...' if len(busy) > 8 else ''}"
        )
    found += [f"{each.name}: {told}" for each in record.split(one.measured.records) if (told := _aside(each))]
    return found


def _aside(one: Record) -> str:
    """What a case had cut to fit the machine, and who is not beside it."""
    kept = {
        name: value for name, value in one.notes.items() if name.startswith("no ") or (name == "cut" and value != 1)
    }
    kept |= {name: value for name, value in one.notes.items() if "/" in str(value) and name not in kept}
    kept |= {name: value for name, value in one.notes.items() if name == "budget"}
    return ", ".join(f"{name} {value}" for name, value in kept.items())


def compared(found: Comparison) -> list[str]:
    """A comparison in lines, the worst first."""
    lines = [f"differs: {difference}" for difference in found.differences]
    if abs(found.pace - 1) > 0.02:
        lines.append(
            f"the machine: peers and yardsticks took {100 * (found.pace - 1):+.0f} % of their time in the base"
        )
    lines += [_judged(verdict) for verdict in found.of("faster")]
    if found.added:
        lines.append(f"only in the new run: {', '.join(found.added)}")
    if found.failing:
        lines.append(f"failing in both runs: {', '.join(found.failing)}")
    lines += [
        f"unsettled: {verdict.name}: {verdict.why}; {_change(verdict.changes[0], verdict.unit)}"
        for verdict in found.of("unsettled")
    ]
    lines += [f"lost: {name}: {reason}" for name, reason in found.lost.items()]
    lines += [f"failed: {name}: {reason}" for name, reason in found.failed.items()]
    lines += [_judged(verdict) for verdict in found.of("slower")]
    counts = {name: len(found.of(name)) for name in ("same", "faster", "unsettled", "slower")}
    counts |= {"lost": len(found.lost), "failed": len(found.failed)}
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    known = "no regression" if found.judged else "nothing is known"
    lines.append(f"{told or 'no case in common'}: {known if found.good else 'REGRESSION'}")
    return lines


def _judged(verdict: Verdict) -> str:
    steadiest = min(verdict.changes, key=lambda change: change.threshold)
    word = {"s": verdict.outcome}.get(verdict.unit, "larger" if verdict.outcome == "slower" else "smaller")
    others = "".join(f", {change.measure} {change.percent:+.1f} %" for change in verdict.changes[1:])
    by = f"threshold {steadiest.threshold:.1f} % of its {steadiest.measure}"
    return f"{word}: {verdict.name}: {_change(verdict.changes[0], verdict.unit)}{others} ({by})"


def _change(change: Change, unit: str) -> str:
    return f"{amount(change.base, unit)} -> {amount(change.new, unit)} ({change.percent:+.1f} %)"

"""Measurements as JSON in the format of pytest-benchmark, written and read without it.

Times are under "benchmarks", with names as `pytest perf/` gives them, so that `--benchmark-compare` pairs them. What
that format has no place for is in "extra_info" of each, in "shardwise" of the machine and in "shardwise" of the file:
sizes, cases that failed or were not run, how was measured.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardwise.perf.suite import machine, record
from shardwise.perf.suite.case import OURS
from shardwise.perf.suite.measure import Failure, Measured
from shardwise.perf.suite.record import Lap, Record, quantile
from shardwise.untrusted import read_text

# the test that runs a case in `pytest perf/`
TEST = "perf/test_cases.py::test_case"
FORMAT = 1


@dataclass(frozen=True)
class Stored:
    """A file of measurements.

    Attributes:
        machine: `machine.described` of the run; of files that pytest-benchmark wrote elsewhere, what can be told.
        about: when and how: datetime, commit, dirty, load, suites, laps, small.
    """

    path: str
    measured: Measured
    machine: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)


def save(
    path: Path, measured: Measured, *, machine_info: Mapping[str, Any], about: Mapping[str, Any] | None = None
) -> None:
    """Write what was measured; the file is whole or not there."""
    write(path, to_json(measured, machine_info, about or {}))


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Write what `to_json` gave; the file is whole or not there."""
    text = json.dumps(document, indent=1, default=str)
    path = path.resolve()
    if path.exists() and not path.is_file():
        # a device or a pipe is written to, not replaced
        path.write_text(text, encoding="utf-8")
        return
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def to_json(measured: Measured, machine_info: Mapping[str, Any], about: Mapping[str, Any]) -> dict[str, Any]:
    """The file as plain data."""
    return {
        "machine_info": dict(machine_info),
        "commit_info": machine.commit_info(),
        "benchmarks": [_benchmark(case) for case in measured.records if case.unit == "s"],
        "datetime": machine.now(),
        "version": "5.0.0",
        "shardwise": appendix(measured, about),
    }


def appendix(measured: Measured, about: Mapping[str, Any]) -> dict[str, Any]:
    """The part that the format has no place for: "shardwise" of the file."""
    return {
        "format": FORMAT,
        "sizes": [_benchmark(case) for case in measured.records if case.unit != "s"],
        "failed": [vars(failure) for failure in measured.failures],
        "not_run": list(measured.not_run),
        **about,
    }


def _benchmark(case: Record) -> dict[str, Any]:
    data = record.values(case)
    return {
        "group": case.group,
        "name": f"{TEST.rpartition('::')[2]}[{case.name}]",
        "fullname": f"{TEST}[{case.name}]",
        "params": {"name": case.name},
        "param": case.name,
        "extra_info": extra_info(case),
        "options": {"disable_gc": True, "timer": "perf_counter", "min_rounds": 1, "warmup": True},
        "stats": _stats(data),
    }


def extra_info(case: Record) -> dict[str, Any]:
    """All of a record, and what follows from it, for people and programs that read the file."""
    names = ("q1", "median", "q3")
    ratios = {peer: three for peer in record.peers(case) if (three := record.ratio(case, peer))}
    info: dict[str, Any] = {
        "unit": case.unit, "device": case.device, "group": case.group,
        "bytes_moved": case.bytes_moved, "floor": case.floor,
        "floor_s": record.floor_s(case), "gb_per_s": record.gb_per_s(case), "copy_gb_s": record.copy_gb_s(case),
        "percent_of_copy": record.percent_of_copy(case),
        "medians": {who: record.median(case, who) for who in record.sides(case) if record.values(case, who)},
        "ratios": {peer: dict(zip(names, quartiles, strict=True)) for peer, quartiles in ratios.items()},
    }  # fmt: skip
    laps = [
        {
            "times": {who: [_five(value) for value in series] for who, series in lap.times.items()},
            "disturbed": {who: list(rounds) for who, rounds in lap.disturbed.items()},
            "copy_gb_s": lap.copy_gb_s,
            "notes": dict(lap.notes),
        }
        for lap in case.laps
    ]
    return {**_rounded(info), "notes": dict(case.notes), "laps": laps}


def _five(value: float | None) -> float | None:
    """As precise as a time is, and no longer."""
    return None if value is None else float(f"{value:.6g}")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return _five(value) if isinstance(value, float) else value


def _stats(data: Sequence[float]) -> dict[str, Any]:
    """The fields that pytest-benchmark writes."""
    ordered = sorted(data)
    first, third = quantile(ordered, 0.25), quantile(ordered, 0.75)
    fence = 1.5 * (third - first)
    inside = [value for value in ordered if first - fence <= value <= third + fence]
    mean = statistics.fmean(ordered)
    deviation = statistics.stdev(ordered) if len(ordered) > 1 else 0.0
    far, outside = sum(abs(value - mean) > deviation for value in ordered), len(ordered) - len(inside)
    return {
        "min": ordered[0], "max": ordered[-1], "mean": mean, "stddev": deviation, "rounds": len(ordered),
        "median": statistics.median(ordered), "iqr": third - first, "q1": first, "q3": third,
        "iqr_outliers": outside, "stddev_outliers": far, "outliers": f"{far};{outside}",
        "ld15iqr": inside[0], "hd15iqr": inside[-1], "ops": 1 / mean if mean else 0.0, "total": sum(ordered),
        "data": [_five(value) for value in data], "iterations": 1,
    }  # fmt: skip


def load(path: Path) -> Stored:
    """Read a file that `save` or pytest-benchmark wrote.

    Raises:
        ValueError: it is no such file.
    """
    try:
        data = json.loads(read_text(path))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("benchmarks"), list):
        raise ValueError(f"{path} holds no measurements: it has no list 'benchmarks', as `perf run --out` writes it")
    return parsed(data, str(path))


def parsed(data: Mapping[str, Any], path: str) -> Stored:
    """The measurements in what `to_json` gave, or in a file of pytest-benchmark; `path` is for errors.

    Raises:
        ValueError: it is damaged.
    """
    more = data.get("shardwise") or {}
    if more and more.get("format") != FORMAT:
        raise ValueError(f"{path} has format {more.get('format')!r} of another shardwise; this one reads {FORMAT}")
    try:
        records = [_record(benchmark) for benchmark in [*data["benchmarks"], *more.get("sizes", [])]]
        failures = [Failure(**failure) for failure in more.get("failed", [])]
        about = {name: value for name, value in more.items() if name not in ("sizes", "failed", "not_run")}
        commit = data.get("commit_info") or {}
        about |= {"datetime": data.get("datetime"), "commit": commit.get("id"), "dirty": commit.get("dirty")}
        measured = Measured(tuple(records), tuple(failures), tuple(more.get("not_run", ())))
        return Stored(path, measured, _machine(data.get("machine_info") or {}), about)
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__}: {error}") from None


def _record(benchmark: Mapping[str, Any]) -> Record:
    extra, stats = benchmark.get("extra_info") or {}, benchmark["stats"]
    has_laps = "laps" in extra
    if has_laps:
        laps = tuple(Lap(lap["times"], lap["disturbed"], lap["copy_gb_s"], lap["notes"]) for lap in extra["laps"])
    else:
        # a file saved without data has five numbers of the same median and quartiles
        data = stats.get("data") or [stats[name] for name in ("min", "q1", "median", "q3", "max")]
        laps = (Lap({OURS: data}),)
    if not all(_is_series(series) for lap in laps for series in lap.times.values()):
        raise TypeError("times that are no numbers")
    if not any(seconds is not None for lap in laps for seconds in lap.times.get(OURS, ())):
        raise TypeError(f"no times of {OURS!r}")
    if not all(_is_series([lap.copy_gb_s]) for lap in laps) or not _is_series([extra.get("bytes_moved")]):
        raise TypeError("bytes or a bandwidth that is no number")
    if not isinstance(extra.get("notes", {}), dict):
        raise TypeError("notes that are no names and values")
    named = benchmark["param"] if benchmark["fullname"].startswith(f"{TEST}[") else benchmark["fullname"]
    return Record(
        str(named), str(benchmark.get("group") or extra.get("group") or ""), laps, str(extra.get("unit", "s")),
        str(extra.get("device", "cpu")), extra.get("bytes_moved"), str(extra.get("floor", "")), extra.get("notes", {}),
    )  # fmt: skip


def _is_series(series: object) -> bool:
    return isinstance(series, list) and all(
        value is None or (isinstance(value, (int, float)) and math.isfinite(value) and value >= 0) for value in series
    )


def _machine(info: Mapping[str, Any]) -> Mapping[str, Any]:
    if "shardwise" in info:
        described: Mapping[str, Any] = info["shardwise"]
        return described
    cpu = info.get("cpu") or {}
    return {"device": "cpu", "device_name": cpu.get("brand_raw"), "versions": {"python": info.get("python_version")}}

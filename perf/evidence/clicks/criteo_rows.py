"""Rows a second of Criteo's text files: this library's reader beside bare pyarrow, which only splits and converts.

A file is generated from a seed: 13 integers of which a fifth is missing and some are -1, 26 categories of eight hex
digits of which a twentieth is missing. The sides take turns, each reads the file from its begin to its end, from the
page cache:

    pyarrow, streamed    `open_csv`: label int8, integers int64, categories strings; batches are counted and dropped
    pyarrow, whole       `read_csv` of the same types, on pyarrow's threads
    columns              (a) lines, checks, logarithms, ids modulo their table's rows: all that `Criteo` does to a row
    batches              (b) `Criteo.train`: the same, cut into batches of 4096 with a KeyedJaggedTensor each
    batches, no numba    the same with every line parsed by itself

Ratios are of rows a second in the same round, to both sides of pyarrow: by elapsed time, and by time on cores, which
other jobs on the machine disturb less. Not as it has to be: a median ratio of elapsed time below 0.9, of columns to
either side of pyarrow or of batches to pyarrow streamed; of batches to pyarrow whole, which has a thread on every core
where a reader of ours has one, by time on cores. `--write` keeps the result in `perf/results/criteo_rows.json`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from shardwise.data import Criteo, criteo_text
from shardwise.perf.evidence.report import ROOT, Report, Section, grid, report_of, versions
from shardwise.perf.suite.options import Options

RESULT = ROOT / "perf" / "results" / "criteo_rows.json"
BOUND, BATCH = 0.9, 4096
PEERS, BOUNDED, PLAIN = ("pyarrow, streamed", "pyarrow, whole"), ("columns", "batches"), "batches, no numba"
OPTIONS: Options = {
    "--rows": {"type": int, "default": 150_000, "help": "of the file (default 150000)"},
    "--rounds": {"type": int, "default": 21, "help": "in which each side reads it once (default 21)"},
}
# seconds of a side's turn: elapsed, and on cores, of all threads
Turns = dict[str, list[tuple[float, float]]]


def generate(path: Path, rows: int, seed: int = 7) -> None:
    """Write a file like Criteo's."""
    draw = np.random.default_rng(seed)
    integers = [
        np.where(draw.random(rows) < 0.2, "", (draw.exponential(5000 if column % 3 else 60, rows) - 1).astype(int))
        for column in range(criteo_text.INTEGERS)
    ]
    categories = [
        [
            "" if missing else f"{category:08x}"
            for category, missing in zip(drawn, draw.random(rows) < 0.05, strict=True)
        ]
        for drawn in draw.integers(0, 1 << 32, (criteo_text.CATEGORIES, rows)).tolist()
    ]
    columns = [draw.integers(0, 2, rows).astype(str).tolist(), *(column.tolist() for column in integers), *categories]
    path.write_text("".join("\t".join(row) + "\n" for row in zip(*columns, strict=True)), encoding="ascii")


def sides(path: Path) -> dict[str, Callable[[], int]]:
    """What each side does; returns rows."""
    import pyarrow
    from pyarrow import csv

    # no line is kept for evaluation
    reader = Criteo(path, evaluate_every=1 << 40)
    row_counts = np.array(list(reader.feature_rows.values()), np.int64)
    types = [pyarrow.int8(), *[pyarrow.int64()] * criteo_text.INTEGERS, *[pyarrow.string()] * criteo_text.CATEGORIES]
    names = [str(column) for column in range(len(types))]
    settings = {
        "read_options": csv.ReadOptions(column_names=names),
        "parse_options": csv.ParseOptions(delimiter="\t", quote_char=False),
        "convert_options": csv.ConvertOptions(column_types=dict(zip(names, types, strict=True)), null_values=[""]),
    }

    def batches() -> int:
        return sum(batch.batch_size for batch in reader.train(BATCH))

    def without_loop() -> int:
        with patch.object(criteo_text, "_loops", lambda: None):
            return batches()

    return {
        PEERS[0]: lambda: sum(batch.num_rows for batch in csv.open_csv(path, **settings)),
        PEERS[1]: lambda: csv.read_csv(path, **settings).num_rows,
        "columns": lambda: sum(
            len(criteo_text.parse(lines, row_counts).labels) for lines in criteo_text.read_criteo(path)
        ),
        "batches": batches,
        PLAIN: without_loop,
    }


def run(options: argparse.Namespace) -> Report:
    """Generate the file, take turns, compare."""
    import pyarrow

    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "day_0.tsv"
        generate(path, options.rows)
        size = path.stat().st_size
        turns = _turns(sides(path), options.rounds, options.rows)
    entries = compare(turns)
    section = section_of(entries)
    how = f"pyarrow {pyarrow.__version__}, numpy {np.__version__}; {options.rows:,} rows, {size:,} bytes"
    if options.write:
        kept = {
            "versions": versions(), "how": how, "rounds": options.rounds, "batch_size": BATCH, "ratios": entries,
            "microseconds_a_row": {
                side: [[round(1e6 * seconds / options.rows, 4) for seconds in turn] for turn in taken]
                for side, taken in turns.items()
            },
            "table": section.lines, "bad": section.bad,
        }  # fmt: skip
        RESULT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    return report_of([section], how)


def _turns(calls: dict[str, Callable[[], int]], rounds: int, rows: int) -> Turns:
    turns: Turns = {side: [] for side in calls}
    for number in range(-1, rounds):
        for side, call in calls.items():
            # once before, when loops compile; of lines one by one, which take ten times as long, a third
            if side == PLAIN and number % 3:
                continue
            begin, begin_cores = time.perf_counter(), time.process_time()
            read = call()
            taken = time.perf_counter() - begin, time.process_time() - begin_cores
            if rows - read >= BATCH:
                raise AssertionError(f"{side} read {read} of {rows} rows")
            if number >= 0:
                # what fills no batch is read and not parsed
                turns[side].append((taken[0] * rows / read, taken[1] * rows / read))
    return turns


def compare(turns: Turns) -> list[dict[str, Any]]:
    """Rows a second of each of our sides over those of each of pyarrow's: median and quartiles of the rounds."""
    entries = []
    for side in (*BOUNDED, PLAIN):
        for peer in PEERS:
            entry: dict[str, Any] = {"side": side, "peer": peer}
            every = 3 if side == PLAIN else 1
            for place, clock in enumerate(("elapsed", "on_cores")):
                ratios = [
                    theirs[place] / ours[place] for theirs, ours in zip(turns[peer][::every], turns[side], strict=True)
                ]
                entry[clock] = {
                    "median": statistics.median(ratios),
                    "quartiles": np.quantile(ratios, [0.25, 0.75]).tolist(),
                }
            entries.append(entry)
    return entries


def clock_of(entry: dict[str, Any]) -> str:
    """The clock that a side is held to."""
    return "on_cores" if (entry["side"], entry["peer"]) == (BOUNDED[1], PEERS[1]) else "elapsed"


def section_of(entries: list[dict[str, Any]]) -> Section:
    """The table of ratios, and those below the bound."""
    rows, bad = [], []
    for entry in entries:
        shown = [
            f"{entry[clock]['median']:.2f} ({entry[clock]['quartiles'][0]:.2f} to {entry[clock]['quartiles'][1]:.2f})"
            for clock in ("elapsed", "on_cores")
        ]
        rows.append([entry["side"], entry["peer"], *shown])
        ratio = entry[clock_of(entry)]["median"]
        if entry["side"] in BOUNDED and ratio < BOUND:
            bad.append(f"{entry['side']}: {ratio:.2f} of the rows a second of {entry['peer']}")
    header = ["rows a second of", "over those of", "elapsed: median (quartiles)", "on cores: median (quartiles)"]
    return Section([*grid(header, rows), ""], bad)

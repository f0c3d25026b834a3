"""Run the operations of TorchRec's jagged types and of FBGEMM's jagged ops on both libraries: equal, different, slower?

Run as `python -m shardwise.perf.evidence.beside_torchrec [--write docs/beside_torchrec.md] [--only REGEX] [--sections types,ops]
[--torch-alone]` where TorchRec 1.8.0 is installed; docs/beside_torchrec.md tells how and keeps what was printed. Exit
status 1: a result differs that DIFFERENT does not name, an operation is missing or a bound is broken; 2: no TorchRec.
"""

from __future__ import annotations

import argparse
import importlib
import math
import os
import re
import statistics
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from shardwise.kernels import _op
from shardwise.kernels.cpu import numba_loops

from . import beside_ops, beside_types
from .beside import SIZES, Case, Library, Row, compare
from .parity import versions

# a call of ours that takes less is fast enough, whatever TorchRec's takes
FREE_US = 20.0
# modules that the names of the cases come from
TORCHREC = ("sparse.jagged_tensor", "sparse.jagged_tensor_validator", "sparse.tensor_dict", "modules.regroup")
MARK = "<!-- below: as perf/evidence/beside_torchrec.py printed it -->"


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
        return ", ".join(f"{word} {bound:g}" for word, bound in words.items() if bound < math.inf)


TYPES = Bounds(mean=0.8, each=1.3)
# with numba, and on torch alone
OPS = {True: Bounds(operation=1.0), False: Bounds(operation=3.0)}

# operation (a regular expression for its whole name) -> why ours differs, as docs/differences.md says
DIFFERENT: dict[str, str] = {
    "KJT empty": "values are int64, not float32: ids are integers",
    "KJT empty_like, variable": "the batch size is kept where batch sizes vary too",
    "KJT split with zeros.*": "lengths of a piece without keys keep their dtype",
    "KJT permute.*inverse indices": "TorchRec's permute drops inverse indices, ours keeps them",
    "KJT pytree flatten.*|flatten_kjt_list": "batch sizes per key are known on the host: context, not a leaf",
    "JT empty": "offsets are [0], one more than bags, as everywhere",
}


@dataclass(frozen=True)
class Section:
    """Cases that keep the same bounds."""

    title: str
    cases: Sequence[Case]
    bounds: Bounds


def sections(names: Sequence[str], compiled: bool) -> list[Section]:
    """The named ones."""
    known = {
        "types": Section("Operations of the jagged types", beside_types.CASES, TYPES),
        "ops": Section("Jagged ops", beside_ops.CASES, OPS[compiled]),
    }
    return [known[name] for name in names]


def reason(case: str, different: Mapping[str, str]) -> str:
    """Why this operation may differ; "" if it may not."""
    return next((why for pattern, why in different.items() if re.fullmatch(pattern, case)), "")


def free(row: Row) -> bool:
    """Whether only the mean of everything counts this row."""
    return not row.timed or row.ours_us < FREE_US


def verdict(rows: Sequence[Row], bounds: Bounds, different: Mapping[str, str]) -> str:
    """What is said of one operation at all its sizes; in capitals what makes the exit status 1."""
    found = next((row for row in rows if row.found), None)
    why = reason(rows[0].case, different)
    if found is not None and found.found.startswith("missing"):
        return f"MISSING {found.found.removeprefix('missing: ')}"
    if found is not None and not why:
        return f"DIFFERENT at {found.size}: {found.found}"
    if slow := slow_rows(rows, bounds):
        return f"SLOWER ({geometric_mean(slow):.2f}) at {', '.join(str(row.size) for row in slow)}"
    if found is not None:
        return f"different: {why}"
    return "equal" if any(row.timed for row in rows) else "both raise"


def slow_rows(rows: Sequence[Row], bounds: Bounds) -> list[Row]:
    """What of an operation is beyond its bound: a size, or all that count where its mean is."""
    counted = [row for row in rows if not free(row)]
    if counted and geometric_mean(counted) > bounds.operation:
        return counted
    return [row for row in counted if row.ratio > bounds.each]


def geometric_mean(rows: Sequence[Row]) -> float:
    """Of the ratios; nan without any."""
    ratios = [row.ratio for row in rows if row.timed]
    return statistics.geometric_mean(ratios) if ratios else math.nan


def run(section: Section, ours: Library, theirs: Library, only: str, say: Callable[[str], None]) -> list[Row]:
    """Rows of all cases whose name, a comma and size match `only`; size by size, because sizes share their inputs."""
    rows = []
    for size in SIZES:
        for case in section.cases:
            if not case.fits(size) or not re.search(only, f"{case.name}, {size}"):
                continue
            if case.needs_cuda and not torch.cuda.is_available():
                continue
            row = compare(case, ours, theirs, size)
            rows.append(row)
            say(f"{row.case}, {size}: {row.found or 'equal'}; {_times(row)}")
    return rows


def _times(row: Row) -> str:
    if not row.timed:
        return "not timed"
    low, ratio, high = row.ratios
    return f"{row.ours_us:.4g} us, theirs {row.theirs_us:.4g} us, ratio {ratio:.2f} ({low:.2f}-{high:.2f})"


def table(section: Section, rows: Sequence[Row], different: Mapping[str, str]) -> tuple[list[str], bool]:
    """The section as lines of text, and whether it is as it has to be."""
    names = [case.name for case in section.cases if any(row.case == case.name for row in rows)]
    of_case = {name: {row.size: row for row in rows if row.case == name} for name in names}
    said = {name: verdict(list(found.values()), section.bounds, different) for name, found in of_case.items()}
    bad = [name for name in names if said[name].split()[0].isupper()]
    sizes = [size for size in SIZES if any(row.size == size for row in rows)]
    means = [*(geometric_mean([row for row in rows if row.size == size]) for size in sizes), geometric_mean(rows)]
    good = not bad and not means[-1] > section.bounds.mean
    lines = [
        f"## {section.title}", "",
        f"{len(names)} operations, {len(bad)} of them missing, different or slower than they may be. Our time over"
        f" TorchRec's, median and quartiles. Bounds: {section.bounds}; a call of ours that takes less than"
        f" {FREE_US:g} us counts in the mean of all alone.", "",
        *_grid(["operation", *map(str, sizes), "verdict"],
               [[name, *(_ratio(of_case[name].get(size)) for size in sizes), said[name]] for name in names]),
        "", *_grid(["geometric mean", *map(str, sizes), "all"],
                   [["ratio", *(f"{mean:.2f}" for mean in means)]]),
        "",
    ]  # fmt: skip
    slow = [row for name in names for row in of_case[name].values() if not free(row) and row.ratio > TYPES.each]
    slowest = [f"{row.case}, {row.size}: {_times(row)}" for row in sorted(slow, key=lambda row: -row.ratio)]
    meant = [f"{name}: {reason(name, different)}" for name in names if said[name].startswith("different")]
    lines += _list(f"Above {TYPES.each:g} and not under {FREE_US:g} us", slowest)
    lines += _list("Different as docs/differences.md says", meant)
    return lines, good


def _list(what: str, found: Sequence[str]) -> list[str]:
    return [f"{what}: {len(found)}.", "", *(f"- {line}" for line in found), *([""] if found else [])]


def _ratio(row: Row | None) -> str:
    if row is None or not row.timed:
        return ""
    low, ratio, high = row.ratios
    return f"{ratio:.2f} ({low:.2f}-{high:.2f})"


def _grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    cells = [header, ["---"] * len(header), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in cells]


@contextmanager
def without_numba() -> Iterator[None]:
    """Ours on torch alone, as SHARDWISE_NUMBA=0 has it."""
    numba_loops.loops.cache_clear()
    try:
        with patch.object(_op, "NUMBA", False):
            yield
    finally:
        numba_loops.loops.cache_clear()


def load_ours() -> Library:
    """shardwise by TorchRec's names, and its functions of tensors."""
    return Library("shardwise", _modules(
        *(f"shardwise.torchrec.{name}" for name in TORCHREC), "shardwise.jagged", "shardwise.kernels",
    ))  # fmt: skip


def _modules(*names: str) -> list[Any]:
    found = []
    for name in names:
        try:
            found.append(importlib.import_module(name))
        except ImportError:
            # its names are missing then
            continue
    return found


def load_peer() -> tuple[Library, str]:
    """TorchRec with FBGEMM's ops, and FBGEMM's version.

    Raises:
        ImportError: they are not installed.
    """
    fbgemm = importlib.import_module("fbgemm_gpu")
    modules = [importlib.import_module(f"torchrec.{name}") for name in TORCHREC]
    return Library("TorchRec", [*modules, torch.ops.fbgemm], peer=True), str(fbgemm.__version__)


def report(
    wanted: Sequence[Section], ours: Library, theirs: Library, only: str = "", say: Callable[[str], None] = print
) -> tuple[str, bool]:
    """All that is printed, and whether every section is as it has to be."""
    tables = [table(section, rows, DIFFERENT) for section in wanted if (rows := run(section, ours, theirs, only, say))]
    if not tables:
        return f"No operation matches {only!r}.\n", False
    return "\n".join("\n".join(lines) for lines, _ in tables).rstrip() + "\n", all(good for _, good in tables)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, metavar="FILE", help=f"also put it into FILE, below the line {MARK!r}")
    parser.add_argument("--only", default="", metavar="REGEX", help="of 'operation, keys x batch'")
    parser.add_argument("--sections", default="types,ops", help="types, ops, or both with a comma between")
    parser.add_argument("--threads", type=int, default=2, help="1: CPU time is taken, for a busy machine")
    parser.add_argument("--torch-alone", action="store_true", help="ours without numba")
    options = parser.parse_args(argv)
    names = options.sections.split(",")
    if not {*names} <= {"types", "ops"}:
        parser.error(f"sections are types and ops, got {options.sections!r}")
    if options.write and MARK not in options.write.read_text():
        parser.error(f"{options.write} has no line {MARK}")
    # of dtypes and modules that torch is about to drop
    warnings.simplefilter("ignore")
    torch.set_num_threads(options.threads)
    if options.torch_alone:
        with without_numba():
            return _main(names, options)
    return _main(names, options)


def _main(names: Sequence[str], options: argparse.Namespace) -> int:
    try:
        theirs, fbgemm = load_peer()
    except ImportError as error:
        print(
            f"perf/evidence/beside_torchrec.py needs TorchRec ({error}): docs/beside_torchrec.md tells how",
            file=sys.stderr,
        )
        return 2
    compiled = numba_loops.loops("cpu_loops") is not None
    said, good = report(
        sections(names, compiled), load_ours(), theirs, options.only, lambda line: print(line, file=sys.stderr)
    )
    threads = torch.get_num_threads()
    how = ", ".join([
        "CPU time of one thread" if threads == 1 else f"{threads} threads",
        f"ours {'with numba' if compiled else 'on torch alone'}", f"load of the machine {os.getloadavg()[1]:.1f}",
    ])  # fmt: skip
    text = f"{versions(fbgemm)}; {how}\n\n{said}"
    print(text)
    if options.write:
        before = options.write.read_text().partition(MARK)[0]
        options.write.write_text(f"{before}{MARK}\n\n{text}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

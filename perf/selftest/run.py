"""The self-test: every check by every path that ops may take here, within a time.

A path is what does the work of an op on a device: Triton's kernels, loops that numba compiles, or torch. What has to be
compiled first is compiled in a pass of its own, whose time is no part of the self-test's: it is kept on disk, so the
next run has it. What did not fit is reported as not tested, and never as passed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import chain
from threading import Timer
from typing import Any

import torch

from shardwise.kernels import _op, numba_loops

from ..suite.libraries import without_numba
from . import jagged_checks, lookups, rows_checks, served_checks
from .agreement import compare
from .check import Check

# seconds that compiling may take before the rest is left for another run
COMPILE_S = 180.0

# that a process takes to start, torch and triton imported, on a slow machine
START_S = 60.0
INTERPRETER = "interpreter"

# is told what is done, and how many of how many parts
Tell = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Path:
    """What does the work of an op on tensors of a device: "triton", "interpreter", "numba" or "torch"."""

    device: str
    by: str

    def __str__(self) -> str:
        return f"{self.device}, {self.by}"

    @property
    def compiles(self) -> bool:
        """Whether a first call compiles something that is kept."""
        return self.by in ("triton", "numba")


@dataclass
class Result:
    """How the checks of a family went by a path: how many passed, a sentence for each that did not, those left out."""

    family: str
    path: Path
    passed: int = 0
    failed: list[str] = field(default_factory=list)
    untested: list[str] = field(default_factory=list)
    # the largest difference, as a part of the largest value
    difference: float = 0.0


@dataclass(frozen=True)
class SelfTest:
    """Results by family and path, seconds that tests and compiling took, and ops that no check is there for."""

    results: tuple[Result, ...]
    seconds: float
    compile_seconds: float
    unchecked: tuple[str, ...]

    @property
    def failed(self) -> list[str]:
        """A sentence for each check that failed."""
        return [f"{result.family} ({result.path}): {text}" for result in self.results for text in result.failed]


def all_checks() -> list[Check]:
    """Every check: the first of each family, then their second ones, so that no family is left out for time alone."""
    turns: dict[str, int] = {}
    placed: list[tuple[int, Check]] = []
    for check in chain(lookups.checks(), jagged_checks.checks(), served_checks.checks(), rows_checks.checks()):
        turn = turns[check.family] = turns.get(check.family, -1) + 1
        placed.append((turn, check))
    return [check for _, check in sorted(placed, key=lambda pair: pair[0])]


def registered_ops() -> set[str]:
    """Every op of the library, as `torch.ops.shardwise` names it."""
    names = torch._C._dispatch_get_all_op_names()
    return {name.split("::")[1].split(".")[0] for name in names if name.startswith("shardwise::")}


def paths_of(device: str) -> list[Path]:
    """The paths that ops can take on a device ("cpu", "cuda:0"), the one that they do take first."""
    if device != "cpu":
        return [Path(device, "triton" if _op.HAS_TRITON else "torch")]
    if _op.INTERPRETED:
        return [Path(device, INTERPRETER)]
    return [Path(device, by) for by in (("numba", "torch") if numba_loops.compiles() else ("torch",))]


def self_test(
    devices: Sequence[str],
    *,
    seconds: float = 20.0,
    compile_seconds: float = COMPILE_S,
    tell: Tell = lambda doing, done, total: None,
    clock: Callable[[], float] = time.perf_counter,
) -> SelfTest:
    """Run every check on these devices by every path they have, the paths in turn, for at most so many seconds.

    Args:
        devices: "cpu", "cuda:0" and so on.
        seconds: of tests; a check that began before is finished.
        compile_seconds: of compiling before that.
        tell: is told what is done.
    """
    checks = all_checks()
    paths = [path for device in devices for path in paths_of(device)]
    results = {(check.family, path): Result(check.family, path) for path in paths for check in checks}
    begin = clock()
    ready = set(_compiled([path for path in paths if path.compiles], checks, compile_seconds, tell, clock))
    compiled = clock()
    done = 0
    # check by check, so that what is left out is left out on every path
    for check in checks:
        for path in paths:
            done += 1
            tell(f"{check.family} ({path})", done, len(checks) * len(paths))
            result = results[check.family, path]
            if clock() - compiled >= seconds:
                result.untested.append(f"{check.name}: {seconds:g} s were over")
            elif path.compiles and (path, check.name, check.family) not in ready:
                result.untested.append(f"{check.name}: compiling took more than {compile_seconds:g} s; run it again")
            else:
                _hold(check, path, result)
    unchecked = registered_ops() - {op for check in checks for op in check.ops}
    return SelfTest(tuple(results.values()), clock() - compiled, compiled - begin, tuple(sorted(unchecked)))


def _compiled(
    paths: Sequence[Path], checks: Sequence[Check], seconds: float, tell: Tell, clock: Callable[[], float]
) -> Iterator[tuple[Path, str, str]]:
    """Run each check once, so that what it needs is compiled; which of them came to that."""
    begin, done, total = clock(), 0, len(paths) * len(checks)
    for path in paths:
        doing = "numba compiles loops" if path.by == "numba" else "Triton compiles kernels"
        for check in checks:
            done += 1
            tell(f"{doing}: {check.family}", done, total)
            if clock() - begin >= seconds:
                return
            # what it raises comes again where it is reported
            with suppress(Exception):
                _run(check, path)
            yield path, check.name, check.family


def _run(check: Check, path: Path) -> Sequence[object]:
    with without_numba() if path.by == "torch" and path.device == "cpu" else nullcontext(), warnings.catch_warnings():
        # NaN among the inputs is what some checks are about
        warnings.simplefilter("ignore", RuntimeWarning)
        return check.run(torch.device(path.device))


def _hold(check: Check, path: Path, result: Result) -> None:
    """Compare what the path gives with the reference."""
    try:
        got = _run(check, path)
        with without_numba():
            difference, wrong = compare(got, check.reference(), check.tolerance)
    except Exception as error:
        result.failed.append(f"{check.name}: {numba_loops.line(error)}")
        return
    if wrong:
        result.failed.append(f"{check.name}: {'; '.join(wrong)}")
    else:
        result.passed += 1
        result.difference = max(result.difference, difference)


def self_test_interpreted(
    seconds: float, *, tell: Tell = lambda doing, done, total: None, start_s: float = START_S
) -> SelfTest:
    """Run every check by Triton's interpreter, on the CPU, in a process of its own: for machines without a GPU.

    Raises:
        RuntimeError: the process ended, or was ended, without results; the text is its last line.
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    code = f"from {__name__} import _main; _main({seconds!r})"
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code], env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        end = Timer(start_s + 2 * seconds, process.kill)
        end.start()
        try:
            assert process.stdout is not None and process.stderr is not None
            last: dict[str, object] = {}
            for line in process.stdout:
                last = json.loads(line)
                if "doing" in last:
                    tell(str(last["doing"]), int(str(last["done"])), int(str(last["total"])))
            errors = process.stderr.read().strip().splitlines()
        finally:
            end.cancel()
            process.kill()
    if "results" not in last:
        raise RuntimeError(errors[-1] if errors else f"the process was ended after {start_s + 2 * seconds:g} s")
    entries: Any = last["results"]
    path = Path("cpu", INTERPRETER)
    results = tuple(Result(**{**entry, "path": path}) for entry in entries)
    return SelfTest(results, float(str(last["seconds"])), 0.0, ())


def _main(seconds: float) -> None:
    """What that process does: a line of JSON for each part, and one of all results."""

    def print_progress(doing: str, done: int, total: int) -> None:
        print(json.dumps({"doing": doing, "done": done, "total": total}), flush=True)

    done = self_test(["cpu"], seconds=seconds, tell=print_progress)
    listed = [{name: value for name, value in vars(result).items() if name != "path"} for result in done.results]
    print(json.dumps({"results": listed, "seconds": done.seconds}), flush=True)


def counted(results: Sequence[Result]) -> Counter[str]:
    """Checks that passed, failed and were not tested."""
    return Counter(
        passed=sum(result.passed for result in results),
        failed=sum(len(result.failed) for result in results),
        untested=sum(len(result.untested) for result in results),
    )

"""The self-test as findings, and what is proven where there is no GPU to test on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.util import find_spec

import torch

from shardwise.kernels import _op

from ..selftest import run
from ..selftest.run import Path, Result, SelfTest, Tell
from .findings import NOTE, OK, PROBLEM, UNTESTED, Finding
from .proven import PROVEN

NAMES = {"triton": "Triton", "numba": "numba", "torch": "torch alone", run.INTERPRETER: "Triton's interpreter"}
# sentences of failures that the text has of a path; the JSON has all of them
MOST = 12


def self_test(devices: Sequence[str], seconds: float, tell: Tell) -> Iterator[Finding]:
    """Every family of ops by every path of these devices; by Triton's interpreter too where there is no GPU."""
    done = run.self_test(devices, seconds=seconds, tell=tell)
    families = list(dict.fromkeys(result.family for result in done.results))
    yield Finding(OK, "families", f"{len(families)}: {', '.join(families)}")
    yield from _of_paths(done, seconds)
    if done.compile_seconds > 2:
        text = f"compiling took {done.compile_seconds:.0f} s before that; what is compiled is kept for the next process"
        yield Finding(OK, "compiled", text, data={"seconds": round(done.compile_seconds, 1)})
    if done.unchecked:
        text = f"no check knows {', '.join(done.unchecked)}"
        yield Finding(UNTESTED, "other ops", text, "please report it: each op should have a check in perf/selftest/")
    if "cpu" in devices and _op.HAS_TRITON and not _op.INTERPRETED and not torch.cuda.is_available():
        yield from _interpreted(max(0.0, seconds - done.seconds), tell)


def _interpreted(seconds: float, tell: Tell) -> Iterator[Finding]:
    try:
        yield from _of_paths(run.self_test_interpreted(seconds, tell=tell), seconds)
    except (RuntimeError, OSError, ValueError) as error:
        why = " ".join(str(error).split())[:200]
        mend = "TRITON_INTERPRET=1 shardwise doctor --device cpu says more"
        yield Finding(UNTESTED, f"CPU, {NAMES[run.INTERPRETER]}", f"its process ended: {why}", mend)


def _of_paths(done: SelfTest, seconds: float) -> Iterator[Finding]:
    for path in dict.fromkeys(result.path for result in done.results):
        yield from _of_path(path, [result for result in done.results if result.path == path], seconds)


def _of_path(path: Path, results: Sequence[Result], seconds: float) -> Iterator[Finding]:
    """What passed in one line, then what failed, then what was not tested."""
    where = "CPU" if path.device == "cpu" else f"GPU {path.device.split(':')[1]}"
    subject = f"{where}, {NAMES[path.by]}"
    counted = run.counted(results)
    data = {
        "device": path.device, "path": path.by, **counted,
        "families": [
            {"family": result.family, "passed": result.passed, "failed": result.failed, "untested": result.untested,
             "difference": result.difference}
            for result in results
        ],
    }  # fmt: skip
    good = [result.family for result in results if result.passed and not result.failed]
    if good:
        every = "all" if len(good) == len(results) else f"{len(good)} of {len(results)}"
        text = f"{every} families passed, {counted['passed']} checks of values and gradients"
        if counted["untested"]:
            # that a family passed is said of all its checks alone
            text = f"{counted['passed']} of {counted.total()} checks passed, of {every} families"
        yield Finding(OK, subject, text, data=data)
    failures = [f"{result.family}, {sentence}" for result in results for sentence in result.failed]
    if failures:
        text = f"{len(failures)} of {counted.total()} checks failed: results here cannot be trusted"
        more = [f"and {len(failures) - MOST} more"] if len(failures) > MOST else []
        data = {**({} if good else data), "failures": failures}
        yield Finding(PROBLEM, subject, "\n".join([text, *failures[:MOST], *more]), _mend(path), data)
    left = [result.family for result in results if result.untested]
    if left:
        text = f"{counted['untested']} checks did not fit {seconds:.3g} s: {', '.join(left)}"
        yield Finding(UNTESTED, subject, text, "shardwise doctor --seconds 120", {} if good or failures else data)


def _mend(path: Path) -> str:
    if path.by == "numba":
        return "SHARDWISE_NUMBA=0 does without numba; please report it with `shardwise doctor --json`"
    return "please report it with `shardwise doctor --json`"


def proof() -> Iterator[Finding]:
    """What is known of the kernels without a GPU, and that it is no more than that."""
    cuda = torch.cuda.is_available()
    if not PROVEN.gpus:
        text = "no kernel of shardwise has run on a GPU yet"
        mend = "run `shardwise doctor` on a machine with a GPU; what follows is proven without one"
        if cuda:
            text += ", when this version was made: the self-test above is the first that is known of"
            mend = "please report what `shardwise doctor --json` says"
        yield Finding(NOTE, "GPUs", text, mend)
    else:
        yield Finding(OK, "GPUs", f"kernels were tested and timed on {', '.join(PROVEN.gpus)}")
    by_count: dict[int, list[str]] = {}
    for triton, kernels in PROVEN.compiled.items():
        by_count.setdefault(kernels, []).append(triton)
    compiled = "; ".join(f"{kernels} kernels by triton {', '.join(names)}" for kernels, names in by_count.items())
    yield Finding(
        OK, "compiled", f"{compiled}, whole for {', '.join(PROVEN.whole)}, in part for {', '.join(PROVEN.part)}"
    )  # fmt: skip
    yield Finding(
        OK, "executed",
        f"{PROVEN.executed} cases as compiled for {PROVEN.target} by triton {PROVEN.executed_by}, on a CPU: addresses,"
        " races, barriers and values",
    )  # fmt: skip
    pairs = ", ".join(f"{a} with {b}" for a, b in PROVEN.pairs)
    yield Finding(OK, "interpreted", f"tests of values and gradients passed on torch and triton {pairs}")
    if find_spec("triton") is None:
        text = "triton is not installed: the interpreter's self-test was left out"
        yield Finding(UNTESTED, "here", text, "pip install triton, which Linux has wheels of")

"""Cases of the suite: CPU seconds of the command line's smallest answers, held to a budget beside `python -c pass`.

Times are user and system seconds of whole processes, so that other processes hardly count; where the system does not
tell them of children (Windows) they are seconds that passed. A shell waits for completion at every key.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import shardwise
from shardwise.perf.suite.case import OURS, Case, Ready, Series, Setting

# what a console script does, by the interpreter that runs this
SCRIPT = "import sys; from shardwise.cli import main; sys.exit(main())"
NOTHING = "python -c pass"
# pairs of processes whose medians are held to the budget
PAIRS = 7


@dataclass(frozen=True)
class Answer:
    """A command, how many times the seconds of `python -c pass` it may take, and a word of what it prints."""

    name: str
    budget: float
    prints: str
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


ANSWERS = (
    Answer("shardwise --version", 4.0, shardwise.__version__, ["--version"]),
    Answer("shardwise --help", 8.0, "doctor", ["--help"]),
    Answer("shardwise perf run --help", 8.0, "--suite", ["perf", "run", "--help"]),
    Answer(
        "shardwise, completion", 8.0, "plan",
        environment={"_SHARDWISE_COMPLETE": "bash_complete", "COMP_WORDS": "shardwise p", "COMP_CWORD": "1"},
    ),
)  # fmt: skip


def make_answer(setting: Setting, *, answer: Answer) -> Ready:
    """The answer beside a process that does nothing."""

    def check() -> None:
        _, printed = cpu_seconds(["-c", SCRIPT, *answer.arguments], answer.environment)
        if answer.prints not in printed:
            raise AssertionError(f"{answer.name} prints {printed[:200]!r}, without {answer.prints!r}")
        require_within(answer, rounds(answer, PAIRS))

    return Ready(check=check, rounds=partial(rounds, answer), graph=False, notes={"budget": _budget(answer)})


def _budget(answer: Answer) -> str:
    return f"{answer.budget:g}x of {NOTHING}"


def require_within(answer: Answer, series: Series) -> None:
    """Raise AssertionError where the median is over the budget."""
    answer_s, nothing = (statistics.median(series[who]) for who in (OURS, NOTHING))
    if answer_s > answer.budget * nothing:
        raise AssertionError(
            f"{answer.name} takes {1e3 * answer_s:.0f} ms of CPU, {answer_s / nothing:.1f}x of {NOTHING} with"
            f" {1e3 * nothing:.0f} ms; its budget is {answer.budget:g}x"
        )


def rounds(answer: Answer, count: int) -> Series:
    """CPU seconds of so many processes of each, in turn."""
    seconds: dict[str, list[float]] = {OURS: [], NOTHING: []}
    for _ in range(count):
        seconds[OURS].append(cpu_seconds(["-c", SCRIPT, *answer.arguments], answer.environment)[0])
        seconds[NOTHING].append(cpu_seconds(["-c", "pass"])[0])
    return seconds


def cpu_seconds(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> tuple[float, str]:
    """User and system seconds of a Python process that has this shardwise first on its path, and what it printed.

    Raises:
        RuntimeError: it failed.
    """
    root = Path(shardwise.__file__).resolve().parents[1]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    before = _children()
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=60,
        env={**os.environ, "PYTHONPATH": path, **(environment or {})},
    )  # fmt: skip
    taken = _children() - before
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments)}:\n{done.stdout}{done.stderr}")
    return taken, done.stdout


def _children() -> float:
    """CPU seconds of all processes that this one started and that ended."""
    if sys.platform == "win32":
        return time.perf_counter()
    import resource

    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


CASES: Sequence[Case] = tuple(
    Case(
        answer.name, "package", partial(make_answer, answer=answer), frozenset({"cpu", "full"}), frozenset({"cpu"}),
        slow=True,
    )
    for answer in ANSWERS
)  # fmt: skip

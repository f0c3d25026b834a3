"""All cases run in some processes, each barrier of each kernel taken out in turn, and what is said of it, by kernel."""

from __future__ import annotations

import multiprocessing
import platform
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from itertools import islice
from time import perf_counter
from typing import Any

import torch

# the whole names, as cases have them: to a type checker modules of two names are two
from shardwise.perf.gpu.barriers import Around
from shardwise.perf.gpu.cases import CASES, TOLERANCES, Case, run_case
from shardwise.perf.gpu.launches import TARGET, Cut
from shardwise.perf.suite.machine import commit_info, versions

_BY_NAME = {case.name: case for case in CASES}
# cases that may see that a barrier is missing: the quickest, then those whose loops go around most
_QUICKEST, _LONGEST = 4, 3
# barriers of a kernel that nothing reports, at most so many, and why they are left
_LEFT = {
    "jagged.bmm.dense_bmm": (
        3,
        "each thread copies to pieces of its own, before and behind it; the pairs that did not run are of a product"
        " without inner columns, for which another program is compiled",
    ),
}
# a buffer is streamed where a warp asks for so many bytes at once; scalars are not
_STREAMED = 64


@dataclass(frozen=True)
class Launched:
    """A launch of a case: see `Execution`; `requests` has (requests, bytes, sectors) by buffer."""

    kernel: str
    variant: str
    barriers: int
    instructions: int
    faults: tuple[str, ...]
    requests: dict[str, tuple[int, int, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one run of a case, or of one with a barrier `cut` out and what lies `around` that."""

    case: str
    launches: tuple[Launched, ...]
    difference: float
    wrong: tuple[str, ...]
    seconds: float
    cut: Cut | None = None
    around: Around | None = None


@dataclass(frozen=True)
class Missing:
    """A program without the barrier `cut`: the run that `shows` it is missing, or why nothing has to.

    It is `redundant` if all accesses ran that it alone orders, and what they have in common is one thread's each time.
    Where some did not run, and those that ran have nothing in common, it `may_be`.
    """

    cut: Cut
    shows: Outcome | None = None
    redundant: bool = False
    may_be: bool = False

    @property
    def sentence(self) -> str | None:
        if self.shows:
            return f"{self.shows.case}: {self.shows.wrong[0]}"
        if self.redundant:
            return "redundant: what it alone orders touches pieces of one thread each"
        return f"left: {_LEFT[self.cut.kernel][1]}" if self.may_be and self.cut.kernel in _LEFT else None


def select(text: str, every: bool) -> list[Case]:
    """The quick cases, or every case, with `text` in their names or in those of their kernels."""
    return [
        case for case in CASES if (every or case.quick) and (text in case.name or any(text in k for k in case.kernels))
    ]


class Workers:
    """Some processes that run cases; each keeps what it compiled. Used as a context."""

    def __init__(self, jobs: int) -> None:
        # kernels and cases cannot be pickled: processes are forks
        context = multiprocessing.get_context("fork")
        self.jobs = jobs
        self.pool = ProcessPoolExecutor(jobs, context, _one_thread) if jobs > 1 else None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self.pool is not None:
            self.pool.shutdown(cancel_futures=True)

    def outcomes(self, tasks: Sequence[tuple[str, Cut | None]], *, shuffle: int | None = None) -> Iterator[Outcome]:
        """Run cases by name, some with a barrier cut out; in the order in which they end.

        Raises:
            BrokenProcessPool: a process died, as a compiler can make it.
        """
        if self.pool is None:
            yield from (_outcome(name, cut, shuffle) for name, cut in tasks)
            return
        left, pool = iter(tasks), self.pool
        waiting: set[Future[Outcome]] = {pool.submit(_outcome, *task, shuffle) for task in islice(left, 2 * self.jobs)}
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            waiting |= {pool.submit(_outcome, *task, shuffle) for task in islice(left, len(done))}
            for future in done:
                yield future.result()


def _one_thread() -> None:
    torch.set_num_threads(1)


def _outcome(name: str, cut: Cut | None, shuffle: int | None) -> Outcome:
    begin = perf_counter()
    result = run_case(_BY_NAME[name], cut=cut, shuffle=shuffle)
    launches = tuple(
        Launched(
            launch.kernel, launch.variant, launch.barriers, launch.instructions, tuple(dict.fromkeys(launch.faults)),
            {access: (n["requests"], n["bytes"], n["sectors"]) for access, n in launch.requests.items()},
        )
        for launch in result.log.launches
    )  # fmt: skip
    # the same instruction is at fault in every program
    wrong = tuple(dict.fromkeys(result.wrong))
    cuts = [launch.around for launch in result.log.launches if launch.around]
    for other in cuts[1:]:
        cuts[0].join(other)
    # what a fault ended early is of no use
    return Outcome(
        name, launches, result.difference, wrong, perf_counter() - begin, cut, None if wrong or not cuts else cuts[0]
    )  # fmt: skip


def barriers_cut(ran: Sequence[Outcome], workers: Workers) -> Iterator[Missing]:
    """Each barrier of the kernels that ran, taken out.

    A kernel is compiled to many programs: of those with equally many barriers one is cut.
    """
    open_cuts = {
        cut: iter(dict.fromkeys([*names[:_QUICKEST], *names[-_LONGEST:]])) for cut, names in _cuts(ran).items()
    }
    around: dict[Cut, Around] = {}
    while open_cuts:
        tasks = []
        for cut in [*open_cuts]:
            name = next(open_cuts[cut], None)
            if name is None:
                del open_cuts[cut]
                known = around.get(cut)
                yield Missing(cut, redundant=bool(known and known.redundant), may_be=bool(known and not known.meeting))
            else:
                tasks.append((name, cut))
        for outcome in workers.outcomes(tasks):
            if outcome.cut is None:
                continue
            if outcome.wrong:
                del open_cuts[outcome.cut]
                yield Missing(outcome.cut, outcome)
            elif outcome.around:
                around.setdefault(outcome.cut, Around(outcome.around.pairs)).join(outcome.around)


def _cuts(ran: Sequence[Outcome]) -> dict[Cut, list[str]]:
    """Cuts to make, each with the cases that launch the program."""
    cases: dict[tuple[str, str], list[str]] = defaultdict(list)
    barriers: dict[tuple[str, str], int] = {}
    for outcome in sorted(ran, key=lambda outcome: sum(launch.instructions for launch in outcome.launches)):
        for launch in outcome.launches:
            program = launch.kernel, launch.variant
            barriers[program] = launch.barriers
            if not outcome.wrong and outcome.case not in cases[program]:
                cases[program].append(outcome.case)
    # the program that most cases launch stands for those with as many barriers
    chosen: dict[tuple[str, int], tuple[str, str]] = {}
    # one whose cases fail as it is shows nothing
    for program in sorted((p for p in barriers if cases[p]), key=lambda program: -len(cases[program])):
        chosen.setdefault((program[0], barriers[program]), program)
    return {
        Cut(*program, n): cases[program] for (_, count), program in sorted(chosen.items()) for n in range(count)
    }  # fmt: skip


def count_barriers(ran: Sequence[Outcome]) -> int:
    """How many barriers `barriers_cut` takes out."""
    return len(_cuts(ran))


def by_kernel(ran: Sequence[Outcome], cut: Sequence[Missing] = ()) -> dict[str, dict[str, Any]]:
    """Facts of each kernel that was launched, for a table and a file.

    The difference of a case counts for the kernels that it is there for, a fault for the kernel that made it.
    """
    entries: dict[str, dict[str, Any]] = {}
    requests: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    for outcome in sorted(ran, key=lambda outcome: outcome.case):
        case = _BY_NAME[outcome.case]
        for launch in outcome.launches:
            entry = entries.setdefault(launch.kernel, _entry())
            entry["launches"] += 1
            entry["instructions"] += launch.instructions
            entry["programs"].add(launch.variant)
            entry["faults"] += [f"{case.name}: {fault}" for fault in launch.faults]
            for access, numbers in launch.requests.items():
                for unit, number in zip(("requests", "bytes", "sectors"), numbers, strict=True):
                    requests[launch.kernel][access, unit] += number
        for kernel in case.kernels:
            entry = entries.setdefault(kernel, _entry())
            entry["cases"] += 1
            kept = entry["differences"].setdefault(case.tolerance.name, 0.0)
            entry["differences"][case.tolerance.name] = max(kept, outcome.difference)
    for kernel, entry in entries.items():
        entry["programs"] = len(entry["programs"])
        entry["sector_share"] = _shares(requests[kernel])
    for missing in sorted(cut, key=lambda missing: (missing.cut.kernel, missing.cut.variant, missing.cut.barrier)):
        entries[missing.cut.kernel]["barriers"].setdefault(missing.cut.variant, []).append(missing.sentence)
    return dict(sorted(entries.items()))


def _entry() -> dict[str, Any]:
    return {
        "cases": 0, "launches": 0, "programs": set(), "instructions": 0, "faults": [], "differences": {},
        "barriers": {},
    }  # fmt: skip


def _shares(requests: Counter[tuple[str, str]]) -> dict[str, float]:
    """The part of the sectors that warps touch that they asked for, by buffer, of accesses that are no scalars."""
    buffers = sorted({access for access, _ in requests})
    return {
        access: round(requests[access, "bytes"] / 32 / requests[access, "sectors"], 3)
        for access in buffers
        if requests[access, "sectors"] and requests[access, "bytes"] >= _STREAMED * requests[access, "requests"]
    }


def document(ran: Sequence[Outcome], cut: Sequence[Missing], command: str, seconds: float) -> dict[str, Any]:
    """Everything in one JSON object: what ran, of which versions, what was allowed, and each kernel."""
    used = {_BY_NAME[outcome.case].tolerance.name for outcome in ran}
    return {
        "command": command,
        "target": f"sm_{TARGET[1]}",
        "versions": {"python": platform.python_version(), **versions()},
        "commit": commit_info(),
        "seconds": round(seconds),
        "cases": len(ran),
        "instructions": sum(launch.instructions for outcome in ran for launch in outcome.launches),
        "barriers": {
            "cut": len(cut),
            "reported": sum(missing.shows is not None for missing in cut),
            "redundant": sum(missing.redundant for missing in cut),
            "left": sum((missing.sentence or "").startswith("left") for missing in cut),
        },
        "wrong": [f"{outcome.case}: {sentence}" for outcome in ran for sentence in outcome.wrong],
        "tolerances": {
            tolerance.name: {
                "ratios": {str(dtype).removeprefix("torch."): ratio for dtype, ratio in tolerance.ratios.items()},
                "reason": tolerance.reason,
            }
            for tolerance in TOLERANCES
            if tolerance.name in used
        },
        "kernels": by_kernel(ran, cut),
    }


def unexplained(cut: Sequence[Missing]) -> list[Cut]:
    """Barriers that can be taken out of a program and nothing shows, nor says why; more than are left of a kernel."""
    kept: Counter[str] = Counter()
    cuts = []
    for missing in cut:
        reported = missing.shows is not None or missing.redundant
        kept[missing.cut.kernel] += not reported
        if missing.sentence is None or (not reported and kept[missing.cut.kernel] > _LEFT[missing.cut.kernel][0]):
            cuts.append(missing.cut)
    return cuts

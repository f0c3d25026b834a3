"""Find the best config of each kernel by timing candidates on real inputs, and write them to a file that is shared.

For a job (an entry to find) every candidate first has to give the bits that the heuristic gives, else it is dropped
and told of. Then all of them are timed in turn, round by round, so that what disturbs the machine disturbs all. A
candidate is taken where its median beats the heuristic's by more than `MARGIN`. Updates run on tables of the tuner's
own. The file is written after each entry, whole or not at all, so what was found stays when the tuner is stopped.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels import configs
from shardwise.kernels.configs import Config
from shardwise.perf.suite.case import in_a_line
from shardwise.perf.suite.timing import graphs_of, times_us
from shardwise.perf.tune.candidates import candidates
from shardwise.perf.tune.tuner_inputs import (
    Call,
    Job,
    checked,
    make,
)

# what a candidate must be faster by: less is noise
MARGIN = 0.02
ROUNDS = 5
# what a candidate costs on a GPU, about: compiling it, and the rounds
SECONDS_A_CANDIDATE = 3.0


class OutOfTimeError(RuntimeError):
    """The budget was used up within a job, of which nothing is kept."""


@dataclass(frozen=True)
class Found:
    """The outcome of a job: `config` is {} where the heuristic stays; `dropped` says what was wrong with candidates.

    Times are nan where the job failed as a whole, which `dropped` says too.
    """

    what: str
    config: Config
    default_us: float
    best_us: float
    dropped: tuple[str, ...] = ()

    @property
    def failed(self) -> bool:
        """Nothing was found, not even that the heuristic is best."""
        return math.isnan(self.default_us)

    @property
    def ratio(self) -> float:
        """How many times faster than the heuristic."""
        return self.default_us / self.best_us


def tune(job: Job, device: str, *, repeats: int, rounds: int, deadline: float) -> Found:
    """Time the candidates of a job.

    Raises:
        OutOfTimeError: `deadline`, by time.monotonic, has passed.
    """
    kernel, tried = job.key.kernel, candidates(job.key.kernel, job.key.dtype, job.key.dim)
    kept, dropped = same_results(job, device, tried, deadline)
    inputs = make(job, device)
    calls = _ready(kernel, ({}, *kept), inputs.calls, device)
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(rounds):
        for config, ready, taken in zip(({}, *kept), calls, times, strict=True):
            _stop_after(deadline)
            with configs.forced({kernel: config}):
                taken.extend(times_us(ready, "cuda" if device == "cuda" else "cpu", repeats))
    default_us, *others = [median(taken) for taken in times]
    best: Config = {}
    best_us = default_us
    for config, us in zip(kept, others, strict=True):
        if us < min(best_us, (1 - MARGIN) * default_us):
            best, best_us = config, us
    return Found(str(job.key), best, default_us, best_us, tuple(dropped))


def same_results(
    job: Job, device: str, tried: Sequence[Config], deadline: float = float("inf")
) -> tuple[list[Config], list[str]]:
    """Candidates that give the heuristic's bits, and a sentence for each that does not."""
    inputs, kernel = make(replace(job, workload=checked(job.workload)), device), job.key.kernel
    with configs.forced({kernel: {}}):
        expected = inputs.result()
    kept, dropped = [], []
    for config in tried:
        _stop_after(deadline)
        try:
            with configs.forced({kernel: config}):
                got = inputs.result()
        # a compiler may fail in any way, and the others are still worth their time
        except Exception as error:
            dropped.append(f"{job}: {text_of(config)} fails: {in_a_line(error)}")
            continue
        if all(map(same_bits, got, expected)):
            kept.append(config)
        else:
            dropped.append(f"{job}: {text_of(config)} gives other bits than the heuristic")
    return kept, dropped


def same_bits(first: Tensor, second: Tensor) -> bool:
    """Equal in every bit, NaN and the sign of zero included."""
    return bool(torch.equal(first.contiguous().view(torch.uint8), second.contiguous().view(torch.uint8)))


def _ready(kernel: str, tried: Sequence[Config], calls: Sequence[Call], device: str) -> list[Sequence[Call]]:
    """The calls under each config as graphs with it in them; under all of them as they are where one has no graph."""
    graphs: list[Sequence[Call]] = []
    for config in tried if device == "cuda" else ():
        with configs.forced({kernel: config}):
            for call in calls:
                call()
            try:
                graphs.append(graphs_of(calls))
            # an op that waits for the GPU cannot be captured
            except Exception:
                torch.cuda.synchronize()
                break
    return graphs if len(graphs) == len(tried) else [calls] * len(tried)


def _stop_after(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise OutOfTimeError


def text_of(config: Config) -> str:
    """A config in words."""
    return " ".join(f"{name}={value}" for name, value in config.items()) or "heuristic"


class File:
    """A file of tuned configs of one device, kept as the tuner finds them."""

    def __init__(self, path: Path, device: str, architecture: str) -> None:
        """Begin with what the file holds, if it is there.

        Raises:
            ValueError: it is no such file, or one of another device.
            OSError: it cannot be read, or nothing can be written there.
        """
        self.path = path
        self.content: dict[str, Any] = {
            "shardwise_tuned": configs.FORMAT, "device": device, "architecture": architecture, "entries": [], "cpu": [],
        }  # fmt: skip
        if path.exists():
            stored = configs.read(path)
            if stored.device != device:
                raise ValueError(f"{path} holds configs of {stored.device}, not of {device}")
            self.content.update(json.loads(path.read_text(encoding="utf-8")))
        # what is found in minutes should not fail to be written in the end
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass

    def has(self, kind: str, key: dict[str, Any]) -> bool:
        """Whether an entry with all of this is there."""
        return any(_fits(entry, key) for entry in self.content[kind])

    def value(self, key: dict[str, Any]) -> int:
        """The value of a setting that the file has."""
        return next(int(entry["value"]) for entry in self.content["cpu"] if _fits(entry, key))

    def put(self, kind: str, key: dict[str, Any], value: dict[str, Any]) -> None:
        """Write an entry, in place of one of the same key."""
        others = [entry for entry in self.content[kind] if not _fits(entry, key)]
        self.content[kind] = [*others, {**key, **value}]
        lines = json.dumps({**self.content, "entries": [], "cpu": []}, indent=1).splitlines()
        text = "\n".join(_with_lists(lines, self.content)) + "\n"
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=f".{self.path.name}")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        # mkstemp's files are for their owner alone
        Path(name).chmod(0o644)
        Path(name).replace(self.path)


def _fits(entry: dict[str, Any], key: dict[str, Any]) -> bool:
    return all(entry.get(name) == value for name, value in key.items())


def _with_lists(lines: Sequence[str], content: dict[str, Any]) -> Iterator[str]:
    """A line for each entry, so that a difference between two files can be read."""
    for line in lines:
        name = line.strip().split('"')[1] if '"' in line else ""
        if name in ("entries", "cpu") and content[name]:
            yield f' "{name}": ['
            yield ",\n".join(f"  {json.dumps(entry)}" for entry in content[name])
            yield " ]," if line.endswith(",") else " ]"
        else:
            yield line


def key_of(job: Job) -> dict[str, Any]:
    """The key of a job's entry in a file."""
    return dict(vars(job.key))


def tune_all(
    jobs: Sequence[Job],
    device: str,
    *,
    file: File | None,
    repeats: int,
    rounds: int = ROUNDS,
    seconds: float,
    again: bool = False,
    tell: Callable[[int, str], None] = lambda done, doing: None,
) -> Iterator[Found]:
    """Tune jobs that the file has no entry of, in their order, until the seconds are used up; each is written at once.

    A job that raises is told of, not written, and the next begins. `tell` hears how many jobs are done and which one
    begins.
    """
    deadline = time.monotonic() + seconds
    for number, job in enumerate(jobs):
        tell(number, str(job))
        if file is not None and not again and file.has("entries", key_of(job)):
            continue
        try:
            outcome = tune(job, device, repeats=repeats, rounds=rounds, deadline=deadline)
        except OutOfTimeError:
            return
        # the next may do, and what was found stays
        except Exception as error:
            yield Found(str(job.key), {}, math.nan, math.nan, (f"{job}: not tuned: {in_a_line(error)}",))
            continue
        if file is not None:
            us = {"default": round(outcome.default_us, 2), "best": round(outcome.best_us, 2)}
            file.put("entries", key_of(job), {"config": dict(outcome.config), "us": us})
        yield outcome
    tell(len(jobs), "")

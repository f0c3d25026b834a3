"""The tuner on a CPU: threads and sizes of the CPU path, one value of each for the machine and its number of threads.

Lookups, checks and updates of a few shapes are timed under each value of one setting after another, those before at
their best values; values take turns, so that what disturbs the machine disturbs all. A value is taken where the
geometric mean over the shapes of its medians over the heuristic's is better by more than `MARGIN` and no shape is worse
by more than that. A value under which a result has other bits than under the heuristic is dropped and told of.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import exp, log
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels import configs, new_guard
from shardwise.kernels.lookup.bounds import check_ids
from shardwise.perf.suite.batches import Batch, optimizer
from shardwise.perf.suite.workloads import (
    Workload,
    equal,
    fitted,
    tiny,
)
from shardwise.perf.tune.tuner import (
    File,
    Found,
    OutOfTimeError,
    same_bits,
)
from shardwise.perf.tune.tuner_inputs import FLOATS, batches_of, checked

MARGIN = 0.03
# of all tables together
MEMORY = 2 << 30
_FACTORS = (0.125, 0.25, 0.5, 2, 4, 8)


@dataclass(frozen=True)
class Shape:
    """One op on one workload: calls to time, and what one of them gives on fresh tables and states."""

    name: str
    calls: Sequence[Callable[[], object]]
    result: Callable[[], list[Tensor]]


def workloads_of(dims: Sequence[int], lengths: Sequence[int], *, small: bool) -> list[Workload]:
    """Eight tables of 100,000 rows, 1,024 samples, for each dim and length."""
    workloads = [equal(f"D={d} L={n}", 8, 100_000, d, 1024, n) for d in dims for n in lengths]
    return [tiny(workload) for workload in workloads] if small else workloads


def shapes_of(workloads: Sequence[Workload], dtypes: Sequence[str]) -> list[Shape]:
    """A lookup with the check of its ids, and a rowwise Adagrad step, for each workload and float dtype."""
    shapes = []
    # all of them are held at once, their gradients and a copy beside them
    for workload in (fitted(each, MEMORY // max(len(workloads), 1)) for each in workloads):
        for dtype in (name for name in dtypes if name in FLOATS):
            # one workload's tables would throw another's out of the caches anyway
            batches = batches_of(workload, FLOATS[dtype], "cpu")
            checks = batches_of(checked(workload), FLOATS[dtype], "cpu")
            names = f"{workload.name} {dtype}"
            shapes.append(
                Shape(f"lookup {names}", [partial(_look_up, b) for b in batches], partial(_looked_up, checks))
            )
            state = optimizer("rowwise_adagrad", batches[0])
            updates = [partial(state.update, batch) for batch in batches]
            shapes.append(Shape(f"update {names}", updates, partial(_updated, [*checks, batches[0]])))
    return shapes


def _look_up(batch: Batch) -> Tensor:
    names = [str(f) for f in range(len(batch.dims))]
    check_ids(batch.indices, batch.offsets, batch.features, new_guard(), names=names)
    return batch.lookup()


def _looked_up(batches: Sequence[Batch]) -> list[Tensor]:
    return [_look_up(batch) for batch in batches]


def _updated(batches: Sequence[Batch]) -> list[Tensor]:
    """Tables and states after a step from the same start for each batch."""
    tensors = []
    for batch in batches:
        copy = replace(batch, weights=batch.weights.clone())
        state = optimizer("rowwise_adagrad", copy)
        state.update(copy)
        tensors += [copy.weights, *state.states]
    return tensors


def settings_of(shapes: Sequence[Shape]) -> dict[str, tuple[int, list[Shape]]]:
    """Settings that the shapes look up here: the heuristic's value, and which shapes they are."""
    settings: dict[str, tuple[int, list[Shape]]] = {}
    for shape in shapes:
        with configs.asked() as asked:
            shape.calls[0]()
        for setting, value in asked.items():
            settings.setdefault(setting, (value, []))[1].append(shape)
    return settings


def values_of(setting: str, heuristic: int) -> list[int]:
    """Values to try beside the heuristic's."""
    low, high = configs.CPU_LIMITS[setting]
    tried = [0, 1, 2, 4, 8] if heuristic < 8 else [int(heuristic * factor) for factor in _FACTORS]
    return [value for value in tried if low <= value <= high and value != heuristic]


def tune(
    setting: str,
    heuristic: int,
    shapes: Sequence[Shape],
    best: Mapping[str, int],
    *,
    turns: int,
    deadline: float,
) -> tuple[Found, int]:
    """The best value of a setting with others at `best`.

    Raises:
        OutOfTimeError: `deadline`, by time.monotonic, has passed.
    """
    kept, dropped = [heuristic], []
    with configs.forced(cpu={**best, setting: heuristic}):
        expected = [shape.result() for shape in shapes]
    for value in values_of(setting, heuristic):
        with configs.forced(cpu={**best, setting: value}):
            got = [shape.result() for shape in shapes]
        pairs = [pair for both in zip(got, expected, strict=True) for pair in zip(*both, strict=True)]
        if all(same_bits(*pair) for pair in pairs):
            kept.append(value)
        else:
            dropped.append(f"{setting}: {value} gives other bits than {heuristic}")
    del expected
    times: dict[tuple[int, int], list[float]] = {}
    for turn in range(turns):
        # each begins as often as any other
        order = kept[turn % len(kept) :] + kept[: turn % len(kept)]
        for value in order:
            if time.monotonic() > deadline:
                raise OutOfTimeError
            with configs.forced(cpu={**best, setting: value}):
                for number, shape in enumerate(shapes):
                    times.setdefault((value, number), []).append(_taken_us(shape.calls, turn))
    medians = {key: median(taken) for key, taken in times.items()}
    numbers = range(len(shapes))
    chosen, chosen_ratio = heuristic, 1.0
    for value in kept[1:]:
        ratios = [medians[value, n] / medians[heuristic, n] for n in numbers]
        mean = exp(fmean(map(log, ratios)))
        if mean < min(chosen_ratio, 1 - MARGIN) and max(ratios) <= 1 + MARGIN:
            chosen, chosen_ratio = value, mean
    default_us = exp(fmean(log(medians[heuristic, n]) for n in numbers))
    config = {} if chosen == heuristic else {"value": chosen}
    return Found(f"{setting} (of {heuristic})", config, default_us, default_us * chosen_ratio, tuple(dropped)), chosen


def _taken_us(calls: Sequence[Callable[[], Any]], turn: int) -> float:
    """The second of two calls on different inputs: the first brings back what other shapes threw out of the caches."""
    calls[turn % len(calls)]()
    start = time.perf_counter()
    calls[(turn + 1) % len(calls)]()
    return (time.perf_counter() - start) * 1e6


def tune_all(
    settings: Mapping[str, tuple[int, list[Shape]]],
    chosen: Sequence[str],
    *,
    file: File | None,
    turns: int,
    seconds: float,
    again: bool = False,
    tell: Callable[[int, str], None] = lambda done, doing: None,
) -> Iterator[Found]:
    """Tune the chosen settings but those that the file has, until the seconds are used up; each is written at once.

    `tell` hears how many settings are done and which one begins.
    """
    deadline, threads = time.monotonic() + seconds, torch.get_num_threads()
    best: dict[str, int] = {}
    for number, setting in enumerate(chosen):
        heuristic, concerned = settings[setting]
        tell(number, setting)
        key = {"setting": setting, "threads": threads}
        if file is not None and not again and file.has("cpu", key):
            best[setting] = file.value(key)
            continue
        try:
            outcome, best[setting] = tune(setting, heuristic, concerned, best, turns=turns, deadline=deadline)
        except OutOfTimeError:
            return
        if file is not None:
            us = {"default": round(outcome.default_us, 2), "best": round(outcome.best_us, 2)}
            file.put("cpu", key, {"value": best[setting], "us": us})
        yield outcome
    tell(len(chosen), "")

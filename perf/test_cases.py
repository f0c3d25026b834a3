"""The cases of the suite as benchmarks: `pytest perf/ --benchmark-compare=out.json` beside what `perf run` stored."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from shardwise.perf.suite.case import (
    OURS,
    Case,
    Ready,
    Setting,
)
from shardwise.perf.suite.clock import Clock
from shardwise.perf.suite.measure import (
    BUDGETS,
    copy_gb_s,
    lap_of,
    measured,
    prepared,
    rounds_within,
    shuffled,
    yardsticks,
)
from shardwise.perf.suite.record import Lap, Record, values
from shardwise.perf.suite.storage import extra_info
from shardwise.perf.suite.timing import Turn, collector_off, turn


def test_case(case: Case, setting: Setting, benchmark: Any, clock: Clock) -> None:
    ready = case.make(setting)
    try:
        ready.check()
        budget, copy = BUDGETS[setting.device](0, 1, setting.small), copy_gb_s(setting)
        if ready.rounds is not None or setting.device == "cuda":
            # what measures itself, in other processes or by events, is told to the benchmark
            lap = measured(case, ready, setting.device, budget, copy)
            record = _record(case, ready, setting, lap)
            clock.replay(values(record))
            benchmark.pedantic(lambda: None, rounds=len(values(record)))
        else:
            record = _record(case, ready, setting, _in_turns(case, ready, benchmark, clock, copy, setting))
        benchmark.extra_info.update(extra_info(record))
    finally:
        ready.close()


def test_size(case: Case, setting: Setting, sizes: list[Record]) -> None:
    ready = case.make(setting)
    try:
        ready.check()
        record = _record(case, ready, setting, measured(case, ready, setting.device, BUDGETS["cpu"](0)))
    finally:
        ready.close()
    assert values(record)[0] > 0
    sizes.append(record)


def _record(case: Case, ready: Ready, setting: Setting, lap: Lap) -> Record:
    return Record(
        case.name, case.group, (lap,), case.unit, setting.device, ready.bytes_moved, ready.floor, ready.notes
    )  # fmt: skip


def _in_turns(case: Case, ready: Ready, benchmark: Any, clock: Clock, copy: float, setting: Setting) -> Lap:
    """The benchmark calls ours; in between the others have their turns."""
    budget = BUDGETS["cpu"](0, 1, setting.small)
    with collector_off():
        sides = prepared({OURS: ready.calls, **ready.peers, **yardsticks()}, budget, case.slow)
        turns: dict[str, list[Turn | None]] = {who: [] for who in sides}
        own_side = sides.pop(OURS)
        clock.of_turns(own_side.times)

        def others() -> None:
            number = len(turns[OURS])
            for who, side in shuffled(sides, number):
                turns[who].append(None if number % side.every else turn(side.of(number)))

        def own_turn(*_: Sequence[object]) -> None:
            turns[OURS].append(turn(own_side.of(len(turns[OURS]))))

        benchmark.pedantic(own_turn, setup=others, rounds=rounds_within({OURS: own_side, **sides}, budget, case.slow))
    return lap_of(turns, copy)

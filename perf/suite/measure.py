"""Run cases: check each, then time ours, the peers and two yardsticks in turn, in rounds, lap after lap over all cases.

A round gives each side one turn, in a random order, so what disturbs the machine disturbs every side. A lap goes
over all cases; the laps of a case lie minutes apart, so a slow drift shows as spread of the case. On a CPU setups are
made again in each lap, tables and all, because where memory happens to lie is part of the spread too: a whole run in
the same pages can be a tenth slower than the next. On a GPU dear ones are kept if there is room.

On a GPU the sides run eagerly and as replays of CUDA graphs, each turn between two events.
"""

from __future__ import annotations

import gc
import random
import time
import traceback
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import Any

import torch

from shardwise.perf.suite import machine
from shardwise.perf.suite.case import (
    OURS,
    PEERS,
    Call,
    Case,
    Fresh,
    Ready,
    Setting,
    with_states,
)
from shardwise.perf.suite.peers import release
from shardwise.perf.suite.record import (
    GRAPH,
    Lap,
    Record,
    calm_laps,
)
from shardwise.perf.suite.timing import (
    CudaTurns,
    Turn,
    collector_off,
    copy_bandwidth,
    disturbed,
    graphs_of,
    turn,
)

# a side whose turn takes so many times as long as all others together has a turn in every fourth round
SELDOM, EVERY = 8.0, 4
# there a setup that takes so long is kept for the next lap
KEPT_ON, KEPT_S = "cuda", 1.0
# laps that the comparison needs undisturbed, and extra laps to get them
CALM_LAPS, EXTRA_LAPS = 3, 3
# states of the calls of a turn are made in at most so long
STATES_S = 10e-3
COPY_BYTES = {"cpu": 128 << 20, "cuda": 1 << 30}


@dataclass(frozen=True)
class Budget:
    """How much is measured.

    Attributes:
        laps: over the list of cases, as many as fit into limit_s.
        rounds: of a case in a lap, at most.
        seconds: of a case in a lap; twice as long for slow ones.
        least: rounds that a case has in any event.
        turn_s: a turn makes so many calls that it lasts so long.
        limit_s: of the whole run; no case begins later.
    """

    laps: int = 6
    rounds: int = 24
    seconds: float = 0.5
    least: int = 2
    turn_s: float = 1e-3
    limit_s: float = 480.0


def cpu_budget(limit_s: float, laps: int | None = None, small: bool = False) -> Budget:
    """Of a run on a CPU; at small sizes all that counts is that it runs."""
    return (
        Budget(laps or 1, rounds=3, seconds=0.1, limit_s=limit_s)
        if small
        else Budget(laps or Budget.laps, limit_s=limit_s)
    )


def cuda_budget(limit_s: float, laps: int | None = None, small: bool = False) -> Budget:
    """Of a run on a GPU: medians of 100."""
    if small:
        return Budget(laps or 1, rounds=5, seconds=0.5, limit_s=limit_s)
    laps = laps or 3
    return Budget(laps, rounds=-(-100 // laps), seconds=3.0, limit_s=limit_s)


BUDGETS = {"cpu": cpu_budget, "cuda": cuda_budget}


@dataclass(frozen=True)
class Failure:
    """A case that raised, or whose result is wrong: its error, and all of the traceback that matters."""

    name: str
    group: str
    error: str
    trace: str = ""


@dataclass(frozen=True)
class Measured:
    """The records and failures of a list of cases, and those not run."""

    records: tuple[Record, ...] = ()
    failures: tuple[Failure, ...] = ()
    not_run: tuple[str, ...] = ()
    interrupted: bool = False


@dataclass
class _Place:
    """A case and what has been done of it."""

    case: Case
    laps: list[Lap] = field(default_factory=list)
    ready: Ready | None = None
    last: Ready | None = None
    setup_s: float = 0.0
    lap_s: float = 0.0
    failure: Failure | None = None

    def cost_s(self) -> float:
        return self.lap_s + (0.0 if self.ready is not None else self.setup_s)

    def record(self, device: str) -> Record:
        ready = self.last or Ready()
        return Record(
            self.case.name, self.case.group, tuple(self.laps), self.case.unit, device,
            ready.bytes_moved, ready.floor, ready.notes,
        )  # fmt: skip


def run(
    cases: Sequence[Case],
    setting: Setting,
    budget: Budget,
    *,
    tell: Callable[[str, int, int], None] = lambda name, lap, place: None,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Check and measure the cases; `tell` hears the name, the lap and the place of what comes next.

    A KeyboardInterrupt ends the run, and what was measured until then is returned.
    """
    places = [_Place(case) for case in cases]
    # each lap of each case collects garbage, and all that was imported is none
    gc.freeze()
    end, free, interrupted = clock() + budget.limit_s, machine.memory_bytes(setting.device), False
    try:
        for lap in count():
            chosen = _chosen(places, lap, budget, end - clock())
            if not chosen:
                break
            if setting.device != KEPT_ON:
                release()
            copy = copy_gb_s(setting)
            for place in chosen:
                if clock() >= end:
                    break
                tell(place.case.name, lap, places.index(place))
                _step(place, setting, budget, copy, free, clock)
    except KeyboardInterrupt:
        interrupted = True
    finally:
        gc.unfreeze()
        for place in places:
            _dropped(place)
    return Measured(
        tuple(place.record(setting.device) for place in places if place.laps and not place.failure),
        tuple(place.failure for place in places if place.failure),
        tuple(place.case.name for place in places if not place.laps and not place.failure),
        interrupted,
    )


def _chosen(places: Sequence[_Place], lap: int, budget: Budget, left_s: float) -> list[_Place]:
    """Who has a turn in a lap: all in the first, then those that cost least, as many as the time allows."""
    if left_s <= 0:
        return []
    if lap == 0:
        return list(places)
    going = [place for place in places if place.laps and not place.failure and place.case.unit == "s"]
    if lap >= budget.laps:
        extra = lap < budget.laps + EXTRA_LAPS and budget.laps >= CALM_LAPS
        going = [place for place in going if extra and calm_laps(place.record("cpu")) < CALM_LAPS]
    fitting = set[str]()
    for place in sorted(going, key=_Place.cost_s):
        left_s -= place.cost_s()
        if left_s >= 0:
            fitting.add(place.case.name)
    return [place for place in going if place.case.name in fitting]


def _step(
    place: _Place, setting: Setting, budget: Budget, copy: float, free: int | None, clock: Callable[[], float]
) -> None:
    """One lap of one case. What it raises is noted, and the next is not stopped."""
    case, first = place.case, not place.laps
    try:
        begin = clock()
        if place.ready is None:
            place.ready = place.last = case.make(setting)
            place.setup_s = clock() - begin
        if first:
            place.ready.check()
        begin = clock()
        place.laps.append(measured(case, place.ready, setting.device, budget, copy, _once(place, budget)))
        place.lap_s = clock() - begin
        dear = place.setup_s > KEPT_S and place.ready.rounds is None and case.unit == "s"
        kept = dear and setting.device == KEPT_ON
        if not (kept and free and (machine.memory_bytes(setting.device) or 0) >= free / 2):
            _dropped(place)
    except Exception as error:
        message = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
        place.failure = Failure(case.name, case.group, message[:1000], traceback.format_exc()[-4000:])
        _dropped(place)


def _once(place: _Place, budget: Budget) -> set[str]:
    """Peers of which a single turn takes longer than a lap should: the first lap has measured them."""
    if not place.laps or place.case.slow:
        return set()
    times = place.laps[0].times.items()
    return {who for who, series in times if who in PEERS and min(filter(None, series), default=0.0) > budget.seconds}


def _dropped(place: _Place) -> None:
    """Give back what a setup holds; only facts of it stay."""
    ready, place.ready = place.ready, None
    if place.last is not None:
        last = place.last
        place.last = Ready(bytes_moved=last.bytes_moved, floor=last.floor, notes=dict(last.notes))
    if ready is None:
        return
    try:
        ready.close()
    except Exception as error:
        place.failure = place.failure or Failure(place.case.name, place.case.group, f"close: {error!r}"[:1000])
    del ready
    gc.collect()


Times = dict[str, list[float | None]]


def measured(
    case: Case, ready: Ready, device: str, budget: Budget, copy: float | None = None, without: Container[str] = ()
) -> Lap:
    """One lap of a case that is set up, without some of the peers."""
    if ready.rounds is not None:
        rounds = 1 if case.unit == "bytes" else budget.least if case.slow else max(budget.least, budget.rounds // 4)
        series = {who: list(seconds) for who, seconds in ready.rounds(rounds).items()}
        if not series.get(OURS):
            raise ValueError(f"its rounds measured nothing of {OURS!r}, but of {sorted(series)}")
        return Lap({OURS: series.pop(OURS), **series}, copy_gb_s=copy)
    if not ready.calls:
        raise ValueError("it has neither calls nor rounds")
    sides = {OURS: ready.calls, **{who: calls for who, calls in ready.peers.items() if who not in without}}
    with collector_off():
        if device == "cuda":
            times, notes = cuda_lap(sides, ready.graph, budget)
            return Lap(times, copy_gb_s=copy, notes=notes)
        return cpu_lap({**sides, **yardsticks()}, budget, case.slow, copy)


@dataclass(frozen=True)
class Side:
    """One of those that have turns: how many calls make a turn, in which rounds it has one, how long that takes."""

    calls: Sequence[Call]
    times: int = 1
    every: int = 1
    turn_s: float = 0.0

    def of(self, number: int) -> list[Call]:
        """The calls of a round: all sides begin a round with the same input."""
        return with_states(self.calls[(number + place) % len(self.calls)] for place in range(self.times))


def prepared(sides: Mapping[str, Sequence[Call]], budget: Budget, slow: bool) -> dict[str, Side]:
    """Warm all sides up and settle how many calls make a turn of each."""
    took = {who: _warmed(calls, budget.seconds, slow) for who, calls in sides.items()}
    times = {who: _times(seconds, budget.turn_s, sides[who]) for who, seconds in took.items()}
    turns = {who: times[who] * seconds for who, seconds in took.items()}
    prepared_sides = {}
    for who, calls in sides.items():
        others = sum(seconds for other, seconds in turns.items() if other != who)
        seldom = who != OURS and others > 0 and turns[who] > SELDOM * others
        prepared_sides[who] = Side(calls, times[who], EVERY if seldom else 1, turns[who])
    return prepared_sides


def _times(seconds: float, turn_s: float, calls: Sequence[Call]) -> int:
    """Calls of a turn: one, or so many that each input has as many, because inputs differ."""
    wanted, inputs = min(1000.0, turn_s / max(seconds, 1e-9)), len(calls)
    if isinstance(calls[0], Fresh):
        wanted = min(wanted, STATES_S / max(turn([calls[0].make]).seconds, 1e-9))
    return 1 if wanted < 1.5 else -(-round(wanted) // inputs) * inputs


def _warmed(calls: Sequence[Call], limit_s: float, slow: bool) -> float:
    """Seconds of a call, once each has been made: compilers, allocators and page faults come first."""
    begin, seconds = time.perf_counter(), 0.0
    for call in calls[:1] if slow else calls:
        seconds = turn(with_states([call])).seconds
        if time.perf_counter() - begin > limit_s:
            return seconds
    return seconds if slow else min(turn(with_states([call])).seconds for call in calls)


def rounds_within(sides: Mapping[str, Side], budget: Budget, slow: bool) -> int:
    """How many rounds the budget has room for."""
    round_s = sum(side.turn_s / side.every for side in sides.values())
    return max(budget.least, min(budget.rounds, round(budget.seconds * (2 if slow else 1) / max(round_s, 1e-9))))


def cpu_lap(calls: Mapping[str, Sequence[Call]], budget: Budget, slow: bool, copy: float | None = None) -> Lap:
    """Rounds until the budget is used, the sides in another order each round."""
    sides = prepared(calls, budget, slow)
    turns: dict[str, list[Turn | None]] = {who: [] for who in sides}
    end, number = time.perf_counter() + budget.seconds * (2 if slow else 1), 0
    while number < budget.rounds and (number < budget.least or time.perf_counter() < end):
        for who, side in shuffled(sides, number):
            turns[who].append(None if number % side.every else turn(side.of(number)))
        number += 1
    return lap_of(turns, copy)


def lap_of(turns: Mapping[str, Sequence[Turn | None]], copy: float | None = None) -> Lap:
    """Times of the turns, and which of them lost a core."""
    times: Times = {who: [turn.seconds if turn else None for turn in made] for who, made in turns.items()}
    return Lap(times, {who: places for who, made in turns.items() if (places := disturbed(made))}, copy)


def shuffled(sides: Mapping[str, Any], number: int) -> list[tuple[str, Any]]:
    """The order of a round, the same in every run.

    A rotation would have each side follow the same one nearly always, and what that leaves in the caches with it.
    """
    return random.Random(number).sample(list(sides.items()), len(sides))


def cuda_lap(calls: Mapping[str, Sequence[Call]], graph: bool, budget: Budget) -> tuple[Times, dict[str, str]]:
    """The same by events, with replays of graphs beside the eager calls; and why some could not be captured."""
    sides, notes = {who: list(series) for who, series in calls.items()}, {}
    for series in sides.values():
        for call in [*series, *series]:
            call()
    for who, series in list(sides.items()) if graph else ():
        try:
            sides[who + GRAPH] = graphs_of(series)
        except Exception as error:
            notes[who + GRAPH] = repr(error)[:500]
            torch.cuda.synchronize()
    turns, times = CudaTurns(), Times()
    end, number = time.perf_counter() + budget.seconds, 0
    while number < budget.rounds and (number < budget.least or time.perf_counter() < end):
        order = shuffled(sides, number)
        for who, series in order:
            turns.begin(series[number % len(series)], not who.endswith(GRAPH))
        for (who, _), seconds in zip(order, turns.finish(), strict=True):
            times.setdefault(who, []).append(seconds)
        number += 1
    return times, notes


def yardsticks() -> dict[str, Sequence[Call]]:
    """Work that no change of the library touches: the interpreter's, and memory's with all threads."""
    pairs = [[torch.zeros(4 << 20) for _ in range(2)] for _ in range(3)]
    return {"python": [_count], "memory": [partial(to.copy_, source) for to, source in pairs]}


def _count() -> int:
    total = 0
    for number in range(10_000):
        total += number * number
    return total


def copy_gb_s(setting: Setting) -> float:
    """Bandwidth of a copy, beyond any cache."""
    nbytes = 8 << 20 if setting.small else COPY_BYTES[setting.device]
    return float(copy_bandwidth(setting.device, nbytes, 9 if setting.device == "cpu" else 25)["gb_per_s"])

"""Two runs side by side: which cases became slower, beyond what the machine does by itself.

A case is judged by three measures, each the change of a median over laps from one run to the other:
- its time, the median of a lap's turns, over the pace of the machine: what all that is not ours (peers, the
  interpreter, memory) took in the new run over what it took in the base, the median of all cases;
- its low time, the tenth percentile of the turns, over the same: other processes make turns longer, never shorter;
- its time beside what was timed in the same rounds, of which the steadiest counts.
The threshold of a measure is max(5 %, 3 IQR), IQR the range between the quartiles of the laps over their median, the
larger of both runs. A case has become slower if its steadiest measure is beyond its threshold and no other denies it:
each of them is beyond 5 %. Sizes have no spread and their threshold is 1 %.

Replays of CUDA graphs are judged as cases of their own. Where other processes took the cores in nearly every turn, a
case is told as unsettled: nothing is known of it.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shardwise.perf.suite.case import OURS, PEERS
from shardwise.perf.suite.record import (
    YARDSTICKS,
    Record,
    by_lap,
    calm_laps,
    quantile,
    relative_iqr,
    split,
    values,
)
from shardwise.perf.suite.storage import Stored

AT_LEAST, IQRS, SIZE = 5.0, 3.0, 1.0
LOW = 0.1
# laps with undisturbed turns that a case needs in both runs, of as many as it has
SETTLED_LAPS = 2
# of fewer laps the spread of the rounds counts
FEW_LAPS = 3
# the pace of the machine follows from so many sides at least
FEW_SIDES = 6
# for what took no time at all
LEAST = 1e-12
# these have to be the same in both runs
DEVICE = ("device", "device_name", "threads")


@dataclass(frozen=True)
class Change:
    """A measure in both runs and its threshold in percent; `expected` is its change if the case has none."""

    measure: str
    base: float
    new: float
    threshold: float
    expected: float = 1.0

    @property
    def percent(self) -> float:
        """The change as it was measured."""
        return 100 * (self.new / max(self.base, LEAST) - 1)

    @property
    def times(self) -> float:
        """The change beyond what was expected."""
        return max(self.new, LEAST) / max(self.base, LEAST) / self.expected


@dataclass(frozen=True)
class Verdict:
    """The outcome of a case: "slower", "faster", "same" or "unsettled"; `changes` begin with the time's."""

    name: str
    group: str
    unit: str
    outcome: str
    changes: tuple[Change, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class Comparison:
    """Of two runs.

    Attributes:
        lost: cases of the base that the new run has no measurement of, and why.
        added: cases that only the new run has.
        failed: cases that fail in the new run and did not in the base, which has no measurement of them either.
        failing: cases that fail in both.
        differences: what else differs between the runs, in words.
        pace: times that what is not ours took in the new run over those in the base.
    """

    verdicts: tuple[Verdict, ...]
    lost: Mapping[str, str] = field(default_factory=dict)
    added: tuple[str, ...] = ()
    failed: Mapping[str, str] = field(default_factory=dict)
    failing: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    pace: float = 1.0

    def of(self, outcome: str) -> list[Verdict]:
        """The verdicts of one outcome."""
        return [verdict for verdict in self.verdicts if verdict.outcome == outcome]

    @property
    def judged(self) -> bool:
        """Something was compared, and not only found unsettled."""
        return any(verdict.outcome != "unsettled" for verdict in self.verdicts)

    @property
    def good(self) -> bool:
        """Nothing became slower, failed or was lost."""
        return not (self.of("slower") or self.lost or self.failed)


def refusal(base: Stored, new: Stored) -> str | None:
    """Why the runs must not be compared: another device, other threads, other sizes."""
    for key in DEVICE:
        base_value, new_value = base.machine.get(key), new.machine.get(key)
        if base_value != new_value:
            return f"{base.path} was measured with {key} {base_value!r}, {new.path} with {new_value!r}"
    if bool(base.about.get("small")) != bool(new.about.get("small")):
        return "one of the runs was made with --small"
    return None


def compare(base: Stored, new: Stored, at_least: float = AT_LEAST, iqrs: float = IQRS, only: str = "") -> Comparison:
    """Judge every case that both runs have, and name those that one lacks."""
    wanted = re.compile(only)
    sides = [
        {
            record.name: record
            for record in split(side.measured.records)
            if wanted.search(f"{record.group}: {record.name}")
        }
        for side in (base, new)
    ]
    failures = {
        failure.name: failure.error
        for failure in new.measured.failures
        if wanted.search(f"{failure.group}: {failure.name}")
    }
    failing_before = {failure.name for failure in base.measured.failures}
    lost = {name: _reason(name, new, failures) for name in sides[0] if name not in sides[1]}
    both = [(record, sides[1][name]) for name, record in sides[0].items() if name in sides[1]]
    shift = pace(both)
    verdicts = [judge(before, after, at_least, iqrs, shift) for before, after in both]
    return Comparison(
        tuple(verdicts), lost, tuple(name for name in sides[1] if name not in sides[0]),
        {name: error for name, error in failures.items() if name not in lost and name not in failing_before},
        tuple(name for name in failures if name in failing_before), tuple(differences(base, new)), shift,
    )  # fmt: skip


def _reason(name: str, new: Stored, failures: Mapping[str, str]) -> str:
    if name in failures:
        return f"fails now: {failures[name]}"
    return "not run: the time was up" if name in new.measured.not_run else "missing"


def differences(base: Stored, new: Stored) -> list[str]:
    """Devices and versions that are not the same, in words."""
    before, after = base.machine.get("versions", {}), new.machine.get("versions", {})
    facts = [(key, base.machine.get(key), new.machine.get(key)) for key in DEVICE]
    facts += [(name, before.get(name) or "none", after.get(name) or "none") for name in sorted({*before, *after})]
    return [f"{fact}: {old} in the base, {now} now" for fact, old, now in facts if old != now]


def pace(both: Sequence[tuple[Record, Record]]) -> float:
    """The machine's change of pace, by all that no change of the library touches; 1 where little of it was measured."""
    paces = [
        max(statistics.median(after), LEAST) / max(statistics.median(before), LEAST)
        for base, new in both
        for who in (*YARDSTICKS, *PEERS)
        if (before := values(base, who)) and (after := values(new, who))
    ]
    return statistics.median(paces) if len(paces) >= FEW_SIDES else 1.0


def judge(base: Record, new: Record, at_least: float = AT_LEAST, iqrs: float = IQRS, shift: float = 1.0) -> Verdict:
    """The outcome of one case on a machine whose pace has changed by `shift`."""
    named = (base.name, base.group, base.unit)
    if base.unit != "s":
        before, after = (statistics.median(values(record)) for record in (base, new))
        size = Change("size", before, after, SIZE)
        return Verdict(*named, outcome([size], SIZE), (size,))
    changes = _changes(base, new, at_least, iqrs, shift)
    if base.bytes_moved and new.bytes_moved and abs(new.bytes_moved / base.bytes_moved - 1) > 0.05:
        why = f"it moved {base.bytes_moved:.4g} bytes then and {new.bytes_moved:.4g} now: other sizes"
        return Verdict(*named, "unsettled", changes, why)
    busy = [
        run
        for run, record in (("base", base), ("new run", new))
        if calm_laps(record) < min(SETTLED_LAPS, len(record.laps))
    ]
    if busy:
        return Verdict(*named, "unsettled", changes, f"other processes took the cores in the {' and the '.join(busy)}")
    return Verdict(*named, outcome(changes, at_least), changes)


def outcome(changes: Sequence[Change], at_least: float) -> str:
    """The steadiest measure is beyond its threshold, and the others agree to the least that counts."""
    steadiest = min(changes, key=lambda change: change.threshold)
    for direction, sign in (("slower", 1), ("faster", -1)):
        limits = [(change, change.threshold if change is steadiest else at_least) for change in changes]
        if all(change.times**sign > 1 + limit / 100 for change, limit in limits):
            return direction
    return "same"


def _changes(base: Record, new: Record, at_least: float, iqrs: float, shift: float) -> tuple[Change, ...]:
    """Time, low time, and time beside whatever it is steadiest beside."""

    def change(name: str, over: str | None, of: Callable[[Sequence[float]], float] = statistics.median) -> Change:
        before, after = by_lap(base, over, of), by_lap(new, over, of)
        spread = max(_spread(before, base, over), _spread(after, new, over))
        middles = statistics.median(before), statistics.median(after)
        return Change(name, *middles, max(at_least, 100 * iqrs * spread), 1.0 if over else shift)

    others = [who for who in (*YARDSTICKS, *PEERS) if values(base, OURS, who) and values(new, OURS, who)]
    beside = [change(f"beside {who}", who) for who in others]
    steadiest = min(beside, key=lambda candidate: candidate.threshold, default=None)
    changes = [change("time", None), change("low time", None, low)]
    return (*changes, steadiest) if steadiest else tuple(changes)


def low(times: Sequence[float]) -> float:
    """A low quantile, which other processes hardly touch."""
    return quantile(times, LOW)


def _spread(laps: Sequence[float], record: Record, over: str | None) -> float:
    """Between the laps; of the rounds where there are too few."""
    return relative_iqr(laps if len(laps) >= FEW_LAPS else values(record, OURS, over))

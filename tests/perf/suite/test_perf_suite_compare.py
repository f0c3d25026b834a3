"""What counts as slower: rules by example, and by thousands of runs of a machine that drifts and is disturbed."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from shardwise.perf.suite.case import OURS
from shardwise.perf.suite.compare import (
    Comparison,
    compare,
    judge,
    refusal,
)
from shardwise.perf.suite.measure import Failure, Measured
from shardwise.perf.suite.record import Lap, Record
from shardwise.perf.suite.report import compared
from shardwise.perf.suite.storage import Stored

MACHINE = {"device": "cpu", "device_name": "a CPU", "threads": 2, "versions": {"torch": "2.13.0", "numba": None}}


def made(
    factor: float = 1.0, *, spread: float = 0.0, name: str = "a", laps: int = 5, unit: str = "s", **others: float
) -> Record:
    """Laps around factor, `spread` apart from the first to the last; others as many times that time."""
    timed_laps = []
    for lap in range(laps):
        time = factor * (1 + spread * (lap / max(laps - 1, 1) - 0.5))
        sides = {OURS: time, **{who: time * by for who, by in others.items()}}
        timed_laps.append(Lap({who: [own * 0.999, own, own * 1.001] for who, own in sides.items()}))
    return Record(name, "lookup", tuple(timed_laps), unit)


def stored(*records: Record, failures: tuple[Failure, ...] = (), machine: Any = MACHINE, **about: Any) -> Stored:
    not_run = about.pop("not_run", ())
    return Stored("a.json", Measured(records, failures, not_run), machine, about)


@pytest.mark.parametrize(
    ("base", "new", "outcome"),
    [
        (made(), made(), "same"),
        (made(), made(1.04), "same"),
        (made(), made(1.06), "slower"),
        (made(), made(0.94), "faster"),
        # the laps' quartiles are 2.5 % apart: 7.5 % does not count, 9 % does, whichever run has the spread
        (made(spread=0.05), made(1.07), "same"),
        (made(), made(1.07, spread=0.05), "same"),
        (made(spread=0.05), made(1.09), "slower"),
        # all sides were slower, so it is the machine
        (made(torch=2.0), made(1.3, torch=2.0), "same"),
        (made(python=2.0), made(1.3, python=2.0), "same"),
        # ours alone was
        (made(torch=2.0), made(1.3, torch=2.0 / 1.3), "slower"),
        # of what it was timed beside the steadiest tells
        (made(python=2.0, memory=1.0), made(1.3, python=2.0 / 1.3, memory=1.0), "slower"),
        (made(laps=1), made(1.2, laps=1), "slower"),
        (made(465.0, unit="bytes", laps=1), made(469.0, unit="bytes", laps=1), "same"),
        (made(465.0, unit="bytes", laps=1), made(475.0, unit="bytes", laps=1), "slower"),
    ],
)
def test_outcomes(base: Record, new: Record, outcome: str) -> None:
    assert judge(base, new).outcome == outcome


def test_thresholds_are_settings() -> None:
    assert judge(made(), made(1.06), at_least=10).outcome == "same"
    assert judge(made(spread=0.05), made(1.07), iqrs=2).outcome == "slower"


def test_the_pace_of_the_machine_is_no_change_of_a_case() -> None:
    """A case that is a fifth slower was missed where the machine was a fifth faster in the second run."""
    names = ("a", "b", "c")
    base = stored(*(made(name=name, python=1.0, torch=2.0) for name in names))
    slower = 1.2 * 0.85
    new = stored(
        made(slower, python=1 / 1.2, torch=2 / 1.2), *(made(0.85, name=n, python=1.0, torch=2.0) for n in "bc")
    )
    comparison = compare(base, new)
    assert comparison.pace == pytest.approx(0.85)
    assert [(verdict.name, verdict.outcome) for verdict in comparison.verdicts] == [
        ("a", "slower"),
        ("b", "same"),
        ("c", "same"),
    ]
    assert "the machine: peers and yardsticks took -15 %" in "\n".join(compared(comparison))


def test_of_few_laps_the_spread_of_the_rounds_counts() -> None:
    rounds = Record("a", "lookup", (Lap({OURS: [0.9, 1.0, 1.1]}),))
    slower = Record("a", "lookup", (Lap({OURS: [1.08, 1.2, 1.32]}),))
    # quartiles 10 % apart: 30 % would count
    assert judge(rounds, slower).outcome == "same"


def test_where_others_took_the_cores_nothing_is_known() -> None:
    busy = [replace(lap, disturbed={OURS: [0, 1, 2]}) for lap in made(3.0).laps]
    new = replace(made(), laps=(*busy[:4], made(3.0).laps[0]))
    verdict = judge(made(), new)
    assert verdict.outcome == "unsettled" and verdict.why == "other processes took the cores in the new run"
    # two laps suffice, and the disturbed ones are left out of the times
    assert judge(made(), replace(new, laps=(*busy[:3], *made().laps[:2]))).outcome == "same"
    comparison = compare(stored(made()), stored(new))
    assert comparison.good and "unsettled: a: other processes" in "\n".join(compared(comparison))


def test_a_comparison_names_cases_numbers_and_the_threshold() -> None:
    names = ("same", "slow", "fast", "gone", "breaks", "late")
    base = stored(*(made(1e-3, name=name) for name in names), failures=(Failure("broken", "update", "as ever"),))
    new = stored(
        made(1e-3, name="same"), made(1.2e-3, name="slow"), made(8e-4, name="fast"), made(1e-3, name="added"),
        failures=(
            Failure("breaks", "lookup", "AssertionError: 2, not 3"), Failure("worse", "lookup", "no"),
            Failure("broken", "update", "as ever"),
        ),
        not_run=("late",), machine={**MACHINE, "versions": {"torch": "2.14.0", "numba": None}},
    )  # fmt: skip
    comparison = compare(base, new)
    assert not comparison.good
    lines = compared(comparison)
    assert lines[0] == "differs: torch: 2.13.0 in the base, 2.14.0 now"
    text = "\n".join(lines)
    assert "slower: slow: 1 ms -> 1.2 ms (+20.0 %), low time +20.0 % (threshold 5.0 % of its time)" in text
    assert "faster: fast: 1 ms -> 800 us (-20.0 %)" in text
    assert "lost: gone: missing" in text and "lost: breaks: fails now: AssertionError: 2, not 3" in text
    assert "lost: late: not run: the time was up" in text
    assert "failed: worse: no" in text and "only in the new run: added" in text
    assert "failing in both runs: broken" in text
    assert lines[-1] == "1 same, 1 faster, 1 slower, 3 lost, 1 failed: REGRESSION"
    assert compare(base, new, only="^lookup: (same|fast)$").good


def test_each_of_slower_lost_and_failed_ends_badly() -> None:
    good = stored(made())
    assert compare(good, good).good
    assert not compare(good, stored(made(1.2))).good
    assert not compare(good, stored()).good
    assert not compare(good, stored(made(), failures=(Failure("b", "lookup", "no"),))).good
    assert compare(good, stored(made(), made(name="b"))).good


def test_other_devices_threads_and_sizes_are_refused() -> None:
    base = stored(made())
    assert refusal(base, base) is None
    for key, value in (("device", "cuda"), ("device_name", "another CPU"), ("threads", 4)):
        other = stored(made(), machine={**MACHINE, key: value})
        assert key in str(refusal(base, other))
        assert any(key in difference for difference in compare(base, other).differences)
    assert "--small" in str(refusal(base, stored(made(), small=True)))
    # other versions are told, not refused
    assert refusal(base, stored(made(), machine={**MACHINE, "versions": {}})) is None


def machine_run(rng: random.Random, slowdown: dict[str, float], noise: float, bursts: float) -> Stored:
    """A run of twelve cases: the machine's speed differs from run to run and from lap to lap, turns scatter, and in
    bursts another process takes a core, which triples turns and is mostly noticed."""
    speed = rng.lognormvariate(0, 0.08)
    drift = [rng.lognormvariate(0, 0.03) for _ in range(5)]
    records = []
    for number in range(12):
        name, laps = f"case {number}", []
        for lap in range(5):
            local = speed * drift[lap] * rng.lognormvariate(0, noise / 3)
            times: dict[str, list[float | None]] = {}
            lost: dict[str, list[int]] = {}
            burst = rng.random() < bursts
            for who, seconds in ((OURS, 1e-3 * slowdown.get(name, 1.0)), ("torch", 3e-3), ("python", 5e-4)):
                own = rng.lognormvariate(0, noise / 3)
                series = []
                for turn in range(20):
                    time = seconds * local * own * rng.lognormvariate(0, noise)
                    if burst and rng.random() < 0.6:
                        time *= 3
                        if rng.random() < 0.9:
                            lost.setdefault(who, []).append(turn)
                    series.append(time)
                times[who] = [*series]
            laps.append(Lap(times, lost))
        records.append(Record(name, "lookup", tuple(laps)))
    return stored(*records)


@pytest.mark.parametrize(
    ("noise", "bursts", "false_alarms", "caught"), [(0.02, 0.0, 0.0, 1.0), (0.04, 0.2, 0.002, 0.95)]
)
def test_noise_is_no_regression_and_a_fifth_slower_is(
    noise: float, bursts: float, false_alarms: float, caught: float
) -> None:
    rng, pairs = random.Random(9), 40
    alarms = hits = others = 0
    for pair in range(pairs):
        planted = f"case {pair % 12}"
        base, new, slow = (
            machine_run(rng, slowdown, noise, bursts) for slowdown in ({}, {}, {planted: 1.2})
        )  # fmt: skip
        alarms += len(compare(base, new).of("slower"))
        slower = [verdict.name for verdict in compare(base, slow).of("slower")]
        hits += planted in slower
        others += len([name for name in slower if name != planted])
    assert alarms + others <= false_alarms * 2 * 12 * pairs
    assert hits >= caught * pairs


def test_a_comparison_without_cases_in_common_is_no_regression_of_itself() -> None:
    comparison = compare(stored(), stored(made()))
    assert comparison == Comparison((), {}, ("a",)) and comparison.good
    assert not comparison.judged and compared(comparison)[-1] == "no case in common: nothing is known"

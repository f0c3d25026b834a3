"""The engine of the regression suite: who has a turn when, what is timed at all, and when it stops."""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import perf_fake_cases
import pytest
from perf_fake_cases import CASES, LOG, case, logged

from shardwise.perf.suite import machine, measure
from shardwise.perf.suite.case import (
    OURS,
    Call,
    Case,
    Ready,
    Setting,
    chosen,
)
from shardwise.perf.suite.measure import (
    Budget,
    cpu_lap,
    run,
    shuffled,
)
from shardwise.perf.suite.record import (
    Lap,
    Record,
    by_lap,
    calm_laps,
    lap_values,
    ratio,
    values,
)
from shardwise.perf.suite.timing import Turn, disturbed, turn

# a turn makes one call, and a lap ends by its rounds
BUDGET = Budget(laps=2, rounds=4, seconds=600, turn_s=0, limit_s=600)
CPU = Setting(memory_bytes=7)


@pytest.fixture(autouse=True)
def _log() -> Iterator[None]:
    LOG.clear()
    yield
    LOG.clear()


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No yardsticks, no copy that takes its time, and no collection of all that the tests before have left."""
    monkeypatch.setattr(gc, "collect", lambda: 0)
    monkeypatch.setattr(measure, "yardsticks", lambda: {})
    monkeypatch.setattr(measure, "copy_gb_s", lambda setting: 10.0)


def counted(made: list[str], name: str, **options: Any) -> Case:
    """A case that notes when it is made and closed."""

    def make(setting: Setting) -> Ready:
        made.append(f"make {name}")
        return Ready(calls=logged(OURS, 2), close=lambda: made.append(f"close {name}"))

    return case(name, make, **options)


def test_sides_take_turns_with_the_same_input_in_random_orders_that_are_the_same_in_every_run() -> None:
    """In a rotation ours always came after the yardstick that empties the caches, and peers after ours."""
    sides = {who: logged(who, 2) for who in (OURS, "torch", "fbgemm")}
    lap = cpu_lap(sides, BUDGET, slow=True)
    # slow sides are warmed up by one call each
    assert LOG[:3] == [(OURS, 0), ("torch", 0), ("fbgemm", 0)]
    rounds = [LOG[place : place + 3] for place in range(3, len(LOG), 3)]
    assert [{*made} for made in rounds] == [{(who, number % 2) for who in sides} for number in range(4)]
    orders = [[who for who, _ in shuffled(sides, number)] for number in range(200)]
    assert [[who for who, _ in made] for made in rounds] == orders[:4]
    before = Counter(pair for order in orders for pair in itertools.pairwise(order))
    assert len(before) == 6 and max(before.values()) < 1.6 * min(before.values())
    assert {who: len(series) for who, series in lap.times.items()} == {OURS: 4, "torch": 4, "fbgemm": 4}


def test_short_calls_share_a_turn_and_a_slow_peer_has_few(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {OURS: 1e-4, "torch": 1.0}

    def timed_turn(calls: Sequence[Callable[[], object]]) -> Turn:
        for call in calls:
            call()
        return Turn(seconds[LOG[-1][0]], len(calls), 0, 0, 0.0, 0.0)

    monkeypatch.setattr(measure, "turn", timed_turn)
    lap = cpu_lap(
        {OURS: logged(OURS, 2), "torch": logged("torch", 2)}, Budget(rounds=8, seconds=600, turn_s=1e-3), False
    )
    assert [time is None for time in lap.times["torch"]] == [False, True, True, True] * 2
    assert lap.times[OURS] == [1e-4] * 8
    # two warm-ups of both inputs, then ten calls a turn, five of each input
    assert sum(who == OURS for who, _ in LOG) == 4 + 10 * 8
    first = [number for who, number in LOG if who == OURS][4:14]
    assert all(number != other for number, other in itertools.pairwise(first))


def test_a_peer_that_takes_longer_than_a_lap_is_measured_in_the_first(
    bare: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def timed_turn(calls: Sequence[Callable[[], object]]) -> Turn:
        calls[0]()
        return Turn(700.0 if LOG[-1][0] == "torch" else 1e-3, 1, 0, 0, 0.0, 0.0)

    monkeypatch.setattr(measure, "turn", timed_turn)
    (record,) = run(CASES[:1], CPU, BUDGET).records
    assert [[*lap.times] for lap in record.laps] == [[OURS, "torch"], [OURS]]


def test_a_wrong_result_is_recorded_and_not_timed(bare: None) -> None:
    measured = run(chosen(CASES, ["cpu"], "cpu"), CPU, BUDGET)
    assert {failure.name: failure.error for failure in measured.failures} == {
        "wrong": "AssertionError: ours gives 2, the reference 3",
        "raises": "RuntimeError: no room for 7 bytes",
    }
    assert "in wrong" in next(failure.trace for failure in measured.failures if failure.name == "wrong")
    assert [record.name for record in measured.records] == ["logs, of three inputs", "own rounds", "size"]
    assert not any(who == "wrong" for who, _ in LOG)
    assert measured.not_run == ()


def test_laps_go_over_all_cases_and_a_size_is_measured_once(bare: None) -> None:
    laps: list[tuple[str, int]] = []
    measured = run(chosen(CASES, ["cpu"], "cpu"), CPU, BUDGET, tell=lambda name, lap, place: laps.append((name, lap)))
    names = ["logs, of three inputs", "wrong", "raises", "own rounds", "size"]
    again = ["logs, of three inputs", "own rounds"]
    assert laps == [*((name, 0) for name in names), *((name, 1) for name in again)]
    logs, own, size = measured.records
    assert [len(lap.times[OURS]) for lap in logs.laps] == [4, 4]
    assert [lap.copy_gb_s for lap in logs.laps] == [10.0, 10.0]
    # of a slow case the least rounds that there have to be
    assert [lap.times for lap in own.laps] == [{OURS: [0.5, 0.51], "torch": [1.0] * 2}] * 2
    assert values(size) == [465.0] and size.unit == "bytes"


@pytest.mark.parametrize(("where", "kept_s", "setups"), [("cpu", -1.0, 1), ("cpu", 600.0, 2), ("cuda", -1.0, 2)])
def test_dear_setups_are_kept_for_the_next_lap_on_a_gpu_and_closed_once(
    bare: None, monkeypatch: pytest.MonkeyPatch, where: str, kept_s: float, setups: int
) -> None:
    monkeypatch.setattr(measure, "KEPT_ON", where)
    monkeypatch.setattr(measure, "KEPT_S", kept_s)
    monkeypatch.setattr(machine, "memory_bytes", lambda device: 1 << 30)
    made: list[str] = []
    run([counted(made, "a")], CPU, BUDGET)
    assert made == ["make a", "close a"] * setups


def test_on_a_cpu_tables_lie_in_new_memory_in_each_lap(bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    monkeypatch.setattr(measure, "release", lambda: made.append("release"))
    run([counted(made, "a"), counted(made, "b")], CPU, BUDGET)
    assert made == ["release", "make a", "close a", "make b", "close b"] * 2


def test_nothing_is_kept_where_memory_gets_short(bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    free = iter([100, 49, 49])
    monkeypatch.setattr(measure, "KEPT_ON", "cpu")
    monkeypatch.setattr(measure, "KEPT_S", -1.0)
    monkeypatch.setattr(machine, "memory_bytes", lambda device: next(free))
    made: list[str] = []
    run([counted(made, "a")], CPU, BUDGET)
    assert made == ["make a", "close a"] * 2


def test_cases_that_begin_after_the_limit_are_not_run(bare: None) -> None:
    ticks = itertools.count()
    made: list[str] = []
    cases = [counted(made, name) for name in "abcd"]
    # a case looks at the clock once before and four times while it is measured
    measured = run(cases, CPU, Budget(laps=2, rounds=1, seconds=600, limit_s=11), clock=lambda: float(next(ticks)))
    assert [record.name for record in measured.records] == ["a", "b"]
    assert measured.not_run == ("c", "d")
    assert made == ["make a", "close a", "make b", "close b"]


def test_a_lap_that_does_not_fit_leaves_out_what_costs_most(bare: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_bytes", lambda device: None)
    # a busy machine would have more
    monkeypatch.setattr(measure, "EXTRA_LAPS", 0)
    now = [0.0]

    def make(seconds: float) -> Callable[[Setting], Ready]:
        def made(setting: Setting) -> Ready:
            now[0] += seconds
            return Ready(calls=logged(OURS, 1))

        return made

    cases = [case("dear", make(50)), case("cheap", make(2)), case("middle", make(20))]
    measured = run(cases, CPU, Budget(laps=3, rounds=1, seconds=600, limit_s=100), clock=lambda: now[0])
    assert {record.name: len(record.laps) for record in measured.records} == {"dear": 1, "cheap": 3, "middle": 2}


def test_an_interrupt_returns_what_was_measured(bare: None) -> None:
    def interrupt(setting: Setting) -> Ready:
        raise KeyboardInterrupt

    made: list[str] = []
    measured = run([counted(made, "a"), case("b", interrupt), counted(made, "c")], CPU, BUDGET)
    assert [record.name for record in measured.records] == ["a"] and measured.not_run == ("b", "c")
    assert made == ["make a", "close a"]


def test_a_setup_is_closed_also_where_its_calls_raise(bare: None) -> None:
    def fail() -> None:
        raise ValueError("broken")

    made: list[str] = []
    ready = Ready(calls=[fail], close=lambda: made.append("close"))
    measured = run([case("a", lambda setting: ready)], CPU, BUDGET)
    assert made == ["close"] and measured.failures[0].error == "ValueError: broken" and not measured.records


@pytest.mark.parametrize(
    ("ready", "error"),
    [
        (Ready(), "ValueError: it has neither calls nor rounds"),
        (Ready(rounds=lambda rounds: {"torch": [1.0]}), "ValueError: its rounds measured nothing of 'shardwise'"),
    ],
)
def test_a_case_without_measurements_of_ours_fails(bare: None, ready: Ready, error: str) -> None:
    measured = run([case("a", lambda setting: ready)], CPU, BUDGET)
    assert measured.failures[0].error.startswith(error)


def test_no_garbage_is_collected_while_calls_are_timed(bare: None) -> None:
    seen: list[bool] = []
    run([case("a", lambda setting: Ready(calls=[lambda: seen.append(gc.isenabled())]))], CPU, BUDGET)
    assert seen and not any(seen) and gc.isenabled()


def test_yardsticks_are_timed_in_the_same_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = run([case("a", lambda setting: Ready(calls=logged(OURS, 1)))], Setting(small=True), Budget(1, rounds=2))
    (lap,) = measured.records[0].laps
    assert {who: len(series) for who, series in lap.times.items()} == {OURS: 2, "python": 2, "memory": 2}
    assert lap.copy_gb_s is not None and lap.copy_gb_s > 0


def test_what_other_threads_lose_counts_only_where_they_work() -> None:
    def made(own: int, everyone: int, seconds: float = 1e-3, all_cpu_s: float = 1e-3) -> Turn:
        return Turn(seconds, 1, own, everyone, 1e-3, all_cpu_s)

    alone = [made(0, 3), None, made(1, 1), made(0, 0)]
    assert disturbed(alone) == [2]
    together = [made(0, 3, all_cpu_s=2e-3), None, made(1, 1, all_cpu_s=2e-3), made(0, 0, all_cpu_s=2e-3)]
    assert disturbed(together) == [0, 2]
    # in so long a time some are lost on a quiet machine as well
    assert disturbed([made(2, 2, seconds=0.1), made(9, 9, seconds=0.1)]) == [1]


def test_a_turn_makes_all_its_calls_and_tells_the_time_of_one() -> None:
    calls: list[Call] = [*logged("a", 3), *logged("b", 1)]
    timing = turn(calls)
    assert LOG == [("a", 0), ("a", 1), ("a", 2), ("b", 0)]
    assert timing.calls == 4 and timing.seconds > 0 and timing.own_switches >= 0


def test_disturbed_turns_are_left_out_where_enough_others_remain() -> None:
    lap = Lap({OURS: [1.0, 2.0, 9.0, 4.0], "torch": [2.0, None, 2.0, 2.0]}, {OURS: [2], "torch": [3]})
    assert lap_values(lap) == ([1.0, 2.0, 4.0], True)
    assert lap_values(lap, OURS, "torch") == ([0.5, 4.5, 2.0], False)
    busy = Lap({OURS: [8.0, 9.0]}, {OURS: [0, 1]})
    assert lap_values(busy) == ([8.0, 9.0], False)
    assert lap_values(lap, "nobody") == ([], False)
    both = Record("a", "lookup", (lap, busy))
    # a lap that is disturbed throughout counts only where all are
    assert values(both) == [1.0, 2.0, 4.0] and by_lap(both) == [2.0] and calm_laps(both) == 1
    assert values(Record("a", "lookup", (busy,))) == [8.0, 9.0]
    assert ratio(Record("a", "lookup", (lap,)), "torch") == (1.25, 2.0, 3.25)


def test_cases_are_chosen_by_suite_device_and_expression() -> None:
    assert [chosen_case.name for chosen_case in chosen(CASES, ["full"], "cpu", "^lookup: ")][-1] == "full only"
    assert [chosen_case.name for chosen_case in chosen(CASES, ["cpu", "full"], "cpu", "package")] == [
        "own rounds",
        "size",
    ]
    for suites, device, only, message in [
        (["gpu"], "cpu", "", "there is no suite 'gpu': did you mean 'cpu'?"),
        (["cpu"], "cpu", "(", "is no regular expression"),
        (["cpu"], "cpu", "nothing", "no case for cpu has 'nothing' in its group and name"),
        (["ebc"], "cpu", "", "of the suites ebc no case for cpu is there"),
    ]:
        with pytest.raises(ValueError, match=message.replace("(", r"\(")):
            chosen(CASES, suites, device, only)


def test_the_suite_has_names_that_pytest_and_people_can_tell_apart() -> None:
    from shardwise.perf.suite.case import DEVICES, SUITES
    from shardwise.perf.suite.cases import CASES as suite

    names = [suite_case.name for suite_case in suite if suite is not perf_fake_cases.CASES]
    assert len(set(names)) == len(names)
    for suite_case in suite:
        assert suite_case.name.isascii() and suite_case.name.isprintable() and not {"[", "]"} & {*suite_case.name}, (
            suite_case.name
        )
        assert (
            suite_case.suites <= {*SUITES} and suite_case.devices <= {*DEVICES} and suite_case.unit in ("s", "bytes")
        ), suite_case.name

"""Cases of modules, sharded steps, the planner and the package: each runs, and a side that is wrong is found out."""

from __future__ import annotations

import gc
import os
import signal
import sys
import weakref
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardwise.perf.suite.case import (
    OURS,
    Case,
    Ready,
    Setting,
)
from shardwise.perf.suite.cases import (
    command_line,
    modules,
    package,
    planner,
    sharded,
)
from shardwise.perf.suite.cases.module_sides import (
    RULES,
    Setup,
    assert_forwards,
    assert_steps,
    batches_of,
    fill,
    sides_of,
    torch_side,
)
from shardwise.perf.suite.cases.sharded import Asked, RankError, Ranks
from shardwise.perf.suite.workloads import EBC, tiny

SMALL = Setting(small=True)
ON_CPU = [case for case in modules.CASES if "cpu" in case.devices]
SETUPS = [
    Setup(tiny(EBC[128]), joined=True, on_host=True),
    Setup(tiny(EBC[128]), rule="rowwise_adagrad"),
    Setup(tiny(EBC[128]), pooled=False),
]


# sparse gradients of torch
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


@contextmanager
def ready(case: Case, setting: Setting = SMALL) -> Iterator[Ready]:
    """A case set up and checked."""
    made = case.make(setting)
    try:
        made.check()
        yield made
    finally:
        made.close()


@pytest.mark.parametrize("case", ON_CPU, ids=lambda case: case.name)
def test_every_case_of_modules_is_right_and_runs(case: Case) -> None:
    with ready(case) as made:
        assert len(made.calls) == 2 and made.bytes_moved is not None and made.bytes_moved > 0 and made.floor
        assert {*made.peers} == ({"torch"} if "dense" not in case.name else set())
        for calls in (made.calls, *made.peers.values()):
            for call in calls:
                call()


@pytest.mark.parametrize("setup", SETUPS, ids=["pooled", "rowwise", "sequence"])
def test_a_table_that_is_wrong_is_found_in_outputs_and_after_a_step(setup: Setup) -> None:
    (batch,) = batches_of(setup, 1)
    named = int(batch.by_table[0][0][0])
    for steps in (False, True):
        sides = sides_of(setup, {"torch": torch_side})
        sides["torch"].tables[0][named, 0] += 0.01
        with pytest.raises(AssertionError, match="output of torch"):
            assert_steps(setup, sides, batch, None) if steps else assert_forwards(setup, sides, batch)


@pytest.mark.parametrize("setup", SETUPS, ids=["pooled", "rowwise", "sequence"])
def test_a_step_at_another_rate_is_found(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    (batch,) = batches_of(setup, 1)
    sides = sides_of(setup, {})
    monkeypatch.setitem(RULES, setup.rule, {**RULES[setup.rule], "lr": 0.015})
    with pytest.raises(AssertionError, match="of shardwise after a step"):
        assert_steps(setup, sides, batch, None)


def test_tables_are_filled_with_rows_that_differ() -> None:
    tables = [torch.empty(9000, 128), torch.empty(3, 128)]
    fill(tables)
    rows = torch.cat(tables)
    assert torch.unique(rows, dim=0).shape == rows.shape and 0.04 < float(rows.max()) <= 0.05


def test_tables_are_freed_when_a_case_is_closed() -> None:
    made = modules.CASES[0].make(SMALL)
    call: Any = made.calls[0]
    (sides,) = [cell.cell_contents for cell in call.func.__closure__ if isinstance(cell.cell_contents, dict)]
    held = [weakref.ref(side.made[0]) for side in sides.values()]
    made.close()
    gc.collect()
    assert len(held) == 2 and all(reference() is None for reference in held)


@pytest.mark.full
@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["mixed", "planned"])
def test_ranks_stay_for_every_round_until_they_are_closed(strategy: str) -> None:
    (case,) = [case for case in sharded.CASES if case.name.endswith(strategy)]
    with ready(case) as made:
        assert made.rounds is not None
        for count in (1, 3):
            assert [len(times) for times in made.rounds(count).values()] == [count]
        assert all(seconds > 0 for seconds in made.rounds(2)[OURS])
    with pytest.raises(RankError, match="closed"):
        made.rounds(1)


@pytest.mark.ranks
def test_a_rank_that_fails_or_ends_is_an_error_that_tells() -> None:
    with pytest.raises(RankError, match="(?s)rank [01] of 2:.*no table is sharded 'sideways'"):
        Ranks(Asked(sharded.SMALL, "sideways", beside=False))
    ranks = Ranks(Asked(sharded.SMALL, "table_wise", beside=False))
    pids = [process.pid for process in ranks._processes]
    os.kill(pids[1] or 0, signal.SIGKILL)
    with pytest.raises(RankError, match="rank [01] ended with exit code -9|rank 0 of 2"):
        ranks.rounds(2)
    assert not ranks._processes


@pytest.mark.parametrize("case", planner.CASES, ids=lambda case: case.name)
def test_plans_are_checked_and_made_anew_in_each_call(case: Case) -> None:
    with ready(case) as made:
        (call,) = made.calls
        assert call() is not call() and not made.peers


def test_a_plan_that_leaves_rows_out_is_found() -> None:
    problem = planner.Problem([(100, 64, 1.0)] * 3, 2, bearable=True)
    plan: Any = planner._planning(planner.ours(), problem)()
    planner.check(problem, plan, "ours")
    with pytest.raises(AssertionError, match="planned"):
        planner.check(replace(problem, tables=[(100, 64, 1.0)] * 4), plan, "ours")
    (tables,) = plan.plan.values()
    table = next(name for name, sharding in tables.items() if sharding.sharding_spec is not None)
    tables[table].sharding_spec.shards[0].shard_sizes[0] -= 1
    with pytest.raises(AssertionError, match=f"shards of table {table} cover"):
        planner.check(problem, plan, "ours")


def test_an_import_is_of_this_shardwise_and_costs_little_by_itself() -> None:
    case = next(case for case in package.CASES if case.name == "import shardwise")
    with ready(case, Setting(small=True, peers=frozenset())) as made:
        assert made.rounds is not None
        taken = made.rounds(2)[OURS]
        assert len(taken) == 2 and min(taken) > 0
    with pytest.raises(RuntimeError, match="No module named 'shardwise.nothing'"):
        package.import_seconds("import shardwise.nothing")


def test_answers_of_the_command_line_are_measured_whole_beside_a_process_that_does_nothing() -> None:
    answers = {answer.name: answer for answer in command_line.ANSWERS}
    assert {name: answer.budget for name, answer in answers.items()} == {
        "shardwise --version": 4, "shardwise --help": 8, "shardwise perf run --help": 8, "shardwise, completion": 8,
    }  # fmt: skip
    series = command_line.rounds(answers["shardwise, completion"], 2)
    assert {who: len(measured) for who, measured in series.items()} == {OURS: 2, command_line.NOTHING: 2}
    assert all(seconds > 0 for measured in series.values() for seconds in measured)
    # a loop of half a second is counted, and time that a process sleeps is not
    loop = "import time\nwhile time.process_time() < 0.5: pass"
    assert 0.5 <= command_line.cpu_seconds(["-c", loop])[0] < 1.5
    assert sys.platform == "win32" or command_line.cpu_seconds(["-c", "import time; time.sleep(0.7)"])[0] < 0.6


def test_an_answer_over_its_budget_or_with_other_words_fails_its_case() -> None:
    answer = command_line.ANSWERS[0]
    command_line.require_within(answer, {OURS: [0.12, 0.11, 9.0], command_line.NOTHING: [0.03, 0.03, 0.03]})
    with pytest.raises(AssertionError, match=r"130 ms of CPU, 4.3x of python -c pass with 30 ms; its budget is 4x"):
        command_line.require_within(answer, {OURS: [0.13, 0.12, 9.0], command_line.NOTHING: [0.03, 0.03, 0.03]})
    for broken, words in (
        (replace(answer, prints="another"), "without .another."),
        (replace(answer, budget=1e-3), "its budget is 0.001x"),
    ):
        made = command_line.make_answer(Setting(small=True, peers=frozenset()), answer=broken)
        with pytest.raises(AssertionError, match=words):
            made.check()
    with pytest.raises(RuntimeError, match="No such"):
        command_line.cpu_seconds(["-c", "raise SystemExit('No such')"])


def test_the_wheel_that_is_measured_is_the_one_that_users_get(tmp_path: Path) -> None:
    case = next(case for case in package.CASES if case.name == "wheel size")
    with ready(case) as made:
        assert made.rounds is not None
        built = made.rounds(2)[OURS]
    assert built[0] == built[1] > 200_000
    zipped = package._zipped(tmp_path / "shardwise.whl")
    package.check_wheel(zipped)
    # what describes a wheel is some kilobytes
    assert abs(zipped.stat().st_size - built[0]) < 0.05 * built[0] or not made.notes["built"]
    with zipfile.ZipFile(zipped, "a") as archive:
        archive.writestr("shardwise/tests/test_a.py", "")
    with pytest.raises(AssertionError, match="test_a"):
        package.check_wheel(zipped)


def test_the_installed_size_is_that_of_all_folders() -> None:
    case = next(case for case in package.CASES if case.name == "installed size")
    with ready(case) as made:
        assert made.rounds is not None
        (size,) = made.rounds(1)[OURS]
    assert size > sum(path.stat().st_size for path in (package.PACKAGE / "kernels").glob("*.py"))


def test_a_quantized_table_that_is_wrong_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def spoil(setup: Setup, floats: Any) -> Any:
        return modules._torch(setup, [table.roll(1, 0) for table in floats])

    monkeypatch.setitem(modules.QUANTIZED_PEERS, "torch", spoil)
    made = modules.make_quantized(SMALL, workload=EBC[128])
    with pytest.raises(AssertionError, match="output of torch"):
        made.check()

"""Cases of modules, sharded steps, the planner and the package: each runs, and a side that is wrong is found out."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from shardwise.perf.case import Case, Ready, Setting
from shardwise.perf.cases import modules
from shardwise.perf.module_checks import assert_forwards, assert_steps
from shardwise.perf.module_sides import RULES, Setup, batches_of, fill, sides_of, torch_side
from shardwise.perf.workloads import EBC, tiny

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
    assert len(held) == 2 and all(one() is None for one in held)

"""Saved under one plan and loaded under another, on other ranks: a run goes on as if it was never interrupted."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from sharding_mixes import (
    OPTIMIZERS,
    STRATEGIES,
    Mix,
    Run,
    TableCase,
    batch_of,
    build,
    environment,
    shard,
    train,
    train_alone,
    upstream_of,
)
from sharding_steps import expect_outputs, train_on
from torch import Tensor

from shardwise import checkpoint
from shardwise.planner.layout import TableOptions

pytestmark = pytest.mark.ranks

# under which tables have the bits of one process, whatever the plan
OPTIONS = TableOptions(reduction="ordered", row_state="table")
ALONE = "unsharded"
PLANS = {
    **{strategy: (strategy,) * 3 for strategy in STRATEGIES},
    "mixed": ("grid", "data_parallel", "column_wise"),
    "other": ("table_column_wise", "row_wise", "table_wise"),
    ALONE: ("table_wise",) * 3,
}
STEPS = 2, 7


@dataclass(frozen=True)
class Side:
    """How a run is spread: a plan over so many ranks."""

    plan: str
    world: int


@dataclass(frozen=True)
class Case:
    """A run that is saved on one side and continued on another."""

    number: int
    before: Side
    after: Side
    optimizer: str
    pooled: bool

    def mix(self, side: Side) -> Mix:
        rows = (5, 12, 7)
        strategies = zip(rows, PLANS[side.plan], strict=True)
        tables = [
            TableCase(f"t{n}", r, 8, (f"f{n}",), s, options=OPTIONS, seed=n) for n, (r, s) in enumerate(strategies)
        ]
        return Mix(tuple(tables), self.pooled)

    def __str__(self) -> str:
        sides = [f"{side.plan} on {side.world}" for side in (self.before, self.after)]
        return f"{' -> '.join(sides)}, {self.optimizer}, {'pooled' if self.pooled else 'sequence'}"


def sides() -> list[Side]:
    return [Side(plan, world) for plan in PLANS for world in ((1,) if plan == ALONE else (1, 2, 4))]


def cases(count: int) -> list[Case]:
    """A sample of all pairs of plans and world sizes, in which each side is left and reached."""
    rng = random.Random(6)
    befores, afters = ([side for _ in range(3) for side in rng.sample(sides(), len(sides()))] for _ in range(2))
    picked = [
        (before, after, rng.choice(list(OPTIMIZERS)), rng.random() < 0.5)
        for before, after in zip(befores, afters, strict=True)
    ]
    return [Case(number, *one) for number, one in enumerate(picked[:count])]


CASES = cases(60)


def test_the_sample_has_all_plans_and_world_sizes_on_both_sides() -> None:
    for attribute in ("before", "after"):
        assert {getattr(case, attribute) for case in CASES} == set(sides())
    assert {(case.before.world, case.after.world) for case in CASES} == {(a, b) for a in (1, 2, 4) for b in (1, 2, 4)}
    assert {(case.optimizer, case.pooled) for case in CASES} == {(o, p) for o in OPTIMIZERS for p in (False, True)}


@cache
def uninterrupted(optimizer: str, pooled: bool) -> Run:
    return train_alone(Case(0, sides()[0], sides()[0], optimizer, pooled).mix(sides()[0]), optimizer, STEPS[1])


def model_of(case: Case, side: Side, fill: float | None = None) -> Any:
    mix = case.mix(side)
    module = build(mix, case.optimizer)
    if fill is not None:
        for param in module.parameters():
            param.data.fill_(fill)
    return module if side.plan == ALONE else shard(mix, module, environment())


def go_on(case: Case, side: Side, model: Any, steps: range) -> list[list[Tensor]]:
    mix = case.mix(side)
    if side.plan != ALONE:
        return train_on(mix, model, steps)
    batches = [(batch_of(mix, step), upstream_of(mix, batch_of(mix, step), step)) for step in steps]
    return train(mix, model, batches, False).outputs


def save_all(given: list[Case], folder: str) -> None:
    for case in given:
        model = model_of(case, case.before)
        go_on(case, case.before, model, range(STEPS[0]))
        checkpoint.save(f"{folder}/{case.number}", model, step=STEPS[0], extra={"case": case.number})


def load_all(given: list[Case], folder: str) -> list[list[list[Tensor]]]:
    found = []
    for case in given:
        path = checkpoint.latest(f"{folder}/{case.number}")
        assert path is not None
        model = model_of(case, case.after, fill=7.0)
        optimizer = model.fused_optimizer() if case.after.plan == ALONE else model.fused_optimizer
        for group in optimizer.param_groups:
            group["lr"] = 9.0
        loaded = checkpoint.load(path, model)
        assert (loaded.step, loaded.extra, bool(loaded.report)) == (STEPS[0], {"case": case.number}, False)
        found.append(go_on(case, case.after, model, range(*STEPS)))
    return found


@pytest.mark.full
def test_sixty_changes_of_plan_and_world_size_go_on_bit_for_bit(tmp_path: Path) -> None:
    """All plans x {1, 2, 4} -> all plans x {1, 2, 4}, with the states of SGD, Adam and rowwise Adagrad."""
    for world in (1, 2, 4):
        run_ranks(world, save_all, [case for case in CASES if case.before.world == world], str(tmp_path))
    for world in (1, 2, 4):
        mine = [case for case in CASES if case.after.world == world]
        ranks = run_ranks(world, load_all, mine, str(tmp_path))
        for number, case in enumerate(mine):
            outputs = [rank[number] for rank in ranks]
            try:
                expect_outputs(case.mix(case.after), uninterrupted(case.optimizer, case.pooled), outputs, range(*STEPS))
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}") from None

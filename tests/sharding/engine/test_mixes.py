"""Every strategy and random mixes of them against one process that sees the whole batch.

What is promised: the bits of one process where tables are whole, replicated with an optimizer, cut by columns under an
elementwise rule, or cut by rows with reduction="ordered"; the bits of a table cut into tables of its own by columns
where a rule with one number a row has one for each shard (row_state="shard"); a bound from a float64 model elsewhere.

The whole product of mixes, collections, worlds and optimizers runs with SHARDWISE_ALL_MIXES=1 (some minutes); without
it each random mix meets one optimizer in each world.

Takes most of a minute: a mix is some steps of training on up to four processes, and there are hundreds.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from ranks import run_ranks
from sharding_mixes import (
    OPTIMIZERS,
    STRATEGIES,
    Mix,
    Run,
    TableCase,
    address,
    batch_of,
    batches_of_rank,
    environment,
    expect_same_runs,
    mix_for,
    mix_of,
    modelled,
    rows_of_rank,
    samples_of,
    shards_of,
    span_of,
    train_alone,
    train_sharded,
    train_strips,
)
from torch import Tensor

from shardwise import BoundsCheckMode, DataType, KeyedJaggedTensor
from shardwise.planner.layout import TableOptions

pytestmark = pytest.mark.ranks

EVERYTHING = os.environ.get("SHARDWISE_ALL_MIXES") == "1"
STEPS = 10
SEEDS = range(20)
WORLDS = (1, 2, 4)
# four ranks on two hosts exchange all that fewer do
BY_WORLD = [pytest.param(world, marks=[pytest.mark.full] if world < 4 else []) for world in WORLDS]
# what cut columns may see of a rule's number a row
ROW_STATES = ("shard", "table")
# rules with one number a row
OF_ROWS = {"rowwise_adagrad"}
# of the largest number of a tensor, where bits are not promised; tables of few bits round at every step
TOLERANCE = {DataType.FP32: 1e-5, DataType.FP16: 5e-3, DataType.BF16: 4e-2}


@dataclass(frozen=True)
class Job:
    """A mix that is trained with an optimizer on hosts of `local` ranks (two, if there are)."""

    mix: Mix
    optimizer: str
    learned: bool = False
    dress: bool = False
    local: int | None = None
    steps: int = STEPS


def train_all(jobs: Sequence[Job]) -> list[Run]:
    """One rank's runs."""
    environments, runs = {local: environment(local) for local in sorted({job.local or 0 for job in jobs})}, []
    for job in jobs:
        env = environments[job.local or 0]
        try:
            runs.append(train_sharded(job.mix, job.optimizer, job.steps, env, learned=job.learned, dress=job.dress))
        except Exception as error:
            raise RuntimeError(f"{job}") from error
    return runs


alone, strips = cache(train_alone), cache(train_strips)


@cache
def bounded(mix: Mix, optimizer: str, steps: int, table: TableCase, cuts: tuple[tuple[int, int], ...]) -> Run:
    return modelled(mix, optimizer, batches_of_rank(mix, range(steps), 0, 1), table, cuts)


@dataclass(frozen=True)
class Promise:
    """What a table's shards promise: bits, and those of which cut into tables of its own."""

    outputs: bool
    weights: bool
    split: tuple[tuple[int, int], ...] | None
    cuts: tuple[tuple[int, int], ...]


def promise_of(job: Job, table: TableCase, world: int, local: int) -> Promise:
    """By DESIGN section 4. Gradients never depend on how rows are added, so weights may have bits that outputs lack."""
    shards = [shard for shard in shards_of(table, world, local) if not shard.replica]
    cuts = tuple(sorted({shard.cols for shard in shards}))
    cut_by_rows = len(shards) > len(cuts)
    partial = job.mix.pooled and cut_by_rows and table.options.reduction == "partial"
    power_of_two = world & (world - 1) == 0
    norms = job.optimizer in OF_ROWS and table.options.row_state == "shard" and len(cuts) > 1
    # an average that is taken where partial sums meet divides gradients before they travel, not by a factor later
    weights = power_of_two and not (partial and table.mean)
    return Promise(weights and not partial, weights, cuts if norms else None, cuts or ((0, table.dim),))


def differences(job: Job, world: int, runs: Sequence[Run]) -> list[str]:
    """Where the ranks' run is not what was promised."""
    mix, local = job.mix, job.local or min(2, world)
    faults, places = [], {table.name: n for n, table in enumerate(mix.tables)}
    promises = [promise_of(job, table, world, local) for table in mix.tables]
    whole = alone(mix, job.optimizer, job.steps, learned=job.learned)
    wanted, bounds = [], []
    for table, promise in zip(mix.tables, promises, strict=True):
        of_strips = promise.split and strips(mix, job.optimizer, job.steps, table, promise.split)
        wanted.append(of_strips or whole)
        inexact = not (promise.outputs and promise.weights)
        parts = promise.split or ((0, table.dim),)
        bounds.append(bounded(mix, job.optimizer, job.steps, table, parts) if inexact else None)
    batches = [batch_of(mix, step) for step in range(job.steps)]
    for rank, run in enumerate(runs):
        begin, end = span_of(mix, rank, world)
        for step, batch in enumerate(batches):
            expected: list[Tensor] = []
            for table, promise, want, bound in zip(mix.tables, promises, wanted, bounds, strict=True):
                source = want if promise.outputs else bound
                assert source is not None
                # outputs of one table alone, or of all
                first = 0 if source is not whole else [case for case, _ in mix.lookups].index(table)
                expected += source.outputs[step][first : first + len(table.features)]
            expected = rows_of_rank(mix, batch, expected, begin, end)
            for (table, feature), tensor, value in zip(mix.lookups, run.outputs[step], expected, strict=True):
                promise = promises[places[table.name]]
                fault = apart(tensor, value, None if promise.outputs else table.dtype)
                if fault:
                    faults.append(f"rank {rank}, step {step}: {table.name} {feature}: {fault}")
        for key, tensor in [*run.weights.items(), *run.states.items()]:
            place, _, state = key.partition("/")
            name, rows, cols = address(place)
            table, promise = mix.tables[places[name]], promises[places[name]]
            if state and rows.start == rows.stop:
                # nobody asks for a shard without rows, so it may count no steps
                continue
            source = wanted[places[name]] if promise.weights or state == "step" else bounds[places[name]]
            assert source is not None
            value = source.states[f"{name}/{state}"] if state else source.weights[name]
            if state != "step":
                of_row = state and job.optimizer in OF_ROWS
                strip = promise.split.index((cols.start, cols.stop)) if of_row and promise.split else 0
                value = value.reshape(table.rows, -1)[rows, strip if of_row else cols]
            # states are fp32 whatever the rows are
            fault = apart(tensor, value, None if promise.weights else DataType.FP32 if state else table.dtype)
            if fault:
                faults.append(f"rank {rank}: {key}: {fault}")
    return faults


def apart(tensor: Tensor, wanted: Tensor, dtype: DataType | None) -> str | None:
    """How a tensor differs from what was promised: in bits, or by more than the tolerance of its table's dtype."""
    if tensor.shape != wanted.shape:
        return f"{list(tensor.shape)} is not {list(wanted.shape)}"
    if dtype is None:
        return None if torch.equal(tensor, wanted) else f"bits differ, by up to {(tensor - wanted).abs().max()}"
    if not tensor.numel():
        return None
    error, most = (tensor.double() - wanted.double()).abs().max(), wanted.double().abs().max()
    return None if error <= TOLERANCE[dtype] * most else f"apart by {error} of {most}"


def expect_promises(jobs: Sequence[Job], world: int) -> None:
    ranks = run_ranks(world, train_all, list(jobs), timeout=60 + 2 * len(jobs))
    for number, job in enumerate(jobs):
        faults = differences(job, world, [runs[number] for runs in ranks])
        assert not faults, "\n".join(
            [*faults[:8], *map(str, job.mix.tables), str(replace(job, mix=replace(job.mix, tables=())))]
        )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
@pytest.mark.parametrize("world", BY_WORLD)
def test_every_strategy_trains_as_one_process(world: int, pooled: bool, optimizer: str) -> None:
    expect_promises([Job(mix_for(strategy, pooled=pooled), optimizer) for strategy in STRATEGIES], world)


@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
@pytest.mark.parametrize("world", BY_WORLD)
def test_every_mix_trains_as_one_process(world: int, pooled: bool) -> None:
    jobs = [
        Job(mix_of(seed, pooled=pooled, row_states=ROW_STATES), optimizer)
        for seed in SEEDS
        for number, optimizer in enumerate(OPTIMIZERS)
        if EVERYTHING or number == (seed + WORLDS.index(world)) % len(OPTIMIZERS)
    ]
    expect_promises(jobs, world)


@pytest.mark.parametrize("world", WORLDS if EVERYTHING else [4])
def test_the_same_run_twice_gives_the_same_bits(world: int) -> None:
    jobs = [Job(mix_of(seed, pooled=seed % 2 == 0), name) for seed, name in enumerate([*OPTIMIZERS] * 2)]
    for runs in run_ranks(world, train_all, [*jobs, *jobs]):
        for first, second in zip(runs[: len(jobs)], runs[len(jobs) :], strict=True):
            expect_same_runs(first, second)


def few_rows(pooled: bool, **more: Any) -> Mix:
    """Tables of one to three rows, cut into more parts than that."""
    dims = [8, 4, 12] if pooled else [8, 8, 8]
    tables = [
        TableCase(f"{strategy}{rows}", rows, dims[rows - 1], (f"f{n % 3}",), strategy, seed=n, options=options)
        for n, strategy in enumerate(("row_wise", "table_row_wise", "grid"))
        for rows, options in ((1, TableOptions()), (2, TableOptions("ordered")), (3, TableOptions()))
    ]
    return Mix(tuple(tables), pooled, **more)


@pytest.mark.parametrize("dtype", [DataType.FP16, DataType.FP32])
def test_a_shard_without_rows_may_be_the_only_one_of_its_width(dtype: DataType) -> None:
    """Nobody asks for it; the update of its group on torch failed: "torch.cat(): expected a non-empty list"."""
    empty = TableCase("t0", 1, 8, ("f0",), "row_wise", dtype=dtype, seed=4)
    whole = [TableCase(f"t{n}", 20, 12, ("f0", "f1"), "table_wise", dtype=dtype, seed=n) for n in (1, 2, 3, 4)]
    expect_promises([Job(Mix((empty, *whole)), name, steps=3) for name in OPTIMIZERS], 2)


ALL = ("f0", "f1", "f2", "f3", "f4")


def odd_batches(pooled: bool) -> dict[str, Mix]:
    """Mixes of every strategy whose batches are unusual."""
    mixes = {
        "fewer rows than ranks": few_rows(pooled),
        "fewer rows than ranks, weighted": few_rows(pooled, weighted=pooled),
    }
    for strategy in STRATEGIES:
        whole = mix_for(strategy, pooled=pooled, weighted=pooled)
        changes: dict[str, dict[str, Any]] = {
            "one empty rank": {"batches": (4, 0, 2, 0)},
            "all ranks empty": {"batches": (0, 0, 0, 0)},
            "one sample": {"batches": (0, 0, 1, 0)},
            "an empty feature": {"empty_features": ("f1",)},
            "all features empty": {"empty_features": ALL},
        }
        for name, changed in changes.items():
            mixes[f"{strategy}: {name}"] = replace(whole, **changed)
    return mixes


@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
@pytest.mark.parametrize("world", WORLDS if EVERYTHING else [4])
def test_empty_and_tiny_sizes_are_ordinary(world: int, pooled: bool) -> None:
    names = [*OPTIMIZERS]
    expect_promises([Job(mix, names[n % 3], steps=3) for n, mix in enumerate(odd_batches(pooled).values())], world)


@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
def test_padded_batches_with_other_keys_in_other_orders_are_the_same_samples(pooled: bool) -> None:
    mixes = [
        *(mix_for(strategy, pooled=pooled) for strategy in STRATEGIES),
        *(mix_of(s, pooled=pooled) for s in range(5)),
    ]
    expect_promises([Job(mix, "rowwise_adagrad", steps=3, dress=True) for mix in mixes], 4)


@pytest.mark.parametrize("local", [1, pytest.param(2, marks=pytest.mark.full), 4])
def test_hosts_of_any_size_train_as_one_process(local: int) -> None:
    mixes = [
        *(mix_for(strategy, pooled=True) for strategy in STRATEGIES),
        *(mix_of(s, pooled=True) for s in range(20, 26)),
    ]
    expect_promises([Job(mix, "adam", steps=3, local=local) for mix in mixes], 4)


@pytest.mark.parametrize("mode", [BoundsCheckMode.WARNING, BoundsCheckMode.IGNORE])
@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
@pytest.mark.filterwarnings("ignore:.*counts as no id")
def test_ids_outside_of_cut_tables_count_as_no_id(pooled: bool, mode: BoundsCheckMode) -> None:
    mixes = [mix_for(strategy, pooled=pooled, weighted=pooled and n % 2 == 0) for n, strategy in enumerate(STRATEGIES)]
    mixes += [mix_of(seed, pooled=pooled) for seed in range(6)]
    expect_promises(
        [Job(replace(mix, outside=True, bounds_check=mode), "rowwise_adagrad", steps=3) for mix in mixes], 4
    )


@pytest.mark.parametrize("world", BY_WORLD)
def test_gradients_of_weights_are_those_of_one_process(world: int) -> None:
    mixes = [replace(mix_of(seed, pooled=True), weighted=True) for seed in range(12)]
    mixes += [mix_for(strategy, pooled=True, weighted=True) for strategy in STRATEGIES]
    mixes += [
        mix_for(strategy, pooled=True, weighted=True, batches=batches)
        for strategy in STRATEGIES
        for batches in ((4, 0, 2, 0), (0, 0, 0, 0))
    ]
    # a rule with one number a row would train cut tables apart from the uncut
    jobs = [Job(mix, ("sgd", "adam")[n % 2], steps=2, learned=True) for n, mix in enumerate(mixes)]
    ranks = run_ranks(world, train_all, jobs)
    for number, job in enumerate(jobs):
        whole = alone(job.mix, job.optimizer, job.steps, learned=True)
        for step in range(job.steps):
            batch, gradient = batch_of(job.mix, step), whole.weight_gradients[step]
            wanted = KeyedJaggedTensor(batch.keys(), batch.values(), gradient, batch.lengths())
            for rank, runs in enumerate(ranks):
                rank_gradient = runs[number].weight_gradients[step]
                expected = samples_of(wanted, *span_of(job.mix, rank, world)).weights()
                # rows of few bits were rounded in the step before
                fault = apart(rank_gradient, expected, DataType.FP32 if step == 0 else DataType.BF16)
                assert not fault, f"rank {rank}, step {step}: {fault} {job}"


def test_three_ranks_train_as_one_process_but_for_rounding() -> None:
    """(g / 3) * 3 is not g, so there no strategy promises bits."""
    mixes = [mix_of(seed, pooled=True) for seed in range(30, 36)]
    mixes += [mix_for(strategy, pooled=True) for strategy in STRATEGIES]
    expect_promises([Job(mix, "sgd", steps=3, local=3) for mix in mixes], 3)

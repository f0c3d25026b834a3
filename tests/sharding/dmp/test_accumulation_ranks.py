"""Gradients of sharded tables that wait for a step: every strategy, against one process and against no waiting.

Takes half a minute: every strategy and rule trains in worlds of three sizes, and by one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import sharding_mixes
import torch
from ranks import run_ranks
from sharding_mixes import (
    STRATEGIES,
    Mix,
    address,
    backward,
    batch_of,
    build,
    by_lookup,
    environment,
    held,
    mix_for,
    mix_of,
    rows_of_rank,
    samples_of,
    shard,
    span_of,
    states_of,
    upstream_of,
)
from torch import Tensor

from shardwise import LAMB, DataType

pytestmark = pytest.mark.ranks

# two steps of three micro-batches
STEPS = [(0, 1, 2), (3, 4, 5)]
NORMS = (2.0, 1.0, float("inf"))
TOLERANCE = {DataType.FP32: 1e-5, DataType.FP16: 5e-3, DataType.BF16: 4e-2}
RULES = {**sharding_mixes.OPTIMIZERS, "lamb": (LAMB, {"lr": 0.05, "weight_decay": 0.01})}


@dataclass
class Waited:
    """What a rank, or one process, has after steps of micro-batches."""

    weights: dict[str, Tensor]
    states: dict[str, Tensor]
    # of each step, for each of NORMS
    norms: list[list[float]]
    collectives: list[int]


def parts(mix: Mix, rank: int, world: int, number: int) -> tuple[Any, list[Tensor]]:
    """A rank's samples of a micro-batch and the gradients of their rows."""
    whole = batch_of(mix, number)
    begin, end = span_of(mix, rank, world)
    upstream = rows_of_rank(mix, whole, upstream_of(mix, whole, number), begin, end)
    return samples_of(whole, begin, end), [gradient * world for gradient in upstream]


def wait_for_steps(mix: Mix, module: Any, optimizer: Any, rank: int, world: int, count: Any) -> Waited:
    record = Waited({}, {}, [], [])
    optimizer.accumulate_gradients()
    for step in STEPS:
        for number in step:
            batch, upstream = parts(mix, rank, world, number)
            backward(by_lookup(mix, module(batch)), upstream)
        before = count()
        record.norms.append([optimizer.gradient_norm(p).item() for p in NORMS])
        record.collectives.append(count() - before)
        optimizer.step()
    return record


@cache
def alone(mix: Mix, rule: str) -> Waited:
    with patch.dict(sharding_mixes.OPTIMIZERS, RULES):
        module = build(mix, rule)
    record = wait_for_steps(mix, module, module.fused_optimizer(), 0, 1, int)
    names = [table.name for table in mix.tables]
    record.weights = {name: module.state_dict()[f"{module._children_name}.{name}.weight"].clone() for name in names}
    record.states = states_of(module)
    return record


def on_ranks(mixes: Sequence[Mix], rule: str) -> list[Waited]:
    """Each mix with micro-batches that wait."""
    env, records = environment(), []
    for mix in mixes:
        with patch.dict(sharding_mixes.OPTIMIZERS, RULES):
            model = shard(mix, build(mix, rule), env)
        record = wait_for_steps(
            mix, model, model.fused_optimizer, env.rank, env.world_size, lambda model=model: model.collectives
        )
        record.weights, record.states = held(model)
        records.append(record)
    return records


def assert_like_one_process(mix: Mix, ranks: Sequence[Waited], expected: Waited) -> None:
    tables = {table.name: table for table in mix.tables}
    for record in ranks:
        # not to a tolerance: a factor that differs in its last bit lets ranks drift apart
        assert record.norms == ranks[0].norms
        assert record.collectives == [len(NORMS) if len(ranks) > 1 else 0] * len(STEPS)
        for norms, expected_norms in zip(record.norms, expected.norms, strict=True):
            assert norms == pytest.approx(expected_norms, rel=1e-5)
        for key, value in record.weights.items():
            name, rows, cols = address(key)
            whole = expected.weights[name]
            bound = TOLERANCE[tables[name].dtype] * float(whole.abs().max())
            torch.testing.assert_close(value.float(), whole[rows, cols].float(), rtol=0, atol=bound, msg=key)
        for key, value in record.states.items():
            place, state = key.rsplit("/", 1)
            name, rows, cols = address(place)
            whole = expected.states.get(f"{name}/{state}")
            # shards without rows are never updated
            if whole is None or rows.start == rows.stop:
                continue
            part = whole if state == "step" else whole[rows] if value.dim() == 1 else whole[rows, cols]
            torch.testing.assert_close(value.view_as(part), part, rtol=1e-4, atol=1e-5, msg=key)


# per-shard numbers are those of another model
WHOLE = [
    replace(mix, tables=tuple(replace(t, options=replace(t.options, row_state="table")) for t in mix.tables))
    for mix in (mix_for(strategy, pooled=pooled) for strategy in STRATEGIES for pooled in (True, False))
]
# with weights, uneven batches, empty ranks and features, and ids of several tables
RANDOM = [mix_of(seed, pooled=seed % 2 == 0, row_states=("table",)) for seed in range(10)]


@pytest.mark.parametrize(
    ("mixes", "rule"),
    [
        *(pytest.param(WHOLE, rule, marks=() if rule == "rowwise_adagrad" else pytest.mark.full) for rule in RULES),
        (RANDOM, "rowwise_adagrad"),
    ],
    ids=[*(f"every strategy-{rule}" for rule in RULES), "random mixes"],
)
@pytest.mark.parametrize("world", [*(pytest.param(n, marks=pytest.mark.full) for n in (1, 2)), 4])
def test_every_strategy_gives_what_one_process_gives(world: int, mixes: list[Mix], rule: str) -> None:
    ranks = run_ranks(world, on_ranks, mixes, rule, timeout=120.0)
    for n, mix in enumerate(mixes):
        assert_like_one_process(mix, [records[n] for records in ranks], alone(mix, rule))


def same_bits(mixes: Sequence[Mix], rule: str) -> list[list[str]]:
    """For each mix what differs between an update in the backward and one that waited for a step."""
    env, different = environment(), []
    for mix in mixes:
        tensors = []
        for waits in (False, True):
            with patch.dict(sharding_mixes.OPTIMIZERS, RULES):
                model = shard(mix, build(mix, rule), env)
            model.fused_optimizer.accumulate_gradients(waits)
            for number in range(3):
                batch, upstream = parts(mix, env.rank, env.world_size, number)
                backward(by_lookup(mix, model(batch)), upstream)
                model.fused_optimizer.step()
            weights, states = held(model)
            tensors.append({**weights, **states})
        different.append([name for name, value in tensors[0].items() if not torch.equal(value, tensors[1][name])])
    return different


@pytest.mark.full
@pytest.mark.parametrize("rule", RULES)
def test_one_micro_batch_a_step_changes_the_bits_that_no_waiting_changes(rule: str) -> None:
    mixes = [mix_for(strategy, pooled=pooled) for strategy in STRATEGIES for pooled in (True, False)]
    mixes += [mix_of(seed, pooled=seed % 2 == 0) for seed in range(100, 106)]
    for differences in run_ranks(2, same_bits, mixes, rule, timeout=120.0):
        assert differences == [[]] * len(mixes)


def refusals() -> tuple[str, bool, bool]:
    env = environment()
    mix = mix_for("table_wise", pooled=True)
    model = shard(mix, build(mix, "adam"), env)
    optimizer = model.fused_optimizer
    optimizer.accumulate_gradients()
    batch, upstream = parts(mix, env.rank, env.world_size, 0)
    backward(by_lookup(mix, model(batch)), upstream)
    shards = [shard for table in mix.tables for shard in sharding_mixes.shards_of(table, env.world_size, 2)]
    moved = [sharding_mixes.Shard(s.table, 1 - s.rank, s.rows, s.cols) for s in shards]
    before = held(model)[0]
    text = ""
    try:
        model.reshard(moved)
    except ValueError as error:
        text = str(error)
    kept = all(torch.equal(value, before[name]) for name, value in held(model)[0].items())
    optimizer.zero_grad()
    model.reshard(moved)
    # the new groups wait as the old ones did
    backward(by_lookup(mix, model(batch)), upstream)
    batches = model.fused_optimizer.gradient_norm() > 0
    optimizer.step()
    return text, kept, bool(batches)


def test_tables_do_not_move_while_gradients_wait_and_wait_where_they_moved() -> None:
    for text, kept, waits in run_ranks(2, refusals):
        assert text.endswith("gradients wait for a step: call step() or zero_grad() of the fused optimizer first")
        assert kept and waits

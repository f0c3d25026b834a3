"""A batch that alone wants more rows than there may be slots: an error on all ranks, and the run goes on without it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import sharding_mixes as mixes
import torch
import torch.distributed as dist
from ranks import error_of, run_ranks

from shardwise import KeyedJaggedTensor
from shardwise.planner.layout import TableOptions, Tier

pytestmark = pytest.mark.ranks
ROWS = {"a": 60, "b": 80, "c": 50}
# of all shards of a row range; b has two of them
MOST = {"a": 30, "b": 48, "c": 20}


def mix_of(prefix: str, *, pooled: bool) -> mixes.Mix:
    """Of three groups: a table on a rank, one cut by rows, and one that every rank holds."""
    strategies = {"a": ("table_wise", 4), "b": ("row_wise", 8), "c": ("data_parallel", 12 if pooled else 8)}
    cases = []
    for name, (strategy, dim) in strategies.items():
        tier = Tier(4, max_slots=MOST[name])
        dim = dim if pooled else 8
        cases.append(
            mixes.TableCase(f"{prefix}{name}", ROWS[name], dim, (name,), strategy, options=TableOptions(tier=tier))
        )
    return mixes.Mix(tuple(cases), pooled=pooled)


def batch_of(step: int, rank: int, many: dict[str, list[int]] | None = None) -> KeyedJaggedTensor:
    """Three samples with two ids each; those of `many` are ids of the first sample besides."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids, lengths = [], []
    for name, rows in ROWS.items():
        more = (many or {}).get(name, [])
        ids += [torch.tensor(more, dtype=torch.int64), torch.randint(0, rows, (6,), generator=generator)]
        lengths += [len(more) + 2, 2, 2]
    return KeyedJaggedTensor(list(ROWS), torch.cat(ids), None, torch.tensor(lengths))


# what rank 0 asks for in the batch that is too large, whether it trains, the rank that has no room, and for which table
CASES: dict[str, tuple[dict[str, list[int]], bool, str, str]] = {
    # rows of the second shard, on rank 1
    "another rank's rows": ({"b": list(range(40, 80))}, True, "rank 1", "b"),
    "rows of a rank's own": ({"a": list(range(60))}, True, r"rank \d", "a"),
    "replicated rows": ({"c": list(range(40))}, True, "rank 0", "c"),
    "replicated rows in an evaluation": ({"c": list(range(40))}, False, "rank 0", "c"),
    "rows in an evaluation": ({"b": list(range(40, 80))}, False, "rank 1", "b"),
}


def step_of(models: list[Any], batch: KeyedJaggedTensor) -> None:
    total = sum(sum(out.square().sum() for out in mixes.by_lookup(mix, model(batch))) for mix, model in models)
    if isinstance(total, torch.Tensor) and total.requires_grad:
        total.backward()


def trained(*, pooled: bool, bad: tuple[dict[str, list[int]], bool, str, str] | None) -> list[Any]:
    """Weights and states after some steps, the third of which is `bad`."""
    env, models = mixes.environment(), []
    rank = dist.get_rank()
    for prefix in ("x", "y"):
        mix = mix_of(prefix, pooled=pooled)
        models.append((mix, mixes.shard(mix, mixes.build(mix, "rowwise_adagrad"), env)))
    for step in range(5):
        if step == 2 and bad is not None:
            many, trains, who, table = bad
            batch = batch_of(99, rank, many if rank == 0 else None)
            # the first collection finds room in the batch and the second does not
            order = [models[0], models[1]]
            with torch.set_grad_enabled(trains):
                message = error_of(step_of, order, batch)
            pattern = rf"ValueError: {who}: table 'x{table}': a batch wants \d+ distinct rows and the table may have"
            assert re.search(pattern, message), message
            here, enough = (24, 80) if table == "b" else (MOST[table], int(re.findall(r"wants (\d+)", message)[0]))
            assert f"may have {here} of" in message and f"Tier(max_slots={enough}), " in message, message
        step_of(models, batch_of(step, rank))
    for _, model in models:
        for group in model._tables.all_groups():
            assert int((group.store.residency.held > 0).sum()) == 0 and not group.store.residency.leases
    states = []
    for _, model in models:
        with model.shards.whole():
            states.append(mixes.held(model))
    return states


def goes_on(pooled: bool, name: str) -> None:
    for (weights, states), (expected, of_expected) in zip(
        trained(pooled=pooled, bad=CASES[name]), trained(pooled=pooled, bad=None), strict=True
    ):
        assert mixes.same_tensors(weights, expected) and mixes.same_tensors(states, of_expected)


@pytest.mark.parametrize("name", CASES)
def test_all_ranks_raise_and_train_on_as_if_the_batch_had_not_come(name: str) -> None:
    for pooled in (True, False):
        run_ranks(2, goes_on, pooled, name)

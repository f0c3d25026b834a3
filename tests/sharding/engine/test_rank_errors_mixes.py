"""Faults of reference/faults.md for every strategy; each run has a deadline, so none hangs. Where each is:

4   one bad id on one rank: here, and test_rank_errors.py for whole tables
14  batch of 0 on all ranks: test_mixes.py::test_empty_and_tiny_sizes_are_ordinary ("all ranks empty")
15  batch of 0 on one rank: the same ("one empty rank")
16  a feature empty in every sample: the same ("an empty feature")
17  all features empty: the same ("all features empty")
18  zero tables, zero features: test_rank_errors.py::test_zero_tables_and_zero_features_are_ordinary_sizes, and here
25  fewer rows than ranks: test_mixes.py::test_empty_and_tiny_sizes_are_ordinary ("fewer rows than ranks")
27  key order that differs between ranks: test_mixes.py::test_padded_batches_with_other_keys_..., and
    test_rank_errors.py::test_features_in_another_order_on_one_rank_are_told_apart_by_name
29  overflow in a compressed exchange: with the tests of compression
33  plans x world sizes: test_mixes.py::test_every_strategy_..., test_every_mix_trains_as_one_process
38  ranks with other plans, configs or versions: tests/sharding/comms/test_construction_errors.py
"""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
from ranks import error_of, run_ranks
from sharding_mixes import (
    OPTIMIZERS,
    STRATEGIES,
    Mix,
    backward,
    batch_of,
    batches_of_rank,
    build,
    by_lookup,
    environment,
    held,
    mix_for,
    same_tensors,
    shard,
    train_sharded,
)

from shardwise import KeyedJaggedTensor

pytestmark = pytest.mark.ranks

DEADLINE = 120.0
# of f2, which is looked up in t1 alone: a table of 41 rows
BAD = (41, -1, 2**32 + 3, -(2**63))
BAD_RANK = 2


def spoiled(kjt: KeyedJaggedTensor, value: int) -> tuple[KeyedJaggedTensor, int]:
    """The batch with the first id of f2 replaced, and the sample that has it."""
    lengths = kjt["f2"].lengths().tolist()
    sample = next(n for n, length in enumerate(lengths) if length)
    ids = kjt.values().clone()
    ids[kjt.offset_per_key()[kjt.keys().index("f2")]] = value
    return KeyedJaggedTensor(kjt.keys(), ids, kjt.weights_or_none(), kjt.lengths()), sample


def with_bad_ids(pooled: bool) -> list[tuple[str, list[str], str]]:
    """For each strategy what was raised by bad steps between good ones, and what should have been."""
    env, optimizers, outcomes = environment(2), cycle(OPTIMIZERS), []
    for strategy in STRATEGIES:
        mix, optimizer = mix_for(strategy, pooled=pooled), next(optimizers)
        model, errors = shard(mix, build(mix, optimizer), env), []
        steps, wanted = range(len(BAD)), []
        batches = zip(BAD, batches_of_rank(mix, steps), batches_of_rank(mix, steps, BAD_RANK), strict=True)
        for value, (batch, upstream), (other_batch, _) in batches:
            bad, sample = spoiled(other_batch, value)
            wanted.append(
                f"RefusedIndexError: rank 2: feature 'f2' (table 't1'), sample {sample}: id {value} is outside [0, 41)"
            )
            before = held(model)
            rank_batch = bad if env.rank == BAD_RANK else batch
            errors.append(error_of(model, rank_batch))
            assert all(map(same_tensors, before, held(model)))
            backward(by_lookup(mix, model(batch)), upstream)
        good = train_sharded(mix, optimizer, len(BAD), env)
        assert all(map(same_tensors, (good.weights, good.states), held(model)))
        outcomes.append((strategy, errors, "\n".join(wanted)))
    return outcomes


@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
def test_04_a_bad_id_of_one_rank_raises_on_all_and_leaves_no_trace(pooled: bool) -> None:
    for runs in run_ranks(4, with_bad_ids, pooled, timeout=DEADLINE):
        for strategy, errors, wanted in runs:
            assert "\n".join(errors) == wanted, strategy


def without_tables() -> None:
    for pooled in (True, False):
        mix = Mix((), pooled)
        model = shard(mix, build(mix, "sgd"), environment())
        batch = batch_of(mix_for("table_wise", pooled=pooled), 0)
        output: Any = model(batch)
        assert (output.values().shape if pooled else output) == ((batch.stride(), 0) if pooled else {})
        # a table that has every rank, looked up by no feature of the batch, is missed by name
        whole = mix_for("row_wise", pooled=pooled)
        with pytest.raises(KeyError, match=r"rank 0: features \['f0', 'f1', 'f2'\] are not in the batch"):
            shard(whole, build(whole, "sgd"), environment())(KeyedJaggedTensor.empty())


def test_18_no_tables_and_no_features() -> None:
    run_ranks(2, without_tables, timeout=DEADLINE)

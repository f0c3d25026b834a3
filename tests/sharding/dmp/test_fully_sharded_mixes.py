"""Random mixes of tables, cuts, rules and batches under FULLY_SHARDED, beside replicas averaged by each step."""

from __future__ import annotations

import random
from typing import Any

import pytest
import sharding_mixes as mixes
import torch
from ranks import run_ranks, world_group

from shardwise import ShardingPlan
from shardwise.embeddings import EmbeddingBagCollection
from shardwise.sharding.comms.env import ShardingEnv2D, ShardingStrategy
from shardwise.sharding.comms.exchange import Exchange
from shardwise.sharding.dmp.dmp_collection import DMPCollectionConfig, _env_for

pytestmark = pytest.mark.ranks
STEPS, EACH = 3, 3


def env_of(strategy: ShardingStrategy) -> ShardingEnv2D:
    """Two replicas of two ranks, which are a host."""
    config = DMPCollectionConfig(EmbeddingBagCollection, ShardingPlan({}), 2, 2, sharding_strategy=strategy)
    return _env_for(config, world_group(), torch.device("cpu"))


def trained(seed: int, env: ShardingEnv2D) -> mixes.Run:
    """One rank's run of the mix."""
    rng = random.Random(seed)
    mix, optimizer = mixes.mix_of(seed, pooled=rng.random() < 0.6), rng.choice(list(mixes.RULES))
    model: Any = mixes.shard(mix, mixes.build(mix, optimizer), env)
    replicas, whole = Exchange(env.replica_pg), mixes.Run([], {}, {}, [])
    for batch in mixes.batches_of_rank(mix, range(STEPS)):
        run = mixes.train(mix, model, [batch], mix.weighted)
        if not env.is_fully_sharded:
            groups = model._tables.groups
            replicas.mean([group.flat for group in groups])
            replicas.mean([state for group in groups for state in group.states])
        whole.outputs += run.outputs
        whole.weight_gradients += run.weight_gradients
    with model.shards.whole():
        whole.weights, whole.states = mixes.held(model)
    assert all(value.isfinite().all() for value in whole.weights.values())
    return whole


def beside(first: int) -> None:
    envs = [env_of(strategy) for strategy in (ShardingStrategy.DEFAULT, ShardingStrategy.FULLY_SHARDED)]
    for seed in range(first, first + EACH):
        mixes.expect_same_runs(*[trained(seed, env) for env in envs])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("first", range(0, 5 * EACH, EACH))
def test_random_mixes_give_the_bits_of_replicas_that_are_averaged(first: int) -> None:
    """Outputs, gradients of per-id weights, tables and states."""
    run_ranks(4, beside, first)

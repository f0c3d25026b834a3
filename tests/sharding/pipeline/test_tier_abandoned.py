"""Batches of a pipeline that never come: it is dropped, its model goes over to another plan, or is copied meanwhile."""

from __future__ import annotations

import copy
import gc
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_zoo import ROWS, bag_tables, batch_of, dense_optimizer, fused, stores_of
from pipeline_runs import CPU
from ranks import run_ranks
from torch import Tensor, nn

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    ShardingPlan,
    construct_module_sharding_plan,
    tiered,
)
from shardwise.planner.layout import Tier
from shardwise.sharding import row_wise, table_wise
from shardwise.sharding.dmp.unwrap import sharded_model_copy
from shardwise.sharding.pipeline import PrefetchTrainPipelineSparseDist, TrainPipelineFusedSparseDist

NAMES = ("f0", "f1")


class Model(nn.Module):
    """Two tables and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.pooled = fused(EmbeddingBagCollection(bag_tables(dict.fromkeys(NAMES, ROWS))), RowWiseAdagrad)
        self.over = nn.Linear(16, 1)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        out = self.over(self.pooled(features).values())
        return out.square().sum(), out.detach()


def kjt(step: int, rank: int | None = None) -> KeyedJaggedTensor:
    features: KeyedJaggedTensor = batch_of(step, rank=rank).pooled.permute([0, 1])
    return features


def step_alone(model: Any, optimizer: Any, step: int, rank: int | None = None) -> Tensor:
    optimizer.zero_grad()
    loss, output = model(kjt(step, rank))
    loss.backward()
    optimizer.step()
    return output  # type: ignore[no-any-return]


def in_epochs(model: Any, *, resets: bool) -> list[Tensor]:
    """Three steps of a pipeline that had seven batches under way, three times over."""
    outputs = []
    for epoch in range(3):
        pipeline: Any = PrefetchTrainPipelineSparseDist(model, dense_optimizer(model), CPU, ahead=4, prefetch=2)
        batches = iter([kjt(10 * epoch + n, 0) for n in range(10)])
        outputs += [pipeline.progress(batches).clone() for _ in range(3)]
        if resets:
            pipeline.reset()
        del pipeline
        gc.collect()
    return outputs


def test_a_pipeline_that_is_dropped_leaves_no_batch_behind() -> None:
    """Its batches were waited for ever after: rows held their slots, and no next use of a later batch was known."""
    dropped, reset = (tiered(Model(), {f"t{name}": Tier(30) for name in NAMES}) for _ in range(2))
    assert all(map(torch.equal, in_epochs(dropped, resets=False), in_epochs(reset, resets=True)))
    (mine,), (theirs,) = (model.pooled.cached_stores() for model in (dropped, reset))  # type: ignore[union-attr, operator]
    assert not mine.is_in_use() and not mine.residency.held.any()
    assert mine.counts == theirs.counts and mine.counts[0].saves > 0


def plans(tier: Tier) -> list[Any]:
    """Of tables that are cut and go from rank to rank, with tiers and without."""
    last = dist.get_world_size() - 1
    cuts = [
        ({"tf0": table_wise(rank=0), "tf1": row_wise()}, (tier, None)),
        ({"tf0": row_wise(), "tf1": table_wise(rank=last)}, (tier, tier)),
        ({"tf0": table_wise(rank=last), "tf1": table_wise(rank=0)}, (None, tier)),
    ]
    made = []
    for rules, tiers in cuts:
        plan = construct_module_sharding_plan(
            Model().pooled, rules, local_size=last + 1, world_size=last + 1, device_type="cpu"
        )
        for name, of_table in zip(NAMES, tiers, strict=True):
            plan[f"t{name}"].tier = of_table
        made.append(plan)
    return made


def reshard_under_way(kind: str) -> bool:
    """Whether a pipeline whose batches left under the plan before has the bits of a loop that goes over with it."""
    changing = plans(Tier(30, max_slots=1.0))
    models: list[Any] = [
        DistributedModelParallel(Model(), plan=ShardingPlan({"pooled": copy.deepcopy(changing[0])})) for _ in range(2)
    ]
    optimizers = [dense_optimizer(model) for model in models]
    pipeline: Any = (
        TrainPipelineFusedSparseDist(models[0], optimizers[0], CPU)
        if kind == "fused"
        else PrefetchTrainPipelineSparseDist(models[0], optimizers[0], CPU, ahead=3, prefetch=2)
    )
    batches = iter([kjt(n) for n in range(16)])
    same = True
    for step in range(16):
        same &= torch.equal(pipeline.progress(batches), step_alone(models[1], optimizers[1], step))
        if step % 3 == 1:
            for model in models:
                model.reshard(changing[(step // 3 + 1) % 3], "pooled")
    return same and not any(store.residency.leases for store in stores_of(models[0]))


@pytest.mark.ranks
@pytest.mark.parametrize("kind", ["prefetch", "fused"])
@pytest.mark.parametrize("world", [1, 2])
def test_batches_that_left_under_another_plan_leave_again(world: int, kind: str) -> None:
    """Rows of the new plan's tables were brought, and looked up, by where ids had been sent under the one before."""
    assert run_ranks(world, reshard_under_way, kind) == [True] * world


def copy_under_way() -> bool:
    """Whether a copy that is made while batches are under way trains as the original does."""
    plan = plans(Tier(30, max_slots=1.0))[1]
    model: Any = DistributedModelParallel(Model(), plan=ShardingPlan({"pooled": plan}))
    optimizer = dense_optimizer(model)
    pipeline: Any = PrefetchTrainPipelineSparseDist(model, optimizer, CPU, ahead=3, prefetch=2)
    batches = iter([kjt(n) for n in range(12)])
    for _ in range(4):
        pipeline.progress(batches)
    pooled = model._sharded["pooled"]
    with sharded_model_copy("cpu"):
        other = copy.deepcopy(pooled)
    outputs = [one(kjt(4)).values() for one in (pooled, other)]
    return torch.equal(*outputs) and not other.shards._prefetched


@pytest.mark.ranks
@pytest.mark.parametrize("world", [1, 2])
def test_a_copy_is_made_while_batches_are_under_way(world: int) -> None:
    """It kept the batches of the original, which nobody looks up, for ever."""
    assert run_ranks(world, copy_under_way) == [True] * world


@pytest.mark.parametrize("given", [{"ahead": -1}, {"ahead": math.nan}, {"prefetch": 1.5}, {"ahead": "3"}])
def test_what_is_no_number_of_batches_is_refused(given: dict[str, Any]) -> None:
    """NaN passed for a window, and 1.5 failed in the first step by the words of islice."""
    model = Model()
    with pytest.raises(ValueError, match="ahead and prefetch: batches, none of them negative; got "):
        PrefetchTrainPipelineSparseDist(model, dense_optimizer(model), CPU, **given)

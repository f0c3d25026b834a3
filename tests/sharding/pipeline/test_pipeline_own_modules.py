"""Sharded modules of a user's own in a pipeline: their stages are called ahead, with the bits of a plain loop."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from model_zoo import Batch, batch_of, dense_optimizer, drain, plain_loop, same, state_of
from pipeline_runs import CPU
from ranks import run_ranks
from test_pipeline_semi_sync import semi_sync_loop
from torch import Tensor, nn

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    ModuleSharder,
    ParameterSharding,
    PrefetchTrainPipelineSparseDist,
    ShardedModule,
    ShardingEnv,
    ShardingPlan,
    TrainPipelineSparseDist,
    apply_optimizer_in_backward,
    construct_module_sharding_plan,
)
from shardwise.sharding import (
    Awaitable,
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    row_wise,
    table_wise,
)

pytestmark = pytest.mark.ranks


class Shifted(nn.Module):
    """A collection that is asked for the id after each."""

    def __init__(self) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(40, 8, f"t{n}", feature_names=[f"f{n}"]) for n in range(4)]
        self.bags = EmbeddingBagCollection(tables)
        apply_optimizer_in_backward(torch.optim.Adagrad, self.bags.parameters(), {"lr": 0.1})


class ShardedShifted(ShardedModule[Any, Any, Any, Any]):
    """Hands its stages to the sharded collection inside."""

    def __init__(self, bags: Any) -> None:
        super().__init__()
        self.bags = bags
        self.calls: list[str] = []

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        return Shifted

    def create_context(self) -> Any:
        return self.bags.create_context()

    def input_dist(self, ctx: Any, features: KeyedJaggedTensor) -> Awaitable[Awaitable[Any]]:  # type: ignore[override]
        self.calls.append("input_dist")
        shifted = KeyedJaggedTensor(features.keys(), (features.values() + 1) % 40, None, features.lengths())
        awaitable: Awaitable[Awaitable[Any]] = self.bags.input_dist(ctx, shifted)
        return awaitable

    def compute(self, ctx: Any, dist_input: Any) -> Any:
        self.calls.append("compute")
        return self.bags.compute(ctx, dist_input)

    def output_dist(self, ctx: Any, output: Any) -> Any:
        return self.bags.output_dist(ctx, output)

    def sharded_parameter_names(self, prefix: str = "") -> Iterator[str]:
        yield from self.bags.sharded_parameter_names(f"{prefix}.bags" if prefix else "bags")


class ShiftedSharder(ModuleSharder[Shifted]):
    """Shards the collection inside."""

    inner = EmbeddingBagCollectionSharder()

    @property
    def module_type(self) -> type[Shifted]:
        return Shifted

    def shardable_parameters(self, module: Shifted) -> dict[str, nn.Parameter]:
        return self.inner.shardable_parameters(module.bags)

    def shard(  # type: ignore[override]
        self, module: Shifted, params: Mapping[str, ParameterSharding], env: ShardingEnv, device: Any = None,
        module_fqn: str | None = None,
    ) -> ShardedShifted:  # fmt: skip
        return ShardedShifted(self.inner.shard(module.bags, params, env, device))


class Net(nn.Module):
    """Such a module beside dense layers."""

    # its sharded form later
    shifted: Any

    def __init__(self, several: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shifted, self.dense, self.over = Shifted(), nn.Linear(4, 8), nn.Linear(8, 1)
        self.several = several

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        features = batch.pooled
        if self.several:
            features = KeyedJaggedTensor(features.keys(), features.values(), None, features.lengths())
        hidden = self.dense(batch.dense) + self.shifted(features).values().view(-1, 4, 8).sum(1)
        out = self.over(hidden.tanh()).squeeze(1)
        return (out * out).sum() / 8, out


def made(several: bool = False) -> Any:
    net = Net(several)
    generators = {"t0": table_wise(0), "t1": row_wise(), "t2": table_wise(1), "t3": row_wise()}
    inner = construct_module_sharding_plan(net.shifted.bags, generators, world_size=2, local_size=2, device_type="cpu")
    return DistributedModelParallel(net, plan=ShardingPlan({"shifted": inner}), sharders=[ShiftedSharder()])


def beside_a_loop(kind: str, several: bool) -> tuple[bool, list[str], list[str], bool]:
    """Whether bits are those of a plain loop, warnings, first calls of stages, and whether forward is replaced."""
    make = PrefetchTrainPipelineSparseDist if kind == "prefetch" else TrainPipelineSparseDist
    plain, model = made(several), made(several)
    expected = plain_loop(plain, map(batch_of, range(5)))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipeline: Any = make(model, dense_optimizer(model), CPU, pipeline_postproc=False)
        outputs = drain(pipeline.progress, map(batch_of, range(5)))
    plain_state, piped_state = state_of(plain), state_of(model)
    good = same(expected, outputs) and all(torch.equal(value, piped_state[name]) for name, value in plain_state.items())
    messages = [str(warning.message) for warning in caught if "not pipelined" in str(warning.message)]
    module = model.module.shifted
    return good, messages, module.calls[:7], "forward" in vars(module)


@pytest.mark.parametrize("kind", ["sparse_dist", "prefetch"])
def test_a_module_of_ones_own_is_pipelined_by_its_stages(kind: str) -> None:
    """From the second batch on a batch leaves before the lookup of the one before."""
    ahead = 2 if kind == "prefetch" else 1
    for good, messages, calls, is_replaced in run_ranks(2, beside_a_loop, kind, False):
        assert good and messages == [] and not is_replaced
        assert calls[: 2 + ahead] == ["input_dist", "compute", *["input_dist"] * ahead]
        assert calls[2 + ahead : 4 + ahead] == ["input_dist", "compute"]


def test_one_whose_input_the_model_makes_is_left_in_the_step() -> None:
    for good, messages, calls, is_replaced in run_ranks(2, beside_a_loop, "sparse_dist", True):
        assert good and len(messages) == 1 and not is_replaced
        assert messages[0].startswith("module 'shifted' is not pipelined: its input is not a part of the batch")
        assert calls[:4] == ["input_dist", "compute"] * 2


def looked_up_ahead(semi: bool) -> tuple[bool, list[str]]:
    """Whether bits are those of the loop that is promised, and the module's calls."""
    plain, model = made(), made()
    pipeline: Any = (
        TrainPipelineSemiSync(model, dense_optimizer(model), CPU, start_batch=0)
        if semi
        else TrainPipelineFusedSparseDist(model, dense_optimizer(model), CPU)
    )
    outputs = drain(pipeline.progress, map(batch_of, range(5)))
    batches = [list(map(batch_of, range(5)))]
    expected = semi_sync_loop(plain, dense_optimizer(plain), batches, 0 if semi else 9, False)
    plain_state, piped_state = state_of(plain), state_of(model)
    good = same(expected, outputs) and all(torch.equal(value, piped_state[name]) for name, value in plain_state.items())
    return good, model.module.shifted.calls


def test_a_module_of_ones_own_is_looked_up_ahead_by_compute() -> None:
    for semi in (False, True):
        for good, calls in run_ranks(2, looked_up_ahead, semi):
            assert good and calls.count("compute") == calls.count("input_dist") == 5

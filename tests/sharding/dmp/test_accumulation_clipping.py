"""Clipping by the norm of all parameters, tables trained in the backward among them: against torch on a dense model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jagged_batches import Bags, draw, kjt, weight
from ranks import run_ranks
from torch import Tensor, nn

from shardwise import (
    CombinedOptimizer,
    DistributedModelParallel,
    DMPCollection,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
    PoolingType,
    ShardingEnv,
    ShardingPlan,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)
from shardwise.sharding import (
    accumulate,
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)

NORM, VALUE = GradientClipping.NORM, GradientClipping.VALUE
ADAGRAD: dict[str, Any] = {"lr": 0.1, "eps": 1e-8}
ROWS = {"f": 12, "g": 12, "h": 7, "i": 20}
SAMPLES, STEPS = 8, 3
# largest norms: one that cuts every step here, one that cuts none
LIMITS = [0.05, 1e4]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.ebc = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(12, 8, "a", feature_names=["f", "g"]),
                EmbeddingBagConfig(7, 4, "b", feature_names=["h"], pooling=PoolingType.MEAN),
                EmbeddingBagConfig(20, 8, "c", feature_names=["i"]),
            ]
        )
        self.over = nn.Sequential(nn.Linear(28, 6), nn.ReLU(), nn.Linear(6, 1))

    def forward(self, bags: Bags) -> Tensor:
        return self.over(self.ebc(kjt(bags)).values()).squeeze(1)


def loss_of(model: nn.Module, bags: Bags, first: int) -> Tensor:
    """Mean loss of samples `first` and on."""
    wanted = torch.linspace(-3, 3, SAMPLES)[first : first + len(bags["f"])]
    return (model(bags) - wanted).square().mean()


def batch(step: int, begin: int = 0, end: int = SAMPLES) -> Bags:
    return {name: bags[begin:end] for name, bags in draw(ROWS, SAMPLES, seed=step).items()}


def dense_run(cut: Any) -> tuple[dict[str, Tensor], list[float]]:
    """One process without fused tables: weights after some steps, and what `cut` returned at each."""
    model = Model()
    optimizer = torch.optim.Adagrad(model.parameters(), **ADAGRAD)
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(model, batch(step), 0).backward()
        found.append(float(cut(model.parameters()) or 0.0))
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}, found


def torch_run(clipping: GradientClipping, limit: float, norm_type: float) -> tuple[dict[str, Tensor], list[float]]:
    if clipping is NORM:
        return dense_run(lambda params: nn.utils.clip_grad_norm_(params, limit, norm_type))
    return dense_run(lambda params: nn.utils.clip_grad_value_(params, limit))


def optimizer_of_all(model: nn.Module, fused: Any, **settings: Any) -> GradientClippingOptimizer:
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    inner = CombinedOptimizer([fused, KeyedOptimizerWrapper(dense, lambda p: torch.optim.Adagrad(p, **ADAGRAD))])
    return GradientClippingOptimizer(inner, **settings)


def fused_model() -> Model:
    model = Model()
    apply_optimizer_in_backward(torch.optim.Adagrad, model.ebc.parameters(), ADAGRAD)
    return model


def assert_like(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize(
    ("clipping", "norm_type"), [(NORM, 2.0), (NORM, 1.0), (NORM, 3.0), (NORM, "inf"), (VALUE, 2.0)]
)
def test_tables_are_cut_with_all_other_parameters(
    clipping: GradientClipping, norm_type: float | str, limit: float
) -> None:
    expected, norms = torch_run(clipping, limit, float(norm_type))
    model = fused_model()
    optimizer = optimizer_of_all(
        model, ("ebc", model.ebc.fused_optimizer()), clipping=clipping, max_gradient=limit, norm_type=norm_type
    )
    for step in range(STEPS):
        optimizer.zero_grad()
        # two micro-batches, each with its share of the mean
        for begin, end in ((0, 6), (6, SAMPLES)):
            (loss_of(model, batch(step, begin, end), begin) * (end - begin) / SAMPLES).backward()
        optimizer.step()
        if clipping is NORM:
            assert optimizer.last_total_grad_norm is not None
            assert optimizer.last_total_grad_norm.item() == pytest.approx(norms[step], rel=1e-4)
    assert_like(model.state_dict(), expected)


def test_tables_alone_are_cut() -> None:
    table = EmbeddingBagCollection([EmbeddingBagConfig(4, 2, "a", feature_names=["f"])])
    apply_optimizer_in_backward(torch.optim.SGD, table.parameters(), {"lr": 1.0})
    before = weight(table, "a").detach().clone()
    optimizer = GradientClippingOptimizer(table.fused_optimizer(), NORM, 1.0)
    table.forward(kjt({"f": [[1, 1], [2]]})).values().backward(torch.tensor([[1.5, 0.0], [0.0, 4.0]]))
    optimizer.step()
    # the row of two ids counts with its sum: norm 5
    torch.testing.assert_close(
        before - weight(table, "a"),
        torch.tensor([[0.0, 0.0], [0.6, 0.0], [0.0, 0.8], [0.0, 0.0]]),
        rtol=1e-5,
        atol=1e-6,
    )


def test_a_step_without_a_batch_changes_nothing() -> None:
    model = fused_model()
    before = copy.deepcopy(model.state_dict())
    optimizer = GradientClippingOptimizer(model.ebc.fused_optimizer(), NORM, 1.0)
    optimizer.step()
    assert optimizer.last_total_grad_norm is not None and optimizer.last_total_grad_norm.item() == 0.0
    assert_like(model.state_dict(), before)


def test_without_clipping_tables_are_updated_in_the_backward() -> None:
    model = fused_model()
    GradientClippingOptimizer(model.ebc.fused_optimizer(), GradientClipping.NONE, track_grad_norm=True)
    before = copy.deepcopy(model.state_dict())
    loss_of(model, batch(0), 0).backward()
    assert not torch.equal(before["ebc.embedding_bags.a.weight"], weight(model.ebc, "a"))


def test_fused_optimizers_are_found_within_others() -> None:
    model = fused_model()
    warm = WarmupOptimizer(model.ebc.fused_optimizer(), [WarmupStage(WarmupPolicy.CONSTANT, 9, 0.5)], 0.1)
    optimizer = GradientClippingOptimizer(CombinedOptimizer([("ebc", warm)]), NORM, 1e-3)
    before = copy.deepcopy(model.state_dict())
    loss_of(model, batch(0), 0).backward()
    assert_like(model.state_dict(), before)
    optimizer.step()
    assert not torch.equal(before["ebc.embedding_bags.a.weight"], weight(model.ebc, "a"))


PLACES: dict[str, Any] = {
    "table_wise": {"a": table_wise(0), "b": table_wise(1), "c": table_wise(0)},
    "row_wise": {"a": row_wise(), "b": row_wise(), "c": row_wise()},
    "mixed": {"a": column_wise([1, 0]), "b": data_parallel(), "c": row_wise()},
}


def plan_of(model: Model, places: str, world: int) -> ShardingPlan:
    found = construct_module_sharding_plan(
        model.ebc, PLACES[places], local_size=world, world_size=world, device_type="cpu"
    )
    return ShardingPlan({"ebc": found})


def sharded_run(places: str, clipping: GradientClipping, limit: float, norm_type: float) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    model = fused_model()
    assert dist.group.WORLD is not None
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    dmp = DistributedModelParallel(model, env, "cpu", plan_of(model, places, world))
    optimizer = optimizer_of_all(dmp, dmp.fused_optimizer, clipping=clipping, max_gradient=limit, norm_type=norm_type)
    norms, share = [], SAMPLES // world // 2
    for step in range(STEPS):
        optimizer.zero_grad()
        first = rank * 2 * share
        with accumulate(dmp):
            (loss_of(dmp, batch(step, first, first + share), first) / 2).backward()
        (loss_of(dmp, batch(step, first + share, first + 2 * share), first + share) / 2).backward()
        optimizer.step()
        norms.append(optimizer.last_total_grad_norm)
    weights = dmp.state_dict()
    for name in [name for name in weights if hasattr(weights[name], "metadata")]:
        # rank 0 has the whole
        out = torch.empty(weights[name].metadata().size) if rank == 0 else None
        weights[name].gather(0, out)
        weights[name] = out
    return {"norms": norms, "weights": {name: v for name, v in weights.items() if v is not None}}


@pytest.mark.ranks
@pytest.mark.parametrize("places", PLACES)
@pytest.mark.parametrize(
    ("clipping", "norm_type", "limit"),
    [(NORM, 2.0, 0.05), (NORM, 2.0, 1e4), (NORM, float("inf"), 0.05), (VALUE, 2.0, 0.05)],
)
def test_ranks_cut_by_the_norm_of_the_whole_model(
    places: str, clipping: GradientClipping, norm_type: float, limit: float
) -> None:
    expected, norms = torch_run(clipping, limit, norm_type)
    found = run_ranks(2, sharded_run, places, clipping, limit, norm_type)
    assert_like(found[0]["weights"], expected)
    if clipping is NORM:
        for one in found:
            # the same bits everywhere
            assert [norm.item() for norm in one["norms"]] == [norm.item() for norm in found[0]["norms"]]
        assert [norm.item() for norm in found[0]["norms"]] == pytest.approx(norms, rel=1e-4)


def replicated_run() -> tuple[list[float], dict[str, Tensor]]:
    model = fused_model()
    found = construct_module_sharding_plan(
        model.ebc, dict.fromkeys("abc", row_wise()), local_size=2, world_size=2, device_type="cpu"
    )
    assert dist.group.WORLD is not None
    dmp = DMPCollection(model, torch.device("cpu"), ShardingPlan({"ebc": found}), 4, 2, dist.group.WORLD)
    optimizer = optimizer_of_all(dmp, dmp.fused_optimizer, clipping=NORM, max_gradient=0.05)
    rank, norms = dist.get_rank(), []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss_of(dmp, batch(step, 2 * rank, 2 * rank + 2), 2 * rank).backward()
        optimizer.step()
        assert optimizer.last_total_grad_norm is not None
        norms.append(optimizer.last_total_grad_norm.item())
    dense = {name: p.detach().clone() for name, p in dmp.named_parameters() if name.startswith("over")}
    return norms, dense


@pytest.mark.ranks
def test_replicas_of_sharded_tables_cut_by_one_factor() -> None:
    """Each group of ranks has gradients of its own; factors of their own would let dense layers drift apart."""
    found = run_ranks(4, replicated_run)
    for norms, dense in found[1:]:
        assert norms == found[0][0]
        assert all(torch.equal(value, found[0][1][name]) for name, value in dense.items())

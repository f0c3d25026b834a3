"""`accumulate`, `GradientAccumulationWrapper`, and clipping by the norm of all parameters, against one process.

Covers TorchRec's wrapper, which lets tables step at every micro-batch, leaves the dense gradients of a last, short
step unreduced, and makes the step after that one short too. Clipping is against torch on a dense model.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
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
    GradientAccumulationConfig,
    GradientAccumulationWrapper,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
    PoolingType,
    ShardingPlan,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
    accumulate,
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)
from shardwise.sharding import column_wise, construct_module_sharding_plan, data_parallel, row_wise, table_wise

ADAGRAD: dict[str, Any] = {"lr": 0.1, "eps": 1e-8}
ROWS = {"f": 12, "g": 12, "h": 7, "i": 20}
# of a batch of all ranks
SAMPLES = 8
NORM, VALUE = GradientClipping.NORM, GradientClipping.VALUE
CLIPPED_STEPS = 3
PLACES: dict[str, Any] = {
    "table_wise": {"a": table_wise(0), "b": table_wise(1), "c": table_wise(0)},
    "row_wise": dict.fromkeys("abc", row_wise()),
    "mixed": {"a": column_wise([1, 0]), "b": data_parallel(), "c": row_wise()},
}

Batch = tuple[Bags, Tensor]


class Model(nn.Module):
    """Three tables, one of means and one of two features, dense layers, and the loss of a batch."""

    def __init__(self, fused: bool = True) -> None:
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
        if fused:
            apply_optimizer_in_backward(torch.optim.Adagrad, self.ebc.parameters(), ADAGRAD)

    def forward(self, batch: Batch) -> Tensor:
        bags, wanted = batch
        return (self.over(self.ebc(kjt(bags)).values()).squeeze(1) - wanted).square().mean()


class Pipeline:
    """The least that is a training pipeline."""

    def __init__(self, model: nn.Module, optimizer: Any, scale: float = 1.0) -> None:
        self._model, self._optimizer, self._scale, self.resets = model, optimizer, scale, 0

    def progress(self, batches: Iterator[Any]) -> Tensor:
        batch = next(batches)
        self._optimizer.zero_grad()
        loss: Tensor = self._model(batch) * self._scale
        loss.backward()
        self._optimizer.step()
        return loss.detach()

    def reset(self) -> None:
        self.resets += 1


def batch_of(number: int, begin: int = 0, end: int = SAMPLES) -> Batch:
    """Samples [begin, end) of a batch."""
    bags = draw(ROWS, SAMPLES, seed=number)
    return {name: bags[name][begin:end] for name in bags}, torch.linspace(-3, 3, SAMPLES)[begin:end]


def micro_batch(number: int, rank: int, world: int) -> Batch:
    """A rank's samples."""
    per_rank = SAMPLES // world
    return batch_of(number, rank * per_rank, (rank + 1) * per_rank)


def one_batch(numbers: Any) -> Batch:
    """Micro-batches as one batch."""
    parts = [batch_of(number) for number in numbers]
    return {name: [bag for bags, _ in parts for bag in bags[name]] for name in ROWS}, torch.cat([y for _, y in parts])


def alone(steps: list[list[int]], micro_batches: int | None = None) -> dict[str, Tensor]:
    """One process, one batch for each step; with `micro_batches` each has that part of its loss, however many come."""
    model = Model()
    dense = torch.optim.Adagrad(model.over.parameters(), **ADAGRAD)
    for numbers in steps:
        dense.zero_grad()
        (model(one_batch(numbers)) * len(numbers) / (micro_batches or len(numbers))).backward()
        dense.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def dense_of(model: nn.Module) -> KeyedOptimizerWrapper:
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    return KeyedOptimizerWrapper(dense, lambda p: torch.optim.Adagrad(p, **ADAGRAD))


def plan_of(model: Model, places: str, world: int) -> ShardingPlan:
    cut = construct_module_sharding_plan(
        model.ebc, PLACES[places], local_size=world, world_size=world, device_type="cpu"
    )
    return ShardingPlan({"ebc": cut})


def sharded(world: int, places: str = "mixed") -> tuple[nn.Module, KeyedOptimizerWrapper]:
    """A model over the ranks and the optimizer of its dense layers."""
    model: nn.Module = Model()
    if world > 1:
        assert isinstance(model, Model)
        model = DistributedModelParallel(model, device="cpu", plan=plan_of(model, places, world))
    return model, dense_of(model)


def fused_of(model: nn.Module) -> Any:
    return model.ebc.fused_optimizer() if isinstance(model, Model) else model.fused_optimizer


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Weights; those of cut tables on rank 0 only."""
    state = {}
    for name, value in model.state_dict().items():
        if hasattr(value, "metadata"):
            out = torch.empty(value.metadata().size) if dist.get_rank() == 0 else None
            value.gather(0, out)
            value = out  # noqa: PLW2901
        if value is not None:
            state[name] = value.detach().clone()
    return state


def ranks_of(world: int) -> tuple[int, int]:
    return (dist.get_rank(), world) if world > 1 else (0, 1)


def by_loop(world: int, steps: list[list[int]]) -> dict[str, Tensor]:
    """A plain loop with `accumulate`."""
    (rank, _), (model, dense) = ranks_of(world), sharded(world)
    fused = fused_of(model)
    for numbers in steps:
        dense.zero_grad()
        fused.zero_grad()
        for number in numbers[:-1]:
            with accumulate(model):
                (model(micro_batch(number, rank, world)) / len(numbers)).backward()
        (model(micro_batch(numbers[-1], rank, world)) / len(numbers)).backward()
        dense.step()
        fused.step()
    return whole(model)


def by_wrapper(world: int, epochs: list[int], combined: bool, marks_last: bool, warmup: int) -> dict[str, Tensor]:
    """The wrapper, three micro-batches a step, over epochs of so many micro-batches."""
    (rank, _), (model, dense) = ranks_of(world), sharded(world)
    optimizer: Any = CombinedOptimizer([fused_of(model), dense]) if combined and world > 1 else dense
    config = GradientAccumulationConfig(num_steps=3, num_warmup_steps=warmup)
    wrapped: GradientAccumulationWrapper[Any, Tensor] = GradientAccumulationWrapper(
        Pipeline(model, optimizer, 1 / 3), optimizer, model, config
    )
    first = 0
    for length in epochs:
        batches = iter([micro_batch(number, rank, world) for number in range(first, first + length)])
        for n in range(length):
            wrapped.progress(batches, is_last_batch=marks_last and n == length - 1)
        if not marks_last:
            with pytest.raises(StopIteration):
                wrapped.progress(batches)
        first += length
    assert wrapped.current_step == first
    return whole(model)


def on_ranks(world: int, run: Any, *args: Any) -> dict[str, Tensor]:
    return run(world, *args) if world == 1 else run_ranks(world, run, world, *args)[0]


def assert_like(weights: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert weights.keys() == expected.keys()
    for name, value in weights.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5, msg=name)


WORLDS = [1, pytest.param(2, marks=pytest.mark.ranks), pytest.param(4, marks=pytest.mark.ranks)]


@pytest.mark.parametrize("world", WORLDS)
def test_a_loop_that_accumulates_takes_the_steps_of_whole_batches(world: int) -> None:
    steps = [[0, 1, 2], [3], [4, 5]]
    assert_like(on_ranks(world, by_loop, steps), alone(steps))


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(
    ("epochs", "combined", "marks_last", "warmup", "steps"),
    [
        ([6], True, False, 1, [[0, 1, 2], [3, 4, 5]]),
        # also where the optimizer that it steps knows nothing of the tables
        ([6], False, False, 2, [[0, 1, 2], [3, 4, 5]]),
        # the last micro-batches of an epoch are a step, and the next epoch begins one
        ([5, 4], True, True, 1, [[0, 1, 2], [3, 4], [5, 6, 7], [8]]),
        ([5, 4], True, False, 1, [[0, 1, 2], [3, 4], [5, 6, 7], [8]]),
    ],
)
def test_a_pipeline_that_accumulates_takes_the_steps_of_whole_batches(
    world: int, epochs: list[int], combined: bool, marks_last: bool, warmup: int, steps: list[list[int]]
) -> None:
    """TorchRec steps with gradients that nobody reduced, so that ranks drift apart, and its next step is short."""
    assert_like(on_ranks(world, by_wrapper, epochs, combined, marks_last, warmup), alone(steps, 3))


def drifts(world: int) -> list[Tensor]:
    (rank, _), (model, dense) = ranks_of(world), sharded(world)
    config = GradientAccumulationConfig(num_steps=3)
    wrapped: Any = GradientAccumulationWrapper(Pipeline(model, dense), dense, model, config)
    batches = iter([micro_batch(number, rank, world) for number in range(5)])
    with pytest.raises(StopIteration):
        while True:
            wrapped.progress(batches)
    return [param.detach().clone() for param in dense.params.values()]


@pytest.mark.ranks
def test_dense_layers_are_the_same_on_all_ranks_after_a_short_step() -> None:
    first, second = run_ranks(2, drifts, 2)
    assert all(torch.equal(param, peer_param) for param, peer_param in zip(first, second, strict=True))


def test_a_step_that_never_came_is_told_at_the_next_micro_batch() -> None:
    model, dense = sharded(1)
    with accumulate(model):
        model(micro_batch(0, 0, 1)).backward()
    model(micro_batch(1, 0, 1)).backward()
    dense.step()
    with (
        pytest.raises(RuntimeError, match=r"tables \['embedding_bags.a.weight', .* call step\(\) of the model's fused"),
        accumulate(model),
    ):
        pass
    fused_of(model).step()
    with accumulate(model):
        pass


def test_after_an_error_inside_tables_are_updated_in_the_backward_again() -> None:
    model, _ = sharded(1)
    with pytest.raises(KeyError), accumulate(model):
        raise KeyError("f")
    before = model.ebc.embedding_bags["a"].weight.detach().clone()  # type: ignore[union-attr,index]
    model(micro_batch(0, 0, 1)).backward()
    assert not torch.equal(before, model.ebc.embedding_bags["a"].weight)  # type: ignore[union-attr,index]


def test_tables_wait_after_an_accumulation_within_another_as_before_it() -> None:
    model, _ = sharded(1)
    table = weight(model.ebc, "a")  # type: ignore[arg-type]
    before = table.detach().clone()
    with accumulate(model):
        with accumulate(model):
            model(micro_batch(0, 0, 1)).backward()
        model(micro_batch(1, 0, 1)).backward()
    # had the outer one ended with the inner one, that micro-batch would have been the last, and its step missing
    with accumulate(model):
        model(micro_batch(2, 0, 1)).backward()
    assert torch.equal(before, table)
    fused_of(model).step()
    assert not torch.equal(before, table)


def test_dense_parameters_with_an_optimizer_in_the_backward_are_refused() -> None:
    model, _ = sharded(1)
    apply_optimizer_in_backward(torch.optim.SGD, model.over.parameters(), {"lr": 0.1})  # type: ignore[union-attr]
    marked = r"dense parameters \['over.0.weight', .*'over.2.bias'\] have an optimizer in the"
    with pytest.raises(ValueError, match=marked), accumulate(model):
        pass


def test_the_wrapper_is_torchrecs() -> None:
    model, dense = sharded(1)
    pipeline = Pipeline(model, dense)
    wrapped: Any = GradientAccumulationWrapper(pipeline, dense, model, GradientAccumulationConfig(True, 2))
    assert pipeline._optimizer is wrapped.optimizer_wrapper
    assert wrapped.optimizer_wrapper.param_groups is dense.param_groups
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wrapped.progress(iter([micro_batch(0, 0, 1)]))
    assert wrapped.current_step == 1 and all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    # what waited is dropped, and the count begins anew
    wrapped.reset()
    assert (wrapped.current_step, wrapped.resets) == (0, 1)
    wrapped.progress(iter([micro_batch(1, 0, 1)]))
    wrapped.progress(iter([micro_batch(2, 0, 1)]))
    assert_like(dict(model.state_dict()), alone([[1, 2]], 1))
    wrapped.set_step(7)
    assert wrapped.optimizer_wrapper.is_last()


def test_without_accumulation_the_pipeline_keeps_its_optimizer() -> None:
    model, dense = sharded(1)
    pipeline = Pipeline(model, dense)
    wrapped: Any = GradientAccumulationWrapper(pipeline, dense, model, GradientAccumulationConfig())
    assert pipeline._optimizer is dense
    wrapped.progress(iter([micro_batch(0, 0, 1)]))
    assert wrapped.current_step == 0


def test_settings_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="num_steps must be at least 1, got 0"):
        GradientAccumulationConfig(num_steps=0)
    with pytest.raises(ValueError, match="num_warmup_steps must be at least 1, got 0"):
        GradientAccumulationConfig(num_warmup_steps=0)
    assert GradientAccumulationConfig(num_steps=2).is_enabled
    model, dense = sharded(1)
    with pytest.raises(ValueError, match="Linear has no _optimizer, whose steps are to wait"):
        GradientAccumulationWrapper(nn.Linear(1, 1), dense, model, GradientAccumulationConfig(num_steps=2))  # type: ignore[arg-type]


def torch_run(clipping: GradientClipping, limit: float, norm_type: float) -> tuple[dict[str, Tensor], list[float]]:
    """One process without fused tables: weights after some steps, and the norm of each."""
    model, norms = Model(fused=False), []
    optimizer = torch.optim.Adagrad(model.parameters(), **ADAGRAD)
    for step in range(CLIPPED_STEPS):
        optimizer.zero_grad()
        model(batch_of(step)).backward()
        if clipping is NORM:
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), limit, norm_type)))
        else:
            nn.utils.clip_grad_value_(model.parameters(), limit)
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}, norms


def clipping_of(model: nn.Module, fused: Any, **settings: Any) -> GradientClippingOptimizer:
    """Over all parameters."""
    return GradientClippingOptimizer(CombinedOptimizer([fused, dense_of(model)]), **settings)


# one that cuts every step here, one that cuts none
@pytest.mark.parametrize("limit", [0.05, 1e4])
@pytest.mark.parametrize(
    ("clipping", "norm_type"), [(NORM, 2.0), (NORM, 1.0), (NORM, 3.0), (NORM, "inf"), (VALUE, 2.0)]
)
def test_tables_are_cut_with_all_other_parameters(
    clipping: GradientClipping, norm_type: float | str, limit: float
) -> None:
    expected, norms = torch_run(clipping, limit, float(norm_type))
    model = Model()
    optimizer = clipping_of(
        model, ("ebc", model.ebc.fused_optimizer()), clipping=clipping, max_gradient=limit, norm_type=norm_type
    )
    for step in range(CLIPPED_STEPS):
        optimizer.zero_grad()
        # two micro-batches, each with its share of the mean
        for begin, end in ((0, 6), (6, SAMPLES)):
            (model(batch_of(step, begin, end)) * (end - begin) / SAMPLES).backward()
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
    model = Model()
    before = copy.deepcopy(model.state_dict())
    optimizer = GradientClippingOptimizer(model.ebc.fused_optimizer(), NORM, 1.0)
    optimizer.step()
    assert optimizer.last_total_grad_norm is not None and optimizer.last_total_grad_norm.item() == 0.0
    assert_like(model.state_dict(), before)


def test_without_clipping_tables_are_updated_in_the_backward() -> None:
    model = Model()
    GradientClippingOptimizer(model.ebc.fused_optimizer(), GradientClipping.NONE, track_grad_norm=True)
    before = copy.deepcopy(model.state_dict())
    model(batch_of(0)).backward()
    assert not torch.equal(before["ebc.embedding_bags.a.weight"], weight(model.ebc, "a"))


def test_fused_optimizers_are_found_within_others() -> None:
    model = Model()
    warm = WarmupOptimizer(model.ebc.fused_optimizer(), [WarmupStage(WarmupPolicy.CONSTANT, 9, 0.5)], 0.1)
    optimizer = GradientClippingOptimizer(CombinedOptimizer([("ebc", warm)]), NORM, 1e-3)
    before = copy.deepcopy(model.state_dict())
    model(batch_of(0)).backward()
    assert_like(model.state_dict(), before)
    optimizer.step()
    assert not torch.equal(before["ebc.embedding_bags.a.weight"], weight(model.ebc, "a"))


def sharded_run(places: str, clipping: GradientClipping, limit: float, norm_type: float) -> Any:
    rank, world = dist.get_rank(), dist.get_world_size()
    dmp, _ = sharded(world, places)
    optimizer = clipping_of(dmp, fused_of(dmp), clipping=clipping, max_gradient=limit, norm_type=norm_type)
    norms, share = [], SAMPLES // world // 2
    for step in range(CLIPPED_STEPS):
        optimizer.zero_grad()
        first = rank * 2 * share
        with accumulate(dmp):
            (dmp(batch_of(step, first, first + share)) / 2).backward()
        (dmp(batch_of(step, first + share, first + 2 * share)) / 2).backward()
        optimizer.step()
        norms.append(optimizer.last_total_grad_norm)
    return norms, whole(dmp)


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
    ranks = run_ranks(2, sharded_run, places, clipping, limit, norm_type)
    assert_like(ranks[0][1], expected)
    if clipping is NORM:
        # the same bits everywhere
        first, second = ([norm.item() for norm in of_rank] for of_rank, _ in ranks)
        assert first == second
        assert first == pytest.approx(norms, rel=1e-4)


def replicated_run() -> tuple[list[float], dict[str, Tensor]]:
    model = Model()
    assert dist.group.WORLD is not None
    dmp = DMPCollection(model, torch.device("cpu"), plan_of(model, "row_wise", 2), 4, 2, dist.group.WORLD)
    optimizer = clipping_of(dmp, dmp.fused_optimizer, clipping=NORM, max_gradient=0.05)
    rank, norms = dist.get_rank(), []
    for step in range(CLIPPED_STEPS):
        optimizer.zero_grad()
        dmp(micro_batch(step, rank, 4)).backward()
        optimizer.step()
        assert optimizer.last_total_grad_norm is not None
        norms.append(optimizer.last_total_grad_norm.item())
    dense = {name: p.detach().clone() for name, p in dmp.named_parameters() if name.startswith("over")}
    return norms, dense


@pytest.mark.ranks
def test_replicas_of_sharded_tables_cut_by_one_factor() -> None:
    """Each group of ranks has gradients of its own; factors of their own would let dense layers drift apart."""
    ranks = run_ranks(4, replicated_run)
    for norms, dense in ranks[1:]:
        assert norms == ranks[0][0]
        assert all(torch.equal(value, ranks[0][1][name]) for name, value in dense.items())

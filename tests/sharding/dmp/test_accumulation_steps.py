"""`accumulate` and `GradientAccumulationWrapper`: micro-batches of models over ranks against one process that sees all.

Covers TorchRec's wrapper, which lets tables step at every micro-batch, leaves the dense gradients of a last, short
step unreduced, and makes the step after that one short too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jagged_batches import draw, kjt
from ranks import run_ranks
from torch import Tensor, nn

from shardwise import (
    CombinedOptimizer,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    GradientAccumulationConfig,
    GradientAccumulationWrapper,
    KeyedOptimizerWrapper,
    ShardingPlan,
    accumulate,
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)
from shardwise.sharding import column_wise, construct_module_sharding_plan, row_wise

ADAGRAD: dict[str, Any] = {"lr": 0.1, "eps": 1e-8}
ROWS = {"f": 12, "g": 7}
# of a micro-batch of a rank
SAMPLES = 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.ebc = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(12, 8, "a", feature_names=["f"]),
                EmbeddingBagConfig(7, 4, "b", feature_names=["g"]),
            ]
        )
        self.over = nn.Linear(12, 1)
        apply_optimizer_in_backward(torch.optim.Adagrad, self.ebc.parameters(), ADAGRAD)

    def forward(self, batch: tuple[Any, Tensor]) -> Tensor:
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


def micro_batch(number: int, rank: int, world: int) -> tuple[Any, Tensor]:
    """A rank's samples of a micro-batch; four ranks' worth in all."""
    each = 4 * SAMPLES // world
    bags = draw(ROWS, 4 * SAMPLES, seed=number)
    mine = slice(rank * each, (rank + 1) * each)
    return {name: bags[name][mine] for name in bags}, torch.linspace(-2, 2, 4 * SAMPLES)[mine]


def one_batch(numbers: Any) -> tuple[Any, Tensor]:
    """Micro-batches as one batch."""
    parts = [micro_batch(number, 0, 1) for number in numbers]
    return {name: [bag for bags, _ in parts for bag in bags[name]] for name in ROWS}, torch.cat([y for _, y in parts])


def alone(steps: list[list[int]]) -> dict[str, Tensor]:
    """One process, one batch for each step."""
    model = Model()
    dense = torch.optim.Adagrad(model.over.parameters(), **ADAGRAD)
    for numbers in steps:
        dense.zero_grad()
        model(one_batch(numbers)).backward()
        dense.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def sharded(world: int) -> tuple[nn.Module, KeyedOptimizerWrapper]:
    """A model over the ranks and the optimizer of its dense layers."""
    if world == 1:
        model: nn.Module = Model()
    else:
        module = Model()
        places = {"a": row_wise(), "b": column_wise([0])}
        plan = construct_module_sharding_plan(module.ebc, places, local_size=world, world_size=world, device_type="cpu")
        model = DistributedModelParallel(module, device="cpu", plan=ShardingPlan({"ebc": plan}))
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    return model, KeyedOptimizerWrapper(dense, lambda p: torch.optim.Adagrad(p, **ADAGRAD))


def fused_of(model: nn.Module) -> Any:
    return model.ebc.fused_optimizer() if isinstance(model, Model) else model.fused_optimizer


def whole(model: nn.Module) -> dict[str, Tensor]:
    """Weights; those of cut tables on rank 0 only."""
    found = {}
    for name, value in model.state_dict().items():
        if hasattr(value, "metadata"):
            out = torch.empty(value.metadata().size) if dist.get_rank() == 0 else None
            value.gather(0, out)
            value = out  # noqa: PLW2901
        if value is not None:
            found[name] = value.detach().clone()
    return found


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


def by_wrapper(world: int, epochs: list[int], combined: bool, told: bool, warmup: int) -> dict[str, Tensor]:
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
            wrapped.progress(batches, is_last_batch=told and n == length - 1)
        if not told:
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
@pytest.mark.parametrize(("combined", "warmup"), [(True, 1), (False, 2)])
def test_a_pipeline_that_accumulates_takes_the_steps_of_whole_batches(world: int, combined: bool, warmup: int) -> None:
    """Also where the optimizer that it steps knows nothing of the tables."""
    found = on_ranks(world, by_wrapper, [6], combined, False, warmup)
    assert_like(found, alone([[0, 1, 2], [3, 4, 5]]))


def scaled(steps: list[list[int]]) -> dict[str, Tensor]:
    """As `alone`, each micro-batch with a third of its loss, however many there are."""
    model = Model()
    dense = torch.optim.Adagrad(model.over.parameters(), **ADAGRAD)
    for numbers in steps:
        dense.zero_grad()
        (model(one_batch(numbers)) * len(numbers) / 3).backward()
        dense.step()
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("told", [True, False])
def test_the_last_micro_batches_of_an_epoch_are_a_step_and_the_next_epoch_begins_one(world: int, told: bool) -> None:
    """TorchRec steps with gradients that nobody reduced, so that ranks drift apart, and its next step is short."""
    found = on_ranks(world, by_wrapper, [5, 4], True, told, 1)
    assert_like(found, scaled([[0, 1, 2], [3, 4], [5, 6, 7], [8]]))


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
    one, other = run_ranks(2, drifts, 2)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(one, other, strict=True))


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


def test_dense_parameters_with_an_optimizer_in_the_backward_are_refused() -> None:
    model, _ = sharded(1)
    apply_optimizer_in_backward(torch.optim.SGD, model.over.parameters(), {"lr": 0.1})  # type: ignore[union-attr]
    marked = r"dense parameters \['over.weight', 'over.bias'\] have an optimizer in the"
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
    other, dense_of_other = sharded(1)
    dense_of_other.zero_grad()
    (other(one_batch([1, 2])) * 2).backward()
    dense_of_other.step()
    assert_like(dict(model.state_dict()), dict(other.state_dict()))
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

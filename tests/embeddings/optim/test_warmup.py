"""WarmupOptimizer: rates by formula, tables steered by them, and schedules that resume."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from copies import same
from jagged_batches import draw, kjt, tables_of, upstream
from torch import nn

from shardwise.embeddings import (
    CombinedOptimizer,
    EmbeddingBagConfig,
    FusedEmbeddingBagCollection,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    OptimizerWrapper,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
)

P, S = WarmupPolicy, WarmupStage
LR = 0.3


def wrapped(lr: float = 7.0) -> KeyedOptimizerWrapper:
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.zeros(2)
    return KeyedOptimizerWrapper({"p": param}, lambda params: torch.optim.SGD(params, lr=lr, momentum=0.9))


def rates(optimizer: KeyedOptimizer, steps: int) -> list[float]:
    """The rate before the first of so many steps, and after each."""
    lrs = [next(iter(optimizer.param_groups))["lr"]]
    for _ in range(steps):
        optimizer.step()
        lrs.append(next(iter(optimizer.param_groups))["lr"])
    return lrs


# stages, and the factor of LR at iteration i; checked to be equal to TorchRec 1.8.0's rates for 24 iterations
SCHEDULES: dict[str, tuple[list[WarmupStage], Callable[[int], float]]] = {
    "no stage": ([], lambda i: 1.0),
    "default stage": ([S()], lambda i: 1.0),
    "none": ([S(P.NONE, 4, 0.5)], lambda i: 1.0),
    "linear, then twice the rate": (
        [S(P.LINEAR, 5, 0.1), S(P.LINEAR, 9, 0.5, 2.0)],
        lambda i: 0.1 + 0.9 * i / 5 if i <= 5 else 2 * (0.5 + 0.5 * i / 9) if i <= 9 else 1.0,
    ),
    "constant": ([S(P.CONSTANT, 3, 0.25, 0.5)], lambda i: 0.125 if i <= 3 else 1.0),
    "poly, to its end and cut short": (
        [S(P.POLY, 6, 2.0), S(P.POLY, 9, 0.5, decay_iters=20)],
        lambda i: (1 - i / 6) ** 2 if i <= 6 else math.sqrt(1 - i / 20) if i <= 9 else 1.0,
    ),
    "step": (
        [S(P.STEP, 8, 0.5, decay_iters=3), S(P.STEP, 10, 0.9)],
        lambda i: 0.5 ** (i // 3) if i <= 8 else 0.9**i if i <= 10 else 1.0,
    ),
    "inverse root": (
        [S(P.CONSTANT, 2), S(P.INVSQRT, 9, lr_scale=3.0)],
        lambda i: 1.0 if i <= 2 or i > 9 else 3 / math.sqrt(i),
    ),
    "cosine": (
        [S(P.COSINE_ANNEALING_WARM_RESTARTS, 12, 0.1, sgdr_period=5)],
        lambda i: 0.1 + 0.9 * (1 + math.cos(math.pi * (i % 5) / 5)) / 2 if i <= 12 else 1.0,
    ),
    "interpolate": (
        [S(P.LINEAR, 3, 0.0), S(P.INTERPOLATE, 9, 1.0, start_interpolating_iters=3, end_value=0.2)],
        lambda i: i / 3 if i <= 3 else 1 - 0.8 * (i - 3) / 6 if i <= 9 else 1.0,
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rate_follows_the_stages(name: str) -> None:
    stages, factor = SCHEDULES[name]
    lrs = rates(WarmupOptimizer(wrapped(), stages, lr=LR), 24)
    assert lrs == pytest.approx([LR * factor(i) for i in range(25)], rel=1e-12, abs=1e-15)


def test_an_inverse_root_may_come_first() -> None:
    """TorchRec divides by zero at construction: iteration 0 has the factor of iteration 1 here."""
    lrs = rates(WarmupOptimizer(wrapped(), [S(P.INVSQRT, 3)], lr=1.0), 4)
    assert lrs == pytest.approx([1.0, 1.0, 2**-0.5, 3**-0.5, 1.0])


def test_stages_are_not_written_to() -> None:
    """TorchRec fills `decay_iters` in, in the caller's stages, which another schedule may use with other numbers."""
    stages = [S(P.POLY, 4), S(P.STEP, 6, 0.5)]
    before = copy.deepcopy(stages)
    WarmupOptimizer(wrapped(), stages)
    assert stages == before


BAD: dict[str, tuple[list[WarmupStage], str]] = {
    "no growth": (
        [S(max_iters=3), S(max_iters=3)],
        "greater than the previous max iter 3: max_iters of .*stage 1",
    ),
    "no length": ([S(max_iters=0)], "stage 0 .*got 0"),
    "no end value": ([S(P.INTERPOLATE, 5, start_interpolating_iters=1)], "INTERPOLATE.* needs end_value, got None"),
    "no start": ([S(P.INTERPOLATE, 5, end_value=1.0)], "needs .*start_interpolating_iters below .*got None"),
    "late start": ([S(P.INTERPOLATE, 5, end_value=1.0, start_interpolating_iters=5)], "below its max_iters 5, got 5"),
    "no period": ([S(P.COSINE_ANNEALING_WARM_RESTARTS, 5, sgdr_period=0)], "sgdr_period must be positive, got 0"),
    # TorchRec's rate turns negative, or math.pow fails in mid-run
    "negative rate": ([S(P.POLY, 5, decay_iters=3)], "zero at decay_iters=3 and would be negative until max_iters=5"),
}


@pytest.mark.parametrize("case", BAD)
def test_stages_that_make_no_sense_are_refused(case: str) -> None:
    stages, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        WarmupOptimizer(wrapped(), stages)


def test_what_a_schedule_cannot_steer_is_refused() -> None:
    with pytest.raises(ValueError, match="holds a parameter '__warmup' already"):
        WarmupOptimizer(WarmupOptimizer(wrapped(), []), [])
    with pytest.raises(TypeError, match="SGD has no named parameters: wrap it"):
        bare: Any = torch.optim.SGD([nn.Parameter(torch.ones(1))])
        WarmupOptimizer(bare, [])


def test_a_group_without_the_rate_gets_one_and_a_warning() -> None:
    """Programs wrap optimizers that have no `lr`, as TorchRec lets them."""
    optimizer = wrapped()
    with pytest.warns(UserWarning, match=r"1 of 1 .* lr_param='rate', one of them has \['dampening'"):
        warmup = WarmupOptimizer(optimizer, [S(P.CONSTANT, 2, 0.5)], lr=1.0, lr_param="rate")
    before = optimizer.param_groups[0]["lr"]
    warmup.step()
    assert (optimizer.param_groups[0]["rate"], optimizer.param_groups[0]["lr"]) == (0.5, before)


def test_another_name_of_the_rate() -> None:
    inner = KeyedOptimizerWrapper({"p": nn.Parameter(torch.ones(1))}, lambda p: torch.optim.SGD(p, lr=7.0))
    WarmupOptimizer(inner, [S(P.CONSTANT, 2, 0.5)], lr=1.0, lr_param="weight_decay", param_name="decay")
    assert (inner.param_groups[0]["lr"], inner.param_groups[0]["weight_decay"]) == (7.0, 0.5)


class Model(nn.Module):
    """Two tables that are trained in the backward, and a dense layer."""

    def __init__(self, kind: Any = torch.optim.SGD) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [
            EmbeddingBagConfig(6, 4, "a", feature_names=["f"]),
            EmbeddingBagConfig(4, 3, "b", feature_names=["g"]),
        ]
        self.ebc = FusedEmbeddingBagCollection(tables, kind, {"lr": 9.0})
        self.dense = nn.Linear(7, 2)

    def combined(self, kind: Any = torch.optim.SGD) -> CombinedOptimizer:
        dense = KeyedOptimizerWrapper(dict(self.dense.named_parameters("dense")), lambda p: kind(p, lr=9.0))
        return CombinedOptimizer([("ebc", self.ebc.fused_optimizer()), dense])

    def train_on(self, optimizer: KeyedOptimizer, steps: range, *, drop: bool = True) -> None:
        for step in steps:
            if drop:
                optimizer.zero_grad()
            self.dense(self.ebc(kjt(draw({"f": 6, "g": 4}, 3, seed=step))).values()).square().sum().backward()
            optimizer.step()


STAGES = [S(P.LINEAR, 3, 0.1), S(P.STEP, 6, 0.5, decay_iters=2)]


def scheduled(kind: Any, outer: Any = OptimizerWrapper) -> tuple[Model, OptimizerWrapper]:
    """A model and its optimizer, whose rates are those of STAGES."""
    model = Model(kind)
    return model, outer(WarmupOptimizer(model.combined(kind), STAGES, lr=0.05))


def one_hit(model: Model) -> float:
    """By how much a gradient of one moves row 1 of table a."""
    before = tables_of(model.ebc)["a"][1]
    model.ebc(kjt({"f": [[1]], "g": [[]]})).values().sum().backward()
    return (before - tables_of(model.ebc)["a"][1]).mean().item()


@pytest.mark.parametrize("drop", [True, False], ids=["zero_grad", "no zero_grad"])
def test_tables_are_trained_at_the_scheduled_rate(drop: bool) -> None:
    """Without `zero_grad` TorchRec's tables are one rate behind: the next call passes it on, after the backward."""
    model = Model()
    optimizer = WarmupOptimizer(model.combined(), STAGES, lr=0.5)
    lrs = []
    for _ in range(8):
        if drop:
            optimizer.zero_grad()
        lrs.append(one_hit(model))
        optimizer.step()
    expected = [0.05, 0.2, 0.35, 0.5, 0.125, 0.125, 0.0625, 0.5]
    assert lrs == pytest.approx(expected, rel=1e-4)
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
@pytest.mark.parametrize(
    "outer", [OptimizerWrapper, lambda o: GradientClippingOptimizer(o, GradientClipping.NORM, 0.5)]
)
def test_a_resumed_schedule_has_the_bits_of_the_uninterrupted_one(kind: Any, outer: Any) -> None:
    """Around a CombinedOptimizer TorchRec does not save the schedule's place at all: it begins anew."""
    (whole, optimizer), (resumed, again) = scheduled(kind, outer), scheduled(kind, outer)
    whole.train_on(optimizer, range(4))
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    assert saved[1]["state"]["__warmup"]["warmup"].tolist() == [4, 1]
    whole.train_on(optimizer, range(4, 8))
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    assert next(iter(again.param_groups))["lr"] == 0.05 * 0.25
    resumed.train_on(again, range(4, 8))
    assert same(resumed.state_dict(), whole.state_dict())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_written_into_the_live_tensors_resumes_too(tmp_path: Path) -> None:
    """torch's reader fills the tensors of a state dict in place; what `init_state` has not made it cannot fill."""
    (whole, optimizer), (resumed, again) = scheduled(torch.optim.Adam), scheduled(torch.optim.Adam)
    whole.train_on(optimizer, range(4))
    checkpoint.save(
        {"model": whole.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=tmp_path, no_dist=True
    )
    whole.train_on(optimizer, range(4, 8))
    again.init_state()
    state = {"model": resumed.state_dict(), "optim": again.state_dict()}
    checkpoint.load(state, checkpoint_id=tmp_path, no_dist=True)
    resumed.load_state_dict(state["model"])
    again.load_state_dict(state["optim"])
    resumed.train_on(again, range(4, 8))
    assert same(resumed.state_dict(), whole.state_dict())


def test_warm_ups_of_parts_are_saved_by_prefix() -> None:
    first, second = WarmupOptimizer(wrapped(), STAGES), WarmupOptimizer(wrapped(), STAGES)
    combined = CombinedOptimizer([("x", first), ("y", second)])
    first.step()
    state = combined.state_dict()["state"]
    assert [state[f"{part}.__warmup"]["warmup"].tolist() for part in "xy"] == [[1, 0], [0, 0]]
    fresh = WarmupOptimizer(wrapped(), STAGES)
    CombinedOptimizer([("x", fresh), ("y", WarmupOptimizer(wrapped(), STAGES))]).load_state_dict(combined.state_dict())
    assert fresh.state_dict()["state"]["__warmup"]["warmup"].tolist() == [1, 0]
    assert set(fresh.params) == {"p", "__warmup"} and len(fresh.state) == 2


FAULTY: dict[str, tuple[Any, str]] = {
    "missing": (None, r"missing \['__warmup'\]; to begin at some iteration"),
    "beyond the stages": ({"warmup": torch.tensor([9, 3])}, "iteration 9 of stage 3, this one has stages 0 to 2"),
    "no pair": ({"warmup": torch.tensor([9])}, "expected {'warmup': tensor"),
    "no dict": (3, "expected {'warmup': tensor"),
}


@pytest.mark.parametrize("case", FAULTY)
def test_a_saved_place_that_does_not_fit_is_refused_and_changes_nothing(case: str) -> None:
    place, message = FAULTY[case]
    optimizer = WarmupOptimizer(wrapped(), STAGES)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"]["p"]["momentum_buffer"].fill_(5.0)
    if place is None:
        del saved["state"]["__warmup"]
    else:
        saved["state"]["__warmup"] = place
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    state = optimizer.state_dict()["state"]
    assert state["__warmup"]["warmup"].tolist() == [1, 0]
    assert torch.equal(state["p"]["momentum_buffer"], torch.zeros(2))


def test_schedulers_and_warm_up_take_turns_without_a_warning() -> None:
    optimizer = WarmupOptimizer(wrapped(), [S(P.CONSTANT, 2, 0.5)], lr=1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
        optimizer.step()
        scheduler.step()
    copied = copy.deepcopy(optimizer)
    assert rates(copied, 2) == [0.5, 0.5, 1.0] and rates(optimizer, 2) == [0.5, 0.5, 1.0]


def test_init_state_does_not_move_the_schedule() -> None:
    """TorchRec's `init_state` steps the schedule too: the second iteration's rate came first."""
    optimizer = WarmupOptimizer(wrapped(), STAGES, lr=1.0)
    optimizer.init_state()
    assert optimizer.param_groups[0]["lr"] == 0.1
    state = optimizer.state_dict()["state"]
    assert state["__warmup"]["warmup"].tolist() == [0, 0] and "momentum_buffer" in state["p"]
    # a checkpoint reader writes into these tensors
    state["__warmup"]["warmup"].copy_(torch.tensor([2, 0]))
    optimizer.load_state_dict(optimizer.state_dict())
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.7)


def test_the_loss_of_a_closure_is_returned() -> None:
    optimizer = WarmupOptimizer(wrapped(), [])
    assert optimizer.step(lambda: upstream(1, seed=0).sum()) == upstream(1, seed=0).sum()


def test_the_schedule_stays_on_the_cpu_under_another_default_device() -> None:
    """On the default device, a GPU say, every step would wait for it; meta has no numbers at all."""
    with torch.device("meta"):
        inner = KeyedOptimizerWrapper({"p": nn.Parameter(torch.ones(2))}, lambda p: torch.optim.SGD(p, lr=7.0))
        optimizer = WarmupOptimizer(inner, [S(P.CONSTANT, 1, 0.5)], lr=1.0)
        assert rates(optimizer, 2) == [0.5, 0.5, 1.0]
        optimizer.load_state_dict(optimizer.state_dict())

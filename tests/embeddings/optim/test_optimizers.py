"""Optimizers seen from outside: learning rates, states by name, resuming, dense rules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from copies import same
from jagged_batches import draw, kjt, tables_of, upstream
from kernel_inputs import assert_close
from torch import Tensor, nn

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    FusedEmbeddingBagCollection,
    FusedOptimizer,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)

KINDS = [torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, RowWiseAdagrad]


def fused(kind: Any = torch.optim.SGD, lr: float = 1.0) -> FusedEmbeddingBagCollection:
    tables = [EmbeddingBagConfig(6, 4, "a", feature_names=["f"]), EmbeddingBagConfig(4, 3, "b", feature_names=["g"])]
    return FusedEmbeddingBagCollection(tables, kind, {"lr": lr})


def train(ebc: nn.Module, steps: range) -> None:
    for step in steps:
        out = ebc(kjt(draw({"f": 6, "g": 4}, 3, seed=step))).values()
        out.backward(upstream(*out.shape, seed=step))


def one_hit(ebc: nn.Module) -> float:
    """By how much a gradient of one moves row 1 of table a."""
    before = tables_of(ebc)["a"][1]
    ebc(kjt({"f": [[1]], "g": [[]]})).values().sum().backward()
    return round((before - tables_of(ebc)["a"][1]).mean().item(), 5)


def test_a_learning_rate_reaches_the_tables_with_step() -> None:
    ebc = fused(lr=1.0)
    optimizer = ebc.fused_optimizer()
    assert isinstance(optimizer, FusedOptimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [1.0]
    optimizer.param_groups[0]["lr"] = 0.25
    assert one_hit(ebc) == 1.0
    optimizer.step()
    assert one_hit(ebc) == 0.25
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.zero_grad()
    assert one_hit(ebc) == 0.5


def test_the_fused_optimizer_is_one_object() -> None:
    """`ebc.fused_optimizer()` made a new one at each call, so a rate set on one call's was lost on the next's step."""
    ebc = fused()
    ebc.fused_optimizer().param_groups[0]["lr"] = 0.25
    ebc.fused_optimizer().step()
    assert one_hit(ebc) == 0.25


def test_torchs_schedulers_steer_the_tables() -> None:
    ebc, rates = fused(), []
    optimizer = ebc.fused_optimizer()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    for _ in range(5):
        optimizer.zero_grad()
        rates.append(one_hit(ebc))
        optimizer.step()
        scheduler.step()
    assert rates == [1.0, 1.0, 0.5, 0.5, 0.25]


def test_states_have_torchrecs_names_and_shapes() -> None:
    shapes = {
        kind.__name__: {
            name: {key: tuple(value.shape) for key, value in values.items()}
            for name, values in fused(kind).fused_optimizer().state_dict()["state"].items()
        }
        for kind in KINDS
    }
    a, b = "embedding_bags.a.weight", "embedding_bags.b.weight"
    assert shapes["SGD"] == {a: {}, b: {}}
    assert shapes["Adagrad"] == {a: {"a.momentum1": (6, 4)}, b: {"b.momentum1": (4, 3)}}
    assert shapes["RowWiseAdagrad"] == {a: {"a.momentum1": (6,)}, b: {"b.momentum1": (4,)}}
    # Adam's steps besides what TorchRec has: without them a resumed run corrects its bias from step 0
    assert shapes["Adam"] == {
        a: {"a.momentum1": (6, 4), "a.momentum2": (6, 4), "a.step": (1,)},
        b: {"b.momentum1": (4, 3), "b.momentum2": (4, 3), "b.step": (1,)},
    }


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_has_the_bits_of_the_uninterrupted_one(kind: Any) -> None:
    """Adam's step count was not saved, and a loaded learning rate waited for the next step() to take effect."""
    whole = fused(kind)
    optimizer = whole.fused_optimizer()
    train(whole, range(3))
    optimizer.param_groups[0]["lr"] = 0.125
    optimizer.step()
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    train(whole, range(3, 6))

    resumed = fused(kind, lr=7.0)
    resumed.load_state_dict(saved[0])
    resumed.fused_optimizer().load_state_dict(saved[1])
    train(resumed, range(3, 6))
    assert same(tables_of(resumed), tables_of(whole))
    assert same(resumed.fused_optimizer().state_dict(), whole.fused_optimizer().state_dict())


def test_a_state_dict_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    ebc = fused(torch.optim.Adagrad)
    train(ebc, range(2))
    optimizer = ebc.fused_optimizer()
    before = copy.deepcopy(optimizer.state_dict())
    a, b = "embedding_bags.a.weight", "embedding_bags.b.weight"

    def wrong(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        other = copy.deepcopy(before)
        for values in other["state"].values():
            for value in values.values():
                value.zero_()
        change(other)
        return other

    faults: dict[str, dict[str, Any]] = {
        f"missing \\['{b}'\\]": wrong(lambda d: d["state"].pop(b)),
        "unexpected \\['x'\\]": wrong(lambda d: d["state"].update(x={})),
        f"states of {b} differ: missing \\['b.momentum1'\\]": wrong(lambda d: d["state"][b].clear()),
        f"{b}: state b.momentum1 has shape \\(4, 3\\), loaded \\(4,\\)": wrong(
            lambda d: d["state"][b].update({"b.momentum1": torch.zeros(4)})
        ),
        "disagree on lr: 1.0 and 2.0": wrong(
            lambda d: d.update(param_groups=[{"params": [a], "lr": 1.0}, {"params": [b], "lr": 2.0}])
        ),
    }
    for message, state in faults.items():
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(state)
        assert same(optimizer.state_dict()["state"], before["state"]), message


def test_groups_may_be_cut_otherwise_in_the_checkpoint() -> None:
    """Groups were matched by their exact names; in another grouping learning rates were dropped in silence."""
    ebc = fused(torch.optim.SGD)
    optimizer = ebc.fused_optimizer()
    saved = optimizer.state_dict()
    saved["param_groups"] = [{"params": [name], "lr": 0.25} for name in saved["state"]]
    optimizer.load_state_dict(saved)
    assert one_hit(ebc) == 0.25
    optimizer.load_state_dict({"state": saved["state"]})
    assert one_hit(ebc) == 0.25


def test_parameters_with_an_optimizer_in_the_backward_are_told_apart() -> None:
    model = nn.ModuleDict({"sparse": EmbeddingBagCollection([EmbeddingBagConfig(3, 2, "a")]), "dense": nn.Linear(3, 2)})
    apply_optimizer_in_backward(torch.optim.SGD, model["sparse"].parameters(), {"lr": 0.1})
    with_one = dict(in_backward_optimizer_filter(model.named_parameters(), include=True))
    without = dict(in_backward_optimizer_filter(model.named_parameters()))
    assert list(with_one) == ["sparse.embedding_bags.a.weight"]
    assert list(without) == ["dense.weight", "dense.bias"]


@pytest.mark.parametrize("kind", KINDS)
def test_any_other_parameter_is_stepped_as_its_gradient_completes(kind: Any) -> None:
    module = nn.Linear(3, 2)
    plain = copy.deepcopy(module)
    apply_optimizer_in_backward(kind, module.parameters(), {"lr": 0.1})
    optimizer = kind(plain.parameters(), lr=0.1)
    for step in range(3):
        x = upstream(4, 3, seed=step)
        # used twice in one graph: one step with the sum
        (module(x).square().sum() + module(2 * x).sum()).backward()
        assert module.weight.grad is None
        optimizer.zero_grad()
        (plain(x).square().sum() + plain(2 * x).sum()).backward()
        optimizer.step()
    assert same(module.state_dict(), plain.state_dict())


@pytest.mark.parametrize("shape", [(5, 3), (4,), (2, 3, 4), ()], ids=str)
@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1, "lr_decay": 0.5}, {"maximize": True, "eps": 0.1}])
def test_dense_rowwise_adagrad_follows_its_formula(shape: tuple[int, ...], settings: dict[str, Any]) -> None:
    """A row is a slice along dim 0; a scalar, which once raised an IndexError, is one row."""
    param = nn.Parameter(upstream(*shape, seed=3))
    optimizer = RowWiseAdagrad([param], lr=0.5, initial_accumulator_value=0.25, **settings)
    rows = param.detach().double().reshape(shape[0] if shape else 1, -1)
    total = torch.full((len(rows),), 0.25, dtype=torch.float64)
    for step in range(1, 6):
        param.grad = upstream(*shape, seed=step)
        g = param.grad.double().reshape(rows.shape) * (-1 if settings.get("maximize") else 1)
        optimizer.step()
        g = g + settings.get("weight_decay", 0.0) * rows
        for row in range(len(rows)):
            total[row] += sum(float(x) ** 2 for x in g[row]) / g.shape[1]
        lr = 0.5 / (1 + (step - 1) * settings.get("lr_decay", 0.0))
        rows = rows - lr * g / (total.sqrt()[:, None] + settings.get("eps", 1e-10))
    assert_close(param.reshape(rows.shape), rows, 1e-5)


def test_dense_rowwise_adagrad_takes_groups_later_and_refuses_what_it_cannot_do() -> None:
    """A group added after construction had no state: KeyError 'step' at the first step."""
    first, second = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = RowWiseAdagrad([first], lr=1.0)
    optimizer.add_param_group({"params": [second], "lr": 0.5})
    first.grad = second.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(first, torch.zeros(2, 2)) and torch.equal(second, torch.full((2, 2), 0.5))
    first.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(RuntimeError, match="takes dense gradients"):
        optimizer.step()
    with pytest.raises(
        ValueError, match="Invalid weight_decay value: -1.0; weight_decay of RowWiseAdagrad must not be negative"
    ):
        RowWiseAdagrad([first], weight_decay=-1.0)


def test_dense_rowwise_adagrad_evaluates_its_closure() -> None:
    param = nn.Parameter(torch.ones(2, 2))
    optimizer = RowWiseAdagrad([param], lr=1.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = param.sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 4.0
    assert torch.equal(param, torch.zeros(2, 2))

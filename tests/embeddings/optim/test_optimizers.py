"""Optimizers seen from outside: learning rates, states by name, resuming, keyed and combined ones, dense rules."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from jagged_batches import draw, kjt, tables_of, upstream
from kernel_inputs import assert_close
from torch import Tensor, nn

from shardwise import (
    CombinedOptimizer,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    FusedEmbeddingBagCollection,
    FusedOptimizer,
    KeyedOptimizerWrapper,
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
    found = {
        kind.__name__: {
            name: {key: tuple(value.shape) for key, value in values.items()}
            for name, values in fused(kind).fused_optimizer().state_dict()["state"].items()
        }
        for kind in KINDS
    }
    a, b = "embedding_bags.a.weight", "embedding_bags.b.weight"
    assert found["SGD"] == {a: {}, b: {}}
    assert found["Adagrad"] == {a: {"a.momentum1": (6, 4)}, b: {"b.momentum1": (4, 3)}}
    assert found["RowWiseAdagrad"] == {a: {"a.momentum1": (6,)}, b: {"b.momentum1": (4,)}}
    # Adam's steps besides what TorchRec has: without them a resumed run corrects its bias from step 0
    assert found["Adam"] == {
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
    for name, table in tables_of(whole).items():
        assert torch.equal(tables_of(resumed)[name], table)
    mine, theirs = resumed.fused_optimizer().state_dict(), whole.fused_optimizer().state_dict()
    assert mine["param_groups"] == theirs["param_groups"]
    for name, values in theirs["state"].items():
        assert all(torch.equal(mine["state"][name][key], value) for key, value in values.items())


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
        for name, values in before["state"].items():
            for key, value in values.items():
                assert torch.equal(optimizer.state_dict()["state"][name][key], value), message


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


def linear() -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(3, 2)


def step_linear(module: nn.Linear, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        module(upstream(4, 3, seed=step)).square().sum().backward()
        optimizer.step()


DENSE: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "adam": lambda params: torch.optim.Adam(params, lr=0.1),
    "rowwise adagrad": lambda params: RowWiseAdagrad(params, lr=0.1),
}


@pytest.mark.parametrize("factory", DENSE.values(), ids=DENSE.keys())
def test_a_wrapped_optimizer_steps_schedules_and_resumes(factory: Any) -> None:
    """A fresh Adam has no state yet; loading one used to be refused, so a run could not be resumed."""
    module, plain = linear(), linear()
    wrapped = KeyedOptimizerWrapper(dict(module.named_parameters()), factory)
    schedule = torch.optim.lr_scheduler.ExponentialLR(wrapped, 0.5)
    bare = factory(list(plain.parameters()))
    step_linear(module, wrapped, range(2))
    step_linear(plain, bare, range(2))
    schedule.step()
    bare.param_groups[0]["lr"] = 0.05
    saved = copy.deepcopy((module.state_dict(), wrapped.state_dict()))
    assert set(saved[1]["state"]) <= {"weight", "bias"}
    step_linear(plain, bare, range(2, 4))

    resumed = linear()
    resumed.load_state_dict(saved[0])
    again = KeyedOptimizerWrapper(dict(resumed.named_parameters()), factory)
    again.load_state_dict(saved[1])
    step_linear(resumed, again, range(2, 4))
    assert torch.equal(resumed.weight, plain.weight) and torch.equal(resumed.bias, plain.bias)
    with pytest.raises(NotImplementedError, match="fixed"):
        again.add_param_group({"params": []})


class Counting(torch.optim.SGD):
    """An optimizer with a state that is no tensor."""

    @staticmethod
    def of(params: Any) -> Counting:
        return Counting(params, lr=0.1)

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["seen"] = self.state[p].get("seen", 0) + 1
        return super().step(closure)


def test_states_that_are_no_tensors_are_loaded_too() -> None:
    module = linear()
    wrapped = KeyedOptimizerWrapper(dict(module.named_parameters()), Counting.of)
    step_linear(module, wrapped, range(3))
    saved = copy.deepcopy(wrapped.state_dict())
    step_linear(module, wrapped, range(2))
    wrapped.load_state_dict(saved)
    assert wrapped.state[module.weight]["seen"] == 3


def test_combined_optimizers_are_steered_saved_and_loaded_as_one() -> None:
    def make() -> tuple[nn.Linear, FusedEmbeddingBagCollection, CombinedOptimizer]:
        module, ebc = linear(), fused(torch.optim.Adam)
        ebc.load_state_dict(start)
        dense = KeyedOptimizerWrapper(dict(module.named_parameters()), lambda p: torch.optim.Adam(p, lr=0.1))
        return module, ebc, CombinedOptimizer([("sparse", ebc.fused_optimizer()), ("", dense)])

    def step(parts: tuple[nn.Linear, FusedEmbeddingBagCollection, CombinedOptimizer], steps: range) -> None:
        for one in steps:
            train(parts[1], range(one, one + 1))
            step_linear(parts[0], parts[2], range(one, one + 1))

    start = fused().state_dict()
    whole = make()
    step(whole, range(2))
    for group in whole[2].param_groups:
        group["lr"] = 0.25
    whole[2].step()
    saved = copy.deepcopy((whole[0].state_dict(), whole[1].state_dict(), whole[2].state_dict()))
    assert set(saved[2]["state"]) == {
        "sparse.embedding_bags.a.weight", "sparse.embedding_bags.b.weight", "weight", "bias",
    }  # fmt: skip
    step(whole, range(2, 4))

    resumed = make()
    resumed[0].load_state_dict(saved[0])
    resumed[1].load_state_dict(saved[1])
    resumed[2].load_state_dict(saved[2])
    step(resumed, range(2, 4))
    assert torch.equal(resumed[0].weight, whole[0].weight)
    assert torch.equal(tables_of(resumed[1])["a"], tables_of(whole[1])["a"])
    assert set(whole[2].params) == set(saved[2]["state"])
    assert [prefix for prefix, _ in whole[2].optimizers] == ["sparse", ""]
    with pytest.raises(ValueError, match="unexpected \\['other'\\]"):
        resumed[2].load_state_dict({"state": {**saved[2]["state"], "other": {}}})


def test_combined_optimizers_must_not_share_a_name() -> None:
    one, other = (
        KeyedOptimizerWrapper(dict(linear().named_parameters()), lambda p: torch.optim.SGD(p, lr=0.1)) for _ in range(2)
    )
    CombinedOptimizer([("x", one), ("y", other)])
    with pytest.raises(ValueError, match="two combined optimizers hold a parameter named 'weight'"):
        CombinedOptimizer([one, other])


def test_an_optimizer_of_nothing_is_an_ordinary_one() -> None:
    wrapped = KeyedOptimizerWrapper({}, lambda params: torch.optim.SGD(params, lr=0.1))
    wrapped.zero_grad()
    wrapped.step()
    combined = CombinedOptimizer([wrapped])
    combined.step()
    assert combined.state_dict() == {"state": {}, "param_groups": ()}


def test_parameters_with_an_optimizer_in_the_backward_are_told_apart() -> None:
    model = nn.ModuleDict({"sparse": EmbeddingBagCollection([EmbeddingBagConfig(3, 2, "a")]), "dense": linear()})
    apply_optimizer_in_backward(torch.optim.SGD, model["sparse"].parameters(), {"lr": 0.1})
    with_one = dict(in_backward_optimizer_filter(model.named_parameters(), include=True))
    without = dict(in_backward_optimizer_filter(model.named_parameters()))
    assert list(with_one) == ["sparse.embedding_bags.a.weight"]
    assert list(without) == ["dense.weight", "dense.bias"]


@pytest.mark.parametrize("kind", KINDS)
def test_any_other_parameter_is_stepped_as_its_gradient_completes(kind: Any) -> None:
    module, plain = linear(), linear()
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
    assert torch.equal(module.weight, plain.weight) and torch.equal(module.bias, plain.bias)


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
    one, other = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = RowWiseAdagrad([one], lr=1.0)
    optimizer.add_param_group({"params": [other], "lr": 0.5})
    one.grad = other.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(one, torch.zeros(2, 2)) and torch.equal(other, torch.full((2, 2), 0.5))
    one.grad = torch.ones(2, 2).to_sparse()
    with pytest.raises(RuntimeError, match="takes dense gradients"):
        optimizer.step()
    with pytest.raises(ValueError, match="RowWiseAdagrad: weight_decay must not be negative, got -1"):
        RowWiseAdagrad([one], weight_decay=-1.0)


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

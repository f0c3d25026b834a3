"""Rules of optimizers: every built-in one over many steps, weight decay, clipping, rounding, and rules of one's own.

Takes half a minute in the interpreter: each rule trains with each kind of weight decay.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import oracle
import pytest
import torch
from kernel_inputs import (
    UPDATES,
    Case,
    Inputs,
    Optimizer,
    assert_close,
    assert_same_bits,
    inputs,
    optimizer,
    per_rule,
    torch_device,
    update_args,
    upstream,
)
from torch import Tensor

from shardwise.kernels import RULES as DEFINED, Feature, define_rule, fused_update, origin_of, pack_features, rule_named
from shardwise.kernels.rule import absolute, exp, log, maximum, minimum, row_mean, row_sum, sign, sqrt, where
from shardwise.kernels.update.rounding import round_stochastically, salt_of
from shardwise.kernels.update.update import fused_update_ref

TRAINED = Case(
    "trained", tables=((12, 8), (5, 3)), features=((0, False), (1, True), (0, False)), batch=6, weighted=True
)


def twins(batch: Inputs, state: Optimizer) -> list[oracle.Dense]:
    return [oracle.Dense(table, state.rule, state.by_name, state.decay) for table in batch.tables()]


def train(batch: Inputs, state: Optimizer, models: list[oracle.Dense], steps: int) -> None:
    for step in range(steps):
        now = batch.batch_of(step)
        grad = upstream(now, seed=step)
        fused_update(*update_args(batch.weights, state, grad, now))
        cut = grad if state.max_gradient is None else grad.clamp(-state.max_gradient, state.max_gradient)
        dense, touched = oracle.gradients([m.table for m in models], TRAINED.features, now.bags, cut, now.scales)
        for model, gradient, hit in zip(models, dense, touched, strict=True):
            model.step(gradient, hit)


@pytest.mark.parametrize("decay", ["none", "l2", "decoupled"])
@pytest.mark.parametrize(("device", "rule"), per_rule(UPDATES))
def test_training_equals_the_dense_model(device: str, rule: str, decay: str) -> None:
    """20 steps, of the usual rule 100, of which the interpreter makes 6 and 8: the others say the rest of a formula."""
    few, many = (8, 100) if (rule, decay) == ("rowwise_adagrad", "none") else (6, 20)
    batch = inputs(TRAINED, torch_device(device))
    state = optimizer(rule, batch, decay=decay)
    models = twins(batch, state)
    train(batch, state, models, few if device == "interpreted" else many)
    for t, model in enumerate(models):
        assert_close(batch.tables()[t], model.table, 1e-5)
        for (name, kind), tensor in zip(DEFINED[rule].states.items(), state.states, strict=True):
            own = batch.row_states(tensor)[t][:, None] if kind == "row" else batch.tables(tensor)[t]
            assert_close(own, model.states[name], 1e-5)


@pytest.mark.parametrize("device", UPDATES)
def test_gradients_are_cut_before_they_are_weighted_and_added(device: str) -> None:
    batch = inputs(TRAINED, torch_device(device))
    state = replace(optimizer("adagrad", batch), max_gradient=0.5)
    models = twins(batch, state)
    train(batch, state, models, 5)
    for table, model in zip(batch.tables(), models, strict=True):
        assert_close(table, model.table, 1e-5)


def test_the_reference_cuts_decays_and_rounds_as_the_op_does() -> None:
    batch = inputs(replace(TRAINED, dtype=torch.bfloat16))
    seed = torch.tensor([7])
    state = replace(optimizer("rowwise_adagrad", batch, decay="l2"), max_gradient=0.5, seed=seed)
    other, weights = state.copied(), batch.weights.clone()
    grad = upstream(batch)
    fused_update(*update_args(batch.weights, state, grad, batch))
    fused_update_ref(*update_args(weights, other, grad, batch))
    assert_close(batch.weights, weights)


# Stochastic rounding


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", UPDATES)
def test_rounding_keeps_the_mean_and_a_neighbouring_value(device: str, dtype: torch.dtype) -> None:
    """0.3 of a step is lost by rounding to nearest; stochastically it stays on average."""
    case = Case("rounded", tables=((64, 128),), batch=64, lengths=(1, 1), dtype=dtype)
    batch = inputs(case, torch_device(device))
    batch = replace(batch, indices=torch.arange(64, device=batch.weights.device))
    ulp = 2.0**-10 if dtype == torch.float16 else 2.0**-7
    batch.weights.fill_(1.0)
    state = replace(optimizer("sgd", batch, lr=1.0), seed=torch.tensor([3], device=batch.weights.device))
    grad = torch.full((64, 128), -0.3 * ulp, device=batch.weights.device)
    again, weights = state.copied(), batch.weights.clone()
    fused_update(*update_args(batch.weights, state, grad, batch))
    assert set(batch.weights.double().unique().tolist()) == {1.0, 1.0 + ulp}
    assert abs((batch.weights.double().mean().item() - 1) / ulp - 0.3) < 0.02
    fused_update(*update_args(weights, again, grad, batch))
    assert_same_bits(weights, batch.weights)
    # another seed draws other numbers, no seed rounds to nearest
    for seed, mean in ((torch.tensor([4]), None), (None, 1.0)):
        other = batch.weights.clone().fill_(1.0)
        seed = None if seed is None else seed.to(other.device)
        fused_update(*update_args(other, replace(optimizer("sgd", batch, lr=1.0), seed=seed), grad, batch))
        assert not torch.equal(other, batch.weights)
        assert mean is None or other.double().mean().item() == mean


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rows_columns_and_steps_are_rounded_apart(dtype: torch.dtype) -> None:
    """Rows that were all rounded alike passed: the mean over many columns was right, and so was each neighbour."""
    # halfway between two values of either dtype
    w = torch.full((64, 64), 1.0 + 2.0**-8 + (2.0**-11 - 2.0**-8) * (dtype == torch.float16))
    place = torch.arange(64)
    seed = torch.tensor([5])

    def ups(step: int) -> Tensor:
        return round_stochastically(w, dtype, place, salt_of(seed, torch.tensor([step]))) > w

    once = ups(1)
    # of 64 fair coins between 13 and 51 fall alike, but for one time in a million
    for alike in ((once[:-1] == once[1:]).sum(1), (once[:, :-1] == once[:, 1:]).sum(0), (once == ups(2)).sum(1)):
        assert int(alike.min()) >= 13 and int(alike.max()) <= 51


@pytest.mark.parametrize("device", UPDATES)
def test_a_table_is_rounded_alike_alone_and_behind_another(where: torch.device) -> None:
    alone = inputs(Case("alone", tables=((9, 8),), dtype=torch.bfloat16), where)
    both = inputs(Case("both", tables=((5, 8), (9, 8)), features=((0, False), (1, False)), dtype=torch.bfloat16), where)
    both.tables()[1].copy_(alone.tables()[0])
    begin = both.offsets[both.case.batch]
    ids = both.indices[int(begin) :]
    alone = replace(alone, indices=ids, offsets=both.offsets[both.case.batch :] - begin)
    grad = upstream(both)
    for batch, g in ((both, grad), (alone, grad[:, 8:].contiguous())):
        state = replace(optimizer("adagrad", batch), seed=torch.tensor([5], device=where))
        fused_update(*update_args(batch.weights, state, g, batch))
    assert_same_bits(both.tables()[1], alone.tables()[0])


@pytest.mark.parametrize("slots", [False, True], ids=["rows", "slots"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("device", UPDATES)
def test_a_part_of_a_table_is_rounded_as_in_the_whole_one(device: str, dtype: torch.dtype, slots: bool) -> None:
    """Rows were hashed by the index that a kernel is given: another one in each shard, and for each slot of a cache."""
    where_, first, low = torch_device(device), 5, 4
    whole = inputs(Case("whole", tables=((12, 16),), batch=40, dtype=dtype), where_)
    part = inputs(Case("part", tables=((7, 8), (3, 8)), features=((0, False),), batch=40, dtype=dtype), where_)
    whole = replace(whole, indices=whole.indices % 7 + first)
    place = torch.randperm(7, generator=torch.Generator().manual_seed(1)) if slots else torch.arange(7)
    place = place.to(where_)
    part.tables()[0][place] = whole.tables()[0][first:, low : low + 8]
    ids = whole.indices - first
    origin = Feature(0, 7, 8, 0, False, origin_of(first, low))
    part = replace(part, indices=place[ids], offsets=whole.offsets, features=pack_features([origin], where_), dims=[8])
    grad = upstream(whole)
    for batch, g in ((whole, grad), (part, grad[:, low : low + 8].contiguous())):
        for _ in range(2):
            state = replace(optimizer("sgd", batch), seed=torch.tensor([5], device=where_))
            fused_update(*update_args(batch.weights, state, g, batch), ids=ids if slots and batch is part else None)
    assert_same_bits(part.tables()[0][place], whole.tables()[0][first:, low : low + 8].contiguous())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_magnitude_rounds_to_a_neighbour(dtype: torch.dtype) -> None:
    w = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)) * torch.logspace(-9, 3, 200)[:, None]
    w[0, :4] = torch.tensor([0.0, float("inf"), -float("inf"), float("nan")])
    salt = salt_of(torch.tensor([1]), torch.tensor([2]))
    got = round_stochastically(w, dtype, torch.arange(200), salt)
    assert torch.equal(got.to(dtype).float().nan_to_num(9), got.nan_to_num(9))
    finite = w.isfinite()
    step = torch.maximum(w.abs() * (2.0**-10 if dtype == torch.float16 else 2.0**-7), torch.tensor(2.0**-24))
    assert ((got - w).abs()[finite] <= step[finite]).all()
    assert torch.equal(got[0, :4].nan_to_num(5), w[0, :4].nan_to_num(5))


# Rules of one's own


@define_rule(momentum="element")
def lion(w: Any, g: Any, momentum: Any, lr: float = 0.1, beta1: float = 0.9, beta2: float = 0.99) -> Any:
    w = w - lr * sign(beta1 * momentum + (1 - beta1) * g)
    return w, beta2 * momentum + (1 - beta2) * g


@define_rule(count="row")
def everything(w: Any, g: Any, count: Any, row: Any, step: Any, lr: float = 0.1) -> Any:
    """Uses whatever a rule may use; 1 / g is infinite past the end of a row."""
    count = count + row_sum(where(absolute(g) > 0.0, 1.0, 0.0), row) * step
    size = row_mean(absolute(1.0 / (maximum(minimum(g, 2.0), 0.5) - 0.0)), row)
    return w - lr * sign(g) * sqrt(exp(-log(1.0 + size))), count


@pytest.mark.parametrize("rule", ["lion", "everything"])
@pytest.mark.parametrize("device", UPDATES)
def test_a_rule_of_ones_own_trains_by_its_formula(device: str, rule: str) -> None:
    batch = inputs(TRAINED, torch_device(device))
    state = optimizer(rule, batch)
    hyper = state.by_name
    tables = [table.cpu().double().clone() for table in batch.tables()]
    states = [torch.zeros(len(t), t.shape[1] if rule == "lion" else 1, dtype=torch.float64) for t in tables]
    for step in range(5):
        now = batch.batch_of(step)
        grad = upstream(now, seed=step)
        fused_update(*update_args(batch.weights, state, grad, now))
        dense, touched = oracle.gradients(tables, TRAINED.features, now.bags, grad, now.scales)
        for t, g in enumerate(dense):
            hit = touched[t][:, None]
            if rule == "lion":
                new = tables[t] - hyper["lr"] * torch.sign(hyper["beta1"] * states[t] + (1 - hyper["beta1"]) * g)
                kept = hyper["beta2"] * states[t] + (1 - hyper["beta2"]) * g
            else:
                kept = states[t] + (g != 0).sum(1, keepdim=True) * (step + 1)
                size = (1 / g.clamp(0.5, 2)).mean(1, keepdim=True)
                new = tables[t] - hyper["lr"] * g.sign() * (1 / (1 + size)).sqrt()
            tables[t], states[t] = torch.where(hit, new, tables[t]), torch.where(hit, kept, states[t])
    assert_close(batch.tables(), tables, 1e-5)


def test_a_second_rule_of_a_name_leaves_the_first_alone() -> None:
    def twice(w: Any, g: Any, lr: float = 0.5) -> Any:
        return w - 2 * lr * g

    first, second = define_rule()(twice), define_rule()(twice)
    assert (first.name, second.name) == ("twice", "twice:2")
    assert rule_named("twice") is first
    del DEFINED["twice"], DEFINED["twice:2"]


def test_functions_that_are_no_rules_are_refused() -> None:
    def short(w: Any, g: Any) -> Any:
        return w

    def unknown(w: Any, g: Any, speed: Any) -> Any:
        return w

    wrong: list[tuple[dict[str, Any], Any, str]] = [
        ({"total": "column"}, short, "a state is kept per 'element' or per 'row', got {'total': 'column'}"),
        ({"total": "row"}, short, r"its arguments must begin with \['w', 'g', 'total'\], got \['w', 'g'\]"),
        ({}, unknown, r"arguments \['speed'\] have neither a default nor a place among the states"),
        ({}, lambda w, g: w, "must be a function defined with `def`"),
    ]
    before = set(DEFINED)
    for states, function, message in wrong:
        with pytest.raises(ValueError, match=message):
            define_rule(**states)(function)
    assert set(DEFINED) == before


def test_hyper_parameters_and_decays_are_checked() -> None:
    batch = inputs(TRAINED)
    state, grad = optimizer("sgd", batch), upstream(batch)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"hyper": torch.zeros(2)}, r"takes \['lr'\] and the weight decay as fp64, got torch.float32 \[2\]"),
        ({"hyper": torch.zeros(3, dtype=torch.float64)}, r"and the weight decay as fp64, got torch.float64 \[3\]"),
        ({"decay": "L2"}, "unknown weight decay 'L2': expected one of none, l2, decoupled"),
    ]
    for change, message in wrong:
        with pytest.raises(ValueError, match=message):
            fused_update(*update_args(batch.weights, replace(state, **change), grad, batch))


def test_kernel_and_twin_are_one_source() -> None:
    pytest.importorskip("triton")
    rule = rule_named("rowwise_adagrad")
    traced: Tensor | Any = rule.in_triton
    assert traced is rule.in_triton
    assert rule.function is not traced


def turning(flip: bool) -> str:
    def turned(w: Any, g: Any, lr: float = 0.5) -> Any:
        return w + lr * g if flip else w - lr * g

    return define_rule()(turned).name


def test_rules_of_one_text_that_read_another_bool_are_other_rules() -> None:
    """Only numbers were in the name, so the second rule ran the machine code of the first."""
    pytest.importorskip("numba")
    before = set(DEFINED)
    batch = inputs(Case("one", tables=((4, 8),), features=((0, False),), batch=3, lengths=(1, 2)))
    grad, moved = upstream(batch), []
    try:
        for flip in (False, True):
            weights = batch.weights.clone()
            args = list(update_args(weights, optimizer("sgd", batch), grad, batch))
            args[args.index("sgd")] = turning(flip)
            fused_update(*args)
            moved.append(weights - batch.weights)
    finally:
        for name in set(DEFINED) - before:
            del DEFINED[name]
    assert not torch.equal(moved[0], torch.zeros_like(moved[0]))
    torch.testing.assert_close(moved[1], -moved[0], rtol=0, atol=1e-6)

"""GradientClippingOptimizer in one process: what is cut, what is measured, what is left alone."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from jagged_batches import kjt, tables_of, upstream
from torch import Tensor, nn

from shardwise import (
    CombinedOptimizer,
    EmbeddingBagConfig,
    FusedEmbeddingBagCollection,
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
)

NORM, VALUE, NONE = GradientClipping.NORM, GradientClipping.VALUE, GradientClipping.NONE
GRADS = {"a": upstream(3, 4, seed=1), "b": upstream(5, seed=2)}


def wrapped(grads: dict[str, Tensor | None]) -> KeyedOptimizerWrapper:
    """SGD at a rate of one on weights of zeros: after a step they are minus the gradients it saw."""
    params = {name: nn.Parameter(torch.zeros(grad.shape if grad is not None else 2)) for name, grad in grads.items()}
    for param, grad in zip(params.values(), grads.values(), strict=True):
        param.grad = None if grad is None else grad.clone()
    return KeyedOptimizerWrapper(params, lambda p: torch.optim.SGD(p, lr=1.0))


def norm_of_a_step(optimizer: GradientClippingOptimizer) -> float:
    optimizer.step()
    assert optimizer.last_total_grad_norm is not None
    return optimizer.last_total_grad_norm.item()


def seen(optimizer: Any) -> dict[str, Tensor]:
    return {name: -param.detach() for name, param in optimizer.params.items()}


@pytest.mark.parametrize("norm_type", [1, 2.0, 3.0, "inf"])
@pytest.mark.parametrize("limit", [0.1, 1e6])
def test_the_norm_of_all_gradients_is_cut(norm_type: float | str, limit: float) -> None:
    flat = torch.cat([grad.double().flatten() for grad in GRADS.values()])
    norm = torch.linalg.vector_norm(flat, float(norm_type)).item()
    optimizer = GradientClippingOptimizer(wrapped({**GRADS}), NORM, limit, norm_type)
    assert norm_of_a_step(optimizer) == pytest.approx(norm, rel=1e-6)
    for name, grad in seen(optimizer).items():
        torch.testing.assert_close(grad, GRADS[name] * min(1.0, limit / norm), rtol=1e-5, atol=0)


def test_one_process_has_the_bits_of_torchs_own_cut() -> None:
    own, reference = wrapped({**GRADS}), wrapped({**GRADS})
    GradientClippingOptimizer(own, NORM, 0.3).step()
    torch.nn.utils.clip_grad_norm_(list(reference.params.values()), 0.3)
    reference.step()
    assert all(torch.equal(seen(own)[name], grad) for name, grad in seen(reference).items())


def test_every_number_is_cut() -> None:
    optimizer = GradientClippingOptimizer(wrapped({**GRADS}), VALUE, 0.25)
    optimizer.step()
    for name, grad in seen(optimizer).items():
        assert torch.equal(grad, GRADS[name].clamp(-0.25, 0.25))
    assert optimizer.last_total_grad_norm is None


@pytest.mark.parametrize("clipping", [VALUE, NONE])
def test_the_norm_can_be_tracked_without_cutting_it(clipping: GradientClipping) -> None:
    optimizer = GradientClippingOptimizer(wrapped({**GRADS}), clipping, 0.25, track_grad_norm=True)
    assert norm_of_a_step(optimizer) == pytest.approx(
        math.sqrt(sum(grad.double().square().sum().item() for grad in GRADS.values())), rel=1e-6
    )


def test_nothing_is_cut_by_default() -> None:
    optimizer = GradientClippingOptimizer(wrapped({**GRADS}))
    optimizer.step()
    assert all(torch.equal(grad, GRADS[name]) for name, grad in seen(optimizer).items())
    assert optimizer.last_total_grad_norm is None


@pytest.mark.parametrize("norm_type", [2.0, "inf"])
@pytest.mark.parametrize("global_norm", [False, True])
def test_missing_and_empty_gradients_count_for_nothing(norm_type: float | str, global_norm: bool) -> None:
    """The infinity norm of an empty tensor is an error in torch."""
    grads: dict[str, Tensor | None] = {"a": torch.tensor([3.0, -4.0]), "none": None, "empty": torch.zeros(0, 3)}
    optimizer = GradientClippingOptimizer(wrapped(grads), NORM, 1.0, norm_type, global_norm)
    assert norm_of_a_step(optimizer) == (5.0 if norm_type == 2.0 else 4.0)
    nothing = GradientClippingOptimizer(wrapped({"none": None}), NORM, 1.0, norm_type, global_norm)
    nothing.step()
    assert nothing.last_total_grad_norm is None


@pytest.mark.parametrize("clipping", [NORM, VALUE])
def test_sparse_gradients_are_cut_too(clipping: GradientClipping) -> None:
    """torch has no norm of a sparse gradient; a row that is looked up twice counts with its sum."""
    grads = []
    for sparse in (True, False):
        table = nn.Embedding.from_pretrained(torch.zeros(4, 2), freeze=False, sparse=sparse)
        table(torch.tensor([1, 3, 1])).mul(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])).sum().backward()
        inner = KeyedOptimizerWrapper({"w": table.weight}, lambda p: torch.optim.SGD(p, lr=1.0))
        GradientClippingOptimizer(inner, clipping, 5.0).step()
        grads.append(seen(inner)["w"])
    torch.testing.assert_close(*grads, rtol=1e-6, atol=0)


def test_with_the_norm_of_all_ranks_tables_trained_in_the_backward_are_cut_too() -> None:
    """They left no gradient behind, and the norm was that of the dense layers."""
    table = EmbeddingBagConfig(6, 4, "a", feature_names=["f"])
    ebc = FusedEmbeddingBagCollection([table], torch.optim.SGD, {"lr": 1.0})
    dense = nn.Linear(4, 1, bias=False)
    inner = CombinedOptimizer(
        [
            ("ebc", ebc.fused_optimizer()),
            KeyedOptimizerWrapper(dict(dense.named_parameters()), lambda p: torch.optim.SGD(p, lr=1.0)),
        ]
    )
    optimizer = GradientClippingOptimizer(inner, NORM, 0.01, enable_global_grad_clip=True)
    before, weight = copy.deepcopy(tables_of(ebc)["a"]), dense.weight.detach().clone()
    optimizer.zero_grad()
    dense(ebc(kjt({"f": [[2]]})).values()).sum().backward()
    optimizer.step()
    moved = torch.cat([before[2] - tables_of(ebc)["a"][2], (weight - dense.weight).flatten()]).detach()
    gradient = torch.cat([weight[0], before[2]])
    torch.testing.assert_close(moved, gradient * 0.01 / gradient.norm(), rtol=1e-3, atol=1e-6)


def test_gradients_of_a_closure_are_cut() -> None:
    """TorchRec cuts before it calls the closure, whose gradients are then stepped as they are."""
    inner = wrapped({"a": None})
    optimizer, param = GradientClippingOptimizer(inner, NORM, 1.0), inner.params["a"]

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (param * torch.tensor([3.0, 4.0])).sum() + 2.0
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    torch.testing.assert_close(seen(inner)["a"], torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0)


def test_on_meta_nothing_is_cut() -> None:
    param = nn.Parameter(torch.zeros(2, device="meta"))
    param.grad = torch.zeros(2, device="meta")
    optimizer = GradientClippingOptimizer(
        KeyedOptimizerWrapper({"p": param}, lambda p: torch.optim.SGD(p, lr=1.0)), NORM, 1.0
    )
    optimizer.step()
    assert optimizer.last_total_grad_norm is None


def test_a_table_that_was_on_meta_once_does_not_switch_the_cut_off() -> None:
    """The fused optimizer was made before `to_empty`: its groups still named meta parameters, and nothing was cut."""
    table = EmbeddingBagConfig(6, 4, "a", feature_names=["f"])
    ebc = FusedEmbeddingBagCollection([table], torch.optim.SGD, {"lr": 1.0}, device="meta")
    dense = wrapped({"p": torch.tensor([3.0, 4.0])})
    optimizer = GradientClippingOptimizer(CombinedOptimizer([("ebc", ebc.fused_optimizer()), dense]), NORM, 1.0)
    ebc.to_empty(device="cpu")
    assert norm_of_a_step(optimizer) == 5.0
    torch.testing.assert_close(seen(dense)["p"], torch.tensor([0.6, 0.8]), rtol=1e-5, atol=0)


def test_a_norm_over_mixed_dtypes() -> None:
    grads = {"half": torch.tensor([3.0]).bfloat16(), "whole": torch.tensor([4.0])}
    params = {name: nn.Parameter(torch.zeros(1, dtype=grad.dtype)) for name, grad in grads.items()}
    for name, param in params.items():
        param.grad = grads[name].clone()
    optimizer = GradientClippingOptimizer(
        KeyedOptimizerWrapper(params, lambda p: torch.optim.SGD(p, lr=1.0)), NORM, 1.0, 2.0
    )
    assert norm_of_a_step(optimizer) == 5.0
    assert params["whole"].item() == pytest.approx(-0.8) and params["half"].item() == pytest.approx(-0.6, rel=1e-2)


def test_settings_that_make_no_sense_are_refused() -> None:
    inner = wrapped({**GRADS})
    spread: Any = {inner.params["a"]: [object()]}
    given: dict[str, Any]
    for given, message in (
        ({"max_gradient": -1.0}, "max_gradient must be finite and not negative, got -1"),
        ({"norm_type": 0}, "norm_type must be positive or 'inf', got 0"),
        ({"enable_global_grad_clip": True, "param_to_pgs": spread}, "param_to_pgs: give reduce_norm too"),
    ):
        with pytest.raises(ValueError, match=message):
            GradientClippingOptimizer(inner, NORM, **{"max_gradient": 1.0, **given})
    # as in TorchRec it is read with the switch only
    GradientClippingOptimizer(inner, NORM, 1.0, param_to_pgs=spread).step()


# what the other rank has of the parameter
ELSEWHERE = torch.tensor([3.0, -7.0, 2.0])


@pytest.mark.parametrize("norm_type", [1.0, 2.0, math.inf])
def test_the_norm_of_a_spread_parameter_is_that_of_all_its_parts(norm_type: float) -> None:
    """With norm_type inf the maximum over ranks was taken to the power 0, and another parameter's norm hid it."""

    def reduce_norm(number: Tensor, group: Any, largest: bool) -> Tensor:
        there = torch.linalg.vector_norm(ELSEWHERE, norm_type)
        return torch.maximum(number, there) if largest else number + there**norm_type

    part = nn.Parameter(torch.zeros(2))
    part.grad = torch.tensor([-4.0, 1.0])
    optimizer = GradientClippingOptimizer(
        KeyedOptimizerWrapper({"part": part}, lambda p: torch.optim.SGD(p, lr=0.0)),
        GradientClipping.NORM, 0.5, norm_type, True, {part: ["a group"]}, reduce_norm=reduce_norm,
    )  # fmt: skip
    whole = torch.cat([part.grad, ELSEWHERE])
    optimizer.step()
    norm = torch.linalg.vector_norm(whole, norm_type)
    torch.testing.assert_close(optimizer.last_total_grad_norm, norm)
    torch.testing.assert_close(part.grad, whole[:2] * (0.5 / norm))

"""Functions wait for the first forward of modules whose parameters have no shapes yet."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from shardwise.models import LazyModuleExtensionMixin, lazy_apply


class Scale(nn.Module):
    """Multiplies each column."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.UninitializedParameter()

    def forward(self, input: Tensor) -> Tensor:
        return input * self.weight


class LazyScale(LazyModuleExtensionMixin, Scale):  # type: ignore[misc]
    """Learns from its first input how many columns there are."""

    cls_to_become = Scale  # type: ignore[assignment]

    def initialize_parameters(self, input: Tensor) -> None:
        if isinstance(self.weight, nn.UninitializedParameter):
            self.weight.materialize((input.shape[1],))
            nn.init.ones_(self.weight)


def three(module: nn.Module) -> None:
    """Sets every scale to 3."""
    if isinstance(module, Scale):
        nn.init.constant_(module.weight, 3.0)


def double(module: nn.Module) -> None:
    """Doubles every scale."""
    if isinstance(module, Scale):
        module.weight.data.mul_(2)


X = torch.ones(2, 4)


@pytest.mark.parametrize("by_name", [False, True])
def test_functions_are_applied_after_the_first_forward_in_order_and_once(by_name: bool) -> None:
    module = LazyScale()
    assert lazy_apply(lazy_apply(module, three), double) is module
    # the first forward is that of the parameters as they began
    assert torch.equal(module(input=X) if by_name else module(X), X)
    assert type(module) is Scale
    for _ in range(2):
        assert torch.equal(module(X), 6 * X)


def test_apply_before_it_raises_and_after_it_works() -> None:
    module = LazyScale()
    with pytest.raises(RuntimeError, match="LazyScale has parameters without shapes: run a forward first"):
        module.apply(three)
    module(X)
    assert torch.equal(module.apply(three)(X), 3 * X)


def test_children_are_reached_and_copies_wait_for_their_own_forward() -> None:
    net = lazy_apply(nn.Sequential(LazyScale(), nn.ReLU(), LazyScale()), three)
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(net))):
        other(X)
        assert torch.equal(other(X), 9 * X)
    net(X)
    assert torch.equal(net(X), 9 * X)

"""Permutes and regroups by FBGEMM's names where something records operations, as a compiler does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.fbgemm import OPS
from shardwise.kernels._op import INTERPRETED
from shardwise.perf.evidence.fbgemm.calls import draw_call
from shardwise.perf.evidence.fbgemm.outcome import differences, outcome

POOLED = [name for name in OPS if name.startswith(("permute_pooled", "permute_duplicate", "permute_multi", "regroup_"))]


class _Watched(TorchDispatchMode):
    """Sees operations, and changes none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_a_permute_of_no_features_has_lengths_of_its_own() -> None:
    """Where values are not to be read, lengths [0, B] came back themselves, and a sum was sought in [0, B + 1]."""
    lengths = torch.zeros(0, 3, dtype=torch.int64)
    order, values = torch.zeros(0, dtype=torch.int32), torch.zeros(0)
    with _Watched():
        moved, permuted, _ = OPS["permute_2D_sparse_data"].function(order, lengths, values)
    assert moved.shape == (0, 3)
    assert moved is not lengths
    assert permuted.shape == (0,)


@pytest.mark.parametrize("name", POOLED)
def test_regroups_that_are_watched_give_the_same(name: str) -> None:
    """Values and gradients of the ops that a trace has in place of plans made on the host."""
    for seed in range(40):
        call = draw_call(name, seed)
        expected = outcome(OPS[name].function, call)
        with _Watched():
            result = outcome(OPS[name].function, call)
        assert not expected.error
        faults, _ = differences(result, expected)
        assert not faults, call.args


def test_gradients_of_tables_that_come_twice_add() -> None:
    pooled = torch.rand(2, 3, requires_grad=True)
    arguments = torch.tensor([0, 1, 3]), torch.tensor([1, 0, 1]), torch.tensor([0, 2, 3, 5]), torch.tensor([1, 0])
    upstream = torch.arange(10.0).view(2, 5)
    expected = torch.tensor([[2.0, 3.0, 5.0], [7.0, 13.0, 15.0]])
    for name in (name for name in POOLED if "duplicate" in name):
        (grad,) = torch.autograd.grad(OPS[name].function(pooled, *arguments), pooled, upstream)
        assert torch.equal(grad, expected), name


@pytest.mark.skipif(INTERPRETED, reason="kernels look at no values")
def test_an_order_that_repeats_tables_is_named() -> None:
    arguments: tuple[Tensor, ...] = torch.rand(2, 3), torch.tensor([0, 1, 3]), torch.tensor([1, 1])
    with pytest.raises(ValueError, match="permute_duplicate_pooled_embs"):
        OPS["permute_pooled_embs"].function(*arguments, *arguments[1:])


PERMUTES = torch.tensor([[1, 0, 0, 0, 2, 0], [0, 0, 1, 2, 2, 0], [0, 1, 0, 0, 1, 0]], dtype=torch.int32)
OFFSETS, ORDER = torch.tensor([0, 2, 3, 6]), torch.tensor([2, 0, 2])


@pytest.mark.parametrize(
    ("op", "args"),
    [
        ("permute_tables", (torch.randn(4, 6, requires_grad=True), OFFSETS, ORDER)),
        ("permute_tables_backward", (torch.randn(4, 8, requires_grad=True), OFFSETS, ORDER, 6)),
        (
            "regroup_by_permutes",
            ([torch.randn(3, 3, requires_grad=True), torch.randn(3, 2, requires_grad=True)], PERMUTES, [4, 1], False),
        ),
    ],
)
def test_opcheck_of_what_traces_name(op: str, args: tuple[object, ...]) -> None:
    """Ops of ours that stand in graphs for regrouping ops whose plan is made of values."""
    torch.library.opcheck(getattr(torch.ops.shardwise, op).default, args)

"""Ids below zero, and gradients, of ops that divide ids among buckets by FBGEMM's names."""

from __future__ import annotations

import pytest
import torch

from shardwise.fbgemm import OPS
from shardwise.perf.evidence.fbgemm.calls import draw_call
from shardwise.perf.evidence.fbgemm.outcome import differences, outcome

BUCKETIZE = (
    "block_bucketize_sparse_features",
    "block_bucketize_sparse_features_inference",
    "block_bucketize_sparse_features_2d_weights",
    "bucketize_sparse_features",
)


@pytest.mark.parametrize("name", BUCKETIZE)
def test_ids_below_zero_are_divided_alike_where_no_value_is_looked_at(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CPU finds such ids by an error; a device, which is not waited for, has a stand-in for each of them."""
    calls = [draw_call(name, seed) for seed in range(40)]
    looked = [outcome(OPS[name].function, call) for call in calls]
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    for call, expected in zip(calls, looked, strict=True):
        assert not expected.error
        faults, _ = differences(outcome(OPS[name].function, call), expected)
        assert not faults, call.args


def test_gradients_of_weights_go_back_to_their_ids() -> None:
    lengths, ids, block_sizes = torch.tensor([2, 3]), torch.tensor([5, 0, -3, 4, 1]), torch.tensor([3])
    weights = torch.rand(5, requires_grad=True)
    new = OPS["block_bucketize_sparse_features"].function(lengths, ids, False, True, block_sizes, 2, weights)
    upstream = torch.arange(5.0)
    (grad,) = torch.autograd.grad(new.weights, weights, upstream)
    assert torch.equal(grad, upstream[new.unbucketize_permute])
    rows = torch.rand(5, 2, requires_grad=True)
    new = OPS["block_bucketize_sparse_features_2d_weights"].function(lengths, ids, False, True, block_sizes, 2, rows, 2)
    (grad,) = torch.autograd.grad(new[2], rows, torch.stack([upstream, -upstream], 1))
    assert torch.equal(grad, torch.stack([upstream, -upstream], 1)[new[4]])

"""A compiled rule is kept under a name; rules that read other values from outside must have other names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_inputs import Case, inputs, optimizer, update_args, upstream

from shardwise.kernels import fused_update
from shardwise.kernels.rule import RULES, define_rule


def made(flip: bool) -> str:
    def turned(w: Any, g: Any, lr: float = 0.5) -> Any:
        return w + lr * g if flip else w - lr * g

    return define_rule()(turned).name


def test_rules_of_one_text_that_read_another_bool_are_other_rules() -> None:
    """Only numbers were in the name, so the second rule ran the machine code of the first."""
    pytest.importorskip("numba")
    before = set(RULES)
    batch = inputs(Case("one", tables=((4, 8),), features=((0, False),), batch=3, lengths=(1, 2)))
    grad, moved = upstream(batch), []
    try:
        for flip in (False, True):
            weights = batch.weights.clone()
            args = list(update_args(weights, optimizer("sgd", batch), grad, batch))
            args[args.index("sgd")] = made(flip)
            fused_update(*args)
            moved.append(weights - batch.weights)
    finally:
        for name in set(RULES) - before:
            del RULES[name]
    assert not torch.equal(moved[0], torch.zeros_like(moved[0]))
    torch.testing.assert_close(moved[1], -moved[0], rtol=0, atol=1e-6)

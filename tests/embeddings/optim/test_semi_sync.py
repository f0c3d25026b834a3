"""SemisyncOptimizer: local steps, a global one after every so many, both states under one name."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from jagged_batches import upstream
from torch import Tensor, nn

from shardwise.embeddings import KeyedOptimizer, KeyedOptimizerWrapper, SemisyncOptimizer, WarmupOptimizer

COUNTS = {"__semisync_local_step_counter__", "__semisync_global_step_counter__"}


class Outer(torch.optim.Optimizer):
    """Keeps a slow copy, moves it half of the way to the weights, and puts it in their place."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})
        for p in self.param_groups[0]["params"]:
            self.state[p]["slow"] = p.detach().clone()

    def global_step(self, count: Tensor, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            assert p.grad is None
            slow = self.state[p]["slow"]
            p.copy_(slow.add_(p - slow, alpha=self.param_groups[0]["lr"]))


def make(seed: int = 1) -> tuple[nn.Linear, SemisyncOptimizer]:
    torch.manual_seed(seed)
    module = nn.Linear(3, 2)
    params = dict(module.named_parameters())
    local = KeyedOptimizerWrapper(params, lambda p: torch.optim.Adam(p, lr=0.1))
    return module, SemisyncOptimizer(params.values(), local, KeyedOptimizerWrapper(params, Outer), num_local_steps=3)


def train(module: nn.Linear, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        module(upstream(4, 3, seed=step)).square().sum().backward()
        optimizer.step()


def test_every_third_step_is_followed_by_a_global_one() -> None:
    (module, optimizer), (plain, _) = make(), make()
    adam = torch.optim.Adam(plain.parameters(), lr=0.1)
    slow = [p.detach().clone() for p in plain.parameters()]
    for step in range(8):
        train(module, optimizer, range(step, step + 1))
        train(plain, adam, range(step, step + 1))
        if step in (2, 5):
            with torch.no_grad():
                for p, q in zip(plain.parameters(), slow, strict=True):
                    p.copy_(q.add_(p - q, alpha=0.5))
        assert torch.equal(module.weight, plain.weight) and torch.equal(module.bias, plain.bias)


def test_states_of_both_are_saved_by_parameter() -> None:
    """The layout is TorchRec's."""
    module, optimizer = make()
    train(module, optimizer, range(4))
    state = optimizer.state_dict()["state"]
    local = {"semi_sync_local_step", "semi_sync_local_exp_avg", "semi_sync_local_exp_avg_sq"}
    assert {name: set(values) for name, values in state.items()} == {
        name: {*local, "semi_sync_global_slow", *COUNTS} for name in ("weight", "bias")
    }
    assert [state["bias"][name].item() for name in sorted(COUNTS)] == [1, 4]
    assert set(optimizer.params) == {"weight", "bias", *COUNTS} and len(optimizer.param_groups) == 2


@pytest.mark.parametrize("groups", [True, False])
def test_a_run_resumed_between_global_steps_has_the_same_bits(groups: bool) -> None:
    whole, optimizer = make()
    optimizer.save_param_groups(groups)
    train(whole, optimizer, range(4))
    saved = copy.deepcopy((whole.state_dict(), optimizer.state_dict()))
    train(whole, optimizer, range(4, 8))
    resumed, again = make(seed=5)
    again.save_param_groups(groups)
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    train(resumed, again, range(4, 8))
    assert torch.equal(resumed.weight, whole.weight) and torch.equal(resumed.bias, whole.bias)


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    module, optimizer = make()
    train(module, optimizer, range(4))
    before = copy.deepcopy(optimizer.state_dict())

    def refused(message: str, change: Any) -> None:
        saved = copy.deepcopy(before)
        saved["state"]["weight"]["semi_sync_local_exp_avg"].fill_(9.0)
        change(saved)
        with pytest.raises(ValueError, match=message):
            optimizer.load_state_dict(saved)
        for name, values in before["state"].items():
            assert all(torch.equal(optimizer.state_dict()["state"][name][key], value) for key, value in values.items())

    refused(r"unexpected parameters \['x'\]", lambda d: d["state"].update(x={}))
    refused("counts of steps .* are missing", lambda d: [v.pop(k) for v in d["state"].values() for k in COUNTS])
    refused(r"weight differ: missing \['slow'\]", lambda d: d["state"]["weight"].pop("semi_sync_global_slow"))
    refused("saved are 1 param_groups, here are 2", lambda d: d.update(param_groups=d["param_groups"][:1]))


def test_what_it_cannot_do_is_refused() -> None:
    params = dict(nn.Linear(3, 2).named_parameters())
    local = KeyedOptimizerWrapper(params, lambda p: torch.optim.Adam(p))
    outer = KeyedOptimizerWrapper(params, Outer)
    with pytest.raises(TypeError, match="Adam has no global_step"):
        SemisyncOptimizer(params.values(), local, KeyedOptimizerWrapper(params, lambda p: torch.optim.Adam(p)))
    with pytest.raises(ValueError, match="num_local_steps must be positive, got 0"):
        SemisyncOptimizer(params.values(), local, outer, 0)
    with pytest.raises(ValueError, match="offload_global_model and non_blocking are not offered"):
        SemisyncOptimizer(params.values(), local, outer, offload_global_model=True)
    with pytest.raises(ValueError, match="global_params are 1 tensors, not the 2 of the global optimizer"):
        SemisyncOptimizer([params["weight"]], local, outer)
    with pytest.raises(ValueError, match="both optimizers hold a parameter 'weight', but not the same one"):
        others = dict(nn.Linear(3, 2).named_parameters())
        SemisyncOptimizer(params.values(), KeyedOptimizerWrapper(others, lambda p: torch.optim.Adam(p)), outer)
    with pytest.warns(UserWarning, match="semi_sync_worker_shard_group is not used"):
        SemisyncOptimizer([{"params": list(params.values())}], local, outer, 2, object())


def test_copied_scheduled_and_initialised_like_any_keyed_optimizer() -> None:
    module, optimizer = make()
    optimizer.init_state()
    assert optimizer.state_dict()["state"]["weight"]["__semisync_local_step_counter__"].item() == 0
    outer: KeyedOptimizer = WarmupOptimizer(optimizer, [], lr=0.25)
    train(module, outer, range(3))
    other = copy.deepcopy(outer)
    assert other.state_dict()["state"]["__warmup"]["warmup"].tolist() == [3, 0]
    assert {group["lr"] for group in other.param_groups} == {0.25}
    for param in other.params.values():
        param.grad = torch.ones_like(param) if param.requires_grad else None
    other.step()
    assert other.state_dict()["state"]["bias"]["__semisync_local_step_counter__"].item() == 4
    assert outer.state_dict()["state"]["bias"]["__semisync_local_step_counter__"].item() == 3

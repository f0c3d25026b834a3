"""Recipes of examples/recipes print what their pages say, on one rank and on two, and train as plain torch does."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT
from forked import run_script
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from shardwise import ShardingEnv, checkpoint

# a step of two ranks takes the paths of one as well
RANKS = pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])


def recipe(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"recipe_{name}", ROOT / "examples" / "recipes" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # a compiler looks names up in the module that a function says it is of
    sys.modules[module.__name__] = module
    spec.loader.exec_module(module)
    return module


PRINTED = {
    "metrics": [
        "samples: 40000, bytes of states: 2231512",
        "AUC 0.8212, off by at most 5e-05",
        "NE 0.8058, calibration 1.0721",
        "AUC of the last 8000: 0.7661",
        "of all samples at once: AUC 0.8212, NE 0.8058",
    ],
    "schedules": [
        "step 0: tables 0.0400, dense layers 0.0100",
        "step 2: tables 0.2200, dense layers 0.0550",
        "step 4: tables 0.4000, dense layers 0.1000",
        "step 8: tables 0.2000, dense layers 0.0500",
        "step 11: tables 0.0152, dense layers 0.0038",
        "resumed: same rates True, same weights True",
        "WarmupOptimizer: one rate for all groups, [0.04, 0.04]",
    ],
    "autocast": [
        "layers: torch.bfloat16, pooled: torch.float32, table: torch.float32",
        "bf16 layers: loss 0.70 -> 0.03",
        "fp32 layers: loss 0.70 -> 0.03",
        "losses times 1024: 0 steps left out, then loss 0.03",
    ],
    "compile_step": [
        "6 batches as they come: 2 graphs, the eager step's bits: True",
        "6 batches marked: 1 graphs, the eager step's bits: True",
        "6 batches marked, of many sizes: 2 graphs",
    ],
}


@pytest.mark.ranks
@RANKS
@pytest.mark.parametrize("name", PRINTED)
def test_a_recipe_prints_what_it_promises(name: str, ranks: int) -> None:
    lines = run_script(f"examples/recipes/{name}.py", ranks=ranks).splitlines()
    # the third digit of a loss is the machine's own
    assert [re.sub(r"(loss|->) (\d\.\d\d)\d", r"\1 \2", line) for line in lines] == PRINTED[name]


@pytest.mark.ranks
@RANKS
def test_all_ranks_stop_in_the_same_epoch(ranks: int) -> None:
    lines = run_script("examples/recipes/early_stopping.py", ranks=ranks).splitlines()
    ended = sorted(line.partition(": ")[::2] for line in lines if line.startswith("rank"))
    assert [rank for rank, _ in ended] == [f"rank {rank}" for rank in range(ranks)] and len(
        {end for _, end in ended}
    ) == 1
    assert 2 < int(ended[0][1].split()[3].rstrip(",")) < 100
    # ranks print in any order
    assert lines.count("the last NE is worse: True; the best weights are back: True") == 1


class Twin(nn.Module):
    """A recipe's model in plain torch, its table and its layers those of `model`."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        weights = {name.partition("ebc.embedding_bags.item.")[2]: p for name, p in model.named_parameters()}
        self.table = nn.EmbeddingBag.from_pretrained(weights["weight"].detach().clone(), freeze=False, mode="sum")
        self.over: nn.Module = type(model)().over
        self.over.load_state_dict(model.over.state_dict())

    def forward(self, ids: Any) -> Tensor:
        pooled: Tensor = self.table(ids.values(), ids.offsets()[:-1])
        logits: Tensor = self.over(pooled)
        return logits.squeeze(1)


def groups_of(twin: Twin, table: float, dense: float) -> torch.optim.SGD:
    return torch.optim.SGD(
        [{"params": twin.table.parameters(), "lr": table}, {"params": twin.over.parameters()}], lr=dense
    )


def table_of(model: Any) -> Tensor:
    return model.state_dict()["ebc.embedding_bags.item.weight"].clone()


def test_scheduled_rates_reach_the_rows_in_the_step_they_are_for() -> None:
    schedules = recipe("schedules")
    twin = Twin(schedules.Model())
    model, optimizer = schedules.build(ShardingEnv.from_local(1, 0))
    schedules.train(model, optimizer, schedules.schedule(optimizer), range(schedules.STEPS))
    plain = groups_of(twin, 0.4, 0.1)
    schedules.train(twin, plain, schedules.schedule(plain), range(schedules.STEPS))
    torch.testing.assert_close(table_of(model), twin.table.weight.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.module.over.weight, twin.over.get_parameter("weight"), rtol=1e-5, atol=1e-6)


def test_rates_are_a_step_late_where_zero_grad_comes_before_the_schedule() -> None:
    """What the page warns of: backward goes by the rate that `zero_grad` or `step` passed on last."""
    schedules = recipe("schedules")
    twin = Twin(schedules.Model())
    model, optimizer = schedules.build(ShardingEnv.from_local(1, 0))
    rates = schedules.schedule(optimizer)
    for step in range(schedules.STEPS):
        ids, labels = schedules.batch_of(step)
        nn.functional.mse_loss(model(ids), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
    plain = groups_of(twin, 0.4, 0.1)
    rates, late = schedules.schedule(plain), 0.4
    for step in range(schedules.STEPS):
        plain.zero_grad()
        ids, labels = schedules.batch_of(step)
        nn.functional.mse_loss(twin(ids), labels).backward()
        plain.param_groups[0]["lr"], late = late, plain.param_groups[0]["lr"]
        plain.step()
        plain.param_groups[0]["lr"] = late
        rates.step()
    torch.testing.assert_close(table_of(model), twin.table.weight.detach(), rtol=1e-5, atol=1e-6)


def test_a_schedule_made_after_a_load_goes_on_from_wrong_rates(tmp_path: Path) -> None:
    """What the page warns of: the schedule's first rates are written over those that were loaded."""
    schedules = recipe("schedules")
    env = ShardingEnv.from_local(1, 0)
    model, optimizer = schedules.build(env)
    rates = schedules.schedule(optimizer)
    schedules.train(model, optimizer, rates, range(6))
    checkpoint.save(tmp_path, model, optimizer, step=6)
    path = checkpoint.latest(tmp_path)
    assert path is not None
    wanted, saved = [group["lr"] for group in optimizer.param_groups], rates.state_dict()
    for before in (True, False):
        resumed, optimizer = schedules.build(env)
        rates = schedules.schedule(optimizer) if before else None
        checkpoint.load(path, resumed, optimizer)
        rates = rates or schedules.schedule(optimizer)
        rates.load_state_dict(saved)
        assert ([group["lr"] for group in optimizer.param_groups] == wanted) == before


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_autocast_trains_as_plain_torch_under_autocast(dtype: torch.dtype | None) -> None:
    autocast = recipe("autocast")
    twin = Twin(autocast.Model())
    model, optimizer = autocast.build(ShardingEnv.from_local(1, 0))
    losses = autocast.train(model, optimizer, dtype)
    assert losses == pytest.approx(autocast.train(twin, groups_of(twin, 10.0, 0.5), dtype), abs=1e-3)
    torch.testing.assert_close(table_of(model), twin.table.weight.detach(), rtol=1e-2, atol=1e-2)


def test_losses_scaled_by_a_power_of_two_change_no_bit_and_what_is_infinite_is_left_out() -> None:
    autocast = recipe("autocast")
    env = ShardingEnv.from_local(1, 0)
    tables = []
    for scale in (1.0, 1024.0):
        model, optimizer = autocast.build(env)
        assert autocast.train_scaled(model, optimizer, scale) == 0
        tables.append(table_of(model))
    assert torch.equal(*tables)
    model, optimizer = autocast.build(env)
    before = table_of(model)
    assert autocast.train_scaled(model, optimizer, torch.inf) == autocast.STEPS
    assert torch.equal(table_of(model), before)


def test_a_grad_scaler_alone_takes_table_steps_that_are_too_large_and_a_warning_says_so() -> None:
    """What the page warns of: the scale is taken out of `.grad`, after backward has updated the tables."""
    autocast = recipe("autocast")
    moved = []
    for scale in (1.0, 8.0):
        model, optimizer = autocast.build(ShardingEnv.from_local(1, 0))
        before = table_of(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        scaler.scale(autocast.loss_of(model, 0, None)).backward()
        with pytest.warns(UserWarning, match="updated by gradients times the scale"):
            scaler.step(optimizer)
        moved.append(table_of(model) - before)
    torch.testing.assert_close(moved[1], 8 * moved[0], rtol=1e-4, atol=1e-6)
    assert float(moved[0].abs().max()) > 0


def test_a_rate_makes_no_graph_and_evaluation_makes_one() -> None:
    step = recipe("compile_step")
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    env = ShardingEnv.from_local(1, 0)
    (model, optimizer), (eager, other) = step.build(env), step.build(env)
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for rate in (0.1, 0.05, 0.2):
        for steered in (optimizer, other):
            for group in steered.param_groups:
                group["lr"] = rate
        step.train(compiled, optimizer, [step.batch_of(3, 16)], True)
        step.train(eager, other, [step.batch_of(3, 16)])
    assert counter.frame_count == 1 and torch.equal(table_of(model), table_of(eager))
    for _ in range(2):
        model.eval()
        with torch.no_grad():
            compiled(*step.batch_of(3, 16))
        model.train()
        step.train(compiled, optimizer, [step.batch_of(3, 16)])
    assert counter.frame_count == 2

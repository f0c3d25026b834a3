"""torch.distributed.checkpoint over sharded tables: the same plan, another plan, other numbers of ranks."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from sharding_mixes import Mix, TableCase, build, environment, shard, train_alone
from sharding_steps import expect_outputs, local_tensors, train_on
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from shardwise import (
    CombinedOptimizer,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    KeyedOptimizerWrapper,
    ShardingPlan,
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)
from shardwise.planner.layout import TableOptions
from shardwise.sharding import column_wise, construct_module_sharding_plan, row_wise, table_wise

pytestmark = [
    pytest.mark.ranks,
    pytest.mark.filterwarnings("ignore:Please use DTensor"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized"),
]

# plans under which tables have the bits of one process
OPTIONS = TableOptions(reduction="ordered", row_state="table")
PLANS = {
    "rows": ("row_wise", "row_wise", "row_wise"),
    "tables": ("table_wise", "table_wise", "data_parallel"),
    "columns": ("column_wise", "column_wise", "column_wise"),
    "mixed": ("grid", "table_row_wise", "table_column_wise"),
}


def mix_by(plan: str) -> Mix:
    rows = (5, 12, 7)
    names = zip(rows, PLANS[plan], strict=True)
    return Mix(
        tuple(TableCase(f"t{n}", r, 8, (f"f{n}",), s, options=OPTIONS, seed=n) for n, (r, s) in enumerate(names))
    )


def save(plan: str, optimizer: str, path: str) -> None:
    mix = mix_by(plan)
    model = shard(mix, build(mix, optimizer), environment())
    train_on(mix, model, range(2))
    state_dict_saver.save(
        {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}, checkpoint_id=path
    )


def load(plan: str, optimizer: str, path: str) -> list[list[Tensor]]:
    mix = mix_by(plan)
    other = build(mix, optimizer)
    for param in other.parameters():
        param.data.fill_(7.0)
    model = shard(mix, other, environment())
    for group in model.fused_optimizer.param_groups:
        group["lr"] = 9.0
    state = {"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}
    state_dict_loader.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    model.fused_optimizer.load_state_dict(state["optimizer"])
    return train_on(mix, model, range(2, 4))


@pytest.mark.parametrize(
    "before, after, world",
    [
        ("rows", "rows", 2),
        ("rows", "tables", 2),
        ("tables", "columns", 2),
        ("columns", "rows", 1),
        ("rows", "mixed", 4),
    ],
)
def test_training_goes_on_from_a_checkpoint_bit_for_bit(before: str, after: str, world: int, tmp_path: Path) -> None:
    run = train_alone(mix_by(before), "adam", 4)
    run_ranks(2, save, before, "adam", str(tmp_path))
    ranks = run_ranks(world, load, after, "adam", str(tmp_path))
    expect_outputs(mix_by(before), run, ranks, range(2, 4))


def test_states_per_row_cross_plans_too(tmp_path: Path) -> None:
    """With row_state="table" a row has one number, whether or not its columns are cut."""
    run = train_alone(mix_by("rows"), "rowwise_adagrad", 4)
    run_ranks(2, save, "rows", "rowwise_adagrad", str(tmp_path))
    ranks = run_ranks(2, load, "columns", "rowwise_adagrad", str(tmp_path))
    expect_outputs(mix_by("rows"), run, ranks, range(2, 4))


class Net(nn.Module):
    """Two tables and a dense layer."""

    def __init__(self, optimizer: type[torch.optim.Optimizer]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.ebc = EmbeddingBagCollection([EmbeddingBagConfig(9, 8, t, feature_names=[t]) for t in ("a", "b")])
        self.over = nn.Linear(16, 1)
        apply_optimizer_in_backward(optimizer, self.ebc.parameters(), {"lr": 0.1})

    def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
        return self.over(self.ebc(kjt).values()).square().mean()  # type: ignore[no-any-return]


def model_by(plan: str, kind: type[torch.optim.Optimizer]) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    model, world = Net(kind), dist.get_world_size()
    cut = {"rows": row_wise(), "columns": column_wise(list(range(world))), "first": table_wise(0)}[plan]
    tables = construct_module_sharding_plan(model.ebc, {"a": cut, "b": table_wise(world - 1)}, world_size=world)
    dmp = DistributedModelParallel(model, plan=ShardingPlan({"ebc": tables}))
    dense = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    wrapped = KeyedOptimizerWrapper(dense, partial(torch.optim.Adam, lr=0.01))
    return dmp, CombinedOptimizer([dmp.fused_optimizer, wrapped])


def step_once(dmp: DistributedModelParallel, optimizer: CombinedOptimizer, step: int) -> float:
    generator = torch.Generator().manual_seed(step)
    kjt = KeyedJaggedTensor(["a", "b"], torch.randint(0, 9, (12,), generator=generator), lengths=torch.full((6,), 2))
    optimizer.zero_grad()
    loss = dmp(kjt)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def save_model(plan: str, kind: type[torch.optim.Optimizer], path: str) -> list[float]:
    dmp, optimizer = model_by(plan, kind)
    for step in range(2):
        step_once(dmp, optimizer, step)
    state_dict_saver.save({"model": dmp.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=path)
    return [step_once(dmp, optimizer, step) for step in range(2, 4)]


def load_model(plan: str, kind: type[torch.optim.Optimizer], path: str) -> list[float]:
    dmp, optimizer = model_by(plan, kind)
    step_once(dmp, optimizer, 7)
    state = {"model": dmp.state_dict(), "optimizer": optimizer.state_dict()}
    # by default torch takes the names of what has no state, on a rank without a shard of some table, for older ones
    planner = DefaultLoadPlanner(flatten_sharded_tensors=False) if kind is torch.optim.SGD else None
    state_dict_loader.load(state, checkpoint_id=path, planner=planner)
    # nothing of the model lies elsewhere than its state dict says
    held = local_tensors(dmp.state_dict())
    assert all(torch.equal(value, held[name]) for name, value in local_tensors(state["model"]).items())
    dmp.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return [step_once(dmp, optimizer, step) for step in range(2, 4)]


@pytest.mark.parametrize(
    "before, after, world, kind",
    [
        ("rows", "first", 2, torch.optim.Adagrad),
        ("first", "columns", 2, torch.optim.Adam),
        ("columns", "rows", 4, torch.optim.Adagrad),
        ("rows", "first", 2, torch.optim.SGD),
    ],
)
def test_a_whole_model_crosses_plans(
    before: str, after: str, world: int, kind: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    wanted = run_ranks(2, save_model, before, kind, str(tmp_path))
    for losses in run_ranks(world, load_model, after, kind, str(tmp_path)):
        assert losses == pytest.approx(wanted[0], abs=1e-6)

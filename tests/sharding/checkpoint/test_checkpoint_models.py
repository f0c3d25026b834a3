"""Saved under one plan and loaded under another: tables bit for bit, whole models with all that they have."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import mix_by, train_whole
from jagged_batches import random_kjt
from ranks import run_ranks
from sharding_mixes import (
    OPTIMIZERS,
    STRATEGIES,
    Mix,
    Run,
    build,
    environment,
    shard,
    train_alone,
)
from sharding_steps import expect_outputs, train_on
from torch import Tensor, nn

from shardwise import (
    CombinedOptimizer,
    DataType,
    DistributedModelParallel,
    DMPCollection,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    KeyedOptimizerWrapper,
    LookupPolicy,
    RowWiseAdagrad,
    ShardingPlan,
    WarmupOptimizer,
    WarmupPolicy,
    WarmupStage,
    apply_optimizer_in_backward,
    checkpoint,
    in_backward_optimizer_filter,
)
from shardwise.sharding import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from shardwise.sharding.modules.embedding_bag import EmbeddingBagSharder

pytestmark = pytest.mark.ranks


class Net(nn.Module):
    """Three tables, one of them replicated and trained by its gradient, a normalization with buffers, a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        tables = [
            EmbeddingBagConfig(9, 8, "a", feature_names=["a"]),
            EmbeddingBagConfig(9, 8, "b", DataType.BF16, feature_names=["b"]),
            EmbeddingBagConfig(9, 8, "c", feature_names=["c"]),
        ]
        self.ebc = EmbeddingBagCollection(tables, policy=LookupPolicy(output_dtype=torch.float32))
        self.norm = nn.BatchNorm1d(24)
        self.over = nn.Linear(24, 1)
        self.tied = self.over

    def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
        return self.over(self.norm(self.ebc(kjt).values())).square().mean()  # type: ignore[no-any-return]


def batch(step: int) -> KeyedJaggedTensor:
    return random_kjt(dict.fromkeys("abc", 9), 6, seed=step)


def sharded(plan: str) -> tuple[DistributedModelParallel, CombinedOptimizer]:
    """The model by a plan, with all its optimizers as one, and a schedule of the tables' rate."""
    net, world = Net(), dist.get_world_size()
    for name, kind in (("a", RowWiseAdagrad), ("b", torch.optim.Adam)):
        param = net.ebc.get_parameter(f"embedding_bags.{name}.weight")
        apply_optimizer_in_backward(kind, [param], {"lr": 0.1, "stochastic_rounding": False})
    cut = {"rows": row_wise(), "columns": column_wise(list(range(world))), "first": table_wise(0)}[plan]
    cuts = {"a": cut if plan != "columns" else row_wise(), "b": cut, "c": data_parallel()}
    tables = construct_module_sharding_plan(net.ebc, cuts, world_size=world)
    dmp = DistributedModelParallel(net, plan=ShardingPlan({"ebc": tables}))
    dense = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    wrapped = KeyedOptimizerWrapper(dense, partial(torch.optim.Adam, lr=0.01))
    stages = [WarmupStage(WarmupPolicy.LINEAR, max_iters=20, value=0.1)]
    return dmp, CombinedOptimizer([WarmupOptimizer(dmp.fused_optimizer, stages, lr=0.1), wrapped])


def train(model: nn.Module, optimizer: Any, steps: range) -> list[float]:
    """The loss of each step."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        loss: Tensor = model(batch(step))
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def save_net(plan: str, folder: str, asynchronous: bool) -> list[float]:
    dmp, optimizer = sharded(plan)
    train(dmp, optimizer, range(2))
    optimizer.param_groups[-1]["lr"] = 0.02
    saving = checkpoint.save(folder, dmp, optimizer, step=2, asynchronous=asynchronous)
    losses = train(dmp, optimizer, range(2, 7))
    saving.wait()
    assert saving.done()
    return losses


def load_net(plan: str, folder: str) -> list[float]:
    dmp, optimizer = sharded(plan)
    # has other states than the saved one, which all go
    train(dmp, optimizer, range(7, 8))
    path = checkpoint.latest(folder)
    assert path is not None
    checkpoint.load(path, dmp, optimizer)
    assert optimizer.param_groups[-1]["lr"] == 0.02
    return train(dmp, optimizer, range(2, 7))


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize(
    "before, world, after, other_world",
    [("rows", 2, "first", 2), ("first", 2, "columns", 4), ("columns", 4, "rows", 1), ("rows", 1, "rows", 3)],
)
def test_a_model_goes_on_with_its_dense_layers_optimizers_and_schedule(
    before: str, world: int, after: str, other_world: int, asynchronous: bool, tmp_path: Path
) -> None:
    """Fault 39, another world size on resume. What an asynchronous save stages, later steps do not change."""
    wanted = run_ranks(world, save_net, before, str(tmp_path), asynchronous)
    ranks = run_ranks(other_world, load_net, after, str(tmp_path))
    for losses in ranks:
        assert losses == pytest.approx(wanted[0], abs=1e-5)
    assert min(abs(a - b) for a, b in zip(wanted[0], wanted[0][1:], strict=False)) > 1e-4


def test_a_plain_optimizer_and_a_module_of_one_process_are_saved_too(tmp_path: Path) -> None:
    def build_net() -> tuple[nn.Module, torch.optim.Optimizer]:
        net = Net()
        apply_optimizer_in_backward(RowWiseAdagrad, net.ebc.parameters(), {"lr": 0.1, "stochastic_rounding": False})
        dense = [param for _, param in in_backward_optimizer_filter(net.named_parameters())]
        return net, torch.optim.Adam(dense, lr=0.01, betas=(0.8, 0.9))

    net, optimizer = build_net()
    train(net, optimizer, range(2))
    path = checkpoint.save(tmp_path, net, optimizer, step=2).path
    wanted = train(net, optimizer, range(2, 5))
    other, fresh = build_net()
    with torch.no_grad():
        for param in other.parameters():
            param.fill_(0.5)
    fresh.param_groups[0]["betas"] = (0.1, 0.2)
    checkpoint.load(path, other, fresh)
    assert fresh.param_groups[0]["betas"] == (0.8, 0.9)
    assert train(other, fresh, range(2, 5)) == wanted


def whole_of_ranks() -> dict[str, Tensor]:
    dmp, _ = sharded("columns")
    return checkpoint.full_state_dict(dmp)


def test_whole_tensors_of_ranks_and_of_files_load_into_the_unsharded_model(tmp_path: Path) -> None:
    net = Net()
    wanted = net.state_dict()
    ranks = run_ranks(2, whole_of_ranks)
    path = checkpoint.save(tmp_path, net, step=0).path
    for state in (*ranks, checkpoint.full_state_dict(path), checkpoint.full_state_dict(str(path))):
        assert set(state) == set(wanted)
        assert all(
            torch.equal(state[name], value) and state[name].dtype == value.dtype for name, value in wanted.items()
        )
        other = Net()
        other.load_state_dict(state)
        bag = nn.EmbeddingBag(9, 8)
        bag.load_state_dict({"weight": state["ebc.embedding_bags.a.weight"]})


def replicas(folder: str, mean: bool) -> dict[str, Tensor]:
    """Two replicas of two ranks, which trained on their own."""
    net = Net()
    apply_optimizer_in_backward(torch.optim.Adagrad, net.ebc.parameters(), {"lr": 0.1, "stochastic_rounding": False})
    plan = construct_module_sharding_plan(
        net.ebc, {"a": row_wise(), "b": table_wise(1), "c": data_parallel()}, world_size=2
    )
    assert dist.group.WORLD is not None
    dmp = DMPCollection(net, "cpu", ShardingPlan({"ebc": plan}), 4, 2, dist.group.WORLD)
    loss = dmp(batch(dist.get_rank()))
    loss.backward()
    if mean:
        dmp.sync()
    path = checkpoint.save(folder, dmp, step=1).path
    before = checkpoint.full_state_dict(dmp)
    for param in dmp.parameters():
        param.data.fill_(0.5)
    checkpoint.load(path, dmp)
    after = checkpoint.full_state_dict(dmp)
    if mean:
        # ranks see other batches, and keep other running means
        assert all(torch.equal(before[name], value) for name, value in after.items() if "norm" not in name)
    return after


@pytest.mark.parametrize("mean", [True, False])
def test_of_replicas_of_all_tables_the_first_is_saved_and_all_are_loaded(mean: bool, tmp_path: Path) -> None:
    ranks = run_ranks(4, replicas, str(tmp_path), mean)
    saved = checkpoint.full_state_dict(checkpoint.latest(tmp_path) or "")
    for state in ranks:
        assert all(torch.equal(state[name], value) for name, value in saved.items())


def bags(folder: str) -> Tensor:
    torch.manual_seed(3)
    bag = nn.EmbeddingBag(9, 8, mode="sum")
    plan = construct_module_sharding_plan(
        bag, {"weight": row_wise()}, EmbeddingBagSharder(), world_size=dist.get_world_size()
    )
    dmp = DistributedModelParallel(bag, plan=ShardingPlan({"": plan}), sharders=[EmbeddingBagSharder()])
    checkpoint.save(folder, dmp, step=1)
    return checkpoint.full_state_dict(dmp)["weight"]


@pytest.mark.filterwarnings("ignore:tables")
def test_a_sharded_embedding_bag_becomes_a_plain_one(tmp_path: Path) -> None:
    weight = run_ranks(2, bags, str(tmp_path))[0]
    plain = nn.EmbeddingBag(9, 8, mode="sum")
    checkpoint.load(checkpoint.latest(tmp_path) or "", plain)
    assert torch.equal(plain.weight, weight)
    plain.weight.data.fill_(0.0)
    plain.load_state_dict(checkpoint.full_state_dict(tmp_path / "step-000000000001"))
    assert torch.equal(plain.weight, weight)


ALONE = "unsharded"
PLANS = {
    **{strategy: (strategy,) * 3 for strategy in STRATEGIES},
    "mixed": ("grid", "data_parallel", "column_wise"),
    "other": ("table_column_wise", "row_wise", "table_wise"),
    ALONE: ("table_wise",) * 3,
}
STEPS = 2, 7


@dataclass(frozen=True)
class Side:
    """How a run is spread: a plan over so many ranks."""

    plan: str
    world: int


@dataclass(frozen=True)
class Case:
    """A run that is saved on one side and continued on another."""

    number: int
    before: Side
    after: Side
    optimizer: str
    pooled: bool

    def mix(self, side: Side) -> Mix:
        return mix_by(PLANS[side.plan], self.pooled)

    def __str__(self) -> str:
        sides = [f"{side.plan} on {side.world}" for side in (self.before, self.after)]
        return f"{' -> '.join(sides)}, {self.optimizer}, {'pooled' if self.pooled else 'sequence'}"


def sides() -> list[Side]:
    return [Side(plan, world) for plan in PLANS for world in ((1,) if plan == ALONE else (1, 2, 4))]


def cases(count: int) -> list[Case]:
    """A sample of all pairs of plans and world sizes, in which each side is left and reached."""
    rng = random.Random(6)
    befores, afters = ([side for _ in range(3) for side in rng.sample(sides(), len(sides()))] for _ in range(2))
    picked = [
        (before, after, rng.choice(list(OPTIMIZERS)), rng.random() < 0.5)
        for before, after in zip(befores, afters, strict=True)
    ]
    return [Case(number, *change) for number, change in enumerate(picked[:count])]


CASES = cases(60)


def test_the_sample_has_all_plans_and_world_sizes_on_both_sides() -> None:
    for attribute in ("before", "after"):
        assert {getattr(case, attribute) for case in CASES} == set(sides())
    assert {(case.before.world, case.after.world) for case in CASES} == {(a, b) for a in (1, 2, 4) for b in (1, 2, 4)}
    assert {(case.optimizer, case.pooled) for case in CASES} == {(o, p) for o in OPTIMIZERS for p in (False, True)}


@cache
def uninterrupted(optimizer: str, pooled: bool) -> Run:
    return train_alone(Case(0, sides()[0], sides()[0], optimizer, pooled).mix(sides()[0]), optimizer, STEPS[1])


def model_of(case: Case, side: Side, fill: float | None = None) -> Any:
    mix = case.mix(side)
    module = build(mix, case.optimizer)
    if fill is not None:
        for param in module.parameters():
            param.data.fill_(fill)
    return module if side.plan == ALONE else shard(mix, module, environment())


def go_on(case: Case, side: Side, model: Any, steps: range) -> list[list[Tensor]]:
    run = train_whole if side.plan == ALONE else train_on
    return run(case.mix(side), model, steps)


def save_all(cases: list[Case], folder: str) -> None:
    for case in cases:
        model = model_of(case, case.before)
        go_on(case, case.before, model, range(STEPS[0]))
        checkpoint.save(f"{folder}/{case.number}", model, step=STEPS[0], extra={"case": case.number})


def load_all(cases: list[Case], folder: str) -> list[list[list[Tensor]]]:
    outputs = []
    for case in cases:
        path = checkpoint.latest(f"{folder}/{case.number}")
        assert path is not None
        model = model_of(case, case.after, fill=7.0)
        optimizer = model.fused_optimizer() if case.after.plan == ALONE else model.fused_optimizer
        for group in optimizer.param_groups:
            group["lr"] = 9.0
        loaded = checkpoint.load(path, model)
        assert (loaded.step, loaded.extra, bool(loaded.report)) == (STEPS[0], {"case": case.number}, False)
        outputs.append(go_on(case, case.after, model, range(*STEPS)))
    return outputs


@pytest.mark.full
def test_sixty_changes_of_plan_and_world_size_go_on_bit_for_bit(tmp_path: Path) -> None:
    """All plans x {1, 2, 4} -> all plans x {1, 2, 4}, with the states of SGD, Adam and rowwise Adagrad."""
    for world in (1, 2, 4):
        run_ranks(world, save_all, [case for case in CASES if case.before.world == world], str(tmp_path))
    for world in (1, 2, 4):
        cases = [case for case in CASES if case.after.world == world]
        ranks = run_ranks(world, load_all, cases, str(tmp_path))
        for number, case in enumerate(cases):
            outputs = [rank[number] for rank in ranks]
            try:
                expect_outputs(case.mix(case.after), uninterrupted(case.optimizer, case.pooled), outputs, range(*STEPS))
            except AssertionError as error:
                raise AssertionError(f"{case}: {error}") from None

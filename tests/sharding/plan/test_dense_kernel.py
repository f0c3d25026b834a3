"""Kernel "dense" under every sharding type: gradients reach `.grad`, and an ordinary optimizer steps the tables."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jagged_batches import random_kjt
from ranks import error_of, run_ranks
from torch import Tensor, nn

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
    RowWiseAdagrad,
    ShardingPlan,
    apply_optimizer_in_backward,
    construct_module_sharding_plan,
)
from shardwise.sharding import (
    ParameterSharding,
    ShardingType,
    column_wise,
    data_parallel,
    grid_shard,
    row_wise,
    table_column_wise,
    table_row_wise,
    table_wise,
)

pytestmark = pytest.mark.ranks

KINDS = ("pooled", "weighted", "rows")
TYPES = [kind.value for kind in ShardingType]
# "fused" trains in its backward beside tables that train by their gradients
TABLES = (*TYPES, "ordered", "fused", "frozen")
DIM, ROWS, BATCH, STEPS = 8, 21, 8, 3
# hosts of two ranks, where there are as many
LOCAL = {1: 1, 2: 2, 4: 2}
TOLERANCE = 2e-6


class Net(nn.Module):
    """A collection of each kind with a table for each of `TABLES`, and a dense layer on top."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        bags = [
            EmbeddingBagConfig(
                ROWS, DIM, name, feature_names=[f"f_{name}"],
                pooling=PoolingType.MEAN if n % 2 else PoolingType.SUM,
            )
            for n, name in enumerate(TABLES)
        ]  # fmt: skip
        rows = [EmbeddingConfig(ROWS, DIM, name, feature_names=[f"f_{name}"]) for name in TABLES]
        self.parts = nn.ModuleDict(
            {
                "pooled": EmbeddingBagCollection(bags),
                "weighted": EmbeddingBagCollection(bags, is_weighted=True),
                "rows": EmbeddingCollection(rows),
            }
        )
        self.over = nn.Linear(1, 1)
        for name, param in self.named_parameters():
            if ".fused." in name:
                apply_optimizer_in_backward(torch.optim.SGD, [param], {"lr": 0.1})
            if ".frozen." in name:
                param.requires_grad_(False)

    def forward(self, batches: Mapping[str, KeyedJaggedTensor]) -> Tensor:
        """One number a sample [B, 1]."""
        outputs = []
        for kind, part in self.parts.items():
            output = part(batches[kind])
            if kind == "rows":
                outputs += [rows.to_padded_dense(4).flatten(1) for rows in output.values()]
            else:
                outputs.append(output.values())
        return self.over(torch.cat(outputs, dim=1).float().sin().sum(1, keepdim=True))  # type: ignore[no-any-return]


def batches_of(step: int, begin: int = 0, end: int = BATCH) -> dict[str, KeyedJaggedTensor]:
    rows = {f"f_{name}": ROWS for name in TABLES}
    return {
        kind: random_kjt(rows, BATCH, seed=10 * step + n, weighted=kind == "weighted", of=range(begin, end))
        for n, kind in enumerate(KINDS)
    }


def plan_of(model: Net, world: int) -> ShardingPlan:
    """Each table by its type: what has no optimizer in its backward gets the kernel "dense" by itself."""
    local = LOCAL[world]
    generators: dict[str, Any] = {
        "data_parallel": data_parallel(), "table_wise": table_wise(world - 1), "row_wise": row_wise(),
        "column_wise": column_wise(ranks=[0, world - 1]), "table_row_wise": table_row_wise(0),
        "table_column_wise": table_column_wise(0), "grid_shard": grid_shard(list(range(world // local))),
        "ordered": row_wise(reduction="ordered"), "fused": row_wise(), "frozen": row_wise(),
    }  # fmt: skip
    plans = {
        f"parts.{kind}": construct_module_sharding_plan(
            part, generators, local_size=local, world_size=world, device_type="cpu"
        )
        for kind, part in model.parts.items()
    }
    return ShardingPlan(plans)


Trained = dict[str, Any]


def train(model: nn.Module, batches: Callable[[int], dict[str, KeyedJaggedTensor]], mode: bool = True) -> Trained:
    """Losses, the last gradients and the weights of some steps by an optimizer over all parameters."""
    model.train(mode)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = (model(batches(step)) - 1).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {
        "losses": torch.stack(losses),
        "gradients": {name: param.grad for name, param in model.named_parameters() if param.grad is not None},
        "weights": {name: param.detach() for name, param in model.named_parameters()},
    }


def sharded(mode: bool) -> tuple[dict[str, list[tuple[Any, Any]]], Trained, list[str]]:
    """Where the cells of this rank's tables belong, what `train` gave, and the kernels of the plan."""
    rank, world = dist.get_rank(), dist.get_world_size()
    os.environ["LOCAL_WORLD_SIZE"] = str(LOCAL[world])
    model, each = Net(), BATCH // world
    dmp = DistributedModelParallel(model, plan=plan_of(model, world), device=torch.device("cpu"))
    trained = train(dmp, lambda step: batches_of(step, rank * each, (rank + 1) * each), mode)
    boxes = {}
    parts: Any = dmp.module.parts
    for path, part in parts.items():
        for name in TABLES:
            homes = part.states.homes(name)
            boxes[f"parts.{path}.{part.parameter_name(name)}"] = [(shard.rows, shard.cols) for shard, *_ in homes]
    trained = {
        what: value if what == "losses" else {unwrapped(name): tensor for name, tensor in value.items()}
        for what, value in trained.items()
    }
    kernels = [sharding.compute_kernel for sharding in dmp.plan.plan["parts.pooled"].values()]
    return boxes, trained, kernels


def unwrapped(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in ("module", "_dmp_wrapped_module"))


def part_of(whole: Tensor, boxes: list[tuple[Any, Any]]) -> Tensor:
    """A rank's part of a table: its shards, one below the other."""
    return torch.cat([whole[slice(*rows), slice(*cols)] for rows, cols in boxes])


@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("world", [1, 2, 4])
def test_tables_without_an_optimizer_train_by_their_gradients_under_every_type(world: int, mode: bool) -> None:
    """Losses, `.grad` and weights of three steps of Adam over all parameters are those of one process."""
    alone = train(Net(), batches_of, mode)
    ranks = run_ranks(world, sharded, mode)
    losses = torch.stack([trained["losses"] for _, trained, _ in ranks]).mean(0)
    torch.testing.assert_close(losses, alone["losses"], rtol=TOLERANCE, atol=0)
    seen = set()
    for boxes, trained, kernels in ranks:
        assert kernels == ["fused" if name == "fused" else "dense" for name in TABLES]
        for name, of_rank in boxes.items():
            for what in ("gradients", "weights"):
                whole, part = alone[what].get(name), trained[what].get(name)
                if not of_rank or (what == "gradients" and whole is None):
                    assert part is None or not part.numel(), name
                    continue
                wanted = part_of(whole, of_rank)
                assert (part - wanted).abs().max() <= TOLERANCE * max(1.0, float(wanted.abs().max())), (what, name)
                seen.add((what, name.split(".")[3]))
    trains = {("gradients", name) for name in TABLES if name not in ("fused", "frozen")}
    assert seen == trains | {("weights", name) for name in TABLES}


def accumulated() -> list[bool]:
    """Whether a second backward adds to `.grad`, hooks of a parameter run, and half precision keeps its dtype."""
    rank, world = dist.get_rank(), dist.get_world_size()
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        model = EmbeddingBagCollection([EmbeddingBagConfig(ROWS, DIM, "t", feature_names=["f"])]).to(dtype)
        plan = construct_module_sharding_plan(
            model, {"t": row_wise()}, local_size=world, world_size=world, device_type="cpu"
        )
        dmp = DistributedModelParallel(model, plan=ShardingPlan({"": plan}), device=torch.device("cpu"))
        (param,) = dmp.parameters()
        calls: list[int] = []
        param.register_post_accumulate_grad_hook(lambda p, calls=calls: calls.append(1))
        batch = random_kjt({"f": ROWS}, 4, seed=rank)
        dmp(batch).values().sum().backward()
        assert param.grad is not None
        first = param.grad.clone()
        dmp(batch).values().sum().backward()
        results += [torch.equal(param.grad, 2 * first), len(calls) == 2, param.grad.dtype == dtype, bool(first.any())]
        # in place, as clipping does it
        param.grad.mul_(0.5).clamp_(-1, 1)
    return results


def test_gradients_accumulate_and_hooks_run() -> None:
    assert run_ranks(2, accumulated) == [[True] * 8] * 2


def refusals() -> list[str]:
    """What a table that trains by its gradient cannot do."""
    world = dist.get_world_size()
    model = EmbeddingBagCollection([EmbeddingBagConfig(ROWS, DIM, "t", feature_names=["f"])])
    size: Any = {"local_size": world, "world_size": world, "device_type": "cpu"}
    plan = construct_module_sharding_plan(model, {"t": row_wise()}, **size)
    dmp = DistributedModelParallel(model, plan=ShardingPlan({"": plan}), device=torch.device("cpu"))
    other = construct_module_sharding_plan(
        EmbeddingBagCollection([EmbeddingBagConfig(ROWS, DIM, "t", feature_names=["f"])], device="meta"),
        {"t": table_wise(1)}, **size,
    )  # fmt: skip
    # the same cut is fine
    dmp.reshard(plan, sharded_module_fqn="")
    return [error_of(dmp.reshard, other, sharded_module_fqn="")]


def test_resharding_names_the_table_that_trains_by_its_gradient() -> None:
    for texts in run_ranks(2, refusals):
        assert "table 't' is trained by its gradient" in texts[0] and "optimizer in the backward" in texts[0]


def test_an_optimizer_that_the_plan_passes_over_is_named() -> None:
    """A kernel of the plan goes before the optimizer in the backward, and a warning names the table."""
    model = EmbeddingBagCollection([EmbeddingBagConfig(ROWS, DIM, "t", feature_names=["f"])])
    apply_optimizer_in_backward(RowWiseAdagrad, model.parameters(), {"lr": 0.1})
    plan = construct_module_sharding_plan(
        model, {"t": table_wise(0, compute_kernel="dense")}, local_size=1, world_size=1, device_type="cpu"
    )
    assert isinstance(plan["t"], ParameterSharding) and plan["t"].compute_kernel == "dense"
    with pytest.warns(UserWarning, match=r"compute_kernel 'dense' for tables \['t'\]: an ordinary optimizer"):
        run_alone(model, plan)


def run_alone(model: nn.Module, plan: Any) -> None:
    from shardwise import ShardingEnv

    dmp = DistributedModelParallel(
        model, env=ShardingEnv(1, 0), plan=ShardingPlan({"": plan}), device=torch.device("cpu")
    )
    (param,) = dmp.parameters()
    before = param.detach().clone()
    dmp(random_kjt({"f": ROWS}, 4)).values().sum().backward()
    assert torch.equal(param, before) and param.grad is not None and param.grad.any()

"""torch's DistributedDataParallel around tables: averaged gradients, and an error for those trained in the backward."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jagged_batches import random_kjt
from model_zoo import bag_tables, fused, row_tables
from ranks import run_ranks
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    KeyedJaggedTensor,
    apply_optimizer_in_backward,
)
from shardwise.sharding import (
    DistributedModelParallel,
    ShardingPlan,
    construct_module_sharding_plan,
    data_parallel,
    shard_modules,
    table_wise,
)

ROWS, BATCH = 12, 8


class Model(nn.Module):
    """A table and a dense layer."""

    def __init__(self, pooled: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        rows = {"f": ROWS}
        self.tables: Any = (
            EmbeddingBagCollection(bag_tables(rows, 4)) if pooled else EmbeddingCollection(row_tables(rows, 4))
        )
        self.pooled, self.over = pooled, nn.Linear(4, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        embeddings = self.tables(features)
        return self.over(embeddings.values() if self.pooled else embeddings["f"].values())  # type: ignore[no-any-return]


def batch(of: int) -> KeyedJaggedTensor:
    return random_kjt({"f": ROWS}, BATCH, seed=of)


def trained(pooled: bool, ranks: int) -> list[torch.Tensor]:
    """Parameters after some steps: of this rank's batches, or of those of all `ranks`."""
    model = Model(pooled)
    wrapped = DistributedDataParallel(model) if ranks == 1 else model
    optimizer = torch.optim.Adagrad(wrapped.parameters(), lr=0.1)
    batch_ranks = [dist.get_rank()] if ranks == 1 else list(range(ranks))
    for step in range(3):
        optimizer.zero_grad()
        loss = sum(wrapped(batch(10 * step + rank)).pow(2).sum() for rank in batch_ranks)
        (loss / len(batch_ranks)).backward()  # type: ignore[union-attr]
        optimizer.step()
    return [param.detach() for param in model.parameters()]


@pytest.mark.ranks
@pytest.mark.parametrize("pooled", [True, False])
def test_tables_without_an_optimizer_train_as_in_one_process(pooled: bool) -> None:
    expected = trained(pooled, 2)
    for params in run_ranks(2, trained, pooled, 1):
        for param, expected_param in zip(params, expected, strict=True):
            torch.testing.assert_close(param, expected_param, rtol=1e-5, atol=1e-6)


def refused() -> dict[str, str]:
    """What each way to put tables with an optimizer under DistributedDataParallel says."""
    texts: dict[str, str] = {}

    def keep(name: str, make: Any) -> None:
        try:
            make()
            texts[name] = "nothing"
        except Exception as error:
            texts[name] = f"{type(error).__name__}: {error}"

    def marked(pooled: bool = True) -> Model:
        model = Model(pooled)
        fused(model.tables)
        return model

    def sharded() -> nn.Module:
        model = marked()
        plan = {"tables": construct_module_sharding_plan(model.tables, {"tf": table_wise(rank=0)}, world_size=1)}
        return shard_modules(model, plan=ShardingPlan(plan))

    def later() -> None:
        wrapped = DistributedDataParallel(Model())
        wrapped(batch(0)).sum().backward()
        apply_optimizer_in_backward(torch.optim.SGD, wrapped.module.tables.parameters(), {"lr": 0.1})
        wrapped(batch(1)).sum().backward()

    keep("bags", lambda: DistributedDataParallel(marked()))
    keep("the collection itself", lambda: DistributedDataParallel(marked().tables))
    keep("sequences", lambda: DistributedDataParallel(marked(pooled=False)))
    keep("sharded", lambda: DistributedDataParallel(sharded()))
    keep("marked later", later)

    def ignored() -> None:
        model = marked()
        names = {name for name, _ in model.named_parameters() if name.startswith("tables.")}
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[no-untyped-call]
        wrapped = DistributedDataParallel(model)
        for step in range(2):
            wrapped(batch(step)).sum().backward()

    def frozen() -> None:
        model = marked()
        model.tables.requires_grad_(False)
        DistributedDataParallel(model)

    def plain() -> None:
        model = Model()
        model.tables.requires_grad_(False)
        DistributedDataParallel(model)(batch(0)).sum().backward()

    def model_parallel() -> None:
        model = marked()
        plan = {"tables": construct_module_sharding_plan(model.tables, {"tf": data_parallel()}, world_size=1)}
        whole = DistributedModelParallel(model, plan=ShardingPlan(plan))
        for step in range(2):
            whole(batch(step)).sum().backward()

    keep("ignored by name", ignored)
    keep("frozen", frozen)
    keep("a frozen one without", plain)
    keep("DistributedModelParallel", model_parallel)

    def scattered() -> None:
        whole: Any = fully_shard(marked())
        whole(batch(0))

    keep("fully_shard", scattered)
    return texts


@pytest.mark.ranks
def test_tables_with_an_optimizer_are_refused_where_the_wrapper_is_built() -> None:
    """It was built, each rank trained its tables by its own batch alone, and the second forward failed."""
    (texts,) = run_ranks(1, refused)
    for name in ("bags", "the collection itself", "sequences", "sharded", "marked later", "frozen"):
        assert texts[name].startswith("ValueError: DistributedDataParallel around table 'tf'"), (name, texts[name])
        assert "DistributedModelParallel" in texts[name]
    assert {texts[name] for name in ("ignored by name", "a frozen one without", "DistributedModelParallel")} == {
        "nothing"
    }, texts
    assert texts["fully_shard"].startswith("ValueError: table 'tf'") and "fully_shard" in texts["fully_shard"]


@pytest.mark.full
@pytest.mark.parametrize("first", ["import torch.distributed.optim", "pass"])
def test_it_is_refused_whatever_else_was_imported_and_in_whatever_order(first: str) -> None:
    """Without the import DistributedDataParallel itself failed: "torch.distributed has no attribute optim"."""
    code = f"""
{first}
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
from shardwise import EmbeddingBagConfig, FusedEmbeddingBagCollection
config = EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["f"])
try:
    DistributedDataParallel(FusedEmbeddingBagCollection([config], torch.optim.SGD, {{"lr": 0.1}}))
except ValueError as error:
    print(error)
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "DistributedDataParallel around table 't'" in process.stdout, process.stderr


def stopped(stop: int) -> tuple[list[float], list[float]]:
    """Losses and a sum of the dense weights of a run, and of one that is given to another model after `stop` steps."""
    runs = []
    for stops in ((), (stop,)):
        dmp = deep()
        losses = []
        for step in range(12):
            if step in stops:
                before, dmp = dmp, deep()
                dmp.load_state_dict(before.state_dict())
            rank = dist.get_rank()
            loss = dmp(random_kjt({"f": ROWS}, BATCH, seed=step * 4 + rank)).square().mean()
            dmp.zero_grad()
            loss.backward()
            with torch.no_grad():
                for parameter in dmp.module.parameters():
                    if parameter.grad is not None:
                        parameter -= 0.1 * parameter.grad
            losses.append(loss.item())
        runs.append([*losses, *(p.double().sum().item() for p in dmp.module.over.parameters())])
    return runs[0], runs[1]


def deep() -> Any:
    """A table that is trained in the backward, and layers of many sizes, so that a sum has many places."""
    model = Model()
    sizes = (4, 37, 61, 29, 1)
    model.over = nn.Sequential(*(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False)))  # type: ignore[assignment]
    fused(model.tables, torch.optim.SGD, lr=0.1)
    return DistributedModelParallel(model)


@pytest.mark.ranks
@pytest.mark.parametrize("stop", [1, 5])
def test_a_run_that_is_stopped_and_goes_on_on_four_ranks_has_the_same_bits(stop: int) -> None:
    """DistributedDataParallel changes its buckets after the first step, and with them the order in which four ranks'
    gradients are added: after a restart some losses differed in their last bits."""
    for whole, parts in run_ranks(4, stopped, stop):
        assert whole == parts

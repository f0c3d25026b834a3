"""Semi-synchronous training has a staleness that a plain loop can repeat, bit for bit.

The loop here knows nothing of pipelines: where a batch is to miss the update of the one before, it puts the tables of
that time in place for the forward, and those of now back for the backward.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_zoo import Batch, Net, batch_of, dense_optimizer, drain, same, sharded
from pipeline_runs import CPU, equal
from ranks import run_ranks, world_group
from torch import Tensor, nn

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    ShardingEnv,
    ShardingPlan,
    apply_optimizer_in_backward,
    construct_module_sharding_plan,
)
from shardwise.sharding import TrainPipelineSemiSync, data_parallel, row_wise, table_wise

pytestmark = pytest.mark.ranks


class Tables(Net):
    """Pooled tables, one of which the optimizer of the dense layers trains."""

    def __init__(self) -> None:
        super().__init__("")
        self.parts = "p"
        tables = [EmbeddingBagConfig(40, 8, f"t{n}", feature_names=[f"f{n}"]) for n in range(4)]
        self.pooled = EmbeddingBagCollection(tables)


def with_a_dense_table() -> Any:
    module, world = Tables(), dist.get_world_size()
    params = dict(module.pooled.named_parameters())
    by_gradient = params.pop("embedding_bags.t2.weight")
    apply_optimizer_in_backward(RowWiseAdagrad, params.values(), {"lr": 0.1})
    assert by_gradient.requires_grad
    cut = {"t0": table_wise(rank=0), "t1": row_wise(), "t2": data_parallel(), "t3": data_parallel()}
    plan = ShardingPlan({"pooled": construct_module_sharding_plan(
        module.pooled, cut, local_size=world, world_size=world, device_type="cpu"
    )})  # fmt: skip
    return DistributedModelParallel(module, ShardingEnv.from_process_group(world_group()), "cpu", plan)


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    names = [name for name, _ in model.named_parameters()]
    if not any(name.endswith("t2.weight") for name in names) or "sequence" in "".join(names):
        return dense_optimizer(model)
    wanted = ("dense", "over", "pooled.embedding_bags.t2.")
    return torch.optim.Adagrad([p for name, p in model.named_parameters() if name.startswith(wanted)], lr=0.05)


def semi_sync_loop(
    model: Any, optimizer: torch.optim.Optimizer, epochs: Sequence[Sequence[Batch]], start: int, stash: bool
) -> list[Tensor]:
    """Outputs of the loop that `TrainPipelineSemiSync` promises."""
    tables = [group.flat for one in model._sharded.values() for group in one._tables.all_groups()]
    outputs, number, waiting = [], 0, None
    for batches in epochs:
        before = None
        for batch in batches:
            optimizer.zero_grad()
            now = [table.detach().clone() for table in tables]
            if before is not None and number > start:
                for table, stale in zip(tables, before, strict=True):
                    table.data.copy_(stale)
            losses, output = model(batch)
            for table, live in zip(tables, now, strict=True):
                table.data.copy_(live)
            torch.sum(losses, dim=0).backward()  # type: ignore[no-untyped-call]
            if number >= start and stash:
                own = [
                    (p, None if p.grad is None else p.grad.clone())
                    for group in optimizer.param_groups
                    for p in group["params"]
                ]
                if waiting is not None:
                    for param, grad in waiting:
                        param.grad = grad
                    optimizer.step()
                waiting = own
            else:
                optimizer.step()
            before, number = now, number + 1
            outputs.append(output.detach().clone())
    return outputs


def of_model(kind: str) -> Any:
    return with_a_dense_table() if kind == "dense" else sharded(kind)


def beside_the_loop(kind: str, start: int, stash: bool) -> tuple[bool, bool, bool]:
    """Whether outputs and every number of the model are those of the loop, and outputs those of a fresh one."""
    numbers = [range(7), range(7, 11)]
    piped, plain, fresh = (of_model(kind) for _ in range(3))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="module 'pooled': the pipeline's optimizer trains")
        pipeline: Any = TrainPipelineSemiSync(
            piped, optimizer_of(piped), CPU, start_batch=start, stash_gradients=stash, free_features_storage_early=stash
        )  # fmt: skip
    outputs = [one for epoch in numbers for one in drain(pipeline.progress, (batch_of(n) for n in epoch))]
    epochs = [[batch_of(n) for n in epoch] for epoch in numbers]
    expected = semi_sync_loop(plain, optimizer_of(plain), epochs, start, stash)
    in_sync = semi_sync_loop(fresh, optimizer_of(fresh), epochs, 99, False)
    return same(expected, outputs), equal(piped, plain), same(in_sync, outputs)


@pytest.mark.parametrize(
    ("world", "kind", "start", "stash"),
    [(2, "pws", 0, False), (2, "pws", 3, True), (2, "dense", 2, False), (1, "ps", 3, True), (1, "dense", 0, True)],
)
def test_every_batch_sees_the_tables_that_are_promised(world: int, kind: str, start: int, stash: bool) -> None:
    """Of pooled tables (rowwise Adagrad, Adam) and sequences (SGD), cut every way, over the end of an iterator."""
    assert run_ranks(world, beside_the_loop, kind, start, stash) == [(True, True, False)] * world


def counted_beside_evaluations() -> list[bool]:
    model = of_model("ps")
    pipeline: Any = TrainPipelineSemiSync(model, optimizer_of(model), CPU, start_batch=2)
    semi, given = [], map(batch_of, range(6))
    for _ in range(3):
        for training in (True, False):
            model.train(training)
            pipeline.progress(given)
            semi.append(pipeline.is_semi_sync())
    return semi


def test_batches_of_an_evaluation_do_not_count() -> None:
    """They counted, so lookups missed updates before `start_batch` batches had trained, and a `DMPCollection` whose
    replicas are averaged every second batch was never averaged where each was followed by one of an evaluation."""
    assert run_ranks(1, counted_beside_evaluations) == [[False, False, True, True, True, True]]


def test_until_its_first_batch_all_is_in_sync() -> None:
    assert run_ranks(2, beside_the_loop, "ps", 20, True) == [(True, True, True)] * 2


class Small(nn.Module):
    """A table and a layer with weights that anybody can write down."""

    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection([EmbeddingBagConfig(20, 8, "t", feature_names=["f"])])
        self.over = nn.Linear(8, 1)
        with torch.no_grad():
            next(self.bags.parameters()).copy_(torch.linspace(-1, 1, 160).view(20, 8))
            self.over.weight.copy_(torch.linspace(-0.5, 0.5, 8).view(1, 8))
            self.over.bias.fill_(0.1)
        apply_optimizer_in_backward(torch.optim.SGD, self.bags.parameters(), {"lr": 0.1})

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        out = self.over(self.bags(features).values().tanh())
        return (out - 1).square().sum(), out.detach()


# outputs, added up, of TorchRec 1.8.0's TrainPipelineSemiSync over this model, by start_batch and stash_gradients
UPSTREAM = {
    (2, False): [0.3908, 4.632841, 1.252017, 1.804169, 2.714079, 2.18038, 2.511879],
    (2, True): [0.3908, 4.632841, 1.252017, 1.697937, 1.941607, 2.17358, 3.013066],
    (0, True): [0.3908, 0.560209, 2.409991, 5.606512, 4.631402, 1.770347, -0.142669],
}


@pytest.mark.parametrize(("start", "stash"), UPSTREAM)
def test_batches_see_what_torchrecs_see(start: int, stash: bool) -> None:
    model = DistributedModelParallel(Small(), ShardingEnv.from_local(1, 0))
    inner: Any = model.module
    optimizer = torch.optim.SGD(inner.over.parameters(), lr=0.05)
    pipeline: Any = TrainPipelineSemiSync(model, optimizer, CPU, start_batch=start, stash_gradients=stash)
    lengths = torch.tensor([2, 1, 3])
    batches = (KeyedJaggedTensor(["f"], torch.arange(6) * (n + 1) % 20, None, lengths) for n in range(7))
    outputs = [output.sum().item() for output in drain(pipeline.progress, batches)]
    assert outputs == pytest.approx(UPSTREAM[start, stash], abs=2e-6)

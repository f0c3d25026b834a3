"""Steps of two gloo processes that are counted: sharded tables, cut in different ways, and a pipelined model.

Shapes: T tables of R rows x D columns, B samples a rank, L ids a bag.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise import (
    DLRM,
    Batch,
    DistributedModelParallel,
    DLRMTrain,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    ShardingPlan,
    TrainPipelineSparseDist,
    apply_optimizer_in_backward,
    construct_module_sharding_plan,
    in_backward_optimizer_filter,
)
from shardwise.perf.counts.counted_steps import Prepare, Step
from shardwise.perf.counts.steps import Count, Counts, of_ranks
from shardwise.perf.suite.case import Call
from shardwise.perf.suite.ranks import on_ranks
from shardwise.sharding import column_wise, row_wise, table_wise

RANKS = 2
T, R, D, B, L, DENSE = 8, 200, 16, 16, 3, 4
KEYS = [f"f{t}" for t in range(T)]
WAYS: dict[str, Callable[[int], Any]] = {
    "table-wise": lambda t: table_wise(rank=t % RANKS),
    "row-wise": lambda t: row_wise(),
    "column-wise": lambda t: column_wise(ranks=[t % RANKS, (t + 1) % RANKS]),
    "mixed": lambda t: (table_wise(rank=t % RANKS), row_wise(), column_wise(ranks=[0, 1]))[t % 3],
}


def tables() -> EmbeddingBagCollection:
    """The tables before they are sharded, with their optimizer."""
    made = EmbeddingBagCollection([EmbeddingBagConfig(R, D, f"t{t}", feature_names=[KEYS[t]]) for t in range(T)])
    apply_optimizer_in_backward(torch.optim.SGD, made.parameters(), {"lr": 0.01})
    return made


def batch_of(turn: int, device: torch.device) -> KeyedJaggedTensor:
    """A batch of this rank: as many ids for each rank's rows in every turn, so that as many bytes are sent."""
    ids = torch.arange(T * B * L) * 7 % R
    ids = (ids + 2 * turn + dist.get_rank()) % (R // 2) + (ids % 2) * (R // 2)
    return KeyedJaggedTensor(KEYS, ids.to(device), lengths=torch.full((T * B,), L).to(device))


def model_of(way: str, device: torch.device, around: Callable[[EmbeddingBagCollection], nn.Module]) -> Any:
    """A model around sharded tables."""
    module = tables()
    plan = construct_module_sharding_plan(
        module, {f"t{t}": WAYS[way](t) for t in range(T)}, None, RANKS, RANKS, device.type
    )
    net = around(module)
    (path,) = (name for name, submodule in net.named_modules() if submodule is module)
    return DistributedModelParallel(net, device=device, plan=ShardingPlan({path: plan}))


def sharded_step(device: torch.device, *, way: str) -> Prepare:
    """Forward and backward of the tables alone."""
    model = model_of(way, device, nn.Sequential)
    grad = torch.full((B, T * D), 0.1).to(device)

    def prepare(turn: int) -> Call:
        batch = batch_of(turn, device)
        return lambda: model(batch).values().backward(grad)

    return prepare


def pipelined_step(device: torch.device) -> Prepare:
    """A step of a DLRM while the ids of the next batch travel."""
    model = model_of(
        "table-wise", device, lambda module: DLRMTrain(DLRM(module, DENSE, [8, D], [8, 1], dense_device=device))
    )
    optimizer = torch.optim.SGD(dict(in_backward_optimizer_filter(model.named_parameters())).values(), lr=0.01)
    pipeline: TrainPipelineSparseDist[Batch, tuple[Tensor, ...]] = TrainPipelineSparseDist(model, optimizer, device)
    dense, labels = torch.full((B, DENSE), 0.5), torch.ones(B)
    given: Iterator[Batch] = cycle([Batch(dense, batch_of(turn, device), labels) for turn in range(8)])
    return lambda turn: lambda: pipeline.progress(given)


STEPS: Sequence[Step] = (
    *(Step(f"sharded EBC step, {way}, 2 ranks", partial(sharded_step, way=way)) for way in WAYS),
    Step("pipelined DLRM step, table-wise, 2 ranks", pipelined_step, cuda=False),
)


def counts_of_ranks(names: Sequence[str]) -> dict[str, Counts]:
    """Counts of these steps, by processes that this starts."""
    counts: dict[str, Counts] = on_ranks(RANKS, _counted, names, threads=None)
    return counts


def _counted(names: Sequence[str]) -> dict[str, Counts]:
    counts = {step.name: of_ranks(step) for step in STEPS if step.name in names}
    return {
        step: {name: Count(count.total, dict(count.parts)) for name, count in of.items()} for step, of in counts.items()
    }

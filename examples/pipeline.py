"""Training loops that work ahead: ids of the next batch travel, and another one is loaded, while a batch trains.

python examples/pipeline.py
torchrun --standalone --nproc_per_node=2 examples/pipeline.py
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import torch
import torch.distributed as dist

from shardwise import (
    DLRM,
    Batch,
    DataLoadingThread,
    DistributedModelParallel,
    DLRMTrain,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EvalPipelineSparseDist,
    KeyedJaggedTensor,
    PipelineStage,
    PrefetchTrainPipelineSparseDist,
    RowWiseAdagrad,
    ShardingEnv,
    SparseDataDistUtil,
    StagedTrainPipeline,
    TrainPipelineBase,
    TrainPipelineSparseDist,
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)
from shardwise.sharding import TrainPipeline

CPU = torch.device("cpu")
# what DLRMTrain returns beside its loss: loss, logits, labels
Output = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
STEPS = 12


def main() -> None:
    env = start()
    losses = {"plain": plain(env)}
    # the same constructor as TorchRec's; each of these makes the same steps
    for pipeline in (TrainPipelineBase, TrainPipelineSparseDist, PrefetchTrainPipelineSparseDist):
        model, optimizer = built(env)
        loop: TrainPipeline[Batch, Output] = pipeline(model, optimizer, CPU)
        # batches may come from a thread: what it raises is raised by `progress`, on all ranks, with the rank's number
        losses[pipeline.__name__] = drained(loop, DataLoadingThread(CPU, batches(env), to_device_non_blocking=False))
    losses["stages"] = by_stages(env)
    if env.rank == 0:
        print(f"plain loop: loss {losses['plain'][0]:.3f} -> {losses['plain'][-1]:.3f}")
        for name, values in losses.items():
            print(f"{name}: same bits: {values == losses['plain']}")
    print_evaluation(env)
    if dist.is_initialized():
        dist.destroy_process_group()


def plain(env: ShardingEnv) -> list[float]:
    """A loop without a pipeline."""
    model, optimizer = built(env)
    losses = []
    for batch in batches(env):
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def drained(loop: TrainPipeline[Batch, Output], given: Iterator[Batch]) -> list[float]:
    """`progress` makes a step; StopIteration comes on all ranks once one of them has no more batches."""
    losses: list[float] = []
    while True:
        try:
            loss, _, _ = loop.progress(given)
        except StopIteration:
            return losses
        losses.append(loss.item())


def by_stages(env: ShardingEnv) -> list[float]:
    """Stages of your own before a loop of your own."""
    model, optimizer = built(env)
    sparse: SparseDataDistUtil[Batch] = SparseDataDistUtil(model, None)
    copy = PipelineStage("copy", lambda batch: batch.to(CPU), None)
    pipeline: StagedTrainPipeline[Batch, Batch] = StagedTrainPipeline([copy, sparse.start_sparse_data_dist_stage()])
    losses, given = [], batches(env)
    while (batch := pipeline.progress(given)) is not None:
        optimizer.zero_grad()
        loss, _ = model(batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def print_evaluation(env: ShardingEnv) -> None:
    model, optimizer = built(env)
    model.eval()
    loop: TrainPipeline[Batch, Output] = EvalPipelineSparseDist(model, optimizer, CPU)
    means = drained(loop, batches(env))
    if env.rank == 0:
        print(f"evaluated {len(means)} batches, mean loss {sum(means) / len(means):.3f}")


def built(env: ShardingEnv) -> tuple[DistributedModelParallel, torch.optim.Optimizer]:
    """A small DLRM over the ranks, and the optimizer of its dense layers."""
    torch.manual_seed(0)
    names = ["user", "item"]
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(100, 8, name, feature_names=[name]) for name in names])
    apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
    module = DLRMTrain(DLRM(ebc, 4, [16, 8], [16, 1]))
    model = DistributedModelParallel(module, env, "cpu")
    return model, torch.optim.Adam(dict(in_backward_optimizer_filter(model.named_parameters())).values(), lr=0.01)


def batches(env: ShardingEnv) -> Iterator[Batch]:
    """Clicks on items with an even number."""
    generator = torch.Generator().manual_seed(env.rank)
    for _ in range(STEPS):
        ids = torch.randint(0, 100, (2 * 64,), generator=generator)
        features = KeyedJaggedTensor(["user", "item"], ids, None, torch.ones(2 * 64, dtype=torch.int64))
        yield Batch(torch.randn(64, 4, generator=generator), features, (ids[64:] % 2 == 0).float())


def start() -> ShardingEnv:
    """The ranks that torchrun started, or this process alone."""
    if "RANK" not in os.environ:
        return ShardingEnv.from_local(1, 0)
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    return ShardingEnv.from_process_group(dist.group.WORLD)


if __name__ == "__main__":
    main()

"""AUC, normalized entropy and calibration of any number of samples, over all ranks, in memory that does not grow.

    python examples/recipes/metrics.py
    torchrun --nproc_per_node=2 examples/recipes/metrics.py

Both print the same digits: what ranks send are sums of integers. A window tells the last samples alone.
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise import MetricWindow, ShardingEnv, StreamingAUC, StreamingNE, reduce_metrics
from shardwise.models import StreamingMetric, auc, normalized_entropy

BATCHES, BATCH_SIZE = 40, 1_000


def batch_of(number: int) -> tuple[Tensor, Tensor]:
    """Logits and labels; what the logits say of the labels becomes less from batch to batch."""
    generator = torch.Generator().manual_seed(number)
    truth = 2 * torch.randn(BATCH_SIZE, generator=generator) - 2
    noise = number / BATCHES * 2 * torch.randn(BATCH_SIZE, generator=generator)
    return truth + noise, (torch.rand(BATCH_SIZE, generator=generator) < truth.sigmoid()).float()


def main() -> None:
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        assert dist.group.WORLD is not None
        env = ShardingEnv.from_process_group(dist.group.WORLD)
    else:
        env = ShardingEnv.from_local(world_size=1, rank=0)

    ranking, entropy = StreamingAUC(), StreamingNE()
    recent = MetricWindow(StreamingAUC(), samples=8_000 // env.world_size, pieces=4)
    for number in range(env.rank, BATCHES, env.world_size):
        logits, labels = batch_of(number)
        for metric in (ranking, entropy, recent):
            metric.update(logits, labels)
    states: list[StreamingMetric] = [ranking, entropy]
    of_all, entropy_of_all, of_last = reduce_metrics((ranking, entropy, recent.latest()), env)

    if env.rank == 0:
        print(f"samples: {of_all.samples}, bytes of states: {sum(metric.state.nbytes for metric in states)}")
        print(f"AUC {of_all.compute():.4f}, off by at most {of_all.error_bound():.0e}")
        print(f"NE {entropy_of_all.compute():.4f}, calibration {entropy_of_all.calibration():.4f}")
        print(f"AUC of the last {of_last.samples}: {of_last.compute():.4f}")
        logits, labels = (torch.cat(parts) for parts in zip(*map(batch_of, range(BATCHES)), strict=True))
        print(f"of all samples at once: AUC {auc(logits, labels):.4f}, NE {normalized_entropy(logits, labels):.4f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

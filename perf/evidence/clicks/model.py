"""Clicks that a hidden model makes, and the DLRM that learns them, in TorchRec or shardwise.

A batch is that of all ranks, of which each takes its samples: runs on other numbers of ranks see the same ones.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.perf.suite.cases.sharded_sides import Shape, collection_of, fill, keys_of, plan_of
from shardwise.perf.suite.libraries import Library

# B: samples of all ranks in a step; L: ids of a bag on average
SHAPE = Shape(T=4, R=2000, D=16, B=128, L=2)
DENSE, LR, HEAD_LR = 4, 0.02, 0.05
# log odds of a click without anything known
BIAS = -1.5
SPARSE = "sparse_arch.embedding_bag_collection"


def quiet() -> None:
    """Without what torch is about to drop, on this rank."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)


class Batch(NamedTuple):
    """Samples of a rank: dense inputs [B, 4], ids and lengths [T * B] of their bags, clicks [B]."""

    dense: Tensor
    ids: Tensor
    lengths: Tensor
    clicks: Tensor


class Clicks:
    """Generated clicks: ids are the rarer the larger, a click hangs on its ids and dense inputs."""

    def __init__(self, seed: int, shape: Shape = SHAPE) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.seed, self.shape = seed, shape
        self._of_ids = torch.randn(shape.T, shape.R, generator=generator) * 0.4
        self._of_dense = torch.randn(DENSE, generator=generator) * 0.5

    def batch(self, step: int) -> Batch:
        """What this rank takes of the batch of a step; negative steps are held out."""
        shape, rank, ranks = self.shape, dist.get_rank(), dist.get_world_size()
        generator = torch.Generator().manual_seed(10**6 * (self.seed + 1) + step)
        lengths = torch.randint(0, 2 * shape.L + 1, (shape.T, shape.B), generator=generator)
        dense = torch.randn(shape.B, DENSE, generator=generator)
        # bags of the most ids, of which the first count
        drawn = torch.rand(shape.T, shape.B, 2 * shape.L, generator=generator).pow_(3)
        ids, counts = (drawn * shape.R).long(), torch.arange(2 * shape.L) < lengths[:, :, None]
        of_ids = self._of_ids[torch.arange(shape.T)[:, None, None], ids].mul_(counts).sum((0, 2))
        odds = BIAS + of_ids * (2 / shape.T**0.5 / shape.L) + dense @ self._of_dense
        clicks = torch.rand(shape.B, generator=generator) < odds.sigmoid()
        own = slice(rank * shape.B // ranks, (rank + 1) * shape.B // ranks)
        return Batch(dense[own], ids[:, own][counts[:, own]], lengths[:, own].flatten(), clicks[own].float())


class Run(NamedTuple):
    """How a DLRM is trained: the plan of its tables, their optimizer, the types of sums and gradients between ranks.

    A smooth one has tanh where DLRM has ReLU. At a kink the last bit of a sum near 0 decides about a whole gradient,
    so two correct runs of thousands of steps part there sooner or later.
    """

    strategy: str
    optimizer: str
    exchange: tuple[str, str] = ("fp32", "fp32")
    smooth: bool = False


def dlrm(side: Library, how: Run, *, shape: Shape = SHAPE, seed: int = 0) -> tuple[nn.Module, Any]:
    """The model in DistributedModelParallel and the optimizer of all of it; the head has SGD.

    Of another `seed` it begins with other numbers, and its tables lie elsewhere.
    """
    collection = collection_of(side, shape, how.optimizer, LR)
    torch.manual_seed(seed)
    model = side.DLRM(collection, DENSE, [32, shape.D], [32, 1])
    if how.smooth:
        layers = [layer for layer in model.modules() if hasattr(layer, "_activation_fn")]
        assert layers, "nothing in DLRM has an _activation_fn: its ReLUs would stay"
        for layer in layers:
            layer._activation_fn = torch.tanh
    of_tables = plan_of(side, collection, shape, how.strategy, dist.get_world_size(), first=seed)
    forward, backward = (side.CommType[kind.upper()] for kind in how.exchange)
    codecs = side.get_qcomm_codecs_registry(side.QCommsConfig(forward, backward))
    made = side.DistributedModelParallel(
        model, env=side.ShardingEnv.from_process_group(dist.group.WORLD), device=torch.device("cpu"),
        plan=side.ShardingPlan(plan={SPARSE: of_tables}),
        sharders=[side.EmbeddingBagCollectionSharder(qcomm_codecs_registry=codecs)],
    )  # fmt: skip
    if side.peer:
        fill(made, shape)
    head = dict(side.in_backward_optimizer_filter(made.named_parameters()))
    sgd = side.KeyedOptimizerWrapper(head, partial(torch.optim.SGD, lr=HEAD_LR))
    return made, side.CombinedOptimizer([made.fused_optimizer, sgd])


def logits(side: Library, model: nn.Module, batch: Batch) -> Tensor:
    """Log odds [B] of clicks."""
    features = side.KeyedJaggedTensor(keys=keys_of(SHAPE), values=batch.ids, lengths=batch.lengths)
    return model(batch.dense, features).squeeze(1)  # type: ignore[no-any-return]


def train(side: Library, model: nn.Module, optimizer: Any, clicks: Clicks, steps: Sequence[int]) -> Tensor:
    """The loss of this rank's samples in each of these steps."""
    losses = torch.empty(len(steps), dtype=torch.float64)
    for n, step in enumerate(steps):
        batch = clicks.batch(step)
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(logits(side, model, batch), batch.clicks)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses[n] = loss.detach()
    return losses


@torch.no_grad()
def entropy(side: Library, model: nn.Module, clicks: Clicks, batches: int) -> tuple[float, float]:
    """Normalized entropy on held-out batches (He et al. 2014, "Practical Lessons from Predicting Clicks on Ads at
    Facebook": mean log loss over that of the share of clicks alone), and this share.
    """
    sums = torch.zeros(3, dtype=torch.float64)
    model.eval()
    for batch in (clicks.batch(-1 - n) for n in range(batches)):
        odds = logits(side, model, batch).double()
        loss = nn.functional.binary_cross_entropy_with_logits(odds, batch.clicks.double(), reduction="sum")
        sums += torch.stack([loss, batch.clicks.double().sum(), torch.tensor(float(len(odds)), dtype=torch.float64)])
    model.train()
    dist.all_reduce(sums)
    loss, clicked, samples = sums.tolist()
    share = clicked / samples
    alone = torch.special.entr(torch.tensor([share, 1 - share], dtype=torch.float64)).sum()
    return loss / samples / float(alone), share

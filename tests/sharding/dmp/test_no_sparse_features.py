"""Models without sparse features, as a program's settings make them: tables of none, or no collection at all."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import Tensor, nn

from shardwise import (
    Batch,
    CombinedOptimizer,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingCollection,
    KeyedJaggedTensor,
    KeyedOptimizerWrapper,
    ShardingPlan,
    TrainPipelineSparseDist,
)
from shardwise.data import RandomRecDataset
from shardwise.models import DenseArch, InteractionArch, OverArch
from shardwise.sharding import construct_module_sharding_plan

pytestmark = pytest.mark.ranks


class Dense(nn.Module):
    """A model whose collections have no tables."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.bags, self.rows = EmbeddingBagCollection([]), EmbeddingCollection([])
        self.over = nn.Linear(3, 1)

    def forward(self, features: KeyedJaggedTensor, dense: Tensor) -> Tensor:
        assert not self.rows(features)
        return self.over(torch.cat([dense, self.bags(features).values()], 1))  # type: ignore[no-any-return]


class DenseDLRM(nn.Module):
    """DLRM of dense features alone: its layers without a sparse one. `Batch -> (loss, logits)`."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.dense_arch, self.inter_arch, self.over_arch = DenseArch(3, [6, 4]), InteractionArch(0), OverArch(4, [5, 1])

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        dense = self.dense_arch(batch.dense_features)
        logits = self.over_arch(self.inter_arch(dense, dense.new_empty(len(dense), 0, 4))).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels.float()), logits.detach()


def no_features(samples: int | None = None) -> KeyedJaggedTensor:
    return KeyedJaggedTensor([], torch.empty(0, dtype=torch.int64), lengths=torch.empty(0).long(), stride=samples)


def without_tables(planned: bool) -> None:
    alone, inner = Dense(), Dense()
    plan = ShardingPlan({name: construct_module_sharding_plan(getattr(inner, name), {}) for name in ("bags", "rows")})
    model = DistributedModelParallel(inner, plan=None if planned else plan)
    dense = torch.arange(6.0).view(2, 3)
    for features in (KeyedJaggedTensor(["x"], torch.tensor([1, 2]), lengths=torch.tensor([2, 0])), no_features(2)):
        outputs = [each(features, dense) for each in (alone, model)]
        torch.testing.assert_close(*outputs, rtol=0, atol=0)
        for output in outputs:
            output.sum().backward()
    grads = [[param.grad for param in each.parameters()] for each in (alone, model)]
    torch.testing.assert_close(*grads, rtol=0, atol=0)
    torch.testing.assert_close(dict(model.state_dict()), dict(alone.state_dict()), rtol=0, atol=0)


def whole_and_share(samples: int, with_samples: bool) -> tuple[Batch, Batch]:
    """A batch, and this rank's equal share of it, whose features may not know how many samples there are."""
    (whole,) = RandomRecDataset([], samples, num_dense=3, manual_seed=1, num_batches=1)
    rank, share = dist.get_rank(), samples // dist.get_world_size()
    mine = slice(rank * share, (rank + 1) * share)
    features = no_features(share if with_samples else None)
    return whole, Batch(whole.dense_features[mine], features, whole.labels[mine])


def dlrm_without_features(with_samples: bool) -> None:
    whole, share = whole_and_share(8, with_samples)
    alone = DenseDLRM()
    model = DistributedModelParallel(copy.deepcopy(alone))
    assert model.plan.plan == {} and not list(model.fused_optimizer.param_groups)
    dense: Any = KeyedOptimizerWrapper(dict(model.named_parameters()), lambda params: torch.optim.SGD(params, lr=0.5))
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    pipeline: Any = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
    batches, steps = iter([share] * 3), torch.optim.SGD(alone.parameters(), lr=0.5)
    for _ in range(3):
        steps.zero_grad()
        loss, logits = alone(whole)
        loss.backward()
        steps.step()
        mine = slice(dist.get_rank() * len(share.labels), (dist.get_rank() + 1) * len(share.labels))
        torch.testing.assert_close(pipeline.progress(batches), logits[mine])
    torch.testing.assert_close(dict(model.state_dict()), dict(alone.state_dict()))
    model.load_state_dict(model.state_dict())
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize("planned", [True, False])
def test_collections_of_no_tables_are_ordinary_modules(planned: bool) -> None:
    run_ranks(2, without_tables, planned)


@pytest.mark.parametrize("with_samples", [True, False])
def test_the_dense_layers_of_dlrm_train_on_ranks_as_in_one_process(with_samples: bool) -> None:
    run_ranks(2, dlrm_without_features, with_samples)

"""Feature-processed collections in pipelines: run ahead where nothing of the processors is trained, else named."""

from __future__ import annotations

import warnings
from itertools import product
from typing import Any

import pytest
import torch
from model_zoo import Batch, Net, batch_of, dense_optimizer, drain, plain_loop, same, state_of
from ranks import run_ranks
from test_managed_collision_ranks import Net as Mapped
from test_managed_collision_ranks import batch_of as ids_of
from test_managed_collision_ranks import plan_of, span
from torch import Tensor, nn

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    RowWiseAdagrad,
    ShardingPlan,
    apply_optimizer_in_backward,
    construct_module_sharding_plan,
)
from shardwise.embeddings import (
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from shardwise.sharding import EvalPipelineSparseDist, row_wise, table_wise
from shardwise.sharding.pipeline import PrefetchTrainPipelineSparseDist, TrainPipelineSparseDist

pytestmark = pytest.mark.ranks
PIPELINES: dict[str, Any] = {
    "sparse_dist": TrainPipelineSparseDist, "prefetch": PrefetchTrainPipelineSparseDist, "eval": EvalPipelineSparseDist,
}  # fmt: skip


class Processed(Net):
    """A feature-processed collection on a part of the batch."""

    def __init__(self, kind: str) -> None:
        super().__init__("")
        tables = [EmbeddingBagConfig(40, 8, f"t{n}", feature_names=[f"f{n}"]) for n in range(4)]
        processors: Any = {f"f{n}": PositionWeightedModule(3) for n in range(4)}
        if "collection" in kind:
            processors = PositionWeightedModuleCollection({f"f{n}": 3 for n in range(4)})
        weights = list(processors.parameters() if "collection" in kind else nn.ModuleDict(processors).parameters())
        for weight in weights:
            nn.init.uniform_(weight, 0.5, 1.5)
            weight.requires_grad_("frozen" not in kind)
        self.processed = FeatureProcessedEmbeddingBagCollection(
            EmbeddingBagCollection(tables, is_weighted=True), processors
        )

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        found = self.processed(batch.pooled).values().view(-1, 4, 8).sum(1) + self.dense(batch.dense)
        out = self.over(found.tanh()).squeeze(1)
        return (out * out).sum() / 8, out


def sharded(kind: str) -> Any:
    model = Processed(kind)
    tables = model.processed._embedding_bag_collection
    apply_optimizer_in_backward(RowWiseAdagrad, tables.parameters(), {"lr": 0.1})
    how = {"t0": table_wise(rank=0), "t1": table_wise(rank=1), "t2": row_wise(), "t3": row_wise()}
    plan = construct_module_sharding_plan(tables, how, world_size=2, local_size=2, device_type="cpu")
    return DistributedModelParallel(model, plan=ShardingPlan({"processed": plan}))


def beside_a_plain_loop(kind: str, pipeline: str) -> tuple[bool, list[str], int]:
    """Whether outputs and state are the plain loop's, what was warned of, and how many batches left ahead."""
    plain, piped = sharded(kind), sharded(kind)
    steps, ahead = 8, [0]
    if pipeline == "eval":
        with torch.no_grad():
            expected = [plain(batch_of(step))[1] for step in range(steps)]
    else:
        expected = plain_loop(plain, (batch_of(step) for step in range(steps)))
    tables = piped.module.processed._embedding_bag_collection
    depart = tables.depart

    def counted(features: KeyedJaggedTensor) -> Any:
        ahead[0] += not piped.module.forwards
        return depart(features)

    piped.module.forwards = 0
    piped.module.register_forward_pre_hook(lambda module, _: setattr(module, "forwards", module.forwards + 1))
    piped.module.register_forward_hook(lambda module, *_: setattr(module, "forwards", module.forwards - 1))
    tables.depart = counted
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        one = PIPELINES[pipeline](piped, dense_optimizer(piped), torch.device("cpu"), pipeline_postproc=True)
        outputs = drain(one.progress, (batch_of(step) for step in range(steps)))
    if pipeline == "eval":
        outputs = [out[1] if isinstance(out, tuple) else out for out in outputs]
    left, right = state_of(plain), state_of(piped)
    good = same(expected, outputs) and all(torch.equal(value, right[key]) for key, value in left.items())
    return good, [str(w.message) for w in caught if "not pipelined" in str(w.message)], ahead[0]


@pytest.mark.parametrize(
    ("kind", "pipeline"),
    [
        ("trained", "prefetch"),
        ("frozen", "prefetch"),
        ("frozen collection", "eval"),
        *(
            pytest.param(kind, pipeline, marks=pytest.mark.long)
            for kind, pipeline in product(("trained", "frozen", "frozen collection"), PIPELINES)
        ),
    ],
)
def test_a_feature_processed_collection_has_the_bits_of_the_plain_loop(kind: str, pipeline: str) -> None:
    """It was said that its input does not depend on the batch: an error of the trace went for a batch."""
    for good, said, ahead in run_ranks(2, beside_a_plain_loop, kind, pipeline):
        assert good
        assert len(said) == int(kind == "trained") and bool(ahead) == (kind != "trained")
        for one in said:
            assert "it needs parameters that are trained, ['processed._feature_processors.f0" in one
            assert "does not depend on the batch" not in one


def said_of_hashed_ids() -> list[str]:
    """What a pipeline says of a collection that hashes its ids itself, which fx does not trace."""
    model = Mapped(True)
    dmp = DistributedModelParallel(model, plan=plan_of(model, "mixed"))
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1)

    def step(batch: KeyedJaggedTensor) -> tuple[Any, None]:
        return sum(out.sum() for out in dmp(batch)), None

    pipeline: Any = PrefetchTrainPipelineSparseDist(dmp, optimizer, "cpu", custom_model_fwd=step)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipeline.progress(iter([ids_of(number, *span()) for number in range(3)]))
    return [str(one.message) for one in caught if "not pipelined" in str(one.message)]


def test_an_error_of_the_trace_is_no_batch() -> None:
    """Managed collision with an `input_hash_func`, too, was said to have an input that does not depend on the batch."""
    for (said,) in run_ranks(2, said_of_hashed_ids):
        assert "what makes it of the batch cannot run ahead: symbolically traced variables cannot be used" in said

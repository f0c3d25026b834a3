"""Feature-processed collections in a pipeline: ids leave ahead, and weights that processors make follow in the step.

Every way to cut a table, averages, and batches that are bad on one rank.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from model_zoo import Batch, Net, bag_tables, batch_of, dense_optimizer, drain, fused, plain_loop, same, state_of
from pipeline_runs import CPU
from ranks import error_of, run_ranks
from torch import Tensor, nn

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    JaggedTensor,
    KeyedJaggedTensor,
    PoolingType,
    RowWiseAdagrad,
    ShardingPlan,
    TrainPipelineSparseDist,
    construct_module_sharding_plan,
)
from shardwise.embeddings import FeatureProcessedEmbeddingBagCollection, FeatureProcessor, PositionWeightedModule
from shardwise.sharding import column_wise, data_parallel, row_wise, table_row_wise, table_wise

pytestmark = pytest.mark.ranks

LONGEST, ROWS = 3, 40
PLANS: dict[str, list[Any]] = {
    "mix": [table_wise(1), row_wise(), column_wise([0, 1]), data_parallel()],
    "rows": [row_wise(), row_wise(), table_row_wise(0), row_wise()],
}


class Derived(PositionWeightedModule):
    """May do what it likes to its feature."""


class Doubles(FeatureProcessor):
    """Says that it weighs, and asks for every id twice."""

    only_weighs = True

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        ids = features.values().repeat_interleave(2)
        return JaggedTensor(ids, self.factor.expand(ids.shape[0]), lengths=features.lengths() * 2)


class Processed(Net):
    """A feature-processed collection on a part of the batch."""

    def __init__(self, pooling: PoolingType, first: type[Any] = PositionWeightedModule) -> None:
        super().__init__("")
        names = [f"f{n}" for n in range(4)]
        processors: dict[str, Any] = {name: PositionWeightedModule(LONGEST) for name in names}
        if first is not PositionWeightedModule:
            processors["f0"] = Doubles() if first is Doubles else first(LONGEST)
        tables = EmbeddingBagCollection(bag_tables(dict.fromkeys(names, ROWS), pooling=pooling), is_weighted=True)
        self.processed = FeatureProcessedEmbeddingBagCollection(tables, processors)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        hidden = self.processed(batch.pooled).values().view(-1, 4, 8).sum(1) + self.dense(batch.dense)
        out = self.over(hidden.tanh()).squeeze(1)
        return (out * out).sum() / 8, out


def made(plan: str, pooling: PoolingType, first: type[Any] = PositionWeightedModule) -> Any:
    model = Processed(pooling, first)
    tables = fused(model.processed._embedding_bag_collection, RowWiseAdagrad)
    generators = {f"tf{n}": generator for n, generator in enumerate(PLANS[plan])}
    made_plan = construct_module_sharding_plan(tables, generators, world_size=2, local_size=2, device_type="cpu")
    return DistributedModelParallel(model, plan=ShardingPlan({"processed": made_plan}))


def piped(model: Any, batches: Iterator[Batch]) -> tuple[list[Tensor], list[str]]:
    """Outputs, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipeline = TrainPipelineSparseDist(model, dense_optimizer(model), CPU)
        outputs = drain(pipeline.progress, batches)
    return outputs, [str(warning.message) for warning in caught if "not pipelined" in str(warning.message)]


def beside_a_loop(plan: str, pooling: PoolingType, vbe: bool) -> tuple[bool, list[str], bool]:
    """Whether bits are those of a plain loop, warnings, and whether position weights were trained."""
    plain, model = made(plan, pooling), made(plan, pooling)
    expected = plain_loop(plain, (batch_of(n, vbe=vbe) for n in range(6)))
    outputs, messages = piped(model, (batch_of(n, vbe=vbe) for n in range(6)))
    plain_state, piped_state = state_of(plain), state_of(model)
    positions = [value for name, value in piped_state.items() if "position_weight" in name]
    moved = bool(positions) and all(not torch.equal(value, torch.ones_like(value)) for value in positions)
    return (
        same(expected, outputs) and all(torch.equal(value, piped_state[name]) for name, value in plain_state.items()),
        messages,
        moved,
    )


@pytest.mark.parametrize("vbe", [False, True])
@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
@pytest.mark.parametrize("plan", PLANS)
def test_weights_that_follow_their_ids_train_to_the_bits_of_a_plain_loop(
    plan: str, pooling: PoolingType, vbe: bool
) -> None:
    assert run_ranks(2, beside_a_loop, plan, pooling, vbe) == [(True, [], True)] * 2


def too_long(batch: Batch) -> Batch:
    """The first bag has more ids than there are positions."""
    kjt, lengths = batch.pooled, batch.pooled.lengths().clone()
    extra = LONGEST + 1 - int(lengths[0])
    lengths[0] += extra
    ids = torch.cat([torch.zeros(extra, dtype=torch.int64), kjt.values()])
    batch.pooled = KeyedJaggedTensor(kjt.keys(), ids, None, lengths)
    return batch


def with_a_bad_bag(bad: int) -> tuple[str, bool]:
    """What is raised where rank 1 has a bag that no processor takes; and whether the other batches train as ever."""
    plain, model = made("mix", PoolingType.SUM), made("mix", PoolingType.SUM)
    expected = plain_loop(plain, (batch_of(n) for n in range(5) if n != bad))
    batches = (too_long(batch_of(n)) if n == bad and dist.get_rank() == 1 else batch_of(n) for n in range(5))
    pipeline, outputs = TrainPipelineSparseDist(model, dense_optimizer(model), CPU), list[Tensor]()
    for _ in range(bad):
        outputs.append(pipeline.progress(batches).detach().clone())
    error = error_of(pipeline.progress, batches)
    outputs += drain(pipeline.progress, batches)
    plain_state, piped_state = state_of(plain), state_of(model)
    return error, same(expected, outputs) and all(
        torch.equal(value, piped_state[name]) for name, value in plain_state.items()
    )


@pytest.mark.parametrize("bad", [0, 2])
def test_a_batch_that_a_processor_of_one_rank_refuses_fails_on_all(bad: int) -> None:
    """The ids of batch 2 are on all ranks by then: its weights are what tells them."""
    for error, good in run_ranks(2, with_a_bad_bag, bad):
        assert error.startswith("IndexError: rank 1: feature 'f0', sample 0: 4 ids, but there are weights for 3")
        assert good


def of_a_subclass() -> tuple[list[str], int]:
    outputs, messages = piped(made("mix", PoolingType.SUM, Derived), (batch_of(n) for n in range(3)))
    return messages, len(outputs)


def test_a_processor_that_does_not_say_that_it_weighs_alone_is_left_in_the_step() -> None:
    for messages, steps in run_ranks(2, of_a_subclass):
        assert steps == 3 and len(messages) == 1
        assert messages[0].startswith("module 'processed._embedding_bag_collection' is not pipelined")


def of_one_that_breaks_its_word() -> str:
    return error_of(piped, made("mix", PoolingType.SUM, Doubles), (batch_of(n) for n in range(3)))


def test_a_processor_that_changes_ids_though_it_said_it_would_not_is_an_error() -> None:
    for error in run_ranks(2, of_one_that_breaks_its_word):
        assert error.startswith("ValueError: rank 0: the batch that left ahead has other ids")

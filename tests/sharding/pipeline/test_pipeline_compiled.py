"""Pipelines that compile a model, or its backward: they train as a plain loop does.

Takes ten seconds: torch's compiler, with its eager backend, so that bits are those of the loop.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from model_zoo import Batch, Net, batch_of, dense_optimizer, drain, fused, plain_loop, same, sharded
from pipeline_runs import CPU, equal
from ranks import error_of, run_ranks

from shardwise import DistributedModelParallel, KeyedJaggedTensor, RowWiseAdagrad, ShardingEnv
from shardwise.sharding import TorchCompileConfig, TrainPipelinePT2, TrainPipelineSparseDistCompAutograd


def batches(count: int) -> Iterator[Batch]:
    """Of several sizes, none of them empty."""
    numbers = [n for n in range(4 * count) if n * 3 % 7 > 1][:count]
    return (batch_of(number, rank=0) for number in numbers)


def test_a_model_is_compiled_as_one_graph_in_the_step_that_was_chosen() -> None:
    """And trains on, with the bits of a plain loop: tables in the backward, dense layers by the optimizer."""
    graphs: list[int] = []
    said: list[str] = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(pipeline._iter)
        return graph.forward

    def doubled(batch: Batch) -> Batch:
        said.append("batch")
        features = batch.pooled
        batch.pooled = KeyedJaggedTensor(features.keys(), (features.values() * 2) % 40, None, features.lengths())
        return batch

    model, plain = (fused(Net("p"), RowWiseAdagrad) for _ in range(2))
    config = TorchCompileConfig(fullgraph=True, dynamic=None, backend=count, compile_on_iter=2)
    pipeline = TrainPipelinePT2[Batch, torch.Tensor](
        model, dense_optimizer(model), CPU, config,
        pre_compile_fn=lambda module: said.append(f"before {module is model}"),
        post_compile_fn=lambda module: said.append(f"after {module is model}"), input_transformer=doubled,
    )  # fmt: skip
    outputs = drain(pipeline.progress, batches(6))
    wanted = plain_loop(plain, map(doubled, batches(6)))
    assert same(wanted, outputs) and len(outputs) == 6
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    # no break; the second is that of sizes that change
    assert graphs == [2, 3]
    assert said[:7] == ["batch", "batch", "batch", "before True", "after True", "batch", "batch"]


def compiled_over_ranks() -> tuple[bool, int]:
    """Whether outputs and the model are those of a plain loop, and how often a graph broke."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, plain = sharded("p"), sharded("p")
    config = TorchCompileConfig(fullgraph=True, dynamic=None, backend="aot_eager", compile_on_iter=1)
    pipeline = TrainPipelinePT2[Batch, torch.Tensor](model, dense_optimizer(model), CPU, config, input_transformer=None)
    outputs = drain(pipeline.progress, (batch_of(n) for n in range(4)))
    breaks = sum(torch._dynamo.utils.counters["graph_break"].values())
    return same(plain_loop(plain, (batch_of(n) for n in range(4))), outputs) and equal(model, plain), breaks


@pytest.mark.ranks
def test_a_model_over_ranks_is_compiled_whole() -> None:
    assert run_ranks(2, compiled_over_ranks) == [(True, 0)] * 2


def test_a_step_that_will_never_be_is_refused() -> None:
    assert error_of(TorchCompileConfig, compile_on_iter=-1) == (
        "ValueError: compile_on_iter: must not be negative, got -1"
    )


def compiled_backward(is_alone: bool) -> tuple[bool, bool]:
    """Whether outputs and the model are those of a plain loop, and whether something was compiled."""
    graphs: list[Any] = []
    # a rank's process may have compiled the same for a test before
    torch._dynamo.reset()

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    def made() -> Any:
        if is_alone:
            return DistributedModelParallel(fused(Net("p"), RowWiseAdagrad), ShardingEnv.from_local(1, 0))
        return sharded("p", init_data_parallel=False)

    def given() -> Iterator[Batch]:
        return batches(3) if is_alone else (batch_of(n) for n in range(3))

    model, plain = made(), made()
    model._compiled_autograd_options = {"backend": count, "dynamic": True, "fullgraph": False}
    pipeline: Any = TrainPipelineSparseDistCompAutograd(model, dense_optimizer(model), CPU)
    outputs = drain(pipeline.progress, given())
    return same(plain_loop(plain, given()), outputs) and equal(model, plain), bool(graphs)


def test_a_compiled_backward_has_the_bits_of_a_plain_loop() -> None:
    assert compiled_backward(True) == (True, True)


@pytest.mark.ranks
@pytest.mark.full
def test_ranks_exchange_gradients_between_its_graphs() -> None:
    assert run_ranks(2, compiled_backward, False) == [(True, True)] * 2


def refused() -> str:
    model = sharded("p")
    return error_of(TrainPipelineSparseDistCompAutograd, model, dense_optimizer(model), CPU)


@pytest.mark.ranks
def test_layers_that_torch_reduces_outside_of_compiled_autograd_are_refused() -> None:
    assert run_ranks(1, refused)[0].startswith(
        "ValueError: modules ['_dmp_wrapped_module'] are DistributedDataParallel"
    )

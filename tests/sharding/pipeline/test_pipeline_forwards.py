"""A pipeline of one's own, made of TorchRec's parts: a traced model, arguments of the batch, routed forwards."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from model_zoo import batch_of, dense_optimizer, plain_loop, sharded
from ranks import run_ranks
from torch import Tensor, fx, nn

from shardwise import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from shardwise.sharding.dmp.tracing import Tracer
from shardwise.sharding.modules.placement import sharded_collections
from shardwise.sharding.pipeline import TrainPipelineSparseDist
from shardwise.sharding.pipeline.arguments import (
    ArgInfo,
    ArgInfoStepFactory,
    CallArgs,
    NodeArgsHelper,
    PrefetchTrainPipelineContext,
    TrainPipelineContext,
)
from shardwise.sharding.pipeline.forwards import (
    PipelinedForward,
    PrefetchEmbeddingPipelinedForward,
    PrefetchPipelinedForward,
)

step = ArgInfoStepFactory


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([step.noop()], {"a": [1, 2]}),
        ([step.get_item("a"), step.get_item(1)], 2),
        ([step.get_attr("real")], AttributeError),
        ([step.from_scalar(7)], 7),
        ([step.from_list([0, ArgInfo([step.get_item("a")])])], [0, [1, 2]]),
        ([step.from_dict({"x": ArgInfo([step.get_item("a")]), "y": 3})], {"x": [1, 2], "y": 3}),
        ([step.get_item("a"), step.postproc(sum)], 3),
        ([], None),
    ],
)
def test_steps_lead_from_the_batch_to_an_argument(steps: list[Any], expected: Any) -> None:
    if expected is AttributeError:
        with pytest.raises(AttributeError):
            ArgInfo(steps).process_steps({"a": [1, 2]})
    else:
        assert ArgInfo(steps).process_steps({"a": [1, 2]}) == expected


def test_steps_are_added_at_both_ends_and_compare_by_what_they_do() -> None:
    made = ArgInfo([step.get_item(0)]).add_step(step.get_item("a")).append_step(step.get_attr("real"))
    assert made == ArgInfo([step.get_item("a"), step.get_item(0), step.get_attr("real")])
    call = CallArgs([made], {"rest": ArgInfo([step.get_item("b")])})
    assert call.build_args_kwargs({"a": [5], "b": "c"}) == ([5], {"rest": "c"})


class Doubled(nn.Module):
    def forward(self, features: KeyedJaggedTensor, times: int) -> KeyedJaggedTensor:
        ids = features.values() * times
        return KeyedJaggedTensor(features.keys(), ids, lengths=features.lengths())


class Prepared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.doubled = Doubled()
        self.ebc = EmbeddingBagCollection([EmbeddingBagConfig(10, 4, "t", feature_names=["f"])])

    def forward(self, batch: dict[str, Any]) -> Tensor:
        return self.ebc(self.doubled(batch["parts"].features, times=2)).values()


class Parts:
    def __init__(self, features: KeyedJaggedTensor) -> None:
        self.features = features


def call_of(model: nn.Module, module: str) -> fx.Node:
    (node,) = [n for n in Tracer(["Doubled"]).trace(model).nodes if n.op == "call_module" and n.target == module]
    return node


@pytest.mark.parametrize("prepares", [False, True])
def test_a_call_that_the_model_prepares_is_found_only_with_postproc(prepares: bool) -> None:
    model, features = Prepared(), KeyedJaggedTensor(["f"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 2]))
    helper = NodeArgsHelper(model, TrainPipelineContext(), prepares)
    call, found = helper.get_node_args(call_of(model, "ebc"))
    assert found == int(prepares) and len(helper.pipelined_postprocs) == int(prepares)
    if prepares:
        (made,), _ = call.build_args_kwargs({"parts": Parts(features)})
        assert made.values().tolist() == [2, 4, 6]


def test_a_module_with_trained_parameters_is_no_step() -> None:
    model = Prepared()
    model.doubled.scale = nn.Parameter(torch.ones(1))
    assert NodeArgsHelper(model, TrainPipelineContext(), True).get_node_args(call_of(model, "ebc"))[1] == 0
    model.doubled.scale.requires_grad_(False)
    assert NodeArgsHelper(model, TrainPipelineContext(), True).get_node_args(call_of(model, "ebc"))[1] == 1


def by_hand(kind: str, steps: int) -> tuple[bool, str]:
    """Route each batch while the one before trains, as a user's own pipeline does it; the bits of a plain loop."""
    plain = plain_loop(sharded("pw"), iter([batch_of(number) for number in range(steps)]))
    model = sharded("pw")
    collections = sharded_collections(model.module)
    graph = Tracer([]).trace(model.module)
    calls = {str(node.target): node for node in graph.nodes if node.op == "call_module" and node.target in collections}
    assert set(calls) == set(collections)
    context: Any = (PrefetchTrainPipelineContext if "Prefetch" in kind else TrainPipelineContext)()
    helper = NodeArgsHelper(model.module, context, False)
    args = {}
    for path, node in calls.items():
        args[path], found = helper.get_node_args(node)
        assert found == 1
    forwards: dict[str, Any] = {}
    make = {
        one.__name__: one for one in (PipelinedForward, PrefetchPipelinedForward, PrefetchEmbeddingPipelinedForward)
    }
    for path, module in collections.items():
        forwards[path] = module.forward = make[kind](path, args[path], module, context)
    optimizer = dense_optimizer(model)

    def route(number: int) -> None:
        for path, module in collections.items():
            ctx = module.create_context()
            (features,), _ = args[path].build_args_kwargs(batch_of(number))
            request = module.input_dist(ctx, features).wait()
            if "Prefetch" in kind:
                context.module_contexts_post_prefetch[path] = ctx
                context.module_input_post_prefetch[path] = request.wait()
            else:
                context.module_contexts[path] = ctx
                context.input_dist_tensors_requests[path] = request

    outputs = []
    route(0)
    for number in range(steps):
        if "Embedding" in kind:
            for forward in forwards.values():
                forward.compute_and_output_dist()
        losses, output = model(batch_of(number))
        if number + 1 < steps:
            route(number + 1)
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        outputs.append(output.detach())
    with pytest.raises(RuntimeError) as raised:
        model(batch_of(0))
    return all(torch.equal(a, b) for a, b in zip(outputs, plain, strict=True)), str(raised.value)


@pytest.mark.parametrize("kind", ["PipelinedForward", "PrefetchPipelinedForward", "PrefetchEmbeddingPipelinedForward"])
def test_a_pipeline_by_hand_has_the_bits_of_a_plain_loop(kind: str) -> None:
    for equal, said in run_ranks(2, by_hand, kind, 4):
        assert equal
        assert "module 'pooled': " in said


def test_the_context_type_of_the_pipeline_itself_is_no_reason_to_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = nn.Linear(1, 1)
        TrainPipelineSparseDist(
            model, torch.optim.SGD(model.parameters(), 0.1), "cpu", True, False, TrainPipelineContext
        )

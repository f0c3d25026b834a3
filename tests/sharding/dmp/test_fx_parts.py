"""`torchrec.fx`: what a trace is told, markers in its graph, and tracers of whole models."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from jagged_batches import kjt
from ranks import run_ranks
from torch import Tensor, fx, nn

from shardwise import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    apply_optimizer_in_backward,
)
from shardwise.sharding.dmp.fx_parts import (
    assert_fx_safe,
    dmp_fx_trace_forward,
    fake_range,
    fx_marker,
    is_marker_node,
)
from shardwise.sharding.dmp.tracing import Tracer, is_fx_tracing, symbolic_trace
from shardwise.sharding.pipeline.tracing import Tracer as PipelineTracer

FEATURES = kjt({"a": [[1, 2], [3]]})


class Asking(nn.Module):
    """Adds one where TorchRec's tracer traces, and notes what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        self.told.append(is_fx_tracing())
        return x + 1 if is_fx_tracing() else x


def test_a_program_knows_whether_our_tracer_traces_it() -> None:
    model, x = Asking(), torch.zeros(2)
    assert torch.equal(symbolic_trace(model)(x), x + 1)
    assert torch.equal(fx.symbolic_trace(model)(x), x), "torch's own tracer is not this one"
    assert torch.equal(model(x), x)
    assert model.told == [True, False, False]

    def fails(x: Tensor) -> Tensor:
        raise ValueError(f"tracing: {is_fx_tracing()}")

    with pytest.raises(ValueError, match="tracing: True"):
        symbolic_trace(fails)
    assert not is_fx_tracing()


def halves(x: Tensor) -> Tensor:
    fx_marker("begin", x)
    half = x / 2
    fx_marker("end", half)
    return half


def test_markers_are_nodes_of_a_graph_and_nothing_where_it_runs() -> None:
    graph = symbolic_trace(halves)
    found = [(node.args[0], str(node.args[1])) for node in graph.graph.nodes if is_marker_node(node, "begin")]
    assert found == [("begin", "x")]
    order = [name for node in graph.graph.nodes for name in ("begin", "end") if is_marker_node(node, name)]
    assert order == ["begin", "end"]
    assert not any(is_marker_node(node, "middle") for node in graph.graph.nodes)
    x = torch.ones(2)
    assert torch.equal(graph(x), x / 2) and torch.equal(halves(x), x / 2)


def checked(x: Tensor) -> Tensor:
    assert_fx_safe(x.dim() == 1, "x must have one dim")
    return x * 2


def test_assertions_hold_where_nothing_traces() -> None:
    graph, flat, square = fx.symbolic_trace(checked), torch.ones(2), torch.ones(2, 2)
    assert torch.equal(checked(flat), flat * 2)
    with pytest.raises(AssertionError, match="one dim"):
        checked(square)
    assert torch.equal(graph(square), square * 2), "the graph has no assertion"


def test_a_range_of_no_file_serves_annotations_of_torchscript() -> None:
    kind: Any = torch.jit.annotations.try_ann_to_type(dict[str, Tensor], fake_range())  # type: ignore[attr-defined]
    assert str(kind) == "Dict[str, Tensor]"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ebc = EmbeddingBagCollection(
            tables=[EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["a"])]
        )
        self.over = nn.Sequential(nn.Linear(4, 2), nn.ReLU())
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, features: KeyedJaggedTensor, bias: Tensor | None = None, *, times: int = 3) -> Tensor:
        pooled = self.over(self.ebc(features).values())
        return pooled * self.scale * times + (0 if bias is None else bias)


def traced_by_arguments() -> dict[str, Any]:
    model = Model()
    apply_optimizer_in_backward(torch.optim.SGD, model.ebc.parameters(), {"lr": 0.1})
    dmp = DistributedModelParallel(model)
    tracer = Tracer()
    forward = dmp_fx_trace_forward(dmp, tracer)
    graph = tracer.trace(forward, concrete_args={"times": 3})
    module = fx.GraphModule(dmp, graph)
    bias = torch.ones(2)
    by_pipeline = [n.target.rpartition(".")[2] for n in PipelineTracer().trace(dmp).nodes if n.op == "call_module"]
    return {
        "signature": str(inspect.signature(forward)) == str(inspect.signature(model.forward)),
        "arguments": [node.target for node in graph.nodes if node.op == "placeholder"][:2],
        "graph": torch.equal(module(FEATURES, bias), dmp(FEATURES, bias)),
        "eager": torch.equal(forward(FEATURES, bias), dmp(FEATURES, bias)),
        "default": torch.equal(forward(FEATURES, times=1), dmp(FEATURES, times=1)),
        "pipeline": by_pipeline,
    }


@pytest.mark.ranks
def test_a_sharded_model_is_traced_by_its_own_arguments() -> None:
    for found in run_ranks(2, traced_by_arguments):
        assert found == {
            "signature": True, "arguments": ["features", "bias"], "graph": True, "eager": True, "default": True,
            "pipeline": ["ebc", "0", "1"],
        }  # fmt: skip


def calls_of(tracer: fx.Tracer, model: nn.Module) -> list[str]:
    return [str(node.target) for node in tracer.trace(model).nodes if node.op != "placeholder" and node.op != "output"]


class Reaching(nn.Module):
    """Calls a module inside of another one, and beside it one whose name begins alike."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.inner_too = Model(), Asking()
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner_too(self.inner.over(x)) * self.scale


def test_pipelines_trace_down_to_leaves_and_with_their_insides() -> None:
    model, x = Reaching(), torch.ones(1, 4)
    assert calls_of(PipelineTracer(["inner"]), model)[:2] == ["inner.over.0", "inner.over.1"]
    tracer = PipelineTracer(["inner"], extend_leaf_fqn=True)
    assert calls_of(tracer, model)[0] == "inner.over", "what lies below a leaf is one too"
    assert not any(call.startswith("inner_too") for call in calls_of(tracer, model))
    graph = tracer.trace(model)
    # buffers are values
    assert [node.target for node in graph.nodes if node.op == "get_attr"] in ([], ["_tensor_constant0"], ["scale"])
    assert torch.equal(fx.GraphModule(model, graph)(x), model(x) + 2), "inner_too adds one where it is traced"

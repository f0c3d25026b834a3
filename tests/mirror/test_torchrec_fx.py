"""torch.fx graphs of models with tables: collections are nodes, and the graph gives what the model gives."""

from __future__ import annotations

import pytest
import torch
from ranks import run_ranks
from torch import Tensor, nn

from shardwise import (
    DLRM,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
)
from shardwise.inference.quantize import quantize_inference_model
from shardwise.sharding.dmp.tracing import Tracer, symbolic_trace


def tables() -> EmbeddingBagCollection:
    torch.manual_seed(0)
    return EmbeddingBagCollection([EmbeddingBagConfig(10, 8, f"t{n}", feature_names=[f"f{n}"]) for n in range(3)])


class Sequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ec = EmbeddingCollection([EmbeddingConfig(10, 8, "t", feature_names=["f0"])])

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.ec(features)["f0"].values() * 2


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc, self.over = tables(), nn.Linear(24, 1)

    def forward(self, features: KeyedJaggedTensor) -> Tensor:
        return self.over(self.ebc(features).values())


FEATURES = KeyedJaggedTensor(["f0", "f1", "f2"], torch.tensor([1, 2, 3, 4, 5, 6]), lengths=torch.ones(6).long())


@pytest.mark.parametrize("make", [Mixed, Sequences, lambda: quantize_inference_model(Mixed())])
def test_a_collection_is_one_node_and_the_graph_gives_what_the_model_gives(make: type[nn.Module]) -> None:
    model = make()
    traced = symbolic_trace(model)
    assert any(node.op == "call_module" and node.target in ("ebc", "ec") for node in traced.graph.nodes)
    assert torch.equal(traced(FEATURES), model(FEATURES))


def test_dlrm_is_traced_down_to_its_tables() -> None:
    model = DLRM(tables(), 4, [8, 8], [8, 1])
    traced = symbolic_trace(model)
    calls = {str(node.target) for node in traced.graph.nodes if node.op == "call_module"}
    assert "sparse_arch.embedding_bag_collection" in calls and any("dense_arch.model" in call for call in calls)
    dense = torch.randn(2, 4)
    assert torch.equal(traced(dense, FEATURES), model(dense, FEATURES))


def test_modules_named_by_class_or_by_path_are_one_node_as_well() -> None:
    for named in ("Mixed", "inner"):
        model = nn.Sequential()
        model.add_module("inner", Mixed())
        targets = [node.target for node in Tracer([named]).trace(model).nodes if node.op == "call_module"]
        assert targets == ["inner"]


def traced_when_sharded() -> tuple[bool, list[str]]:
    model = DistributedModelParallel(Mixed())
    traced = symbolic_trace(model)
    same = torch.equal(traced(FEATURES), model(FEATURES))
    return same, [str(node.target) for node in traced.graph.nodes if node.op == "call_module"]


def test_a_sharded_model_is_traced_through_its_wrapper() -> None:
    for same, targets in run_ranks(2, traced_when_sharded):
        assert same
        assert [target.rpartition(".")[2] for target in targets] == ["ebc", "over"]
        assert all(target.startswith("_dmp_wrapped_module.") for target in targets)

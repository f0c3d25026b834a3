"""Everything that reads data is one node, or traced through, in graphs of torch.fx: with equal values and gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from shardwise.embeddings import (
    EmbeddingTower,
    EmbeddingTowerCollection,
    FeatureProcessedEmbeddingBagCollection,
    FeatureProcessorDictWrapper,
    FusedEmbeddingBagCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from shardwise.embeddings.collections import position_weights
from shardwise.embeddings.managed_collision import (
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    MCHManagedCollisionModule,
)
from shardwise.inference.quantize import quantize_embeddings
from shardwise.jagged import (
    ComputeJTDictToKJT,
    ComputeKJTToJTDict,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    KTRegroupAsDict,
)
from shardwise.jagged.tracing import JaggedTensorMeta
from shardwise.models import (
    DLRM,
    DLRM_DCN,
    MLP,
    CrossNet,
    DLRM_Projection,
    DLRMTrain,
    LowRankCrossNet,
    LowRankMixtureCrossNet,
    SimpleDeepFMNN,
    SparseArch,
    VectorCrossNet,
)
from shardwise.sharding.dmp.tracing import symbolic_trace

JT = JaggedTensor(torch.arange(6), lengths=torch.tensor([2, 4]))


class Spans(metaclass=JaggedTensorMeta):
    """A jagged type of a program's own."""

    def __init__(self, values: Tensor, name: str = "") -> None:
        # a proxy has no items to iterate over
        self.first, self.name = float(values[0]), name

    def doubled(self) -> float:
        return 2 * self.first


def test_a_jagged_type_of_ones_own_is_recorded_where_it_is_made_of_proxies() -> None:
    assert type(KeyedJaggedTensor) is type(JaggedTensor) is type(KeyedTensor) is JaggedTensorMeta

    class Net(nn.Module):
        def forward(self, values: Tensor) -> Any:
            return Spans(values, name="a").doubled() + Spans(torch.ones(1)).first

    traced = symbolic_trace(Net())
    assert [node.target for node in traced.graph.nodes if node.op == "call_function"][0] is Spans
    assert traced(torch.tensor([3.0])) == Net()(torch.tensor([3.0])) == 7.0


def batch() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a", "b"], torch.arange(1, 7), torch.ones(6) / 4, torch.tensor([2, 0, 1, 3]))


def bags() -> list[EmbeddingBagConfig]:
    return [EmbeddingBagConfig(10, 4, name, feature_names=[key]) for name, key in (("t", "a"), ("u", "b"))]


def sequences() -> list[EmbeddingConfig]:
    return [EmbeddingConfig(10, 4, name, feature_names=[key]) for name, key in (("t", "a"), ("u", "b"))]


def ebc(is_weighted: bool = False) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(bags(), is_weighted)


def id_map() -> MCHManagedCollisionModule:
    return MCHManagedCollisionModule(10, "cpu", LFU_EvictionPolicy(), eviction_interval=2)


def id_maps(tables: Any) -> ManagedCollisionCollection:
    return ManagedCollisionCollection({"t": id_map(), "u": id_map()}, tables)


class Derived(EmbeddingBagCollection):
    """More around the forward of ours, which must run once."""

    def forward(self, features: KeyedJaggedTensor) -> Tensor:  # type: ignore[override]
        return super().forward(features).values() * 2


class Inside(nn.Module):
    """As a child, as models hold it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, features: Any) -> Any:
        return self.module(features)


class Values(nn.Module):
    def forward(self, pooled: KeyedTensor) -> Tensor:
        return pooled.values()


class Types(nn.Module):
    """Constructors and methods of the jagged types."""

    def __init__(self) -> None:
        super().__init__()
        self.group = KTRegroupAsDict([["q"], ["r", "p"]], ["x", "y"])

    def forward(self, kjt: KeyedJaggedTensor, values: Tensor, lengths: Tensor) -> list[Any]:
        made = KeyedJaggedTensor.from_lengths_sync(["x"], values, lengths)
        from_offsets = KeyedJaggedTensor.from_offsets_sync(["y"], values, made.offsets())
        jt = JaggedTensor(values, lengths=lengths)
        dense = values.view(3, 2).float()
        kts = [KeyedTensor(["p", "q"], [1, 1], dense), KeyedTensor.from_tensor_list(["r"], [dense])]
        return [
            kjt.permute([1, 0]), kjt.split([1, 1])[0], kjt["b"], kjt.to_dict()["a"].to_dense()[0],
            jt.to_padded_dense(3), JaggedTensor.from_dense([values, values]),
            JaggedTensor.from_dense_lengths(values.view(2, 3), lengths),
            KeyedTensor.regroup(kts, [["q", "r"], ["p"]]), KeyedTensor.regroup_as_dict(kts, [["q"], ["r"]], ["A", "B"]),
            KeyedJaggedTensor.empty_like(kjt), KeyedJaggedTensor.concat([made, from_offsets]),
            KeyedJaggedTensor.from_jt_dict({"z": jt}),
            KeyedJaggedTensor.dist_init(["a"], [lengths, values], False, 1, None, [2]),
            self.group(kts), kts[0]["p"], kts[0].to_dict()["q"],
        ]  # fmt: skip


class Batch:
    dense_features = torch.rand(2, 3)
    sparse_features = batch()
    labels = torch.tensor([0.0, 1.0])


DENSE = torch.rand(3, 4)
CASES: dict[str, Callable[[], tuple[nn.Module, tuple[Any, ...]]]] = {
    "jagged types": lambda: (Types(), (batch(), torch.arange(6), torch.tensor([3, 3]))),
    "bags": lambda: (ebc(), (batch(),)),
    "weighted bags": lambda: (ebc(True), (batch(),)),
    "derived": lambda: (Derived(bags()), (batch(),)),
    "derived inside": lambda: (Inside(Derived(bags())), (batch(),)),
    "rows": lambda: (EmbeddingCollection(sequences()), (batch(),)),
    "rows inside": lambda: (Inside(EmbeddingCollection(sequences())), (batch(),)),
    "fused": lambda: (FusedEmbeddingBagCollection(bags(), torch.optim.SGD, {"lr": 0.1}), (batch(),)),
    "quantized": lambda: (quantize_embeddings(Inside(ebc()), torch.int8, inplace=False), (batch(),)),
    "position weights": lambda: (PositionWeightedModule(5), (JT,)),
    "position weights of a batch": lambda: (PositionWeightedModuleCollection({"a": 5, "b": 5}), (batch(),)),
    "processors": lambda: (FeatureProcessorDictWrapper(nn.ModuleDict({"a": PositionWeightedModule(5)})), (batch(),)),
    "processed": lambda: (
        FeatureProcessedEmbeddingBagCollection(
            ebc(True), {"a": PositionWeightedModule(5), "b": PositionWeightedModule(5)}
        ), (batch(),),
    ),
    "processed by one": lambda: (
        FeatureProcessedEmbeddingBagCollection(ebc(True), PositionWeightedModuleCollection({"a": 5, "b": 5})),
        (batch(),),
    ),
    "older position weights": lambda: (position_weights.PositionWeightedModule({"a": 5}), ({"a": JT},)),
    "older processor": lambda: (position_weights.PositionWeightedProcessor({"a": 5}), (batch().permute([0]),)),
    "id map": lambda: (id_map(), ({"t": JT},)),
    "id maps": lambda: (id_maps(bags()), (batch(),)),
    "managed bags": lambda: (
        ManagedCollisionEmbeddingBagCollection(ebc(), id_maps(bags()), return_remapped_features=True), (batch(),),
    ),
    "managed rows": lambda: (
        Inside(ManagedCollisionEmbeddingCollection(EmbeddingCollection(sequences()), id_maps(sequences()))), (batch(),),
    ),
    "tower": lambda: (Inside(EmbeddingTower(ebc(), Values())), (batch(),)),
    "towers": lambda: (EmbeddingTowerCollection([EmbeddingTower(ebc(), Values())]), (batch(),)),
    "to dict": lambda: (ComputeKJTToJTDict(), (batch(),)),
    "from dict": lambda: (ComputeJTDictToKJT(), ({"a": JT},)),
    "regroup": lambda: (
        KTRegroupAsDict([["b"], ["a"]], ["x", "y"]), ([KeyedTensor(["a", "b"], [1, 2], torch.rand(2, 3))],),
    ),
    "cross": lambda: (CrossNet(4, 2), (DENSE,)),
    "low rank cross": lambda: (LowRankCrossNet(4, 2), (DENSE,)),
    "vector cross": lambda: (VectorCrossNet(4, 2), (DENSE,)),
    "mixture cross": lambda: (LowRankMixtureCrossNet(4, 2, 2), (DENSE,)),
    "mlp": lambda: (MLP(4, [3, 2], activation="swish_layernorm"), (DENSE,)),
    "sparse arch": lambda: (SparseArch(ebc()), (batch(),)),
    "dlrm": lambda: (DLRM(ebc(), 3, [8, 4], [5, 1]), (torch.rand(2, 3), batch())),
    "dlrm, cross": lambda: (DLRM_DCN(ebc(), 3, [8, 4], [5, 1], 2, 2), (torch.rand(2, 3), batch())),
    "dlrm, projections": lambda: (DLRM_Projection(ebc(), 3, [8, 4], [5, 1], [8], [8]), (torch.rand(2, 3), batch())),
    "dlrm and loss": lambda: (DLRMTrain(DLRM(ebc(), 3, [8, 4], [5, 1])), (Batch(),)),
    "deepfm": lambda: (SimpleDeepFMNN(3, ebc(), 4, 5), (torch.rand(2, 3), batch())),
}  # fmt: skip
TRACERS = {"torch": torch.fx.symbolic_trace, "alias": symbolic_trace}


def tensors_of(output: Any) -> list[Tensor]:
    """All tensors of a nested output, in order."""
    if isinstance(output, Tensor):
        return [output]
    if isinstance(output, (KeyedJaggedTensor, JaggedTensor)):
        weights = output.weights_or_none()
        return [output.values(), output.lengths(), *([] if weights is None else [weights])]
    if isinstance(output, KeyedTensor):
        return [output.values()]
    if isinstance(output, dict):
        output = list(output.values())
    return [tensor for part in output for tensor in tensors_of(part)] if isinstance(output, (list, tuple)) else []


def assert_same(actual: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(actual) == len(wanted) > 0
    for one, other in zip(actual, wanted, strict=True):
        assert torch.equal(one, other)


def trained(module: nn.Module, outputs: list[Tensor]) -> dict[str, Tensor]:
    """Gradients, or where an optimizer takes them the weights, after a backward of the sum of squares."""
    learned = [tensor.float().square().sum() for tensor in outputs if tensor.requires_grad]
    if learned:
        torch.stack(learned).sum().backward()  # type: ignore[no-untyped-call]
    # a root is a child of its graph
    named = {name.removeprefix("itself."): param for name, param in module.named_parameters()}
    return {name: param.detach() if param.grad is None else param.grad for name, param in named.items()}


@pytest.mark.parametrize("tracer", TRACERS.values(), ids=TRACERS.keys())
@pytest.mark.parametrize("make", CASES.values(), ids=CASES.keys())
def test_a_traced_module_gives_the_values_and_gradients_of_the_module(make: Any, tracer: Any) -> None:
    module, inputs = make()
    traced = tracer(copy.deepcopy(module))
    again = copy.deepcopy(traced)
    wanted = tensors_of(module(*inputs))
    actual = tensors_of(traced(*inputs))
    assert_same(actual, wanted)
    assert_same(tensors_of(again(*inputs)), wanted)
    gradients, of_traced = trained(module, wanted), trained(traced, actual)
    assert gradients.keys() == of_traced.keys()
    for name, gradient in gradients.items():
        assert torch.equal(of_traced[name], gradient), name


def test_a_collection_is_one_node_that_programs_find() -> None:
    traced = torch.fx.symbolic_trace(DLRM(ebc(), 3, [8, 4], [5, 1]))
    found = [traced.get_submodule(str(n.target)) for n in traced.graph.nodes if n.op == "call_module"]
    assert [type(module) for module in found].count(EmbeddingBagCollection) == 1
    keys = set(traced.state_dict())
    assert {f"sparse_arch.embedding_bag_collection.embedding_bags.{table}.weight" for table in "tu"} <= keys


def test_a_graph_of_id_maps_learns_ids_when_it_runs_and_not_when_it_is_traced() -> None:
    """What a trace would run once is the state of the maps: which ids have slots, and rows that begin anew."""
    module = ManagedCollisionEmbeddingBagCollection(ebc(), id_maps(bags()), return_remapped_features=True)
    twin = copy.deepcopy(module)
    traced = torch.fx.symbolic_trace(module)
    assert not module._managed_collision_collection.modules_by_table()["t"].batches_seen()
    for _ in range(3):
        assert_same(tensors_of(traced(batch())), tensors_of(twin(batch())))
    state, of_twin = module.state_dict(), twin.state_dict()
    for name, tensor in of_twin.items():
        assert torch.equal(state[name], tensor), name


def test_proxies_in_nested_arguments_are_recorded_too() -> None:
    class Sizes(nn.Module):
        def forward(self, values: Tensor) -> Tensor:
            jt = JaggedTensor(values, lengths=torch.full((1,), 3))
            return KeyedJaggedTensor.from_jt_dict({"x": jt}).permute([0, 0]).values()

    traced = torch.fx.symbolic_trace(Sizes())
    assert traced(torch.arange(3)).tolist() == [0, 1, 2, 0, 1, 2]


def test_a_module_outside_of_the_root_says_so() -> None:
    stray = ebc()
    with pytest.raises(NameError, match="not installed as a submodule"):
        torch.fx.symbolic_trace(lambda features: stray(features).values())

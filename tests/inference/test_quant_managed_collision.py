"""Quantized collections behind maps: slots of training, nothing learned after, the same bits on several devices."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    ParameterConstraints,
    apply_optimizer_in_backward,
    quant,
)
from shardwise.embeddings.managed_collision import (
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
    MCHManagedCollisionModule,
)
from shardwise.inference.quantize import quantize_inference_model
from shardwise.inference.sharded import shard_quant_model
from shardwise.sharding.quant.managed_collision import (
    QuantManagedCollisionEmbeddingBagCollectionSharder,
    QuantManagedCollisionEmbeddingCollectionSharder,
)

ROWS, DIM = 40, 64


def batch_of(step: int) -> KeyedJaggedTensor:
    draw = torch.Generator().manual_seed(step)
    lengths = torch.randint(0, 5, (3 * 6,), generator=draw)
    return KeyedJaggedTensor(
        ["g", "f", "h"], torch.randint(0, 60, (int(lengths.sum()),), generator=draw) * 2**40, lengths=lengths
    )


def trained(pooled: bool) -> Any:
    """A float collection behind maps that has seen some batches."""
    torch.manual_seed(0)
    config: Any = EmbeddingBagConfig if pooled else EmbeddingConfig
    tables = [config(ROWS, DIM, "a", feature_names=["f", "g"]), config(ROWS // 2, DIM, "b", feature_names=["h"])]
    inner: Any = EmbeddingBagCollection(tables) if pooled else EmbeddingCollection(tables)
    apply_optimizer_in_backward(torch.optim.SGD, inner.parameters(), {"lr": 0.1})
    maps = {
        "a": MCHManagedCollisionModule(ROWS, "cpu", LFU_EvictionPolicy(), 1),
        "b": MCHManagedCollisionModule(ROWS // 2, "cpu", LRU_EvictionPolicy(), 2),
    }
    make: Any = ManagedCollisionEmbeddingBagCollection if pooled else ManagedCollisionEmbeddingCollection
    module = make(inner, ManagedCollisionCollection(maps, tables))
    for step in range(5):
        rows, _ = module(batch_of(step))
        torch.autograd.backward([output.sum() for output in outputs(rows)])
    return module


def outputs(rows: Any) -> list[Tensor]:
    return [value if isinstance(value, Tensor) else value.values() for value in (rows[name] for name in "fgh")]


@pytest.mark.parametrize("dtype", [torch.int8, torch.quint4x2, torch.float16])
@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
def test_rows_are_those_of_the_quantized_collection_at_the_slots_of_training(pooled: bool, dtype: torch.dtype) -> None:
    module = trained(pooled)
    plain: Any = quantize_inference_model(copy.deepcopy(module._embedding_module), quantization_dtype=dtype)
    made: Any = quantize_inference_model(module, quantization_dtype=dtype)
    assert type(made).__name__ == f"QuantManagedCollisionEmbedding{'Bag' if pooled else ''}Collection"
    module.eval()
    learned = {name: value.clone() for name, value in module._managed_collision_collection.state_dict().items()}
    for mode in (False, True):
        made.train(mode)
        for step in range(3, 7):
            rows, slots = made(batch_of(step))
            expected = module._managed_collision_collection(batch_of(step))
            assert slots.keys() == ["f", "g", "h"] and torch.equal(slots.values(), expected.values())
            # some ids have no slot
            assert (slots.values() == ROWS - 1).any()
            assert all(torch.equal(a, b) for a, b in zip(outputs(rows), outputs(plain(slots)), strict=True))
    state = made.state_dict()
    assert all(torch.equal(value, state[f"_managed_collision_collection.{name}"]) for name, value in learned.items())


def test_the_float_module_goes_on_learning() -> None:
    module = trained(True)
    holder = nn.ModuleDict({"mc": copy.deepcopy(module)})
    quantized: Any = quantize_inference_model(holder)
    assert type(quantized["mc"]) is quant.QuantManagedCollisionEmbeddingBagCollection
    made = _quantized(module)
    before = {name: value.clone() for name, value in made.state_dict().items()}
    module(batch_of(9))
    assert module._managed_collision_collection.modules_by_table()["a"].batches_seen() == 6
    assert all(torch.equal(value, before[name]) for name, value in made.state_dict().items())


def _quantized(module: Any) -> Any:
    return quantize_inference_model(nn.ModuleList([copy.deepcopy(module)]))[0]  # type: ignore[index]


@pytest.mark.parametrize("how", ["state", "copy", "pickle", "moved"])
@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
def test_copies_give_the_same_bits(pooled: bool, how: str) -> None:
    made = _quantized(trained(pooled))
    if how == "state":
        torch.manual_seed(1)
        other = _quantized(trained(pooled))
        for buffer in other.buffers():
            buffer.zero_()
        other.load_state_dict(made.state_dict())
    else:
        other = pickle.loads(pickle.dumps(made)) if how == "pickle" else copy.deepcopy(made)
        other = other.to("cpu") if how == "moved" else other
    for step in range(4, 7):
        (rows, slots), (again, others) = made(batch_of(step)), other(batch_of(step))
        assert torch.equal(slots.values(), others.values())
        assert all(torch.equal(a, b) for a, b in zip(outputs(rows), outputs(again), strict=True))


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise"])
@pytest.mark.parametrize("pooled", [True, False], ids=["pooled", "sequence"])
def test_pieces_on_devices_give_the_bits_of_the_whole(pooled: bool, kind: str) -> None:
    made = _quantized(trained(pooled))
    constraints = {name: ParameterConstraints(sharding_types=[kind]) for name in ("a", "b")}
    model = nn.ModuleDict({"mc": copy.deepcopy(made)})
    sharded, plan = shard_quant_model(model, 2, "cpu", "cpu", constraints=constraints)
    mc: Any = sharded["mc"]  # type: ignore[index]
    assert type(mc).__name__ == f"ShardedQuantManagedCollisionEmbedding{'Bag' if pooled else ''}Collection"
    assert {sharding.sharding_type for sharding in plan.plan["mc"].values()} == {kind}  # type: ignore[attr-defined]
    assert set(mc.state_dict()) == set(made.state_dict())
    mc.train()
    # one node, with a tracer that does not know the class
    mc = torch.fx.symbolic_trace(nn.Sequential(mc))
    assert [node.op for node in mc.graph.nodes] == ["placeholder", "call_module", "output"]
    for step in range(4, 7):
        (rows, slots), (again, others) = made(batch_of(step)), mc(batch_of(step))
        assert torch.equal(slots.values(), others.values())
        assert all(torch.equal(a, b) for a, b in zip(outputs(rows), outputs(again), strict=True))


def test_what_does_not_fit_is_refused() -> None:
    table = EmbeddingBagConfig(ROWS, DIM, "a", feature_names=["f"], data_type=DataType.INT8)
    with pytest.raises(ValueError, match="takes a managed_collision_collection"):
        quant.QuantManagedCollisionEmbeddingBagCollection([table], False, "cpu")
    maps = trained(True)._managed_collision_collection
    with pytest.raises(ValueError, match="must contain the Embedding Configs of the same tables: {'a'"):
        quant.QuantManagedCollisionEmbeddingBagCollection([table], False, "cpu", managed_collision_collection=maps)
    with pytest.raises(TypeError, match="takes a float ManagedCollisionEmbeddingCollection"):
        quant.QuantManagedCollisionEmbeddingCollection.from_float(trained(True))
    assert QuantManagedCollisionEmbeddingCollectionSharder().module_type.__name__.startswith("QuantManaged")
    assert "row_wise" in QuantManagedCollisionEmbeddingBagCollectionSharder().sharding_types("cpu")

"""Attributes of TorchRec's classes that begin with an underscore, which large programs read: kept as properties."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    JaggedTensor,
)
from shardwise.embeddings.managed_collision import (
    DistanceLFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from shardwise.inference import quantize_inference_model

FREE = 2**63 - 1


def tables(kind: Any) -> list[Any]:
    return [kind(5, 4, "a", feature_names=["f", "g"]), kind(6, 4, "b", feature_names=["f"])]


BAGS, ROWS = tables(EmbeddingBagConfig), tables(EmbeddingConfig)
SGD = (torch.optim.SGD, {"lr": 0.5})
POOLED = {
    "bags": EmbeddingBagCollection(BAGS),
    "fused bags": FusedEmbeddingBagCollection(BAGS, *SGD),
    "quantized bags": quantize_inference_model(EmbeddingBagCollection(BAGS)),
}
SEQUENCES = {
    "rows": EmbeddingCollection(ROWS),
    "fused rows": FusedEmbeddingCollection(ROWS, *SGD),
}


@pytest.mark.parametrize("name", POOLED)
def test_what_programs_read_of_pooled_collections(name: str) -> None:
    module: Any = POOLED[name]
    assert module._embedding_bag_configs is module.embedding_bag_configs()
    assert [config.name for config in module._embedding_bag_configs] == ["a", "b"]
    assert module._lengths_per_embedding == [4, 4, 4]
    assert (module._is_weighted, module._device) == (False, torch.device("cpu"))
    if "quantized" not in name:
        assert module._embedding_names == ["f@a", "g", "f@b"]
        assert module._feature_names == [["f", "g"], ["f"]]


@pytest.mark.parametrize("name", SEQUENCES)
def test_what_programs_read_of_sequence_collections(name: str) -> None:
    module: Any = SEQUENCES[name]
    assert module._embedding_configs is module.embedding_configs()
    assert module._embedding_names_by_table == [["f@a", "g"], ["f@b"]]
    assert (module._embedding_dim, module._need_indices, module._device) == (4, False, torch.device("cpu"))
    assert module._feature_names == [["f", "g"], ["f"]]


@pytest.mark.parametrize("module", [POOLED["fused bags"], SEQUENCES["fused rows"]])
def test_what_programs_read_of_fused_collections(module: Any) -> None:
    assert (module._optimizer_type, module._optimizer_kwargs) == SGD


def test_what_programs_read_of_a_managed_collision_module() -> None:
    module = MCHManagedCollisionModule(
        8, "cpu", DistanceLFU_EvictionPolicy(), 2, input_hash_size=1000, name="t", output_global_offset=16
    )
    assert (module._current_iter, module._last_eviction_iter, module._evicted) == (-1, -1, False)
    assert module._evicted_emb_indices.numel() == module._history_accumulator.numel() == 0
    assert (module._zch_size, module._output_global_offset, module._eviction_interval) == (8, 16, 2)
    assert (module._input_hash_size, module._buckets, module._name) == (1000, 1, "t")
    assert module._mch_slots.tolist() == [7] and module._delimiter.tolist() == [FREE]
    assert module._init_output_segments_tensor[:3].tolist() == [16, 24, -1]

    batch = {"t": JaggedTensor(torch.tensor([5, 6, 5]), lengths=torch.tensor([3]))}
    module(batch)
    assert (module._current_iter, module._evicted) == (1, False)
    assert module._history_accumulator.tolist() == [5, 6, 5] and module._current_history_buffer_offset == 3
    module(batch)
    assert (module._current_iter, module._last_eviction_iter, module._evicted) == (2, 2, True)
    assert module._current_history_buffer_offset == 0 and module._current_iter_tensor.tolist() == [2]
    assert module._mch_sorted_raw_ids.tolist() == [5, 6, *[FREE] * 6]
    assert sorted(module._mch_remapped_ids_mapping.tolist()) == list(range(16, 24))
    assert list(module._mch_metadata) == ["counts", "last_access_iter"]
    assert module._mch_metadata["counts"][:2].tolist() == [4, 2]
    slots = module._evicted_emb_indices.tolist()
    given = module.evict()
    assert given is not None and given.tolist() == slots and not module._evicted


def test_what_programs_read_of_a_managed_collision_collection() -> None:
    maps = {
        config.name: MCHManagedCollisionModule(config.num_embeddings, "cpu", LRU_EvictionPolicy(), 1) for config in BAGS
    }
    collection = ManagedCollisionCollection(maps, BAGS)
    assert collection._embedding_configs is BAGS and collection._feature_names == ["f", "g", "f"]
    assert collection._feature_to_table == {"f": "b", "g": "a"}
    assert collection._table_to_features == {"a": ["f", "g"], "b": ["f"]}
    assert collection._table_feature_splits == [2, 1]
    assert collection._table_name_to_config == dict(zip("ab", BAGS, strict=True))
    assert list(collection._managed_collision_modules) == ["a", "b"]

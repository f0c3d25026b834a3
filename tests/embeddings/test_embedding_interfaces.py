"""What callers may rely on without knowing who made a collection, and TorchRec's config fields in their places."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    KeyedJaggedTensor,
    KeyedTensor,
    RowWiseAdagrad,
)
from shardwise.embeddings import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    EmbeddingTower,
    tower_input_params,
)


def bag_config(**settings: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(10, 4, "t", feature_names=["f"], **settings)


def row_config() -> EmbeddingConfig:
    return EmbeddingConfig(10, 4, "t", feature_names=["f"])


def test_collections_are_what_their_interfaces_say() -> None:
    fused = FusedEmbeddingBagCollection([bag_config()], RowWiseAdagrad, {"lr": 0.1})
    for pooled in (EmbeddingBagCollection([bag_config()]), fused):
        assert isinstance(pooled, EmbeddingBagCollectionInterface)
        assert not isinstance(pooled, EmbeddingCollectionInterface)
    fused_rows = FusedEmbeddingCollection([row_config()], RowWiseAdagrad, {"lr": 0.1})
    for rows in (EmbeddingCollection([row_config()]), fused_rows):
        assert isinstance(rows, EmbeddingCollectionInterface)
        assert not isinstance(rows, EmbeddingBagCollectionInterface)


def test_an_interface_alone_cannot_be_made() -> None:
    kinds: list[Any] = [EmbeddingBagCollectionInterface, EmbeddingCollectionInterface]
    for kind in kinds:
        with pytest.raises(TypeError, match="abstract"):
            kind()


class Wrapped(EmbeddingBagCollectionInterface):
    """A collection of somebody else's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = EmbeddingBagCollection([bag_config()], is_weighted=True)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        out = self.inner(features)
        assert isinstance(out, KeyedTensor)
        return out

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        return self.inner.embedding_bag_configs()

    def is_weighted(self) -> bool:
        return self.inner.is_weighted()


def test_a_collection_of_ones_own_is_taken_for_one() -> None:
    assert tower_input_params(Wrapped()) == (False, True)
    assert EmbeddingTower(Wrapped(), Wrapped()).embedding.is_weighted()  # type: ignore[operator]


def test_config_fields_are_torchrecs_in_its_order() -> None:
    names = [
        "num_embeddings", "embedding_dim", "name", "data_type", "feature_names", "weight_init_max", "weight_init_min",
        "num_embeddings_post_pruning", "init_fn", "need_pos", "input_dim", "total_num_buckets", "use_virtual_table",
        "virtual_table_eviction_policy", "enable_embedding_update", "stash_weights",
    ]  # fmt: skip
    assert [field.name for field in fields(EmbeddingConfig)] == names
    assert [field.name for field in fields(EmbeddingBagConfig)] == [*names, "pooling"]
    assert bag_config(need_pos=True).need_pos


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("input_dim", 3),
        ("total_num_buckets", 8),
        ("use_virtual_table", True),
        ("virtual_table_eviction_policy", object()),
        ("enable_embedding_update", True),
        ("stash_weights", True),
    ],
)
def test_a_field_that_nothing_serves_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"table 't': {field}=.* is not supported, leave it (None|False)"):
        bag_config(**{field: value})

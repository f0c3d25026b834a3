"""Table configs, interfaces and the constructors of collections: defaults, initial values, and what they refuse."""

from __future__ import annotations

import math
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise import (
    BaseEmbeddingConfig,
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    EmbeddingTower,
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    KeyedJaggedTensor,
    KeyedTensor,
    PoolingType,
    RowWiseAdagrad,
)
from shardwise.embeddings import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    data_type_to_dtype,
    dtype_to_data_type,
    tower_input_params,
)


def test_fields_come_in_torchrecs_order() -> None:
    config = EmbeddingBagConfig(10, 4, "t", DataType.FP16, ["f"], 0.5, -0.25, None, None, pooling=PoolingType.MEAN)
    assert (config.weight_init_max, config.weight_init_min) == (0.5, -0.25)
    assert (config.get_weight_init_max(), config.get_weight_init_min()) == (0.5, -0.25)
    assert config.num_features() == 1
    assert EmbeddingBagConfig(10, 4).pooling is PoolingType.SUM


@pytest.mark.parametrize("kind", [EmbeddingBagConfig, EmbeddingConfig])
def test_rows_begin_uniform_within_the_root_of_their_number(kind: Any) -> None:
    """sqrt(1 / num_embeddings), not 1 / embedding_dim."""
    config = kind(100, 50, "t")
    collection: nn.Module
    collection = EmbeddingBagCollection([config]) if kind is EmbeddingBagConfig else EmbeddingCollection([config])
    (table,) = collection.parameters()
    assert config.get_weight_init_max() == -config.get_weight_init_min() == math.sqrt(1 / 100)
    assert 0.099 < table.max() <= 0.1 and -0.1 <= table.min() < -0.099
    assert abs(table.mean()) < 0.003


def test_bounds_of_the_config_are_kept() -> None:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(50, 8, "t", weight_init_min=2.0, weight_init_max=3.0)])
    (table,) = ebc.parameters()
    assert 2.0 <= table.min() < 2.05 and 2.95 < table.max() <= 3.0


def test_init_fn_wins_over_bounds_and_fills_in_place() -> None:
    config = EmbeddingBagConfig(5, 2, "t", weight_init_max=9.0, init_fn=partial(nn.init.constant_, val=3.0))
    (table,) = EmbeddingBagCollection([config]).parameters()
    assert torch.equal(table, torch.full((5, 2), 3.0))


def test_the_same_seed_gives_the_same_tables() -> None:
    def make() -> list[Tensor]:
        torch.manual_seed(4)
        return list(EmbeddingBagCollection([EmbeddingBagConfig(7, 3, "b"), EmbeddingBagConfig(5, 8, "a")]).parameters())

    for first, second in zip(make(), make(), strict=True):
        assert torch.equal(first, second)
    # in the order of the configs, as if each table were drawn on its own
    torch.manual_seed(4)
    expected = [
        torch.empty(rows, dim).uniform_(-math.sqrt(1 / rows), math.sqrt(1 / rows)) for rows, dim in ((7, 3), (5, 8))
    ]
    assert all(torch.equal(actual, reference) for actual, reference in zip(make(), expected, strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_embeddings": 0}, "table 't': num_embeddings must be a positive int, got 0"),
        ({"num_embeddings": 2.5}, "table 't': num_embeddings must be a positive int, got 2.5"),
        ({"num_embeddings": True}, "table 't': num_embeddings must be a positive int, got True"),
        ({"embedding_dim": -4}, "table 't': embedding_dim must be a positive int, got -4"),
        ({"feature_names": ["f", "f"]}, "table 't': feature_names repeat: ['f', 'f']"),
        ({"weight_init_min": 2.0}, "table 't': weight_init_min 2.0 is above weight_init_max 0.5"),
        (
            {"pooling": PoolingType.NONE},
            "table 't': pooling must be PoolingType.SUM or PoolingType.MEAN, got <PoolingType.NONE: 'NONE'>",
        ),
    ],
)
def test_a_config_says_what_is_wrong_with_it(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        EmbeddingBagConfig(**{"num_embeddings": 4, "embedding_dim": 2, "name": "t", **change})
    assert str(caught.value) == message


def bag(name: str, **change: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(4, 2, name, **change)


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ([bag("")], "every table needs a name"),
        ([bag("t"), bag("t")], "Duplicate table name t"),
        ([bag("a.b")], "table 'a.b': a child module cannot have this name"),
        ([bag("items")], "table 'items': a child module cannot have this name"),
        ([bag("t", data_type=DataType.INT8)], "table 't': tables train in FP32, FP16, BF16, not in INT8"),
    ],
)
def test_a_collection_names_the_table_that_it_cannot_hold(tables: list[EmbeddingBagConfig], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EmbeddingBagCollection(tables)


def test_a_collection_of_bags_takes_configs_of_bags() -> None:
    with pytest.raises(TypeError, match="EmbeddingBagCollection takes EmbeddingBagConfig, got EmbeddingConfig"):
        EmbeddingBagCollection([EmbeddingConfig(4, 2, "t")])  # type: ignore[list-item]


def test_data_types_and_dtypes_are_each_others_inverse() -> None:
    """Those of quantized tables were refused, which programs ask for though no table trains in them."""
    for data_type in DataType:
        assert dtype_to_data_type(data_type_to_dtype(data_type)) == data_type
    assert dtype_to_data_type(torch.qint8) == dtype_to_data_type(torch.quint8) == DataType.INT8
    for data_type, dtype in {
        DataType.FP32: torch.float32,
        DataType.FP16: torch.float16,
        DataType.BF16: torch.bfloat16,
    }.items():
        (table,) = EmbeddingBagCollection([EmbeddingBagConfig(4, 2, "t", data_type)]).parameters()
        assert table.dtype == dtype
    with pytest.raises(ValueError, match="complex64"):
        dtype_to_data_type(torch.complex64)
    assert str(DataType.FP16) == "FP16"


@pytest.mark.parametrize("device", [None, "cpu", torch.device("cpu"), "meta", torch.device("meta")])
def test_devices_are_strings_or_devices(device: Any) -> None:
    ebc = EmbeddingBagCollection([EmbeddingBagConfig(4, 2, "t")], device=device)
    expected = torch.device("cpu" if device is None else device)
    assert ebc.device == expected
    assert next(ebc.parameters()).device == expected
    fused = FusedEmbeddingBagCollection([EmbeddingBagConfig(4, 2, "t")], torch.optim.SGD, {"lr": 0.1}, device=device)
    assert fused.device == expected


def test_configs_are_those_that_were_given() -> None:
    configs = [EmbeddingBagConfig(4, 2, "t"), EmbeddingBagConfig(5, 2, "u", feature_names=["f", "g"])]
    ebc = EmbeddingBagCollection(configs, is_weighted=True)
    assert ebc.embedding_bag_configs() == configs
    assert ebc.is_weighted()
    assert all(isinstance(config, BaseEmbeddingConfig) for config in configs)
    ec = EmbeddingCollection([EmbeddingConfig(4, 2, "t")], need_indices=True)
    assert ec.embedding_dim() == 2 and ec.need_indices()
    assert [config.name for config in ec.embedding_configs()] == ["t"]


def bag_config(**settings: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(10, 4, "t", feature_names=["f"], **settings)


def test_collections_are_what_their_interfaces_say() -> None:
    bags, rows = [bag_config()], [EmbeddingConfig(10, 4, "t", feature_names=["f"])]
    for pooled in (EmbeddingBagCollection(bags), FusedEmbeddingBagCollection(bags, RowWiseAdagrad, {"lr": 0.1})):
        assert isinstance(pooled, EmbeddingBagCollectionInterface)
        assert not isinstance(pooled, EmbeddingCollectionInterface)
    for sequence in (EmbeddingCollection(rows), FusedEmbeddingCollection(rows, RowWiseAdagrad, {"lr": 0.1})):
        assert isinstance(sequence, EmbeddingCollectionInterface)
        assert not isinstance(sequence, EmbeddingBagCollectionInterface)


def test_an_interface_alone_cannot_be_made() -> None:
    for kind in (EmbeddingBagCollectionInterface, EmbeddingCollectionInterface):
        with pytest.raises(TypeError, match="abstract"):
            kind()  # type: ignore[abstract]


class Wrapped(EmbeddingBagCollectionInterface):
    """A collection of somebody else's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = EmbeddingBagCollection([bag_config()], is_weighted=True)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        return self.inner(features)  # type: ignore[no-any-return]

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
        ("stash_weights", True),
    ],
)
def test_a_field_that_nothing_serves_is_refused(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"table 't': {field}=.* is not supported, leave it (None|False)"):
        bag_config(**{field: value})

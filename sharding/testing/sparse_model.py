"""A small recommendation model for tests, by TorchRec's names: dense layers, collections of tables, layers over both.

Parameters have TorchRec's names, so that state dicts fit. Call arguments are a `ModelInput`; in training a model
returns (loss, prediction [B]), else the prediction.

Letters: B samples, E columns of all embeddings side by side.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from shardwise.embeddings import (
    BaseEmbeddingConfig,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingTower,
    EmbeddingTowerCollection,
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModuleCollection,
    PositionWeightedProcessor,
)
from shardwise.jagged import KeyedJaggedTensor, KeyedTensor, KTRegroupAsDict

from ..dmp.unwrap import CopyableMixin
from .model_input import ModelInput

Device: TypeAlias = torch.device | None
Tables: TypeAlias = Sequence[EmbeddingBagConfig]

DENSE_LAYER_OUT_SIZE = 8
OVER_ARCH_OUT_SIZE = 16


class TestDenseArch(nn.Module):
    """Linear layers, [B, num_float_features] to [B, dense_arch_out_size]; and a parameter and a buffer without use."""

    # no test, though pytest looks for classes of such names
    __test__ = False

    def __init__(
        self,
        num_float_features: int,
        device: Device = None,
        dense_arch_out_size: int | None = None,
        dense_arch_hidden_sizes: Sequence[int] | None = None,
        **_kwargs: Any,
    ) -> None:
        super().__init__()
        sizes = [num_float_features, *(dense_arch_hidden_sizes or [])]
        if min(sizes[1:], default=1) < 1:
            raise ValueError(f"layer size must be positive, got {sizes[1:]}")
        hidden = [nn.Linear(*pair, device=device) for pair in zip(sizes, sizes[1:], strict=False)]
        self.hidden_layers = nn.ModuleList(hidden) if hidden else None
        self.linear = nn.Linear(sizes[-1], dense_arch_out_size or DENSE_LAYER_OUT_SIZE, device=device)
        self.dummy_param = nn.Parameter(torch.zeros(2, device=device))
        self.register_buffer("dummy_buffer", torch.zeros(1, device=device))

    def forward(self, dense_input: Tensor) -> Tensor:
        """[B, dense_arch_out_size]."""
        for layer in self.hidden_layers or ():
            dense_input = layer(dense_input)
        out: Tensor = self.linear(dense_input)
        return out


class TestDHNArch(nn.Module):
    """Two linear layers, [B, in_features] to [B, over_arch_out_size]."""

    __test__ = False

    def __init__(self, in_features: int, device: Device = None, over_arch_out_size: int | None = None) -> None:
        super().__init__()
        size = over_arch_out_size or OVER_ARCH_OUT_SIZE
        self.linear0 = nn.Linear(in_features, size, device=device)
        self.linear1 = nn.Linear(size, size, device=device)

    def forward(self, input: Tensor) -> Tensor:
        """[B, over_arch_out_size]."""
        out: Tensor = self.linear1(self.linear0(input))
        return out


class TestOverArch(nn.Module):
    """Dense output and embeddings [B, E], put side by side in the order of the tables, through a `TestDHNArch`."""

    __test__ = False

    def __init__(
        self,
        tables: Tables,
        weighted_tables: Tables,
        embedding_names: list[str] | None = None,
        device: Device = None,
        dense_arch_out_size: int | None = None,
        over_arch_out_size: int | None = None,
        **_kwargs: Any,
    ) -> None:
        super().__init__()
        self.device = device or torch.device("cpu")
        self._embedding_names = embedding_names or _features(tables)
        self._weighted_features = _features(weighted_tables)
        in_features = (dense_arch_out_size or DENSE_LAYER_OUT_SIZE) + _width([*tables, *weighted_tables])
        self.dhn_arch: nn.Module = TestDHNArch(in_features, self.device, over_arch_out_size)

    def sparse_grouped(self, sparse: KeyedTensor) -> list[Tensor]:
        """The embeddings of tables and of weighted tables, each side by side."""
        return KeyedTensor.regroup([sparse], [self._embedding_names, self._weighted_features])

    def forward(self, dense: Tensor, sparse: KeyedTensor) -> Tensor:
        """[B, over_arch_out_size]."""
        out: Tensor = self.dhn_arch(torch.cat([dense, *self.sparse_grouped(sparse)], dim=1))
        return out


class TestOverArchRegroupModule(TestOverArch):
    """A `TestOverArch` that puts embeddings side by side by a `KTRegroupAsDict`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        groups = [self._embedding_names, self._weighted_features]
        self.regroup_module = KTRegroupAsDict(groups, ["unweighted", "weighted"])

    def sparse_grouped(self, sparse: KeyedTensor) -> list[Tensor]:
        """The embeddings of tables and of weighted tables, each side by side."""
        return list(self.regroup_module([sparse]).values())


class TestEBCSparseArch(nn.Module):
    """Collections `ebc`, `weighted_ebc` (None without weighted tables) and `fp_ebc`: a KeyedTensor of all embeddings.

    `fp_ebc` has the tables that `max_feature_lengths` names, with features weighed by position: such a feature must
    have the name of its table, as in TorchRec.
    """

    __test__ = False

    def __init__(
        self,
        tables: Tables,
        weighted_tables: Tables,
        device: Device = None,
        max_feature_lengths: dict[str, int] | None = None,
        **_kwargs: Any,
    ) -> None:
        super().__init__()
        weighed = max_feature_lengths or {}
        plain = [table for table in tables if table.name not in weighed]
        self.ebc = EmbeddingBagCollection(tables=plain, device=device)
        self.fp_ebc: FeatureProcessedEmbeddingBagCollection | None = None
        if max_feature_lengths is not None:
            on = torch.device("cpu") if device == torch.device("meta") else device
            own = [table for table in tables if table.name in weighed]
            self.fp_ebc = FeatureProcessedEmbeddingBagCollection(
                EmbeddingBagCollection(tables=own, is_weighted=True, device=device),
                PositionWeightedModuleCollection(max_feature_lengths, on),
            )
        self.weighted_ebc: EmbeddingBagCollection | None = None
        if weighted_tables:
            self.weighted_ebc = EmbeddingBagCollection(tables=list(weighted_tables), is_weighted=True, device=device)

    def forward(
        self,
        features: KeyedJaggedTensor,
        weighted_features: KeyedJaggedTensor | None = None,
        batch_size: int | None = None,
    ) -> KeyedTensor:
        """All embeddings; with `batch_size` there are that many rows, zeros where the features have none."""
        parts: list[KeyedTensor] = [self.ebc(features)]
        if self.fp_ebc is not None:
            parts.append(self.fp_ebc(features))
        if self.weighted_ebc is not None and weighted_features is not None:
            parts.append(self.weighted_ebc(weighted_features))
        return _side_by_side(parts, batch_size)


class TestSparseNNBase(nn.Module):
    """What the models have in common: where their layers and their tables are."""

    __test__ = False

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        weighted_tables: Sequence[BaseEmbeddingConfig] | None = None,
        embedding_groups: dict[str, list[str]] | None = None,
        dense_device: Device = None,
        sparse_device: Device = None,
    ) -> None:
        super().__init__()
        self.dense_device = dense_device or torch.device("cpu")
        self.sparse_device = sparse_device or torch.device("cpu")

    def scored(self, over: Tensor, label: Tensor, offset: Tensor | float = 0.0) -> Tensor | tuple[Tensor, Tensor]:
        """What a model returns, of its last layer's output: (loss, prediction) in training, else the prediction."""
        prediction = torch.sigmoid(over.mean(dim=1)) + offset
        if not self.training:
            return prediction
        return nn.functional.binary_cross_entropy_with_logits(prediction, label), prediction


class TestSparseNN(TestSparseNNBase, CopyableMixin):
    """Dense layers, collections and layers over both: `dense`, `sparse`, `over`.

    Args:
        tables, weighted_tables: the latter's features come with weights.
        embedding_groups: the first group's names of embeddings are those that `over` takes.
        over_arch_clazz: class of `over`.
        postproc_module: what the batch goes through first.
        submodule_kwargs: arguments of `dense`, `sparse` and `over` besides.
        feature_processor_modules: no effect, as in TorchRec.

    Raises:
        ValueError: `zch_kwargs`, since ids are not hashed here, or tables that are not of bags.
    """

    def __init__(
        self,
        tables: Tables,
        num_float_features: int = 10,
        weighted_tables: Tables | None = None,
        embedding_groups: dict[str, list[str]] | None = None,
        dense_device: Device = None,
        sparse_device: Device = None,
        max_feature_lengths: dict[str, int] | None = None,
        feature_processor_modules: dict[str, nn.Module] | None = None,
        over_arch_clazz: type[nn.Module] | None = None,
        postproc_module: nn.Module | None = None,
        zch_kwargs: dict[str, Any] | None = None,
        submodule_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(tables, weighted_tables, embedding_groups, dense_device, sparse_device)
        if zch_kwargs is not None:
            raise ValueError("TestSparseNN: zch_kwargs is not served; put a managed collision collection in a model")
        if not all(isinstance(table, EmbeddingBagConfig) for table in tables):
            raise ValueError("TestSparseNN: tables must be EmbeddingBagConfigs: sequences have no KeyedTensor")
        more = submodule_kwargs or {}
        weighted = list(weighted_tables or [])
        self.dense = TestDenseArch(num_float_features, dense_device, **more)
        self.sparse: nn.Module = TestEBCSparseArch(tables, weighted, sparse_device, max_feature_lengths, **more)
        names = next(iter(embedding_groups.values())) if embedding_groups else None
        self._embedding_names = names or _features(tables)
        self._weighted_features = _features(weighted)
        self.over: nn.Module = (over_arch_clazz or TestOverArch)(list(tables), weighted, names, dense_device, **more)
        self.dummy_ones: Tensor
        self.register_buffer("dummy_ones", torch.ones(1, device=dense_device))
        self.postproc_module = postproc_module

    def sparse_forward(self, input: ModelInput) -> KeyedTensor:
        """All embeddings."""
        embeddings: KeyedTensor = self.sparse(
            features=input.idlist_features,
            weighted_features=input.idscore_features,
            batch_size=input.float_features.size(0),
        )
        return embeddings

    def dense_forward(self, input: ModelInput, sparse_output: KeyedTensor) -> Tensor | tuple[Tensor, Tensor]:
        """What the model returns, of the embeddings."""
        over = self.over(self.dense(input.float_features), sparse_output)
        return self.scored(over, input.label, self.dummy_ones)

    def forward(self, input: ModelInput) -> Tensor | tuple[Tensor, Tensor]:
        """(loss, prediction [B]) in training, else the prediction."""
        if self.postproc_module is not None:
            input = self.postproc_module(input)
        return self.dense_forward(input, self.sparse_forward(input))


class TestTowerInteraction(nn.Module):
    """The embeddings of the tables' features [B, E] through a linear layer, to [B, E]."""

    __test__ = False

    def __init__(self, tables: Tables, device: Device = None) -> None:
        super().__init__()
        self._features = _features(tables)
        self.linear = nn.Linear(_width(tables), _width(tables), device=device)

    def forward(self, sparse: KeyedTensor) -> Tensor:
        """[B, E]."""
        out: Tensor = self.linear(torch.cat([sparse[feature] for feature in self._features], dim=1))
        return out


class TestTowerSparseNN(TestSparseNNBase):
    """A model of four tables and a weighted one: two towers, `tower_0` of the third and fourth and `tower_1` of the
    first table, and collections of the others."""

    def __init__(
        self,
        tables: Tables,
        num_float_features: int = 10,
        weighted_tables: Tables | None = None,
        embedding_groups: dict[str, list[str]] | None = None,
        dense_device: Device = None,
        sparse_device: Device = None,
        feature_processor_modules: dict[str, nn.Module] | None = None,
    ) -> None:
        super().__init__(tables, weighted_tables, embedding_groups, dense_device, sparse_device)
        weighted = _one_at_least("weighted_tables", weighted_tables, 1)
        first, second, *others = _one_at_least("tables", tables, 4)
        self.dense = TestDenseArch(num_float_features, dense_device)
        self.tower_0, self.tower_1 = _tower(others[:2]), _tower([first])
        self.sparse_arch = TestEBCSparseArch([second], weighted[:1], sparse_device)
        self.sparse_arch_feature_names = [*second.feature_names, *weighted[0].feature_names]
        width = DENSE_LAYER_OUT_SIZE + _width([*others[:2], first, second, weighted[0]])
        self.over = nn.Linear(width, OVER_ARCH_OUT_SIZE, device=dense_device)

    def forward(self, input: ModelInput) -> Tensor | tuple[Tensor, Tensor]:
        """(loss, prediction [B]) in training, else the prediction."""
        dense = self.dense(input.float_features)
        towers = [self.tower_0(input.idlist_features), self.tower_1(input.idlist_features)]
        rows = self.sparse_arch(input.idlist_features, input.idscore_features)
        others = [rows[feature] for feature in self.sparse_arch_feature_names]
        return self.scored(self.over(torch.cat([dense, *towers, *others], dim=1)), input.label)


class TestTowerCollectionSparseNN(TestSparseNNBase):
    """A model of three tables and a weighted one: a collection `tower_arch` of three towers, of the first and third
    table, of the second, and of the weighted one."""

    def __init__(
        self,
        tables: Tables,
        num_float_features: int = 10,
        weighted_tables: Tables | None = None,
        embedding_groups: dict[str, list[str]] | None = None,
        dense_device: Device = None,
        sparse_device: Device = None,
        feature_processor_modules: dict[str, nn.Module] | None = None,
    ) -> None:
        super().__init__(tables, weighted_tables, embedding_groups, dense_device, sparse_device)
        weighted = _one_at_least("weighted_tables", weighted_tables, 1)
        first, second, third, *_ = _one_at_least("tables", tables, 3)
        self.dense = TestDenseArch(num_float_features, dense_device)
        towers = [_tower([first, third]), _tower([second]), _tower(weighted[:1], is_weighted=True)]
        self.tower_arch = EmbeddingTowerCollection(towers=towers)
        width = DENSE_LAYER_OUT_SIZE + _width([first, second, third, weighted[0]])
        self.over = nn.Linear(width, OVER_ARCH_OUT_SIZE, device=dense_device)

    def forward(self, input: ModelInput) -> Tensor | tuple[Tensor, Tensor]:
        """(loss, prediction [B]) in training, else the prediction."""
        dense = self.dense(input.float_features)
        towers = self.tower_arch(input.idlist_features, input.idscore_features)
        return self.scored(self.over(torch.cat([dense, towers], dim=1)), input.label)


class TestNegSamplingModule(nn.Module):
    """Appends the samples of `extra_input`, which has other features, to a batch; the batch itself stays as it is."""

    __test__ = False
    TEST_BUFFER_NAME = "test_buffer"

    def __init__(self, extra_input: ModelInput, has_params: bool = False) -> None:
        super().__init__()
        self._extra_input = extra_input
        self.register_buffer(self.TEST_BUFFER_NAME, torch.zeros(1))
        if has_params:
            self._linear = nn.Linear(30, 30)

    def forward(self, input: ModelInput) -> ModelInput:
        """Rows of both, features of both."""
        extra, scored = self._extra_input, input.idscore_features
        if extra.idscore_features is not None and scored is not None:
            scored = KeyedJaggedTensor.concat([scored, extra.idscore_features])
        return ModelInput(
            torch.cat([input.float_features, extra.float_features]),
            KeyedJaggedTensor.concat([input.idlist_features, extra.idlist_features]),
            scored,
            torch.cat([input.label, extra.label]),
        )


class TestPositionWeightedPreprocModule(nn.Module):
    """Weighs the features of a batch by position and keeps those alone; the batch itself stays as it is."""

    __test__ = False

    def __init__(self, max_feature_lengths: dict[str, int], device: Device) -> None:
        super().__init__()
        self.fp_proc = PositionWeightedProcessor(max_feature_lengths, device)

    def forward(self, input: ModelInput) -> ModelInput:
        """The batch with weights."""
        changed = copy.copy(input)
        changed.idlist_features = self.fp_proc(input.idlist_features)
        return changed


def _features(tables: Sequence[BaseEmbeddingConfig]) -> list[str]:
    return [feature for table in tables for feature in table.feature_names]


def _width(tables: Sequence[BaseEmbeddingConfig]) -> int:
    """Columns of the embeddings of all features."""
    return sum(table.embedding_dim * len(table.feature_names) for table in tables)


def _tower(tables: Tables, *, is_weighted: bool = False) -> EmbeddingTower:
    collection = EmbeddingBagCollection(tables=list(tables), is_weighted=is_weighted)
    return EmbeddingTower(embedding_module=collection, interaction_module=TestTowerInteraction(tables))


def _one_at_least(name: str, tables: Tables | None, least: int) -> list[EmbeddingBagConfig]:
    if len(tables or ()) < least:
        raise ValueError(f"{name} must be {least} at least, got {len(tables or ())}")
    return list(tables or ())


@torch.fx.wrap
def _side_by_side(parts: list[KeyedTensor], batch_size: int | None) -> KeyedTensor:
    """One KeyedTensor of all keys, of `batch_size` rows where that is given."""
    values = [part.values() for part in parts]
    if batch_size is not None:
        values = [nn.functional.pad(value, (0, 0, 0, batch_size - value.shape[0])) for value in values]
    return KeyedTensor(
        keys=list(chain.from_iterable(part.keys() for part in parts)),
        length_per_key=[length for part in parts for length in part.length_per_key()],
        values=torch.cat(values, dim=1),
    )

"""Towers against their two halves called one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from jagged_batches import gradient_of, kjt, upstream
from torch import Tensor, nn

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
)
from shardwise.embeddings import (
    EmbeddingTower,
    EmbeddingTowerCollection,
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModule,
    tower_input_params,
)


class Pooled(nn.Module):
    """A linear layer over the pooled rows."""

    def __init__(self, columns: int, out: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(columns, out, device=device)

    def forward(self, rows: KeyedTensor) -> Tensor:
        return self.linear(rows.values())  # type: ignore[no-any-return]


class Sequences(nn.Module):
    """The first row of each sample, padded by zeros."""

    def forward(self, rows: dict[str, JaggedTensor]) -> Tensor:
        return torch.cat([jagged.to_padded_dense(1).flatten(1) for jagged in rows.values()], dim=1)


class Both(nn.Module):
    """An embedding module that is not ours."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.weighted = pooled(False), pooled(True)

    def forward(self, features: KeyedJaggedTensor, weighted: KeyedJaggedTensor) -> KeyedTensor:
        first, second = self.plain(features).values(), self.weighted(weighted).values()
        return KeyedTensor(["both"], [first.shape[1]], first + second)


def pooled(weighted: bool, device: torch.device | str | None = None) -> EmbeddingBagCollection:
    return EmbeddingBagCollection([EmbeddingBagConfig(9, 4, "t", feature_names=["f", "g"])], weighted, device)


def rows() -> EmbeddingCollection:
    return EmbeddingCollection([EmbeddingConfig(9, 4, "t", feature_names=["f", "g"])])


def processed() -> FeatureProcessedEmbeddingBagCollection:
    return FeatureProcessedEmbeddingBagCollection(pooled(True), {f: PositionWeightedModule(3) for f in "fg"})


def batch(*, weighted: bool = False) -> KeyedJaggedTensor:
    weights = torch.rand(6) if weighted else None
    return kjt({"f": [[1, 2], [3]], "g": [[], [4, 5, 6]]}, weights=weights)


def test_what_a_module_takes() -> None:
    assert tower_input_params(rows()) == (True, False)
    assert tower_input_params(pooled(False)) == (True, False)
    assert tower_input_params(pooled(True)) == (False, True)
    assert tower_input_params(Both()) == (True, True)
    # TorchRec says both, and its forward then fails: the module takes one batch and makes the weights
    assert tower_input_params(processed()) == (True, False)


def test_a_tower_is_its_two_halves() -> None:
    tower = EmbeddingTower(pooled(False), Pooled(8, 3))
    features = batch()
    out = tower(features)
    assert torch.equal(out, tower.interaction(tower.embedding(features)))
    assert torch.equal(out, tower(features=features))
    out.backward(upstream(2, 3))
    assert all(gradient_of(param).any() for param in tower.parameters())
    assert list(tower.state_dict()) == [
        "embedding.embedding_bags.t.weight", "interaction.linear.weight", "interaction.linear.bias",
    ]  # fmt: skip


def test_every_tower_gets_what_it_takes() -> None:
    towers = [
        EmbeddingTower(pooled(False), Pooled(8, 3)),
        EmbeddingTower(rows(), Sequences()),
        EmbeddingTower(pooled(True), Pooled(8, 2)),
        EmbeddingTower(Both(), Pooled(8, 1)),
        EmbeddingTower(processed(), Pooled(8, 2)),
    ]
    module = EmbeddingTowerCollection(towers)
    plain, weighted = batch(), batch(weighted=True)
    out = module(plain, weighted)
    inputs: list[Any] = [[plain], [plain], [weighted], [plain, weighted], [plain]]
    want = torch.cat([tower(*given) for tower, given in zip(towers, inputs, strict=True)], dim=1)
    assert torch.equal(out, want)
    assert out.shape == (2, 3 + 8 + 2 + 1 + 2)
    out.backward(upstream(*out.shape))
    assert all(param.grad is not None for param in module.parameters())
    assert "towers.2.embedding.embedding_bags.t.weight" in module.state_dict()


def test_features_that_no_tower_takes_may_be_left_out() -> None:
    module = EmbeddingTowerCollection([EmbeddingTower(pooled(True), Pooled(8, 2))])
    assert module(weighted_features=batch(weighted=True)).shape == (2, 2)
    with pytest.raises(ValueError, match=r"tower 0 \(EmbeddingBagCollection\) takes weighted_features"):
        module(batch())
    with pytest.raises(ValueError, match=r"tower 0 \(Both\) takes features"):
        EmbeddingTowerCollection([EmbeddingTower(Both(), Pooled(8, 2))])(weighted_features=batch(weighted=True))


def test_a_tower_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match="tower 1 is a Linear"):
        EmbeddingTowerCollection([EmbeddingTower(rows(), Sequences()), nn.Linear(1, 1)])  # type: ignore[list-item]


def test_the_device_is_where_all_of_it_goes() -> None:
    """TorchRec takes the argument and does nothing with it."""
    tower = EmbeddingTower(pooled(False, "meta"), Pooled(8, 3), "meta")
    assert all(param.is_meta for param in tower.parameters())
    module = EmbeddingTowerCollection([EmbeddingTower(pooled(False), Pooled(8, 3))], torch.device("meta"))
    assert all(param.is_meta for param in module.parameters())

"""Towers: an embedding module and the interaction that alone reads its output.

Shapes: a tower's output [B, N_i]; a collection's [B, sum of N_i].
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.jagged import KeyedJaggedTensor

from ..interfaces import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
from .feature_processors import FeatureProcessedEmbeddingBagCollection


def tower_input_params(module: nn.Module) -> tuple[bool, bool]:
    """Whether an embedding module takes the features without weights, and those with weights.

    A collection takes the one or the other. Of a module that is not ours nothing is known: it is given both, in this
    order. A `FeatureProcessedEmbeddingBagCollection` makes its own weights and takes those without.
    """
    if isinstance(module, (EmbeddingCollectionInterface, FeatureProcessedEmbeddingBagCollection)):
        return True, False
    if isinstance(module, EmbeddingBagCollectionInterface):
        return not module.is_weighted(), module.is_weighted()
    return True, True


class EmbeddingTower(nn.Module):
    """`interaction(embedding(...))`: an embedding module whose output only its interaction module reads.

    Args:
        embedding_module: takes what `forward` is given.
        interaction_module: takes the output of the embedding module.
        device: where both are moved; by default they stay where they are.
    """

    def __init__(
        self,
        embedding_module: nn.Module,
        interaction_module: nn.Module,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.embedding = embedding_module
        self.interaction = interaction_module
        if device is not None:
            self.to(device)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Look up and interact: [B, N]."""
        return self.interaction(self.embedding(*args, **kwargs))  # type: ignore[no-any-return]


class EmbeddingTowerCollection(nn.Module):
    """Towers side by side; each gets the features that its embedding module takes, see `tower_input_params`.

    Args:
        towers: in the order of the output's columns.
        device: where all are moved; by default they stay where they are.

    Raises:
        TypeError: a tower is no `EmbeddingTower`.
    """

    def __init__(self, towers: Sequence[EmbeddingTower], device: torch.device | str | None = None) -> None:
        super().__init__()
        for i, tower in enumerate(towers):
            if not isinstance(tower, EmbeddingTower):
                raise TypeError(f"towers must be EmbeddingTower, tower {i} is a {type(tower).__name__}")
        self.towers = nn.ModuleList(towers)
        self._input_params = [tower_input_params(tower.embedding) for tower in towers]
        if device is not None:
            self.to(device)

    def forward(
        self, features: KeyedJaggedTensor | None = None, weighted_features: KeyedJaggedTensor | None = None
    ) -> Tensor:
        """The towers' outputs [B, N_i] side by side, [B, sum of N_i].

        Raises:
            ValueError: `features` or `weighted_features` are missing where a tower takes them; names the tower.
        """
        inputs = {"features": features, "weighted_features": weighted_features}
        outputs = []
        for i, (tower, wanted) in enumerate(zip(self.towers, self._input_params, strict=True)):
            names = [name for name, is_wanted in zip(inputs, wanted, strict=True) if is_wanted]
            for name in names:
                if inputs[name] is None:
                    raise ValueError(f"tower {i} ({type(tower.embedding).__name__}) takes {name}: give them to forward")
            outputs.append(tower(*(inputs[name] for name in names)))
        return torch.cat(outputs, dim=1)

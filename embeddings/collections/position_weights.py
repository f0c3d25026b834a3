"""The older forms of position weights: of several features in a dict, and of a batch, whose other features are dropped.

TorchRec keeps them in `modules.feature_processor`, beside the newer forms of feature_processors.py; one of them has the
name of a newer one.

Shapes: JaggedTensors and a KeyedJaggedTensor of N ids; a weight for each position of each feature.
"""

from __future__ import annotations

import abc

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from shardwise.jagged import JaggedTensor, KeyedJaggedTensor
from shardwise.jagged.tracing import OneNode, holds_proxy, record_forward

from ..tables.variable_batch import is_readable, on_device, select_rows
from .feature_processors import PositionWeightedModuleCollection, weigh_by_position, with_weights


class BaseFeatureProcessor(OneNode, nn.Module, abc.ABC):
    """A transform of several features: `forward` takes a dict of JaggedTensors by feature and returns another."""

    @abc.abstractmethod
    def forward(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """The features as their lookups are to see them."""


class BaseGroupedFeatureProcessor(OneNode, nn.Module, abc.ABC):
    """A transform of a whole batch: `forward` takes a KeyedJaggedTensor and returns another."""

    @abc.abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The batch as the lookups are to see it."""


class PositionWeightedModule(BaseFeatureProcessor):
    """Weighs the ids of the features in `max_feature_lengths` by their place in the bag: dict -> dict.

    Other features pass as they are. State: `position_weights.<feature>` [maximum], at first all 1.
    """

    def __init__(self, max_feature_lengths: dict[str, int], device: torch.device | str | None = None) -> None:
        super().__init__()
        collection = PositionWeightedModuleCollection(max_feature_lengths, device)
        self.max_feature_lengths, self.position_weights = collection.max_feature_lengths, collection.position_weights

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Every weight 1."""
        for weight in self.position_weights.values():
            weight.fill_(1.0)

    def forward(self, features: dict[str, JaggedTensor]) -> dict[str, JaggedTensor]:
        """The features, those of `max_feature_lengths` with the weights of their positions.

        Raises:
            KeyError: one of them is not there.
            IndexError: a bag is longer than its feature's maximum, as in `feature_processors.PositionWeightedModule`.
        """
        if holds_proxy(features):
            return record_forward(PositionWeightedModule.forward, self, features)  # type: ignore[no-any-return]
        if missing := [key for key in self.max_feature_lengths if key not in features]:
            raise KeyError(f"features {missing} are not among {list(features)}")
        weighed = {key: weigh_by_position(features[key], w, key) for key, w in self.position_weights.items()}
        return {**features, **weighed}


class PositionWeightedProcessor(PositionWeightedModuleCollection, BaseGroupedFeatureProcessor):
    """Weighs the ids of the features in `max_feature_lengths` and keeps those alone; a batch without any is unchanged.

    Weights that the batch has already are positions: of ids whose bags were cut apart before, by row-wise sharding say.
    """

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The features of `max_feature_lengths`, with the weights of their positions.

        Raises:
            IndexError: on the CPU, a bag is longer than its feature's maximum, or a given position outside of it.
        """
        if isinstance(features, Proxy):
            return record_forward(PositionWeightedProcessor.forward, self, features)
        keys = features.keys()
        listed = [number for number, key in enumerate(keys) if key in self.max_feature_lengths]
        if not listed:
            return features
        picked = features if len(listed) == len(keys) else features.permute(listed)
        positions = picked.weights_or_none()
        if positions is None:
            return super().forward(picked)
        return with_weights(picked, self._weights_at(picked, positions.long()))

    def _weights_at(self, features: KeyedJaggedTensor, positions: Tensor) -> Tensor:
        """The weight of each id's given position."""
        keys, sizes = features.keys(), on_device(features.length_per_key(), positions.device)
        # padding belongs to nobody, and its weight is never read
        feature = torch.arange(len(keys), device=positions.device).repeat_interleave(sizes)
        own = positions[: feature.shape[0]]
        most = on_device([self.max_feature_lengths[key] for key in keys], positions.device)
        fits = (own >= 0) & (own < most[feature])
        if is_readable(fits) and not bool(fits.all()):
            wrong = int(fits.logical_not().nonzero()[0, 0])
            key = keys[int(feature[wrong])]
            raise IndexError(
                f"feature {key!r}: position {int(own[wrong])} is outside [0, {self.max_feature_lengths[key]}), the"
                " positions that have weights"
            )
        rows = own + (most.cumsum(0) - most)[feature]
        weights = select_rows(torch.cat([self.position_weights[key] for key in keys]), rows)
        return nn.functional.pad(weights, (0, positions.shape[0] - own.shape[0]))

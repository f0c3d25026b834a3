"""Modules that turn a feature before its lookup: weights by the position in the bag, above all.

Shapes: JaggedTensor values [N] in B bags; KJT of F features; a weight of each id, [N] fp32.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from shardwise.errors import RefusedValueError
from shardwise.jagged import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from shardwise.jagged.tracing import OneNode, record_forward
from shardwise.kernels import offsets_range

from ..tables.variable_batch import (
    inverse_or_none,
    is_readable,
    known_sizes,
    on_device,
    pad_strides,
    select_rows,
)
from .bag_collection import EmbeddingBagCollection


class FeatureProcessor(OneNode, nn.Module, abc.ABC):
    """A transform of one feature: `forward` takes its JaggedTensor and returns another, with weights.

    A class that sets `only_weighs = True` itself promises that values and bags stay: pipelines may then send the ids
    ahead, and their weights in the step.
    """

    only_weighs = False

    @abc.abstractmethod
    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """The feature as its lookup is to see it."""


class FeatureProcessorsCollection(OneNode, nn.Module, abc.ABC):
    """A transform of a whole batch: `forward` takes a KeyedJaggedTensor and returns another, with weights.

    `only_weighs` as in `FeatureProcessor`.
    """

    only_weighs = False

    @abc.abstractmethod
    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The batch as the lookups are to see it."""


class PositionWeightedModule(FeatureProcessor):
    """Weighs each id of a feature by its place in the bag: `position_weight` [max_feature_length], at first all 1.

    Weights that the feature had are replaced. Gradients reach `position_weight` in a fixed order.

    Raises:
        ValueError: `max_feature_length` is not positive.
    """

    only_weighs = True

    def __init__(self, max_feature_length: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.position_weight = _position_weight(max_feature_length, "max_feature_length", device)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Every weight 1."""
        self.position_weight.fill_(1.0)

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        """The same values and bags, with the weights of their positions.

        Raises:
            IndexError: on the CPU, a bag is longer than `max_feature_length`; names sample, length and maximum. On
                CUDA, where a look would be a host sync, a device-side assertion, as torch's own indexing has it.
        """
        if isinstance(features, Proxy):
            return record_forward(PositionWeightedModule.forward, self, features)  # type: ignore[no-any-return]
        return weigh_by_position(features, self.position_weight)


class PositionWeightedModuleCollection(FeatureProcessorsCollection):
    """Weighs the ids of several features by their place in the bag; `position_weights.<feature>` [maximum], at first 1.

    Ids of features that `max_feature_lengths` does not list get weight 1. Weights that the batch had are replaced.
    Gradients reach `position_weights` in a fixed order. Batch sizes, inverse indices and the capacity stay what they
    are. One host sync, where the batch does not know its `length_per_key` yet.

    Raises:
        ValueError: a maximum is not positive, or a parameter cannot have the feature's name.
    """

    only_weighs = True

    def __init__(self, max_feature_lengths: dict[str, int], device: torch.device | str | None = None) -> None:
        super().__init__()
        _check_names(list(max_feature_lengths), nn.ParameterDict())
        self.max_feature_lengths = dict(max_feature_lengths)
        weights = {
            name: _position_weight(n, f"max_feature_lengths[{name!r}]", device)
            for name, n in self.max_feature_lengths.items()
        }
        self.position_weights = nn.ParameterDict(weights)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Every weight 1."""
        for weight in self.position_weights.values():
            weight.fill_(1.0)

    @property
    def position_weights_dict(self) -> nn.ParameterDict:
        """The weights by feature, as TorchRec names them beside `position_weights`: the same parameters, always."""
        return self.position_weights

    def copy(self, device: torch.device | str) -> PositionWeightedModuleCollection:
        """Move the weights to `device`; returns itself, as in TorchRec."""
        return self.to(device)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The same batch, with the weights of the positions.

        Raises:
            IndexError: on the CPU, a bag is longer than its feature's maximum; names feature, sample, length and
                maximum. On CUDA, where a look would be a host sync, a device-side assertion, as torch's own indexing
                has it.
        """
        if isinstance(features, Proxy):
            return record_forward(PositionWeightedModuleCollection.forward, self, features)
        keys, sizes = features.keys(), features.length_per_key()
        count, padded = sum(sizes), features.values().shape[0]
        listed = [key for key in keys if key in self.max_feature_lengths]
        if not listed:
            return with_weights(features, torch.ones(padded, device=features.device()))
        most = [self.max_feature_lengths.get(key, _NO_MAXIMUM) for key in keys]
        _check_lengths(pad_strides(features).lengths().view(len(keys), -1), most, keys)
        # the weights of all features one after another, then a 1 for those that have none
        rows = [self.position_weights[key] for key in listed]
        table = torch.cat([*rows, rows[0].new_ones(1)])
        begin, row = 0, offsets_range(features.offsets(), count)
        for key, part in zip(keys, torch.split(row, sizes), strict=True):
            if key in self.max_feature_lengths:
                part += begin
                begin += self.max_feature_lengths[key]
            else:
                part.fill_(table.shape[0] - 1)
        weights = select_rows(table, row)
        # padding belongs to nobody, and its weight is never read
        return with_weights(features, nn.functional.pad(weights, (0, padded - count)) if padded > count else weights)


class FeatureProcessorDictWrapper(FeatureProcessorsCollection):
    """A processor for each of some features, as one collection; ids of other features get weight 1."""

    def __init__(self, feature_processors: nn.ModuleDict) -> None:
        super().__init__()
        self._feature_processors = feature_processors

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """The batch with each feature processed; batch sizes and inverse indices stay what they are."""
        if isinstance(features, Proxy):
            return record_forward(FeatureProcessorDictWrapper.forward, self, features)
        return _process(features, self._feature_processors, features.keys())


class FeatureProcessedEmbeddingBagCollection(OneNode, nn.Module):
    """A weighted `EmbeddingBagCollection` whose features are processed first.

    Args:
        embedding_bag_collection: with `is_weighted=True`.
        feature_processors: a `FeatureProcessor` for every feature of the collection, or a
            `FeatureProcessorsCollection`.

    Raises:
        ValueError: the collection is not weighted, a feature has no processor, or a processor has no feature.

    Example:
        >>> ebc = EmbeddingBagCollection([EmbeddingBagConfig(100, 8, "item", feature_names=["seen"])], is_weighted=True)
        >>> module = FeatureProcessedEmbeddingBagCollection(ebc, {"seen": PositionWeightedModule(10)})
        >>> module(KeyedJaggedTensor(["seen"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 1]))).values().shape
        torch.Size([2, 8])
    """

    def __init__(
        self,
        embedding_bag_collection: EmbeddingBagCollection,
        feature_processors: dict[str, FeatureProcessor] | FeatureProcessorsCollection,
    ) -> None:
        super().__init__()
        if not embedding_bag_collection.is_weighted():
            raise RefusedValueError(
                "EmbeddingBagCollection must accept weighted inputs for feature processor, which makes weights: give it"
                " is_weighted=True"
            )
        self._embedding_bag_collection = embedding_bag_collection
        configs = embedding_bag_collection.embedding_bag_configs()
        self._feature_names = list(dict.fromkeys(name for config in configs for name in config.feature_names))
        self._feature_processors: nn.ModuleDict | FeatureProcessorsCollection
        if isinstance(feature_processors, FeatureProcessorsCollection):
            self._feature_processors = feature_processors
        else:
            lacking = [name for name in self._feature_names if name not in feature_processors]
            unused = [name for name in feature_processors if name not in self._feature_names]
            if lacking or unused:
                raise RefusedValueError(
                    "Passed in feature processors do not match feature names of embedding bag: "
                    f"none given for {lacking}, no such feature {unused}"
                )
            _check_names(self._feature_names, nn.ModuleDict())
            self._feature_processors = nn.ModuleDict(feature_processors)

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Process the batch and look it up.

        Raises:
            KeyError, IndexError, ValueError, TypeError: as `EmbeddingBagCollection.forward`, or as a processor raises
                them; an IndexError of a processor names its feature.
        """
        processors = self._feature_processors
        if isinstance(features, Proxy) and not isinstance(processors, FeatureProcessorsCollection):
            return record_forward(FeatureProcessedEmbeddingBagCollection.forward, self, features)
        if isinstance(processors, FeatureProcessorsCollection):
            processed = processors(features)
        else:
            processed = _process(features, processors, self._feature_names)
        return self._embedding_bag_collection(processed)  # type: ignore[no-any-return]

    def split(self) -> tuple[FeatureProcessorsCollection, EmbeddingBagCollection]:
        """The two halves, sharing their parameters with this module."""
        processors = self._feature_processors
        if not isinstance(processors, FeatureProcessorsCollection):
            processors = FeatureProcessorDictWrapper(processors)
        return processors, self._embedding_bag_collection

    def is_weighted(self) -> bool:
        """Whether lookups are scaled by weights: always."""
        return self._embedding_bag_collection.is_weighted()


# above every length
_NO_MAXIMUM = 2**31 - 1


def weigh_by_position(features: JaggedTensor, position_weight: Tensor, key: str | None = None) -> JaggedTensor:
    """The same values and bags, weighed by `position_weight` [maximum]; errors name `key`."""
    values, lengths = features.values(), features.lengths()
    _check_lengths(lengths[None], [position_weight.shape[0]], None if key is None else [key])
    position = offsets_range(features.offsets(), values.shape[0])
    return JaggedTensor(values, select_rows(position_weight, position), lengths=lengths)


def _position_weight(longest: Any, what: str, device: torch.device | str | None) -> nn.Parameter:
    if isinstance(longest, bool) or not isinstance(longest, int) or longest <= 0:
        raise ValueError(f"{what} must be a positive int, got {longest!r}")
    return nn.Parameter(torch.empty(longest, device=device))


def _check_names(features: Sequence[str], owner: nn.Module) -> None:
    for name in features:
        if "." in name or hasattr(owner, name):
            raise ValueError(
                f"feature {name!r}: {type(owner).__name__} cannot hold this name (it has a dot, or is an attribute of"
                " every such dict): rename the feature"
            )


def _check_lengths(lengths: Tensor, most: Sequence[int], keys: Sequence[str] | None = None) -> None:
    """Refuse bags of lengths [F, B] that are longer than `most` [F] allows."""
    fits = lengths <= on_device(most, lengths.device)[:, None]
    if is_readable(lengths):
        if not bool(fits.all()):
            k, sample = fits.logical_not().nonzero()[0].tolist()
            feature = "" if keys is None else f"feature {keys[k]!r}, "
            raise IndexError(
                f"{feature}sample {sample}: {int(lengths[k, sample])} ids, but there are weights for {most[k]}"
                " positions: give a larger maximum, or cut the bag before"
            )
    elif not lengths.is_meta:
        torch._assert_async(fits.all(), "a bag has more ids than there are position weights")


def _process(features: KeyedJaggedTensor, processors: nn.ModuleDict, keys: Sequence[str]) -> KeyedJaggedTensor:
    """The features `keys`, each by its processor; those without one get weights of 1."""
    by_key = features.to_dict()
    if missing := [key for key in keys if key not in by_key]:
        raise KeyError(f"features {missing} are not in the batch, which has {features.keys()}")
    processed = {}
    for key in keys:
        jt = by_key[key]
        if key not in processors:
            ones = torch.ones(jt.values().shape[0], device=jt.values().device)
            processed[key] = JaggedTensor(jt.values(), ones, lengths=jt.lengths())
            continue
        try:
            processed[key] = processors[key](jt)
        except IndexError as error:
            raise IndexError(f"feature {key!r}, {error}") from None
    batch = KeyedJaggedTensor.from_jt_dict(processed)
    inverse = inverse_or_none(features, keys)
    if inverse is None:
        return batch
    return KeyedJaggedTensor(
        batch.keys(), batch.values(), batch.weights_or_none(), batch.lengths(), stride_per_key=batch.stride_per_key(),
        length_per_key=known_sizes(batch), inverse_indices=(batch.keys(), inverse),
    )  # fmt: skip


def only_weighs(processors: nn.Module) -> bool:
    """Whether processors, a collection or one for each feature, leave values and bags as they are.

    Their own classes say so: one that derives from them may do otherwise.
    """
    every = processors.values() if isinstance(processors, nn.ModuleDict) else [processors]
    return all(vars(type(processor)).get("only_weighs", False) for processor in every)


def with_weights(kjt: KeyedJaggedTensor, weights: Tensor) -> KeyedJaggedTensor:
    """The same batch with other weights."""
    variable = kjt.variable_stride_per_key()
    return KeyedJaggedTensor(
        kjt.keys(), kjt.values(), weights, offsets=kjt.offsets(), stride=kjt.stride(),
        stride_per_key_per_rank=kjt.stride_per_key_per_rank() if variable else None,
        length_per_key=known_sizes(kjt), inverse_indices=kjt.inverse_indices_or_none(),
        capacity=kjt.capacity(),
    )  # fmt: skip

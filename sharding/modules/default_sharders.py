"""The sharders that are used unless others are given, and the one that shards a module."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import nn

from ..plan.module_sharder import ModuleSharder, require_type
from ..quant import (
    QuantEmbeddingBagCollectionSharder,
    QuantEmbeddingCollectionSharder,
    QuantFeatureProcessedEmbeddingBagCollectionSharder,
)
from ..quant.managed_collision import (
    QuantManagedCollisionEmbeddingBagCollectionSharder,
    QuantManagedCollisionEmbeddingCollectionSharder,
)
from .managed_collision import (
    ManagedCollisionEmbeddingBagCollectionSharder,
    ManagedCollisionEmbeddingCollectionSharder,
)
from .nested import FeatureProcessedEmbeddingBagCollectionSharder
from .sharders import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    FusedEmbeddingBagCollectionSharder,
    FusedEmbeddingCollectionSharder,
)

# those of quantized tables are of a folder below, where pyright sees this package under another name
_DEFAULT: tuple[type[Any], ...] = (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    FusedEmbeddingBagCollectionSharder,
    FusedEmbeddingCollectionSharder,
    FeatureProcessedEmbeddingBagCollectionSharder,
    ManagedCollisionEmbeddingBagCollectionSharder,
    ManagedCollisionEmbeddingCollectionSharder,
    QuantEmbeddingBagCollectionSharder,
    QuantEmbeddingCollectionSharder,
    QuantFeatureProcessedEmbeddingBagCollectionSharder,
    QuantManagedCollisionEmbeddingBagCollectionSharder,
    QuantManagedCollisionEmbeddingCollectionSharder,
)


def get_default_sharders() -> list[ModuleSharder[Any]]:
    """Sharders of collections, trained and quantized ones, more than TorchRec's; towers need their own."""
    return [make() for make in _DEFAULT]


def sharder_of(module: nn.Module, sharders: Sequence[ModuleSharder[Any]]) -> ModuleSharder[Any] | None:
    """The first sharder for the module's exact class, or None; a class that only derives from one warns."""
    exact = next((sharder for sharder in sharders if sharder.module_type is type(module)), None)
    near = [sharder for sharder in sharders if isinstance(module, sharder.module_type)]
    if exact is None and near:
        warnings.warn(f"{_derived(module, near[0])}; it is not sharded", stacklevel=2)
    return exact


def require_sharder(module: nn.Module, sharder: ModuleSharder[Any] | None = None) -> ModuleSharder[Any]:
    """`sharder` if it fits the module, or the default sharder for the module's exact class.

    Raises:
        TypeError: there is none.
    """
    if sharder is not None:
        require_type(sharder, module)
        return sharder
    near = [candidate for candidate in get_default_sharders() if isinstance(module, candidate.module_type)]
    exact = next((candidate for candidate in near if candidate.module_type is type(module)), None)
    if exact is None:
        raise TypeError(
            _derived(module, near[0])
            if near
            else f"{type(module).__name__} holds no tables: expected a collection, or a sharder for it"
        )
    return exact


def _derived(module: nn.Module, near: ModuleSharder[Any]) -> str:
    own, base = type(module).__name__, near.module_type.__name__
    return (
        f"{own} derives from {base}, and sharders are for exact classes, as the sharded form would not run the forward"
        f" of {own}: give a sharder whose module_type is {own}"
    )

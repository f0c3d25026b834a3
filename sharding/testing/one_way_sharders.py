"""Sharders that offer one sharding type, and mostly one kernel: a planner can do nothing else with their tables.

By TorchRec's names; `create_test_sharder` picks one by the kind of module.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, TypeAlias

import torch

from ..comms.qcomms import QCommsConfig, get_qcomm_codecs_registry
from ..modules.embedding_bag import EmbeddingBagSharder
from ..modules.managed_collision import ManagedCollisionCollectionSharder, ManagedCollisionEmbeddingBagCollectionSharder
from ..modules.nested import EmbeddingTowerCollectionSharder, EmbeddingTowerSharder
from ..modules.sharders import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    FusedEmbeddingBagCollectionSharder,
    FusedEmbeddingCollectionSharder,
)
from ..plan.module_sharder import ModuleSharder

Codecs: TypeAlias = Mapping[str, Any] | None


class _OneType:
    """Offers `_sharding_type` alone."""

    # no test, though pytest looks for classes of such names
    __test__ = False
    _sharding_type: str

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The one type."""
        return [self._sharding_type]


class _OneKernel(_OneType):
    """Offers `_kernel_type` alone too."""

    _kernel_type: str

    def __init__(
        self,
        sharding_type: str,
        kernel_type: str,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: Codecs = None,
    ) -> None:
        self._sharding_type, self._kernel_type = sharding_type, kernel_type
        # the sharder that this class stands before
        super().__init__(fused_params or {}, qcomm_codecs_registry)  # type: ignore[call-arg]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """The one kernel."""
        return [self._kernel_type]


class TestEBCSharder(_OneKernel, EmbeddingBagCollectionSharder):
    """Of `EmbeddingBagCollection`."""


class TestECSharder(_OneKernel, EmbeddingCollectionSharder):
    """Of `EmbeddingCollection`."""


class TestEBSharder(_OneKernel, EmbeddingBagSharder):
    """Of `torch.nn.EmbeddingBag`."""


class TestETSharder(_OneKernel, EmbeddingTowerSharder):
    """Of `EmbeddingTower`."""


class TestETCSharder(_OneKernel, EmbeddingTowerCollectionSharder):
    """Of `EmbeddingTowerCollection`."""


class TestFusedEBCSharder(_OneType, FusedEmbeddingBagCollectionSharder):
    """Of `FusedEmbeddingBagCollection`; any kernel."""

    def __init__(self, sharding_type: str, qcomm_codecs_registry: Codecs = None) -> None:
        self._sharding_type = sharding_type
        super().__init__(fused_params={}, qcomm_codecs_registry=qcomm_codecs_registry)


class TestFusedECSharder(_OneType, FusedEmbeddingCollectionSharder):
    """Of `FusedEmbeddingCollection`; any kernel."""

    def __init__(self, sharding_type: str) -> None:
        self._sharding_type = sharding_type
        super().__init__()


class TestMCSharder(_OneType, ManagedCollisionCollectionSharder):
    """Of the managed collision modules of a collection."""

    def __init__(self, sharding_type: str, qcomm_codecs_registry: Codecs = None) -> None:
        self._sharding_type = sharding_type
        super().__init__(qcomm_codecs_registry=qcomm_codecs_registry)


class TestEBCSharderMCH(ManagedCollisionEmbeddingBagCollectionSharder):
    """Of `ManagedCollisionEmbeddingBagCollection`."""

    __test__ = False

    def __init__(
        self,
        sharding_type: str,
        kernel_type: str,
        fused_params: dict[str, Any] | None = None,
        qcomm_codecs_registry: Codecs = None,
    ) -> None:
        super().__init__(
            TestEBCSharder(sharding_type, kernel_type, fused_params, qcomm_codecs_registry),
            TestMCSharder(sharding_type, qcomm_codecs_registry),
        )


class SharderType(Enum):
    """What a sharder of `create_test_sharder` is of."""

    EMBEDDING_BAG = "embedding_bag"
    EMBEDDING_BAG_COLLECTION = "embedding_bag_collection"
    EMBEDDING_TOWER = "embedding_tower"
    EMBEDDING_TOWER_COLLECTION = "embedding_tower_collection"
    EMBEDDING_COLLECTION = "embedding_collection"


_CLASSES: Mapping[SharderType, type[_OneKernel]] = {
    SharderType.EMBEDDING_BAG: TestEBSharder,
    SharderType.EMBEDDING_BAG_COLLECTION: TestEBCSharder,
    SharderType.EMBEDDING_TOWER: TestETSharder,
    SharderType.EMBEDDING_TOWER_COLLECTION: TestETCSharder,
    SharderType.EMBEDDING_COLLECTION: TestECSharder,
}


def create_test_sharder(
    sharder_type: str,
    sharding_type: str,
    kernel_type: str,
    fused_params: dict[str, Any] | None = None,
    qcomms_config: QCommsConfig | None = None,
    device: torch.device | None = None,
) -> ModuleSharder[Any]:
    """The sharder of a `SharderType`'s value; the learning rate is 0.1 unless `fused_params` has one.

    Raises:
        ValueError: there is no such type.
    """
    kind = next((kind for kind in SharderType if kind.value == sharder_type), None)
    if kind is None:
        known = ", ".join(each.value for each in SharderType)
        raise ValueError(f"Sharder not supported {sharder_type}: must be one of {known}")
    codecs = {} if qcomms_config is None else get_qcomm_codecs_registry(qcomms_config, device=device)
    sharder: Any = _CLASSES[kind](sharding_type, kernel_type, {"learning_rate": 0.1, **(fused_params or {})}, codecs)
    return sharder  # type: ignore[no-any-return]

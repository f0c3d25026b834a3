"""TorchRec's words for tables of a rank: what one holds of a table, tables that are looked up together, and interfaces.

The engine has none of these; `embedding_sharding` makes them of a plan, `grouped_lookup` looks up by them, and modules
of one's own are built of them.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Placement

from shardwise.embeddings import DataType, PoolingType
from shardwise.embeddings.config import EmbeddingTableConfig
from shardwise.embeddings.optim.fbgemm_types import EmbeddingLocation
from shardwise.jagged import KeyedJaggedTensor, Multistreamable

from ..engine.stages import StagedModule
from ..plan.plan import EmbeddingComputeKernel
from ..plan.sharded_module import CompIn, DistOut, Out, ShardedModule, ShrdCtx
from ..quant.collection import ShardedQuantizedCollection

T = TypeVar("T")
F = TypeVar("F", bound=Multistreamable)
I = TypeVar("I", bound=Multistreamable)  # noqa: E741


class _ListOf(Multistreamable, Generic[I]):
    """Parts of a batch, by number."""

    _parts: list[I]

    def __len__(self) -> int:
        return len(self._parts)

    def __getitem__(self, key: int) -> I:
        return self._parts[key]

    def __setitem__(self, key: int, item: I) -> None:
        self._parts[key] = item

    def __iter__(self) -> Iterator[I]:
        return iter(self._parts)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of all parts until `stream` is done with it."""
        for part in self._parts:
            part.record_stream(stream)


class KJTList(_ListOf[KeyedJaggedTensor]):
    """Batches of one step: one for each sharding type, or for each device.

    Args:
        features: the batches; the list itself is kept.
    """

    def __init__(self, features: list[KeyedJaggedTensor]) -> None:
        self.features = self._parts = features

    def to(self, device: torch.device, non_blocking: bool = False) -> KJTList:
        """All of them on `device`."""
        return KJTList([part.to(device, non_blocking=non_blocking) for part in self.features])


class ListOfKJTList(_ListOf[KJTList]):
    """For each sharding type the batches of its devices.

    Args:
        features: the lists; the list itself is kept.
    """

    def __init__(self, features: list[KJTList]) -> None:
        self.features_list = self._parts = features


@dataclass
class InputDistOutputs(Multistreamable):
    """The batches of devices that hold rows of a table, and how what they find is put back in order."""

    features: KJTList
    unbucketize_permute_tensor: Tensor | None = None
    bucket_mapping_tensor: Tensor | None = None
    bucketized_length: Tensor | None = None

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of all tensors until `stream` is done with it."""
        self.features.record_stream(stream)
        for tensor in (self.unbucketize_permute_tensor, self.bucket_mapping_tensor, self.bucketized_length):
            if tensor is not None:
                tensor.record_stream(stream)


@dataclass
class ShardedConfig:
    """Rows and columns of a table that one rank has."""

    local_rows: int = 0
    local_cols: int = 0


@dataclass
class DTensorMetadata:
    """The DTensor that a table is over its ranks."""

    mesh: DeviceMesh | None = None
    placements: tuple[Placement, ...] | None = None
    size: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None


@dataclass
class ShardedMetaConfig(ShardedConfig):
    """The place of a rank's shard in the table, and those of all ranks' shards."""

    local_metadata: ShardMetadata | None = None
    global_metadata: ShardedTensorMetadata | None = None
    dtensor_metadata: DTensorMetadata | None = None


@dataclass
class EmbeddingAttributes:
    """How a table is stored and trained."""

    compute_kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.DENSE


@dataclass
class ShardedEmbeddingTable(ShardedMetaConfig, EmbeddingAttributes, EmbeddingTableConfig):
    """One shard of a table: the whole table's config, what of it a rank has, and its fused parameters.

    Fields are given by name: those of `EmbeddingTableConfig`, which checks them, `local_rows`, `local_cols`,
    `local_metadata`, `global_metadata`, `dtensor_metadata`, `compute_kernel` and `fused_params`.
    """

    fused_params: dict[str, Any] | None = None


@dataclass
class GroupedEmbeddingConfig:
    """Shards of one rank that are looked up together, in this order. See `embedding_sharding.group_tables`."""

    data_type: DataType
    pooling: PoolingType
    is_weighted: bool
    has_feature_processor: bool
    compute_kernel: EmbeddingComputeKernel
    embedding_tables: list[ShardedEmbeddingTable]
    fused_params: dict[str, Any] | None = None
    enable_embedding_update: bool = False

    def feature_hash_sizes(self) -> list[int]:
        """Of each feature, the rows of its whole table."""
        return [table.num_embeddings for table in self.embedding_tables for _ in table.feature_names]

    def num_features(self) -> int:
        """How many lookups there are: a feature of two tables is two."""
        return sum(map(ShardedEmbeddingTable.num_features, self.embedding_tables))

    def dim_sum(self) -> int:
        """Columns of the pooled output."""
        return sum(self.embedding_dims())

    def table_names(self) -> list[str]:
        """The table of each shard."""
        return [table.name for table in self.embedding_tables]

    def feature_names(self) -> list[str]:
        """Features, table after table."""
        return [name for table in self.embedding_tables for name in table.feature_names]

    def embedding_dims(self) -> list[int]:
        """Of each feature, the columns of its shard."""
        return [table.local_cols for table in self.embedding_tables for _ in table.feature_names]

    def embedding_names(self) -> list[str]:
        """Of each feature, the name of its output."""
        return [name for table in self.embedding_tables for name in table.embedding_names]

    def embedding_shard_metadata(self) -> list[ShardMetadata | None]:
        """Of each feature, the place of its shard in the table."""
        return [table.local_metadata for table in self.embedding_tables for _ in table.feature_names]

    def is_using_virtual_table(self) -> bool:
        """Whether a table makes its rows on demand."""
        return any(table.use_virtual_table for table in self.embedding_tables)


_IN_HOST_MEMORY = (EmbeddingComputeKernel.FUSED_UVM, EmbeddingComputeKernel.QUANT_UVM)
_CACHED = (EmbeddingComputeKernel.FUSED_UVM_CACHING, EmbeddingComputeKernel.QUANT_UVM_CACHING)
_ELSEWHERE = (EmbeddingComputeKernel.CUSTOMIZED_KERNEL, EmbeddingComputeKernel.FUSED_TRITON)


def compute_kernel_to_embedding_location(compute_kernel: EmbeddingComputeKernel) -> EmbeddingLocation:
    """Where FBGEMM keeps the rows of a table of this kernel.

    Raises:
        ValueError: the kernel does not say.
    """
    if compute_kernel in _ELSEWHERE:
        raise ValueError(f"Invalid EmbeddingComputeKernel {compute_kernel}: it does not say where rows lie")
    if compute_kernel in _CACHED:
        return EmbeddingLocation.MANAGED_CACHING
    return EmbeddingLocation.MANAGED if compute_kernel in _IN_HOST_MEMORY else EmbeddingLocation.DEVICE


class BaseEmbeddingLookup(nn.Module, abc.ABC, Generic[F, T]):
    """What finds the rows of a batch in this rank's tables."""

    @abc.abstractmethod
    def forward(self, sparse_features: F) -> T:
        """The rows, pooled or one for each id."""


class FeatureShardingMixIn:
    """The features of a way of sharding; a subclass says them."""

    def feature_names(self) -> list[str]:
        """Features in the order in which ranks get them."""
        raise NotImplementedError(f"{type(self).__name__} has no feature_names")

    def feature_names_per_rank(self) -> list[list[str]]:
        """The same, by rank."""
        raise NotImplementedError(f"{type(self).__name__} has no feature_names_per_rank")

    def features_per_rank(self) -> list[int]:
        """How many each rank gets."""
        raise NotImplementedError(f"{type(self).__name__} has no features_per_rank")


class ModuleShardingMixIn:
    """A module that tells its ways of sharding; a subclass says them."""

    @property
    def shardings(self) -> dict[str, FeatureShardingMixIn]:
        """By sharding type."""
        raise NotImplementedError(f"{type(self).__name__} has no shardings")


class ShardedEmbeddingModule(ShardedModule[CompIn, DistOut, Out, ShrdCtx], ModuleShardingMixIn):
    """A sharded module of one's own, made of lookups; sharded modules of ours count as such, without these lists.

    A subclass fills `_input_dists`, `_lookups` and `_output_dists`, one for each sharding type, and writes the stages
    of `ShardedModule`. The lists are no child modules, so that parameters have the names that the subclass gives them.

    Args:
        qcomm_codecs_registry: as `ShardedModule`.
    """

    def __init__(self, qcomm_codecs_registry: Mapping[str, Any] | None = None) -> None:
        super().__init__(qcomm_codecs_registry)
        self._input_dists: list[nn.Module] = []
        self._lookups: list[nn.Module] = []
        self._output_dists: list[nn.Module] = []

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """Any module, unless a subclass says which."""
        return nn.Module

    def prefetch(self, dist_input: Any, forward_stream: torch.Stream | None = None, ctx: Any = None) -> None:
        """Have each lookup bring what its batch needs closer."""
        for features, lookup in zip(dist_input, self._lookups, strict=True):
            inner: Any = _unwrapped(lookup)
            inner.prefetch(sparse_features=features, forward_stream=forward_stream)

    def train(self, mode: bool = True) -> Any:
        """Put this module and its lookups into training mode, or into evaluation."""
        super().train(mode)
        for lookup in getattr(self, "_lookups", ()):
            lookup.train(mode)
        return self

    def extra_repr(self) -> str:
        """The lists, which are no children."""
        parts: Sequence[tuple[str, list[nn.Module]]] = (
            ("lookups", self._lookups), ("_input_dists", self._input_dists), ("_output_dists", self._output_dists),
        )  # fmt: skip
        return "\n ".join(line for name, modules in parts for line in (f"({name}): ", *map(repr, modules)) if modules)


ShardedEmbeddingModule.register(StagedModule)  # type: ignore[type-abstract]
ShardedEmbeddingModule.register(ShardedQuantizedCollection)  # type: ignore[type-abstract]


def _unwrapped(lookup: nn.Module) -> nn.Module:
    while isinstance(lookup, nn.parallel.DistributedDataParallel):
        lookup = lookup.module
    return lookup

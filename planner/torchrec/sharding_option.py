"""TorchRec's sharding option, one way of placing one table: a sharding type, a kernel, and the shards they make.

Modules and tensors are known by what they answer to, so that these hold TorchRec's as well as ours.
"""

from __future__ import annotations

import copy
import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..layout import Tier
from ..topology import Perf, Storage


class PartitionByType(Enum):
    """The unit that a partitioner gives to an option: ranks one by one, hosts, all ranks, or several hosts."""

    DEVICE = "device"
    HOST = "host"
    UNIFORM = "uniform"
    MULTI_HOST = "multi_host"


class PipelineType(Enum):
    """The train pipeline that a plan is for; it decides how many batches are in memory at once."""

    NONE = "none"
    TRAIN_BASE = "train_base"
    TRAIN_SPARSE_DIST = "train_sparse_dist"
    TRAIN_PREFETCH_SPARSE_DIST = "train_prefetch_sparse_dist"


class StorageUsageType(Enum):
    """Where the tables of a sharder lie: as quantised ones do, as trained ones do, or on the device."""

    BASE_QUANT = "BaseQuantEmbeddingSharder"
    BASE = "BaseEmbeddingSharder"
    DEFAULT = "ModuleSharder"


@dataclass
class SharderData:
    """A sharder as estimators read it.

    Args:
        fused_params: as the sharder's.
        qcomm_dtype_sizes: bytes of an element (forward, backward) in an exchange, by the name of the exchange.
        storage_usage_type: where its tables lie.
    """

    fused_params: dict[str, Any]
    qcomm_dtype_sizes: dict[str, tuple[float, float]]
    storage_usage_type: StorageUsageType


# module class, as `utils.sharder_name` spells it -> its sharder's data
SharderDataMap = dict[str, SharderData]


class CacheStatistics(ABC):
    """Statistics of how a table's ids repeat, for tables with a cache."""

    @property
    @abstractmethod
    def expected_lookups(self) -> float:
        """Different ids of a global batch."""

    @abstractmethod
    def expected_miss_rate(self, clf: float) -> float:
        """Share of lookups that miss a cache which holds a share `clf` of the rows: 1 at 0, 0 at 1."""

    @property
    @abstractmethod
    def cacheability(self) -> float:
        """0 where caches work well whatever their size, 1 where they do not."""


@dataclass
class Shard:
    """A rectangle of a table: [rows, columns] and where it begins, what it costs, and the rank it is given."""

    size: list[int]
    offset: list[int]
    storage: Storage | None = None
    perf: Perf | None = None
    rank: int | None = None

    def __hash__(self) -> int:
        return hash((tuple(self.size), tuple(self.offset), self.storage, self.perf, self.rank))

    def __str__(self) -> str:
        return (
            f"Shard size: {tuple(self.size)}, offset: {tuple(self.offset)}, storage: {self.storage}, perf: {self.perf},"
            f" rank: {self.rank}"
        )


class ShardingOption:
    """One way of placing one table. An enumerator makes several for each table; a plan has one.

    Args:
        name: of the table.
        tensor: the table, usually on the meta device.
        module: path and module of the collection that has it.
        input_lengths: pooling factor of each feature.
        batch_size: of one rank.
        sharding_type, partition_by, compute_kernel: by value.
        shards: rectangles of it; estimators write their cost, a partitioner their rank.
        cache_params, enforce_hbm, stochastic_rounding, bounds_check_mode: for the plan, as `ParameterConstraints`.
        output_dtype, key_value_params, feature_names: the same.
        dependency: options with the same text are placed together.
        is_pooled: bags are pooled; None looks at the module.
        num_poolings: lookups of a sample, for each feature.
        tier: for the plan, as `ParameterConstraints`.
    """

    def __init__(
        self,
        name: str,
        tensor: Any,
        module: tuple[str, Any],
        input_lengths: list[float],
        batch_size: int,
        sharding_type: str,
        partition_by: str,
        compute_kernel: str,
        shards: list[Shard],
        cache_params: Any = None,
        enforce_hbm: bool | None = None,
        stochastic_rounding: bool | None = None,
        bounds_check_mode: Any = None,
        dependency: str | None = None,
        is_pooled: bool | None = None,
        feature_names: list[str] | None = None,
        output_dtype: Any = None,
        key_value_params: Any = None,
        num_poolings: list[float] | None = None,
        *,
        tier: Tier | None = None,
    ) -> None:
        self.name = name
        self._tensor = tensor
        self._module = module
        self.input_lengths = input_lengths
        self.batch_size = batch_size
        self.sharding_type = sharding_type
        self.partition_by = partition_by
        self.compute_kernel = compute_kernel
        self.shards = shards
        self.cache_params = cache_params
        self.enforce_hbm = enforce_hbm
        self.stochastic_rounding = stochastic_rounding
        self.bounds_check_mode = bounds_check_mode
        self.dependency = dependency
        self._is_pooled = self.module_pooled(module[1], name) if is_pooled is None else is_pooled
        self.feature_names = feature_names
        self.output_dtype = output_dtype
        self.key_value_params = key_value_params
        self.num_poolings = num_poolings
        self.tier = tier
        holder = module[1]
        self.is_weighted: bool | None = (
            holder.is_weighted()
            if hasattr(holder, "embedding_bag_configs") and hasattr(holder, "is_weighted")
            else None
        )

    @property
    def tensor(self) -> Any:
        """The table, as something that answers to `shape` and `element_size`."""
        return self._tensor

    @property
    def module(self) -> tuple[str, Any]:
        """Path and module of its collection."""
        return self._module

    @property
    def path(self) -> str:
        """Path of its collection."""
        return self._module[0]

    @property
    def fqn(self) -> str:
        """Path of its collection, a dot, and its name."""
        return f"{self._module[0]}.{self.name}"

    @property
    def module_type_key(self) -> str:
        """The collection's class, as `SharderDataMap` has it."""
        kind = type(self._module[1])
        return f"{kind.__module__}.{kind.__name__}"

    @property
    def cache_load_factor(self) -> float | None:
        """Share of the rows that its cache holds, if anybody said."""
        return None if self.cache_params is None else self.cache_params.load_factor

    @property
    def num_shards(self) -> int:
        """Shards."""
        return len(self.shards)

    @property
    def num_inputs(self) -> int:
        """Features."""
        return len(self.input_lengths)

    @property
    def total_storage(self) -> Storage:
        """Bytes of all shards, of those that were estimated."""
        return sum((shard.storage for shard in self.shards if shard.storage), Storage(0, 0, 0))

    @property
    def total_perf(self) -> float:
        """Milliseconds of all shards, of those that were estimated."""
        return sum(shard.perf.total for shard in self.shards if shard.perf)

    @property
    def is_pooled(self) -> bool:
        """Bags are pooled, or every id gets its row."""
        return self._is_pooled

    @property
    def has_feature_processor(self) -> bool:
        """Something changes the weights of its ids before the lookup."""
        processors = getattr(getattr(self._module[1], "_feature_processor", None), "feature_processor_modules", None)
        return processors is not None and hasattr(processors, "keys") and self.name in processors.keys()  # noqa: SIM118

    @staticmethod
    def module_pooled(module: Any, sharding_option_name: str) -> bool:
        """Does a module pool, or does it or a part of it that has a table of this name give every id its row?"""
        if _gives_rows(module):
            return False
        parts = module.modules() if hasattr(module, "modules") else ()
        return not any(
            sharding_option_name in name for part in parts if _gives_rows(part) for name, _ in part.named_parameters()
        )

    def get_shards_assignment(self) -> list[int | None]:
        """The rank of each shard."""
        return [shard.rank for shard in self.shards]

    def storage_hash(self) -> int:
        """A number that stands for the option, whatever its estimates and ranks; the same in every process."""
        identity = (self.fqn, self.sharding_type, self.compute_kernel, self.cache_load_factor, self.num_shards)
        return int.from_bytes(hashlib.blake2b("|".join(map(str, identity)).encode(), digest_size=7).digest(), "big")

    def __hash__(self) -> int:
        return hash((self.fqn, self.sharding_type, self.compute_kernel, tuple(self.shards), self.cache_params))

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardingOption:
        # tables and modules are shared: plans are copied by the thousand
        result = copy.copy(self)
        for name, value in vars(self).items():
            if name not in ("_tensor", "_module"):
                setattr(result, name, copy.deepcopy(value, memo))
        return result

    def __str__(self) -> str:
        head = f"name: {self.name}\nsharding type: {self.sharding_type}\ncompute kernel: {self.compute_kernel}"
        return "\n\t".join([f"{head}\nnum shards: {len(self.shards)}", *map(str, self.shards)])


def _gives_rows(module: Any) -> bool:
    """A sequence collection, or one of managed collisions around it."""
    if hasattr(module, "embedding_configs") and not hasattr(module, "embedding_bag_configs"):
        return True
    return any(kind.__name__ == "ManagedCollisionEmbeddingCollection" for kind in type(module).__mro__)

"""TorchRec's `planner.utils`: units, sharders as estimators read them, the search in one variable."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from ..constants import NUM_POOLINGS
from ..constraints import ParameterConstraints
from ..tables import ELEMENT_BYTES
from ..topology import Storage, placement as placement
from .sharding_option import SharderData, SharderDataMap, ShardingOption, StorageUsageType

# exchanges whose elements a codec may make smaller
_POOLED_A2A = "POOLED_EMBEDDINGS_ALL_TO_ALL"
_SEQUENCE_A2A = "SEQUENCE_EMBEDDINGS_ALL_TO_ALL"
_POOLED_RS = "POOLED_EMBEDDINGS_REDUCE_SCATTER"


def bytes_to_gb(num_bytes: int) -> float:
    """GiB."""
    return float(num_bytes / 1024**3)


def bytes_to_mb(num_bytes: float) -> float:
    """MiB."""
    return float(num_bytes / 1024**2)


def gb_to_bytes(gb: float) -> int:
    """Bytes of that many GiB."""
    return int(gb * 1024**3)


def mb_to_bytes(mb: float) -> int:
    """Bytes of that many MiB."""
    return int(mb * 1024**2)


def prod(iterable: Iterable[int]) -> int:
    """Product."""
    return math.prod(iterable)


def storage_repr_in_gb(storage: Storage | None) -> str:
    """Storage for people."""
    if storage is None:
        return ""
    hbm, ddr = (round(bytes_to_gb(size), 3) for size in (storage.hbm, storage.ddr))
    return f"Storage(hbm = {hbm} GB, ddr = {ddr} GB)"


def reset_shard_rank(proposal: Iterable[ShardingOption]) -> None:
    """Takes all ranks back."""
    for option in proposal:
        for shard in option.shards:
            shard.rank = None


def sharder_name(t: type) -> str:
    """Module and name of a class."""
    return f"{t.__module__}.{t.__name__}"


def build_sharder_data(sharder: Any) -> SharderData:
    """A sharder, ours or TorchRec's, as estimators read it."""
    registry = getattr(sharder, "qcomm_codecs_registry", None) or {}
    sizes = {
        name: (_element_bytes(registry[name].forward), _element_bytes(registry[name].backward))
        for name in (_POOLED_A2A, _SEQUENCE_A2A, _POOLED_RS)
        if name in registry
    }
    kinds = {kind.__name__ for kind in type(sharder).__mro__}
    if "BaseQuantEmbeddingSharder" in kinds:
        usage = StorageUsageType.BASE_QUANT
    elif kinds & {"BaseEmbeddingSharder", "EmbeddingBagCollectionSharder", "EmbeddingCollectionSharder"}:
        usage = StorageUsageType.BASE
    else:
        usage = StorageUsageType.DEFAULT
    return SharderData(dict(getattr(sharder, "fused_params", None) or {}), sizes, usage)


def build_sharder_data_map(sharder_map: Mapping[str, Any]) -> SharderDataMap:
    """`build_sharder_data` of each."""
    return {key: build_sharder_data(sharder) for key, sharder in sharder_map.items()}


def _element_bytes(codec: Any) -> float:
    return float(codec.quantized_dtype.itemsize)


def is_prefetch_pipelined(sharding_option: ShardingOption, sharder_data: SharderData) -> bool:
    """Are cached rows fetched ahead, as the option or else its sharder says?"""
    own = sharding_option.cache_params.prefetch_pipeline if sharding_option.cache_params else None
    return bool(own or sharder_data.fused_params.get("prefetch_pipeline", False))


def element_bytes(data_type: Any) -> float:
    """Bytes of an element of a `DataType`, ours or TorchRec's."""
    return {known.value: size for known, size in ELEMENT_BYTES.items()}[data_type.value]


def is_weighted(sharding_option: ShardingOption, constraint: ParameterConstraints | None) -> bool:
    """Are the rows of its bags weighted, as the option or else its constraint says? A feature processor weights."""
    weighted = sharding_option.is_weighted
    if weighted is None:
        weighted = constraint is not None and constraint.is_weighted
    return bool(weighted or sharding_option.has_feature_processor)


def caching_ratio_of(sharding_option: ShardingOption, sharder_data: SharderData) -> float | None:
    """Share of the rows that a cache holds, as the option or else its sharder says; None where neither does."""
    own = sharding_option.cache_load_factor
    return own if own is not None else sharder_data.fused_params.get("cache_load_factor")


def extract_comm_data_type_size(
    sharding_option: ShardingOption, sharder_data: SharderData
) -> tuple[float, float, float, float]:
    """Bytes of an element in all-to-all forward and backward, and in reduce-scatter forward and backward."""
    own = float(sharding_option.tensor.element_size())
    sizes = sharder_data.qcomm_dtype_sizes
    all_to_all = sizes.get(_POOLED_A2A if sharding_option.is_pooled else _SEQUENCE_A2A, (own, own))
    scatter = sizes.get(_POOLED_RS, (own, own)) if sharding_option.is_pooled else (own, own)
    return (*all_to_all, *scatter)


def get_num_poolings(constraints: Mapping[str, ParameterConstraints] | None, so: ShardingOption) -> list[float]:
    """Lookups of a sample for each feature: the option's own, else its constraint's, else 1."""
    if so.num_poolings is not None and len(so.num_poolings) == so.num_inputs:
        return so.num_poolings
    constraint = (constraints or {}).get(so.name)
    return (constraint and constraint.num_poolings) or [NUM_POOLINGS] * so.num_inputs


def _find_imbalance_tables(
    sharding_options: Sequence[ShardingOption], target_imbalance: str = "perf"
) -> list[ShardingOption]:
    """The movable tables on all of the ranks with most time ("perf") or memory ("hbm"), largest first."""
    if target_imbalance not in ("perf", "hbm"):
        raise ValueError(f"target_imbalance must be 'perf' or 'hbm', got {target_imbalance!r}")

    def weight(shard: Any) -> float:
        return float(shard.perf.total if target_imbalance == "perf" else shard.storage.hbm)

    loads: dict[int, float] = {}
    for option in sharding_options:
        for shard in option.shards:
            assert shard.rank is not None
            loads[shard.rank] = loads.get(shard.rank, 0) + weight(shard)
    if len(loads) <= 1:
        return []
    most = max(loads.values())
    worst = {rank for rank, load in loads.items() if load == most}
    tables = [
        option
        for option in sharding_options
        if option.sharding_type not in ("data_parallel", "row_wise") and worst <= set(option.get_shards_assignment())
    ]
    return sorted(tables, key=lambda option: -weight(option.shards[0]))


class BinarySearchPredicate:
    """Finds the largest number in [A, B] for which something holds that holds up to some number and not beyond.

    Args:
        A, B: first and last number.
        tolerance: stop when fewer than this many numbers are left.
    """

    def __init__(self, A: int, B: int, tolerance: int) -> None:
        self.left, self.right, self.tolerance = A, B, tolerance
        self.first = True

    def next(self, prior_result: bool) -> int | None:
        """The next number to try, None when done; `prior_result` is the answer to the last, ignored the first time."""
        if self.first and self.right - self.left >= self.tolerance:
            self.first = False
            return self._middle()
        if self.right - self.left >= self.tolerance:
            if prior_result:
                self.left = self._middle() + 1
            else:
                self.right = self._middle() - 1
        return None if self.right - self.left < self.tolerance else self._middle()

    def _middle(self) -> int:
        return self.left + (self.right - self.left) // 2


class LuusJaakolaSearch:
    """Minimises a function of one variable in [A, B] by random steps that shrink; the same steps for the same seed.

    Steps that would leave the interval end at its edge, which is tried once.
    """

    def __init__(self, A: float, B: float, max_iterations: int, seed: int = 42, left_cost: float | None = None) -> None:
        self.left, self.right = A, B
        self.iteration, self.max_iterations = -1, max_iterations
        self._random = np.random.RandomState(seed)
        self.x = self.uniform(A, B)
        self.fx, self.y = 0.0, math.nan
        self.fleft = left_cost
        self.fright: float | None = None
        self.d = B - A

    def shrink_right(self, B: float) -> None:
        """From B on the function is infinite."""
        self.right, self.fright = B, math.inf
        self.d = self.right - self.left
        self.x = self.clamp(self.x)

    def clamp(self, x: float) -> float:
        """The nearest number of the interval."""
        return min(max(x, self.left), self.right)

    def uniform(self, A: float, B: float) -> float:
        """A random number in [A, B): 24 bits of a Mersenne twister, as TorchRec draws them."""
        bits = int(self._random.randint(0, 1 << 32, dtype=np.uint32)) & 0xFFFFFF
        return A + (B - A) * (bits / (1 << 24))

    def next(self, fy: float) -> float | None:
        """The next number to try, None when done; `fy` is the value at the last, ignored the first time."""
        self.iteration += 1
        if self.iteration == 0:
            return self.x
        if self.iteration == 1:
            self.fx = fy
        elif self.iteration == self.max_iterations:
            return None
        elif fy <= self.fx:
            self.x, self.fx = self.y, fy
            self.d *= 0.95
        if self.y == self.left:
            self.fleft = fy
        elif self.y == self.right:
            self.fright = fy
        while True:
            y = self.clamp(self.x + self.uniform(-self.d, self.d))
            known = (y == self.left and self.fleft is not None) or (y == self.right and self.fright is not None)
            if not known:
                self.y = y
                return y

    def best(self) -> tuple[float, float]:
        """The best number so far and the value there."""
        return self.x, self.fx

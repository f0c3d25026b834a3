"""What a plan says of rows that are not on the device: TorchRec's `CacheParams` and `KeyValueParams`, and our `Tier`.

`shardwise.planner.tiers` says what each setting of TorchRec's is here.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from shardwise.embeddings import DataType
from shardwise.embeddings.optim.fbgemm_types import CacheAlgorithm, MultiPassPrefetchConfig
from shardwise.kernels import rule_named

from ...planner.layout import TIERED_KERNELS, Shard, Tier, type_name
from ...planner.tiers import LOAD_FACTOR, CacheSettings, RowBytes, settings_of, tier_of

if TYPE_CHECKING:
    from .plan import ParameterSharding


@dataclass(unsafe_hash=True)
class CacheParams:
    """The cache on the device of a table whose rows are below it: kernels fused_uvm_caching and key_value.

    Args:
        algorithm: `CacheAlgorithm` LRU or LFU; None is aged LFU, where a use long ago counts less.
        load_factor: share of the rows that are on the device, by default 0.2; more where a batch needs them.
        reserved_memory: bytes of a GPU that caches leave free, whatever the load factor says.
        precision: of cached rows. They have the table's; a warning says so of another.
        prefetch_pipeline: rows come before they are read: the planner prices that. Whether they do is the pipeline's
            (`PrefetchTrainPipelineSparseDist`).
        stats: a `CacheStatistics`, which the planner reads.
        multipass_prefetch_config: has no effect, which a warning says.
    """

    algorithm: Any = None
    load_factor: float | None = None
    reserved_memory: float | None = None
    precision: DataType | None = None
    prefetch_pipeline: bool | None = None
    stats: Any = field(default=None, hash=False)
    multipass_prefetch_config: Any = None


@dataclass(unsafe_hash=True)
class KeyValueParams:
    """The files of a table of the kernel key_value, and what of them is in memory.

    Args:
        ssd_storage_directory: of scratch files, made where it is missing, on a local disk; by default a folder for
            temporary files.
        l2_cache_size: GiB of host memory of each shard, for rows and their optimizer states.
        max_l1_cache_size: MiB of device memory of each shard, for rows; `CacheParams.load_factor` says how many there
            are below that.

    The others are of a RocksDB, of parameter servers and of streams, which are not here: a warning says that they have
    no effect.
    """

    ssd_storage_directory: str | None = None
    ssd_rocksdb_write_buffer_size: int | None = None
    ssd_rocksdb_shards: int | None = None
    gather_ssd_cache_stats: bool | None = None
    stats_reporter_config: object | None = None
    use_passed_in_path: bool = True
    l2_cache_size: int | None = None
    max_l1_cache_size: int | None = None
    enable_async_update: bool | None = None
    bulk_init_chunk_size: int | None = None
    lazy_bulk_init_enabled: bool | None = None
    enable_raw_embedding_streaming: bool | None = None
    res_store_shards: int | None = None
    kvzch_tbe_config: object | None = None
    load_ckpt_without_opt: bool = False
    ps_hosts: tuple[tuple[str, int], ...] | None = None
    ps_client_thread_num: int | None = None
    ps_max_key_per_request: int | None = None
    ps_max_local_index_length: int | None = None


def record_bytes(width: int, dtype: torch.dtype, rule: str | None) -> int:
    """Bytes of a row of so many columns and of the states of an optimizer's rule."""
    states = sum(4 if kind == "row" else 4 * width for kind in (rule_named(rule).kinds if rule else ()))
    return width * dtype.itemsize + states


def asked_tier(
    sharding: ParameterSharding, rows: int, dim: int, dtype: torch.dtype, *, kernel: str | None = None,
    fused: CacheSettings | None = None, rule: str | None = None,
) -> Tier | None:  # fmt: skip
    """Where a plan and a sharder's fused parameters have the rows of a table lie; None is on the device.

    Args:
        kernel: instead of the plan's.
        fused: what fused parameters say, where the plan says nothing.
        rule: of the optimizer in the table's backward.

    Raises:
        ValueError: a setting has a value that is no good; names it.
    """
    if sharding.tier is not None:
        return sharding.tier
    settings = settings_of(sharding).over(fused or CacheSettings())
    cuts = sharding.sharding_spec.shards if sharding.sharding_spec else ()
    height = max((cut.shard_sizes[0] for cut in cuts), default=rows)
    width = max((cut.shard_sizes[1] for cut in cuts), default=dim)
    row = RowBytes(rows, height, width * dtype.itemsize, record_bytes(width, dtype, rule))
    name = sharding.compute_kernel if kernel is None else kernel
    return tier_of(name, settings, row, folder=shared_folder())


def shared_folder() -> str:
    """Where rows lie of which nobody says where: that of all jobs of this host, each with file names of its own."""
    return os.path.join(tempfile.gettempdir(), "shardwise")


def within_memory(
    tiers: Mapping[str, Tier | None], reserved: Mapping[str, int], shards: Sequence[Shard],
    row_bytes: Callable[[str, int], int], total: int,
) -> dict[str, Tier | None]:  # fmt: skip
    """The tiers with fewer slots, where what they have leaves too little of a device with `total` bytes.

    All ranks get the same answer, that of the fullest one.

    Args:
        tiers: by table; None of those that lie on the device.
        reserved: by table, the bytes to be left; tables that are not in it keep their slots.
        shards: of all tables, on all ranks.
        row_bytes: (table, columns) -> bytes of a row and its optimizer states.
    """
    rows = {name: max((s.rows[1] for s in shards if s.table == name), default=0) for name in tiers}
    resident, cached = Counter[int](), Counter[int]()
    for shard in shards:
        tier, height = tiers[shard.table], shard.rows[1] - shard.rows[0]
        row = row_bytes(shard.table, shard.cols[1] - shard.cols[0])
        if tier is None:
            resident[shard.rank] += height * row
        elif height:
            cached[shard.rank] += row * (tier.rows_of(tier.slots, height, height / rows[shard.table]) or 0)
    fitted = dict(tiers)
    for name, tier in tiers.items():
        asked = None if tier is None else tier.rows_of(tier.slots, rows[name])
        if tier is None or not asked or not reserved.get(name):
            continue
        share = (total - reserved[name] - max(resident.values(), default=0)) / max(cached.values())
        if share < 1:
            fitted[name] = replace(tier, slots=max(1, int(asked * share)))
    return fitted


def describe(sharding: ParameterSharding) -> str:
    """A few words on where a table's rows lie, "" if all are on the device."""
    settings, kernel = settings_of(sharding), sharding.compute_kernel
    if sharding.tier is not None:
        return str(sharding.tier)
    if kernel not in TIERED_KERNELS or settings.resident:
        return ""
    if kernel == "fused_uvm":
        return str(Tier())
    slots: float | None = LOAD_FACTOR if settings.load_factor is None else settings.load_factor
    if kernel == "fused_uvm_caching":
        return str(Tier(slots or None))
    most = "" if settings.device_mib is None else f", {settings.device_mib:g} MiB of each shard at most"
    ram = "" if settings.ram_gib is None else f", {settings.ram_gib:g} GiB of each shard in ram"
    return f"{Tier(slots or None, 'file', 'folder')}{most}{ram}"


def written_params(params: CacheParams | KeyValueParams) -> dict[str, Any]:
    """The fields of settings that say something, and that a file can have."""
    plain = {name: _plain(value) for name, value in _given(params).items()}
    return {name: value for name, value in plain.items() if value is not None}


def lost_params(params: object) -> list[str]:
    """The fields of settings that a file cannot have; "" for all of them, of an object that is none of ours."""
    if params is None:
        return []
    if not isinstance(params, CacheParams | KeyValueParams):
        return [""]
    return [name for name, value in _given(params).items() if _plain(value) is None]


_READ: Mapping[str, Callable[[Any], Any]] = {
    "algorithm": lambda name: CacheAlgorithm[name],
    "precision": DataType,
    "multipass_prefetch_config": lambda passes: MultiPassPrefetchConfig(*passes),
    "ps_hosts": lambda hosts: tuple(map(tuple, hosts)),
}


def read_params(kind: type[CacheParams] | type[KeyValueParams], data: Any) -> Any:
    """The settings that a file has.

    Raises:
        ValueError, KeyError: it has none such.
    """
    if not isinstance(data, dict) or not set(data) <= {each.name for each in fields(kind)}:
        raise ValueError(f"{data!r} has other fields than {kind.__name__}")
    try:
        return kind(**{name: _READ.get(name, lambda value: value)(value) for name, value in data.items()})
    except TypeError as error:
        raise ValueError(str(error)) from error


def _given(params: object) -> dict[str, Any]:
    assert is_dataclass(params)
    values = {each.name: getattr(params, each.name) for each in fields(params)}
    return {each.name: values[each.name] for each in fields(params) if values[each.name] != each.default}


def _plain(value: Any) -> Any:
    """A value as JSON has it, None if it has none."""
    if isinstance(value, DataType):
        return type_name(value)
    if getattr(type(value), "__name__", "") == "CacheAlgorithm":
        # FBGEMM's own enum as well
        return value.name
    if isinstance(value, list | tuple):
        parts = [_plain(part) for part in value]
        return None if None in parts else parts
    return value if isinstance(value, bool | int | float | str) else None

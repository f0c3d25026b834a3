"""TorchRec's words for rows that are not on the device, as a `Tier`: kernels, caches, stores and fused parameters.

| compute kernel | rows | slots on the device |
|---|---|---|
| fused_uvm | in host memory | as few as the batches in flight need |
| fused_uvm_caching | in host memory | `load_factor` of the rows (default 0.2), more where a batch needs them |
| key_value | in a scratch file, `l2_cache_size` GiB in host memory too | the same, at most `max_l1_cache_size` MiB |

TorchRec's caches are those of a rank: sizes in bytes are of each shard. A row on the device counts with its weights
alone there, as TorchRec counts it, one in host memory with its optimizer states too. Results do not depend on any of
it: a cache here has the bits of a table that lies on the device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from .layout import CACHED_KERNELS, TIERED_KERNELS, Tier, type_name

# of the rows, where nobody says how many a cache holds; FBGEMM's
LOAD_FACTOR = 0.2
# rows of a set of FBGEMM's caches
_WAYS = 32
_POLICIES = {"LRU": "lru", "LFU": "lfu"}
# FBGEMM's word in fused parameters -> the field of CacheSettings
FUSED_WORDS = {
    "cache_algorithm": "policy", "cache_load_factor": "load_factor", "cache_sets": "sets",
    "cache_reserved_memory": "reserved_bytes", "cache_precision": "precision", "enforce_hbm": "resident",
    "ssd_storage_directory": "folder", "l2_cache_size": "ram_gib", "max_l1_cache_size": "device_mib",
}  # fmt: skip
# fields of CacheParams and KeyValueParams -> that of CacheSettings; stats and prefetch_pipeline are read by the planner
_OF_CACHE = {
    "algorithm": "policy", "load_factor": "load_factor", "reserved_memory": "reserved_bytes", "precision": "precision",
}  # fmt: skip
_OF_STORE = {"ssd_storage_directory": "folder", "l2_cache_size": "ram_gib", "max_l1_cache_size": "device_mib"}


@dataclass(frozen=True)
class CacheSettings:
    """What TorchRec's settings of a table's cache say; None is nothing.

    Args:
        policy: which rows go first, as of `Tier`.
        load_factor: share of the rows that are on the device, 0 for as few as the batches in flight need.
        sets: of 32 rows of each shard on the device, which go before `load_factor`.
        reserved_bytes: memory of a GPU that caches leave free.
        precision: the type of cached rows, which is that of the table whatever is said.
        folder: of scratch files.
        ram_gib: of each shard, rows of a file that are in host memory too; 0 for none.
        device_mib: of each shard, the most for the cached rows of a file; 0 for no such bound.
        resident: all rows are on the device after all.
    """

    policy: str | None = None
    load_factor: float | None = None
    sets: int | None = None
    reserved_bytes: int | None = None
    precision: str | None = None
    folder: str | None = None
    ram_gib: float | None = None
    device_mib: float | None = None
    resident: bool | None = None

    def over(self, others: CacheSettings) -> CacheSettings:
        """These, and those of `others` where these say nothing."""
        silent = [field.name for field in fields(self) if getattr(self, field.name) is None]
        return replace(self, **{name: getattr(others, name) for name in silent})


def settings_of(given: object) -> CacheSettings:
    """The settings of a `ParameterSharding` or `ParameterConstraints`: cache_params, key_value_params, enforce_hbm.

    Raises:
        ValueError: a value is no good; names the setting.
    """
    said: dict[str, Any] = {}
    for params, words in (("cache_params", _OF_CACHE), ("key_value_params", _OF_STORE)):
        of = getattr(given, params, None)
        said |= {into: _checked(f"{params}.{name}", into, getattr(of, name, None)) for name, into in words.items()}
    return CacheSettings(**said, resident=getattr(given, "enforce_hbm", None) or None)


def settings_from_fused(fused_params: Mapping[str, Any]) -> CacheSettings:
    """The settings of a sharder's `fused_params`, by FBGEMM's words; others of them are passed over.

    Raises:
        ValueError: as `settings_of`.
    """
    words = {word: into for word, into in FUSED_WORDS.items() if fused_params.get(word, False) is not False}
    return CacheSettings(
        **{into: _checked(f"fused_params: {word}", into, fused_params[word]) for word, into in words.items()}
    )


def idle_settings(given: object, own_type: str) -> dict[str, str]:
    """Parts of cache_params and key_value_params without effect on a table of this type, by name, with the reason."""
    idle = {}
    precision = settings_of(given).precision
    cache, store = getattr(given, "cache_params", None), getattr(given, "key_value_params", None)
    if precision not in (None, type_name(own_type)):
        idle["cache_params.precision"] = f"cached rows have the type of the table, {type_name(own_type)}"
    if getattr(cache, "multipass_prefetch_config", None) is not None:
        idle["cache_params.multipass_prefetch_config"] = "a batch's rows are brought in one pass"
    for field in fields(store) if is_dataclass(store) and not isinstance(store, type) else ():
        if field.name not in _OF_STORE and getattr(store, field.name) != field.default:
            idle[f"key_value_params.{field.name}"] = "rows that are not on the device are records of a scratch file"
    return idle


@dataclass(frozen=True)
class RowBytes:
    """Rows of a table, those of its largest shard, and the bytes of a row there, without and with optimizer states."""

    rows: int
    shard_rows: int
    weights: int
    record: int

    def of_table(self, count: int) -> int:
        """So many rows of each shard as a number of the whole table's, one at least and no more than there are."""
        return max(1, min(self.rows, math.ceil(count * self.rows / max(1, self.shard_rows))))


def tier_of(compute_kernel: str, settings: CacheSettings, row: RowBytes, *, folder: str = "") -> Tier | None:
    """Where the rows of a table lie that has this kernel; None if on the device.

    Args:
        folder: of scratch files, where the settings name none.
    """
    if compute_kernel not in TIERED_KERNELS or settings.resident or not row.rows or not row.weights:
        return None
    if compute_kernel not in CACHED_KERNELS:
        return Tier()
    load_factor = LOAD_FACTOR if settings.load_factor is None else settings.load_factor
    slots: int | float | None = load_factor or None
    if settings.sets:
        slots = row.of_table(settings.sets * _WAYS)
    policy = settings.policy or "aged_lfu"
    if compute_kernel == "fused_uvm_caching":
        return Tier(slots, max_slots=None if slots is None else 1.0, policy=policy)
    if settings.device_mib:
        most = row.of_table(int(settings.device_mib * 2**20) // row.weights)
        asked = Tier.rows_of(slots, row.rows)
        slots = most if asked is None or most < asked else slots
    return Tier(
        slots,
        "file",
        settings.folder or folder,
        max_slots=None if slots is None else 1.0,
        ram_rows=row.of_table(int(settings.ram_gib * 2**30) // row.record) if settings.ram_gib else None,
        policy=policy,
    )


def plain_tier(tier: Tier) -> dict[str, Any] | None:
    """A tier as a file has it, without what is the default; None of one with a function, which no file has."""
    plain = {field.name: getattr(tier, field.name) for field in fields(tier)}
    if any(map(callable, plain.values())):
        return None
    return {field.name: plain[field.name] for field in fields(tier) if plain[field.name] != field.default}


def plain_tier_text(plain: Mapping[str, Any]) -> str:
    """A tier of a file as code has it: "Tier(slots=2000, below='file')"."""
    return f"Tier({', '.join(f'{name}={value!r}' for name, value in plain.items())})"


def without_functions(tier: Tier) -> Tier:
    """The tier with names in the place of functions, for a rank that knows these."""
    below = "ram" if callable(tier.below) else tier.below
    return replace(tier, below=below, policy="aged_lfu" if callable(tier.policy) else tier.policy)


def tier_from(plain: Any) -> Tier:
    """The tier that a file describes.

    Raises:
        ValueError: it describes none.
    """
    known = [field.name for field in fields(Tier)]
    if not isinstance(plain, dict) or not set(plain) <= set(known):
        raise ValueError(f"must be an object of {', '.join(known)}, got {plain!r}")
    try:
        return Tier(**plain)
    except TypeError as error:
        raise ValueError(f"{plain!r} is none: {error}") from error


def _checked(what: str, field: str, value: Any) -> Any:
    """A value as `CacheSettings` has it."""
    if value is None:
        return None
    if field == "policy":
        name = str(getattr(value, "name", value)).upper()
        if name not in _POLICIES:
            raise ValueError(f"{what} must be CacheAlgorithm LRU or LFU, got {value!r}")
        return _POLICIES[name]
    if field in ("precision", "folder"):
        return type_name(value) if field == "precision" else str(value)
    if field == "resident":
        return bool(value)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or value < 0 or (field == "load_factor" and value > 1):
        asked = "a share of the rows, from 0 to 1" if field == "load_factor" else "a number of 0 or more"
        raise ValueError(f"{what} must be {asked}, got {value!r}")
    return int(value) if field in ("sets", "reserved_bytes") else float(value)

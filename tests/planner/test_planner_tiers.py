"""TorchRec's settings of caches and of files, each as the `Tier` that it makes, with its numbers."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.embeddings.optim.fbgemm_types import CacheAlgorithm, MultiPassPrefetchConfig
from shardwise.planner.layout import TIERED_KERNELS, Tier
from shardwise.planner.tiers import (
    CacheSettings,
    RowBytes,
    idle_settings,
    plain_tier,
    settings_from_fused,
    settings_of,
    tier_from,
    tier_of,
    without_functions,
)
from shardwise.sharding import CacheParams
from shardwise.sharding.plan.caches import KeyValueParams

GIB = 2**30
# a million rows in four row shards, 256 bytes each on the device and 768 with states
ROW = RowBytes(1_000_000, 250_000, 256, 768)


def asked(cache: CacheParams | None = None, store: KeyValueParams | None = None, **others: Any) -> CacheSettings:
    return settings_of(SimpleNamespace(cache_params=cache, key_value_params=store, **others))


def test_only_kernels_with_rows_below_the_device_have_a_tier() -> None:
    for kernel in ("fused", "fused_triton", "dense", "quant_uvm", "ssd_virtual_table"):
        assert tier_of(kernel, asked(CacheParams(load_factor=0.5)), ROW) is None
    for kernel in TIERED_KERNELS:
        assert tier_of(kernel, asked(), ROW, folder="/tmp") is not None
        # in FBGEMM too
        assert tier_of(kernel, asked(enforce_hbm=True), ROW, folder="/tmp") is None
        assert tier_of(kernel, asked(), RowBytes(0, 0, 256, 768), folder="/tmp") is None


@pytest.mark.parametrize(
    ("cache", "tier"),
    [
        # FBGEMM's default
        (None, Tier(0.2, max_slots=1.0)),
        (CacheParams(load_factor=0.05), Tier(0.05, max_slots=1.0)),
        (CacheParams(load_factor=1.0), Tier(1.0, max_slots=1.0)),
        (CacheParams(load_factor=0.0), Tier()),
        (CacheParams(CacheAlgorithm.LRU), Tier(0.2, max_slots=1.0, policy="lru")),
        (CacheParams(CacheAlgorithm.LFU, 0.5), Tier(0.5, max_slots=1.0, policy="lfu")),
        # what these say is no tier's
        (CacheParams(reserved_memory=1e9, prefetch_pipeline=True, stats=object()), Tier(0.2, max_slots=1.0)),
    ],
)
def test_a_cache_over_host_memory_has_a_share_of_the_rows(cache: CacheParams | None, tier: Tier) -> None:
    assert tier_of("fused_uvm_caching", asked(cache), ROW) == tier


def test_rows_without_a_cache_take_the_slots_that_batches_need() -> None:
    assert tier_of("fused_uvm", asked(CacheParams(load_factor=0.5)), ROW) == Tier()


@pytest.mark.parametrize(
    ("cache", "store", "slots", "ram"),
    [
        (None, None, 0.2, None),
        (CacheParams(load_factor=0.1), KeyValueParams(), 0.1, None),
        # 4,096 rows a MiB, on each of four shards
        (None, KeyValueParams(max_l1_cache_size=1), 4 * 4096, None),
        # more than the load factor asks for
        (None, KeyValueParams(max_l1_cache_size=64), 0.2, None),
        (CacheParams(load_factor=0.0), KeyValueParams(max_l1_cache_size=1), 4 * 4096, None),
        # GiB of records, more than there are
        (None, KeyValueParams(l2_cache_size=1), 0.2, 1_000_000),
        (None, KeyValueParams(l2_cache_size=0, max_l1_cache_size=0), 0.2, None),
    ],
)
def test_a_table_in_files_has_slots_and_rows_in_memory_by_bytes_of_each_shard(
    cache: CacheParams | None, store: KeyValueParams | None, slots: float, ram: int | None
) -> None:
    tier = tier_of("key_value", asked(cache, store), ROW, folder="/tmp")
    assert tier == Tier(slots, "file", "/tmp", max_slots=None if slots is None else 1.0, ram_rows=ram)


def test_host_memory_counts_rows_with_their_states_and_a_directory_goes_before_the_default() -> None:
    store = KeyValueParams("/nvme", l2_cache_size=2)
    large = RowBytes(10**9, 10**9, 256, 768)
    tier = tier_of("key_value", asked(None, store), large, folder="/tmp")
    assert tier is not None and (tier.folder, tier.ram_rows) == ("/nvme", 2 * GIB // 768)
    # each shard of a table that is cut by rows has as much
    tier = tier_of("key_value", asked(None, store), RowBytes(10**9, 5 * 10**8, 256, 768), folder="/tmp")
    assert tier is not None and tier.ram_rows == 2 * (2 * GIB // 768)


def test_fused_parameters_say_what_a_plan_does_not() -> None:
    fused = settings_from_fused(
        {"cache_algorithm": "lfu", "cache_load_factor": 0.0, "cache_sets": 2, "l2_cache_size": 3, "enforce_hbm": False}
    )
    assert fused == CacheSettings("lfu", 0.0, 2, ram_gib=3.0)
    assert asked(CacheParams(CacheAlgorithm.LRU)).over(fused) == CacheSettings("lru", 0.0, 2, ram_gib=3.0)
    # 32 rows a set, on each shard
    assert tier_of("fused_uvm_caching", fused, ROW) == Tier(256, max_slots=1.0, policy="lfu")
    assert settings_from_fused({"learning_rate": 0.1, "cache_load_factor": None}) == CacheSettings()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"cache": CacheParams(load_factor=1.5)}, "cache_params.load_factor must be a share of the rows, .* got 1.5"),
        ({"cache": CacheParams(load_factor=-0.5)}, "cache_params.load_factor must be a share of the rows"),
        ({"cache": CacheParams(load_factor=float("nan"))}, "cache_params.load_factor must be"),
        ({"cache": CacheParams("MRU")}, "cache_params.algorithm must be CacheAlgorithm LRU or LFU, got 'MRU'"),
        ({"cache": CacheParams(reserved_memory=-1)}, "cache_params.reserved_memory must be a number of 0 or more"),
        ({"store": KeyValueParams(max_l1_cache_size=True)}, "key_value_params.max_l1_cache_size must be a number"),
    ],
)
def test_a_setting_that_is_no_good_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        asked(**given)


def test_what_has_no_meaning_here_is_named_and_what_is_so_is_not() -> None:
    cache = CacheParams(precision="FP16", multipass_prefetch_config=MultiPassPrefetchConfig())  # type: ignore[arg-type]
    store = KeyValueParams("/nvme", ssd_rocksdb_shards=2, enable_async_update=True, l2_cache_size=1)
    given = SimpleNamespace(cache_params=cache, key_value_params=store)
    assert list(idle_settings(given, "FP32")) == [
        "cache_params.precision", "cache_params.multipass_prefetch_config", "key_value_params.ssd_rocksdb_shards",
        "key_value_params.enable_async_update",
    ]  # fmt: skip
    assert "cache_params.precision" not in idle_settings(given, "torch.float16")
    assert idle_settings(SimpleNamespace(cache_params=CacheParams(load_factor=0.1)), "FP32") == {}


def test_a_tier_comes_back_from_plain_data() -> None:
    for tier in (Tier(), Tier(0.5, "file", "/nvme", max_slots=1.0, ram_rows=7, policy="lfu", half_life=3), Tier(5)):
        assert tier_from(plain_tier(tier)) == tier
    own = Tier(5, below=lambda table, rows, size: None, policy=lambda scores, batch: scores, half_life=9)
    assert plain_tier(own) is None and without_functions(own) == Tier(5, half_life=9)
    for wrong, message in (({"rows": 1}, "an object of slots"), ([], "an object of slots"), ({"slots": 0}, "positive")):
        with pytest.raises(ValueError, match=message):
            tier_from(wrong)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({what: value, "below": "file", "folder": "x"}, f"Tier: {what} must be a positive number of rows")
        for what in ("slots", "max_slots", "ram_rows")
        for value in (0, -1, True, "10", math.nan)
    ]
    + [({"below": "file", "folder": folder}, "Tier: folder must be the path of one") for folder in ("", 3, b"x", "a\0")]
    + [
        ({"half_life": value}, "Tier: half_life must be a positive number") for value in (0, True, 2.5, math.nan, 2**70)
    ],
)
def test_what_is_no_tier_is_refused_where_it_is_written(given: dict[str, Any], match: str) -> None:
    """NaN slots failed where tables were made, and a folder of 3 was one: both without a word of `Tier`."""
    with pytest.raises(ValueError, match=match):
        Tier(**given)


def test_a_folder_may_be_a_path() -> None:
    """It stood in a plan as an object that no file has."""
    tier = Tier(5, "file", Path("scratch") / "a")  # type: ignore[arg-type]
    assert tier == Tier(5, "file", os.path.join("scratch", "a")) and tier_from(plain_tier(tier)) == tier

"""`KeyValueParams`: how TorchRec keeps a table in a key-value store on SSD."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(unsafe_hash=True)
class KeyValueParams:
    """TorchRec's settings of a table on SSD: the planner's `cost="torchrec"` prices its cache, training refuses it.

    Args:
        l2_cache_size: GiB of host memory.
        max_l1_cache_size: MiB of device memory, which count as the table's HBM.

    The others are kept and handed on as they are.
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

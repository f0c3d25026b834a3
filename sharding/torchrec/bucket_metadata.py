"""Buckets of rows over the shards of a table that is cut by rows: `get_bucket_metadata_from_shard_metadata`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.distributed._shard.metadata import ShardMetadata


@dataclass
class ShardingBucketMetadata:
    """Which buckets of rows each shard has: how many, the first one's number, and the rows of a bucket."""

    num_buckets_per_shard: list[int]
    bucket_offsets_per_shard: list[int]
    bucket_size: int


def get_bucket_metadata_from_shard_metadata(
    shards: Sequence[ShardMetadata], num_buckets: int
) -> ShardingBucketMetadata:
    """Which of `num_buckets` equal buckets of a table's rows each shard has; no bucket is cut.

    Args:
        shards: of one table, cut by rows alone, in the order of their rows.
        num_buckets: that the table's rows are divided into.

    Raises:
        ValueError: there are no shards, they are not the rows of one table one after another, or a cut is inside a
            bucket.
    """
    if not shards:
        raise ValueError("a table has at least one shard")
    ends = [shard.shard_offsets[0] + shard.shard_sizes[0] for shard in shards]
    starts = [shard.shard_offsets[0] for shard in shards]
    if any(any(shard.shard_offsets[1:]) for shard in shards) or starts != [0, *ends[:-1]]:
        offsets = [shard.shard_offsets for shard in shards]
        raise ValueError(f"the shards must be the rows of a table one after another, got offsets {offsets}")
    rows = ends[-1]
    if num_buckets < 1 or rows % num_buckets:
        raise ValueError(f"{rows} rows do not make {num_buckets} equal buckets")
    size = rows // num_buckets
    inside = [end for end in ends if end % size]
    if inside:
        raise ValueError(f"shards end at rows {inside}, inside a bucket of {size} rows")
    counts = [shard.shard_sizes[0] // size for shard in shards]
    return ShardingBucketMetadata(counts, [start // size for start in starts], size)

"""Buckets of rows by TorchRec's names: a keyed batch divided among the ranks that hold them, and buckets of shards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata

from shardwise.jagged import KeyedJaggedTensor
from shardwise.jagged._combine import like
from shardwise.kernels import block_bucketize


def bucketize_kjt_before_all2all(
    kjt: KeyedJaggedTensor,
    num_buckets: int,
    block_sizes: Tensor,
    total_num_blocks: Tensor | None = None,
    output_permute: bool = False,
    bucketize_pos: bool = False,
    block_bucketize_row_pos: Sequence[Tensor] | None = None,
    keep_original_indices: bool = False,
) -> tuple[KeyedJaggedTensor, Tensor | None]:
    """Divide each feature's ids among buckets, for a `KJTAllToAll` that sends all keys of a bucket to one rank.

    Bucket k owns rows [k * block, (k + 1) * block) of a feature, and its ids count from the block's first row. An id
    past all blocks goes to bucket id % num_buckets as id // num_buckets, and so do all ids of a block size of 0.

    Args:
        kjt: F keys; the batch sizes of keys may differ. Inverse indices stay behind.
        num_buckets: K.
        block_sizes: rows of a block, integers [F].
        total_num_blocks: blocks of each feature, integers [F], where a bucket owns several: multiples of K.
        output_permute: return the permutation.
        bucketize_pos: weights of the result are the places of its ids in their bags before.
        block_bucketize_row_pos: for each feature the K + 1 rows where blocks begin and the last one ends, if they are
            of different sizes.
        keep_original_indices: ids stay as they are.

    Returns:
        The batch with keys [K * F], those of bucket 0 first, weights in the same order; and, if asked for, where each
        id of `kjt` lies in it, integers [N], else None.

    Raises:
        ValueError: sizes do not fit, or on the CPU an id is negative; see `kernels.block_bucketize`.
    """
    keys, device = kjt.keys(), kjt.device()
    if block_sizes.numel() != len(keys):
        raise ValueError(f"block_sizes must have a number for each of {len(keys)} keys, got {block_sizes.numel()}")
    variable = kjt.variable_stride_per_key()
    # without the padding of a batch with a capacity, which is in no bucket
    lengths, ids = kjt.dist_tensors()[:2]
    weights = kjt.dist_tensors()[-1] if kjt.weights_or_none() is not None else None
    borders = None if block_bucketize_row_pos is None else [rows.to(device) for rows in block_bucketize_row_pos]
    bucketized = block_bucketize(
        lengths, ids, block_sizes.to(device), num_buckets,
        weights=weights, batch_sizes=kjt.stride_per_key() if variable else None, bucketize_pos=bucketize_pos,
        sequence=output_permute, keep_orig_idx=keep_original_indices,
        block_bucketize_pos=borders,
        total_num_blocks=None if total_num_blocks is None else total_num_blocks.to(device),
    )  # fmt: skip
    # the keys once for each bucket, with their batch sizes; the constructor takes no key twice
    strides = kjt._strides.pick(kjt._strides.keys.order([*range(len(keys))] * num_buckets))
    new_weights = bucketized.positions if bucketize_pos else bucketized.weights
    divided = like(kjt, strides, bucketized.ids, new_weights, bucketized.lengths, None, True, None)
    return divided, bucketized.unbucketize_permute


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

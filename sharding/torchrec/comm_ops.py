"""Rows between ranks as differentiable functions, by TorchRec's names (torchrec.distributed.comm_ops).

For sharded modules of your own; the engine of the collections does not run them. All are one all-to-all forward and
one backward, with layouts made before and after it: a sum over ranks adds what came in the order of the ranks, so its
bits do not depend on the backend. Each returns at once, and `wait()` gives the tensor; its backward sends the gradient
off where the result was used and takes it where the input was made, so work in between runs meanwhile.

Letters: W ranks, B_r the batch of rank r, D_r the columns that rank r looked up; D of a row.
All ranks must call the same functions in the same order, with inputs that need a gradient on all of them or on none.
With `codecs` numbers travel compressed (fp32 while they are added); one that does not fit raises OverflowError on all
ranks. Second derivatives are not served.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.kernels import permute_1d, permute_2d

from ..comms.awaitable import Awaitable, NoWait
from ..comms.env import get_gradient_division, set_gradient_division
from ..comms.exchange import Exchange
from ..comms.qcomms import QuantizedCommCodecs
from .async_collective import (
    copies,
    exchanged,
    get_use_sync_collectives,
    set_use_sync_collectives,
    summed,
    torchrec_use_sync_collectives,
)

__all__ = [
    "all_gather_base_pooled",
    "alltoall_pooled",
    "alltoall_sequence",
    "get_gradient_division",
    "get_use_sync_collectives",
    "reduce_scatter_base_pooled",
    "reduce_scatter_pooled",
    "reduce_scatter_v_per_feature_pooled",
    "reduce_scatter_v_pooled",
    "set_gradient_division",
    "set_use_sync_collectives",
    "torchrec_use_sync_collectives",
    "variable_batch_alltoall_pooled",
]


def alltoall_pooled(
    a2a_pooled_embs_tensor: Tensor,
    batch_size_per_rank: Sequence[int],
    dim_sum_per_rank: Sequence[int],
    dim_sum_per_rank_tensor: Tensor | None = None,
    cumsum_dim_sum_per_rank_tensor: Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
    all_to_all_single_comm: object | None = None,
) -> Awaitable[Tensor]:
    """From this rank's columns for all batches to all columns for this rank's batch.

    Shapes: input [sum of B_r, D_me], rows of rank 0's batch first; the result [B_me, sum of D_r].

    Args:
        batch_size_per_rank: B_r.
        dim_sum_per_rank: D_r.
        dim_sum_per_rank_tensor, cumsum_dim_sum_per_rank_tensor: the same on the device; not needed.
        group: by default all ranks.
        codecs: how numbers travel; by default as they are.
        all_to_all_single_comm: must be None.

    Raises:
        ValueError: sizes do not fit the input, or `all_to_all_single_comm` is given.
    """
    _refuse_comm(all_to_all_single_comm)
    exchange = exchange_of(group)
    _require_ranks(exchange, batch_size_per_rank=batch_size_per_rank, dim_sum_per_rank=dim_sum_per_rank)
    batch, width = batch_size_per_rank[exchange.rank], dim_sum_per_rank[exchange.rank]
    _require_shape(a2a_pooled_embs_tensor, [sum(batch_size_per_rank), width])

    def side_by_side(came: Tensor) -> Tensor:
        blocks = torch.split(came, [batch * d for d in dim_sum_per_rank])
        return torch.cat([block.view(batch, d) for block, d in zip(blocks, dim_sum_per_rank, strict=True)], dim=1)

    return exchanged(
        exchange, a2a_pooled_embs_tensor, [b * width for b in batch_size_per_rank],
        [batch * d for d in dim_sum_per_rank], side_by_side, codecs,
    )  # fmt: skip


def variable_batch_alltoall_pooled(
    a2a_pooled_embs_tensor: Tensor,
    batch_size_per_rank_per_feature: Sequence[Sequence[int]],
    batch_size_per_feature_pre_a2a: Sequence[int],
    emb_dim_per_rank_per_feature: Sequence[Sequence[int]],
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
    all_to_all_single_comm: object | None = None,
) -> Awaitable[Tensor]:
    """As `alltoall_pooled` where each feature has a batch of its own on each rank.

    Shapes: input, flat: for each rank, for each feature of this one, its matrix [batch, dim]; the result, flat: for
    each rank, for each of its features, the matrix of this rank's batch.

    Args:
        batch_size_per_rank_per_feature: [ranks][features of this rank] batches that were looked up here.
        batch_size_per_feature_pre_a2a: this rank's batch of every feature, those of rank 0 first.
        emb_dim_per_rank_per_feature: [ranks][features of that rank] widths.
        group, codecs, all_to_all_single_comm: as `alltoall_pooled`.

    Raises:
        ValueError: sizes do not fit the input or each other, or `all_to_all_single_comm` is given.
    """
    _refuse_comm(all_to_all_single_comm)
    exchange = exchange_of(group)
    dims = emb_dim_per_rank_per_feature
    _require_ranks(exchange, emb_dim_per_rank_per_feature=dims)
    own_dims = dims[exchange.rank]
    # a rank without features may leave its batches out
    per_rank = batch_size_per_rank_per_feature or [[] for _ in dims]
    _require_ranks(exchange, batch_size_per_rank_per_feature=per_rank)
    if any(len(batches) != len(own_dims) for batches in per_rank):
        raise ValueError(
            f"batch_size_per_rank_per_feature must have a number for each of this rank's {len(own_dims)} features,"
            f" got {[list(batches) for batches in per_rank]}"
        )
    features = sum(map(len, dims))
    if len(batch_size_per_feature_pre_a2a) != features:
        raise ValueError(
            f"batch_size_per_feature_pre_a2a must have a number for each of {features} features,"
            f" got {list(batch_size_per_feature_pre_a2a)}"
        )
    # numbers for and from each rank, [W]
    send_sizes = [sum(b * d for b, d in zip(batches, own_dims, strict=True)) for batches in per_rank]
    before = iter(batch_size_per_feature_pre_a2a)
    sizes = [sum(next(before) * d for d in of_rank) for of_rank in dims]
    flat = a2a_pooled_embs_tensor.reshape(-1)
    _require_shape(flat, [sum(send_sizes)])
    return exchanged(exchange, flat, send_sizes, sizes, lambda came: came, codecs)


def alltoall_sequence(
    a2a_sequence_embs_tensor: Tensor,
    forward_recat_tensor: Tensor | None,
    backward_recat_tensor: Tensor | None,
    lengths_after_sparse_data_all2all: Tensor,
    input_splits: Sequence[int],
    output_splits: Sequence[int],
    variable_batch_size: bool = False,
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """Rows of ids back to the ranks that asked for them.

    Shapes: input [ids, D], feature after feature and in each rank after rank; the result [ids of this rank's batch, D],
    rank after rank and in each feature after feature, as the ids were sent.

    Args:
        forward_recat_tensor: the order of (feature, rank) segments of the input in which they are sent, int32 or int64;
            that of single bags with `variable_batch_size`. None where they lie so already.
        backward_recat_tensor: its inverse; not needed.
        lengths_after_sparse_data_all2all: lengths of the bags that were looked up here, in the order of the input.
        input_splits, output_splits: how many ids this rank sent to each rank, and how many it got.
        variable_batch_size: whether batches of ranks differ.
        group, codecs: as `alltoall_pooled`.

    Raises:
        ValueError: sizes do not fit the input or each other.
    """
    exchange = exchange_of(group)
    rows = a2a_sequence_embs_tensor
    if exchange.alone:
        return NoWait(rows)
    if rows.dim() != 2:
        raise ValueError(f"rows of ids must be a matrix, got shape {list(rows.shape)}")
    _require_ranks(exchange, input_splits=input_splits, output_splits=output_splits)
    dim = rows.shape[1]
    _require_shape(rows, [sum(output_splits), dim])
    lengths = lengths_after_sparse_data_all2all
    if forward_recat_tensor is not None and lengths.numel():
        # the sum is known, so that no device is asked for it
        total = rows.shape[0]
        if variable_batch_size:
            rows = permute_1d(forward_recat_tensor, lengths.reshape(-1), rows, permuted_lengths_sum=total)[1]
        else:
            by_segment = lengths.reshape(forward_recat_tensor.shape[0], -1)
            rows = permute_2d(forward_recat_tensor, by_segment, rows, permuted_lengths_sum=total)[1]
    return exchanged(
        exchange, rows, [n * dim for n in output_splits], [n * dim for n in input_splits],
        lambda came: came.view(sum(input_splits), dim), codecs,
    )  # fmt: skip


def reduce_scatter_pooled(
    inputs: Sequence[Tensor],
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """The sum over ranks of what they have for this one: `inputs[r]` goes to rank r, and is of one shape on all ranks.

    Raises:
        ValueError: there is not one input for each rank.
    """
    exchange = exchange_of(group)
    _require_ranks(exchange, inputs=inputs)
    shape, sizes = inputs[exchange.rank].shape, [tensor.numel() for tensor in inputs]
    return summed(exchange, torch.cat([tensor.reshape(-1) for tensor in inputs]), sizes, shape, codecs)


def reduce_scatter_base_pooled(
    input: Tensor,
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """The sum over ranks of this one's part of `input` [W * n, ...], equal parts of the first dimension: [n, ...].

    Raises:
        ValueError: the first dimension does not divide by the ranks.
    """
    exchange = exchange_of(group)
    if input.dim() == 0 or input.shape[0] % exchange.world_size:
        raise ValueError(
            f"the first dimension of {list(input.shape)} does not divide by {exchange.world_size} ranks:"
            " reduce_scatter_v_pooled takes parts of any size"
        )
    return reduce_scatter_v_pooled(input, [input.shape[0] // exchange.world_size] * exchange.world_size, group, codecs)


def reduce_scatter_v_pooled(
    input: Tensor,
    input_splits: Sequence[int],
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """The sum over ranks of this one's part of `input` [N, ...], rows `input_splits[r]` being rank r's: [n, ...].

    Raises:
        ValueError: splits are not one for each rank, or do not add up to N.
    """
    exchange = exchange_of(group)
    _require_ranks(exchange, input_splits=input_splits)
    _require_shape(input, [sum(input_splits), *input.shape[1:]])
    rest = input.shape[1:].numel()
    shape = torch.Size([input_splits[exchange.rank], *input.shape[1:]])
    return summed(exchange, input, [n * rest for n in input_splits], shape, codecs)


def reduce_scatter_v_per_feature_pooled(
    input: Tensor,
    batch_size_per_rank_per_feature: Sequence[Sequence[int]],
    embedding_dims: Sequence[int],
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """As `reduce_scatter_v_pooled` of flat matrices: for each rank, for each feature, its [batch, dim].

    Args:
        batch_size_per_rank_per_feature: [ranks][features] batches.
        embedding_dims: width of each feature.

    Raises:
        ValueError: sizes do not fit the input or each other.
    """
    exchange = exchange_of(group)
    per_rank = batch_size_per_rank_per_feature or [[0] * len(embedding_dims)] * exchange.world_size
    _require_ranks(exchange, batch_size_per_rank_per_feature=per_rank)
    if any(len(batches) != len(embedding_dims) for batches in per_rank):
        raise ValueError(
            f"batch_size_per_rank_per_feature must have a number for each of {len(embedding_dims)} features,"
            f" got {[list(batches) for batches in per_rank]}"
        )
    splits = [sum(b * d for b, d in zip(batches, embedding_dims, strict=True)) for batches in per_rank]
    return reduce_scatter_v_pooled(input.reshape(-1), splits, group, codecs)


def all_gather_base_pooled(
    input: Tensor,
    group: dist.ProcessGroup | None = None,
    codecs: QuantizedCommCodecs | None = None,
) -> Awaitable[Tensor]:
    """All ranks' tensors [n, ...], of one shape, one below the other: [W * n, ...].

    Raises:
        ValueError: the input has no dimension.
    """
    exchange = exchange_of(group)
    if input.dim() == 0:
        raise ValueError("a tensor without dimensions cannot be gathered: give it one, input.view(1)")
    if exchange.alone:
        return NoWait(input)
    sizes, shape = [input.numel()] * exchange.world_size, [exchange.world_size * input.shape[0], *input.shape[1:]]
    repeated = copies(input.reshape(-1), exchange.world_size)
    return exchanged(exchange, repeated, sizes, sizes, lambda came: came.view(shape), codecs)


def exchange_of(group: dist.ProcessGroup | None) -> Exchange:
    """The collectives of a group, by default those of all ranks."""
    if group is None and not dist.is_initialized():
        raise RuntimeError("no process group: call torch.distributed.init_process_group, or pass group=")
    return Exchange(dist.group.WORLD if group is None else group)


def _refuse_comm(comm: object | None) -> None:
    if comm is not None:
        raise ValueError(
            f"all_to_all_single_comm: every exchange is torch.distributed's own, leave it None, got {comm!r}"
        )


def _require_ranks(exchange: Exchange, **lists: Sequence[Any]) -> None:
    for name, given in lists.items():
        if len(given) != exchange.world_size:
            raise ValueError(f"{name} must have one entry for each of {exchange.world_size} ranks, got {len(given)}")


def _require_shape(tensor: Tensor, shape: Sequence[int]) -> None:
    if list(tensor.shape) != list(shape):
        raise ValueError(f"by its sizes the input has shape {list(shape)}, got {list(tensor.shape)}")

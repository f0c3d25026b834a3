"""Modules that move embeddings between ranks, by TorchRec's names (torchrec.distributed.dist_data).

For sharded modules of your own; the engine of the collections does not run them. Each is a function of `comm_ops`,
which says what travels and what all ranks must do alike, with sizes that do not change from batch to batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.kernels import invert_permute

from ..comms.awaitable import Awaitable
from ..comms.qcomms import QuantizedCommCodecs
from .comm_ops import (
    all_gather_base_pooled,
    alltoall_pooled,
    alltoall_sequence,
    reduce_scatter_base_pooled,
    reduce_scatter_v_per_feature_pooled,
    reduce_scatter_v_pooled,
    variable_batch_alltoall_pooled,
)
from .dist_data import recat

Callback = Callable[[Tensor], Tensor]


class _TensorAwaitable(Awaitable[Tensor]):
    def __init__(self, tensor_awaitable: Awaitable[Tensor]) -> None:
        super().__init__()
        self._tensor_awaitable = tensor_awaitable

    def _wait_impl(self) -> Tensor:
        return self._tensor_awaitable.wait()


class PooledEmbeddingsAwaitable(_TensorAwaitable):
    """Pooled embeddings on their way; `callbacks` run on them when they are waited for."""


class SequenceEmbeddingsAwaitable(_TensorAwaitable):
    """Rows of ids on their way.

    Args:
        tensor_awaitable: the rows [ids, embedding_dim].
        unbucketize_permute_tensor: where each id's row is, if ids were divided into buckets; integers [ids].
        embedding_dim: width of a row.
    """

    def __init__(
        self, tensor_awaitable: Awaitable[Tensor], unbucketize_permute_tensor: Tensor | None, embedding_dim: int
    ) -> None:
        super().__init__(tensor_awaitable)
        if unbucketize_permute_tensor is not None:
            order = unbucketize_permute_tensor
            self.callbacks.append(lambda rows: rows.view(-1, embedding_dim).index_select(0, order))


class _OfRanks(nn.Module):
    """Args: pg: the ranks; codecs: how numbers travel."""

    def __init__(self, pg: dist.ProcessGroup, codecs: QuantizedCommCodecs | None = None) -> None:
        super().__init__()
        self._pg, self._codecs = pg, codecs


class _AllToAll(_OfRanks):
    """An all-to-all with functions of its results, its own list of them or the caller's."""

    def __init__(
        self, pg: dist.ProcessGroup, callbacks: list[Callback] | None, codecs: QuantizedCommCodecs | None
    ) -> None:
        super().__init__(pg, codecs)
        self._callbacks: list[Callback] = [] if callbacks is None else callbacks

    @property
    def callbacks(self) -> list[Callback]:
        """Functions of the result, of every forward from now on."""
        return self._callbacks

    def _lazily(self, tensor_awaitable: Awaitable[Tensor]) -> PooledEmbeddingsAwaitable:
        pooled = PooledEmbeddingsAwaitable(tensor_awaitable)
        pooled.callbacks.extend(self._callbacks)
        return pooled


class PooledEmbeddingsAllToAll(_AllToAll):
    """From each rank's columns for all batches to all columns for each rank's batch: `alltoall_pooled`.

    Args:
        pg: the ranks.
        dim_sum_per_rank: how many columns each rank looks up.
        device: not needed.
        callbacks: functions of the result, which run on it in this order.
        codecs: how numbers travel; by default as they are.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        dim_sum_per_rank: Sequence[int],
        device: torch.device | str | None = None,
        callbacks: list[Callback] | None = None,
        codecs: QuantizedCommCodecs | None = None,
    ) -> None:
        super().__init__(pg, callbacks, codecs)
        self._dim_sum_per_rank = list(dim_sum_per_rank)

    def forward(
        self, local_embs: Tensor, batch_size_per_rank: Sequence[int] | None = None
    ) -> PooledEmbeddingsAwaitable:
        """Send `local_embs` [sum of batches, columns of this rank]; [batch of this rank, all columns] comes.

        Args:
            local_embs: rows of rank 0's batch first.
            batch_size_per_rank: batches of the ranks; by default all alike.

        Raises:
            ValueError: sizes do not fit.
        """
        ranks = dist.get_world_size(self._pg)
        if not batch_size_per_rank:
            if local_embs.shape[0] % ranks:
                raise ValueError(
                    f"{local_embs.shape[0]} rows do not divide among {ranks} ranks: give batch_size_per_rank"
                )
            batch_size_per_rank = [local_embs.shape[0] // ranks] * ranks
        return self._lazily(
            alltoall_pooled(
                local_embs, batch_size_per_rank, self._dim_sum_per_rank, group=self._pg, codecs=self._codecs
            )
        )


class VariableBatchPooledEmbeddingsAllToAll(_AllToAll):
    """As `PooledEmbeddingsAllToAll` where features have batches of their own: `variable_batch_alltoall_pooled`.

    Args:
        pg: the ranks.
        emb_dim_per_rank_per_feature: [ranks][features of that rank] widths.
        device, callbacks, codecs: as `PooledEmbeddingsAllToAll`.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        emb_dim_per_rank_per_feature: Sequence[Sequence[int]],
        device: torch.device | str | None = None,
        callbacks: list[Callback] | None = None,
        codecs: QuantizedCommCodecs | None = None,
    ) -> None:
        super().__init__(pg, callbacks, codecs)
        self._emb_dim_per_rank_per_feature = [list(dims) for dims in emb_dim_per_rank_per_feature]

    def forward(
        self,
        local_embs: Tensor,
        batch_size_per_rank_per_feature: Sequence[Sequence[int]],
        batch_size_per_feature_pre_a2a: Sequence[int],
    ) -> PooledEmbeddingsAwaitable:
        """Send flat matrices; arguments, result and errors are those of `variable_batch_alltoall_pooled`."""
        return self._lazily(
            variable_batch_alltoall_pooled(
                local_embs, batch_size_per_rank_per_feature, batch_size_per_feature_pre_a2a,
                self._emb_dim_per_rank_per_feature, group=self._pg, codecs=self._codecs,
            )
        )  # fmt: skip


class PooledEmbeddingsReduceScatter(_OfRanks):
    """Sums over ranks of partial results, each rank its own batch: `reduce_scatter_v_pooled`.

    Args:
        pg: the ranks.
        codecs: how numbers travel; by default as they are. They are added in fp32.
    """

    def forward(self, local_embs: Tensor, input_splits: Sequence[int] | None = None) -> PooledEmbeddingsAwaitable:
        """Send `local_embs` [sum of batches, D], rank r's `input_splits[r]` rows after those of rank r - 1.

        Without splits all batches are alike. Raises ValueError where sizes do not fit.
        """
        if input_splits:
            return PooledEmbeddingsAwaitable(
                reduce_scatter_v_pooled(local_embs, input_splits, self._pg, codecs=self._codecs)
            )
        return PooledEmbeddingsAwaitable(reduce_scatter_base_pooled(local_embs, self._pg, codecs=self._codecs))


class VariableBatchPooledEmbeddingsReduceScatter(_OfRanks):
    """As `PooledEmbeddingsReduceScatter` of flat matrices, features having batches of their own.

    Args:
        pg, codecs: as `PooledEmbeddingsReduceScatter`.
    """

    def forward(
        self,
        local_embs: Tensor,
        batch_size_per_rank_per_feature: Sequence[Sequence[int]],
        embedding_dims: Sequence[int],
    ) -> PooledEmbeddingsAwaitable:
        """Send flat matrices; arguments, result and errors are those of `reduce_scatter_v_per_feature_pooled`."""
        return PooledEmbeddingsAwaitable(
            reduce_scatter_v_per_feature_pooled(
                local_embs, batch_size_per_rank_per_feature, embedding_dims, self._pg, codecs=self._codecs
            )
        )


class PooledEmbeddingsAllGather(_OfRanks):
    """All ranks' tensors, one below the other: `all_gather_base_pooled`.

    Args:
        pg: the ranks.
        codecs: how numbers travel; by default as they are.
    """

    def forward(self, local_emb: Tensor) -> PooledEmbeddingsAwaitable:
        """Send `local_emb` [n, D], of one shape on all ranks, to every rank; [ranks * n, D] comes."""
        return PooledEmbeddingsAwaitable(all_gather_base_pooled(local_emb, self._pg, codecs=self._codecs))


class SequenceEmbeddingsAllToAll(_OfRanks):
    """Rows of ids back to the ranks that asked for them: `alltoall_sequence`.

    Args:
        pg: the ranks.
        features_per_rank: how many features each rank looks up.
        device: where rows are; only the first forward moves to it what is kept.
        codecs: how numbers travel; by default as they are.

    Raises:
        ValueError: features are not said for each rank.
    """

    _order: Tensor | None

    def __init__(
        self,
        pg: dist.ProcessGroup,
        features_per_rank: Sequence[int],
        device: torch.device | str | None = None,
        codecs: QuantizedCommCodecs | None = None,
    ) -> None:
        super().__init__(pg, codecs)
        ranks = dist.get_world_size(pg)
        if len(features_per_rank) != ranks:
            raise ValueError(
                f"features_per_rank must have one entry for each of {ranks} ranks, got {features_per_rank}"
            )
        self._features = features_per_rank[dist.get_rank(pg)]
        back = recat(self._features, ranks)
        where = None if device is None else torch.device(device)
        self.register_buffer("_order", None if back is None else invert_permute(back).to(where), persistent=False)

    def forward(
        self,
        local_embs: Tensor,
        lengths: Tensor,
        input_splits: Sequence[int],
        output_splits: Sequence[int],
        unbucketize_permute_tensor: Tensor | None = None,
        batch_size_per_rank: Sequence[int] | None = None,
        sparse_features_recat: Tensor | None = None,
    ) -> SequenceEmbeddingsAwaitable:
        """Send rows [ids, D] of a batch that `KJTAllToAll` made; rows of this rank's own ids come, as it sent them.

        Args:
            local_embs: rows, feature after feature and in each rank after rank.
            lengths: of that batch.
            input_splits, output_splits: how many ids this rank sent to each rank, and how many it got.
            unbucketize_permute_tensor: brings rows back into the order before `bucketize_kjt_before_all2all`.
            batch_size_per_rank: batches of the ranks, where they differ.
            sparse_features_recat: the order of segments (of bags where batches differ) that made up that batch, where
                it was another than that of `KJTAllToAll` with these features.

        Raises:
            ValueError: sizes do not fit.
        """
        varied = batch_size_per_rank is not None and len(set(batch_size_per_rank)) > 1
        back = sparse_features_recat
        if back is None and varied:
            back = recat(self._features, dist.get_world_size(self._pg), 1, local_embs.device, batch_size_per_rank)
        if back is not None:
            order: Tensor | None = invert_permute(back)
        else:
            if self._order is not None and self._order.device != local_embs.device:
                self._order = self._order.to(local_embs.device)
            order = self._order
        rows = alltoall_sequence(
            local_embs, order, back, lengths, input_splits, output_splits, varied, self._pg, self._codecs
        )
        return SequenceEmbeddingsAwaitable(rows, unbucketize_permute_tensor, local_embs.shape[1])


class _ToOneDevice(nn.Module):
    """Tensors of the devices of one process on one of them.

    Args:
        device: where the result is.
        world_size: how many tensors there are.
    """

    def __init__(self, device: torch.device | str, world_size: int) -> None:
        super().__init__()
        self._device, self._world_size = torch.device(device), world_size

    def set_device(self, device_str: str) -> None:
        """Put results of later calls there."""
        self._device = torch.device(device_str)

    def _moved(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        if len(tensors) != self._world_size:
            raise ValueError(f"there must be {self._world_size} tensors, one of each device, got {len(tensors)}")
        return [tensor.to(self._device) for tensor in tensors]


class EmbeddingsAllToOneReduce(_ToOneDevice):
    """The sum of tensors of the devices of one process, added in their order. ValueError for another number of them."""

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors of one shape."""
        first, *rest = self._moved(tensors)
        total = first
        for tensor in rest:
            total = total + tensor
        return total


class SeqEmbeddingsAllToOne(_ToOneDevice):
    """Tensors of the devices of one process, all on one. ValueError for another number of them."""

    def forward(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Tensors of any shapes."""
        return self._moved(tensors)


class EmbeddingsAllToOne(_ToOneDevice):
    """Tensors of the devices of one process, joined on one.

    Args:
        device: where the result is.
        world_size: number of devices; fewer tensors will do.
        cat_dim: the dimension they are joined along: 1 of pooled embeddings, 0 of rows of ids.

    Raises:
        ValueError: on a call, there are more tensors than devices, or none.
    """

    def __init__(self, device: torch.device | str, world_size: int, cat_dim: int) -> None:
        super().__init__(device, world_size)
        self._cat_dim = cat_dim

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        """Tensors that agree but for that dimension."""
        if not 0 < len(tensors) <= self._world_size:
            raise ValueError(f"there must be 1 to {self._world_size} tensors, one of a device, got {len(tensors)}")
        moved = [tensor.to(self._device) for tensor in tensors]
        return moved[0] if len(moved) == 1 else torch.cat(moved, dim=self._cat_dim)

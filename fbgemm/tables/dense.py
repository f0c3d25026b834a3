"""Tables in one parameter, whose gradient is dense: `DenseTableBatchedEmbeddingBagsCodegen`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from shardwise.embeddings.optim.fbgemm_types import PoolingMode, SparseType
from shardwise.embeddings.policy import LookupPolicy
from shardwise.kernels import flatten_segments, pooled_lookup, sequence_lookup

from .buffers import Parts
from .table_batched import TableBatched, features_of, require_shapes, trained_dtype
from .variable_batch import cut_to_ranks


class DenseTableBatchedEmbeddingBagsCodegen(TableBatched):
    """Tables whose weights are one flat parameter `weights`, trained by any optimizer.

    Where dims differ, tables lie in `weights` by their dims, each from `weights_physical_offsets` on; a state dict has
    them in their own order, as FBGEMM's. An index outside its table raises. `PoolingMode.NONE` and several batch sizes
    are served on the CPU too.

    Args:
        embedding_specs: (rows, dim) of each table.
        feature_table_map: the table of each feature; by default each table has one.
        weights_precision, output_dtype: FP32, FP16 or BF16.
        pooling_mode: how the rows of a bag become one.
        use_cpu: put the tables on the CPU; otherwise they are on the current CUDA device.
        use_mtia: has to be False.

    Raises:
        ValueError: an argument is not served, or the tables do not fit it.

    Example:
        >>> tables = DenseTableBatchedEmbeddingBagsCodegen([(10, 4), (20, 8)], use_cpu=True)
        >>> tables(torch.tensor([1, 2, 3]), torch.tensor([0, 2, 3])).shape
        torch.Size([1, 12])
    """

    weights: nn.Parameter

    def __init__(
        self,
        embedding_specs: list[tuple[int, int]],
        feature_table_map: list[int] | None = None,
        weights_precision: SparseType = SparseType.FP32,
        pooling_mode: PoolingMode = PoolingMode.SUM,
        use_cpu: bool = False,
        output_dtype: SparseType = SparseType.FP32,
        use_mtia: bool = False,
    ) -> None:
        super().__init__()
        if use_mtia:
            raise ValueError("use_mtia=True is not served: tables are on a CPU or on CUDA")
        self.embedding_specs, self.pooling_mode = embedding_specs, PoolingMode(pooling_mode)
        self.use_cpu, self.use_mtia = use_cpu, use_mtia
        dtype = trained_dtype(weights_precision, "weights_precision")
        policy = LookupPolicy(output_dtype=trained_dtype(output_dtype, "output_dtype"))
        self.weights_precision, self.output_dtype = weights_precision, output_dtype.as_int()
        rows, dims = [spec[0] for spec in embedding_specs], [spec[1] for spec in embedding_specs]
        require_shapes(rows, dims, self.pooling_mode)
        self.feature_table_map = features_of(feature_table_map, len(rows))
        self._lay_tables(
            rows, dims, names=[f"table-{t}" for t in range(len(rows))], dtype=dtype,
            device=torch.device("cpu") if use_cpu else torch.device("cuda", torch.cuda.current_device()),
            optimizer=None, policy=policy,
        )  # fmt: skip
        parts = self._parts["element"]
        self.weights_physical_offsets = [*parts.starts, self._group.flat.numel()]
        self._describe("weights_offsets", [parts.starts[t] for t in self.feature_table_map])
        for weights in self.split_embedding_weights():
            weights.normal_()
        self._show()

    def forward(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None = None,
        feature_requires_grad: Tensor | None = None,
        batch_size_per_feature_per_rank: list[list[int]] | None = None,
    ) -> Tensor:
        """Look a batch up: [B, total_D], or [N, D] where nothing is pooled.

        Args:
            indices: [N] rows, feature by feature, sample by sample.
            offsets: [T * B + 1] where the bags begin.
            per_sample_weights: [N] by which rows are scaled; it has a gradient. Nothing is scaled without pooling.
            feature_requires_grad: [T] of which features the weights have one; of all by default.
            batch_size_per_feature_per_rank: `[T][R]`; the output is then one vector, the rows of rank after rank.

        Raises:
            IndexError, ValueError, TypeError: an index, an offset, a size, a type or a device is bad; says which.
        """
        sizes = batch_size_per_feature_per_rank
        batch = self._prepare(indices, offsets, per_sample_weights, feature_requires_grad, sizes)
        group = self._group
        if self.weights.numel() != group.flat.numel():
            raise ValueError(f"weights must have {group.flat.numel()} elements, got {self.weights.numel()}")
        segments, dtype = flatten_segments(group.segments), group.policy.output_dtype
        if self.pooling_mode is PoolingMode.NONE:
            return sequence_lookup(self.weights, *batch[:2], group.features, self.max_D, segments, dtype)
        out = pooled_lookup(self.weights, *batch, group.features, group.dims, segments, group.pooling, dtype)
        return out if sizes is None else cut_to_ranks(out, sizes, group.dims)

    def _buffers_of_tables(self) -> dict[str, tuple[Tensor, Parts]]:
        return {"weights": (self._group.flat, self._parts["element"])}

    def _buffers_of_starts(self) -> dict[str, Parts]:
        return {"weights_offsets": self._parts["element"]}

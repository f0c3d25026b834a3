"""What FBGEMM's modules of tables have in common here: a `TableGroup`, its buffers by FBGEMM's names, and batches.

Shapes: T features of tables [R_t, D_t], B samples; indices [N], offsets [T * B + 1], per-sample weights [N].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.embeddings.optim.fbgemm_types import PoolingMode, SparseType
from shardwise.embeddings.policy import LookupPolicy
from shardwise.embeddings.tables.table_group import TableGroup
from shardwise.embeddings.tables.table_layout import LookupFeature, OptimizerSpec, TableShape, lay_out

from .buffers import Parts
from .variable_batch import pad_bags, require_batch_sizes

# buffers that say what the tables are: a checkpoint of other tables is refused by them
_DESCRIBE = ("D_offsets", "hash_size_cumsum", "rows_per_table")


def features_of(feature_table_map: Sequence[int] | None, tables: int) -> list[int]:
    """The table of each feature; by default each table has one.

    Raises:
        ValueError: a feature is of no table, or a table has none.
    """
    features = list(range(tables)) if feature_table_map is None else [int(t) for t in feature_table_map]
    if outside := [t for t in features if not 0 <= t < tables]:
        raise ValueError(f"feature_table_map names tables {outside} of {tables}")
    if without := sorted(set(range(tables)) - set(features)):
        raise ValueError(f"tables {without} have no feature in feature_table_map")
    return features


def require_shapes(rows: Sequence[int], dims: Sequence[int], pooling_mode: PoolingMode) -> None:
    """Refuse tables that no lookup takes.

    Raises:
        ValueError: there is none, a size is negative or a dim 0, or dims differ and nothing is pooled.
    """
    if not rows:
        raise ValueError("embedding_specs is empty: at least one table is wanted")
    for t, (count, dim) in enumerate(zip(rows, dims, strict=True)):
        if count < 0 or dim <= 0:
            raise ValueError(f"table {t}: rows must not be negative and dim must be positive, got {count} x {dim}")
    if pooling_mode is PoolingMode.NONE and len(set(dims)) > 1:
        raise ValueError(f"pooling_mode=PoolingMode.NONE wants tables of one dim, got {sorted(set(dims))}")


def trained_dtype(precision: SparseType, argument: str) -> torch.dtype:
    """Torch's name of a type that tables train in, or answer in.

    Raises:
        ValueError: they do not; names the argument.
    """
    if precision not in (SparseType.FP32, SparseType.FP16, SparseType.BF16):
        name = precision.name if isinstance(precision, SparseType) else repr(precision)
        raise ValueError(f"{argument}={name} is not served: FP32, FP16 and BF16 of SparseType are")
    return precision.as_dtype()


class TableBatched(nn.Module):
    """Base: tables in one `TableGroup`, whose buffers are shown under FBGEMM's names.

    A subclass says in `_buffers_of_tables` which buffers are shown, and in `_shown_as_parameter` how.
    """

    embedding_specs: Sequence[tuple[Any, ...]]
    pooling_mode: PoolingMode
    feature_table_map: list[int]
    D_offsets: Tensor
    hash_size_cumsum: Tensor
    feature_dims: Tensor
    _group: TableGroup
    # what was shown last, by name
    _shown: dict[str, Tensor]
    # buffers that follow from the constructor's arguments
    _described: dict[str, list[int]]

    def _lay_tables(
        self,
        rows: Sequence[int],
        dims: Sequence[int],
        *,
        names: Sequence[str],
        dtype: torch.dtype,
        device: torch.device,
        optimizer: OptimizerSpec | None,
        policy: LookupPolicy,
    ) -> None:
        """Make the tables, of zeros, and what describes them."""
        features, mean = self.feature_table_map, self.pooling_mode is PoolingMode.MEAN
        shapes = [TableShape(name, count, dim) for name, count, dim in zip(names, rows, dims, strict=True)]
        lookups = [LookupFeature(str(f), t, mean) for f, t in enumerate(features)]
        self._group = TableGroup(shapes, lookups, dtype=dtype, device=device, optimizer=optimizer, policy=policy)
        self._group.flat.zero_()
        self._described, self._shown = {}, {}
        bases, first_rows, _, _ = lay_out(shapes)
        # of what has a number for each element, and of what has one for each row
        self._parts = {
            "element": Parts(tuple(bases), tuple(count * dim for count, dim in zip(rows, dims, strict=True))),
            "row": Parts(tuple(first_rows), tuple(rows)),
        }
        feature_dims = [dims[t] for t in features]
        self.total_D, self.max_D = sum(feature_dims), max(dims)
        firsts = [0, *accumulate(rows)]
        self.total_hash_size_bits = firsts[-1].bit_length()
        self._describe("D_offsets", [0, *accumulate(feature_dims)], torch.int32)
        self._describe("hash_size_cumsum", [*(firsts[t] for t in features), firsts[-1]])
        self._describe("feature_dims", feature_dims, device=torch.device("cpu"))

    def _describe(
        self,
        name: str,
        numbers: Sequence[int],
        dtype: torch.dtype = torch.int64,
        *,
        device: torch.device | None = None,
    ) -> None:
        """Register numbers as a buffer."""
        self.register_buffer(name, torch.tensor(list(numbers), dtype=dtype, device=device or self._group.device))
        self._described[name] = list(numbers)

    @property
    def current_device(self) -> torch.device:
        """Where the tables are."""
        return self._group.device

    def split_embedding_weights(self) -> list[Tensor]:
        """Each table as [R, D]: writing into it changes the table. It has no gradient."""
        self._take_back()
        return [self._group.view(t) for t in range(len(self._group.tables))]

    @torch.no_grad()
    def init_embedding_weights_uniform(self, min_val: float, max_val: float) -> None:
        """Fill all tables with random numbers from this range, one table after another."""
        for weights in self.split_embedding_weights():
            weights.uniform_(min_val, max_val)

    def _buffers_of_tables(self) -> dict[str, tuple[Tensor, Parts]]:
        """The group's buffers by the names under which they are shown, and how tables lie in them."""
        raise AssertionError("each class shows its own")

    def _buffers_of_starts(self) -> dict[str, Parts]:
        """Buffers with the first element of each feature's table, and of what."""
        return {}

    def _shown_as_parameter(self, name: str) -> bool:
        return True

    def _show(self) -> None:
        """Put the group's buffers where programs look for them; parameters stay the objects that they are."""
        for name, (buffer, _) in self._buffers_of_tables().items():
            shown = self._parameters.get(name)
            if not self._shown_as_parameter(name):
                self._buffers[name] = buffer
            elif shown is None or shown.is_meta != buffer.is_meta:
                self._parameters[name] = nn.Parameter(buffer, requires_grad=shown is None or shown.requires_grad)
            elif _address(shown) != _address(buffer) or shown.dtype != buffer.dtype:
                shown.data = buffer
        self._shown = {name: buffer for name, (buffer, _) in self._buffers_of_tables().items()}

    @torch.no_grad()
    def _take_back(self) -> None:
        """Copy into the tables what `weights_host.data = ...` and the like put elsewhere.

        Raises:
            ValueError: it has another size, or stands there for one call only; names it.
        """
        if torch.compiler.is_compiling():
            return
        replaced = []
        for name, buffer in self._shown.items():
            shown: Tensor = getattr(self, name)
            if _address(shown) == _address(buffer):
                continue
            if type(shown) is Tensor and name in self._parameters:
                raise ValueError(
                    f"{name} is another tensor for the time of a call, as by torch.func.functional_call: these tables"
                    " keep their rows; DenseTableBatchedEmbeddingBagsCodegen looks up in what it is given"
                )
            if shown.numel() != buffer.numel():
                raise ValueError(f"{name} must have {buffer.numel()} elements, got {shown.numel()}")
            replaced.append((buffer, shown.detach()))
        for buffer, shown in replaced:
            buffer.copy_(shown.view(buffer.shape))
        if replaced:
            # of all of them, so not before the last was read
            self._show()

    def _hide(self) -> dict[str, Tensor | None]:
        """Take them out of the module, for what treats every tensor of it by itself."""
        names = self._buffers_of_tables()
        hidden: dict[str, Tensor | None] = {name: self._buffers.pop(name) for name in names if name in self._buffers}
        return hidden | {name: self._parameters.pop(name) for name in names if name in self._parameters}

    def _unhide(self, hidden: Mapping[str, Tensor | None]) -> None:
        for name, tensor in hidden.items():
            if isinstance(tensor, nn.Parameter):
                self._parameters[name] = tensor
            else:
                self._buffers[name] = tensor
        self._show()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        self._take_back()
        hidden = self._hide()
        try:
            self._group.move(fn)
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            grads = {name: shown.grad for name, shown in hidden.items() if isinstance(shown, nn.Parameter)}
            for shown in hidden.values():
                if isinstance(shown, nn.Parameter):
                    # it has to be of the dtype and device of what it belongs to
                    shown.grad = None
            self._unhide(hidden)
            for name, grad in grads.items():
                shown = self._parameters[name]
                if grad is not None and shown is not None:
                    shown.grad = fn(grad)
        for name, numbers in self._described.items():
            # to_empty leaves anything there
            getattr(self, name).copy_(torch.tensor(numbers, device="cpu"))
        return self

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, (_, parts) in self._buffers_of_tables().items():
            if prefix + name in destination:
                destination[prefix + name] = parts.pack(destination[prefix + name])
        for name, parts in self._buffers_of_starts().items():
            if prefix + name in destination:
                starts = [parts.packed_starts[t] for t in self.feature_table_map]
                destination[prefix + name] = torch.tensor(starts, device=destination[prefix + name].device)

    @torch.no_grad()
    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        self._take_back()
        loaded = {name: value for name, value in state_dict.items() if name.startswith(prefix)}
        for name in _DESCRIBE:
            own, given = self._buffers.get(name), loaded.get(prefix + name)
            if own is not None and given is not None and not own.is_meta and not _equal(own, given):
                error_msgs.append(
                    f"{prefix}{name}: the checkpoint is of other tables, {given.tolist()}, here it is {own.tolist()}"
                )
        for name, (buffer, parts) in self._buffers_of_tables().items():
            given = self._given(loaded, prefix, name)
            if name in self._non_persistent_buffers_set:
                continue
            if given is None:
                missing_keys.append(prefix + name)
            elif given.numel() != parts.elements:
                error_msgs.append(f"size mismatch for {prefix}{name}: {given.numel()} elements for {parts.elements}")
            elif buffer.is_meta:
                error_msgs.append(f"{prefix}{name} is on meta: call to_empty() before load_state_dict()")
            else:
                parts.fill(buffer, given)
        # what follows from the constructor's arguments stays
        for name in self._own_names():
            if prefix + name in loaded:
                loaded[prefix + name] = self._buffers[name]
        hidden = self._hide()
        try:
            super()._load_from_state_dict(
                loaded, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
        finally:
            self._unhide(hidden)

    def _given(self, loaded: dict[str, Any], prefix: str, name: str) -> Tensor | None:
        """Take out of a state dict what it has for a buffer."""
        given: Tensor | None = loaded.pop(prefix + name, None)
        return given

    def _own_names(self) -> list[str]:
        """Buffers that no state dict changes."""
        return [*(name for name in (*_DESCRIBE, "feature_dims") if name in self._buffers), *self._buffers_of_starts()]

    def __getstate__(self) -> dict[str, Any]:
        # what is shown is the group's
        self._take_back()
        names = self._buffers_of_tables()
        kept = {
            "_parameters": {name: shown for name, shown in self._parameters.items() if name not in names},
            "_buffers": {name: shown for name, shown in self._buffers.items() if name not in names},
            "_frozen": [name for name, shown in self.named_parameters() if name in names and not shown.requires_grad],
        }
        return {**self.__dict__, **kept, "_shown": {}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        frozen = state.pop("_frozen")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._show()
        for name in frozen:
            getattr(self, name).requires_grad_(False)

    def _prepare(
        self,
        indices: Tensor,
        offsets: Tensor,
        per_sample_weights: Tensor | None,
        feature_requires_grad: Tensor | None,
        sizes: Sequence[Sequence[int]] | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Indices, offsets of one batch size and weights as lookups take them, checked.

        Raises:
            IndexError, ValueError, TypeError: as the bounds check has them, and for shapes and devices that do not fit.
        """
        group = self._group
        for name, tensor in (("indices", indices), ("offsets", offsets), ("per_sample_weights", per_sample_weights)):
            if tensor is None:
                continue
            if tensor.dim() != 1:
                raise ValueError(f"{name} must have one dimension, got shape {list(tensor.shape)}")
            if tensor.device != group.device:
                raise ValueError(f"{name} are on {tensor.device}, the tables on {group.device}")
        if sizes is not None:
            if self.pooling_mode is PoolingMode.NONE:
                raise ValueError("batch_size_per_feature_per_rank is for pooled lookups, pooling_mode is NONE")
            require_batch_sizes(sizes, len(group.lookups), offsets)
            offsets = pad_bags(offsets, sizes)
        group.check(indices, offsets)
        # kernels take one type for both
        offsets = offsets.to(indices.dtype)
        if per_sample_weights is None or self.pooling_mode is PoolingMode.NONE:
            return indices, offsets, None
        if per_sample_weights.shape != indices.shape:
            raise ValueError(f"per_sample_weights are {len(per_sample_weights)} for {len(indices)} indices")
        weights = per_sample_weights.float()
        if feature_requires_grad is not None and weights.requires_grad:
            weights = _with_gradient_of(weights, offsets, feature_requires_grad, len(group.lookups))
        return indices, offsets, weights


def _with_gradient_of(weights: Tensor, offsets: Tensor, wanted: Tensor, features: int) -> Tensor:
    """The same weights [N], of which only those of features that are `wanted` [T] have a gradient."""
    if wanted.numel() != features:
        raise ValueError(f"feature_requires_grad must have a number for each of {features} features, got {len(wanted)}")
    batch = (offsets.numel() - 1) // features
    if not batch:
        return weights
    position = torch.arange(weights.shape[0], dtype=offsets.dtype, device=offsets.device)
    # bad offsets must lead nowhere on CUDA, where they raise later
    feature = torch.searchsorted(offsets[batch::batch].contiguous(), position, right=True).clamp(max=features - 1)
    return torch.where(wanted.to(weights.device).bool()[feature], weights, weights.detach())


def _equal(own: Tensor, given: Tensor) -> bool:
    return own.shape == given.shape and torch.equal(own.cpu(), given.cpu().to(own.dtype))


def _address(tensor: Tensor) -> int:
    """Where a tensor's memory is; 0 for tensors that have none (meta, fake)."""
    return tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) and not tensor.is_meta else 0

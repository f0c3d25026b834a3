"""`LocalShardsWrapper`: a rank's pieces of a tensor that is cut over ranks, as one tensor that a DTensor can hold.

torch.distributed.checkpoint saves and loads its pieces one by one, by their places in the whole. It has no memory of
its own, and takes the operations below, which act on each piece.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

aten = torch.ops.aten


class LocalShardsWrapper(Tensor):
    """Pieces of one tensor, on one device and of one dtype, and where each begins in the whole.

    Its shape is that of the pieces side by side along columns, [R, sum of D_i]; pieces of one dimension lie one behind
    the other. Where a rank has none it is [0, 0], on meta.

    Args:
        local_shards: the pieces, [R_i, D_i] or [N_i]; they are kept, not copied.
        local_offsets: the place of each piece's first element in the whole.
        dtype: of the tensor, where there is no piece to tell it.

    Raises:
        ValueError: offsets do not fit the pieces, or the pieces differ in device, dtype or number of dimensions.

    Example:
        >>> pieces = LocalShardsWrapper([torch.zeros(4, 2), torch.ones(4, 3)], [(0, 0), (0, 5)])
        >>> pieces.shape, pieces.local_offsets()[1]
        (torch.Size([4, 5]), torch.Size([0, 5]))
    """

    _local_shards: list[Tensor]
    _storage_meta: TensorStorageMetadata

    @staticmethod
    def __new__(
        cls,
        local_shards: Sequence[Tensor],
        local_offsets: Sequence[Sequence[int]],
        *,
        dtype: torch.dtype | None = None,
    ) -> LocalShardsWrapper:
        shards, offsets = list(local_shards), [torch.Size(offset) for offset in local_offsets]
        _require_alike(shards, offsets)
        size, device = torch.Size([0, 0]), torch.device("meta")
        dtype = dtype or torch.get_default_dtype()
        chunks, properties = [ChunkStorageMetadata(size, size)], TensorProperties(dtype=dtype)
        if shards:
            along = min(shards[0].dim(), 2) - 1
            total = sum(shard.shape[along] for shard in shards)
            size = torch.Size([*shards[0].shape[:along], total, *shards[0].shape[along + 1 :]])
            chunks = [ChunkStorageMetadata(at, shard.shape) for at, shard in zip(offsets, shards, strict=True)]
            dtype, device = shards[0].dtype, shards[0].device
            properties = TensorProperties.create_from_tensor(shards[0])
        made: LocalShardsWrapper = Tensor._make_wrapper_subclass(cls, size, dtype=dtype, device=device)
        made._local_shards = shards
        made._storage_meta = TensorStorageMetadata(properties, size, chunks)
        return made

    def __init__(
        self,
        local_shards: Sequence[Tensor],
        local_offsets: Sequence[Sequence[int]],
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        # what there is was made with the tensor
        super().__init__()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        run = _OPS.get(func)
        if run is None:
            raise NotImplementedError(
                f"{func} is not supported for LocalShardsWrapper: call it on each of its local_shards()"
            )
        return run(func, *args, **(kwargs or {}))

    def local_shards(self) -> list[Tensor]:
        """The pieces; none where this rank holds nothing of the tensor."""
        return self._local_shards

    def local_sizes(self) -> list[torch.Size]:
        """The shape of each piece; [0, 0] where there is none."""
        return [chunk.sizes for chunk in self._storage_meta.chunks]

    def local_offsets(self) -> list[torch.Size]:
        """Where each piece begins in the whole; at [0, 0] where there is none."""
        return [chunk.offsets for chunk in self._storage_meta.chunks]

    @property
    def local_chunks(self) -> list[ChunkStorageMetadata]:
        """Place and shape of each piece, as checkpoints have them."""
        return self._storage_meta.chunks

    def storage_metadata(self) -> TensorStorageMetadata:
        """All that checkpoints write of these pieces beside their numbers."""
        return self._storage_meta

    def is_empty_shard(self) -> bool:
        """Whether this rank holds nothing of the tensor."""
        return not self._local_shards

    def is_pinned(self, device: Any = None) -> bool:
        """Whether the pieces are in pinned memory."""
        return bool(self._storage_meta.properties.pin_memory)

    def requires_grad_(self, requires_grad: bool = True) -> LocalShardsWrapper:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Have the pieces want a gradient, or none."""
        self._storage_meta.properties.requires_grad = requires_grad
        for shard in self._local_shards:
            shard.requires_grad_(requires_grad)
        return self

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        """What torch.distributed.checkpoint writes: an item for each piece, of the tensor `object` that has them."""
        properties, size = self._storage_meta.properties, object.size()
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, size),
            )
            for _, chunk in zip(self._local_shards, self.local_chunks, strict=False)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        """The pieces that torch.distributed.checkpoint is to fill."""
        return self.local_chunks if self._local_shards else []

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        """The piece of an index: by its number where its place agrees, else by its place.

        Raises:
            ValueError: no piece begins there.
        """
        if not self._local_shards:
            return torch.empty(0, device="cpu")
        number, offsets = index.index, self.local_offsets()
        if number is None or number >= len(offsets) or offsets[number] != index.offset:
            number = next((n for n, offset in enumerate(offsets) if offset == index.offset), None)
        if number is None:
            begins = [list(offset) for offset in offsets]
            raise ValueError(
                f"Could not find shard at '{index.offset}' for FQN: '{index.fqn}': pieces begin at {begins}"
            )
        return self._local_shards[number]

    def _get_tensor_size_bytes(self) -> int:
        return sum(shard.numel() * shard.element_size() for shard in self._local_shards)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return LocalShardsWrapper, _parts(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> LocalShardsWrapper:
        if id(self) not in memo:
            memo[id(self)] = self.clone()
        copied: LocalShardsWrapper = memo[id(self)]
        return copied

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"LocalShardsWrapper:{self._local_shards} {self._storage_meta}"

    __str__ = __repr__


def _require_alike(shards: Sequence[Tensor], offsets: Sequence[torch.Size]) -> None:
    if not shards and len(offsets) <= 1:
        # pieces of no rank may keep the place that stands for none
        return
    if len(shards) != len(offsets):
        raise ValueError(f"LocalShardsWrapper: {len(shards)} local_shards, but {len(offsets)} local_offsets")
    for what in ("device", "dtype"):
        kinds = {getattr(shard, what) for shard in shards}
        if len(kinds) > 1:
            raise ValueError(f"LocalShardsWrapper: local_shards have one {what}, got {sorted(map(str, kinds))}")
    for shard, offset in zip(shards, offsets, strict=True):
        if shard.dim() != shards[0].dim() or shard.dim() != len(offset):
            raise ValueError(
                f"LocalShardsWrapper: a piece of shape {list(shard.shape)} cannot begin at {list(offset)} beside pieces"
                f" of {shards[0].dim()} dimensions"
            )


def _parts(wrapper: LocalShardsWrapper) -> tuple[list[Tensor], list[torch.Size]]:
    shards = wrapper.local_shards()
    return shards, wrapper.local_offsets()[: len(shards)]


def _of_each(func: Any, wrapper: LocalShardsWrapper, *args: Any, **kwargs: Any) -> LocalShardsWrapper:
    shards, offsets = _parts(wrapper)
    memory_format, asked = kwargs.get("memory_format"), kwargs.get("dtype") or wrapper.dtype
    if memory_format not in (None, torch.preserve_format):
        raise NotImplementedError(f"{memory_format} is not supported for LocalShardsWrapper: call its local_shards()")
    return LocalShardsWrapper([func(shard, *args, **kwargs) for shard in shards], offsets, dtype=asked)


def _in_place(func: Any, wrapper: LocalShardsWrapper, *args: Any) -> LocalShardsWrapper:
    for shard in wrapper.local_shards():
        func(shard, *args)
    return wrapper


def _copy(func: Any, target: LocalShardsWrapper, source: Any, non_blocking: bool = False) -> LocalShardsWrapper:
    if not isinstance(source, LocalShardsWrapper) or source.local_sizes() != target.local_sizes():
        has = source.local_sizes() if isinstance(source, LocalShardsWrapper) else type(source).__name__
        raise ValueError(f"LocalShardsWrapper.copy_: pieces of {target.local_sizes()} cannot be filled from {has}")
    for into, shard in zip(target.local_shards(), source.local_shards(), strict=True):
        func(into, shard, non_blocking)
    return target


def _view(func: Any, wrapper: LocalShardsWrapper, size: Sequence[int]) -> LocalShardsWrapper:
    """`view`: of several pieces their own shapes, which is what DTensor asks for by the shape of all together."""
    shards, offsets = _parts(wrapper)
    if len(shards) < 2:
        return LocalShardsWrapper([func(shard, size) for shard in shards], offsets)
    if tuple(size) != tuple(wrapper.shape):
        raise ValueError(f"LocalShardsWrapper of {len(shards)} pieces, {list(wrapper.shape)}, has no view {list(size)}")
    return _of_each(aten.alias.default, wrapper)


def _equal(func: Any, a: Any, b: Any) -> bool:
    """Whether places, shapes and numbers of all pieces are the same, in the same order."""
    if not isinstance(a, LocalShardsWrapper) or not isinstance(b, LocalShardsWrapper):
        return False
    if a.local_chunks != b.local_chunks or a.dtype != b.dtype:
        return False
    return all(map(func, a.local_shards(), b.local_shards()))


def _gathered(func: Any, wrapper: LocalShardsWrapper, group_size: int, group_name: str) -> Any:
    """All-gather, as `DTensor.full_tensor` asks for it: of rows that are this rank's block of them, in rank order.

    Raises:
        NotImplementedError: the pieces lie elsewhere in the whole, which the ranks' pieces one below the other are not.
    """
    rank = dist.get_rank(c10d._resolve_process_group(cast(Any, group_name)))  # type: ignore[attr-defined]
    shards, rows = wrapper.local_shards(), sum(shard.shape[0] for shard in wrapper.local_shards())
    place = rank * rows
    for shard, offset in zip(shards, wrapper.local_offsets(), strict=False):
        if list(offset) != [place, *[0] * (shard.dim() - 1)] or shard.shape[1:] != shards[0].shape[1:]:
            raise NotImplementedError(
                f"rank {rank}: a piece of shape {list(shard.shape)} at {list(offset)} is no block of rows in rank"
                " order, so that no all_gather makes the whole: use state_dict_gather, or torch.distributed.checkpoint"
            )
        place += shard.shape[0]
    return func(torch.cat(shards) if shards else torch.empty(0, device="cpu"), group_size, group_name)


_OPS: dict[Any, Callable[..., Any]] = {
    aten._to_copy.default: _of_each,
    aten.alias.default: _of_each,
    aten.clone.default: _of_each,
    aten.copy_.default: _copy,
    aten.detach.default: _of_each,
    aten.empty_like.default: _of_each,
    aten.equal.default: _equal,
    aten.fill_.Scalar: _in_place,
    # a DTensor asks for the size that its placement gives this rank, which pieces need not have
    aten.new_empty.default: lambda _, wrapper, size, **kwargs: _of_each(aten.empty_like.default, wrapper, **kwargs),
    aten.view.default: _view,
    aten.zero_.default: _in_place,
    aten.zeros_like.default: _of_each,
    torch.ops._c10d_functional.all_gather_into_tensor.default: _gathered,
    torch.ops._c10d_functional.wait_tensor.default: lambda func, tensor: func(tensor),
}

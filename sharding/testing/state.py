"""Weights of an unsharded model into a sharded one, rank by rank, by TorchRec's name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor


@torch.no_grad()
def copy_state_dict(
    loc: Mapping[str, Tensor | ShardedTensor | DTensor],
    glob: Mapping[str, Tensor | ShardedTensor],
    exclude_predfix: str | Sequence[str] | None = None,
) -> None:
    """Write whole tensors `glob` into this rank's parts of `loc`, two state dicts of one model; nothing is exchanged.

    A sharded tensor in `glob` is one of a single rank, which has all of it. Names that begin with one of
    `exclude_predfix` are left out.

    Raises:
        KeyError: `glob` lacks a name.
        ValueError: a tensor has another number of dims or type than its part.
    """
    left_out = (exclude_predfix,) if isinstance(exclude_predfix, str) else tuple(exclude_predfix or ())
    for name, tensor in loc.items():
        if name.startswith(left_out):
            continue
        if name not in glob:
            raise KeyError(f"{name!r} is not among the names to copy from")
        whole = glob[name]
        if isinstance(whole, ShardedTensor):
            whole = whole.local_shards()[0].tensor
        for part, offsets in _parts(tensor):
            if part.dim() != whole.dim() or part.dtype != whole.dtype:
                raise ValueError(
                    f"{name!r} has {part.dim()} dims of {part.dtype} here, but the tensor to copy {whole.dim()} of"
                    f" {whole.dtype}"
                )
            piece = whole.detach()
            for dim, (offset, size) in enumerate(zip(offsets, part.shape, strict=True)):
                piece = piece.narrow(dim, offset, size)
            part.copy_(piece)


def _parts(tensor: Tensor | ShardedTensor | DTensor) -> list[tuple[Tensor, Sequence[int]]]:
    """What a rank has of a tensor, and where in it."""
    if isinstance(tensor, ShardedTensor):
        return [(shard.tensor, shard.metadata.shard_offsets) for shard in tensor.local_shards()]
    if isinstance(tensor, DTensor):
        from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

        _, offsets = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        return [(tensor.to_local(), offsets)]
    return [(tensor, [0] * tensor.dim())]

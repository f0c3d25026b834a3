"""Weights that depend on names alone, and the losses of all ranks in one line: what two libraries are compared by."""

from __future__ import annotations

import json
import zlib
from typing import Any

import torch
import torch.distributed as dist


def set_known_weights(model: torch.nn.Module) -> None:
    """Overwrite all weights, sharded or not, through the state dict; buffers of integers stay."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.dtype.is_floating_point:
                continue
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            known = (torch.rand(tuple(tensor.size()), generator=generator) - 0.5) / max(tensor.size()[-1], 1) ** 0.5
            if not hasattr(tensor, "local_shards"):
                tensor.copy_(known)
                continue
            for shard in tensor.local_shards():
                (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                shard.tensor.copy_(known[row : row + rows, column : column + columns])


def print_losses(**numbers: Any) -> None:
    """`losses: {name: [numbers of rank 0, of rank 1, ...]}`, printed by rank 0."""
    if not dist.is_initialized():
        print("losses:", json.dumps({name: [values] for name, values in numbers.items()}), flush=True)
        return
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, numbers)
    if dist.get_rank() == 0:
        print("losses:", json.dumps({name: [rank[name] for rank in gathered] for name in numbers}), flush=True)

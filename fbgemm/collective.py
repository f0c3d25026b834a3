"""Tensors of several devices brought to one: joined, copied or added up, all in one process, without process groups."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .registry import op


@op(
    "merge_pooled_embeddings(Tensor[] pooled_embeddings, SymInt uncat_dim_size, Device target_device,"
    " SymInt cat_dim=1) -> Tensor",
    differentiable=True,
    across_devices=True,
    words={"Dimension": "cat_dim", "Tensors": "pooled_embeddings", "tensors": "pooled_embeddings"},
)
def merge_pooled_embeddings(
    pooled_embeddings: Sequence[Tensor], uncat_dim_size: int, target_device: torch.device, cat_dim: int = 1
) -> Tensor:
    """The tensors beside one another along `cat_dim` on the target, in the dtype of the first.

    `uncat_dim_size` is the size of the other dim.
    """
    dtype = pooled_embeddings[0].dtype if pooled_embeddings else None
    if any(each.dtype != dtype for each in pooled_embeddings):
        pooled_embeddings = [each.to(dtype) for each in pooled_embeddings]
    # on one device they are joined before they move: one copy
    devices = {each.device for each in pooled_embeddings}
    if len(devices) == 1:
        return torch.cat([*pooled_embeddings], cat_dim).to(target_device)
    return torch.cat([each.to(target_device) for each in pooled_embeddings], cat_dim)


@op(
    "all_to_one_device(Tensor[] input_tensors, Device target_device) -> Tensor[]",
    differentiable=True,
    across_devices=True,
)
def all_to_one_device(input_tensors: Sequence[Tensor], target_device: torch.device) -> list[Tensor]:
    """Copies of the tensors on the target."""
    return [each.to(target_device, copy=True) for each in input_tensors]


@op(
    "sum_reduce_to_one(Tensor[] input_tensors, Device target_device) -> Tensor",
    differentiable=True,
    across_devices=True,
)
def sum_reduce_to_one(input_tensors: Sequence[Tensor], target_device: torch.device) -> Tensor:
    """The sum of the tensors on the target, in shape and dtype of the first, added up one after another."""
    if not input_tensors:
        raise ValueError("input_tensors must have a tensor, got none")
    total = input_tensors[0].to(target_device, copy=True)
    for each in input_tensors[1:]:
        total.add_(each.to(target_device))
    return total

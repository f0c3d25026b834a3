"""Pooled rows as bytes and back: for the wire, or a client that adds up nothing more.

Shapes: Y [B, sum of dims] pooled rows, Z uint8 [B, sum of (D + 8)]: of each feature D numbers, then its scale and its
bias in fp32, the layout of FBGEMM's fused 8-bit rows.
Bytes moved: those of rows.py for rows of int8 with fp32 scales, and Z a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

# bytes of a scale and a bias
SCALES = 8


def quantize_pooled(pooled: Tensor, dims: Sequence[int]) -> Tensor:
    """Pooled rows of features of `dims` columns as int8 with fp32 scales, a scale and a bias for each bag and feature.

    Shapes: pooled [B, sum(dims)] fp32, fp16 or bf16; returns uint8 [B, sum(dims) + 8 * len(dims)].

    Raises:
        ValueError: the columns are not those of `dims`.
    """
    _require_columns(pooled, sum(dims), dims)
    blocks = []
    for dim, count, block in _runs(pooled, dims, 0):
        numbers, scales = torch.ops.shardwise.quantize_rows(block.reshape(-1, dim), "int8", torch.float32)
        rows = torch.cat([numbers, scales.view(torch.uint8)], dim=1)
        blocks.append(rows.view(pooled.shape[0], count * (dim + SCALES)))
    return torch.cat(blocks, dim=1)


def dequantize_pooled(rows: Tensor, dims: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """The pooled rows [B, sum(dims)] that `quantize_pooled` was given, within half a step of each bag and feature.

    Shapes: rows uint8 [B, sum(dims) + 8 * len(dims)].

    Raises:
        ValueError: the columns are not those of `dims`.
    """
    _require_columns(rows, sum(dims) + SCALES * len(dims), dims)
    blocks = []
    for dim, count, block in _runs(rows, dims, SCALES):
        flat = block.reshape(-1, dim + SCALES)
        # of one row the columns are contiguous where they lie, which need not be at a multiple of 4 bytes
        scales = flat[:, dim:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        values = torch.ops.shardwise.dequantize_rows(flat[:, :dim].contiguous(), scales, dim, "int8", dtype)
        blocks.append(values.view(rows.shape[0], count * dim))
    return torch.cat(blocks, dim=1)


def _runs(rows: Tensor, dims: Sequence[int], extra: int) -> list[tuple[int, int, Tensor]]:
    """(dim, features, their columns) of neighbours of one dim: these are quantized in one launch."""
    runs = [(dim, len(list(members))) for dim, members in groupby(dims)]
    blocks = torch.split(rows, [count * (dim + extra) for dim, count in runs], dim=1)
    return [(dim, count, block) for (dim, count), block in zip(runs, blocks, strict=True)]


def _require_columns(rows: Tensor, columns: int, dims: Sequence[int]) -> None:
    if not dims or rows.dim() != 2 or rows.shape[1] != columns:
        raise ValueError(f"rows of features of dims {list(dims)} are [B, {columns}], got {list(rows.shape)}")

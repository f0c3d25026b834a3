"""Outputs of quantized collections in the dtype that they were made with; uint8 is for rows of bytes.

Shapes: values [B, sum of dims] and rows [N, dim], looked up in `lookup_dtype`. As bytes each feature's row is dim + 8
wide: int8 numbers, then a scale and a bias in fp32, as `shardwise.kernels.dequantize_pooled` takes them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwise.jagged import JaggedTensor, KeyedTensor
from shardwise.kernels import quantize_pooled

OUTPUT_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.uint8)
# a scale and a bias
_SCALE_BYTES = 8


def lookup_dtype(output_dtype: torch.dtype) -> torch.dtype:
    """The dtype in which rows are looked up: bytes are made of fp32 values."""
    return torch.float32 if output_dtype is torch.uint8 else output_dtype


def pooled_output(values: Tensor, names: list[str], dims: Sequence[int], output_dtype: torch.dtype) -> KeyedTensor:
    """Features side by side, [B, sum of dims], as the output of a pooled collection."""
    if output_dtype is not torch.uint8 or not names:
        return KeyedTensor(names, list(dims), values)
    return KeyedTensor(names, [dim + _SCALE_BYTES for dim in dims], quantize_pooled(values, dims))


def sequence_output(by_name: dict[str, JaggedTensor], output_dtype: torch.dtype) -> dict[str, JaggedTensor]:
    """Rows of each feature, [N, dim], as the output of a sequence collection."""
    if output_dtype is not torch.uint8:
        return by_name
    return {
        name: JaggedTensor(
            quantize_pooled(rows.values(), [rows.values().shape[1]]),
            weights=rows.weights_or_none(),
            lengths=rows.lengths(),
        )
        for name, rows in by_name.items()
    }

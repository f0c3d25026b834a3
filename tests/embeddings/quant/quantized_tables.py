"""Quantized collections to test, and what their lookups must be by `dequantize_rows` on one table at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jagged_batches import pooled
from torch import Tensor, nn

from shardwise import DataType, EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType, quant
from shardwise.embeddings.quant import QuantizedCollection
from shardwise.inference import quantize_inference_model
from shardwise.kernels import dequantize_rows

TYPES = {
    DataType.INT8: torch.int8,
    DataType.INT4: torch.quint4x2,
    DataType.INT2: torch.quint2x4,
    DataType.NFP8: torch.float8_e4m3fn,
    DataType.FP16: torch.float16,
    DataType.BF16: torch.bfloat16,
    DataType.FP32: torch.float32,
}
MIXED = {"a": torch.int8, "b": torch.quint4x2, "c": torch.float8_e4m3fn}
# a table of each format, of several dims, two of them looked up by one feature
BAGS = {"f": [[1, 2], [], [4]], "g": [[0], [3, 3], [1]], "h": [[2, 2, 5], [1], []]}


def configs(data_type: DataType = DataType.FP32) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(6, 8, "a", data_type, feature_names=["f", "g"]),
        EmbeddingBagConfig(7, 5, "b", data_type, feature_names=["f"], pooling=PoolingType.MEAN),
        EmbeddingBagConfig(8, 32, "c", data_type, feature_names=["h"]),
    ]


def float_bags(is_weighted: bool = False) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(configs(), is_weighted)


def quantized(collection: nn.Module, **settings: Any) -> quant.EmbeddingBagCollection:
    made = quantize_inference_model(collection, **settings)
    assert isinstance(made, quant.EmbeddingBagCollection)
    return made


def mixed(is_weighted: bool = False) -> quant.EmbeddingBagCollection:
    """A table of int8, one of int4, one of fp8."""
    return quantized(float_bags(is_weighted), per_table_weight_dtype=MIXED)


def values_of(collection: QuantizedCollection) -> dict[str, Tensor]:
    """Each table's rows as fp32, from its buffers."""
    values = {}
    for group in collection._groups:
        for number, table in enumerate(group.tables):
            child = collection.get_submodule(f"{collection._children_name}.{table.name}")
            parts = [child.get_buffer(name) for name in ("weight_qscale", "weight_qbias")[: group.format.parts]]
            payload = child.get_buffer("weight")
            scales = torch.cat(parts, 1) if parts else payload.new_empty(table.rows, 0, dtype=torch.float16)
            values[table.name] = dequantize_rows(payload, scales, table.dim, table.format)
            # the buffers are the memory that lookups read
            assert payload.data_ptr() == group.payload_of(number).data_ptr()
    return values


def assert_looks_up_its_buffers(
    collection: Any, batch: KeyedJaggedTensor, bags: Mapping[str, Sequence[Sequence[int]]]
) -> None:
    wanted = pooled(collection.embedding_bag_configs(), values_of(collection), bags)
    torch.testing.assert_close(collection(batch).values(), wanted, rtol=1e-6, atol=1e-6)

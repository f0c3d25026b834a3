"""Replace the collections of a trained model by quantized ones."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from shardwise import quant
from shardwise.embeddings import EmbeddingBagCollection, EmbeddingCollection

_FORMATS = {
    torch.int8: "int8",
    torch.qint8: "int8",
    torch.quint8: "int8",
    torch.uint8: "int8",
    torch.quint4x2: "int4",
    torch.quint2x4: "int2",
    torch.float8_e4m3fn: "fp8",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
}


def quantize_inference_model(
    model: nn.Module,
    quantization_mapping: Mapping[str, type[nn.Module]] | None = None,
    per_table_weight_dtype: Mapping[str, torch.dtype] | None = None,
    fp_weight_dtype: torch.dtype = torch.int8,
    quantization_dtype: torch.dtype = torch.int8,
    output_dtype: torch.dtype = torch.float32,
) -> nn.Module:
    """The model with its float collections replaced, in place; the quantized collection if `model` is one itself."""
    dtypes = per_table_weight_dtype or {}

    def converted(module: nn.Module) -> nn.Module:
        if isinstance(module, EmbeddingBagCollection):
            configs = module.embedding_bag_configs()
            formats = {c.name: _FORMATS[dtypes.get(c.name, quantization_dtype)] for c in configs}
            bags = quant.EmbeddingBagCollection(
                configs, module.is_weighted(), module.device, output_dtype, formats=formats
            )
            bags._fill({c.name: module.embedding_bags[c.name].weight for c in configs})  # type: ignore[misc]
            return bags
        if isinstance(module, EmbeddingCollection):
            rows = module.embedding_configs()
            formats = {c.name: _FORMATS[dtypes.get(c.name, quantization_dtype)] for c in rows}
            sequences = quant.EmbeddingCollection(
                rows, module.device, module.need_indices(), output_dtype, formats=formats
            )
            sequences._fill({c.name: module.embeddings[c.name].weight for c in rows})  # type: ignore[misc]
            return sequences
        for name, child in list(module.named_children()):
            setattr(module, name, converted(child))
        return module

    return converted(model).eval()

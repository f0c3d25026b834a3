"""Rows to quantize, and the same quantized tables on two sides: FBGEMM's inference tables and ours.

Letters: R rows, D dim, T tables, B samples, N ids.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from shardwise.embeddings.quant import QuantizedTable, QuantizedTables
from shardwise.embeddings.tables.table_layout import LookupFeature
from shardwise.kernels import dequantize_rows, quantize_rows, row_format
from shardwise.quant import FUSED_8BIT, FUSED_NBIT, INFERENCE, FusedLayout, fuse_rows, split_rows

# kinds of rows, from normal numbers [R, D]
ROWS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "trained": lambda x: 0.02 * x,
    "constant": lambda x: x[:, :1].expand_as(x).contiguous(),
    "zeros": torch.zeros_like,
    "zeros of both signs": lambda x: torch.where(x > 0, 0.0, -0.0),
    "around 10": lambda x: 10 + 0.01 * x,
    "a last place around 1": lambda x: 1 + 1e-7 * x,
    "small": lambda x: 1e-4 * x,
    "tiny": lambda x: 1e-8 * x,
    "subnormal": lambda x: 1e-41 * x,
    "near the end of fp16": lambda x: 8e3 * x,
    "beyond fp16": lambda x: 1e6 * x,
    "huge": lambda x: 1e30 * x,
    "one outlier": lambda x: torch.where(torch.arange(x.shape[1]) == x.shape[1] // 2, 1e4, x),
    "negative": lambda x: -x.abs() - 1,
    "few values": lambda x: x.round(),
    "an infinity": lambda x: torch.where(torch.arange(x.shape[1]) == x.shape[1] // 2, torch.inf, x),
}


@dataclass(frozen=True)
class Stored:
    """A way to store rows that both sides have: FBGEMM's ops to quantize and back, and the layout of its rows."""

    name: str
    format: str
    layout: FusedLayout
    quantize: Callable[[Tensor], Tensor]
    dequantize: Callable[[Tensor], Tensor]

    def dim(self, wanted: int) -> int:
        """The next dim that FBGEMM takes: rows of halves are whole halves."""
        step = 16 // row_format(self.format).bits if self.layout is FUSED_NBIT else 1
        return -(-wanted // step) * step

    def theirs(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Payload and scales as FBGEMM's op makes them."""
        fused = self.quantize(values)
        return split_rows(fused, dim=values.shape[1], format=self.format, layout=self.layout)

    def ours(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Payload and scales as we make them."""
        return quantize_rows(values, self.format, self.layout.scale_dtype)

    def values(self, planes: tuple[Tensor, Tensor], dim: int) -> tuple[Tensor, Tensor]:
        """What our op and theirs make of the same quantized rows."""
        fused = fuse_rows(*planes, dim=dim, format=self.format, layout=self.layout)
        return dequantize_rows(*planes, dim, self.format), self.dequantize(fused)


def stored() -> list[Stored]:
    """All of them; FBGEMM must have been imported."""
    ops = torch.ops.fbgemm

    def halves(format: str) -> Stored:
        bits = row_format(format).bits
        return Stored(
            f"{format}, fp16 scales", format, FUSED_NBIT,
            lambda x: ops.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(x, bits),
            lambda q: ops.FusedNBitRowwiseQuantizedSBHalfToFloat(q, bits),
        )  # fmt: skip

    return [
        Stored(
            "int8, fp32 scales", "int8", FUSED_8BIT,
            lambda x: ops.FloatToFused8BitRowwiseQuantized(x), lambda q: ops.Fused8BitRowwiseQuantizedToFloat(q),
        ),
        *(halves(format) for format in FUSED_NBIT.formats),
    ]  # fmt: skip


def load_fbgemm() -> Any:
    """The names of FBGEMM and TorchRec that are used here.

    Raises:
        ImportError: they are not installed.
    """
    package = importlib.import_module("fbgemm_gpu")
    names = {
        "fbgemm_gpu.split_embedding_configs": ("SparseType",),
        "fbgemm_gpu.split_table_batched_embeddings_ops_common": ("EmbeddingLocation", "PoolingMode"),
        "fbgemm_gpu.split_table_batched_embeddings_ops_inference": ("IntNBitTableBatchedEmbeddingBagsCodegen",),
        "torchrec.inference.modules": ("quantize_inference_model",),
        "torchrec.modules.embedding_configs": ("EmbeddingBagConfig", "PoolingType"),
        "torchrec.modules.embedding_modules": ("EmbeddingBagCollection",),
        "torchrec.sparse.jagged_tensor": ("KeyedJaggedTensor",),
        "torchrec.tensor_types": ("UInt4Tensor", "UInt2Tensor"),
    }
    found = {}
    for module, wanted in names.items():
        part = importlib.import_module(module)
        found.update({name: getattr(part, name) for name in wanted})
    return SimpleNamespace(**found, version=package.__version__)


_SPARSE_TYPES = {"int8": "INT8", "int4": "INT4", "int2": "INT2", "fp16": "FP16", "fp32": "FP32"}
_OUTPUTS = {torch.float32: "FP32", torch.float16: "FP16", torch.bfloat16: "BF16"}


def inference_tables(
    peer: Any,
    format: str,
    mode: str,
    tables: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    planes: Iterable[tuple[Tensor, Tensor]],
    device: str = "cpu",
) -> Any:
    """FBGEMM's inference tables that hold these payloads and scales, in the order of the tables (rows, dim)."""
    kind = peer.SparseType[_SPARSE_TYPES[format]]
    modes = {"sum": peer.PoolingMode.SUM, "mean": peer.PoolingMode.MEAN, "sequence": peer.PoolingMode.NONE}
    place = peer.EmbeddingLocation.HOST if device == "cpu" else peer.EmbeddingLocation.DEVICE
    tbe = peer.IntNBitTableBatchedEmbeddingBagsCodegen(
        [(f"t{t}", *shape, kind, place) for t, shape in enumerate(tables)],
        pooling_mode=modes[mode], output_dtype=peer.SparseType[_OUTPUTS[dtype]],
        device=device, row_alignment=INFERENCE.alignment,
    )  # fmt: skip
    tbe.initialize_weights()
    homes = tbe.split_embedding_weights_with_scale_bias(split_scale_bias_mode=0)
    for (home, *_), (_, dim), both in zip(homes, tables, planes, strict=True):
        home.copy_(fuse_rows(*both, dim=dim, format=format, layout=INFERENCE))
    return tbe


@dataclass(frozen=True)
class Lookup:
    """Ids of T features and B samples over tables of one format; `mode` is sum, mean or sequence."""

    format: str
    mode: str
    tables: list[tuple[int, int]]
    ids: Tensor
    offsets: Tensor
    per_id_weights: Tensor | None
    seed: int = 0

    def planes(self) -> list[tuple[Tensor, Tensor]]:
        """Payload and scales of each table."""
        numbers = torch.Generator().manual_seed(self.seed)
        drawn = [torch.randn(rows, dim, generator=numbers) for rows, dim in self.tables]
        return [quantize_rows(values, self.format) for values in drawn]

    def ours(self, dtype: torch.dtype) -> Tensor:
        """Our output, pooled [B, sum of dims] or a sequence [N, D]."""
        tables = [QuantizedTable(f"t{t}", *shape, self.format) for t, shape in enumerate(self.tables)]
        lookups = [LookupFeature(f"f{t}", t, self.mode == "mean") for t in range(len(tables))]
        group = QuantizedTables(tables, lookups)
        for t, (payload, scales) in enumerate(self.planes()):
            group.payload_of(t).copy_(payload)
            group.scales_of(t).copy_(scales)
        if self.mode == "sequence":
            return group.sequence(self.ids, self.offsets, dtype)
        return group.pooled(self.ids, self.offsets, self.per_id_weights, dtype)

    def theirs(self, peer: Any, dtype: torch.dtype) -> Tensor:
        """The output of FBGEMM's inference tables with the same rows."""
        tbe = inference_tables(peer, self.format, self.mode, self.tables, dtype, self.planes())
        output: Tensor = tbe(self.ids, self.offsets, self.per_id_weights)
        return output

    def steps(self) -> Tensor:
        """The largest quantization step of each output column, [sum of dims] or [1]; 1 for formats without scales."""
        largest = [
            scales[:, 0].float().abs().max() if scales.shape[1] else torch.ones(()) for _, scales in self.planes()
        ]
        if self.mode == "sequence":
            return torch.stack(largest).max()[None]
        return torch.cat([step.expand(dim) for step, (_, dim) in zip(largest, self.tables, strict=True)])

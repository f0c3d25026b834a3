"""Cases of the suite: lookups of quantized rows, and rows made of numbers and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shardwise.kernels import (
    ROW_FORMATS,
    Feature,
    dequantize_pooled,
    dequantize_rows,
    pack_features,
    quantize_pooled,
    quantize_rows,
    row_format,
)
from shardwise.kernels.quantized.pooled import SCALES
from shardwise.kernels.quantized.pooled_lookup import quantized_pooled_lookup_ref
from shardwise.kernels.quantized.rows import quantize_rows_ref
from shardwise.kernels.quantized.sequence_lookup import quantized_sequence_lookup_ref
from shardwise.kernels.row_formats import TABLE_BOUNDARY, dequantize_rows_ref
from shardwise.perf.suite.batches import bags_of_first
from shardwise.perf.suite.case import (
    Call,
    Case,
    Ready,
    Setting,
)
from shardwise.perf.suite.cases.lookup import (
    CHECKED,
    CUDA,
    EVERY,
    FLOOR,
    INPUTS,
    mean,
)
from shardwise.perf.suite.cases.quantized_batches import Batch
from shardwise.perf.suite.declared import quantized_pooled_lookup_bytes, quantized_sequence_lookup_bytes
from shardwise.perf.suite.libraries import fbgemm
from shardwise.perf.suite.peers import assert_close, assert_peers, peer_calls
from shardwise.perf.suite.workloads import (
    FBGEMM_DEFAULT,
    PRODUCTION,
    Workload,
    draw,
    sized,
)
from shardwise.quant import FUSED_8BIT, FUSED_NBIT, INFERENCE, FusedLayout, fuse_rows, split_rows

# rows that differ; a table repeats them, from another one on than the table before
_DISTINCT = 10_007
# bytes on which a table's rows begin
_BOUNDARY = 64
# sums of the same rows in another order and with fused products
_TOLERANCE = 1e-4
# rows that are quantized in one call
_ROWS = 100_000

_TORCH = {
    "int8": ("embedding_bag_byte_rowwise_offsets", FUSED_8BIT),
    "int4": ("embedding_bag_4bit_rowwise_offsets", FUSED_NBIT),
    "int2": ("embedding_bag_2bit_rowwise_offsets", FUSED_NBIT),
}
_PREPACK = {"int8": "byte", "int4": "4bit", "int2": "2bit"}

_SPARSE_TYPES = {"int8": "INT8", "int4": "INT4", "int2": "INT2", "fp16": "FP16", "fp32": "FP32"}
_OUTPUTS = {torch.float32: "FP32", torch.float16: "FP16", torch.bfloat16: "BF16"}

Planes = list[tuple[Tensor, Tensor]]


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
        """The values that our op and theirs make of the same quantized rows."""
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


def _batches(setting: Setting, workload: Workload, format: str) -> tuple[list[Batch], Planes, dict[str, object]]:
    """Distinct batches over one set of quantized tables, and the planes of each table, which are views of them."""
    kind, device = ROW_FORMATS[format], setting.device
    size = kind.bytes_moved(workload.dim) / workload.dim
    workload = sized(workload, device, setting.memory_bytes, small=setting.small, bytes_a_row_element=2 * size)
    dim, rows = workload.dim, workload.rows
    width = kind.row_bytes(dim)
    distinct = min(_DISTINCT, sum(rows))
    numbers = torch.randn(distinct, dim, generator=torch.Generator().manual_seed(0)).to(device)
    some = quantize_rows(numbers, format)
    bases, element = [], 0
    for count in rows:
        bases.append(element)
        element += -(-count * width // _BOUNDARY) * _BOUNDARY
    payload = torch.zeros(element, dtype=torch.uint8, device=device)
    scales = some[1].new_zeros(sum(rows), kind.parts)
    planes, features, first = [], [], 0
    for base, count in zip(bases, rows, strict=True):
        which = torch.arange(first, first + count, device=device) % distinct
        own = payload[base : base + count * width].view(count, width), scales[first : first + count]
        torch.index_select(some[0].view(torch.uint8).view(distinct, width), 0, which, out=own[0])
        own[1].copy_(some[1][which])
        planes.append(own)
        features.append(Feature(base, count, dim, first))
        first += count
    packed = pack_features(features, device, boundary=TABLE_BOUNDARY)
    batches = []
    for seed in range(INPUTS):
        ids, lengths = draw(workload, seed, device)
        offsets = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
        batches.append(Batch(format, payload, scales.flatten(), ids, offsets, None, packed, [dim] * len(rows)))
    return batches, planes, dict(workload.notes)


def _fbgemm(batches: Sequence[Batch], planes: Planes, mode: str) -> Sequence[Call]:
    first = batches[0]
    if first.format not in INFERENCE.formats:
        raise NotImplementedError(f"FBGEMM's inference tables have no {first.format} as ours")
    tables = [(payload.shape[0], dim) for (payload, _), dim in zip(planes, first.dims, strict=True)]
    device = first.payload.device.type
    tbe = inference_tables(fbgemm(), first.format, mode, tables, torch.float32, planes, device)
    # it takes ids and offsets of 32 bits
    where = [(b.indices.int(), b.offsets.int()) for b in batches]
    return [partial(tbe, *each) for each in where]


def _torch(batches: Sequence[Batch], planes: Planes) -> Sequence[Call]:
    first = batches[0]
    if first.format not in _TORCH or first.payload.is_cuda:
        raise NotImplementedError(f"torch has no lookup of {first.format} rows on {first.payload.device.type}")
    name, layout = _TORCH[first.format]
    look_up, count = getattr(torch.ops.quantized, name), (first.offsets.shape[0] - 1) // len(planes)
    tables = [
        fuse_rows(payload, scales.to(layout.scale_dtype), dim=first.dims[0], format=first.format, layout=layout)
        for payload, scales in planes
    ]
    parts = []
    for batch in batches:
        ends = batch.offsets[::count].tolist()
        parts.append([
            (table, batch.indices[begin:end], batch.offsets[f * count : (f + 1) * count + 1] - begin)
            for f, (table, (begin, end)) in enumerate(zip(tables, pairwise(ends), strict=True))
        ])  # fmt: skip

    def run(part: Sequence[Sequence[Tensor]]) -> Tensor:
        return torch.cat([look_up(*args, include_last_offset=True) for args in part], 1)

    return [partial(run, part) for part in parts]


def _lookup(setting: Setting, workload: Workload, format: str, *, sequence: bool = False) -> Ready:
    batches, planes, notes = _batches(setting, workload, format)
    first, mode = batches[0], "sequence" if sequence else "sum"
    builders: dict[str, Callable[[], Sequence[Call]]] = {"fbgemm": lambda: _fbgemm(batches, planes, mode)}
    peers, trouble = peer_calls(
        setting, builders if sequence else builders | {"torch": lambda: _torch(batches, planes)}
    )

    def check() -> None:
        kept, offsets = bags_of_first(first.offsets, len(first.dims), CHECKED)
        some = replace(first, indices=first.indices[kept], offsets=offsets)
        # products and sums are rounded one by one: the reference's bits
        if sequence:
            rows_or_pooled = first.sequence()
            assert torch.equal(rows_or_pooled[kept], some.sequence(quantized_sequence_lookup_ref)), "the reference"
        else:
            rows_or_pooled = first.pooled()
            assert torch.equal(rows_or_pooled[:CHECKED], some.pooled(quantized_pooled_lookup_ref)), "the reference"
        assert_peers(rows_or_pooled, peers, _TOLERANCE)

    where = [(ROW_FORMATS[format], b.scales, b.indices, b.offsets) for b in batches]
    moved = mean([
        (quantized_sequence_lookup_bytes(*args, b.features) if sequence
         else quantized_pooled_lookup_bytes(*args, None, b.features)).bytes_moved
        for args, b in zip(where, batches, strict=True)
    ])  # fmt: skip
    calls: list[Call] = [b.sequence if sequence else b.pooled for b in batches]
    return Ready(calls, check, moved, FLOOR, peers, notes=notes | trouble)


def _numbers(setting: Setting) -> tuple[list[Tensor], int, int]:
    rows, dim = (50, 16) if setting.small else (_ROWS, 128)
    made = [torch.randn(rows, dim, generator=torch.Generator().manual_seed(seed)) for seed in range(INPUTS)]
    return [numbers.to(setting.device) for numbers in made], rows, dim


def _ops_of(format: str) -> Any:
    fbgemm()
    ops = next((how for how in stored() if how.format == format), None)
    if ops is None:
        raise NotImplementedError(f"FBGEMM does not quantize to {format} as we do")
    return ops


def _prepack(format: str, way: str, device: str) -> Any:
    if format not in _PREPACK or device != "cpu":
        raise NotImplementedError(f"torch does not quantize to {format} on {device}")
    return getattr(torch.ops.quantized, f"embedding_bag_{_PREPACK[format]}_{way}")


def _quantize(setting: Setting, format: str) -> Ready:
    inputs, rows, dim = _numbers(setting)
    kind = ROW_FORMATS[format]
    peers, trouble = peer_calls(setting, {
        "fbgemm": lambda: [partial(_ops_of(format).quantize, x) for x in inputs],
        "torch": lambda: [partial(_prepack(format, "prepack", setting.device), x) for x in inputs],
    })  # fmt: skip

    def check() -> None:
        planes, want = quantize_rows(inputs[0], format), quantize_rows_ref(inputs[0].cpu(), format)
        assert all(torch.equal(a.cpu(), b) for a, b in zip(planes, want, strict=True)), "the reference"
        values = dequantize_rows(*planes, dim, format)
        for name, calls in peers.items():
            fused: Any = calls[0]()
            back = _ops_of(format).dequantize if name == "fbgemm" else _prepack(format, "unpack", setting.device)
            # within a step of the widest row
            assert_close(values, back(fused), 2.1 / kind.levels, name)

    return Ready(
        [partial(quantize_rows, x, format) for x in inputs], check, rows * (4 * dim + kind.bytes_moved(dim)),
        "rows: each read once and written once", peers, notes=trouble,
    )  # fmt: skip


def _dequantize(setting: Setting, format: str) -> Ready:
    inputs, rows, dim = _numbers(setting)
    kind, layout = ROW_FORMATS[format], FUSED_8BIT if format == "int8" else FUSED_NBIT
    planes = [quantize_rows(x, format, layout.scale_dtype if kind.levels else None) for x in inputs]

    def fused() -> list[Tensor]:
        return [fuse_rows(*both, dim=dim, format=format, layout=layout) for both in planes]

    peers, trouble = peer_calls(setting, {
        "fbgemm": lambda: [partial(_ops_of(format).dequantize, x) for x in fused()],
        "torch": lambda: [partial(_prepack(format, "unpack", setting.device), x) for x in fused()],
    }) if kind.levels else ({}, {})  # fmt: skip

    def check() -> None:
        numbers = dequantize_rows(*planes[0], dim, format)
        payload, scales = planes[0]
        want = dequantize_rows_ref(payload.cpu(), scales.cpu(), dim, format)
        assert torch.equal(numbers.cpu(), want), "the reference"
        assert_peers(numbers, peers, 1e-5)

    moved = rows * (4 * dim + kind.bytes_moved(dim, planes[0][1].dtype))
    calls = [partial(dequantize_rows, *both, dim, format) for both in planes]
    return Ready(calls, check, moved, "rows: each read once and written once", peers, notes=trouble)


def _pooled_bytes(setting: Setting, back: bool) -> Ready:
    """Outputs of 32 features as bytes for the wire, or back; FBGEMM's rows of int8 are the same bytes."""
    batch, dim = (8, 16) if setting.small else (512, 128)
    dims = [dim] * 32
    inputs = [
        torch.randn(batch, sum(dims), generator=torch.Generator().manual_seed(seed)).to(setting.device)
        for seed in range(INPUTS)
    ]
    rows = [quantize_pooled(x, dims) for x in inputs]
    calls: list[Call]
    if back:
        calls = [partial(dequantize_pooled, z, dims) for z in rows]
    else:
        calls = [partial(quantize_pooled, x, dims) for x in inputs]

    def of_fbgemm() -> list[Call]:
        ops = _ops_of("int8")
        if back:
            return [partial(ops.dequantize, z.view(-1, dim + SCALES)) for z in rows]
        return [partial(ops.quantize, x.view(-1, dim)) for x in inputs]

    peers, trouble = peer_calls(setting, {"fbgemm": of_fbgemm})

    def check() -> None:
        payload, scales = quantize_rows_ref(inputs[0].view(-1, dim).cpu(), "int8", torch.float32)
        want = torch.cat([payload, scales.view(torch.uint8)], 1)
        if back:
            want = dequantize_rows_ref(payload, scales, dim, "int8")
        output: Any = calls[0]()
        assert torch.equal(output.cpu().view(want.shape), want), "the reference"
        for name, others in peers.items():
            peer_output: Any = others[0]()
            # numbers of 8 bits may be one apart
            tolerance = 1e-5 if back else 1.01 / 255
            assert_close(output[:, :dim].float(), peer_output.view(batch, -1)[:, :dim].float(), tolerance, name)

    return Ready(
        calls, check, len(dims) * batch * (4 * dim + dim + SCALES),
        "bags: numbers read once, their bytes written once, or the other way", peers, notes=trouble,
    )  # fmt: skip


CASES: Sequence[Case] = (
    *(
        Case(
            f"quantized_pooled_lookup, {format}, {workload.name}", "quantized",
            partial(_lookup, workload=workload, format=format),
            EVERY if workload == FBGEMM_DEFAULT and format in ("int8", "int4") else CUDA,
        )
        for format in ("int8", "int4", "int2", "fp8")
        for workload in (FBGEMM_DEFAULT, PRODUCTION)
    ),
    Case(
        "quantized_sequence_lookup, int8, fbgemm default", "quantized",
        partial(_lookup, workload=FBGEMM_DEFAULT, format="int8", sequence=True),
    ),
    *(
        Case(
            f"quantize_rows, {format}", "quantized", partial(_quantize, format=format),
            EVERY if format == "int8" else CUDA,
        )
        for format in ("int8", "int4", "fp8")
    ),
    *(
        Case(
            f"dequantize_rows, {format}", "quantized", partial(_dequantize, format=format),
            EVERY if format == "int8" else CUDA,
        )
        for format in ("int8", "int4")
    ),
    Case("quantize_pooled, 32 x 512 x 128", "quantized", partial(_pooled_bytes, back=False), CUDA),
    Case("dequantize_pooled, 32 x 512 x 128", "quantized", partial(_pooled_bytes, back=True), CUDA),
)  # fmt: skip

"""Rows and state dicts of quantized FBGEMM and TorchRec models into ours, and back; no bit changes.

FBGEMM's rows are one run of bytes with payload and scales in it:

    FUSED_8BIT   payload | scale fp32 | bias fp32            FloatToFused8BitRowwiseQuantized
    FUSED_NBIT   payload | scale fp16 | bias fp16            FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf
    INFERENCE    scale fp16 | bias fp16 | payload | zeros    IntNBitTableBatchedEmbeddingBagsCodegen, TorchRec's models

INFERENCE also keeps fp16 and fp32 rows, which have no scales. Zeros fill a row up to a multiple of `alignment`. fp8 has
no counterpart: FBGEMM's inference tables of fp8 have no scales, its row-wise fp8 is a format of messages between GPUs.

TorchRec keeps a table as `<path>.embedding_bags.<table>.weight` (`embeddings` for sequences): rows of INFERENCE, or
payload alone beside `weight_qscale` and `weight_qbias`, fp16 [R, 1] each. Entries of `tbes`, which hold where those
tables lie in memory, say nothing that a collection does not know. What a pruned table of ours has besides,
`index_remapping`, is in no such state dict: it is read and written under its own name.

Shapes: rows uint8 [R, width], payload uint8 [R, row_bytes], scales [R, parts] (kernels/row_formats.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from shardwise.kernels import row_format

from .collection import QuantizedCollection
from .tables import QuantizedTable

# what row alignments are: powers of two up to a cache line
_ALIGNMENTS = tuple(2**power for power in range(8))


@dataclass(frozen=True)
class FusedLayout:
    """Where a row's scales are and what fills it up; `formats` are those of row_formats.py that it can hold."""

    name: str
    formats: tuple[str, ...]
    scale_dtype: torch.dtype
    scales_first: bool = False
    alignment: int = 1

    def width(self, dim: int, format: str) -> int:
        """Bytes of a row.

        Raises:
            ValueError: the layout does not hold that format.
        """
        if format not in self.formats:
            raise ValueError(f"{self.name} rows hold {', '.join(self.formats)}, not {format}")
        return -(-row_format(format).bytes_moved(dim, self.scale_dtype) // self.alignment) * self.alignment


FUSED_8BIT = FusedLayout("FUSED_8BIT", ("int8",), torch.float32)
"""Payload, scale, bias, both fp32: what `FloatToFused8BitRowwiseQuantized` writes."""
FUSED_NBIT = FusedLayout("FUSED_NBIT", ("int8", "int4", "int2"), torch.float16)
"""Payload, scale, bias, both fp16: what `FloatToFusedNBitRowwiseQuantizedSBHalf` writes."""
INFERENCE = FusedLayout(
    "INFERENCE", ("int8", "int4", "int2", "fp16", "fp32"), torch.float16, scales_first=True, alignment=16
)
"""Scale and bias before the payload, rows of whole 16 bytes: FBGEMM's inference tables."""


def fuse_rows(
    payload: Tensor, scales: Tensor, *, dim: int, format: str, layout: FusedLayout, table: str = "rows"
) -> Tensor:
    """Rows uint8 [R, width] of payload uint8 [R, row_bytes] and scales [R, parts]; `table` names them in errors.

    Raises:
        ValueError: planes of another shape, scales of another dtype, or a format that the layout does not hold.
    """
    kind, width = row_format(format), _width(layout, dim, format, table)
    shapes = [list(payload.shape), list(scales.shape)]
    if shapes != [[len(payload), kind.row_bytes(dim)], [len(payload), kind.parts]]:
        raise ValueError(
            f"{table}: {format} rows of dim {dim} have payload [R, {kind.row_bytes(dim)}] and scales [R, {kind.parts}],"
            f" got {shapes[0]} and {shapes[1]}"
        )
    if kind.parts and scales.dtype != layout.scale_dtype:
        raise ValueError(
            f"{table}: {layout.name} rows keep scales of {layout.scale_dtype}, got {scales.dtype}, which would be"
            f" rounded: quantize with scale_dtype={layout.scale_dtype}"
        )
    parts = scales.contiguous().view(torch.uint8) if kind.parts else payload[:, :0]
    planes = (parts, payload) if layout.scales_first else (payload, parts)
    rows = torch.cat(planes, dim=1)
    return torch.nn.functional.pad(rows, (0, width - rows.shape[1]))


def split_rows(
    rows: Tensor, *, dim: int, format: str, layout: FusedLayout, table: str = "rows"
) -> tuple[Tensor, Tensor]:
    """Payload uint8 [R, row_bytes] and scales [R, parts] of rows uint8 [R, width], both copies.

    Raises:
        ValueError: the rows are not bytes, or a row has another width than `dim`, `format` and `layout` ask for.
    """
    kind, width = row_format(format), _width(layout, dim, format, table)
    if rows.dtype != torch.uint8 or rows.dim() != 2 or rows.shape[1] != width:
        raise ValueError(
            f"{table}: {format} rows of dim {dim} are uint8 [R, {width}] as {layout.name} keeps them,"
            f" got {str(rows.dtype).removeprefix('torch.')} {list(rows.shape)}"
        )
    row_bytes, scale_bytes = kind.row_bytes(dim), kind.parts * layout.scale_dtype.itemsize
    payload_at, scales_at = (scale_bytes, 0) if layout.scales_first else (0, row_bytes)
    payload = rows[:, payload_at : payload_at + row_bytes].clone(memory_format=torch.contiguous_format)
    # a copy, because a view of another dtype must begin at a multiple of its size; flat, because there may be none
    scales = rows[:, scales_at : scales_at + scale_bytes].clone(memory_format=torch.contiguous_format).flatten()
    return payload, scales.view(layout.scale_dtype).view(len(rows), kind.parts)


def inference_layout(width: int, *, dim: int, format: str, table: str = "rows") -> FusedLayout:
    """INFERENCE with the alignment that gives rows of `width` bytes; TorchRec's default is 16, FBGEMM's on a CPU is 1.

    Raises:
        ValueError: no alignment does; names the formats whose rows are that wide.
    """
    _width(INFERENCE, dim, format, table)
    found = _aligned(width, dim, format)
    if found is not None:
        return found
    kind = row_format(format)
    fitting = [other for other in INFERENCE.formats if _aligned(width, dim, other)]
    hint = f"; {' and '.join(fitting)} rows are that wide" if fitting else ""
    raise ValueError(
        f"{table}: {format} rows of dim {dim} are {kind.bytes_moved(dim, torch.float16)} bytes, or"
        f" {INFERENCE.width(dim, format)} where rows are aligned to 16, got {width}{hint}"
    )


def _aligned(width: int, dim: int, format: str) -> FusedLayout | None:
    layouts = (replace(INFERENCE, alignment=alignment) for alignment in _ALIGNMENTS)
    return next((layout for layout in layouts if layout.width(dim, format) == width), None)


def _width(layout: FusedLayout, dim: int, format: str, table: str) -> int:
    try:
        return layout.width(dim, format)
    except ValueError as error:
        raise ValueError(f"{table}: {error}") from None


_SCALE, _BIAS = "weight_qscale", "weight_qbias"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def load_torchrec_state_dict(module: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Fill a model and the quantized collections in it, or such a collection, from a quantized TorchRec model's state.

    A table's rows are uint8 [R, width]; their formats must be those that they were quantized to. All tables are checked
    before anything is loaded; other entries are loaded as `nn.Module.load_state_dict` does.

    Raises:
        ValueError: a table is missing, or its rows are of another number, width or dtype.
        RuntimeError: what else the model holds and what the state dict holds differ.
    """
    entries = dict(state_dict)
    loaded: dict[str, Tensor] = {}
    for prefix, table in _tables(module):
        weight = entries.pop(f"{prefix}weight", None)
        if weight is None:
            raise ValueError(f"table {table.name!r}: the state dict has no {prefix}weight")
        parts = [entries.pop(prefix + name, None) for name in (_SCALE, _BIAS)]
        payload, scales = _planes(weight, parts, table)
        loaded[f"{prefix}weight"] = payload
        for part, name in enumerate((_SCALE, _BIAS)[: scales.shape[1]]):
            loaded[prefix + name] = scales[:, part : part + 1]
    homes = tuple(f"{path}tbes." for path, _ in _collections(module))
    rest = {name: value for name, value in entries.items() if not name.startswith(homes)}
    module.load_state_dict({**rest, **loaded})


def torchrec_state_dict(
    module: nn.Module,
    *,
    split_scale_bias: bool = False,
    row_alignment: int = 16,
    wrap: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
) -> dict[str, Tensor]:
    """The state of a model as TorchRec's quantized modules have it, for their `load_state_dict`: rows uint8 [R, width].

    `split_scale_bias` and `row_alignment` as the receiving model was prepared. TorchRec's int4 and int2 tables take
    nothing but its own tensor classes: `wrap={"int4": UInt4Tensor, "int2": UInt2Tensor}`, from `torchrec.tensor_types`.

    Raises:
        ValueError: a table of a format that TorchRec does not have (fp8, bf16), or with fp32 scales.
    """
    state = dict(module.state_dict())
    layout = replace(INFERENCE, alignment=row_alignment)
    for prefix, table in _tables(module):
        weight, parts = state[f"{prefix}weight"], [state[prefix + n] for n in (_SCALE, _BIAS) if prefix + n in state]
        scales = torch.cat(parts, dim=1) if parts else weight.new_empty(table.rows, 0)
        name = f"table {table.name!r}"
        fused = fuse_rows(weight, scales, dim=table.dim, format=table.format, layout=layout, table=name)
        if not split_scale_bias:
            for part in (_SCALE, _BIAS)[: len(parts)]:
                del state[prefix + part]
        rows = weight if split_scale_bias else fused
        state[f"{prefix}weight"] = (wrap or {}).get(table.format, _itself)(rows)
    return state


def _planes(weight: Tensor, parts: list[Tensor | None], table: QuantizedTable) -> tuple[Tensor, Tensor]:
    """Payload and scales of a table's entries, fused or split."""
    name, own = f"table {table.name!r}", {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    if weight.dtype in _FLOATS and weight.dtype != own.get(table.format):
        raise ValueError(f"{name}: the state dict's weight is {weight.dtype}, not bytes of {table.format} rows")
    # tensor classes of int4 and int2 give their bytes so
    rows = weight.view(torch.uint8)
    if rows.dim() != 2 or rows.shape[0] != table.rows:
        raise ValueError(f"{name}: the state dict's weight has shape {list(rows.shape)}, the table {table.rows} rows")
    scale, bias = parts
    if scale is None and bias is None:
        layout = inference_layout(rows.shape[1], dim=table.dim, format=table.format, table=name)
        return split_rows(rows, dim=table.dim, format=table.format, layout=layout, table=name)
    if scale is None or bias is None:
        raise ValueError(f"{name}: the state dict has one of {_SCALE} and {_BIAS} without the other")
    for part, values in ((_SCALE, scale), (_BIAS, bias)):
        if list(values.shape) != [table.rows, 1] or values.dtype != torch.float16:
            raise ValueError(
                f"{name}: {part} must be float16 [{table.rows}, 1],"
                f" got {str(values.dtype).removeprefix('torch.')} {list(values.shape)}"
            )
    # fused rows whose scales are at their end have the checks that are needed here
    split = replace(INFERENCE, scales_first=False, alignment=1)
    scales = torch.cat([scale, bias], dim=1)
    fused = torch.cat([rows, scales.view(torch.uint8)], dim=1)
    return split_rows(fused, dim=table.dim, format=table.format, layout=split, table=name)


def _collections(module: nn.Module) -> Iterator[tuple[str, QuantizedCollection]]:
    """Quantized collections with what their entries' names begin with."""
    for path, child in module.named_modules():
        if isinstance(child, QuantizedCollection):
            yield f"{path}." if path else "", child


def _tables(module: nn.Module) -> Iterator[tuple[str, QuantizedTable]]:
    for path, collection in _collections(module):
        for group in collection._groups:
            for table in group.tables:
                yield f"{path}{collection._children_name}.{table.name}.", table


def _itself(rows: Tensor) -> Tensor:
    return rows

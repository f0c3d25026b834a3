"""FBGEMM's rows, one run of bytes with payload and scales in it, to our two planes and back; no bit changes.

    FUSED_8BIT   payload | scale fp32 | bias fp32            FloatToFused8BitRowwiseQuantized
    FUSED_NBIT   payload | scale fp16 | bias fp16            FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf
    INFERENCE    scale fp16 | bias fp16 | payload | zeros    IntNBitTableBatchedEmbeddingBagsCodegen, TorchRec's models

INFERENCE also keeps fp16 and fp32 rows, which have no scales. Zeros fill a row up to a multiple of `alignment`. fp8 has
no counterpart: FBGEMM's inference tables of fp8 have no scales, its row-wise fp8 is a format of messages between GPUs.

Shapes: rows uint8 [R, width], payload uint8 [R, row_bytes], scales [R, parts] (kernels/row_formats.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shardwise.kernels import row_format

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
FUSED_NBIT = FusedLayout("FUSED_NBIT", ("int8", "int4", "int2"), torch.float16)
INFERENCE = FusedLayout(
    "INFERENCE", ("int8", "int4", "int2", "fp16", "fp32"), torch.float16, scales_first=True, alignment=16
)


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

from collections.abc import Sequence

import torch
from torch import Tensor


def record_layout(widths: Sequence[int | None], types: Sequence[torch.dtype]) -> tuple[list[int], int]:
    offsets, at = [], 0
    for width, kind in zip(widths, types, strict=True):
        if width is not None:
            at = -(-at // 16) * 16
        offsets.append(at)
        at += (1 if width is None else width) * kind.itemsize
    return offsets, -(-at // 64) * 64


def move_rows(parts: Sequence[Tensor], records: Tensor, slots: Tensor, saves: Tensor, loads: Tensor) -> None:
    widths = [part.shape[1] if part.dim() == 2 else None for part in parts]
    offsets, _ = record_layout(widths, [part.dtype for part in parts])
    saved, loaded = (saves >= 0).nonzero().squeeze(1), (loads >= 0).nonzero().squeeze(1)
    for part, width, offset in zip(parts, widths, offsets, strict=True):
        own = records[:, offset : offset + (width or 1) * part.itemsize].view(part.dtype)
        own = own.squeeze(1) if width is None else own
        own[saves[saved]] = part[slots[saved]]
        part[slots[loaded]] = own[loads[loaded]]

"""What `str()` and `repr()` of a jagged type say.

`str()` is TorchRec's text, byte for byte, and reads every tensor on the host; `repr()` is one line and reads nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor


def summary(tensor: Tensor) -> str:
    """Shape, dtype and device: `[3, 12] float32 cpu`."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {tensor.device}"


def rows_text(values: Sequence[Any], offsets: Sequence[int]) -> str:
    """One list per bag: `[[1, 2], [], [3]]`."""
    return str([values[start:end] for start, end in pairwise(offsets)])


def bags_text(values: Sequence[Any], weights: Sequence[Any] | None, offsets: Sequence[int], indent: str) -> str:
    """The bags, or the bags and their weights in braces that close at `indent`; of what was read on the host."""
    if weights is None:
        return rows_text(values, offsets)
    inner = indent + " " * 4
    return (
        f'{{\n{inner}"values": {rows_text(values, offsets)},\n'
        f'{inner}"weights": {rows_text(weights, offsets)}\n{indent}}}'
    )


def keyed_text(name: str, entries: Sequence[tuple[str, str]]) -> str:
    """`Name({...})` with one entry a line, `Name()` without entries; ends in a newline."""
    if not entries:
        return f"{name}()\n"
    body = ",\n".join(f'    "{key}": {text}' for key, text in entries)
    return f"{name}({{\n{body}\n}})\n"

"""Calls of lookups in inference tables."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .draw import Call, Draw, calls

# FBGEMM's numbers of its types: bits, and bytes of scales
_BITS = {0: (32, 0), 1: (16, 0), 2: (8, 4), 3: (4, 4), 4: (2, 4), 6: (8, 0)}
_UINT8 = 2


@calls("int_nbit_split_embedding_codegen_lookup_function")
def _nbit_lookup(draw: Draw) -> Call:
    mode, output = draw.below(3), draw.choice((0, 0, 1, 5, _UINT8))
    raw = output == _UINT8
    alignment = draw.choice((1, 4, 16))
    count = draw.between(1, 4)
    dims = [4 * draw.between(1, 9) for _ in range(count)]
    types = [draw.choice([2] if raw else list(_BITS)) for _ in range(count)]
    if mode == 2:
        dims = [dims[0]] * count
    # features share tables
    table_of = [*range(count), *(draw.below(count) for _ in range(draw.below(3)))]
    weighted = mode < 2 and draw.coin(0.4)
    tables = [
        _rows(draw, draw.between(1, 9), dim, kind, alignment, weighted) for dim, kind in zip(dims, types, strict=True)
    ]
    buffer, begins = _side_by_side([each for _, each in tables])
    used = [tables[t][0] for t in table_of]
    dtype, features = draw.index_dtype(), len(table_of)
    batch = draw.between(0 if mode == 2 else 1, 4)
    lengths = draw.lengths(features * batch, dtype=dtype)
    pruned = draw.coin(0.3)
    ids = [
        -1 if pruned and draw.coin(0.3) else draw.below(used[bag // batch])
        for bag, length in enumerate(lengths.tolist())
        for _ in range(length)
    ]
    weights = draw.floats(len(ids)) if weighted else None
    columns = [dims[t] for t in table_of]
    kinds = [types[t] for t in table_of]
    most = {kind: max([0, *(dim for dim, k in zip(columns, kinds, strict=True) if k == kind)]) for kind in _BITS}
    offsets = draw.offsets(lengths)
    args = [
        buffer, torch.empty(0, dtype=torch.uint8), torch.full((features,), 3, dtype=torch.int32),
        torch.tensor([begins[t] for t in table_of]), torch.tensor(kinds, dtype=torch.uint8),
        draw.offsets(torch.tensor(columns, dtype=torch.int32)), sum(columns),
        most[4], most[3], most[2], most[1], most[0],
        draw.layout(torch.tensor(ids, dtype=dtype)), offsets.to(draw.index_dtype()), mode, weights, output, None, None,
        alignment, most[6], *draw.choice(((4, 7), (5, 15))),
    ]  # fmt: skip
    if mode < 2 and raw:
        return Call(args, difference="pooled uint8 outputs")
    if -1 in ids and raw:
        return Call(args, difference="uint8 rows of pruned ids")
    if -1 in ids and 6 in types:
        return Call(args, difference="pruned ids of fp8 tables")
    return Call(args, packed=True)


def _rows(draw: Draw, rows: int, dim: int, kind: int, alignment: int, small: bool) -> tuple[int, Tensor]:
    """How many rows, and a table of them as bytes; `small` numbers are summed to within 1e-6 in any order."""
    bits, head = _BITS[kind]
    if bits > 8:
        numbers = draw.floats((rows, dim), torch.float32 if kind == 0 else torch.float16).view(torch.uint8)
    else:
        numbers = draw.ints((rows, dim * bits // 8), 0, 255, torch.uint8)
        if kind == 6 and small:
            # below 2, whatever the bits of the exponent
            numbers &= 0xBF
    scales = draw.floats((rows, 2), torch.float16, scale=0.01).view(torch.uint8)[:, :head]
    width = head + dim * bits // 8
    filling = torch.zeros(rows, -width % alignment, dtype=torch.uint8)
    return rows, torch.cat([scales, numbers, filling], 1)


def _side_by_side(tables: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
    """One buffer of them, each on a line of the cache, and where they begin."""
    parts, begins, size = [], [], 0
    for table in tables:
        begins.append(size)
        flat = torch.nn.functional.pad(table.flatten(), (0, -table.numel() % 128))
        parts.append(flat)
        size += flat.numel()
    return torch.cat(parts), begins

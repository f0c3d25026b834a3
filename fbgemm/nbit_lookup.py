"""Lookups of FBGEMM's inference tables, whose rows hold their scales themselves.

Shapes: dev_weights and uvm_weights flat uint8, weights_placements, weights_offsets and weights_tys [F], D_offsets
[F + 1], indices [N], offsets [F*B + 1], indice_weights [N].
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from shardwise.kernels import (
    MINIFLOAT,
    FusedTable,
    FusedTables,
    fused_pooled_lookup,
    fused_rows,
    fused_sequence_lookup,
    quantize_pooled,
)

from .registry import op

# numbers of FBGEMM's `SparseType`, and names of row formats
FORMATS = {0: "fp32", 1: "fp16", 2: "int8", 3: "int4", 4: "int2", 6: MINIFLOAT}
OUTPUTS = {0: torch.float32, 1: torch.float16, 2: torch.uint8, 5: torch.bfloat16}
_UINT8 = 2
SUM, MEAN, NONE = range(3)
_DEVICE, _MANAGED, _CACHING, _HOST = range(4)

_NUMBERS = ("weights_placements", "weights_offsets", "weights_tys", "D_offsets")


class _Numbers(NamedTuple):
    """What small tensors of a call say, on the host."""

    placements: tuple[int, ...]
    offsets: tuple[int, ...]
    types: tuple[int, ...]
    columns: tuple[int, ...]


# weights_offsets of another device -> the other tensors beside it and all their versions, and what they say
_read: Any = WeakTensorKeyDictionary()


def _lookup_fake(
    dev_weights: Tensor,
    uvm_weights: Tensor,
    weights_placements: Tensor,
    weights_offsets: Tensor,
    weights_tys: Tensor,
    D_offsets: Tensor,
    total_D: int,
    max_int2_D: int,
    max_int4_D: int,
    max_int8_D: int,
    max_float16_D: int,
    max_float32_D: int,
    indices: Tensor,
    offsets: Tensor,
    pooling_mode: int,
    indice_weights: Tensor | None,
    output_dtype: int = 1,
    lxu_cache_weights: Tensor | None = None,
    lxu_cache_locations: Tensor | None = None,
    row_alignment: int | None = None,
    max_float8_D: int | None = 0,
    fp8_exponent_bits: int | None = -1,
    fp8_exponent_bias: int | None = -1,
) -> Tensor:
    dtype, features = _output_dtype(output_dtype), D_offsets.shape[0] - 1
    if pooling_mode == NONE:
        dim = max(max_int2_D, max_int4_D, max_int8_D, max_float16_D, max_float32_D, max_float8_D or 0)
        return dev_weights.new_empty(indices.shape[0], dim + (4 if output_dtype == _UINT8 else 0), dtype=dtype)
    columns = total_D + (8 * features if output_dtype == _UINT8 else 0)
    return dev_weights.new_empty((offsets.shape[0] - 1) // features, columns, dtype=dtype)


@op(
    "int_nbit_split_embedding_codegen_lookup_function(Tensor dev_weights, Tensor uvm_weights, Tensor"
    " weights_placements, Tensor weights_offsets, Tensor weights_tys, Tensor D_offsets, SymInt total_D, int"
    " max_int2_D, int max_int4_D, int max_int8_D, int max_float16_D, int max_float32_D, Tensor indices, Tensor"
    " offsets, int pooling_mode, Tensor? indice_weights, int output_dtype=1, Tensor? lxu_cache_weights=None, Tensor?"
    " lxu_cache_locations=None, int? row_alignment=None, int? max_float8_D=0, int? fp8_exponent_bits=-1, int?"
    " fp8_exponent_bias=-1) -> Tensor",
    fake=_lookup_fake,
    words={"per-id weights": "indice_weights", "ids": "indices"},
)
def int_nbit_split_embedding_codegen_lookup_function(
    dev_weights: Tensor,
    uvm_weights: Tensor,
    weights_placements: Tensor,
    weights_offsets: Tensor,
    weights_tys: Tensor,
    D_offsets: Tensor,
    total_D: int,
    max_int2_D: int,
    max_int4_D: int,
    max_int8_D: int,
    max_float16_D: int,
    max_float32_D: int,
    indices: Tensor,
    offsets: Tensor,
    pooling_mode: int,
    indice_weights: Tensor | None,
    output_dtype: int = 1,
    lxu_cache_weights: Tensor | None = None,
    lxu_cache_locations: Tensor | None = None,
    row_alignment: int | None = None,
    max_float8_D: int | None = 0,
    fp8_exponent_bits: int | None = -1,
    fp8_exponent_bias: int | None = -1,
) -> Tensor:
    """Rows of these ids, pooled [B, total_D] or each by itself [N, D]; the id -1 is a pruned row and counts as none.

    uint8 outputs have scales beside their numbers: pooled ones [B, total_D + 8 * F] a scale and a bias in fp32 behind
    each feature's, rows of int8 tables [N, D + 4] theirs in fp16 in front.
    """
    dtype = _output_dtype(output_dtype)
    if pooling_mode not in (SUM, MEAN, NONE):
        raise ValueError(f"pooling_mode must be {SUM} (sum), {MEAN} (mean) or {NONE}, got {pooling_mode}")
    if lxu_cache_weights is not None and lxu_cache_weights.shape[0] and indices.is_cuda:
        raise ValueError("lxu_cache_weights: caches of rows are not served; place tables on the device")
    for name, buffer in (("dev_weights", dev_weights), ("uvm_weights", uvm_weights)):
        if buffer.dtype != torch.uint8 or buffer.dim() != 1:
            raise TypeError(f"{name} must be flat bytes, uint8 [N], got {buffer.dtype} {list(buffer.shape)}")
    numbers = _numbers(weights_placements, weights_offsets, weights_tys, D_offsets)
    # of other tables they mean nothing
    is_fp8 = any(FORMATS.get(number) == MINIFLOAT for number in numbers.types)
    minifloat = (
        fp8_exponent_bits if is_fp8 and fp8_exponent_bits is not None else -1,
        fp8_exponent_bias if is_fp8 and fp8_exponent_bias is not None else -1,
    )
    alignment = 1 if row_alignment is None else row_alignment
    sizes = (dev_weights.shape[0], uvm_weights.shape[0])
    layout = _layout(numbers, sizes, alignment, minifloat, dev_weights.is_cuda)
    if pooling_mode == NONE:
        dim = max(max_int2_D, max_int4_D, max_int8_D, max_float16_D, max_float32_D, max_float8_D or 0)
        _require_equal("the largest max_..._D, of rows that are not pooled", dim, layout.tables.dims[0])
    else:
        _require_equal("total_D", total_D, numbers.columns[-1] - numbers.columns[0])
    weights = indice_weights if indice_weights is not None and indice_weights.numel() else None
    result: Tensor | None = None
    for buffer, tables in zip((dev_weights, uvm_weights), (layout.tables, layout.managed), strict=True):
        if tables is None:
            continue
        part = _look_up(buffer, tables, indices, offsets, weights, pooling_mode, dtype)
        # columns and rows of the other buffer's tables are zeros
        result = part if result is None else result + part
    assert result is not None, "there are tables"
    return quantize_pooled(result, layout.tables.dims) if dtype == torch.uint8 and pooling_mode != NONE else result


def _look_up(
    buffer: Tensor,
    tables: FusedTables,
    indices: Tensor,
    offsets: Tensor,
    weights: Tensor | None,
    pooling_mode: int,
    dtype: torch.dtype,
) -> Tensor:
    if pooling_mode == NONE and dtype == torch.uint8:
        return fused_rows(buffer, tables, indices, offsets)
    if pooling_mode == NONE:
        return fused_sequence_lookup(buffer, tables, indices, offsets, output_dtype=dtype)
    pooled_dtype = torch.float32 if dtype == torch.uint8 else dtype
    mean = pooling_mode == MEAN
    return fused_pooled_lookup(buffer, tables, indices, offsets, weights, mean=mean, output_dtype=pooled_dtype)


class _Layout(NamedTuple):
    """The tables of `dev_weights`, and those of `uvm_weights` if there are any."""

    tables: FusedTables
    managed: FusedTables | None


@lru_cache(maxsize=256)
def _layout(
    numbers: _Numbers, sizes: tuple[int, int], row_alignment: int, minifloat: tuple[int, int], on_gpu: bool
) -> _Layout:
    placements, offsets, types, columns = numbers
    if not types or not len(placements) == len(offsets) == len(types) == len(columns) - 1:
        raise ValueError(
            f"weights_placements, weights_offsets, weights_tys and D_offsets must have F, F, F and F + 1 elements, got"
            f" {len(placements)}, {len(offsets)}, {len(types)} and {len(columns)}"
        )
    if row_alignment < 1:
        raise ValueError(f"row_alignment must be positive, got {row_alignment}")
    managed, tables = [_is_managed(f, place, on_gpu) for f, place in enumerate(placements)], []
    for f, (base, number, (begin, end)) in enumerate(zip(offsets, types, pairwise(columns), strict=True)):
        if number not in FORMATS:
            raise ValueError(f"weights_tys[{f}] is {number}: tables are of {_named(FORMATS)}")
        if FORMATS[number] == MINIFLOAT and not (0 < minifloat[0] < 8 and 0 < minifloat[1] < 128):
            raise ValueError(
                f"fp8_exponent_bits and fp8_exponent_bias must be positive where a table is fp8, got {minifloat}"
            )
        if end <= begin:
            raise ValueError(f"D_offsets must increase, got {begin} and then {end}")
        packed = FusedTable(FORMATS[number], 0, end - begin, 0)
        stride = -(-packed.row_bytes // row_alignment) * row_alignment
        size = sizes[managed[f]]
        if not 0 <= base <= size:
            raise ValueError(f"weights_offsets[{f}] is {base}, its buffer has {size} bytes")
        # a table ends where the next begins
        after = min((b for b, m in zip(offsets, managed, strict=True) if b > base and m == managed[f]), default=size)
        tables.append(FusedTable(FORMATS[number], (after - base) // stride, end - begin, stride, base))
    return _Layout(*_by_buffer(tables, managed, minifloat))


def _by_buffer(
    tables: Sequence[FusedTable], managed: Sequence[bool], minifloat: tuple[int, int]
) -> tuple[FusedTables, FusedTables | None]:
    if not any(managed):
        return FusedTables(tuple(tables), minifloat), None
    parts = [
        tuple(
            table if m == which else FusedTable(table.format, table.rows, table.dim, table.stride, None)
            for table, m in zip(tables, managed, strict=True)
        )
        for which in (False, True)
    ]
    return FusedTables(parts[0], minifloat), FusedTables(parts[1], minifloat)


def _is_managed(f: int, placement: int, on_gpu: bool) -> bool:
    """Whether a table lies in uvm_weights."""
    if placement == (_DEVICE if on_gpu else _HOST):
        return False
    if placement == _MANAGED or (placement == _CACHING and not on_gpu):
        return True
    raise ValueError(
        f"weights_placements[{f}] is {placement}: tables of a {'GPU' if on_gpu else 'CPU'} are placed at"
        f" {_DEVICE if on_gpu else _HOST} ({'device' if on_gpu else 'host'}) or {_MANAGED} (managed)"
    )


def _numbers(placements: Tensor, offsets: Tensor, types: Tensor, columns: Tensor) -> _Numbers:
    """What these tensors say; of another device they are read once, and again when they have been written."""
    tensors = (placements, offsets, types, columns)
    for name, each in zip(_NUMBERS, tensors, strict=True):
        if each.dim() != 1:
            raise ValueError(f"{name} must have one dimension, got shape {list(each.shape)}")
    if not any(each.is_cuda for each in tensors):
        return _Numbers(*(tuple(each.tolist()) for each in tensors))
    versions = None if any(each.is_inference() for each in tensors) else [each._version for each in tensors]
    kept = _read.get(offsets)
    if kept is not None and kept[1] == versions and all(a() is b for a, b in zip(kept[0], tensors, strict=True)):
        numbers: _Numbers = kept[2]
        return numbers
    # sizes and addresses of launches are known on the host alone: one wait for each module
    both = torch.cat([each.long() for each in tensors]).tolist()
    ends = [sum(each.shape[0] for each in tensors[:n]) for n in range(5)]
    numbers = _Numbers(*(tuple(both[begin:end]) for begin, end in pairwise(ends)))
    if versions is not None:
        _read[offsets] = ([ref(each) for each in tensors], versions, numbers)
    return numbers


def _output_dtype(number: int) -> torch.dtype:
    if number not in OUTPUTS:
        names = {each: str(dtype).removeprefix("torch.") for each, dtype in OUTPUTS.items()}
        raise ValueError(f"output_dtype {number}: outputs are {_named(names)}")
    return OUTPUTS[number]


def _named(names: dict[int, str]) -> str:
    return ", ".join(f"{number} ({'fp8' if name == MINIFLOAT else name})" for number, name in names.items())


def _require_equal(name: str, given: int, wanted: int) -> None:
    if given != wanted:
        raise ValueError(f"{name} must be {wanted}, as D_offsets say, got {given}")

"""State dicts of quantized TorchRec models into our quantized collections, and back; no bit changes.

TorchRec keeps a table as `<path>.embedding_bags.<table>.weight` (`embeddings` for sequences): fused rows (INFERENCE of
fbgemm_rows.py), or payload alone beside `weight_qscale` and `weight_qbias`, fp16 [R, 1] each. Entries of `tbes`, which
hold where those tables lie in memory, say nothing that a collection does not know. What a pruned table of ours has
besides, `index_remapping`, is in no such state dict: it is read and written under its own name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from .collection import QuantizedCollection
from .fbgemm_rows import INFERENCE, fuse_rows, inference_layout, split_rows
from .tables import QuantizedTable

_SCALE, _BIAS = "weight_qscale", "weight_qbias"
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def load_torchrec_state_dict(module: nn.Module, state_dict: Mapping[str, Tensor]) -> None:
    """Fill a model and the quantized collections in it, or such a collection, from a quantized TorchRec model's state.

    The tables' formats must be those that they were quantized to. All tables are checked before anything is loaded;
    other entries are loaded as `nn.Module.load_state_dict` does.

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
    """The state of a model as TorchRec's quantized modules have it, for their `load_state_dict`.

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

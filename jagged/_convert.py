"""Keyed batches from and to what data comes in: lists, torch's nested tensors, Arrow columns.

No conversion but that of lists runs a Python loop over samples.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
import torch.utils.dlpack
from torch import Tensor

from shardwise._version import how_to_install

from ._check import names
from ._keys import Strides, keys_of
from ._segments import join_tensors
from .jagged_tensor import JaggedTensor

if TYPE_CHECKING:
    from .keyed_jagged_tensor import KeyedJaggedTensor

Bag = Sequence[int]


def from_lists(
    lists: Mapping[str, Sequence[Bag]],
    weights: Mapping[str, Sequence[Sequence[float]]] | None,
    dtype: torch.dtype,
    device: torch.device | str | None,
) -> dict[str, Any]:
    """The arguments that make a KeyedJaggedTensor of lists."""
    keys = list(lists)
    sizes = [[len(bag) for bag in lists[key]] for key in keys]
    ids = list(chain.from_iterable(chain.from_iterable(lists.values())))
    for position, id in enumerate(ids):
        # a bool is an int, and a float would lose what follows the point
        if isinstance(id, bool) or not hasattr(id, "__index__"):
            raise TypeError(f"ids must be integers, got {id!r} at position {position}")
    if not keys:
        # of which nobody can say whether they are weighted
        weights = weights or None
    flat: Tensor | None = None
    if weights is not None:
        _check_weights(keys, sizes, weights)
        numbers = list(chain.from_iterable(chain.from_iterable(weights[key] for key in keys)))
        flat = torch.tensor(numbers, dtype=torch.float32, device=device)
    per_key = [len(bags) for bags in sizes]
    return {
        "keys": keys,
        "values": torch.tensor(ids, dtype=dtype, device=device),
        "weights": flat,
        "lengths": torch.tensor(list(chain.from_iterable(sizes)), dtype=torch.int64, device=device),
        "stride": 0 if not keys else None,
        "stride_per_key": per_key if len(set(per_key)) > 1 else None,
        "length_per_key": [sum(bags) for bags in sizes],
    }


def _check_weights(keys: list[str], sizes: list[list[int]], weights: Mapping[str, Sequence[Sequence[float]]]) -> None:
    if sorted(weights) != sorted(keys):
        raise ValueError(f"weights have the keys {names(list(weights))}, ids {names(keys)}")
    for key, bags in zip(keys, sizes, strict=True):
        counts = [len(bag) for bag in weights[key]]
        if len(counts) != len(bags):
            raise ValueError(f"key {key!r}: weights of {len(counts)} samples, ids of {len(bags)}")
        for sample, (count, size) in enumerate(zip(counts, bags, strict=True)):
            if count != size:
                raise ValueError(f"key {key!r}, sample {sample}: {count} weights for {size} ids")


def from_nested(nested: Mapping[str, Tensor]) -> tuple[Strides, Tensor, Tensor, list[int]]:
    """Batch sizes, values [L], lengths [bags] and the number of values of each key."""
    values, offsets = [], []
    for key, tensor in nested.items():
        # torch's own fields: its methods go through a dispatch in Python each
        flat: Any = tensor
        ends = getattr(tensor, "_offsets", None)
        if ends is None:
            raise TypeError(f"key {key!r}: expected a nested tensor of layout torch.jagged, got {_kind(tensor)}")
        if flat._lengths is not None:
            # with holes between the bags
            flat = flat.contiguous()
        if flat._values.dim() != 1:
            raise ValueError(f"key {key!r}: a nested tensor of ids must be [batch, ids], got {tensor.dim()} dims")
        values.append(flat._values)
        offsets.append(flat._offsets)
    keys = list(nested)
    per_key = [ends.shape[0] - 1 for ends in offsets]
    same = len(set(per_key)) == 1
    lengths = torch.stack(offsets).diff().view(-1) if same else torch.cat([ends.diff() for ends in offsets])
    known = keys_of(keys)
    strides = known.fixed(per_key[0]) if same else Strides(known, max(per_key), per_key)
    joined = join_tensors("values", lambda i: repr(keys[i]), values)
    return strides, joined, lengths, [value.shape[0] for value in values]


def _kind(value: object) -> str:
    return f"a tensor of layout {value.layout}" if isinstance(value, Tensor) else type(value).__name__


def from_arrow(table: Any, keys: Sequence[str] | None, weights_suffix: str) -> dict[str, JaggedTensor]:
    """The list columns of a table by key, with the weights of those that have some."""
    columns = {name: table[name] for name in (table.column_names if hasattr(table, "column_names") else table)}
    if keys is None:
        keys = [name for name in columns if not _is_weights(name, columns, weights_suffix)]
    jts = {}
    for key in keys:
        if key not in columns:
            raise KeyError(f"there is no column {key!r}, columns are {names(list(columns))}")
        ids, lengths = _flat(key, columns[key], "ids")
        if key + weights_suffix not in columns:
            jts[key] = JaggedTensor(ids, lengths=lengths)
            continue
        name = key + weights_suffix
        weights, sizes = _flat(name, columns[name], "weights")
        if not torch.equal(sizes, lengths):
            raise ValueError(f"column {name!r} has bags of other sizes than column {key!r}")
        jts[key] = JaggedTensor(ids, weights, lengths)
    return jts


def _is_weights(name: str, columns: Mapping[str, Any], suffix: str) -> bool:
    return name.endswith(suffix) and name.removesuffix(suffix) in columns


def _flat(name: str, column: Any, what: str) -> tuple[Tensor, Tensor]:
    """Values and lengths [rows] of a list column; a missing list is an empty one."""
    pa, compute = _arrow("pyarrow"), _arrow("pyarrow.compute")
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if isinstance(array, pa.ChunkedArray):
        # a column of no chunks stays one
        array = pa.array([], type=column.type)
    if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
        raise TypeError(f"column {name!r} must hold lists, got {array.type}")
    fits = pa.types.is_integer if what == "ids" else pa.types.is_floating
    if not fits(array.type.value_type):
        raise TypeError(f"column {name!r} must hold lists of {what}, got lists of {array.type.value_type}")
    # flatten() leaves out what missing lists and slices hide
    flat = array.flatten()
    if flat.null_count:
        raise ValueError(f"column {name!r}: {flat.null_count} of {len(flat)} {what} are missing")
    if pa.types.is_uint64(flat.type) or pa.types.is_uint32(flat.type) or pa.types.is_uint16(flat.type):
        # raises for what int64 cannot hold
        flat = flat.cast(pa.int64())
    lengths = compute.fill_null(compute.list_value_length(array), 0)
    return _tensor(flat), _tensor(lengths)


def _tensor(array: Any) -> Tensor:
    """A tensor of its own: Arrow's memory must not be written."""
    if len(array) == 0:
        return _nothing(array)
    return torch.utils.dlpack.from_dlpack(array).clone()


def _nothing(array: Any) -> Tensor:
    dtype = getattr(torch, {"float": "float32", "double": "float64", "halffloat": "float16"}.get(
        str(array.type), str(array.type)
    ))  # fmt: skip
    return torch.empty(0, dtype=dtype, device="cpu")


def to_arrow(kjt: KeyedJaggedTensor, weights_suffix: str) -> Any:
    """A table with a column for each key, and one for its weights."""
    pa = _arrow("pyarrow")
    batches = kjt.stride_per_key()
    if len(set(batches)) > 1:
        raise ValueError(f"a table has one number of rows, but batch sizes are {batches[:10]} for {names(kjt.keys())}")
    columns = {}
    for key, jt in kjt.to("cpu").to_dict().items():
        offsets = jt.offsets()
        kind = pa.ListArray if offsets.shape[0] == 0 or int(offsets[-1]) < 2**31 else pa.LargeListArray
        ends = _array(offsets.to(torch.int32 if kind is pa.ListArray else torch.int64))
        columns[key] = kind.from_arrays(ends, _array(jt.values()))
        if jt.weights_or_none() is not None:
            columns[key + weights_suffix] = kind.from_arrays(ends, _array(jt.weights().detach()))
    return pa.table(columns)


def _array(tensor: Tensor) -> Any:
    """An Arrow array over the tensor's memory."""
    pa = _arrow("pyarrow")
    tensor = tensor.contiguous()
    kind = {"float32": "float", "float64": "double", "float16": "halffloat"}
    name = str(tensor.dtype).removeprefix("torch.")
    buffer = pa.py_buffer(tensor.numpy()) if tensor.numel() else pa.py_buffer(b"")
    return pa.Array.from_buffers(pa.type_for_alias(kind.get(name, name)), tensor.numel(), [None, buffer])


def _arrow(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise ImportError(f"Arrow tables need pyarrow: {how_to_install('data')}") from None

"""Checks at construction: shapes, dtypes and devices only, so that none of them waits for a device.

`readable` says where a check may read numbers as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

INTEGER_DTYPES = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})


def names(keys: Sequence[str]) -> str:
    """Keys for a message: at most ten of them."""
    shown = ", ".join(repr(key) for key in keys[:10])
    return f"[{shown}, ... {len(keys)} keys]" if len(keys) > 10 else f"[{shown}]"


def check_keys(keys: Sequence[str]) -> list[str]:
    """A new list of the keys, which must be unique strings."""
    if not isinstance(keys, (list, tuple)):
        raise TypeError(f"keys must be a list of strings, got {type(keys).__name__}")
    for key in keys:
        if not isinstance(key, str):
            raise TypeError(f"keys must be strings, got {key!r} ({type(key).__name__})")
    if len(set(keys)) != len(keys):
        repeated = [key for key, count in Counter(keys).items() if count > 1]
        raise ValueError(f"keys must be unique, repeated: {names(repeated)}")
    return list(keys)


def check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(tensor).__name__}")


def readable(tensor: Tensor) -> bool:
    """Whether reading it waits for nothing: it is on the cpu, has numbers (a fake one has not), and nothing traces."""
    return tensor.device.type == "cpu" and not torch.compiler.is_compiling() and type(tensor) is Tensor


def check_values(values: Tensor, weights: Tensor | None) -> None:
    """Values have a first dim; weights go with them one to one."""
    check_tensor("values", values)
    if values.dim() == 0:
        raise ValueError("values must have at least one dim, got a scalar")
    if weights is None:
        return
    check_tensor("weights", weights)
    if weights.dim() == 0 or weights.shape[0] != values.shape[0]:
        raise ValueError(
            f"weights must be as many as values: got shape {list(weights.shape)} for {values.shape[0]} values"
        )
    _check_device("weights", weights, values)


def check_capacity(values: Tensor, capacity: int | None) -> None:
    """Values are as many as the capacity says, if it says anything."""
    if capacity is None:
        return
    if not isinstance(capacity, int) or capacity < 0:
        raise ValueError(f"capacity must be an integer >= 0, got {capacity!r}")
    if values.shape[0] != capacity:
        raise ValueError(f"capacity {capacity} needs as many values, padding included: got {values.shape[0]}")


def check_bags(
    values: Tensor, lengths: Tensor | None, offsets: Tensor | None, capacity: int | None = None
) -> tuple[Tensor | None, Tensor | None, int]:
    """Lengths and offsets as they are kept, and the number of bags they speak of."""
    if lengths is None and offsets is None:
        raise ValueError("lengths or offsets must be given, got neither")
    bags = 0
    if lengths is not None:
        lengths = _check_integers("lengths", lengths, values)
        bags = lengths.shape[0]
    if offsets is not None:
        offsets = _check_integers("offsets", offsets, values)
        if offsets.shape[0] == 0:
            # TorchRec's users write no offsets at all for no bags
            offsets = offsets.new_zeros(1)
        if lengths is not None and offsets.shape[0] != bags + 1:
            raise ValueError(f"{bags} lengths need {bags + 1} offsets, got {offsets.shape[0]}")
        bags = offsets.shape[0] - 1
    if bags == 0 and values.shape[0] != 0 and capacity is None:
        raise ValueError(f"{values.shape[0]} values but no bags: lengths is empty")
    return lengths, offsets, bags


def check_ranks(keys: list[str], per_rank: Sequence[Sequence[int]] | Tensor | None) -> list[list[int]] | None:
    """Batch sizes [keys][ranks] as lists. None, or an empty list, says that all keys have one batch size."""
    if per_rank is None or len(per_rank) == 0:
        return None
    if isinstance(per_rank, Tensor):
        if per_rank.device.type != "cpu":
            raise ValueError(
                f"stride_per_key_per_rank must be on the cpu (reading it would wait), got {per_rank.device}"
            )
        if per_rank.dim() != 2:
            raise ValueError(f"stride_per_key_per_rank must be [keys, ranks], got shape {list(per_rank.shape)}")
        # not a host sync: it lives on the host
        per_rank = per_rank.tolist()
    rows = [list(row) for row in per_rank]
    if len(rows) != len(keys):
        raise ValueError(f"stride_per_key_per_rank has {len(rows)} rows for {len(keys)} keys {names(keys)}")
    for key, row in zip(keys, rows, strict=True):
        if len(row) != len(rows[0]):
            raise ValueError(
                f"stride_per_key_per_rank: {len(row)} ranks for key {key!r}, {len(rows[0])} for {keys[0]!r}"
            )
        if any(not isinstance(n, int) or n < 0 for n in row):
            raise ValueError(f"stride_per_key_per_rank: batch sizes of key {key!r} must be integers >= 0, got {row}")
    return rows


def check_strides(
    keys: list[str], bags: int, stride: int | None, per_rank: list[list[int]] | None
) -> tuple[int, list[int]]:
    """The batch size of the whole and of each key, which must account for all `bags`."""
    if stride is not None and (not isinstance(stride, int) or stride < 0):
        raise ValueError(f"stride must be an integer >= 0, got {stride!r}")
    if per_rank is not None:
        per_key = [sum(row) for row in per_rank]
        if sum(per_key) != bags:
            sizes = ", ".join(f"{key!r}: {n}" for key, n in zip(keys[:10], per_key, strict=False))
            raise ValueError(f"expected {sum(per_key)} bags ({sizes}), got {bags}")
        largest = max(per_key)
        if stride is not None and stride < largest:
            raise ValueError(f"stride {stride} is below {largest}, the batch size of {keys[per_key.index(largest)]!r}")
        return (largest if stride is None else stride), per_key
    if stride is None:
        if bags and not keys:
            raise ValueError(f"no keys own no bags, got {bags}")
        if bags % max(len(keys), 1) != 0:
            raise ValueError(f"{bags} bags is not a multiple of {len(keys)} keys {names(keys)}")
        stride = bags // max(len(keys), 1)
    elif bags != stride * len(keys):
        raise ValueError(
            f"stride {stride} and {len(keys)} keys {names(keys)}: expected {stride * len(keys)} bags, got {bags}"
        )
    return stride, [stride] * len(keys)


def _check_integers(name: str, tensor: Tensor, values: Tensor) -> Tensor:
    check_tensor(name, tensor)
    if tensor.dim() != 1:
        raise ValueError(f"{name} must be 1-D, got shape {list(tensor.shape)}")
    _check_device(name, tensor, values)
    if tensor.dtype in INTEGER_DTYPES:
        return tensor
    if tensor.shape[0] == 0:
        # torch.tensor([]) is float: it holds nothing to lose
        return tensor.to(torch.int64)
    raise TypeError(f"{name} must be integers (int32 or int64), got {tensor.dtype}")


def _check_device(name: str, tensor: Tensor, values: Tensor) -> None:
    if tensor.device != values.device:
        raise ValueError(f"{name} are on {tensor.device}, values on {values.device}: move one of them")

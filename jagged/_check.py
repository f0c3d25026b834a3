"""Checks at construction: shapes, dtypes and devices only, so that none of them waits for a device.

`readable` says where a check may read numbers as well.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import KeysView, Sequence
from itertools import accumulate, chain, pairwise
from typing import TypeAlias, cast

import torch
from torch import Tensor

from shardwise.errors import RefusedTypeError, RefusedValueError
from shardwise.kernels._op import in_graph

INTEGER_DTYPES = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})

# of a batch size, which a traced program may not know yet
_WHOLE = {int, torch.SymInt}


# text, or as TorchRec's users also have them, numbers
KeyNames: TypeAlias = "Sequence[str] | Sequence[int] | KeysView[str] | KeysView[int]"


def names(keys: Sequence[str]) -> str:
    """Keys for a message: at most ten of them."""
    shown = ", ".join(repr(key) for key in keys[:10])
    return f"[{shown}, ... {len(keys)} keys]" if len(keys) > 10 else f"[{shown}]"


def check_keys(keys: KeyNames) -> list[str]:
    """A new list of the keys, which must be unique strings or ints (which the type of the result does not say)."""
    if isinstance(keys, (str, bytes)) or not isinstance(keys, (Sequence, KeysView)):
        raise TypeError(f"keys must be a list of strings, got {type(keys).__name__}")
    checked: list[str] = []
    for key in keys:
        # a bool is an int, and the same key as 0 or 1
        if not isinstance(key, (str, int)) or isinstance(key, bool):
            raise TypeError(f"keys must be strings or ints, got {key!r} ({type(key).__name__})")
        checked.append(cast(str, key))
    if len(set(checked)) != len(checked):
        repeated = [key for key, count in Counter(checked).items() if count > 1]
        raise ValueError(f"keys must be unique, repeated: {names(repeated)}")
    return checked


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
    if in_graph() and weights.dim():
        # sizes that nobody knows yet are checked when they are
        same = weights.shape[0] == values.shape[0]
        torch._check(same, lambda: "weights must be as many as values")  # type: ignore[no-untyped-call]
    elif weights.dim() == 0 or weights.shape[0] != values.shape[0]:
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
    values: Tensor,
    lengths: Tensor | None,
    offsets: Tensor | None,
    capacity: int | None = None,
    keys: Sequence[str] | None = None,
) -> tuple[Tensor | None, Tensor | None, int]:
    """Lengths and offsets as they are kept, and the number of bags they speak of."""
    bags = 0
    if lengths is not None:
        lengths = _check_integers("lengths", lengths, values, keys)
        bags = lengths.shape[0]
    elif offsets is None and keys is not None and len(keys) == 0 and values.shape[0] == 0:
        # no keys have no bags, which need not be said
        lengths = torch.empty(0, dtype=torch.int64, device=values.device)
    elif offsets is None:
        raise RefusedValueError("Must provide lengths or offsets, got neither")
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


def check_ranks(keys: list[str], per_rank: Sequence[Sequence[int]] | Tensor | None) -> tuple[list[int], int] | None:
    """Batch sizes [keys][ranks], key after key, and the ranks. None, or nothing: all keys have one batch size."""
    if per_rank is None or len(per_rank) == 0:
        return None
    if len(per_rank) != len(keys):
        raise ValueError(f"stride_per_key_per_rank has {len(per_rank)} rows for {len(keys)} keys {names(keys)}")
    if isinstance(per_rank, Tensor):
        if per_rank.device.type != "cpu":
            raise ValueError(
                f"stride_per_key_per_rank must be on the cpu (reading it would wait), got {per_rank.device}"
            )
        if per_rank.dim() != 2:
            raise ValueError(f"stride_per_key_per_rank must be [keys, ranks], got shape {list(per_rank.shape)}")
        ranks, same = per_rank.shape[1], True
        # not a host sync: it lives on the host
        flat = per_rank.reshape(-1).tolist()
    else:
        flat, ranks, same = list(chain.from_iterable(per_rank)), len(per_rank[0]), len(set(map(len, per_rank))) == 1
    if not same or not set(map(type, flat)) <= _WHOLE or min(flat, default=0) < 0:
        per_rank = per_rank.tolist() if isinstance(per_rank, Tensor) else per_rank
        for key, row in zip(keys, per_rank, strict=True):
            if len(row) != len(per_rank[0]):
                raise ValueError(
                    f"stride_per_key_per_rank: {len(row)} ranks for key {key!r}, {len(per_rank[0])} for {keys[0]!r}"
                )
            if any(type(n) not in _WHOLE or n < 0 for n in row):
                raise ValueError(
                    f"stride_per_key_per_rank: batch sizes of key {key!r} must be integers >= 0, got {list(row)}"
                )
    return flat, ranks


def check_stride(keys: list[str], bags: int, stride: int | None) -> int:
    """The batch size that all keys share, which must account for all `bags`."""
    if stride is None:
        if bags and not keys:
            raise ValueError(f"no keys own no bags, got {bags}")
        if bags % max(len(keys), 1) != 0:
            raise ValueError(f"{bags} bags is not a multiple of {len(keys)} keys {names(keys)}")
        return bags // max(len(keys), 1)
    _check_stride("stride", stride)
    if bags != stride * len(keys):
        raise ValueError(
            f"stride {stride} and {len(keys)} keys {names(keys)}: expected {stride * len(keys)} bags, got {bags}"
        )
    return stride


def check_variable_stride(
    keys: list[str], bags: int, stride: int | None, per_key: list[int], full_batch: int | None
) -> int:
    """The batch size of the whole where each key has its own: the full batch if it is known, else the largest."""
    if sum(per_key) != bags:
        sizes = ", ".join(f"{key!r}: {n}" for key, n in zip(keys[:10], per_key, strict=False))
        raise ValueError(f"expected {sum(per_key)} bags ({sizes}), got {bags}")
    if stride is not None:
        _check_stride("stride", stride)
    if full_batch is not None:
        if stride is not None and stride != full_batch:
            raise ValueError(f"stride {stride}, but inverse_indices are of a batch of {full_batch}")
        return full_batch
    largest = max(per_key, default=0)
    if stride is not None and stride < largest:
        raise ValueError(f"stride {stride} is below {largest}, the batch size of {keys[per_key.index(largest)]!r}")
    return largest if stride is None else stride


def check_inverse(
    keys: list[str], inverse: tuple[list[str], Tensor] | None, values: Tensor
) -> tuple[list[str], Tensor] | None:
    """Keys and their rows [keys, full batch] of samples in each key's own batch; every key has a row."""
    if inverse is None:
        return None
    if not isinstance(inverse, tuple) or len(inverse) != 2:
        raise TypeError(f"inverse_indices must be a pair of keys and a tensor, got {type(inverse).__name__}")
    rows, indices = list(inverse[0]), inverse[1]
    check_tensor("inverse_indices", indices)
    if indices.dim() != 2 or indices.shape[0] != len(rows):
        raise ValueError(
            f"inverse_indices of {len(rows)} keys must be [{len(rows)}, batch], got shape {list(indices.shape)}"
        )
    if indices.dtype not in INTEGER_DTYPES:
        raise TypeError(f"inverse_indices must be integers (int32 or int64), got {indices.dtype}")
    _check_device("inverse_indices", indices, values)
    if rows != keys:
        known = set(check_keys(rows))
        lacking = [key for key in keys if key not in known]
        if lacking:
            raise ValueError(f"inverse_indices lack the keys {names(lacking)}: they have {names(rows)}")
    return rows, indices


def check_validate(validate: str) -> None:
    if validate != "full":
        raise ValueError(f"validate must be 'shapes' or 'full', got {validate!r}")


def check_known(what: str, given: Sequence[object] | None, expected: Sequence[object]) -> None:
    """ValueError unless a number that the caller computed agrees with what it is computed from."""
    if given is not None and list(given) != list(expected):
        raise ValueError(f"{what} must be {_first(expected)}, got {_first(given)}")


def check_length_per_key(
    keys: list[str], given: Sequence[int] | None, offset_per_key: Sequence[int] | None, values: Tensor, padded: bool
) -> list[int] | None:
    """Number of values of each key as a caller knows it, from counts or from their running sum."""
    if given is None and offset_per_key is not None:
        given = [end - start for start, end in pairwise(offset_per_key)]
    if given is None:
        return None
    given = list(given)
    total, count = sum(given), values.shape[0]
    if len(given) != len(keys):
        raise ValueError(f"length_per_key has {len(given)} entries for {len(keys)} keys {names(keys)}")
    if min(given, default=0) < 0 or total > count or (total != count and not padded):
        raise ValueError(f"length_per_key {_first(given)} sums to {total}, values has {count}")
    if offset_per_key is not None:
        check_known("offset_per_key", offset_per_key, [0, *accumulate(given)])
    return given


def _first(numbers: Sequence[object]) -> str:
    return f"[{', '.join(map(str, numbers[:10]))}{', ...' if len(numbers) > 10 else ''}]"


def _check_stride(name: str, stride: object) -> None:
    if not isinstance(stride, (int, torch.SymInt)) or stride < 0:
        raise ValueError(f"{name} must be an integer >= 0, got {stride!r}")


def _check_integers(name: str, tensor: Tensor, values: Tensor, keys: Sequence[str] | None = None) -> Tensor:
    check_tensor(name, tensor)
    if tensor.dim() != 1:
        if tensor.dim() != 2 or keys is None or tensor.shape[0] != len(keys):
            shapes = "1-D" if keys is None else f"1-D or [{len(keys)} keys, batch]"
            raise ValueError(f"{name} must be {shapes}, got shape {list(tensor.shape)}")
        tensor = tensor.reshape(-1)
    _check_device(name, tensor, values)
    if tensor.dtype in INTEGER_DTYPES:
        return tensor
    if tensor.shape[0] == 0:
        # torch.tensor([]) is float: it holds nothing to lose
        return tensor.to(torch.int64)
    raise RefusedTypeError(
        f"{name} must be of integer type, but got {tensor.dtype}: convert them by .to(torch.int64) if they are whole"
    )


def _check_device(name: str, tensor: Tensor, values: Tensor) -> None:
    if tensor.device != values.device:
        raise ValueError(f"{name} are on {tensor.device}, values on {values.device}: move one of them")

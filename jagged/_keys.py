"""Keys and their batch sizes: what is known of a keyed batch on the host, and the same from batch to batch.

A program sends the same keys every step, so `Keys` are checked once and found again; all that only depends on keys and
batch size (`Strides`, orders of keys) is kept beside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import reduce
from itertools import accumulate
from operator import add
from typing import TypeVar

import torch
from torch import Tensor

from shardwise.errors import RefusedValueError

from ._check import KeyNames, check_keys, check_known, check_ranks, check_stride, check_variable_stride, names

_Key = TypeVar("_Key")
_Value = TypeVar("_Value")
# entries of each cache; a program has a few, one that makes up keys as it goes must not fill the memory
_MOST = 4096


class Keys:
    """Names of features, and where each is. `names` belongs to all that share it: hand out copies."""

    __slots__ = ("_columns", "_fixed", "_orders", "index", "names")

    def __init__(self, names: list[str]) -> None:
        self.names = names
        # the last of repeated names, which only `Order` makes
        self.index = {name: i for i, name in enumerate(names)}
        self._fixed: Strides | None = None
        self._columns: Columns | None = None
        self._orders: dict[tuple[int, ...], Order] = {}

    def columns(self, widths: Sequence[int]) -> Columns:
        """All keys with these numbers of columns."""
        columns = self._columns
        if columns is None or columns.widths != widths:
            columns = Columns(self, list(widths))
            if not torch.compiler.is_compiling():
                self._columns = columns
        return columns

    def fixed(self, stride: int) -> Strides:
        """All keys with one batch size."""
        if torch.compiler.is_compiling():
            return Strides(self, stride)
        if self._fixed is None or self._fixed.stride != stride:
            self._fixed = Strides(self, stride)
        return self._fixed

    def __reduce__(self) -> tuple[object, ...]:
        return _again, (self.names,)

    def order(self, indices: Sequence[int]) -> Order:
        """The keys at `indices`; IndexError for one outside of the keys."""
        if torch.compiler.is_compiling():
            return Order(self, tuple(indices))
        indices = tuple(indices)
        order = self._orders.get(indices)
        if order is None:
            order = _keep(self._orders, indices, Order(self, indices))
        return order


class Order:
    """Some of the keys in another order; repeats and omissions allowed."""

    __slots__ = ("_on", "indices", "keys")

    def __init__(self, keys: Keys, indices: tuple[int, ...]) -> None:
        count = len(keys.names)
        for index in indices:
            if not 0 <= index < count:
                raise IndexError(f"index {index} is out of range for {count} keys {names(keys.names)}")
        self.indices = indices
        self.keys = Keys([keys.names[i] for i in indices])
        self._on: dict[torch.device, Tensor] = {}

    def tensor(self, like: Tensor) -> Tensor:
        """The indices [n] int64 on the device of `like`."""
        # kept for tensors with numbers only: what a compiler or a fake mode makes is of no use to the next call
        plain = type(like) is Tensor and not torch.compiler.is_compiling()
        tensor = self._on.get(like.device) if plain else None
        if tensor is None:
            # non_blocking, since a blocking copy from the host would be a host sync
            tensor = torch.tensor(self.indices, dtype=torch.int64, device="cpu").to(like.device, non_blocking=True)
            if plain:
                _keep(self._on, like.device, tensor)
        return tensor


_BY_NAMES: dict[tuple[object, ...], Keys] = {}
_BY_LIST: dict[int, Keys] = {}


def keys_of(names: KeyNames) -> Keys:
    """The keys of these names, which must be unique strings or ints; TypeError or ValueError if they are not."""
    if torch.compiler.is_compiling():
        return Keys(check_keys(names))
    # the list object of the last step, if it still says the same
    keys = _BY_LIST.get(id(names))
    if keys is not None and keys.names == names:
        return keys
    if not isinstance(names, (list, tuple)):
        return Keys(check_keys(names))
    try:
        keys = _BY_NAMES.get(tuple(names))
    except TypeError:
        # what cannot be hashed is no string, which the check says
        keys = None
    if keys is None:
        keys = Keys(check_keys(names))
        _keep(_BY_NAMES, tuple(names), keys)
    return _keep(_BY_LIST, id(names), keys)


_JOINED: dict[tuple[Keys, ...], Keys] = {}


def _join_keys(members: tuple[Keys, ...]) -> Keys:
    """All keys of these, in order; ValueError where two have one key."""
    joined = None if torch.compiler.is_compiling() else _JOINED.get(members)
    if joined is None:
        joined = keys_of([name for keys in members for name in keys.names])
        if not torch.compiler.is_compiling():
            _keep(_JOINED, members, joined)
    return joined


def _again(names: list[str]) -> Keys:
    """Keys from a pickle; names may repeat there, as an order of keys may repeat them."""
    return keys_of(names) if len(set(names)) == len(names) else Keys(names)


def _keep(cache: dict[_Key, _Value], key: _Key, value: _Value) -> _Value:
    if len(cache) >= _MOST:
        cache.clear()
    cache[key] = value
    return value


class Strides:
    """Which keys there are and how many bags each owns.

    `stride` is the batch size of the whole: the common one, or the largest where keys differ; pieces keep it. `sizes`
    are batch sizes [keys][ranks] in one list, key after key; None says that every key has batch size `stride`.
    Lists are shared: hand out copies.
    """

    __slots__ = ("_per_key", "_starts", "keys", "ranks", "sizes", "stride")

    def __init__(self, keys: Keys, stride: int, sizes: list[int] | None = None, ranks: int = 1) -> None:
        self.keys = keys
        self.stride = stride
        self.sizes = sizes
        self.ranks = ranks
        self._per_key: list[int] | None = sizes if ranks == 1 else None
        self._starts: list[int] | None = None

    @property
    def per_rank(self) -> list[list[int]]:
        """Batch sizes [keys][ranks], of one rank where all keys have the same; a list of the caller's."""
        sizes, ranks = self.per_key if self.sizes is None else self.sizes, self.ranks
        if not ranks:
            return [[] for _ in self.keys.names]
        return list(map(list, zip(*[iter(sizes)] * ranks, strict=True)))

    @property
    def per_key(self) -> list[int]:
        """Batch size of each key."""
        if self._per_key is None:
            if self.sizes is None:
                self._per_key = [self.stride] * len(self.keys.names)
            elif not self.ranks:
                self._per_key = [0] * len(self.keys.names)
            else:
                # rank by rank, which is faster than key by key
                of_ranks = (self.sizes[rank :: self.ranks] for rank in range(self.ranks))
                self._per_key = reduce(lambda sums, sizes: list(map(add, sums, sizes)), of_ranks)
        return self._per_key

    @property
    def bags(self) -> int:
        """Of all keys."""
        return self.stride * len(self.keys.names) if self.sizes is None else self.starts[-1]

    @property
    def starts(self) -> list[int]:
        """First bag of each key, then the number of bags."""
        if self._starts is None:
            self._starts = starts_of(self.per_key)
        return self._starts

    def pick(self, order: Order) -> Strides:
        """The keys of an order."""
        if self.sizes is None:
            return order.keys.fixed(self.stride)
        sizes, ranks = self.sizes, self.ranks
        return Strides(
            order.keys, self.stride, [n for i in order.indices for n in sizes[i * ranks : (i + 1) * ranks]], ranks
        )

    @staticmethod
    def join(members: Sequence[Strides]) -> Strides:
        """All keys of members that have keys, in order.

        Raises ValueError where a key is in two members, fixed batch sizes differ, or numbers of ranks differ.
        """
        keys = _join_keys(tuple(m.keys for m in members))
        stride = max(m.stride for m in members)
        if all(m.sizes is None for m in members):
            if any(m.stride != stride for m in members):
                sizes = ", ".join(f"{m.stride} for {names(m.keys.names)}" for m in members)
                raise RefusedValueError(f"strides must be consistent for all KJTs, got {sizes}")
            return keys.fixed(stride)
        if len({m.ranks for m in members}) > 1:
            # a fixed batch beside a variable one is a batch of one rank
            counts = ", ".join(f"{m.ranks} for {key!r}" for m in members for key in m.keys.names)
            raise ValueError(f"cannot join different numbers of ranks: {counts}")
        joined = [n for m in members for n in (m.per_key if m.sizes is None else m.sizes)]
        return Strides(keys, stride, joined, members[0].ranks)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Strides)
            and self.keys.names == other.keys.names
            and (self.stride, self.sizes, self.ranks) == (other.stride, other.sizes, other.ranks)
        )

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[object, ...]:
        return Strides, (self.keys, self.stride, self.sizes, self.ranks)


def strides_of(
    keys: Keys,
    bags: int,
    stride: int | None,
    per_rank: Sequence[Sequence[int]] | Tensor | None,
    per_key: Sequence[int] | None,
    full_batch: int | None,
) -> Strides:
    """Batch sizes as a caller gives them; a table without entries says that all keys have one batch size."""
    by_rank = check_ranks(keys.names, per_rank)
    if by_rank is None and per_key is not None and len(set(per_key)) > 1:
        by_rank = check_ranks(keys.names, [[n] for n in per_key])
    if by_rank is None:
        strides = keys.fixed(check_stride(keys.names, bags, stride))
    else:
        strides = Strides(keys, 0, *by_rank)
        strides.stride = check_variable_stride(keys.names, bags, stride, strides.per_key, full_batch)
    if per_key is not None:
        check_known("stride_per_key", per_key, strides.per_key)
    return strides


class Columns:
    """How many columns of a dense tensor each key has; where each begins. Lists are shared: hand out copies."""

    __slots__ = ("keys", "starts", "widths")

    def __init__(self, keys: Keys, widths: list[int]) -> None:
        if len(widths) != len(keys.names):
            raise ValueError(f"{len(keys.names)} keys {names(keys.names)} but {len(widths)} lengths")
        for key, width in zip(keys.names, widths, strict=True):
            if width < 0:
                raise ValueError(f"key {key!r}: length must be >= 0, got {width}")
        self.keys = keys
        self.widths = widths
        self.starts = starts_of(widths)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Columns) and (self.widths, self.keys.names) == (other.widths, other.keys.names)

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[object, ...]:
        return Columns, (self.keys, self.widths)


def starts_of(sizes: Iterable[int]) -> list[int]:
    """Running sum with a leading 0: [2, 3] -> [0, 2, 5]."""
    return list(accumulate(sizes, initial=0))


def dist_labels(variable: bool, weighted: bool) -> list[str]:
    return ["lengths", "values", *["strides"] * variable, *["weights"] * weighted]

"""The sparse input of a recommender: for each key (feature) a batch of bags of ids, all in one flat tensor.

Shapes: values [L], weights [L], lengths [bags], offsets [bags + 1]. Bags are key-major: all of the first key's batch,
then the second's. Each key has its own batch size, its stride; most often they are all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ._bags import Bags
from ._check import (
    check_bags,
    check_capacity,
    check_keys,
    check_ranks,
    check_strides,
    check_values,
    names,
    readable,
)
from ._segments import Strides, check_members, join_tensors, join_weights, offsets_of, read_length_per_key, starts_of
from ._text import bags_text, keyed_text
from .jagged_tensor import JaggedTensor


class KeyedJaggedTensor(Bags):
    """Values [L] in consecutive bags, the bags in consecutive keys, with an optional weight for each value.

    Give lengths [bags] or offsets [bags + 1]. Without `stride` the bags are shared out evenly over the keys;
    `stride_per_key_per_rank`, a list [keys][ranks] or an int tensor on the cpu, gives each key its own batch size
    (its sum over ranks). `stride` alone matters where there are no keys.

        kjt = KeyedJaggedTensor(["user", "item"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 0, 1, 0]))
        kjt["user"].to_dense()  # [1, 2] and []

    With a `capacity` values (and weights) are exactly so long, and what lies past the last bag is padding: it may hold
    anything, a lookup ignores it, forward and backward, and lengths add up to L or less. So batches of different sizes
    have one shape, as a captured CUDA graph needs. Without it values that no bag owns are an error. Copies keep the
    capacity; pieces, to which no padding belongs, have none.

    Nothing is read on the host here. `split`, `permute`, `to_dict` and `[key]` need to know how many values each key
    has: `length_per_key` reads that once, in one host sync, checks the lengths against the values, and hands it on.

    Raises ValueError or TypeError, naming the keys, for shapes, dtypes and devices that do not fit together.
    """

    _strides: Strides
    _capacity: int | None
    _length_per_key: list[int] | None
    # False: the sizes of from_jt_dict's members on a device, which nobody compared with the lengths yet
    _checked: bool
    _offset_per_key: list[int] | None
    _jt_dict: dict[str, JaggedTensor] | None

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | Tensor | None = None,
        *,
        capacity: int | None = None,
    ) -> None:
        keys = check_keys(keys)
        check_values(values, weights)
        check_capacity(values, capacity)
        for name, tensor in (("values", values), ("weights", weights)):
            if tensor is not None and tensor.dim() != 1:
                raise ValueError(f"{name} of {names(keys)} must be 1-D, got shape {list(tensor.shape)}")
        lengths, offsets, bags = check_bags(values, lengths, offsets, capacity)
        per_rank = check_ranks(keys, stride_per_key_per_rank)
        stride, per_key = check_strides(keys, bags, stride, per_rank)
        self._fill(Strides(keys, stride, per_key, per_rank), values, weights, lengths, offsets, capacity=capacity)

    def _fill(
        self,
        strides: Strides,
        values: Tensor,
        weights: Tensor | None,
        lengths: Tensor | None,
        offsets: Tensor | None = None,
        length_per_key: list[int] | None = None,
        checked: bool = True,
        capacity: int | None = None,
    ) -> KeyedJaggedTensor:
        """Set every field and return self, without a check: `_new()._fill(...)` makes pieces of what was checked."""
        self._strides = strides
        self._values = values
        self._weights = weights
        self._lengths = lengths
        self._offsets = offsets
        self._capacity = capacity
        self._length_per_key = length_per_key
        self._checked = checked
        self._offset_per_key = None
        self._jt_dict = None
        return self

    @staticmethod
    def from_lengths_sync(
        keys: Sequence[str],
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | Tensor | None = None,
        *,
        capacity: int | None = None,
    ) -> KeyedJaggedTensor:
        """From lengths, which are read (one host sync): ValueError unless none is negative and they add up to L.

        With a `capacity` they may add up to less.
        """
        return KeyedJaggedTensor(
            keys, values, weights, lengths, None, stride, stride_per_key_per_rank, capacity=capacity
        ).sync()

    @staticmethod
    def from_offsets_sync(
        keys: Sequence[str],
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | Tensor | None = None,
        *,
        capacity: int | None = None,
    ) -> KeyedJaggedTensor:
        """From offsets, which are read (one host sync): ValueError unless they go from 0 to L and never decrease.

        With a `capacity` they may end before L.
        """
        return KeyedJaggedTensor(
            keys, values, weights, None, offsets, stride, stride_per_key_per_rank, capacity=capacity
        ).sync()

    @staticmethod
    def from_jt_dict(jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """One key per entry, in the order of the dict; batch sizes may differ.

        No host sync: how many values a key has is the size of its values. On the cpu its lengths must sum to that;
        on a device they are taken at their word until `sync`.

        Raises ValueError if only some have weights, if values are not 1-D, mix integers and floats, or devices.
        """
        keys = check_keys(list(jt_dict))
        if not keys:
            return KeyedJaggedTensor.empty()
        jts = list(jt_dict.values())
        for key, jt in jt_dict.items():
            if jt.values().dim() != 1:
                raise ValueError(f"values of {key!r} must be 1-D, got shape {list(jt.values().shape)}")
        lengths = [jt.lengths() for jt in jts]
        batches = [length.shape[0] for length in lengths]
        same = len(set(batches)) == 1
        sizes = [jt.values().shape[0] for jt in jts]
        checked = all(readable(length) for length in lengths)
        if checked:
            check_members(keys, lengths, sizes)
        return _new()._fill(
            Strides(keys, max(batches), batches, None if same else [[n] for n in batches]),
            join_tensors("values", [repr(key) for key in keys], [jt.values() for jt in jts]),
            join_weights([[key] for key in keys], [jt.weights_or_none() for jt in jts]),
            torch.cat(lengths),
            length_per_key=sizes,
            checked=checked,
        )

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> KeyedJaggedTensor:
        """No keys, no values, stride 0. Values are int64 unless said otherwise."""
        return KeyedJaggedTensor(
            [],
            torch.empty(0, dtype=values_dtype or torch.int64, device=device),
            torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            torch.empty(0, dtype=lengths_dtype, device=device),
        )

    @staticmethod
    def concat(kjt_list: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """All keys of all members, in order. Members without keys have no say.

        Padding is left out, for which members with a capacity are read as by `length_per_key`.

        Raises ValueError for an empty list, keys in two members, different fixed batch sizes, or weights on some only.
        """
        if not kjt_list:
            raise ValueError("concat needs at least one KeyedJaggedTensor, got an empty list")
        members = [kjt for kjt in kjt_list if kjt.keys()] or kjt_list[:1]
        strides = Strides.join([kjt._strides for kjt in members])
        labels = [names(kjt.keys()) for kjt in members]
        parts = [kjt._in_bags() for kjt in members]
        known = [kjt._length_per_key for kjt in members]
        return _new()._fill(
            strides,
            join_tensors("values", labels, [values for values, _ in parts]),
            join_weights([kjt.keys() for kjt in members], [weights for _, weights in parts]),
            torch.cat([kjt.lengths() for kjt in members]),
            length_per_key=None if None in known else [n for lengths in known for n in lengths or ()],
            checked=all(kjt._checked for kjt in members),
        )

    def keys(self) -> list[str]:
        return self._strides.keys

    def capacity(self) -> int | None:
        """Number of values, padding included; None where every value belongs to a bag."""
        return self._capacity

    def stride(self) -> int:
        """Batch size; where keys differ, the largest (a piece made by split or permute keeps that of the whole)."""
        return self._strides.stride

    def stride_per_key(self) -> list[int]:
        """Batch size of each key."""
        return self._strides.per_key

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """Batch sizes [keys][ranks] where keys differ, else an empty list."""
        return self._strides.per_rank or []

    def variable_stride_per_key(self) -> bool:
        """Whether keys have batch sizes of their own."""
        return self._strides.per_rank is not None

    def index_per_key(self) -> dict[str, int]:
        """Position of each key."""
        return self._strides.index

    def lengths_offset_per_key(self) -> list[int]:
        """First bag of each key, then the number of bags."""
        return self._strides.starts

    def length_per_key(self) -> list[int]:
        """Number of values of each key. The one host sync of this class, at the first call.

        Raises ValueError, with numbers and the key, if lengths or offsets do not fit the values.
        """
        if self._length_per_key is None:
            self._length_per_key = self._read_length_per_key()
            self._checked = True
        return self._length_per_key

    def _read_length_per_key(self) -> list[int]:
        both = self._lengths is not None and self._offsets is not None
        return read_length_per_key(
            self._strides, self.lengths(), self.offsets(), self._values.shape[0], compare=both,
            padded=self._capacity is not None,
        )  # fmt: skip

    def length_per_key_or_none(self) -> list[int] | None:
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """First value of each key, then the end of the last. Syncs as `length_per_key` does."""
        if self._offset_per_key is None:
            self._offset_per_key = starts_of(self.length_per_key())
        return self._offset_per_key

    def offset_per_key_or_none(self) -> list[int] | None:
        return self._offset_per_key

    def sync(self) -> KeyedJaggedTensor:
        """Read and check `length_per_key` and `offset_per_key` now; returns self."""
        if self._length_per_key is not None and not self._checked:
            found = self._read_length_per_key()
            for key, total, size in zip(self.keys(), found, self._length_per_key, strict=True):
                if total != size:
                    raise ValueError(f"key {key!r}: lengths sum to {total}, values has {size}")
            self._checked = True
        self.offset_per_key()
        return self

    def unsync(self) -> KeyedJaggedTensor:
        """Forget `length_per_key` and `offset_per_key`; returns self."""
        self._length_per_key = None
        self._offset_per_key = None
        return self

    def __getitem__(self, key: str) -> JaggedTensor:
        """The bags of one key, as views. Raises KeyError for an unknown one."""
        if key not in self._strides.index:
            raise KeyError(f"unknown key {key!r}, keys are {names(self.keys())}")
        i = self._strides.index[key]
        start, length = self.offset_per_key()[i], self.length_per_key()[i]
        return JaggedTensor(
            self._values.narrow(0, start, length),
            None if self._weights is None else self._weights.narrow(0, start, length),
            self.lengths().narrow(0, self._strides.starts[i], self._strides.per_key[i]),
        )

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """The bags of each key, as views. The same dict at every call; `compute_offsets` fills in their offsets."""
        if self._jt_dict is None:
            values, weights = self._per_key()
            lengths = torch.split_with_sizes(self.lengths(), self.stride_per_key())
            self._jt_dict = {
                key: JaggedTensor(values[i], weights[i] if weights else None, lengths[i])
                for i, key in enumerate(self.keys())
            }
        if compute_offsets:
            self._fill_offsets(self._jt_dict)
        return self._jt_dict

    def split(self, segments: list[int]) -> list[KeyedJaggedTensor]:
        """Pieces of `segments[i]` consecutive keys each, as views; a piece of all keys is this object itself.

        Raises ValueError unless the segments add up to the number of keys.
        """
        count = len(self.keys())
        if sum(segments) != count or min(segments, default=0) < 0:
            raise ValueError(
                f"segments must be >= 0 and sum to the {count} keys {names(self.keys())}, "
                f"got {list(segments)} which sum to {sum(segments)}"
            )
        if count in segments:
            nothing = self.permute([]) if 0 in segments else self
            return [self if segment == count else nothing for segment in segments]
        cuts = starts_of(segments)
        spans = list(zip(cuts, cuts[1:], strict=False))
        known, per_key = self.length_per_key(), self._strides.per_key
        sizes = [sum(known[a:b]) for a, b in spans]
        all_values, all_weights = self._in_bags()
        values = torch.split_with_sizes(all_values, sizes)
        weights = None if all_weights is None else torch.split_with_sizes(all_weights, sizes)
        lengths = torch.split_with_sizes(self.lengths(), [sum(per_key[a:b]) for a, b in spans])
        return [
            _new()._fill(
                self._strides.pick(range(a, b)),
                values[i],
                weights[i] if weights else None,
                lengths[i],
                length_per_key=known[a:b],
                checked=self._checked,
            )
            for i, (a, b) in enumerate(spans)
        ]

    def permute(self, indices: list[int], indices_tensor: Tensor | None = None) -> KeyedJaggedTensor:
        """The keys at `indices`, in that order, as copies; repeats and omissions allowed.

        `indices_tensor`, the same on the device, is TorchRec's: nothing here needs it. Raises IndexError for an index
        outside of the keys.
        """
        count = len(self.keys())
        for index in indices:
            if not 0 <= index < count:
                raise IndexError(f"index {index} is out of range for {count} keys {names(self.keys())}")
        if indices_tensor is not None and indices_tensor.numel() != len(indices):
            raise ValueError(f"indices_tensor has {indices_tensor.numel()} entries for {len(indices)} indices")
        strides = self._strides.pick(indices)
        if not indices:
            nothing = None if self._weights is None else self._weights[:0]
            return _new()._fill(strides, self._values[:0], nothing, self.lengths()[:0], length_per_key=[])
        values, weights = self._per_key()
        known = self.length_per_key()
        return _new()._fill(
            strides,
            torch.cat([values[i] for i in indices]),
            torch.cat([weights[i] for i in indices]) if weights else None,
            self._lengths_at(indices),
            length_per_key=[known[i] for i in indices],
            checked=self._checked,
        )

    def _per_key(self) -> tuple[Sequence[Tensor], Sequence[Tensor] | None]:
        """Values and weights as one view per key. One split has one gradient, the concatenation."""
        sizes = self.length_per_key()
        values, weights = self._in_bags()
        per_key = None if weights is None else torch.split_with_sizes(weights, sizes)
        return torch.split_with_sizes(values, sizes), per_key

    def _in_bags(self) -> tuple[Tensor, Tensor | None]:
        """Values and weights without padding; reads `length_per_key` if there may be any."""
        if self._capacity is None:
            return self._values, self._weights
        end = sum(self.length_per_key())
        return self._values[:end], None if self._weights is None else self._weights[:end]

    def _lengths_at(self, indices: list[int]) -> Tensor:
        """Lengths of the keys at `indices`, copied."""
        if self.variable_stride_per_key():
            lengths = torch.split_with_sizes(self.lengths(), self.stride_per_key())
            return torch.cat([lengths[i] for i in indices])
        rows = self.lengths().view(len(self.keys()), self.stride())
        # non_blocking, since a blocking copy from the host would be a host sync
        return rows[torch.tensor(indices).to(rows.device, non_blocking=True)].flatten()

    def _fill_offsets(self, jts: dict[str, JaggedTensor]) -> None:
        if self.variable_stride_per_key() or not jts:
            for jt in jts.values():
                jt.offsets()
            return
        if all(jt.offsets_or_none() is not None for jt in jts.values()):
            return
        # one running sum for all keys instead of one each
        rows = offsets_of(self.lengths().view(len(self.keys()), self.stride()), self._values.shape[0])
        for key, row in zip(self.keys(), rows, strict=True):
            jts[key]._offsets = row

    def to(
        self, device: torch.device | str, non_blocking: bool = False, dtype: torch.dtype | None = None
    ) -> KeyedJaggedTensor:
        """A copy on `device`; `dtype` casts the weights only. Tensors that need no change are shared."""
        moved = self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))
        if moved._weights is not None and dtype is not None:
            moved._weights = moved._weights.to(dtype)
        return moved

    def pin_memory(self) -> KeyedJaggedTensor:
        """A copy in page-locked memory."""
        return self._map(lambda tensor: tensor.pin_memory())

    def _map(self, change: Callable[[Tensor], Tensor]) -> KeyedJaggedTensor:
        """The same, every tensor changed; what is known on the host stays known, per-key views are not taken along."""

        def each(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else change(tensor)

        return _new()._fill(
            self._strides,
            change(self._values),
            each(self._weights),
            each(self._lengths),
            each(self._offsets),
            self._length_per_key,
            self._checked,
            self._capacity,
        )

    def __getstate__(self) -> dict[str, Any]:
        # the views of to_dict would be stored a second time
        return {**self.__dict__, "_jt_dict": None}

    def __repr__(self) -> str:
        capacity = "" if self._capacity is None else f"capacity={self._capacity}, "
        return f"KeyedJaggedTensor(keys={names(self.keys())}, stride={self.stride()}, {capacity}{self._summary()})"

    def __str__(self) -> str:
        # host sync: text is made on the host
        offsets = self.offsets().tolist()
        starts = self._strides.starts
        return keyed_text(
            "KeyedJaggedTensor",
            [
                (key, bags_text(self._values, self._weights, offsets[starts[i] : starts[i + 1] + 1], " " * 4))
                for i, key in enumerate(self.keys())
            ],
        )


def _new() -> KeyedJaggedTensor:
    return KeyedJaggedTensor.__new__(KeyedJaggedTensor)

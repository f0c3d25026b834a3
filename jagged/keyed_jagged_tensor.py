"""The sparse input of a recommender: for each key (feature) a batch of bags of ids, all in one flat tensor.

Shapes: values [L] or rows [L, ...], weights [L] or [L, ...], lengths [bags], offsets [bags + 1]. Bags are key-major:
all of the first key's batch, then the second's. Each key has its own batch size, its stride; most often they are all
the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from shardwise.errors import RefusedValueError
from shardwise.kernels import capturing, complete_cumsum, permute_1d, permute_2d, permute_segments

from . import _combine, _convert
from ._check import (
    KeyNames,
    check_bags,
    check_capacity,
    check_inverse,
    check_known,
    check_length_per_key,
    check_stride,
    check_validate,
    check_values,
    names,
    readable,
)
from ._combine import InverseIndices, inverse_of, like
from ._keys import (
    Order,
    Strides,
    dist_labels,
    keys_of,
    starts_of,
    strides_of,
)
from ._segments import (
    Beside,
    check_bags_in_full,
    compare_sizes,
    join_tensors,
    join_weights,
    offsets_of,
    read_length_per_key,
    sum_per_key,
)
from .jagged_tensor import Bags, JaggedTensor, bags_text, copy_tensors, keyed_text
from .streamable import Keyed


class KeyedJaggedTensor(Keyed, Bags):
    """Values [L] in consecutive bags, the bags in consecutive keys, with an optional weight for each value.

    Keys are strings, or ints as TorchRec's users have them. Values may be dense rows, [L, ...], and so may weights:
    they travel with their bags wherever ids do. A lookup takes ids, [L], alone.

    Give lengths [bags] (or [keys, batch]) or offsets [bags + 1]. Without `stride` the bags are shared out evenly over
    the keys. `stride_per_key_per_rank`, a list `[keys][ranks]` or an int tensor on the cpu, gives each key its own
    batch size (its sum over ranks), and so does `stride_per_key`. `stride` alone matters where there are no keys.

        kjt = KeyedJaggedTensor(["user", "item"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 0, 1, 0]))
        kjt["user"].to_dense()  # [1, 2] and []

    Where samples that look alike to a key were dropped from its batch, `inverse_indices` say where each sample of the
    full batch is: keys, and integers [keys, full batch]; `stride` is then the full batch.

    With a `capacity` values (and weights) are exactly so long, and what lies past the last bag is padding: it may hold
    anything, a lookup ignores it, forward and backward, and lengths add up to L or less. So batches of different sizes
    have one shape, as a captured CUDA graph needs. Without it values that no bag owns are an error. Copies keep the
    capacity; pieces, to which no padding belongs, have none.

    Nothing is read on the host here, except with `validate="full"`, which checks every bag at once; otherwise a lookup
    does. `split`, `permute`, `to_dict` and `[key]` need to know how many values each key has: `length_per_key` reads
    that once, in one host sync, checks it against the number of values, and hands it on. What else a caller has
    computed before (`length_per_key`, `offset_per_key`, ...) is taken if it fits; a `jt_dict` is not needed.

    Raises:
        ValueError, TypeError: shapes, dtypes or devices do not fit together; names the keys.

    Example:
        >>> batch = KeyedJaggedTensor(["user", "item"], torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 0, 1, 0]))
        >>> batch.stride()
        2
        >>> batch["user"].to_dense()
        [tensor([1, 2]), tensor([], dtype=torch.int64)]
        >>> batch.length_per_key()
        [2, 1]
    """

    _strides: Strides
    _capacity: int | None = None
    _inverse: InverseIndices | None = None
    _length_per_key: list[int] | None = None
    # False: the sizes of from_jt_dict's members on a device, which nobody compared with the lengths yet
    _checked: bool = True
    _offset_per_key: list[int] | None = None
    _jt_dict: dict[str, JaggedTensor] | None = None

    def __init__(
        self,
        keys: KeyNames,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | Tensor | None = None,
        stride_per_key: Sequence[int] | None = None,
        length_per_key: Sequence[int] | None = None,
        lengths_offset_per_key: Sequence[int] | None = None,
        offset_per_key: Sequence[int] | None = None,
        index_per_key: Mapping[str, int] | None = None,
        jt_dict: Mapping[str, JaggedTensor] | None = None,
        inverse_indices: InverseIndices | None = None,
        *,
        capacity: int | None = None,
        validate: Literal["shapes", "full"] = "shapes",
    ) -> None:
        checked = keys_of(keys)
        check_values(values, weights)
        if capacity is not None:
            check_capacity(values, capacity)
            self._capacity = capacity
        self._both = lengths is not None and offsets is not None
        self._values, self._weights = values, weights
        self._lengths, self._offsets, bags = check_bags(values, lengths, offsets, capacity, checked.names)
        if inverse_indices is not None:
            self._inverse = check_inverse(checked.names, inverse_indices, values)
        if stride_per_key_per_rank is None and stride_per_key is None:
            self._strides = checked.fixed(check_stride(checked.names, bags, stride))
        else:
            full_batch = None if self._inverse is None else self._inverse[1].shape[1]
            self._strides = strides_of(checked, bags, stride, stride_per_key_per_rank, stride_per_key, full_batch)
        if length_per_key is not None or offset_per_key is not None:
            padded = capacity is not None
            self._length_per_key = check_length_per_key(checked.names, length_per_key, offset_per_key, values, padded)
            # the caller's word, until somebody reads the lengths
            self._checked = False
        if lengths_offset_per_key is not None:
            check_known("lengths_offset_per_key", lengths_offset_per_key, self._strides.starts)
        for what, mapping in (("index_per_key", index_per_key), ("jt_dict", jt_dict)):
            if mapping is not None:
                check_known(what, list(mapping), checked.names)
        if validate != "shapes":
            check_validate(validate)
            self._check_in_full()
            self._both = False
            self.sync()

    @staticmethod
    def from_lengths_sync(
        keys: KeyNames,
        values: Tensor,
        lengths: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | Tensor | None = None,
        inverse_indices: InverseIndices | None = None,
        *,
        capacity: int | None = None,
    ) -> KeyedJaggedTensor:
        """From lengths, which are summed per key (one host sync): ValueError unless they add up to L.

        With a `capacity` they may add up to less.
        """
        return KeyedJaggedTensor(
            keys, values, weights, lengths, None, stride, stride_per_key_per_rank,
            inverse_indices=inverse_indices, capacity=capacity,
        ).sync()  # fmt: skip

    @staticmethod
    def from_offsets_sync(
        keys: KeyNames,
        values: Tensor,
        offsets: Tensor,
        weights: Tensor | None = None,
        stride: int | None = None,
        stride_per_key_per_rank: Sequence[Sequence[int]] | Tensor | None = None,
        inverse_indices: InverseIndices | None = None,
        *,
        capacity: int | None = None,
    ) -> KeyedJaggedTensor:
        """From offsets, read where keys begin (one host sync): ValueError unless they go from 0 to L.

        With a `capacity` they may end before L.
        """
        return KeyedJaggedTensor(
            keys, values, weights, None, offsets, stride, stride_per_key_per_rank,
            inverse_indices=inverse_indices, capacity=capacity,
        ).sync()  # fmt: skip

    @staticmethod
    def from_jt_dict(jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
        """One key per entry, in the order of the dict; batch sizes may differ.

        No host sync: how many values a key has is the size of its values. On the cpu its lengths must sum to that;
        on a device they are taken at their word until `sync`.

        Raises ValueError if only some have weights, if values mix integers and floats, or devices.
        """
        return _from_jt_dict(jt_dict)

    @staticmethod
    def from_lists(
        lists: Mapping[str, Sequence[Sequence[int]]],
        weights: Mapping[str, Sequence[Sequence[float]]] | None = None,
        *,
        dtype: torch.dtype = torch.int64,
        device: torch.device | str | None = None,
    ) -> KeyedJaggedTensor:
        """From a list of bags per key: `from_lists({"item": [[1, 2], [], [3]]})`; weights, fp32, in the same shape.

        Raises ValueError, naming key and sample, where weights do not fit; TypeError for ids that are no integers.
        """
        return KeyedJaggedTensor(**_convert.from_lists(lists, weights, dtype, device))

    @staticmethod
    def from_nested(nested: Mapping[str, Tensor]) -> KeyedJaggedTensor:
        """From nested tensors [batch, ids] of layout torch.jagged, one per key, without a copy but the joining."""
        if not nested:
            return KeyedJaggedTensor.empty()
        strides, values, lengths, sizes = _convert.from_nested(nested)
        # the sizes of the values, until somebody reads the lengths
        return like(KeyedJaggedTensor, strides, values, None, lengths, sizes, False, None)

    def to_nested(self) -> dict[str, Tensor]:
        """A nested tensor [batch, ids] of layout torch.jagged per key, over the same memory; without the weights."""
        return {
            key: torch.nested.nested_tensor_from_jagged(jt.values(), offsets=jt.offsets().to(torch.int64))
            for key, jt in self.to_dict().items()
        }

    @staticmethod
    def from_arrow(
        table: Any, keys: Sequence[str] | None = None, *, weights_suffix: str = ".weights"
    ) -> KeyedJaggedTensor:
        """From the list columns of a pyarrow Table or RecordBatch: a missing list is an empty bag.

        `keys` are the columns of ids, by default all; the weights of "item" are in "item.weights", if there is such a
        column. Raises KeyError, TypeError or ValueError, naming the column, for what is no list of ids. Needs pyarrow.
        """
        return _from_jt_dict(_convert.from_arrow(table, keys, weights_suffix))

    def to_arrow(self, *, weights_suffix: str = ".weights") -> Any:
        """A pyarrow Table with a list column per key, and one for its weights. ValueError unless batch sizes agree."""
        return _convert.to_arrow(self, weights_suffix)

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
    def empty_like(kjt: KeyedJaggedTensor, device: torch.device | str | None = None) -> KeyedJaggedTensor:
        """Without `device` no keys and no values, but the batch size and dtypes of `kjt`. With it a batch of the same
        keys and shapes there, its tensors not yet written, for `copy_`."""
        return _combine.empty_like(kjt, device)

    @staticmethod
    def concat(kjt_list: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
        """All keys of all members, in order. Members without keys have no say.

        Padding is left out, for which members with a capacity are read as by `length_per_key`.

        Raises ValueError for an empty list, keys in two members, different fixed batch sizes, or weights or inverse
        indices on some only.
        """
        return _combine.concat(kjt_list)

    def copy_(self, kjt: KeyedJaggedTensor, non_blocking: bool = False) -> KeyedJaggedTensor:
        """Copy the numbers of `kjt` in place; what is known on the host comes along.

        Raises:
            ValueError: keys, shapes, or what tensors there are do not agree.
        """
        if self._strides.keys.names != kjt._strides.keys.names:
            own_names, other_names = names(self._strides.keys.names), names(kjt._strides.keys.names)
            raise ValueError(f"copy_ needs the same keys: {own_names} here, {other_names} there")
        inverse = None if self._inverse is None else self._inverse[1]
        theirs_inverse = None if kjt._inverse is None else kjt._inverse[1]
        copy_tensors(self, kjt, non_blocking, [("inverse_indices", inverse, theirs_inverse)])
        if self._inverse is not None and kjt._inverse is not None:
            self._inverse = (list(kjt._inverse[0]), self._inverse[1])
        self._strides = kjt._strides
        self._capacity = kjt._capacity
        self._length_per_key, self._offset_per_key = kjt._length_per_key, None
        self._checked, self._both, self._jt_dict = kjt._checked, kjt._both, None
        return self

    def clear_storage(self) -> int:
        """Free the memory of values, weights, lengths, offsets, also under views of them; returns the bytes freed.

        Nothing can be read afterwards.
        """
        freed = list(self.storages().values())
        nbytes = sum(tensor.nbytes for tensor in freed)
        for tensor in freed:
            tensor.untyped_storage().resize_(0)
        self._jt_dict = None
        return nbytes

    def keys(self) -> list[str]:
        return list(self._strides.keys.names)

    def capacity(self) -> int | None:
        """Number of values, padding included; None where every value belongs to a bag."""
        return self._capacity

    def stride(self) -> int:
        """Batch size; where keys differ, the full batch of the inverse indices, or the largest (a piece made by split
        or permute keeps that of the whole)."""
        return self._strides.stride

    def stride_per_key(self) -> list[int]:
        """Batch size of each key."""
        return list(self._strides.per_key)

    def stride_per_key_per_rank(self) -> list[list[int]]:
        """Batch sizes `[keys][ranks]` where keys differ, else an empty list."""
        return [] if self._strides.sizes is None else self._strides.per_rank

    def variable_stride_per_key(self) -> bool:
        """Whether keys have batch sizes of their own."""
        return self._strides.sizes is not None

    def inverse_indices(self) -> InverseIndices:
        """Keys and, for each, the sample of its own batch that each sample of the full batch is: [keys, full batch].

        Raises:
            ValueError: there are none.
        """
        if self._inverse is None:
            raise RefusedValueError(
                "This KJT doesn't have inverse indices; inverse_indices_or_none() asks without failing"
            )
        return list(self._inverse[0]), self._inverse[1]

    def inverse_indices_or_none(self) -> InverseIndices | None:
        return None if self._inverse is None else (list(self._inverse[0]), self._inverse[1])

    def index_per_key(self) -> dict[str, int]:
        """Position of each key."""
        return dict(self._strides.keys.index)

    def lengths_offset_per_key(self) -> list[int]:
        """First bag of each key, then the number of bags."""
        return list(self._strides.starts)

    def length_per_key(self) -> list[int]:
        """Number of values of each key. The one host sync of this class, at the first call.

        Raises ValueError, with numbers and the key, if lengths or offsets do not fit the values.
        """
        return list(self._sizes())

    def _sizes(self, beside: Beside | None = None) -> list[int]:
        """`length_per_key`, not copied; `beside` is read in the same sync."""
        if self._length_per_key is None:
            self._length_per_key = self._read_length_per_key(beside)
            self._checked = True
        return self._length_per_key

    def _read_length_per_key(self, beside: Beside | None = None) -> list[int]:
        if self._both:
            self._check_in_full()
            self._both = False
        padded = self._capacity is not None
        return read_length_per_key(
            self._strides, self._lengths, self._offsets, self._values.shape[0], padded=padded, beside=beside
        )

    def _check_in_full(self) -> None:
        padded = self._capacity is not None
        check_bags_in_full(self._strides, self._lengths, self._offsets, self._values.shape[0], padded=padded)

    def length_per_key_or_none(self) -> list[int] | None:
        return None if self._length_per_key is None else list(self._length_per_key)

    def offset_per_key(self) -> list[int]:
        """First value of each key, then the end of the last. Syncs as `length_per_key` does."""
        return list(self._ends())

    def _ends(self) -> list[int]:
        """`offset_per_key`, not copied."""
        if self._offset_per_key is None:
            self._offset_per_key = starts_of(self._sizes())
        return self._offset_per_key

    def offset_per_key_or_none(self) -> list[int] | None:
        return None if self._offset_per_key is None else list(self._offset_per_key)

    def sync(self) -> KeyedJaggedTensor:
        """Read what the host must know, and check it; returns itself."""
        if not self._checked and self._length_per_key is not None:
            known, self._length_per_key = self._length_per_key, None
            try:
                compare_sizes(self._strides, self._sizes(), known)
            except ValueError:
                self._length_per_key, self._checked = known, False
                raise
        self._ends()
        return self

    def unsync(self) -> KeyedJaggedTensor:
        """Forget what was read; returns itself."""
        self._length_per_key = self._offset_per_key = self._jt_dict = None
        return self

    def split(self, segments: list[int]) -> list[KeyedJaggedTensor]:
        """Pieces of `segments[i]` consecutive keys each, as views; a piece of all keys is this object itself.

        Raises:
            ValueError: the segments do not add up to the number of keys.
        """
        keys, strides = self._strides.keys, self._strides
        count = len(keys.names)
        if sum(segments) != count or min(segments, default=0) < 0:
            raise ValueError(
                f"segments must be >= 0 and sum to the {count} keys {names(keys.names)}, "
                f"got {list(segments)} which sum to {sum(segments)}"
            )
        if count in segments:
            nothing = self.permute([]) if 0 in segments else self
            return [self if segment == count else nothing for segment in segments]
        known, starts = self._sizes(), strides.starts
        cuts = starts_of(segments)  # [pieces + 1] keys
        offsets = self._ends()  # [keys + 1] values
        all_values, all_weights = self._in_bags()
        sizes = [offsets[b] - offsets[a] for a, b in pairwise(cuts)]  # values of each piece
        values = torch.split_with_sizes(all_values, sizes)
        weights = None if all_weights is None else torch.split_with_sizes(all_weights, sizes)
        bags = [starts[b] - starts[a] for a, b in pairwise(cuts)]  # bags of each piece
        lengths = torch.split_with_sizes(self.lengths(), bags)
        pieces = []
        for i, a in enumerate(cuts[:-1]):
            b = cuts[i + 1]
            order = keys.order(range(a, b))
            pieces.append(
                like(
                    self, strides.pick(order), values[i], weights[i] if weights else None, lengths[i],
                    known[a:b], self._checked, None if self._inverse is None else inverse_of(self._inverse, order),
                )
            )  # fmt: skip
        return pieces

    def permute(self, indices: list[int], indices_tensor: Tensor | None = None) -> KeyedJaggedTensor:
        """The keys at `indices`, in that order, as copies; repeats and omissions allowed.

        `indices_tensor`, the same on the device, is TorchRec's: nothing here needs it.

        Raises:
            IndexError: an index is outside of the keys.
            ValueError: `indices_tensor` has another length than `indices`.
        """
        order = self._strides.keys.order(indices)
        if indices_tensor is not None and indices_tensor.numel() != len(indices):
            raise ValueError(f"indices_tensor has {indices_tensor.numel()} entries for {len(indices)} indices")
        strides = self._strides.pick(order)
        inverse = None if self._inverse is None else inverse_of(self._inverse, order)
        if not indices:
            nothing = None if self._weights is None else self._weights[:0]
            return like(self, strides, self._values[:0], nothing, self.lengths()[:0], [], True, inverse)
        if self._values.is_cuda and capturing():
            return self._permute_captured(order, strides, inverse)
        known = self._sizes()
        values, weights = self._in_bags()
        moved = permute_segments([values] if weights is None else [values, weights], known, order.indices)
        return like(
            self, strides, moved[0], None if weights is None else moved[1], self._lengths_at(order),
            [known[i] for i in order.indices], self._checked, inverse,
        )  # fmt: skip

    def _permute_captured(self, order: Order, strides: Strides, inverse: InverseIndices | None) -> KeyedJaggedTensor:
        """`permute` while a CUDA graph is captured: nothing of the batch is known on the host, each replay has another.

        Unless every key comes once the result has a capacity, which each batch of as many values fits into.

        Raises:
            RuntimeError: batch sizes of keys differ.
        """
        if self._strides.sizes is not None:
            raise RuntimeError(
                "permute of keys with batch sizes of their own reads these on the host, which must not be while a CUDA"
                " graph is captured: give the batch its keys in the order of the tables, or permute it before"
            )
        count, size = len(self._strides.keys.names), self._values.shape[0]
        is_whole = sorted(order.indices) == list(range(count))
        most = size if is_whole else size * max(Counter(order.indices).values())
        lengths = self.lengths().view(count, self._strides.stride)
        indices = order.tensor(lengths)
        # every replay reads it, whether its order is still kept or not
        _CAPTURED.add(indices)
        moved, values, weights = permute_2d(indices, lengths, self._values, self._weights, permuted_lengths_sum=most)
        piece = like(self, strides, values, weights, moved.view(-1), None, False, inverse)
        piece._capacity = self._capacity if is_whole else most
        return piece

    def _lengths_at(self, order: Order) -> Tensor:
        """Lengths of the keys of an order, copied."""
        lengths = self.lengths()
        if self._strides.sizes is not None:
            return permute_segments([lengths], self._strides.per_key, order.indices)[0]
        rows = lengths.view(len(self._strides.keys.names), self._strides.stride)
        return rows.index_select(0, order.tensor(lengths)).view(-1)

    def flatten_lengths(self) -> KeyedJaggedTensor:
        """The same with 1-D lengths, which they are here; shares all tensors."""
        return self._map(lambda tensor: tensor)

    def __getitem__(self, key: str) -> JaggedTensor:
        """The bags of one key, as views. Raises KeyError for an unknown key."""
        i = self._strides.keys.index.get(key)
        if i is None:
            raise KeyError(f"unknown key {key!r}, keys are {names(self._strides.keys.names)}")
        offsets, starts = self._ends(), self._strides.starts
        begin, end = offsets[i], offsets[i + 1]
        weights = None if self._weights is None else self._weights[begin:end]
        return JaggedTensor._of(self._values[begin:end], weights, self.lengths()[starts[i] : starts[i + 1]])

    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """A JaggedTensor per key, as views; made once, so later calls return the same dict.

        With `compute_offsets` they know their offsets already, unless batch sizes differ.
        """
        by_key = self._jt_dict
        if by_key is None:
            keys, per_key = self._strides.keys.names, self._strides.per_key
            sizes = self._sizes()
            all_values, all_weights = self._in_bags()
            # one split has one gradient, the concatenation
            values = torch.split_with_sizes(all_values, sizes)
            lengths = torch.split_with_sizes(self.lengths(), per_key)
            weights = [None] * len(keys) if all_weights is None else torch.split_with_sizes(all_weights, sizes)
            made = map(JaggedTensor._of, values, weights, lengths)
            by_key = self._jt_dict = dict(zip(keys, made, strict=True))
        if compute_offsets and self._strides.sizes is None and any(jt._offsets is None for jt in by_key.values()):
            # one running sum for all keys instead of one each, which batches of different sizes would need
            keys = self._strides.keys.names
            rows = offsets_of(self.lengths().view(len(keys), self._strides.stride), self._values.shape[0])
            for key, row in zip(keys, rows.unbind(), strict=True):
                by_key[key]._offsets = row
        return by_key

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

    def dist_labels(self) -> list[str]:
        """The names of the tensors that `dist_tensors` and `dist_splits` list, in their order."""
        return dist_labels(self.variable_stride_per_key(), self._weights is not None)

    def dist_splits(self, key_splits: list[int]) -> list[list[int]]:
        """Where to cut each of `dist_tensors` so that piece i has the next `key_splits[i]` keys.

        Raises:
            ValueError: a number is negative, or they do not add up to the keys.
        """
        per_key, known = self._strides.per_key, self._sizes()
        if sum(key_splits) != len(per_key) or min(key_splits, default=0) < 0:
            raise ValueError(f"key_splits must be >= 0 and sum to {len(per_key)} keys, got {list(key_splits)}")
        cuts = starts_of(key_splits)
        of_values = [sum(known[a:b]) for a, b in pairwise(cuts)]
        sizes = {
            "lengths": [sum(per_key[a:b]) for a, b in pairwise(cuts)],
            "values": of_values,
            "strides": list(key_splits),
            "weights": of_values,
        }
        return [sizes[name] for name in self.dist_labels()]

    def dist_tensors(self) -> list[Tensor]:
        """Lengths, values, batch sizes [keys] if they differ, weights if there are any: what an exchange sends."""
        tensors = [self.lengths(), self._in_bags()[0]]
        if self.variable_stride_per_key():
            strides = torch.tensor(self._strides.per_key, device="cpu")
            tensors.append(strides.to(self._values.device, non_blocking=True))
        weights = self._in_bags()[1]
        return tensors if weights is None else [*tensors, weights]

    @staticmethod
    def dist_init(
        keys: list[str],
        tensors: list[Tensor],
        variable_stride_per_key: bool,
        num_workers: int,
        recat: Tensor | None,
        stride_per_rank: list[int] | None,
        stagger: int = 1,
    ) -> KeyedJaggedTensor:
        """The batch that pieces of `dist_tensors` from `num_workers` ranks make up, laid end to end in rank order.

        `stride_per_rank` is each rank's batch size, None where keys have their own. `recat` says in which order
        (rank, key) segments [ranks * keys], or where fixed batch sizes differ between ranks their bags, make up the
        result; None where they lie so already. With `stagger` > 1 ranks came in that many interleaved groups.
        """
        return _dist_init(keys, tensors, variable_stride_per_key, num_workers, recat, stride_per_rank, stagger)

    def _in_bags(self) -> tuple[Tensor, Tensor | None]:
        """Values and weights without padding; reads `length_per_key` if there may be any."""
        if self._capacity is None:
            return self._values, self._weights
        end = sum(self._sizes())
        return self._values[:end], None if self._weights is None else self._weights[:end]

    def _map(self, change: Callable[[Tensor], Tensor]) -> KeyedJaggedTensor:
        """The same, every tensor changed; what is known on the host stays known, per-key views are not taken along."""

        def each(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else change(tensor)

        copy: KeyedJaggedTensor = object.__new__(KeyedJaggedTensor)
        copy._strides = self._strides
        copy._capacity = self._capacity
        copy._values = change(self._values)
        copy._weights = each(self._weights)
        copy._lengths = each(self._lengths)
        copy._offsets = each(self._offsets)
        if self._inverse is not None:
            copy._inverse = (self._inverse[0], change(self._inverse[1]))
        copy._length_per_key = self._length_per_key
        copy._checked = self._checked
        copy._both = self._both
        return copy

    def _tensors(self) -> list[Tensor]:
        inverse = () if self._inverse is None else (self._inverse[1],)
        return [*super()._tensors(), *inverse]

    def __getstate__(self) -> dict[str, Any]:
        # the views of to_dict would be stored a second time
        return {**self.__dict__, "_jt_dict": None}

    def __repr__(self) -> str:
        capacity = "" if self._capacity is None else f"capacity={self._capacity}, "
        keys = names(self._strides.keys.names)
        return f"KeyedJaggedTensor(keys={keys}, stride={self.stride()}, {capacity}{self._summary()})"

    def __str__(self) -> str:
        # host sync: text is made on the host
        values, offsets = self._values.tolist(), self.offsets().tolist()
        weights = None if self._weights is None else self._weights.tolist()
        starts = self._strides.starts
        return keyed_text(
            "KeyedJaggedTensor",
            [
                (key, bags_text(values, weights, offsets[starts[i] : starts[i + 1] + 1], " " * 4))
                for i, key in enumerate(self._strides.keys.names)
            ],
        )


# numbers on a device that captured graphs read
_CAPTURED: set[Tensor] = set()


@torch.fx.wrap
def _from_jt_dict(jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
    keys = keys_of(list(jt_dict))
    if not keys.names:
        return KeyedJaggedTensor.empty()
    values, lengths, sizes, batches = [], [], [], []
    for jt in jt_dict.values():
        values.append(jt._values)
        sizes.append(jt._values.shape[0])
        lengths.append(length := jt.lengths())
        batches.append(length.shape[0])
    same = len(set(batches)) == 1
    strides = keys.fixed(batches[0]) if same else Strides(keys, max(batches), batches)
    joined_values = join_tensors("values", lambda i: repr(keys.names[i]), values)
    joined = torch.cat(lengths)
    weights = join_weights([[key] for key in keys.names], [jt._weights for jt in jt_dict.values()])
    checked = readable(joined)
    if checked:
        _, totals, _ = sum_per_key(strides, joined, None)
        compare_sizes(strides, totals, sizes)
    return like(KeyedJaggedTensor, strides, joined_values, weights, joined, sizes, checked, None)


@torch.fx.wrap
def _dist_init(
    keys: list[str],
    tensors: list[Tensor],
    variable_stride_per_key: bool,
    num_workers: int,
    recat: Tensor | None,
    stride_per_rank: list[int] | None,
    stagger: int,
) -> KeyedJaggedTensor:
    needed = 3 if variable_stride_per_key else 2
    if len(tensors) not in (needed, needed + 1):
        all_labels = ", ".join(dist_labels(variable_stride_per_key, True))
        raise RefusedValueError(f"dist_init needs {needed} or {needed + 1} tensors ({all_labels}), got {len(tensors)}")
    lengths, values = tensors[0], tensors[1]
    weights = tensors[-1] if len(tensors) > needed else None
    total = values.shape[0]
    if variable_stride_per_key:
        strides = tensors[2]
        table = strides.view(num_workers, len(keys)).T if strides.numel() else strides.new_zeros(len(keys), 1)
        sizes = None
        if strides.numel():
            ends = complete_cumsum(lengths)[complete_cumsum(strides)].diff()
            sizes = ends.view(num_workers, len(keys)).sum(0)
            if recat is not None:
                _, values, weights = permute_1d(recat, ends, values, weights, permuted_lengths_sum=total)
                _, lengths, _ = permute_1d(recat, strides, lengths, permuted_lengths_sum=lengths.shape[0])
        if stagger > 1:
            table = table[:, torch.arange(num_workers, device=table.device).view(stagger, -1).T.flatten()]
        # host sync: batch sizes and counts are known on the host of every batch
        per_rank, known = table.cpu(), None if sizes is None else sizes.tolist()
        return KeyedJaggedTensor(keys, values, weights, lengths, stride_per_key_per_rank=per_rank, length_per_key=known)
    if stride_per_rank is None:
        raise RefusedValueError("dist_init needs stride_per_rank, the batch size of each rank")
    if recat is not None and lengths.shape[0]:
        stride = stride_per_rank[0]
        if all(n == stride for n in stride_per_rank):
            lengths, values, weights = permute_2d(
                recat, lengths.view(-1, stride), values, weights, permuted_lengths_sum=total
            )
        else:
            lengths, values, weights = permute_1d(recat, lengths, values, weights, permuted_lengths_sum=total)
    return KeyedJaggedTensor(keys, values, weights, lengths.view(-1), stride=sum(stride_per_rank)).sync()

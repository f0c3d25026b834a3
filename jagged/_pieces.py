"""Batches made of other batches: cut by key, put in another order, joined, and copied.

What is known on the host of the whole is handed on to the pieces, and so are capacity-free values, weights, lengths and
inverse indices. Pieces are made without checks: `like` fills the fields of an object that no constructor saw.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from shardwise.kernels import capturing, permute_2d, permute_segments

from ._bags import copy_tensors
from ._check import names, readable
from ._keys import (
    Keys,
    Order,
    Strides,
    keys_of,
    starts_of,
)
from ._segments import compare_sizes, join_tensors, join_weights, offsets_of, sum_per_key
from .jagged_tensor import JaggedTensor

if TYPE_CHECKING:
    from .keyed_jagged_tensor import InverseIndices, KeyedJaggedTensor


def like(
    whole: KeyedJaggedTensor | type[KeyedJaggedTensor],
    strides: Strides,
    values: Tensor,
    weights: Tensor | None,
    lengths: Tensor | None,
    length_per_key: list[int] | None,
    checked: bool,
    inverse: InverseIndices | None,
) -> KeyedJaggedTensor:
    """A batch of the same type, without a check."""
    piece: KeyedJaggedTensor = object.__new__(whole if isinstance(whole, type) else type(whole))
    piece._strides = strides
    piece._values = values
    piece._weights = weights
    piece._lengths = lengths
    piece._length_per_key = length_per_key
    piece._checked = checked
    piece._inverse = inverse
    return piece


def split(kjt: KeyedJaggedTensor, segments: Sequence[int]) -> list[KeyedJaggedTensor]:
    """KeyedJaggedTensor.split."""
    keys, strides = kjt._strides.keys, kjt._strides
    count = len(keys.names)
    if sum(segments) != count or min(segments, default=0) < 0:
        raise ValueError(
            f"segments must be >= 0 and sum to the {count} keys {names(keys.names)}, "
            f"got {list(segments)} which sum to {sum(segments)}"
        )
    if count in segments:
        nothing = permute(kjt, []) if 0 in segments else kjt
        return [kjt if segment == count else nothing for segment in segments]
    known, starts = kjt._sizes(), strides.starts
    cuts = starts_of(segments)
    offsets = kjt._ends()
    all_values, all_weights = kjt._in_bags()
    sizes = [offsets[b] - offsets[a] for a, b in pairwise(cuts)]
    values = torch.split_with_sizes(all_values, sizes)
    weights = None if all_weights is None else torch.split_with_sizes(all_weights, sizes)
    bags = [starts[b] - starts[a] for a, b in pairwise(cuts)]
    lengths = torch.split_with_sizes(kjt.lengths(), bags)
    pieces = []
    for i, a in enumerate(cuts[:-1]):
        b = cuts[i + 1]
        order = keys.order(range(a, b))
        pieces.append(
            like(
                kjt, strides.pick(order), values[i], weights[i] if weights else None, lengths[i],
                known[a:b], kjt._checked, None if kjt._inverse is None else _inverse_of(kjt._inverse, order),
            )
        )  # fmt: skip
    return pieces


def permute(kjt: KeyedJaggedTensor, indices: Sequence[int], indices_tensor: Tensor | None = None) -> KeyedJaggedTensor:
    """KeyedJaggedTensor.permute."""
    order = kjt._strides.keys.order(indices)
    if indices_tensor is not None and indices_tensor.numel() != len(indices):
        raise ValueError(f"indices_tensor has {indices_tensor.numel()} entries for {len(indices)} indices")
    strides = kjt._strides.pick(order)
    inverse = None if kjt._inverse is None else _inverse_of(kjt._inverse, order)
    if not indices:
        nothing = None if kjt._weights is None else kjt._weights[:0]
        return like(kjt, strides, kjt._values[:0], nothing, kjt.lengths()[:0], [], True, inverse)
    if kjt._values.is_cuda and capturing():
        return _permute_captured(kjt, order, strides, inverse)
    known = kjt._sizes()
    values, weights = kjt._in_bags()
    moved = permute_segments([values] if weights is None else [values, weights], known, order.indices)
    return like(
        kjt, strides, moved[0], None if weights is None else moved[1], _lengths_at(kjt, order),
        [known[i] for i in order.indices], kjt._checked, inverse,
    )  # fmt: skip


# numbers on a device that captured graphs read
_CAPTURED: set[Tensor] = set()


def _permute_captured(
    kjt: KeyedJaggedTensor, order: Order, strides: Strides, inverse: InverseIndices | None
) -> KeyedJaggedTensor:
    """`permute` while a CUDA graph is captured: nothing of the batch is known on the host, as each replay has another.

    Unless every key comes once the result has a capacity, which each batch of as many values fits into.

    Raises:
        RuntimeError: batch sizes of keys differ.
    """
    if kjt._strides.sizes is not None:
        raise RuntimeError(
            "permute of keys with batch sizes of their own reads these on the host, which must not be while a CUDA"
            " graph is captured: give the batch its keys in the order of the tables, or permute it before"
        )
    count, size = len(kjt._strides.keys.names), kjt._values.shape[0]
    is_whole = sorted(order.indices) == list(range(count))
    most = size if is_whole else size * max(Counter(order.indices).values())
    lengths = kjt.lengths().view(count, kjt._strides.stride)
    indices = order.tensor(lengths)
    # every replay reads it, whether its order is still kept or not
    _CAPTURED.add(indices)
    moved, values, weights = permute_2d(indices, lengths, kjt._values, kjt._weights, permuted_lengths_sum=most)
    piece = like(kjt, strides, values, weights, moved.view(-1), None, False, inverse)
    piece._capacity = kjt._capacity if is_whole else most
    return piece


def _lengths_at(kjt: KeyedJaggedTensor, order: Order) -> Tensor:
    """Lengths of the keys of an order, copied."""
    lengths = kjt.lengths()
    if kjt._strides.sizes is not None:
        return permute_segments([lengths], kjt._strides.per_key, order.indices)[0]
    rows = lengths.view(len(kjt._strides.keys.names), kjt._strides.stride)
    return rows.index_select(0, order.tensor(lengths)).view(-1)


def _inverse_of(inverse: InverseIndices, order: Order) -> InverseIndices:
    """The rows of inverse indices that the keys of an order have; what is left of repeated keys is one row."""
    at = {key: row for row, key in enumerate(inverse[0])}
    picked = list(dict.fromkeys(order.keys.names))
    rows = torch.tensor([at[key] for key in picked], dtype=torch.int64, device="cpu")
    return picked, inverse[1][rows.to(inverse[1].device, non_blocking=True)]


def get_item(kjt: KeyedJaggedTensor, key: str) -> JaggedTensor:
    """KeyedJaggedTensor.__getitem__."""
    i = kjt._strides.keys.index.get(key)
    if i is None:
        raise KeyError(f"unknown key {key!r}, keys are {names(kjt._strides.keys.names)}")
    offsets, starts = kjt._ends(), kjt._strides.starts
    begin, end = offsets[i], offsets[i + 1]
    weights = None if kjt._weights is None else kjt._weights[begin:end]
    return JaggedTensor._of(kjt._values[begin:end], weights, kjt.lengths()[starts[i] : starts[i + 1]])


def to_dict(kjt: KeyedJaggedTensor, compute_offsets: bool) -> dict[str, JaggedTensor]:
    """KeyedJaggedTensor.to_dict."""
    found = kjt._jt_dict
    if found is None:
        keys, per_key = kjt._strides.keys.names, kjt._strides.per_key
        sizes = kjt._sizes()
        all_values, all_weights = kjt._in_bags()
        # one split has one gradient, the concatenation
        values = torch.split_with_sizes(all_values, sizes)
        lengths = torch.split_with_sizes(kjt.lengths(), per_key)
        weights = [None] * len(keys) if all_weights is None else torch.split_with_sizes(all_weights, sizes)
        made = map(JaggedTensor._of, values, weights, lengths)
        found = kjt._jt_dict = dict(zip(keys, made, strict=True))
    if compute_offsets and kjt._strides.sizes is None and any(jt._offsets is None for jt in found.values()):
        # one running sum for all keys instead of one each, which batches of different sizes would need
        keys = kjt._strides.keys.names
        rows = offsets_of(kjt.lengths().view(len(keys), kjt._strides.stride), kjt._values.shape[0])
        for key, row in zip(keys, rows.unbind(), strict=True):
            found[key]._offsets = row
    return found


@torch.fx.wrap
def concat(members: Sequence[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    """KeyedJaggedTensor.concat."""
    if not members:
        raise ValueError("concat needs at least one KeyedJaggedTensor, got an empty list")
    members = [kjt for kjt in members if kjt._strides.keys.names] or members[:1]
    strides = Strides.join([kjt._strides for kjt in members])

    def label(i: int) -> str:
        return names(members[i]._strides.keys.names)

    # one pass over the members: with few of them this is as long as the copies take
    values: list[Tensor] = []
    weights: list[Tensor | None] = []
    lengths: list[Tensor] = []
    known: list[list[int] | None] = []
    checked, weighted, inverse = True, False, False
    for kjt in members:
        of_member, its_weights = (kjt._values, kjt._weights) if kjt._capacity is None else kjt._in_bags()
        values.append(of_member)
        weights.append(its_weights)
        lengths.append(kjt.lengths() if kjt._lengths is None else kjt._lengths)
        known.append(kjt._length_per_key)
        checked = checked and kjt._checked
        weighted = weighted or its_weights is not None
        inverse = inverse or kjt._inverse is not None
    return like(
        members[0],
        strides,
        join_tensors("values", label, values),
        join_weights([kjt._strides.keys.names for kjt in members], weights) if weighted else None,
        torch.cat(lengths),
        None if None in known else list(chain.from_iterable(n or () for n in known)),
        checked,
        _join_inverse(members) if inverse else None,
    )


def _join_inverse(members: Sequence[KeyedJaggedTensor]) -> InverseIndices | None:
    inverse = [kjt._inverse for kjt in members if kjt._inverse is not None]
    if not inverse:
        return None
    if len(inverse) != len(members):
        lacking = [name for kjt in members if kjt._inverse is None for name in kjt._strides.keys.names]
        raise ValueError(f"either all have inverse indices or none: {names(lacking)} have not")
    batches = sorted({rows.shape[1] for _, rows in inverse})
    if len(batches) > 1:
        raise ValueError(f"cannot join inverse indices of full batches of {batches}")
    return [key for keys, _ in inverse for key in keys], torch.cat([rows for _, rows in inverse])


@torch.fx.wrap
def from_jt_dict(jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
    """KeyedJaggedTensor.from_jt_dict."""
    from .keyed_jagged_tensor import KeyedJaggedTensor

    keys = keys_of(list(jt_dict))
    if not keys.names:
        return KeyedJaggedTensor.empty()
    values, lengths, sizes, batches = [], [], [], []
    for key, jt in jt_dict.items():
        if jt._values.dim() != 1:
            raise ValueError(f"values of {key!r} must be 1-D, got shape {list(jt._values.shape)}")
        values.append(jt._values)
        sizes.append(jt._values.shape[0])
        lengths.append(length := jt.lengths())
        batches.append(length.shape[0])
    same = len(set(batches)) == 1
    strides = keys.fixed(batches[0]) if same else Strides(keys, max(batches), batches)
    joined_values = join_tensors("values", lambda i: repr(keys.names[i]), values)
    joined = torch.cat(lengths)
    made = like(
        KeyedJaggedTensor,
        strides,
        joined_values,
        join_weights([[key] for key in keys.names], [jt._weights for jt in jt_dict.values()]),
        joined,
        None,
        True,
        None,
    )
    if readable(joined):
        _check_members(made, sizes)
    made._length_per_key, made._checked = sizes, readable(joined)
    return made


def _check_members(kjt: KeyedJaggedTensor, sizes: Sequence[int]) -> None:
    """ValueError, with the key, unless the lengths of each sum to its size. Reads them on the host."""
    strides = kjt._strides
    _, totals, _ = sum_per_key(strides, kjt._lengths, None)
    compare_sizes(strides, totals, sizes)


@torch.fx.wrap
def empty_like(kjt: KeyedJaggedTensor, device: torch.device | str | None) -> KeyedJaggedTensor:
    """KeyedJaggedTensor.empty_like."""
    if device is not None:
        return kjt._map(lambda tensor: torch.empty_like(tensor, device=device))
    strides, inverse = kjt._strides, kjt._inverse
    nothing = Strides(Keys([]), strides.stride)
    return like(
        kjt,
        nothing,
        kjt._values.new_empty(0),
        None if kjt._weights is None else kjt._weights.new_empty(0),
        kjt.lengths().new_empty(0),
        [],
        True,
        None if inverse is None else ([], inverse[1][:0]),
    )


def copy_into(kjt: KeyedJaggedTensor, source: KeyedJaggedTensor, non_blocking: bool) -> KeyedJaggedTensor:
    """KeyedJaggedTensor.copy_."""
    if kjt._strides.keys.names != source._strides.keys.names:
        mine, theirs = names(kjt._strides.keys.names), names(source._strides.keys.names)
        raise ValueError(f"copy_ needs the same keys: {mine} here, {theirs} there")
    inverse = None if kjt._inverse is None else kjt._inverse[1]
    theirs_inverse = None if source._inverse is None else source._inverse[1]
    copy_tensors(kjt, source, non_blocking, [("inverse_indices", inverse, theirs_inverse)])
    if kjt._inverse is not None and source._inverse is not None:
        kjt._inverse = (list(source._inverse[0]), kjt._inverse[1])
    kjt._strides = source._strides
    kjt._capacity = source._capacity
    kjt._length_per_key, kjt._offset_per_key = source._length_per_key, None
    kjt._checked, kjt._both, kjt._jt_dict = source._checked, source._both, None
    return kjt

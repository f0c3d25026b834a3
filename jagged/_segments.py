"""Offset arithmetic of ragged data: which values belong to which bag, and which bags to which key.

Shapes: lengths [N] bag sizes, offsets [N + 1] first value of each bag and then the end, values [L, ...].
A key owns consecutive bags, its stride (batch size) of them. Only `read_length_per_key` and `check_members` read
tensors on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from ._check import check_keys, names


@dataclass(frozen=True)
class Strides:
    """Which keys there are and how many bags each owns.

    `stride` is the batch size of the whole: the common one, or the largest where keys differ; pieces keep it.
    `per_rank` is [keys][ranks] and sums to `per_key`; None says that every key has batch size `stride`.
    """

    keys: list[str]
    stride: int
    per_key: list[int]
    per_rank: list[list[int]] | None

    @cached_property
    def starts(self) -> list[int]:
        """First bag of each key, then the number of bags."""
        return starts_of(self.per_key)

    @cached_property
    def index(self) -> dict[str, int]:
        return {key: i for i, key in enumerate(self.keys)}

    def pick(self, indices: Iterable[int]) -> Strides:
        """The keys at `indices`, in that order; repeats allowed."""
        indices = list(indices)
        return Strides(
            [self.keys[i] for i in indices],
            self.stride,
            [self.per_key[i] for i in indices],
            None if self.per_rank is None else [self.per_rank[i] for i in indices],
        )

    @staticmethod
    def join(members: Sequence[Strides]) -> Strides:
        """All keys of members that have keys, in order.

        Raises ValueError where a key is in two members, fixed batch sizes differ, or numbers of ranks differ.
        """
        keys = check_keys([key for m in members for key in m.keys])
        per_key = [n for m in members for n in m.per_key]
        stride = max(m.stride for m in members)
        if all(m.per_rank is None for m in members):
            if len({m.stride for m in members}) > 1:
                sizes = ", ".join(f"{m.stride} for {names(m.keys)}" for m in members)
                raise ValueError(f"cannot join different batch sizes: {sizes}")
            return Strides(keys, stride, per_key, None)
        # a fixed batch beside a variable one is a batch of one rank
        rows = [row for m in members for row in (m.per_rank or [[n] for n in m.per_key])]
        if len({len(row) for row in rows}) > 1:
            counts = ", ".join(f"{len(row)} for {key!r}" for key, row in zip(keys, rows, strict=True))
            raise ValueError(f"cannot join different numbers of ranks: {counts}")
        return Strides(keys, stride, per_key, rows)


def starts_of(sizes: Iterable[int]) -> list[int]:
    """Running sum with a leading 0: [2, 3] -> [0, 2, 5]."""
    return list(accumulate(sizes, initial=0))


def offsets_of(lengths: Tensor, num_values: int) -> Tensor:
    """Offsets [..., N + 1] of lengths [..., N], in the dtype of lengths unless `num_values` does not fit in it."""
    dtype = lengths.dtype if num_values <= torch.iinfo(lengths.dtype).max else torch.int64
    return torch.nn.functional.pad(lengths.cumsum(-1, dtype=dtype), (1, 0))


def lengths_of(offsets: Tensor) -> Tensor:
    """Lengths [N] of offsets [N + 1], same dtype."""
    return offsets[1:] - offsets[:-1]


def contradict(lengths: Tensor, offsets: Tensor) -> Tensor:
    """Whether offsets are not those of lengths, or do not start at 0: [1] of 0 or 1, dtype of the lengths."""
    unlike = (lengths_of(offsets) != lengths).any() | (offsets[0] != 0)
    return unlike.reshape(1).to(lengths.dtype)


def check_members(keys: Sequence[str], lengths: Sequence[Tensor], sizes: Sequence[int]) -> None:
    """ValueError, with the key, unless the lengths of each are >= 0 and sum to its size. Reads them on the host."""
    facts = torch.stack([torch.stack([length.sum(), length.clamp(max=0).sum()]) for length in lengths])
    # not a host sync: the caller asked whether they are readable
    for key, size, (total, below) in zip(keys, sizes, facts.tolist(), strict=True):
        if total != size:
            raise ValueError(f"key {key!r}: lengths sum to {total}, values has {size}")
        if below:
            raise ValueError(f"key {key!r}: lengths must be >= 0, some are negative and sum to {below}")


def join_tensors(what: str, labels: Sequence[str], parts: Sequence[Tensor]) -> Tensor:
    """`torch.cat` along dim 0, in which empty parts have no say: an empty float tensor does not make ids float.

    Raises ValueError where non-empty parts mix integers and floats, or parts are on different devices.
    """
    devices = {str(part.device): label for label, part in zip(labels, parts, strict=True)}
    if len(devices) > 1:
        found = ", ".join(f"{label} on {device}" for device, label in devices.items())
        raise ValueError(f"{what} must be on one device, got {found}")
    used = [(label, part) for label, part in zip(labels, parts, strict=True) if part.shape[0] > 0]
    kinds = {part.is_floating_point(): f"{label} is {part.dtype}" for label, part in used}
    if len(kinds) > 1:
        raise ValueError(f"{what} must be all integer or all floating, got {' and '.join(kinds.values())}")
    return torch.cat([part for _, part in used] or [parts[0]])


def join_weights(owners: Sequence[Sequence[str]], weights: Sequence[Tensor | None]) -> Tensor | None:
    """All of the weights joined, or none. ValueError where some lack them: short weights would go with other values."""
    present = [weight for weight in weights if weight is not None]
    if not present:
        return None
    if len(present) != len(weights):
        having = [key for keys, weight in zip(owners, weights, strict=True) for key in keys if weight is not None]
        lacking = [key for keys, weight in zip(owners, weights, strict=True) for key in keys if weight is None]
        raise ValueError(f"either all have weights or none: {names(having)} have, {names(lacking)} have not")
    return join_tensors("weights", [names(keys) for keys in owners], present)


def read_length_per_key(
    strides: Strides, lengths: Tensor, offsets: Tensor, num_values: int, *, compare: bool, padded: bool = False
) -> list[int]:
    """Number of values of each key. One host sync, none if there are no bags.

    Raises ValueError, with numbers and the key, unless offsets start at 0, do not decrease and end at `num_values`.
    `compare` is for lengths and offsets that were not computed from each other: they must agree as well. With `padded`
    offsets may end before `num_values`.
    """
    if strides.starts[-1] == 0:
        return [0] * len(strides.keys)
    if strides.per_rank is None:
        edges = offsets[:: strides.stride]
    else:
        edges = offsets[torch.tensor(strides.starts, device=offsets.device)]
    unlike = contradict(lengths, offsets) if compare else lengths.new_zeros(1)
    # host sync: sizes of pieces are decided on the host; what is to be checked comes along
    *bounds, smallest, differ = torch.cat([edges, lengths.min().reshape(1), unlike]).tolist()
    unlike_values = bounds[-1] > num_values if padded else bounds[-1] != num_values
    if bounds[0] != 0 or smallest < 0 or unlike_values or differ:
        # host sync: on the way to an error
        raise ValueError(_what_is_wrong(strides, lengths.tolist(), offsets.tolist(), num_values))
    return [end - start for start, end in zip(bounds, bounds[1:], strict=False)]


def _what_is_wrong(strides: Strides, lengths: list[int], offsets: list[int], num_values: int) -> str:
    key, before = strides.keys[0], offsets[0]
    if before != 0:
        return f"offsets must start at 0, got {before} (key {key!r})"
    for key, start, count in zip(strides.keys, strides.starts, strides.per_key, strict=False):
        for sample in range(count):
            before, after = offsets[start + sample], offsets[start + sample + 1]
            if after < before:
                return f"key {key!r}, sample {sample}: length {after - before} (offsets go from {before} to {after})"
            if after > num_values:
                total = f"lengths sum to {offsets[-1]}, values has {num_values}"
                return f"{total}: key {key!r}, sample {sample} ends at {after}"
            if after - before != lengths[start + sample]:
                length = lengths[start + sample]
                return f"key {key!r}, sample {sample}: length {length}, but its offsets go from {before} to {after}"
    return f"lengths sum to {offsets[-1]}, values has {num_values}: {num_values - offsets[-1]} left after key {key!r}"

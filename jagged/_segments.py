"""Offset arithmetic of ragged data: which values belong to which bag, and which bags to which key.

Shapes: lengths [N] bag sizes, offsets [N + 1] first value of each bag and then the end, values [L, ...].
A key owns consecutive bags, its stride (batch size) of them. Only `read_length_per_key` and `check_bags_in_full` read
tensors on the host.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shardwise.kernels import capturing, complete_cumsum, segment_sum

from ._check import INTEGER_DTYPES, names, readable
from ._keys import Strides

_LARGEST = {dtype: torch.iinfo(dtype).max for dtype in INTEGER_DTYPES}
_WIDE = (torch.int64, torch.int32)


@dataclass
class Beside:
    """A tensor [n] int64 on the device of a batch, whose `numbers` come to the host with the batch's sizes.

    They stay None where the sizes were known, or are not read in one copy: `read` has them then too.
    """

    tensor: Tensor
    numbers: list[int] | None = None

    def read(self) -> list[int]:
        """The numbers; one more host sync where they did not come."""
        if self.numbers is None:
            # host sync: no size was read that they could have come with
            self.numbers = self.tensor.tolist()
        return self.numbers


def offsets_of(lengths: Tensor, num_values: int) -> Tensor:
    """Offsets [..., N + 1] of lengths [..., N], in the dtype of lengths unless `num_values` does not fit in it."""
    if torch.compiler.is_compiling():
        # a size that is not known yet cannot be compared
        dtype = lengths.dtype if lengths.dtype in _WIDE else torch.int64
    else:
        dtype = lengths.dtype if num_values <= _LARGEST[lengths.dtype] else torch.int64
    if dtype is lengths.dtype:
        return complete_cumsum(lengths)
    return torch.nn.functional.pad(lengths.cumsum(-1, dtype=dtype), (1, 0))


def lengths_of(offsets: Tensor) -> Tensor:
    """Lengths [N] of offsets [N + 1], same dtype."""
    return offsets[1:] - offsets[:-1]


def contradict(lengths: Tensor, offsets: Tensor) -> Tensor:
    """Whether offsets are not those of lengths, or do not start at 0: [1] of 0 or 1, dtype of the lengths."""
    unlike = (lengths_of(offsets) != lengths).any() | (offsets[0] != 0)  # []
    return unlike.reshape(1).to(lengths.dtype)


def join_tensors(what: str, label: Callable[[int], str], parts: Sequence[Tensor]) -> Tensor:
    """`torch.cat` along dim 0, in which empty parts have no say: an empty float tensor does not make ids float.

    `label(i)` names part i. Raises ValueError where non-empty parts mix integers and floats, or devices differ.
    """
    first = parts[0]
    dtype, device = first.dtype, first.device
    for part in parts:
        if part.dtype is not dtype or part.device != device:
            break
    else:
        return torch.cat(parts if type(parts) is list else list(parts))
    devices = {str(part.device): label(i) for i, part in enumerate(parts)}
    if len(devices) > 1:
        listed = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise ValueError(f"{what} must be on one device, got {listed}")
    used = [(i, part) for i, part in enumerate(parts) if part.shape[0] > 0]
    kinds = {part.is_floating_point(): f"{label(i)} is {part.dtype}" for i, part in used}
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
        raise ValueError(
            f"Can't merge weighted KJT with unweighted KJT, either all have weights or none: {names(having)} have,"
            f" {names(lacking)} have not"
        )
    return join_tensors("weights", lambda i: names(owners[i]), present)


def read_length_per_key(
    strides: Strides,
    lengths: Tensor | None,
    offsets: Tensor | None,
    num_values: int,
    *,
    padded: bool = False,
    beside: Beside | None = None,
) -> list[int]:
    """Number of values of each key, from offsets if there are any. One host sync, none if there are no bags.

    Of a batch on meta, which has no numbers, every key has as many, and the first one what is left over.

    Raises ValueError, with numbers and the key, unless each is >= 0 and they add up to `num_values` (with `padded`, to
    less). What is wrong within a key only `check_bags_in_full` sees.
    """
    if torch.compiler.is_compiling():
        return _traced_length_per_key(strides, lengths, offsets, num_values, padded)
    known = lengths if offsets is None else offsets
    if known is not None and known.is_meta:
        # nothing can be read; TorchRec shares them out like this
        share, rest = divmod(num_values, max(len(strides.keys.names), 1))
        return [share + (rest if number == 0 else 0) for number in range(len(strides.keys.names))]
    if known is not None and known.is_cuda and capturing():
        raise RuntimeError(
            "the number of values of each key is read on the host, which must not be while a CUDA graph is captured: a"
            " step that needs it (sequences by key, splits, to_dict) cannot be captured"
        )
    first, sizes, smallest = sum_per_key(strides, lengths, offsets, beside)
    total = sum(sizes)
    fits = first == 0 and smallest >= 0 and (total == num_values or (padded and total < num_values))
    if not fits:
        lengths, offsets = _both(lengths, offsets)
        # host sync: on the way to an error
        raise ValueError(_what_is_wrong(strides, lengths.tolist(), offsets.tolist(), num_values))
    return sizes


def _traced_length_per_key(
    strides: Strides, lengths: Tensor | None, offsets: Tensor | None, num_values: int, padded: bool
) -> list[int]:
    """Numbers that a compiler does not know: the checks go into the graph."""
    # of two sources the one whose sums need no first value
    sizes = sum_per_key(strides, lengths, offsets if lengths is None or strides.sizes is not None else None)[1]
    total = sum(sizes)
    for fact in (
        *(size >= 0 for size in sizes),
        *(size <= num_values for size in sizes),
        total <= num_values if padded else total == num_values,
    ):
        torch._check(fact)  # type: ignore[no-untyped-call]
    return sizes


def sum_per_key(
    strides: Strides, lengths: Tensor | None, offsets: Tensor | None, beside: Beside | None = None
) -> tuple[int, list[int], int]:
    """Where the first bag begins, how many values each key has, and the least of these, unchecked.

    One host sync on a device; none without bags.
    """
    if strides.bags == 0:
        return 0, [0] * len(strides.keys.names), 0
    if offsets is None and strides.sizes is not None:
        assert lengths is not None
        if readable(lengths):
            # of Python's numbers the fastest tensor
            starts = torch.frombuffer(array("q", strides.starts), dtype=torch.int64)  # [keys + 1]
            return _read(None, segment_sum(starts, lengths.to(torch.int64)))
        # in int64, where bad lengths do not wrap around to a good sum
        offsets = offsets_of(lengths, 2**62)  # [bags + 1]
    if offsets is not None:
        ends = edges(strides, offsets)  # [keys + 1] first value of each key
        return _read(ends, ends.diff(), beside)
    assert lengths is not None
    # a cast and a sum are faster than a sum that casts
    return _read(None, lengths.view(len(strides.keys.names), strides.stride).to(torch.int64).sum(1), beside)


def _read(ends: Tensor | None, sizes: Tensor, beside: Beside | None = None) -> tuple[int, list[int], int]:
    """The first of `ends`, all sizes and the least of them."""
    if torch.compiler.is_compiling():
        return 0, sizes.tolist(), 0
    if sizes.is_cpu:
        # of a tensor that nothing waits for, three reads are faster than joining what is read
        return 0 if ends is None else int(ends[0]), sizes.tolist(), int(sizes.min())
    first = () if ends is None else (ends[:1].to(sizes.dtype),)
    more = () if beside is None else (beside.tensor,)
    # host sync: sizes of pieces are decided on the host; what is to be checked comes along
    least, *numbers = torch.cat((sizes.min().view(1), *more, *first, sizes)).tolist()
    if beside is not None:
        count = beside.tensor.shape[0]
        beside.numbers, numbers = numbers[:count], numbers[count:]
    return (0 if ends is None else numbers.pop(0)), numbers, least


def compare_sizes(strides: Strides, totals: Sequence[int], known: Sequence[int]) -> None:
    """ValueError, with the key, where lengths sum to another number of values than the key is known to have."""
    if list(totals) != list(known):
        for key, total, size in zip(strides.keys.names, totals, known, strict=True):
            if total != size:
                raise ValueError(f"key {key!r}: lengths sum to {total}, values has {size}")


def check_bags_in_full(
    strides: Strides, lengths: Tensor | None, offsets: Tensor | None, num_values: int, *, padded: bool = False
) -> None:
    """ValueError, with numbers and the key, unless all bags are >= 0 and end where the values do. One host sync.

    With `padded` they may end before. Lengths and offsets, where both are given, must agree.
    """
    if strides.bags == 0 or (lengths if offsets is None else offsets).is_meta:  # type: ignore[union-attr]
        return
    if offsets is None:
        assert lengths is not None
        # host sync: the caller asked for it
        first, smallest, end, differ = 0, int(lengths.min()), int(lengths.sum()), 0
    else:
        own = lengths_of(offsets)  # [bags]
        unlike = own.new_zeros(1) if lengths is None else contradict(lengths, offsets).to(own.dtype)
        # host sync: the caller asked for it
        first, end, smallest, differ = torch.cat([offsets[:1], offsets[-1:], own.min().reshape(1), unlike]).tolist()
    if first != 0 or smallest < 0 or differ or end > num_values or (end != num_values and not padded):
        lengths, offsets = _both(lengths, offsets)
        # host sync: on the way to an error
        raise ValueError(_what_is_wrong(strides, lengths.tolist(), offsets.tolist(), num_values))


def _both(lengths: Tensor | None, offsets: Tensor | None) -> tuple[Tensor, Tensor]:
    """The missing one computed; offsets in int64, where bad lengths do not wrap around."""
    if offsets is None:
        assert lengths is not None
        return lengths, offsets_of(lengths, 2**62)
    return (lengths_of(offsets) if lengths is None else lengths), offsets


def edges(strides: Strides, offsets: Tensor) -> Tensor:
    """First value of each key, then the end of the last: [keys + 1], from the offsets of bags."""
    if strides.sizes is None:
        return offsets[:: strides.stride] if strides.stride else offsets[:1]
    return offsets.index_select(0, torch.tensor(strides.starts, device="cpu").to(offsets.device, non_blocking=True))


def _what_is_wrong(strides: Strides, lengths: list[int], offsets: list[int], num_values: int) -> str:
    key, before = strides.keys.names[0], offsets[0]
    if before != 0:
        return f"offsets must start at 0, got {before} (key {key!r})"
    for key, start, count in zip(strides.keys.names, strides.starts, strides.per_key, strict=False):
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
    return (
        f"lengths sum to {offsets[-1]}, values has {num_values}: {num_values - offsets[-1]} left after key {key!r}; if"
        f" these are padding, say so: KeyedJaggedTensor(..., capacity={num_values})"
    )

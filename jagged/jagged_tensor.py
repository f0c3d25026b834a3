"""A batch of bags of different sizes, as one flat tensor and the size of each bag.

Shapes: values [L, ...], weights [L], lengths [B], offsets [B + 1].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from shardwise.errors import RefusedValueError
from shardwise.kernels import jagged_to_padded_dense

from ._check import check_bags, check_tensor, check_values, readable
from ._segments import contradict, join_tensors, lengths_of, offsets_of
from .streamable import Pipelineable
from .tracing import Traceable, is_transformed


class Bags(Traceable, Pipelineable):
    """Values [L, ...] in consecutive bags, given by lengths [N] or offsets [N + 1]; maybe a weight for each value.

    Of lengths and offsets the missing one is computed when first asked for, and kept (not by a transform of
    `torch.func`). Subclasses set the fields.
    """

    _values: Tensor
    _weights: Tensor | None = None
    _lengths: Tensor | None = None
    _offsets: Tensor | None = None
    # True: lengths and offsets both come from the caller, and nobody compared them yet
    _both: bool = False

    def values(self) -> Tensor:
        """Values [L, ...]."""
        return self._values

    def weights(self) -> Tensor:
        """Weights [L]. Raises ValueError if there are none."""
        if self._weights is None:
            raise RefusedValueError(
                "This (Keyed)JaggedTensor doesn't have weights. weights_or_none() of a"
                f" {type(self).__name__} asks without failing"
            )
        return self._weights

    def weights_or_none(self) -> Tensor | None:
        return self._weights

    def lengths(self) -> Tensor:
        """Bag sizes [N]."""
        if self._lengths is None:
            assert self._offsets is not None
            lengths = lengths_of(self._offsets)
            if is_transformed():
                return lengths
            self._lengths = lengths
        return self._lengths

    def lengths_or_none(self) -> Tensor | None:
        """Lengths if they were given or already computed."""
        return self._lengths

    def offsets(self) -> Tensor:
        """First value of each bag and the end of the last, [N + 1]; dtype of the lengths, or int64 if L needs it."""
        if self._offsets is None:
            assert self._lengths is not None
            offsets = offsets_of(self._lengths, self._values.shape[0])
            if is_transformed():
                return offsets
            self._offsets = offsets
        return self._offsets

    def offsets_or_none(self) -> Tensor | None:
        """Offsets if they were given or already computed."""
        return self._offsets

    def device(self) -> torch.device:
        return self._values.device

    def size_in_bytes(self) -> int:
        """Bytes of the tensors held now."""
        return sum(tensor.nbytes for tensor in self._tensors())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of every tensor until `stream` is done with it."""
        for tensor in self._tensors():
            tensor.record_stream(stream)

    def _summary(self) -> str:
        """Values and weights for a repr; reads nothing."""
        weights = "" if self._weights is None else f", weights={summary(self._weights)}"
        return f"values={summary(self._values)}{weights}"

    def storages(self) -> dict[str, Tensor]:
        """The tensors that are there of values, weights, lengths and offsets, by name; none is computed."""
        tensors = {
            "values": self._values, "weights": self._weights, "lengths": self._lengths, "offsets": self._offsets,
        }  # fmt: skip
        return {name: tensor for name, tensor in tensors.items() if tensor is not None}

    def _tensors(self) -> list[Tensor]:
        return list(self.storages().values())


class JaggedTensor(Bags):
    """Values [L, ...] in B consecutive bags, with an optional weight [L] or [L, ...] for each value.

    Bags are given by lengths [B] or offsets [B + 1] of an integer dtype; the other is computed when first asked for,
    and kept. Nothing is read on the host: that the lengths add up to L is checked by the methods that must read them.

        JaggedTensor(torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 0, 1]))  # [1, 2], [], [3]

    Raises ValueError or TypeError for shapes, dtypes and devices that do not fit together.

    Example:
        >>> bags = JaggedTensor(torch.tensor([1, 2, 3]), lengths=torch.tensor([2, 0, 1]))
        >>> bags.to_dense()
        [tensor([1, 2]), tensor([], dtype=torch.int64), tensor([3])]
        >>> bags.offsets()
        tensor([0, 2, 2, 3])
    """

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        check_values(values, weights)
        self._values = values
        self._weights = weights
        self._lengths, self._offsets, _ = check_bags(values, lengths, offsets)
        self._both = lengths is not None and offsets is not None

    @staticmethod
    def _of(values: Tensor, weights: Tensor | None, lengths: Tensor | None) -> JaggedTensor:
        """Of tensors that were checked already."""
        jt: JaggedTensor = object.__new__(JaggedTensor)
        jt._values = values
        jt._weights = weights
        jt._lengths = lengths
        return jt

    @staticmethod
    def from_dense(values: list[Tensor], weights: list[Tensor] | None = None) -> JaggedTensor:
        """One bag per tensor of `values`, [n_i, ...] each. Lengths are int32."""
        return _from_dense(values, weights)

    @staticmethod
    def from_dense_lengths(values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> JaggedTensor:
        """The first `lengths[b]` entries of each row of `values` [B, N, ...] (and `weights` [B, N, ...]) as bag b.

        Syncs with the host once: how many values there are is decided there. Raises ValueError for lengths below 0 or
        above N.
        """
        return _from_dense_lengths(values, lengths, weights)

    @staticmethod
    def empty(
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> JaggedTensor:
        """No values in no bags. Values are of torch's default dtype unless said otherwise."""
        return JaggedTensor(
            torch.empty(0, dtype=values_dtype, device=device),
            torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            torch.empty(0, dtype=lengths_dtype, device=device),
        )

    @staticmethod
    def empty_like(jt: JaggedTensor, device: torch.device | str | None = None) -> JaggedTensor:
        """Without `device` no values in no bags, of the dtypes of `jt`. With it the same shapes there, not yet
        written, for `copy_`."""
        if device is None:
            return jt._map(lambda tensor: tensor.new_empty(0))
        return jt._map(lambda tensor: torch.empty_like(tensor, device=device))

    def copy_(self, jt: JaggedTensor, non_blocking: bool = False) -> JaggedTensor:
        """Take over the numbers of `jt` in place. ValueError unless shapes, and what tensors there are, agree."""
        copy_tensors(self, jt, non_blocking)
        return self

    def to(self, device: torch.device | str, non_blocking: bool = False) -> JaggedTensor:
        """A copy on `device`; tensors already there are shared."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def _map(self, change: Callable[[Tensor], Tensor]) -> JaggedTensor:
        """The same, every tensor changed."""

        def each(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else change(tensor)

        copy = JaggedTensor._of(change(self._values), each(self._weights), each(self._lengths))
        copy._offsets = each(self._offsets)
        copy._both = self._both
        return copy

    @property
    def _batch_size(self) -> int:
        if self._lengths is not None:
            return self._lengths.shape[0]
        assert self._offsets is not None
        return self._offsets.shape[0] - 1

    def to_dense(self) -> list[Tensor]:
        """One view of the values per bag. Syncs with the host once.

        Raises ValueError unless the lengths add up to L and agree with the offsets, where both are known.
        """
        return list(torch.split_with_sizes(self._values, self._read_lengths()))

    def to_dense_weights(self) -> list[Tensor] | None:
        """One view of the weights per bag, None where there are no weights. Syncs with the host once."""
        return None if self._weights is None else list(torch.split_with_sizes(self._weights, self._read_lengths()))

    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """Values as [B, desired_length, ...], bags cut or filled with `padding_value`; differentiable, dtype kept.

        Without `desired_length` the longest bag decides, which syncs with the host. There, and on the cpu, ValueError
        for the bags that `to_dense` refuses; on a device with `desired_length` nothing is read, and only what is in a
        bag is copied.
        """
        return self._padded(self._values, desired_length, padding_value)

    def to_padded_dense_weights(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor | None:
        """Weights as [B, desired_length], as `to_padded_dense` pads values; None where there are no weights."""
        return None if self._weights is None else self._padded(self._weights, desired_length, padding_value)

    def _padded(self, values: Tensor, desired_length: int | None, padding_value: float) -> Tensor:
        if desired_length is None:
            desired_length = self._read_longest()
        elif desired_length < 0:
            raise ValueError(f"desired_length must be >= 0, got {desired_length}")
        offsets = self.offsets()
        if offsets.dtype not in (torch.int64, torch.int32):
            offsets = offsets.to(torch.int64)
        try:
            if readable(offsets) and (int(offsets[-1]) != values.shape[0] or (self._both and self._unlike())):
                raise ValueError("bags that do not fit the values")
            return jagged_to_padded_dense(values, offsets, desired_length, padding_value)
        except ValueError:
            # host sync: on the way to an error
            raise ValueError(self._what_is_wrong(self.lengths().tolist())) from None

    def _read_lengths(self) -> list[int]:
        # host sync: the size of each view is decided on the host
        lengths: list[int] = self.lengths().tolist()
        if min(lengths, default=0) < 0 or sum(lengths) != self._values.shape[0] or self._unlike():
            raise ValueError(self._what_is_wrong(lengths))
        return lengths

    def _read_longest(self) -> int:
        """Size of the longest bag, in one host sync, with the checks of `to_dense`."""
        if self._batch_size == 0:
            return 0
        lengths = self.lengths()
        if readable(lengths):
            # what else is wrong with them the padding notices
            return max(int(lengths.max()), 0)
        facts = [fact.to(torch.int64) for fact in (lengths.max(), lengths.min(), lengths.sum())]
        # host sync: the longest bag is the size of the result; what is to be checked comes along
        longest, shortest, total = torch.stack(facts).tolist()
        if shortest < 0 or total != self._values.shape[0] or self._unlike():
            # host sync: on the way to an error
            raise ValueError(self._what_is_wrong(lengths.tolist()))
        return int(longest)

    def _unlike(self) -> bool:
        """Whether offsets do not begin at 0, or are not those of the lengths where a caller gave both."""
        if self._offsets is None:
            return False
        if not self._both:
            return int(self._offsets[0]) != 0
        # host sync: beside one that was made already
        return bool(contradict(self.lengths(), self._offsets))

    def _what_is_wrong(self, lengths: list[int]) -> str:
        text = f"lengths {_first(lengths)} sum to {sum(lengths)}, values has {self._values.shape[0]}"
        if min(lengths, default=0) >= 0 and sum(lengths) == self._values.shape[0]:
            # host sync: on the way to an error
            text = f"lengths {_first(lengths)} contradict offsets {_first(self.offsets().tolist())}"
        return text

    def __repr__(self) -> str:
        return f"JaggedTensor({self._summary()}, bags={self._batch_size})"

    def __str__(self) -> str:
        # host sync: text is made on the host
        weights = None if self._weights is None else self._weights.tolist()
        text = bags_text(self._values.tolist(), weights, self.offsets().tolist(), "")
        if self._weights is None:
            text = f"{{\n    {text}\n}}"
        return f"JaggedTensor({text})\n"


@torch.fx.wrap
def _from_dense(values: list[Tensor], weights: list[Tensor] | None) -> JaggedTensor:
    sizes = [value.shape[0] for value in values]
    if weights is not None:
        if len(weights) != len(values):
            raise ValueError(f"weights must be as many as values: got {len(weights)} for {len(values)} samples")
        for i, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
            if size != weight.shape[0]:
                raise ValueError(f"sample {i}: {weight.shape[0]} weights for {size} values")
    device = values[0].device if values else None
    return JaggedTensor(
        _join_samples("values", values),
        None if weights is None else _join_samples("weights", weights),
        torch.tensor(sizes, dtype=torch.int32, device=device),
    )


@torch.fx.wrap
def _from_dense_lengths(values: Tensor, lengths: Tensor, weights: Tensor | None) -> JaggedTensor:
    check_tensor("values", values)
    check_tensor("lengths", lengths)
    if values.dim() < 2 or lengths.shape != values.shape[:1]:
        raise ValueError(
            f"values must be [B, N, ...] and lengths [B], got {list(values.shape)} and {list(lengths.shape)}"
        )
    if weights is not None and weights.shape[:2] != values.shape[:2]:
        raise ValueError(f"weights must be {list(values.shape[:2])} as values are, got {list(weights.shape)}")
    batch, width = values.shape[:2]
    if batch and not 0 <= (extremes := torch.stack(lengths.aminmax()).tolist())[0] <= extremes[1] <= width:
        raise ValueError(f"lengths must be between 0 and {width}, got {extremes[0]} to {extremes[1]}")
    kept = torch.arange(width, device=lengths.device) < lengths[:, None]
    return JaggedTensor(values[kept], None if weights is None else weights[kept], lengths)


def copy_tensors(
    target: Bags, source: Bags, non_blocking: bool, more: Sequence[tuple[str, Tensor | None, Tensor | None]] = ()
) -> None:
    """Copy each tensor in place, and `more` (name, target, source); nothing is copied unless all of them fit."""
    if target._lengths is not None:
        source.lengths()
    if target._offsets is not None:
        source.offsets()
    pairs = [
        ("values", target._values, source._values),
        ("weights", target._weights, source._weights),
        ("lengths", target._lengths, None if target._lengths is None else source._lengths),
        ("offsets", target._offsets, None if target._offsets is None else source._offsets),
        *more,
    ]
    for what, own, other in pairs:
        if (own is None) != (other is None):
            having = "there" if own is None else "here"
            raise ValueError(f"copy_ needs {what} on both sides or on none, they are only {having}")
        if own is not None and other is not None and own.shape != other.shape:
            raise ValueError(f"copy_ of {what}: shape {list(other.shape)} into {list(own.shape)}")
    for _, own, other in pairs:
        if own is not None and other is not None:
            own.copy_(other, non_blocking=non_blocking)


# str() is TorchRec's text, byte for byte, and reads every tensor on the host; repr() is one line and reads nothing


def summary(tensor: Tensor) -> str:
    """Shape, dtype and device: `[3, 12] float32 cpu`."""
    return f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')} {tensor.device}"


def rows_text(values: Sequence[Any], offsets: Sequence[int]) -> str:
    """One list per bag: `[[1, 2], [], [3]]`."""
    return str([values[start:end] for start, end in pairwise(offsets)])


def bags_text(values: Sequence[Any], weights: Sequence[Any] | None, offsets: Sequence[int], indent: str) -> str:
    """The bags, or the bags and their weights in braces that close at `indent`; of what was read on the host."""
    if weights is None:
        return rows_text(values, offsets)
    inner = indent + " " * 4
    return (
        f'{{\n{inner}"values": {rows_text(values, offsets)},\n'
        f'{inner}"weights": {rows_text(weights, offsets)}\n{indent}}}'
    )


def keyed_text(name: str, entries: Sequence[tuple[str, str]]) -> str:
    """`Name({...})` with one entry a line, `Name()` without entries; ends in a newline."""
    if not entries:
        return f"{name}()\n"
    body = ",\n".join(f'    "{key}": {text}' for key, text in entries)
    return f"{name}({{\n{body}\n}})\n"


def _first(numbers: list[int]) -> str:
    return f"{numbers[:10]}{' ...' if len(numbers) > 10 else ''}"


def _join_samples(what: str, samples: Sequence[Tensor]) -> Tensor:
    if not samples:
        return torch.empty(0)
    return join_tensors(what, "sample {}".format, samples)

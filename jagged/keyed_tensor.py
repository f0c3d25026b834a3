"""Dense embeddings of several keys side by side in one tensor.

Shapes: values [B, D_1 + ... + D_K] for key_dim 1, the columns of key k being D_k wide.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from shardwise.errors import RefusedValueError
from shardwise.kernels import RegroupPlan, plan_regroup, regroup

from ._check import KeyNames, check_keys, check_known, check_tensor, names
from ._keys import Columns, keys_of
from .jagged_tensor import keyed_text, summary
from .streamable import Keyed, Pipelineable
from .tracing import Traceable


class KeyedTensor(Keyed, Traceable, Pipelineable):
    """Values in which each key owns `length_per_key[k]` consecutive entries of dim `key_dim`.

        kt = KeyedTensor(["user", "item"], [4, 8], torch.randn(2, 12))
        kt["item"].shape  # [2, 8], a view

    `offset_per_key` and `index_per_key` follow from the others and are only compared with them.

    Raises:
        ValueError, TypeError: keys are no unique strings, or the lengths do not add up to the size of `key_dim`.

    Example:
        >>> pooled = KeyedTensor(["user", "item"], [1, 2], torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))
        >>> pooled["item"]
        tensor([[2., 3.],
                [5., 6.]])
    """

    _columns: Columns
    _values: Tensor
    _key_dim: int

    def __init__(
        self,
        keys: KeyNames,
        length_per_key: Sequence[int],
        values: Tensor,
        key_dim: int = 1,
        offset_per_key: Sequence[int] | None = None,
        index_per_key: Mapping[str, int] | None = None,
    ) -> None:
        check_tensor("values", values)
        self._columns = columns = keys_of(keys).columns(length_per_key)
        self._values = values
        if keys and not -values.dim() <= key_dim < values.dim():
            raise ValueError(f"key_dim {key_dim} is out of range for values of shape {list(values.shape)}")
        # of the two names of a dim the one from the front
        self._key_dim = key_dim % values.dim() if keys else key_dim
        if keys and columns.starts[-1] != values.shape[key_dim]:
            raise ValueError(
                f"length_per_key of {names(columns.keys.names)} sums to {columns.starts[-1]}, "
                f"values has {values.shape[key_dim]} entries in dim {key_dim} (shape {list(values.shape)})"
            )
        check_known("offset_per_key", offset_per_key, columns.starts)
        if index_per_key is not None:
            check_known("index_per_key", list(index_per_key), columns.keys.names)

    @staticmethod
    def _of(columns: Columns, values: Tensor, key_dim: int) -> KeyedTensor:
        """Of what was checked already."""
        kt: KeyedTensor = object.__new__(KeyedTensor)
        kt._columns, kt._values, kt._key_dim = columns, values, key_dim
        return kt

    def with_values(self, values: Tensor) -> KeyedTensor:
        """The same keys over other values: any batch, as many entries in the dim of the keys, which is not checked."""
        kt: KeyedTensor = object.__new__(KeyedTensor)
        kt._columns, kt._values, kt._key_dim = self._columns, values, self._key_dim
        return kt

    @staticmethod
    def from_tensor_list(keys: KeyNames, tensors: Sequence[Tensor], key_dim: int = 1, cat_dim: int = 1) -> KeyedTensor:
        """One key per tensor: lengths are sizes of `key_dim`, tensors are concatenated along `cat_dim`."""
        return _from_tensor_list(keys, tensors, key_dim, cat_dim)

    def keys(self) -> list[str]:
        """Keys, in the order of their values."""
        return list(self._columns.keys.names)

    def values(self) -> Tensor:
        """Values of all keys."""
        return self._values

    def key_dim(self) -> int:
        """The dim along which keys lie side by side, counted from the front."""
        return self._key_dim

    def device(self) -> torch.device:
        """Device of the values."""
        return self._values.device

    def length_per_key(self) -> list[int]:
        """Width of each key along `key_dim`."""
        return list(self._columns.widths)

    def offset_per_key(self) -> list[int]:
        """First entry of each key along `key_dim`, then the end."""
        return list(self._columns.starts)

    def size_in_bytes(self) -> int:
        """Bytes of the values."""
        return self._values.nbytes

    def __getitem__(self, key: str) -> Tensor:
        """The view of one key. Raises KeyError for an unknown one."""
        columns = self._columns
        i = columns.keys.index.get(key)
        if i is None:
            raise KeyError(f"unknown key {key!r}, keys are {names(columns.keys.names)}")
        return self._values.narrow(self._key_dim, columns.starts[i], columns.widths[i])

    def to_dict(self) -> dict[str, Tensor]:
        """A view per key."""
        columns = self._columns
        if not columns.widths:
            return {}
        # one split has one gradient, the concatenation; a narrow per key would add up a full-size gradient for each
        pieces = torch.split_with_sizes(self._values, columns.widths, self._key_dim)
        return dict(zip(columns.keys.names, pieces, strict=True))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedTensor:
        """A copy on `device`; values already there are shared."""
        return KeyedTensor._of(self._columns, self._values.to(device, non_blocking=non_blocking), self._key_dim)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of the values until `stream` is done with it."""
        self._values.record_stream(stream)

    @staticmethod
    def regroup(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[Tensor]:
        """One tensor per group: the values of its keys side by side, in the order of the group.

        Keys may be left out, and may be in several groups. Differentiable.

        Raises:
            KeyError: a key is unknown.
            ValueError: several inputs have a key (which one is meant?), or inputs are of different `key_dim`.
        """
        return _regroup(keyed_tensors, groups)

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: list[KeyedTensor], groups: list[list[str]], keys: list[str]
    ) -> dict[str, Tensor]:
        """`regroup`, with a name for each group.

        Raises:
            KeyError, ValueError: as `regroup`; ValueError also unless there are as many groups as names.
        """
        if len(groups) != len(keys):
            raise RefusedValueError(
                f"Groups and keys should have same length: {len(groups)} groups but {len(keys)} keys {names(keys)}"
            )
        return _named(check_keys(keys), _regroup(keyed_tensors, groups))

    def __repr__(self) -> str:
        return f"KeyedTensor(keys={names(self._columns.keys.names)}, values={summary(self._values)})"

    def __str__(self) -> str:
        # host sync: text is made on the host
        return keyed_text("KeyedTensor", [(key, str(piece.tolist())) for key, piece in self.to_dict().items()])


def regroup_kts(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[Tensor]:
    """`KeyedTensor.regroup` as a function: a tensor [B, D] per group."""
    return KeyedTensor.regroup(keyed_tensors, groups)


def permute_multi_embedding(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[Tensor]:
    """`KeyedTensor.regroup` under the name of the op that TorchRec runs for it: a tensor [B, D] per group."""
    return KeyedTensor.regroup(keyed_tensors, groups)


@torch.fx.wrap
def _from_tensor_list(keys: KeyNames, tensors: Sequence[Tensor], key_dim: int, cat_dim: int) -> KeyedTensor:
    if len(keys) != len(tensors):
        raise ValueError(f"{len(keys)} keys {names(check_keys(keys))} but {len(tensors)} tensors")
    values = torch.cat(list(tensors), dim=cat_dim) if tensors else torch.empty(0, 0)
    return KeyedTensor(keys, [tensor.shape[key_dim] for tensor in tensors], values, key_dim)


@torch.fx.wrap
def _regroup(keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]) -> list[Tensor]:
    return regroup_by(plan_of(keyed_tensors, groups), keyed_tensors)


def plan_of(keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]) -> RegroupPlan:
    """How the columns of these move to the groups; the same for all inputs of the same keys and widths."""
    if not keyed_tensors:
        raise ValueError("regroup needs at least one KeyedTensor, got an empty list")
    columns = [kt._columns for kt in keyed_tensors]
    return plan_regroup([c.keys.names for c in columns], [c.widths for c in columns], groups)


def regroup_by(plan: RegroupPlan, keyed_tensors: Sequence[KeyedTensor]) -> list[Tensor]:
    """The groups of a plan. ValueError for inputs of different `key_dim`."""
    # what has no keys has no say
    dims = {kt._key_dim for kt in keyed_tensors if kt._columns.widths} or {keyed_tensors[0]._key_dim}
    if len(dims) > 1:
        raise ValueError(f"regroup needs inputs of one key_dim, got {sorted(dims)}")
    (key_dim,) = dims
    like = next((kt._values for kt in keyed_tensors if kt._columns.widths), keyed_tensors[0]._values)
    values = [kt._values if kt._columns.widths else like.narrow(key_dim, 0, 0) for kt in keyed_tensors]
    if key_dim == 1 and like.dim() == 2:
        return regroup(values, plan)
    # as if the keys lay side by side in the second of two dims
    parts = [value.movedim(key_dim, -1) for value in values]
    shape = parts[0].shape[:-1]
    flat = regroup([part.reshape(shape.numel(), part.shape[-1]) for part in parts], plan)
    return [out.reshape(*shape, out.shape[1]).movedim(-1, key_dim) for out in flat]


@torch.fx.wrap
def _named(keys: Sequence[str], tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return dict(zip(keys, tensors, strict=True))

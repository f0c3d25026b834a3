"""Dense embeddings of several keys side by side in one tensor.

Shapes: values [B, D_1 + ... + D_K] for key_dim 1, the columns of key k being D_k wide.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ._check import check_keys, check_tensor, names
from ._strides import starts_of
from ._text import keyed_text, summary


class KeyedTensor:
    """Values in which each key owns `length_per_key[k]` consecutive entries of dim `key_dim`.

        kt = KeyedTensor(["user", "item"], [4, 8], torch.randn(2, 12))
        kt["item"].shape  # [2, 8], a view

    Raises ValueError or TypeError unless keys are unique strings and the lengths add up to the size of `key_dim`.
    """

    def __init__(self, keys: list[str], length_per_key: list[int], values: Tensor, key_dim: int = 1) -> None:
        self._keys = check_keys(keys)
        check_tensor("values", values)
        self._length_per_key = list(length_per_key)
        self._values = values
        if len(self._length_per_key) != len(self._keys):
            raise ValueError(f"{len(self._keys)} keys {names(self._keys)} but {len(self._length_per_key)} lengths")
        for key, length in zip(self._keys, self._length_per_key, strict=True):
            if length < 0:
                raise ValueError(f"key {key!r}: length must be >= 0, got {length}")
        if self._keys and not -values.dim() <= key_dim < values.dim():
            raise ValueError(f"key_dim {key_dim} is out of range for values of shape {list(values.shape)}")
        # of the two names of a dim the one from the front
        self._key_dim = key_dim % values.dim() if self._keys else key_dim
        if self._keys and sum(self._length_per_key) != values.shape[key_dim]:
            raise ValueError(
                f"length_per_key of {names(self._keys)} sums to {sum(self._length_per_key)}, "
                f"values has {values.shape[key_dim]} entries in dim {key_dim} (shape {list(values.shape)})"
            )
        self._offset_per_key = starts_of(self._length_per_key)
        self._index_per_key = {key: i for i, key in enumerate(self._keys)}

    @staticmethod
    def from_tensor_list(keys: list[str], tensors: list[Tensor], key_dim: int = 1, cat_dim: int = 1) -> KeyedTensor:
        """One key per tensor: lengths are sizes of `key_dim`, tensors are concatenated along `cat_dim`."""
        if len(keys) != len(tensors):
            raise ValueError(f"{len(keys)} keys {names(keys)} but {len(tensors)} tensors")
        values = torch.cat(tensors, dim=cat_dim) if tensors else torch.empty(0, 0)
        return KeyedTensor(keys, [tensor.shape[key_dim] for tensor in tensors], values, key_dim)

    def keys(self) -> list[str]:
        """Keys, in the order of their values."""
        return self._keys

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
        return self._length_per_key

    def offset_per_key(self) -> list[int]:
        """First entry of each key along `key_dim`, then the end."""
        return self._offset_per_key

    def size_in_bytes(self) -> int:
        """Bytes of the values."""
        return self._values.nbytes

    def __getitem__(self, key: str) -> Tensor:
        """The view of one key. Raises KeyError for an unknown one."""
        if key not in self._index_per_key:
            raise KeyError(f"unknown key {key!r}, keys are {names(self._keys)}")
        i = self._index_per_key[key]
        return self._values.narrow(self._key_dim, self._offset_per_key[i], self._length_per_key[i])

    def to_dict(self) -> dict[str, Tensor]:
        """A view per key."""
        return dict(zip(self._keys, self._pieces(), strict=True))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedTensor:
        """A copy on `device`; values already there are shared."""
        values = self._values.to(device, non_blocking=non_blocking)
        return KeyedTensor(self._keys, self._length_per_key, values, self._key_dim)

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory of the values until `stream` is done with it."""
        self._values.record_stream(stream)

    @staticmethod
    def regroup(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[Tensor]:
        """One tensor per group: the values of its keys side by side, in the order of the group.

        Keys may be left out, and may be in several groups. Differentiable. Raises KeyError for an unknown key, and
        ValueError for a key that several inputs have (which one is meant?) or inputs of different `key_dim`.
        """
        if not keyed_tensors:
            raise ValueError("regroup needs at least one KeyedTensor, got an empty list")
        key_dims = {kt._key_dim for kt in keyed_tensors if kt._keys}
        if len(key_dims) > 1:
            raise ValueError(f"regroup needs inputs of one key_dim, got {sorted(key_dims)}")
        key_dim = keyed_tensors[0]._key_dim if not key_dims else key_dims.pop()
        owners: dict[str, list[Tensor]] = {}
        for kt in keyed_tensors:
            for key, piece in zip(kt._keys, kt._pieces(), strict=True):
                owners.setdefault(key, []).append(piece)
        return [_side_by_side(group, owners, keyed_tensors, key_dim) for group in groups]

    @staticmethod
    def regroup_as_dict(
        keyed_tensors: list[KeyedTensor], groups: list[list[str]], keys: list[str]
    ) -> dict[str, Tensor]:
        """`regroup`, with a name for each group."""
        if len(groups) != len(keys):
            raise ValueError(f"{len(groups)} groups but {len(keys)} keys {names(keys)} to name them")
        return dict(zip(check_keys(keys), KeyedTensor.regroup(keyed_tensors, groups), strict=True))

    def _pieces(self) -> Sequence[Tensor]:
        # one split has one gradient, the concatenation; a narrow per key would add up a full-size gradient for each
        return torch.split_with_sizes(self._values, self._length_per_key, self._key_dim) if self._keys else ()

    def __repr__(self) -> str:
        return f"KeyedTensor(keys={names(self._keys)}, values={summary(self._values)})"

    def __str__(self) -> str:
        # host sync: text is made on the host
        return keyed_text("KeyedTensor", [(key, str(piece.tolist())) for key, piece in self.to_dict().items()])


def _side_by_side(
    group: Sequence[str], owners: dict[str, list[Tensor]], keyed_tensors: Sequence[KeyedTensor], key_dim: int
) -> Tensor:
    for key in group:
        found = len(owners.get(key, ()))
        if found == 0:
            raise KeyError(f"unknown key {key!r}, keys are {names(list(owners))}")
        if found > 1:
            raise ValueError(f"key {key!r} is in {found} of the KeyedTensors: rename it or leave all but one out")
    if group:
        return torch.cat([owners[key][0] for key in group], dim=key_dim)
    # a group of no keys has no width
    like = next((kt for kt in keyed_tensors if kt._keys), None)
    if like is None:
        return keyed_tensors[0].values()
    return like.values().narrow(key_dim, 0, 0)

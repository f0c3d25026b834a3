"""Conversions of the jagged types as modules, which fx and export can take for leaves, and of a TensorDict."""

from __future__ import annotations

import abc
import sys
from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.fx import Proxy

from shardwise.errors import RefusedValueError
from shardwise.kernels import RegroupPlan

from ._check import check_keys, names
from ._keys import Columns
from .jagged_tensor import JaggedTensor
from .keyed_jagged_tensor import KeyedJaggedTensor
from .keyed_tensor import KeyedTensor, plan_of, regroup_by
from .tracing import OneNode, record_forward


class ComputeKJTToJTDict(torch.nn.Module):
    """`KeyedJaggedTensor.to_dict` as a module."""

    def forward(self, keyed_jagged_tensor: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """A JaggedTensor per key."""
        return keyed_jagged_tensor.to_dict()


class ComputeJTDictToKJT(torch.nn.Module):
    """`KeyedJaggedTensor.from_jt_dict` as a module."""

    def forward(self, jt_dict: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
        """One key per entry, in the order of the dict."""
        return KeyedJaggedTensor.from_jt_dict(jt_dict)


class CacheMixin(abc.ABC):
    """A module that keeps what it worked out from its inputs, and forgets it on request."""

    @abc.abstractmethod
    def clear_cache(self) -> None:
        """Forget it."""


class KTRegroupAsDict(OneNode, torch.nn.Module, CacheMixin):
    """`KeyedTensor.regroup_as_dict` as a module: `groups` of keys, and for each the key of its output.

    How the columns move is worked out at the first call and again when the inputs' keys or widths change. `emb_dtype`,
    a torch dtype or a `DataType`, is what the outputs are cast to. There are no buffers that `multi_device` would have
    to move: it is taken for TorchRec's sake.

    Raises:
        ValueError: there are not as many groups as keys, or no output can have that `emb_dtype`.
    """

    def __init__(
        self,
        groups: list[list[str]],
        keys: list[str],
        emb_dtype: torch.dtype | Enum | None = None,
        multi_device: bool = False,
    ) -> None:
        super().__init__()
        if len(groups) != len(keys):
            raise RefusedValueError(
                f"Groups and keys should have same length: {len(groups)} groups but {len(keys)} keys {names(keys)}"
            )
        self._groups = [list(group) for group in groups]
        self._keys = check_keys(keys)
        self._dtype = None if emb_dtype is None else _dtype_of(emb_dtype)
        # a call that every step would pay for
        self._casts = self._dtype is not None or type(self).embedding_cast is not KTRegroupAsDict.embedding_cast
        self._columns: list[Columns] = []
        self._plan: RegroupPlan | None = None

    def forward(self, keyed_tensors: list[KeyedTensor]) -> dict[str, Tensor]:
        """One tensor [B, D] per group: the values of its keys side by side, D the sum of their lengths."""
        # looks that cost no call, as every step pays for them
        if isinstance(keyed_tensors, Proxy) or Proxy in map(type, keyed_tensors):
            return record_forward(KTRegroupAsDict.forward, self, keyed_tensors)  # type: ignore[no-any-return]
        columns = [kt._columns for kt in keyed_tensors]
        plan = self._plan
        if plan is None or len(columns) != len(self._columns) or any(map(_differ, columns, self._columns)):
            plan = plan_of(keyed_tensors, self._groups)
            if not torch.compiler.is_compiling():
                self._columns, self._plan = columns, plan
        grouped = regroup_by(plan, keyed_tensors)
        if self._casts:
            grouped = self.embedding_cast(grouped)
        return dict(zip(self._keys, grouped, strict=True))

    def embedding_cast(self, embs: list[Tensor]) -> list[Tensor]:
        """The tensors, of any shape, in `emb_dtype`; as they are without one. A subclass may cast in another way."""
        return embs if self._dtype is None else [emb.to(self._dtype) for emb in embs]

    def clear_cache(self) -> None:
        """Forget how columns move; nothing needs this, since other inputs are noticed."""
        self._columns, self._plan = [], None

    def extra_repr(self) -> str:
        return f"groups={self._groups}, keys={self._keys}"


def maybe_td_to_kjt(features: Any, keys: Sequence[str] | None = None) -> Any:
    """A KeyedJaggedTensor of the `keys` (all by default) of a TensorDict; anything else as it is.

    Entries are nested tensors [batch, ids] of layout torch.jagged. tensordict need not be installed.
    """
    module = sys.modules.get("tensordict")
    if isinstance(features, KeyedJaggedTensor) or module is None or not isinstance(features, module.TensorDictBase):
        return features
    return KeyedJaggedTensor.from_nested({key: features[key] for key in (features.keys() if keys is None else keys)})


def _differ(a: Columns, b: Columns) -> bool:
    if a is b:
        return False
    return a.widths != b.widths or a.keys.names != b.keys.names


def _dtype_of(emb_dtype: torch.dtype | Enum) -> torch.dtype:
    if isinstance(emb_dtype, torch.dtype):
        return emb_dtype
    # the values of DataType, which lies above this folder
    known = {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}
    dtype = known.get(str(getattr(emb_dtype, "value", emb_dtype)))
    if dtype is None:
        raise ValueError(f"emb_dtype must be one of {list(known)} or a torch dtype, got {emb_dtype!r}")
    return dtype

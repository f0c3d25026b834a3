"""The conversions between a keyed batch and a dict of batches as modules, which fx and export can take for leaves."""

from __future__ import annotations

import torch

from .jagged_tensor import JaggedTensor
from .keyed_jagged_tensor import KeyedJaggedTensor


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

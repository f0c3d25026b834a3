"""What `torch.ops.fbgemm.X` says while TorchRec's names are served: the op if it is registered, else our hint."""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import _OpNamespace

from .hints import advice

__all__ = ["hint_at_ops", "leave_ops_alone"]


def hint_at_ops() -> None:
    """Have `torch.ops.fbgemm.X` raise AttributeError with what to use; ops that are registered are found first."""
    torch.ops.fbgemm.__class__ = _Hinting


def leave_ops_alone() -> None:
    """Undo `hint_at_ops`."""
    torch.ops.fbgemm.__class__ = _OpNamespace


class _Hinting(_OpNamespace):
    """torch's namespace of the ops of FBGEMM, with our words for those that are not registered."""

    # torch names the ops after the module of this class
    __module__ = _OpNamespace.__module__

    def __getattr__(self, op_name: str) -> Any:
        try:
            return super().__getattr__(op_name)
        except AttributeError as error:
            if op_name.startswith("__"):
                raise
            raise AttributeError(advice(f"torch.ops.fbgemm.{op_name}")) from error

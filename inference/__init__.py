"""From a trained model to one that serves: quantize, shard over the devices of one process, export, load again.

Names are loaded at first use: what serves needs none of what trains.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .quantize import quantize_inference_model

__all__ = ["quantize_inference_model"]

_HOME = {"quantize_inference_model": "quantize"}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value

"""From a trained model to one that serves: quantize, shard over the devices of one process, export, load again.

Names are loaded at first use: what serves needs none of what trains.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .quantize import quantize_embeddings, quantize_inference_model, set_pruning_data
    from .sharded import shard_quant_model
    from .weights import assign_weights_to_tbe, get_table_to_weights_from_tbe

__all__ = [
    "assign_weights_to_tbe",
    "get_table_to_weights_from_tbe",
    "quantize_embeddings",
    "quantize_inference_model",
    "set_pruning_data",
    "shard_quant_model",
]

_HOME = {
    "assign_weights_to_tbe": "weights",
    "get_table_to_weights_from_tbe": "weights",
    "quantize_embeddings": "quantize",
    "quantize_inference_model": "quantize",
    "set_pruning_data": "quantize",
    "shard_quant_model": "sharded",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value

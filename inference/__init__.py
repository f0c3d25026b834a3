"""From a trained model to one that serves: quantize, shard over the devices of one process, export, load again.

Names are loaded at first use: what serves needs none of what trains.
"""

from __future__ import annotations

if __name__ == "inference":
    raise ImportError("import shardwise.inference: 'inference' alone would be a second copy of it")

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .export import export_model
    from .folder import ModelDamaged, ModelFacts, Signature
    from .predict import BatchingMetadata, PredictFactory, PredictModule, QualNameMetadata, quantize_dense
    from .program import Program, load_program
    from .quantize import quantize_embeddings, quantize_inference_model, set_pruning_data
    from .sharded import shard_quant_model
    from .tables import Table, read_tables
    from .weights import assign_weights_to_tbe, get_table_to_weights_from_tbe

__all__ = [
    "BatchingMetadata",
    "ModelDamaged",
    "ModelFacts",
    "PredictFactory",
    "PredictModule",
    "Program",
    "QualNameMetadata",
    "Signature",
    "Table",
    "assign_weights_to_tbe",
    "export_model",
    "get_table_to_weights_from_tbe",
    "load_program",
    "quantize_dense",
    "quantize_embeddings",
    "quantize_inference_model",
    "read_tables",
    "set_pruning_data",
    "shard_quant_model",
]

_HOME = {
    "BatchingMetadata": "predict",
    "ModelDamaged": "folder",
    "ModelFacts": "folder",
    "PredictFactory": "predict",
    "PredictModule": "predict",
    "Program": "program",
    "QualNameMetadata": "predict",
    "Signature": "folder",
    "Table": "tables",
    "assign_weights_to_tbe": "weights",
    "export_model": "export",
    "get_table_to_weights_from_tbe": "weights",
    "load_program": "program",
    "quantize_dense": "predict",
    "quantize_embeddings": "quantize",
    "quantize_inference_model": "quantize",
    "read_tables": "tables",
    "set_pruning_data": "quantize",
    "shard_quant_model": "sharded",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value

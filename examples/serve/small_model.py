"""Make a small DLRM of random weights and export it: `python examples/serve/small_model.py served`."""

from __future__ import annotations

import argparse
import sys

import torch

from shardwise import DLRM, EmbeddingBagCollection, EmbeddingBagConfig
from shardwise.inference import ModelFacts, Signature, export_model, quantize_inference_model

DENSE = ("age", "hour", "price")
# feature -> rows of its table
ROWS = {"user": 1000, "item": 5000, "tag": 50}


def export(folder: str, *, dim: int = 16, seed: int = 0) -> ModelFacts:
    """Its tables are int8, one for each feature; its output is called `logit`."""
    torch.manual_seed(seed)
    tables = [
        EmbeddingBagConfig(name=f"{name}_table", num_embeddings=rows, embedding_dim=dim, feature_names=[name])
        for name, rows in ROWS.items()
    ]
    model = DLRM(EmbeddingBagCollection(tables=tables), len(DENSE), [32, dim], [32, 1])
    quantized = quantize_inference_model(model.eval())
    signature = Signature(features=[*ROWS], dense=DENSE, outputs=["logit"])
    return export_model(quantized, folder, signature=signature, force=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    facts = export(parser.parse_args().folder)
    sizes = ", ".join(f"{table.name} {table.rows} x {table.dim} {table.format}" for table in facts.tables)
    sys.exit(print(f"exported: {sizes}"))

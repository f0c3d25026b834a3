"""Quantized models of every shape that can be exported, with batches for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import (
    DLRM,
    Batch,
    DLRMTrain,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    KeyedJaggedTensor,
    PoolingType,
)
from shardwise.inference import ModelFacts, Signature, export_model, quantize_inference_model
from shardwise.inference.tracing import named_outputs

FEATURES = ["a", "b", "c"]
ROWS = 50


def bags(is_weighted: bool = False, rows: int = ROWS) -> EmbeddingBagCollection:
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(rows + n, 8, name, feature_names=[name], pooling=pooling)
        for n, (name, pooling) in enumerate([("a", PoolingType.MEAN), ("b", PoolingType.SUM), ("c", PoolingType.SUM)])
    ]
    return EmbeddingBagCollection(tables, is_weighted=is_weighted)


def shared_feature() -> EmbeddingBagCollection:
    """Two tables read one feature, and the tables' order is not the batch's."""
    torch.manual_seed(0)
    names = {"second": ["c"], "first": ["b", "a"], "third": ["a"]}
    return EmbeddingBagCollection([EmbeddingBagConfig(ROWS, 8, t, feature_names=fs) for t, fs in names.items()])


def rows() -> EmbeddingCollection:
    torch.manual_seed(0)
    return EmbeddingCollection([EmbeddingConfig(ROWS, 8, name, feature_names=[name]) for name in FEATURES])


def dlrm() -> DLRM:
    torch.manual_seed(0)
    return DLRM(bags(), dense_in_features=2, dense_arch_layer_sizes=[4, 8], over_arch_layer_sizes=[4, 1])


class NamesOutputs(nn.Module):
    """A dict of a tensor and of a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc, self.over = bags(), nn.Linear(24, 1)

    def forward(self, features: KeyedJaggedTensor) -> dict[str, Any]:
        pooled = self.ebc(features)
        return {"score": self.over(pooled.values()), "pooled": {"a": pooled["a"]}}


def call_with_batch(model: nn.Module, features: KeyedJaggedTensor, dense: Tensor | None) -> Any:
    """A model that takes a Batch, and gives more than anybody serves."""
    assert dense is not None
    return model(Batch(dense, features, torch.zeros(dense.shape[0])))[1][1]


@dataclass(frozen=True)
class Case:
    """A float model, how it is exported and quantized, and the names of its outputs."""

    make: Callable[[], nn.Module]
    outputs: list[str]
    signature: Signature = field(default_factory=lambda: Signature(FEATURES))
    call: Callable[..., Any] | None = None
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)

    def model(self) -> nn.Module:
        return quantize_inference_model(self.make(), per_table_weight_dtype=self.dtypes)

    def export(self, folder: Path, **more: Any) -> ModelFacts:
        return export_model(self.model(), folder, signature=self.signature, call=self.call, **more)

    def batch(self, size: int, *, longest: int = 3) -> dict[str, Tensor]:
        """Random inputs of the program."""
        torch.manual_seed(size)
        lengths = torch.randint(0, longest + 1, (len(FEATURES), size))
        count = int(lengths.sum())
        inputs = {"values": torch.randint(0, ROWS, (count,)), "lengths": lengths}
        if self.signature.dense:
            inputs["dense"] = torch.randn(size, len(self.signature.dense))
        if self.signature.weighted:
            inputs["weights"] = torch.rand(count)
        return inputs

    def wanted(self, model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the model itself says."""
        kjt = KeyedJaggedTensor(FEATURES, batch["values"], batch.get("weights"), batch["lengths"])
        dense = batch.get("dense")
        with torch.no_grad():
            if self.call is not None:
                outputs = self.call(model, kjt, dense)
            else:
                outputs = model(kjt) if dense is None else model(dense, kjt)
        return dict(zip(self.outputs, named_outputs(outputs).values(), strict=True))


DENSE = ["age", "hour"]
CASES = {
    "pooled": Case(bags, FEATURES),
    "two formats": Case(bags, FEATURES, dtypes={"b": torch.quint4x2}),
    "weighted": Case(lambda: bags(is_weighted=True), FEATURES, Signature(FEATURES, weighted=True)),
    "shared feature": Case(shared_feature, ["c", "b", "a@first", "a@third"]),
    "sequence": Case(rows, [f"{name}.{what}" for name in FEATURES for what in ("values", "lengths")]),
    "dlrm": Case(dlrm, ["output"], Signature(FEATURES, DENSE)),
    "named": Case(dlrm, ["logit"], Signature(FEATURES, DENSE, outputs=["logit"])),
    "dict": Case(NamesOutputs, ["score", "pooled.a"]),
    "batch": Case(lambda: DLRMTrain(dlrm()), ["output"], Signature(FEATURES, DENSE), call_with_batch),
}

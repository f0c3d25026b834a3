"""Quantizes a model, writes it into a folder, serves it from there, and reads its tables with numpy.

python examples/export.py
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shardwise import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from shardwise.inference import (
    BatchingMetadata,
    ModelDamaged,
    ModelFacts,
    PredictFactory,
    PredictModule,
    Program,
    QualNameMetadata,
    Signature,
    Table,
    export_model,
    load_program,
    quantize_dense,
    quantize_inference_model,
    read_tables,
)
from shardwise.models import DLRM, SparseArch

FEATURES, DENSE = ["user", "clicked"], ["age", "hour"]


def trained_model() -> DLRM:
    torch.manual_seed(0)
    tables = [EmbeddingBagConfig(1000, 32, name, feature_names=[name]) for name in FEATURES]
    return DLRM(EmbeddingBagCollection(tables), len(DENSE), [16, 32], [16, 1])


class ClickModel(PredictModule):
    """Answers a dict of tensors: what a server of TorchRec models wants."""

    def predict_forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        ids = KeyedJaggedTensor(FEATURES, batch["ids.values"], lengths=batch["ids.lengths"])
        return {"probability": torch.sigmoid(self.predict_module(batch["floats"], ids).float().squeeze(1))}


class ClickFactory(PredictFactory):
    """Makes that model with int8 tables and fp16 layers."""

    def create_predict_module(self) -> nn.Module:
        return ClickModel(trained_model(), "cpu")

    def batching_metadata(self) -> dict[str, BatchingMetadata]:
        sparse = BatchingMetadata(type="sparse", device="cpu", pinned=["lengths", "values"])
        return {"floats": BatchingMetadata(type="dense", device="cpu", pinned=[""]), "ids": sparse}

    def qualname_metadata(self) -> dict[str, QualNameMetadata]:
        return {"forward": QualNameMetadata(need_preproc=False)}

    def result_metadata(self) -> str:
        return "dict_of_tensor"

    def run_weights_independent_tranformations(self, predict_module: nn.Module) -> nn.Module:
        return predict_module

    def run_weights_dependent_transformations(self, predict_module: nn.Module) -> nn.Module:
        assert isinstance(predict_module, PredictModule)
        quantize_inference_model(predict_module, output_dtype=torch.float16)
        return quantize_dense(predict_module, torch.half, additional_embedding_module_type=[SparseArch])

    def model_inputs_data(self) -> dict[str, Any]:
        return {"signature": Signature(FEATURES, DENSE)}


def main() -> None:
    folder = Path(tempfile.mkdtemp())
    model = quantize_inference_model(trained_model(), per_table_weight_dtype={"clicked": torch.quint4x2})
    signature = Signature(features=FEATURES, dense=DENSE, outputs=["logit"])
    facts: ModelFacts = export_model(model, folder / "clicks", signature=signature)
    for table in facts.tables:
        print(f"{table.name}: {table.format}, {table.fp32_bytes / table.bytes:.2f}x smaller than fp32")

    # in another process: it takes torch and shardwise.kernels, and nothing that trains
    program: Program = load_program(folder / "clicks")
    # sample 0 is user 3 who clicked 7 and 8, sample 1 is user 4 who clicked nothing
    values, lengths = torch.tensor([3, 4, 7, 8]), torch.tensor([[1, 1], [2, 0]])
    dense = torch.tensor([[0.3, 0.5], [0.1, 0.9]])
    logits = program(values, lengths, dense=dense)["logit"]
    with torch.no_grad():
        print("same bits:", torch.equal(logits, model(dense, KeyedJaggedTensor(FEATURES, values, lengths=lengths))))
    try:
        program(torch.tensor([3, 4, 7, 1000]), lengths, dense=dense)
    except IndexError as error:
        print("IndexError:", error)

    # with numpy alone, without torch
    clicked: Table = read_tables(folder / "clicks")["clicked"]
    print("rows:", clicked.rows([7, 8]).shape, "pooled:", clicked.pooled([7, 8], offsets=[0, 2, 2]).shape)

    # a factory brings the names of its inputs along
    served = export_model(ClickFactory(), folder / "factory")
    outputs = load_program(folder / "factory")(values, lengths, dense=dense)
    print([output.name for output in served.outputs], [round(float(p), 2) for p in outputs["probability"]])

    (folder / "clicks" / "program.pt2").write_bytes(b"")
    try:
        load_program(folder / "clicks")
    except ModelDamaged as error:
        print("ModelDamaged:", str(error).removeprefix(f"{folder}/"))


if __name__ == "__main__":
    main()

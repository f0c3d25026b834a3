"""PredictModule and PredictFactory: what they run, what they tell a server, and how they are exported."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from inference_models import CASES, DENSE, FEATURES, dlrm
from torch import Tensor, nn

from shardwise import KeyedJaggedTensor
from shardwise.inference import (
    BatchingMetadata,
    PredictFactory,
    PredictModule,
    QualNameMetadata,
    Signature,
    export_model,
    load_program,
    quantize_dense,
    quantize_inference_model,
)
from shardwise.models import SparseArch


class Served(PredictModule):
    """A DLRM that takes a dict, and says in what mode it ran."""

    def predict_forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        self.inference = torch.is_inference_mode_enabled()
        sparse = KeyedJaggedTensor(FEATURES, batch["ids.values"], lengths=batch["ids.lengths"])
        return {"default": self.predict_module(batch["floats"], sparse).squeeze(1)}


class Factory(PredictFactory):
    """Quantizes where weights matter, and says so."""

    def __init__(self, metadata: dict[str, BatchingMetadata] | None = None, named: bool = True) -> None:
        self.steps: list[str] = []
        self._metadata, self._named = metadata, named

    def create_predict_module(self) -> nn.Module:
        self.steps.append("create")
        return Served(dlrm(), "cpu")

    def batching_metadata(self) -> dict[str, BatchingMetadata]:
        return self._metadata or {
            "floats": BatchingMetadata("dense", "cpu", [""]),
            "ids": BatchingMetadata("sparse", "cpu", ["lengths"]),
        }

    def result_metadata(self) -> str:
        return "dict_of_tensor"

    def run_weights_independent_tranformations(self, predict_module: nn.Module) -> nn.Module:
        self.steps.append("before weights")
        return predict_module

    def run_weights_dependent_transformations(self, predict_module: nn.Module) -> nn.Module:
        self.steps.append("with weights")
        return quantize_inference_model(predict_module)

    def model_inputs_data(self) -> dict[str, Any]:
        return {"signature": Signature(FEATURES, DENSE)} if self._named else {}


def as_dict(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {"floats": batch["dense"], "ids.values": batch["values"], "ids.lengths": batch["lengths"].view(-1)}


def test_a_predict_module_runs_its_model_in_inference_mode_and_eval() -> None:
    model = dlrm()
    served = Served(model, "cpu")
    assert served.predict_module is model and not model.training
    batch = CASES["dlrm"].batch(3)
    logits = served(as_dict(batch))["default"]
    wanted = model(batch["dense"], KeyedJaggedTensor(FEATURES, batch["values"], lengths=batch["lengths"])).squeeze(1)
    assert served.inference and logits.is_inference()
    assert torch.equal(logits, wanted.detach())


def test_its_state_dict_has_the_names_of_the_model() -> None:
    model = dlrm()
    assert list(Served(model).state_dict()) == list(model.state_dict())
    assert list(Served(model).state_dict(prefix="x.")) == [f"x.{name}" for name in model.state_dict()]


def test_a_factory_tells_a_server_about_its_inputs() -> None:
    factory = Factory()
    assert json.loads(factory.batching_metadata_json()) == {
        "floats": {"type": "dense", "device": "cpu", "pinned": [""]},
        "ids": {"type": "sparse", "device": "cpu", "pinned": ["lengths"]},
    }
    assert factory.qualname_metadata_json() == "{}"
    factory.qualname_metadata = lambda: {"forward": QualNameMetadata(need_preproc=True)}  # type: ignore[method-assign]
    assert json.loads(factory.qualname_metadata_json()) == {"forward": {"need_preproc": True}}
    with pytest.raises(TypeError, match="abstract"):
        PredictFactory()  # type: ignore[abstract]


def test_a_factory_is_exported(tmp_path: Path) -> None:
    factory = Factory()
    facts = export_model(factory, tmp_path / "out")
    assert factory.steps == ["create", "before weights", "with weights"]
    assert [output.name for output in facts.outputs] == ["default"]
    batch = CASES["dlrm"].batch(4)
    wanted = quantize_inference_model(Served(dlrm(), "cpu"))(as_dict(batch))
    assert torch.equal(load_program(tmp_path / "out")(**batch)["default"], wanted["default"])


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (Factory(named=False), "the inputs of the model need names"),
        (Factory({"floats": BatchingMetadata("dense", "cpu", [])}), "sparse ones .* can be exported; pass `call`"),
        (
            Factory({"a": BatchingMetadata("sparse", "cpu", []), "b": BatchingMetadata("image", "cpu", [])}),
            r"others \['b'\]",
        ),
    ],
)
def test_a_factory_that_does_not_say_enough_is_refused(tmp_path: Path, factory: Factory, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        export_model(factory, tmp_path / "out")


def test_quantize_dense_makes_all_but_tables_fp16() -> None:
    served = Served(dlrm(), "cpu")
    model = served.predict_module
    batch = CASES["dlrm"].batch(3)
    assert quantize_dense(served, torch.half, additional_embedding_module_type=[SparseArch]) is served
    dtypes = {name.split(".")[0]: tensor.dtype for name, tensor in model.named_parameters()}
    assert dtypes == {"sparse_arch": torch.float32, "dense_arch": torch.float16, "over_arch": torch.float16}
    # fp32 inputs of a child become fp16, tables stay
    hidden = model.dense_arch(batch["dense"])  # type: ignore[operator]
    assert hidden.dtype == torch.float16
    torch.testing.assert_close(hidden.float(), dlrm().dense_arch(batch["dense"]), rtol=1e-2, atol=1e-2)


def test_quantize_dense_knows_fp16_alone() -> None:
    with pytest.raises(NotImplementedError, match="fp16 .* nothing else, got torch.int8"):
        quantize_dense(Served(dlrm()), torch.int8)

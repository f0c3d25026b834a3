"""A predict factory in a package of torch.package: a fresh process loads it and predicts the same."""

from __future__ import annotations

import importlib
import io
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import run_python
from jagged_batches import kjt

from shardwise import EmbeddingBagCollection, EmbeddingBagConfig, torchrec as alias
from shardwise.inference import PredictFactory
from shardwise.inference.packages import PredictFactoryPackager, load_config_text, load_pickle_config

# what a program has in a module of its own; names of torchrec are looked for where it is loaded
FACTORY = """
import json

import torch
import helper_of_ours

from shardwise.inference import BatchingMetadata, PredictFactory, PredictModule
from shardwise.inference.packages import load_config_text, load_pickle_config


class Scores(PredictModule):
    def predict_forward(self, batch):
        from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

        features = KeyedJaggedTensor(["f"], batch["values"], lengths=batch["lengths"])
        return {"scores": self.predict_module(features).values().sum(1) * helper_of_ours.SCALE}


class Factory(PredictFactory):
    def create_predict_module(self):
        from torchrec.modules.embedding_configs import EmbeddingBagConfig
        from torchrec.modules.embedding_modules import EmbeddingBagCollection

        sizes = json.loads(load_config_text("sizes.json"))
        tables = EmbeddingBagCollection(tables=[EmbeddingBagConfig(name="t", feature_names=["f"], **sizes)])
        tables.load_state_dict(load_pickle_config("state", dict))
        return Scores(tables, "cpu")

    def batching_metadata(self):
        return {"values": BatchingMetadata("sparse", "cpu", [])}

    def result_metadata(self):
        return "dict_of_tensor"

    def run_weights_independent_tranformations(self, predict_module):
        return predict_module

    def run_weights_dependent_transformations(self, predict_module):
        return predict_module


def wrong():
    return load_pickle_config("state", list)
"""

LOADS = """
import sys, json, torch
from torch.package import PackageImporter
package = PackageImporter(sys.argv[1])
loader = package.import_module("__module_loader")
factory = loader.MODULE_FACTORY()
module = factory.create_predict_module()
scores = module({"values": torch.tensor([1, 3, 3]), "lengths": torch.tensor([1, 0, 2])})["scores"]
try:
    package.import_module("packaged_factory").wrong()
except TypeError as error:
    told = str(error)
assert "packaged_factory" not in sys.modules and factory.result_metadata() == "dict_of_tensor"
assert package.load_text("extra_files", "notes.txt") == "for people"
assert package.load_binary("extra_files", "blob") == b"\\x00\\x01"
print(json.dumps([scores.tolist(), told, factory.batching_metadata_json()]))
"""


class Packager(PredictFactoryPackager):
    @classmethod
    def set_mocked_modules(cls, pe: Any) -> None:
        pe.mock("mocked_library")


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "packaged_factory.py").write_text(FACTORY)
    (tmp_path / "helper_of_ours.py").write_text(
        "def unused():\n    import mocked_library\n    return mocked_library\n\n\nSCALE = 2.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("packaged_factory")
    for name in ("packaged_factory", "helper_of_ours"):
        del sys.modules[name]


def test_a_packaged_factory_predicts_the_same_in_a_fresh_process(code: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    tables = EmbeddingBagCollection([EmbeddingBagConfig(5, 4, "t", feature_names=["f"])])
    configs = {"sizes.json": json.dumps({"num_embeddings": 5, "embedding_dim": 4}), "state": tables.state_dict()}
    saved = tmp_path / "model.package"
    extra_files = {"notes.txt": "for people", "blob": b"\x00\x01"}
    # the process that loads it then installs the alias too
    alias.install()
    try:
        Packager.save_predict_factory(code.Factory, configs, saved, extra_files)
    finally:
        alias.uninstall()
    names = zipfile.ZipFile(saved).namelist()
    assert any(name.endswith("helper_of_ours.py") for name in names)
    assert not any("shardwise" in name or "torchrec" in name for name in names)
    fresh = tmp_path / "elsewhere"
    fresh.mkdir()
    scores, told, batching = json.loads(run_python("-c", LOADS, saved, folder=fresh).stdout)
    wanted = tables(kjt({"f": [[1], [], [3, 3]]})).values().sum(1) * 2
    assert scores == wanted.tolist() and scores[0] != 0
    assert told == "config 'state' is a OrderedDict, not a list"
    assert json.loads(batching) == {"values": {"type": "sparse", "device": "cpu", "pinned": []}}


def test_what_cannot_be_packaged_or_read_is_said(code: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="load_config_text reads a package of torch.package: .*test_packages"):
        load_config_text("sizes.json")
    with pytest.raises(RuntimeError, match="load_pickle_config reads a package"):
        load_pickle_config("state", dict)
    with pytest.raises(TypeError, match="extra file 'notes' must be text or bytes, got int"):
        Packager.save_predict_factory(code.Factory, {}, io.BytesIO(), {"notes": 3})  # type: ignore[dict-item]
    monkeypatch.setattr(code.Factory, "__module__", "__main__")
    with pytest.raises(ValueError, match="Factory is defined in __main__: move it to a module of its own"):
        Packager.save_predict_factory(code.Factory, {}, io.BytesIO(), {})
    assert issubclass(code.Factory, PredictFactory)

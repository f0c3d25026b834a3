"""The requests that pages print fit the models that the same pages export: every `curl` is read as the server does."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("aiohttp")

from http_serving import EXAMPLE, example
from test_example_dlrm import ROOT
from test_example_dlrm import example as dlrm

from shardwise.data import Clicks
from shardwise.inference import load_program, quantize_inference_model

instances, small_model = map(example, ("instances", "small_model"))
PAGES = (ROOT / "README.md", EXAMPLE / "README.md")


def bodies(page: Path) -> list[str]:
    """What the `curl`s of a page send."""
    return re.findall(r"^curl localhost:8000/predict .*\\\n +-d '(.*)'$", page.read_text(), re.MULTILINE)


def asked(folder: Path, body: str) -> list[dict[str, Any]]:
    """The server's answer to a body, of the model in a folder."""
    program = load_program(folder)
    one = instances.read_instances(instances.read_body(body.encode()), program.facts, max_instances=8)
    found: list[dict[str, Any]] = instances.answer(program, one)
    return found


def test_each_page_has_its_request() -> None:
    assert [len(bodies(page)) for page in PAGES] == [1, 1]
    calls = sum(text.count("localhost:8000/predict") for text in (page.read_text() for page in PAGES))
    assert calls == 2


def test_the_request_of_the_example_fits_its_model_and_has_the_answer_that_is_printed(tmp_path: Path) -> None:
    small_model.export(str(tmp_path / "served"))
    (body,) = bodies(EXAMPLE / "README.md")
    found = asked(tmp_path / "served", body)
    (printed,) = re.findall(r'^\{"predictions": .*$', (EXAMPLE / "README.md").read_text(), re.MULTILINE)
    wanted = json.loads(printed)["predictions"]
    assert [[*one] for one in found] == [[*one] for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-4)


def test_the_request_of_the_readme_fits_the_model_that_its_command_exports(tmp_path: Path) -> None:
    """The only request that was printed took the model of another page: the server answered 400."""
    dlrm()
    model_of_demo, serving = map(importlib.import_module, ("model", "serving"))
    source = Clicks()
    torch.manual_seed(0)
    demo = model_of_demo.build_dlrm(source.feature_rows, len(source.dense_names), 32, torch.device("cpu"))
    # as `train.py --export` does at the end of a run
    serving.export(quantize_inference_model(demo), source, tmp_path / "served")
    (body,) = bodies(ROOT / "README.md")
    (found,) = asked(tmp_path / "served", body)
    assert found.keys() == {"logit", "click_probability"} and 0 < found["click_probability"] < 1
    # and it asks about most of what the model takes
    one = json.loads(body)["instances"][0]
    assert len(one["dense"]) == len(source.dense_names) and len(one["features"]) > len(source.feature_rows) / 2

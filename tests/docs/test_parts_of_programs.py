"""Snippets that are parts of a reader's program run in one; no page has a snippet that nothing runs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from test_docs import DOCS, SAID, path_of
from torch import nn

from shardwise import (
    DLRM,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    RowWiseAdagrad,
    ShardingEnv,
    apply_optimizer_in_backward,
)
from shardwise.data import Clicks

# pages whose snippets other tests run: those on recipes in test_recipe_pages.py
ELSEWHERE = {"log"}


def python_of(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def run(page: str, names: dict[str, Any]) -> dict[str, Any]:
    """What the names of a page's program are after its one snippet."""
    (code,) = python_of(path_of(page).read_text())
    exec(compile(code, f"{page}.md", "exec"), names)
    return names


def dlrm(dim: int = 8) -> DLRM:
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=50, embedding_dim=dim, feature_names=[name])
        for name in ("user", "item")
    ]
    return DLRM(EmbeddingBagCollection(tables=tables), 2, [4, dim], [4, 1])


def test_a_watched_step_trains() -> None:
    batches = [next(Clicks().train(32))]
    features = batches[0].sparse_features.keys()
    tables = [
        EmbeddingBagConfig(name=f"t_{key}", num_embeddings=50_000, embedding_dim=4, feature_names=[key])
        for key in features
    ]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables, self.over = EmbeddingBagCollection(tables), nn.Linear(4 * len(tables), 1)

        def forward(self, features: Any) -> torch.Tensor:
            logits: torch.Tensor = self.over(self.tables(features).values()).squeeze(1)
            return logits

    plain = Model()
    apply_optimizer_in_backward(RowWiseAdagrad, plain.tables.parameters(), {"lr": 0.1})
    before = plain.over.weight.detach().clone()
    names: dict[str, Any] = {"batches": batches, "criterion": nn.BCEWithLogitsLoss()}
    names["model"] = DistributedModelParallel(plain, env=ShardingEnv.from_local(1, 0))
    names["optimizer"] = torch.optim.SGD(plain.over.parameters(), lr=0.1)
    assert run("failures", names)["loss"].isfinite() and not torch.equal(plain.over.weight, before)


def test_a_model_is_quantized_exported_and_sharded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names = run("inference", {"dlrm": dlrm().eval()})
    formats = {table.name: table.format for table in names["load_program"]("served").facts.tables}
    assert formats["user"] == "int4" and formats["item"] == "int8" and names["plan"] is not None


def test_every_page_with_a_snippet_is_run_by_a_test() -> None:
    own = set(re.findall(r'\brun\("(\w+)"', Path(__file__).read_text()))
    pages = {path.stem for path in DOCS.rglob("*.md") if "api" not in path.parts and python_of(path.read_text())}
    assert pages - own - ELSEWHERE == SAID.keys() and {"failures", "inference"} == own

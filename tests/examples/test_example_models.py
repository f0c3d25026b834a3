"""The example of models runs, and shows every name that models/ and its kin offer beside the facade's."""

from __future__ import annotations

import ast
import re

from checkout import ROOT
from forked import run_script

from shardwise import models


def test_every_model_of_the_example_learns_and_every_part_runs() -> None:
    printed = run_script("examples/models.py")
    found = re.findall(r"(\w+): loss (\S+) -> (\S+)", printed)
    assert [name for name, *_ in found] == [
        "DLRM", "DLRM_DCN", "DLRM_Projection", "SimpleDeepFMNN", "DLRMWrapper", "SimpleDeepFMNNWrapper",
    ]  # fmt: skip
    assert all(float(last) < 0.9 * float(first) for _, first, last in found), found
    said = printed.splitlines()[len(found) :]
    assert [line.split(":")[1].strip() for line in said[:4]] == ["(5, 32)"] * 4
    assert said[4:] == [
        "interactions: 32 and 10 columns; pairs of 4: 6",
        "DeepFM: (5, 6), pairs (5, 1), together (2, 15)",
        "weights of ['item']: [1.0, 1.0], [1.0, 1.0]",
        "lazily: True, True",
        "train and validate: [900, 100], 1000",
    ]


def test_every_name_of_models_is_shown_in_an_example() -> None:
    shown = {
        alias.name
        for path in (ROOT / "examples").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module in ("shardwise", "shardwise.models")
        for alias in node.names
    }
    # parts of DLRM and metrics that the facade does not offer
    known = {"DenseArch", "InteractionArch", "OverArch", "SparseArch", "Perceptron", "MLP", "SwishLayerNorm"}
    assert set(models.__all__) - shown - known <= {"auc", "log_loss", "normalized_entropy", "DLRMTrain"}

"""Programs compiled ahead of time: the bits of the model, the errors of the program, the tables written once."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from inference_models import CASES

from shardwise.inference import ModelDamaged, export_model, load_program


# it compiles C++
@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
def test_a_compiled_program_gives_the_bits_of_its_model(tmp_path: Path) -> None:
    case = CASES["dlrm"]
    model = case.model()
    facts = export_model(model, tmp_path / "out", signature=case.signature, compiled=True)
    assert [file.name for file in facts.files][-1] == "program.aoti.pt2"
    program = load_program(tmp_path / "out", compiled=True)
    for size in (0, 1, 2, 7):
        batch = case.batch(size)
        assert torch.equal(program(**batch)["output"], case.wanted(model, batch)["output"])
    batch["values"][0] = 50
    with pytest.raises(IndexError, match=r"feature 'a' \(table 'a'\), sample 0: id 50 is outside \[0, 50\)"):
        program(**batch)


def test_what_was_not_compiled_is_not_loaded(tmp_path: Path) -> None:
    case = CASES["pooled"]
    export_model(case.model(), tmp_path / "out", signature=case.signature)
    with pytest.raises(ModelDamaged, match="lists no file 'program.aoti.pt2'"):
        load_program(tmp_path / "out", compiled=True)

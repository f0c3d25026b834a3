"""docs/howto/export.md from end to end: its model exported, compiled by AOTInductor, and run by its C++ program."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from checkout import ROOT

PAGE = (ROOT / "docs/howto/export.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.long
def test_the_cpp_program_of_the_page_gives_the_models_answers(tmp_path: Path) -> None:
    """Takes 80 s: a model and a program are compiled."""
    if shutil.which("g++") is None or not (Path(torch.__path__[0]) / "include" / "torch").is_dir():
        pytest.skip("no g++, or a torch without headers")
    names: dict[str, Any] = {}
    for block in blocks("python"):
        exec(block, names)
    names["compile_for_cpp"](str(tmp_path / "model.pt2"))
    (program,) = blocks("cpp")
    (tmp_path / "main.cpp").write_text(program)
    folder = torch.__path__[0]
    flags = [f"-I{folder}/include", f"-I{folder}/include/torch/csrc/api/include", f"-L{folder}/lib"]
    flags += [f"-Wl,-rpath,{folder}/lib", "-ltorch", "-ltorch_cpu", "-lc10"]
    subprocess.run(["g++", "-std=c++20", "main.cpp", "-o", "serve", *flags], check=True, cwd=tmp_path)
    done = subprocess.run([str(tmp_path / "serve")], check=True, cwd=tmp_path, capture_output=True, text=True)
    ids, offsets = torch.tensor([1, 2]), torch.tensor([0, 1, 2])
    expected = names["plain"](torch.ones(2, 3), [ids, ids], [offsets, offsets])
    answers = torch.tensor([float(line) for line in done.stdout.split()])
    assert torch.allclose(answers, expected.flatten(), atol=1e-5)

"""Loops of the CPU that an earlier process compiled: how they load, and what a process says that compiles them."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT

pytest.importorskip("numba")
from shardwise.kernels.cpu.njit import say_that_loops_compile  # noqa: E402

# numba's compiler: arrays, and what its registries import
COMPILER = ("numba.np.arrayobj", "numba.np.linalg", "numba.typed.dictobject", "scipy.linalg")
LOOP = """
from numba import int64
from shardwise.kernels.cpu.njit import c_function, compiled, compiled_by_types, i8

@compiled(int64(int64, int64))
def total(address, n):
    numbers, sum = i8(address, n), 0
    for number in numbers:
        sum += number
    return sum

@compiled(int64(int64))
def twice(x):
    return 2 * x

@compiled_by_types
def halves(x, y):
    return x / y

def fill(address):
    numbers = i8(address, 2)
    numbers[0], numbers[1] = 3, 4
"""
HALVES = """
from shardwise.kernels.cpu.njit import compiled_by_types

@compiled_by_types
def halves(x):
    return x / 2
"""
USE = """
import ctypes, sys, torch
from own_loops import c_function, fill, halves, total, twice
numbers = torch.tensor([1, 2, 5])
assert total(numbers.data_ptr(), 3) == 8 and total(numbers.data_ptr(), 2) == 3
assert twice(21) == 42
assert halves(3, 2) == 1.5
ctypes.CFUNCTYPE(None, ctypes.c_int64)(c_function(fill))(numbers.data_ptr())
assert numbers.tolist() == [3, 4, 5]
print(*(name for name in sys.argv[1:] if name in sys.modules))
"""
STEP = """
import sys
import loops_cache
loops_cache.keep_loops()
import torch
from shardwise import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
ebc = EmbeddingBagCollection(
    tables=[EmbeddingBagConfig(name="t", embedding_dim=8, num_embeddings=10, feature_names=["f"])]
)
batch = KeyedJaggedTensor.from_lengths_sync(["f"], torch.tensor([1, 2, 3]), torch.tensor([1, 2]))
ebc(batch).values().sum().backward()
weight = ebc.embedding_bags["t"].weight
assert weight.grad[:, 0].tolist() == [0, 1, 1, 1, 0, 0, 0, 0, 0, 0]
print(*(name for name in sys.argv[1:] if name in sys.modules))
"""


def run(program: str, paths: list[Path], **environment: str) -> tuple[str, str]:
    """What a process of its own prints: to stdout, and to stderr."""
    path = os.pathsep.join([*map(str, paths), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, "-c", program, *COMPILER],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


def test_compiling_is_said_in_one_line_and_loading_is_not(tmp_path: Path) -> None:
    """The first lookup on a new machine took half a minute, and nothing said what the process did."""
    (tmp_path / "own_loops.py").write_text(LOOP)
    place = tmp_path / "cache"
    compiler, stderr = run(USE, [ROOT, tmp_path], NUMBA_CACHE_DIR=str(place))
    lines = [line for line in stderr.splitlines() if "compiling" in line]
    assert len(lines) == 1
    assert str(place) in lines[0]
    assert "numba.np.arrayobj" in compiler
    compiler, stderr = run(USE, [ROOT, tmp_path], NUMBA_CACHE_DIR=str(place))
    assert "compiling" not in stderr
    assert not compiler


@pytest.mark.parametrize("damage", ["index cut", "code cut", "folder gone", "file in place of the folder"])
def test_what_cannot_be_loaded_or_kept_costs_a_compilation_alone(
    damage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file cut short, or a folder that was replaced since it was found: the first call raised EOFError,
    NotADirectoryError and the like out of numba, in that process and in all later ones."""
    numba = importlib.import_module("numba")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    name = f"halves_{damage.replace(' ', '_')}"
    (tmp_path / f"{name}.py").write_text(HALVES)

    def fresh() -> Any:
        monkeypatch.delitem(sys.modules, name, raising=False)
        return importlib.import_module(name).halves

    say_that_loops_compile.cache_clear()
    assert fresh()(3) == 1.5
    assert "compiling" in caplog.text
    loaded = fresh()
    [folder] = (tmp_path / "cache").iterdir()
    if damage == "folder gone":
        shutil.rmtree(folder)
    elif damage.startswith("file"):
        shutil.rmtree(folder)
        folder.write_bytes(b"")
    else:
        [file] = folder.glob("*.nbi" if damage.startswith("index") else "*.nbc")
        file.write_bytes(file.read_bytes()[:20])
    caplog.clear()
    assert loaded(3) == 1.5 and not loaded.stats.cache_hits
    if damage.startswith("file"):
        assert "compiled loops could not be kept" in caplog.text
    else:
        # the next process loads what this one kept
        again = fresh()
        assert again(3) == 1.5 and again.stats.cache_hits
        assert "could not" not in caplog.text


def test_the_first_step_of_a_process_does_not_load_numbas_compiler() -> None:
    """With its loops kept on disk the first lookup spent 0.4 of 0.6 s on what numba needs for compiling alone."""
    # the first keeps whatever was not kept yet
    run(STEP, [ROOT, ROOT / "tests", ROOT / "tests" / "support"])
    compiler, stderr = run(STEP, [ROOT, ROOT / "tests", ROOT / "tests" / "support"])
    assert not compiler
    assert "compiling" not in stderr

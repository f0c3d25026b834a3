"""Loops of the CPU that an earlier process compiled: how they load, and what a process says that compiles them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

pytest.importorskip("numba")

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


def test_the_first_step_of_a_process_does_not_load_numbas_compiler() -> None:
    """With its loops kept on disk the first lookup spent 0.4 of 0.6 s on what numba needs for compiling alone."""
    # the first keeps whatever was not kept yet
    run(STEP, [ROOT, ROOT / "tests", ROOT / "tests" / "support"])
    compiler, stderr = run(STEP, [ROOT, ROOT / "tests", ROOT / "tests" / "support"])
    assert not compiler
    assert "compiling" not in stderr

"""The compiled loops of the CPU turned off: by a variable of ours, and by numba's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardwise.kernels import _op

# a step of every kind of op that has loops; whether one was imported, and numba at all
_STEP = """
import sys, warnings
warnings.simplefilter("error")
import torch
from shardwise import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, RowWiseAdagrad
from shardwise import apply_optimizer_in_backward
from shardwise.kernels import jagged_softmax, segment_sum, unique_ids

tables = [EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["f"])]
ebc = EmbeddingBagCollection(tables)
apply_optimizer_in_backward(RowWiseAdagrad, ebc.parameters(), {"lr": 0.1})
before = ebc.state_dict()["embedding_bags.t.weight"].clone()
kjt = KeyedJaggedTensor(["f"], torch.tensor([1, 1, 3]), lengths=torch.tensor([2, 1]))
out = ebc(kjt).values()
assert torch.equal(out[1], before[3]), out
out.sum().backward()
changed = (ebc.state_dict()["embedding_bags.t.weight"] != before).any(1).nonzero().flatten().tolist()
assert changed == [1, 3], changed
assert kjt["f"].to_padded_dense().tolist() == [[1, 1], [3, 0]]
assert unique_ids(torch.tensor([5, 2, 5]))[0].tolist() == [2, 5]
assert segment_sum(torch.tensor([0, 2, 3]), torch.ones(3)).tolist() == [2, 1]
assert torch.equal(jagged_softmax(torch.zeros(2, 1), torch.tensor([0, 2])), torch.full((2, 1), 0.5))
loops = [name for name in sys.modules if name.startswith("shardwise.kernels") and name.endswith("_loops")]
print(*sorted(name.rpartition(".")[2] for name in loops), "numba" in sys.modules)
"""


def run(step: str = _STEP, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **variables}
    return subprocess.run([sys.executable, "-c", step], capture_output=True, text=True, timeout=120, env=environment)


@pytest.mark.parametrize(
    ("variables", "numba", "before"),
    [
        ({"SHARDWISE_NUMBA": "0"}, False, ""),
        ({"NUMBA_DISABLE_JIT": "1"}, True, ""),
        ({}, True, "import sys\nsys.modules['numba'] = None\n"),
    ],
    ids=["ours", "numba's own", "not installed"],
)
def test_a_step_runs_on_torch_where_compiled_loops_are_off(variables: dict[str, str], numba: bool, before: str) -> None:
    """NUMBA_DISABLE_JIT=1 broke every lookup: the loops were Python, which cannot read an address.

    There was no other way to turn them off but to uninstall numba.
    """
    pytest.importorskip("numba")
    done = run(before + _STEP, **variables)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["numba_loops", str(numba)]


def test_nothing_is_imported_of_numba_before_the_first_update() -> None:
    done = run("import sys, shardwise.kernels; assert 'numba' not in sys.modules")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("value", "on"), [(None, True), ("", True), ("1", True), ("0", False)])
def test_the_switch_is_on_where_it_is_not_set(value: str | None, on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDWISE_NUMBA", raising=False)
    if value is not None:
        monkeypatch.setenv("SHARDWISE_NUMBA", value)
    assert _op._switch("SHARDWISE_NUMBA") is on


def test_another_value_of_the_switch_is_named_at_import() -> None:
    done = run(SHARDWISE_NUMBA="off")
    assert done.returncode != 0
    assert "ValueError: environment variable SHARDWISE_NUMBA='off': expected 0 (off) or 1 (on" in done.stderr


def test_a_numba_that_does_not_import_is_said_once_and_torch_does_the_work(tmp_path: Path) -> None:
    """numba refuses a numpy that is newer than it: DistributedModelParallel with replicas raised that ImportError.

    Lookups and updates said it for each file of loops.
    """
    (tmp_path / "numba").mkdir()
    (tmp_path / "numba" / "__init__.py").write_text("raise ImportError('Numba needs NumPy 2.4 or less')")
    step = _STEP.replace('simplefilter("error")', 'simplefilter("always")')
    step += "from shardwise.kernels.numba_loops import arithmetic, compiles\nprint(arithmetic()[0], compiles())\n"
    done = run(step, PYTHONPATH=os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["numba_loops False", "torch alone False"]
    assert done.stderr.count("numba does not work here, its loops run on torch: ImportError: Numba needs NumPy") == 1
    assert done.stderr.count("numba does not work here") == 1

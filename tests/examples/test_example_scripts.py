"""The example scripts run as printed, and between them they show every public name.

Takes half a minute: the scripts train.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys

import pytest
from checkout import ROOT, without_gloo
from forked import run_script

import shardwise

EXAMPLES = ROOT / "examples"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


def run(*command: str) -> str:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=env, timeout=300, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "Warning" not in done.stderr, done.stderr
    return without_gloo(done.stdout)


# alone a script takes the paths of one process, which its own tests and those of two ranks tell as well
ranks_of_pairs = pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])


def test_quickstart_says_what_it_did() -> None:
    printed = run("examples/quickstart.py")
    assert '"clicked": [[101, 202], [], [303]]' in printed
    assert "pooled: {'clicked': (3, 8), 'user': (3, 4)}" in printed
    assert "IndexError: feature 'clicked' (table 'item'), sample 0: id 1000 is outside [0, 1000)" in printed
    assert "ignored: 0.0" in printed


@pytest.mark.full
def test_every_optimizer_of_the_example_learns() -> None:
    found = re.findall(r"(\w+)(?: \(a rule\))?: loss (\S+) -> (\S+)", run_script("examples/optimizers.py"))
    assert [name for name, _, _ in found][:2] == ["Lion", "SGD"] and len(found) == 9
    assert all(float(last) < 0.3 * float(first) for _, first, last in found)


def test_jagged_takes_a_batch_apart_and_puts_it_together() -> None:
    printed = run_script("examples/jagged.py")
    assert '"clicked": [[11, 12], [], [13]]' in printed
    said = ["fits its tables: True", "same lists: True True", "arrived: [['clicked'], ['tag']]", "same batch: True"]
    said += ["towers: {'item tower': (3, 5), 'query tower': (3, 4)}", "same columns: True"]
    assert printed.splitlines()[-6:] == said


def test_quantized_tables_in_pieces_give_the_same_bits() -> None:
    said = run_script("examples/quantize_sharded.py").splitlines()
    assert len([line for line in said if line.endswith("same bits: True")]) == 4
    assert "embedding_bags.place.shards.1.weight: [100, 8] at [0, 8] of embedding_bags.place.weight" in said


@pytest.mark.ranks
@ranks_of_pairs
def test_planning_plans_for_a_cluster_and_trains_here(ranks: int) -> None:
    printed = run_script("examples/planning.py", ranks=ranks)
    assert "Plan: 6 tables on 8 ranks (2 hosts of 4)" in printed and "INSUFFICIENT_STORAGE" in printed
    assert printed.splitlines()[-1] == "trained a step by plan0.json: pooled (4, 384)"


@pytest.mark.full
@pytest.mark.ranks
@ranks_of_pairs
def test_sharded_learns_its_labels(ranks: int) -> None:
    # as printed in its docstring: by the launcher
    printed = run_script("examples/sharded.py") if ranks == 1 else run(*TORCHRUN, "examples/sharded.py")
    found = re.search(r"loss (\S+) -> (\S+); pooled \(8, 32\)", printed)
    assert found, printed
    assert float(found[2]) < 0.1 * float(found[1])
    assert f"rank:{ranks - 1}/cpu" in printed


@pytest.mark.ranks
@ranks_of_pairs
def test_managed_collision_learns_ids_that_come_and_go(ranks: int) -> None:
    said = run_script("examples/managed_collision.py", ranks=ranks).splitlines()
    first, last = re.findall(r"loss (\S+) -> (\S+)", said[-1])[0]
    assert float(last) < 0.1 * float(first)
    served = ["users of the last days with a row of their own: 8 of 8", "quantized, their labels are right: True"]
    assert said[1:-1] == (served if ranks == 1 else [])


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 4])
def test_every_strategy_trains_as_one_process(ranks: int) -> None:
    said = run_script("examples/sharding.py", ranks=ranks).splitlines()
    steps = [line for line in said if line.startswith("step")]
    assert steps == [f"step {n}: as in one process: True" for n in range(3)]
    assert "resharded: as in one process: True" in said
    assert "compressed: off by less than 1e-3: True" in said
    assert any(" | row_wise " in line for line in said) and any("| grid_shard " in line for line in said)
    assert ("2 replicas of 2 ranks: averaged" in said) == (ranks == 4)


@pytest.mark.ranks
@ranks_of_pairs
def test_micro_batches_train_alike_in_a_loop_and_in_a_pipeline(ranks: int) -> None:
    said = run_script("examples/accumulation.py", ranks=ranks)
    found = re.findall(r"(loop|pipeline): loss (\S+) -> (\S+)", said)
    assert [name for name, _, _ in found] == ["loop", "pipeline"]
    assert found[0][1:] == found[1][1:] and float(found[0][2]) < 0.1 * float(found[0][1])
    assert float(said.split()[-1]) > 0.1


@pytest.mark.ranks
@ranks_of_pairs
def test_a_checkpoint_goes_on_under_another_plan(ranks: int) -> None:
    said = run_script("examples/checkpoint.py", ranks=ranks).splitlines()
    assert said[0] == "loaded step 10, epoch 1, problems: []"
    assert said[1] == "goes on as if nothing had happened: True"


@pytest.mark.ranks
@ranks_of_pairs
def test_every_pipeline_makes_the_steps_of_a_plain_loop(ranks: int) -> None:
    said = run_script("examples/pipeline.py", ranks=ranks).splitlines()
    names = ("plain", "TrainPipelineBase", "TrainPipelineSparseDist", "PrefetchTrainPipelineSparseDist", "stages")
    assert [line for line in said if "same bits" in line] == [f"{name}: same bits: True" for name in names]
    assert said[-1].startswith("evaluated 12 batches, mean loss 0.")


def test_every_public_name_is_in_an_example() -> None:
    used = {
        alias.name
        for path in EXAMPLES.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "shardwise"
        for alias in node.names
    }
    # scripts read the version as an attribute
    assert set(shardwise.__all__) - used == {"__version__"}


def test_every_public_name_is_in_the_changelog() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    missing = [name for name in shardwise.__all__ if not name.startswith("_") and f"`{name}`" not in text]
    assert not missing

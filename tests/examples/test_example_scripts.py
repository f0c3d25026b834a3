"""The example scripts run as printed, and between them they show every public name.

Takes half a minute: the scripts train."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest
from checkout import ROOT, run_python, without_gloo
from forked import run_script

import shardwise
from shardwise import models, quant

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")


def run(*command: str) -> str:
    done = run_python(*command, folder=ROOT)
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


def test_rows_lie_in_a_store_of_ones_own() -> None:
    lines = run_script("examples/tier_lmdb.py").splitlines()
    if importlib.util.find_spec("lmdb") is None:
        assert lines.pop(0) == "lmdb is not installed: rows lie in a dict"
    assert lines[0].startswith("1000 of 5000 rows on the device; read ")
    assert lines[1:] == ["same bits as with all rows on the device: True"]


def test_a_store_keeps_checkpoints_as_a_folder_does(tmp_path: Path) -> None:
    for url in ("memory://bucket/runs/7", f"file://{tmp_path}/run"):
        lines = run_script("examples/recipes/object_storage.py", url).splitlines()
        assert lines == [
            "kept: ['step-000000000020', 'step-000000000030']",
            f"{url.removeprefix('file://')}/step-000000000030: step 30, problems: []",
            "goes on as if nothing had happened: True",
            "for two ranks: ['rank-00000.safetensors', 'rank-00001.safetensors']",
            "left: []",
        ]


@pytest.mark.parametrize("below", ["ram", "file"])
def test_a_table_eight_times_the_device_trains_to_the_same_bits(below: str, tmp_path: Path) -> None:
    file = ("--file", str(tmp_path)) if below == "file" else ()
    lines = run_script("examples/tiers.py", "--steps", "24", *file).splitlines()
    assert lines[0] == f"item: 10.6 MB, the device has room for 1.3 MB of it: 10000 slots over {below}"
    metrics = next(line for line in lines if line.startswith("item: 10,000 slots of 80,000 rows over"))
    regret = next(line for line in lines if line.startswith("item: regret"))
    assert 0 < float(re.findall(r"hit rate ([\d.]+)%", metrics)[0]) < 100 and 0 <= float(regret[13:].split("%")[0]) < 20
    scores = re.findall(r"loss (\S+) -> (\S+), test AUC (\S+)", "\n".join(lines))
    assert len(scores) == 2 and scores[0] == scores[1]
    assert [line.split(":")[1] for line in lines[-3:]] == [" True"] * 3 and all("to the bit" in x for x in lines[-3:])


def test_a_canary_says_what_it_needs() -> None:
    lines = run_script("examples/canary.py").splitlines()
    assert lines[0].startswith("torchrec is not installed")
    assert lines[1] == "canary tries tables of a TorchRec model on shardwise, and torchrec is not imported here"


@pytest.mark.full
def test_every_optimizer_of_the_example_learns() -> None:
    losses = re.findall(r"(\w+)(?: \(a rule\))?: loss (\S+) -> (\S+)", run_script("examples/optimizers.py"))
    assert [name for name, _, _ in losses][:2] == ["Lion", "SGD"] and len(losses) == 9
    assert all(float(last) < 0.3 * float(first) for _, first, last in losses)


def test_jagged_takes_a_batch_apart_and_puts_it_together() -> None:
    printed = run_script("examples/jagged.py")
    assert '"clicked": [[11, 12], [], [13]]' in printed
    expected = ["fits its tables: True", "same lists: True True", "arrived: [['clicked'], ['tag']]", "same batch: True"]
    expected += ["towers: {'item tower': (3, 5), 'query tower': (3, 4)}", "same columns: True"]
    assert printed.splitlines()[-6:] == expected


def test_quantized_tables_in_pieces_give_the_same_bits() -> None:
    lines = run_script("examples/quantize_sharded.py").splitlines()
    assert len([line for line in lines if line.endswith("same bits: True")]) == 4
    assert "embedding_bags.place.shards.1.weight: [100, 8] at [0, 8] of embedding_bags.place.weight" in lines


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
    losses = re.search(r"loss (\S+) -> (\S+); pooled \(8, 32\)", printed)
    assert losses, printed
    assert float(losses[2]) < 0.1 * float(losses[1])
    assert f"rank:{ranks - 1}/cpu" in printed


@pytest.mark.ranks
@ranks_of_pairs
def test_managed_collision_learns_ids_that_come_and_go(ranks: int) -> None:
    lines = run_script("examples/managed_collision.py", ranks=ranks).splitlines()
    first, last = re.findall(r"loss (\S+) -> (\S+)", lines[-1])[0]
    assert float(last) < 0.1 * float(first)
    served = ["users of the last days with a row of their own: 8 of 8", "quantized, their labels are right: True"]
    assert lines[1:-1] == (served if ranks == 1 else [])


@pytest.mark.ranks
@pytest.mark.full
@pytest.mark.parametrize("ranks", [1, 4])
def test_every_strategy_trains_as_one_process(ranks: int) -> None:
    lines = run_script("examples/sharding.py", ranks=ranks).splitlines()
    steps = [line for line in lines if line.startswith("step")]
    assert steps == [f"step {n}: as in one process: True" for n in range(3)]
    assert "resharded: as in one process: True" in lines
    assert "compressed: off by less than 1e-3: True" in lines
    assert any(" | row_wise " in line for line in lines) and any("| grid_shard " in line for line in lines)
    assert ("2 replicas of 2 ranks: averaged" in lines) == (ranks == 4)
    assert ("fully sharded: as averaged: True" in lines) == (ranks == 4)


@pytest.mark.full
@pytest.mark.ranks
@ranks_of_pairs
def test_micro_batches_train_alike_in_a_loop_and_in_a_pipeline(ranks: int) -> None:
    output = run_script("examples/accumulation.py", ranks=ranks)
    losses = re.findall(r"(loop|pipeline): loss (\S+) -> (\S+)", output)
    assert [name for name, _, _ in losses] == ["loop", "pipeline"]
    assert losses[0][1:] == losses[1][1:] and float(losses[0][2]) < 0.1 * float(losses[0][1])
    assert float(output.split()[-1]) > 0.1


@pytest.mark.ranks
@ranks_of_pairs
def test_a_checkpoint_goes_on_under_another_plan(ranks: int) -> None:
    lines = run_script("examples/checkpoint.py", ranks=ranks).splitlines()
    assert lines[0] == "loaded step 10, epoch 1, problems: []"
    assert lines[1] == "goes on as if nothing had happened: True"


@pytest.mark.full
@pytest.mark.ranks
@ranks_of_pairs
def test_every_pipeline_makes_the_steps_of_a_plain_loop(ranks: int) -> None:
    lines = run_script("examples/pipeline.py", ranks=ranks).splitlines()
    names = ("plain", "TrainPipelineBase", "TrainPipelineSparseDist", "PrefetchTrainPipelineSparseDist", "stages")
    assert [line for line in lines if "same bits" in line] == [f"{name}: same bits: True" for name in names]
    assert lines[-1].startswith("evaluated 12 batches, mean loss 0.")


def test_every_public_name_is_in_an_example() -> None:
    used = {
        alias.name
        for path in (ROOT / "examples").rglob("*.py")
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


def test_the_example_quantizes_moves_prunes_and_converts() -> None:
    output = run_script("examples/quantize.py")
    assert "(user): QuantizedRows(5000 x 64, int4, float16 scales)" in output
    assert output.count("same") == output.count("same rows: True") + output.count("same again: True") == 2
    assert "through TorchRec's names: True" in output and "FUSED_NBIT [1000, 68] True" in output
    assert "behind maps: True KeyedTensor True\nbehind maps: True dict True" in output
    assert "5.8 times smaller, off by 0.000" in output and "quantized: [True, True, True]" in output
    assert "outputs: torch.float16 tables: ['INT8', 'INT8']" in output and "on cpu" in output
    assert "(item): QuantizedRows(1 for 1000 ids x 64, int8, float16 scales)" in output
    assert "rows of zeros: {'clicked': [True, True], 'bought': [True, False], 'user': [False, True]}" in output
    assert output.splitlines()[-2:] == [
        "72 16", "prepared: ['EmbeddingBagCollection', 'EmbeddingBagCollection', 'EmbeddingCollection']"
    ]  # fmt: skip


def test_every_name_of_quant_is_in_an_example() -> None:
    used = {
        node.attr
        for path in (ROOT / "examples").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "quant"
    }
    assert set(quant.__all__) - used == set()


def test_every_model_of_the_example_learns_and_every_part_runs() -> None:
    printed = run_script("examples/models.py")
    losses = re.findall(r"(\w+): loss (\S+) -> (\S+)", printed)
    assert [name for name, *_ in losses] == [
        "DLRM", "DLRM_DCN", "DLRM_Projection", "DLRM_Transformer", "SimpleDeepFMNN", "DLRMWrapper",
        "SimpleDeepFMNNWrapper",
    ]  # fmt: skip
    assert all(float(last) < 0.9 * float(first) for _, first, last in losses), losses
    lines = printed.splitlines()[len(losses) :]
    assert [line.split(":")[1].strip() for line in lines[:4]] == ["(5, 32)"] * 4
    assert lines[4:] == [
        "interactions: 32, 10, 32 columns; pairs of 4: 6",
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


@pytest.mark.full
def test_export_serves_and_reads_what_it_wrote() -> None:
    lines = run_script("examples/export.py").splitlines()
    assert lines[:3] == [
        "user: int8, 3.56x smaller than fp32", "clicked: int4, 6.40x smaller than fp32", "same bits: True",
    ]  # fmt: skip
    assert lines[3].startswith(
        "IndexError: feature 'clicked' (table 'clicked'), sample 0: id 1000 is outside [0, 1000)"
    )
    assert lines[4] == "rows: (2, 32) pooled: (2, 32)"
    assert lines[5].startswith("['probability'] [0.")
    assert lines[6].startswith("ModelDamaged: clicks/program.pt2 has 0 bytes, it was written with")

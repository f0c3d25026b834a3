"""Golden files of a release: what every later version has to read, and the values that it has to find in them.

python tests/compat/write_golden.py        golden/<version>/, before a release; never again for one that is out
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
GOLDEN = HERE / "golden"
MOST_BYTES = 200_000
TRACE_IDS = [[1, 2, 2, 900], [5], [0, 70_000, 899]]


def main() -> None:
    # this checkout, wherever an editable install points
    sys.path[:0] = [str(ROOT), str(HERE.parent / "support")]
    from record import FROZEN, version_of_tree

    version = version_of_tree()
    about = FROZEN / version / "about.json"
    if about.exists() and json.loads(about.read_text())["released"]:
        raise SystemExit(f"{version} is released: its golden files stay as they are")
    folder = GOLDEN / version
    shutil.rmtree(folder, ignore_errors=True)
    write(folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder.relative_to(ROOT)}: {size} bytes")
    assert size < MOST_BYTES, f"golden files are small: at most {MOST_BYTES} bytes"


def write(folder: Path) -> None:
    """All golden files, and beside them the values that are expected."""
    # by its name: ranks import it
    from ranks import run_ranks
    from write_golden import save_by_ranks

    folder.mkdir(parents=True)
    run_ranks(2, save_by_ranks, str(folder))
    _write_collisions(folder)
    _write_model(folder)
    expected = {f"ranks/{key}": value for key, value in assembled(step_of(folder / "ranks")).items()}
    expected |= {f"collisions/{key}": value for key, value in assembled(step_of(folder / "collisions")).items()}
    save_file({**expected, **load_file(folder / "outputs.safetensors")}, folder / "expected.safetensors")
    (folder / "outputs.safetensors").unlink()
    # of saves that run at the same time
    for lock in folder.rglob(".lock"):
        lock.unlink()
    _write_small_files(folder)


def save_by_ranks(folder: str) -> None:
    """On each rank: train by the mixed plan, save."""
    import golden_nets

    from shardwise import checkpoint

    model, optimizer = golden_nets.net("mixed")
    golden_nets.train(model, optimizer, range(3))
    checkpoint.save(Path(folder) / "ranks", model, optimizer, step=3, extra={"epoch": 1}).wait()


def _write_collisions(folder: Path) -> None:
    import golden_nets

    from shardwise import checkpoint

    model = golden_nets.collisions()
    for step in range(4):
        model(golden_nets.far_ids(step))
    checkpoint.save(folder / "collisions", model, step=4).wait()


def _write_model(folder: Path) -> None:
    import golden_nets

    from shardwise import DataType
    from shardwise.inference import Signature, export_model, load_program, quantize_inference_model

    torch.manual_seed(13)
    names = {"q8": torch.qint8, "q4": torch.quint4x2, "q16": torch.float16}
    float_model = golden_nets.collection(dict.fromkeys(names, (20, DataType.FP32)))
    model = quantize_inference_model(float_model, per_table_weight_dtype=names)
    export_model(model, folder / "served", signature=Signature([*names]))
    outputs = load_program(folder / "served")(*served_batch())
    save_file({f"served/{name}": value.contiguous() for name, value in outputs.items()}, folder / "outputs.safetensors")


def served_batch() -> tuple[Tensor, Tensor]:
    """Values and lengths of a request for the exported model."""
    return torch.arange(18) * 7 % 20, torch.tensor([[1, 2, 3], [2, 2, 2], [0, 1, 5]])


def _write_small_files(folder: Path) -> None:
    from click.testing import CliRunner

    from shardwise import cli
    from shardwise.data import TracedTable, TraceWriter
    from shardwise.planner.constants_measured import CARDS

    with tempfile.TemporaryDirectory() as scratch:
        tables = Path(scratch) / "tables.json"
        rows = [{"name": f"t{n}", "num_embeddings": 1000 * (n + 1), "embedding_dim": 16} for n in range(3)]
        tables.write_text(json.dumps(rows))
        words = f"plan --tables {tables} --world-size 2 --hbm 1GiB --batch-size 64 --out {folder / 'plan.json'} --json"
        result = CliRunner().invoke(cli.commands(), words.split())
        assert result.exit_code == 0, result.output
    # the folder of this machine is nobody's business
    text = (folder / "plan.json").read_text()
    (folder / "plan.json").write_text(text.replace(scratch, "/tables"))
    with TraceWriter(folder / "trace.npz", [TracedTable("t", 80_000, 16, "FP32", 64)]) as writer:
        for ids in TRACE_IDS:
            writer.add(4, {"t": torch.tensor(ids)})
    CARDS["h100"].constants.save(folder / "constants.json")
    entry: dict[str, Any] = {"kernel": "gather", "dtype": "fp32", "dim": 64, "length": 1, "triton": "3.7.1"}
    tuned = {
        "shardwise_tuned": 1, "device": "NVIDIA H100", "architecture": "sm_90",
        "entries": [{**entry, "config": {"rows": 4, "columns": 64, "warps": 2}}],
        "cpu": [{"setting": "lookup_few_ids", "threads": 2, "value": 4096}],
    }  # fmt: skip
    (folder / "tuned.json").write_text(json.dumps(tuned, indent=1) + "\n")


def step_of(folder: Path) -> Path:
    """The one step that is saved there."""
    (step,) = folder.glob("step-*")
    return step


def assembled(step: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint as a whole, by "kind/name/state": read by json and safetensors, without us."""
    facts = json.loads((step / "manifest.json").read_text())
    files = {file["name"]: load_file(step / file["name"]) for file in facts["files"]}
    whole: dict[str, Tensor] = {}
    for piece in facts["tensors"]:
        name, tensor = "/".join([piece["kind"], piece["name"], piece["state"]]), files[piece["file"]][piece["key"]]
        if piece["rows"] is None:
            whole[name] = tensor
            continue
        table = facts["tables"][piece["name"]]
        (top, bottom), (left, right) = piece["rows"], piece["columns"]
        size = (table["rows"], table["dim"])[: tensor.dim()]
        # nothing that is left out looks right
        into = whole.setdefault(name, torch.full(size, float("nan"), dtype=tensor.dtype))
        if tensor.dim() == 1:
            into[top:bottom] = tensor
        else:
            into[top:bottom, left:right] = tensor
    return whole


if __name__ == "__main__":
    main()

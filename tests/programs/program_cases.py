"""The programs of this folder with their arguments, and how they are started: by TorchRec to record, by us to compare.

python tests/programs/program_cases.py PYTHON     writes golden/programs.json with the TorchRec of that interpreter
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shardwise.sharding.testing.environment import get_free_port

FOLDER = Path(__file__).resolve().parent
GOLDEN = FOLDER.parent / "support" / "golden" / "programs.json"
# rows of Criteo's tables and ids of each, shrunk, as MLPerf's setting has them
_ROWS = ",".join(str((200, 50, 3, 100)[table % 4]) for table in range(26))
_HOTS = ",".join(str((1, 3, 2, 5)[table % 4]) for table in range(26))


@dataclass(frozen=True)
class Program:
    """A script, its arguments ({rows} and {out} are folders), and the number of ranks; 0 is a plain process."""

    script: str
    arguments: Sequence[str] = ()
    ranks: int = 2
    # of the largest number of its losses
    tolerance: float = 1e-6


PROGRAMS = {
    "dlrm": Program(
        "dlrm/dlrm_main.py",
        [
            *("--in_memory_binary_criteo_path", "{rows}", "--num_embeddings", "200", "--batch_size", "24"),
            *("--lr_warmup_steps", "4", "--lr_decay_start", "10", "--lr_decay_steps", "12", "--shuffle_batches"),
        ],
    ),
    "mlperf": Program(
        "dlrm/dlrm_main.py",
        [
            *("--in_memory_binary_criteo_path", "{rows}", "--num_embeddings_per_feature", _ROWS),
            *("--multi_hot_sizes", _HOTS, "--adagrad", "--interaction_type", "dcn", "--batch_size", "24"),
            *("--learning_rate", "0.02", "--shuffle_training_set", "--print_sharding_plan"),
        ],
    ),
    "golden_training": Program("golden_training/train_dlrm.py"),
    "two_tower_train": Program("retrieval/two_tower_train.py", ["--save_dir", "{out}"]),
    "two_tower_retrieval": Program("retrieval/two_tower_retrieval.py", ["--load_dir", "{out}"], ranks=0),
    "bert4rec": Program("bert4rec/bert4rec_main.py"),
    "bert4rec_ddp": Program("bert4rec/bert4rec_main.py", ["--mode", "ddp"]),
    "prediction": Program("prediction/predict_using_torchrec.py", ranks=0),
    "ebc_benchmarks": Program("benchmarks/ebc_benchmarks.py", ["--cpu_only"], ranks=0),
}


def run_program(
    program: Program, command: Sequence[str], path: Sequence[str], rows: Path, out: Path
) -> dict[str, list[Any]]:
    """The losses that `command script arguments` prints, each rank a process with torchrun's environment."""
    port = get_free_port()
    arguments = [argument.format(rows=rows, out=out) for argument in program.arguments]
    processes = []
    for rank in range(max(program.ranks, 1)):
        world = str(max(program.ranks, 1))
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        env = {
            **os.environ,
            **(place if program.ranks else {}),
            **{"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"},
            "PYTHONPATH": os.pathsep.join([*path, str(FOLDER)]),
        }
        processes.append(
            subprocess.Popen(
                [*command, str(FOLDER / program.script), *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=out,
                env=env,
            )  # fmt: skip
        )
    printed = [process.communicate(timeout=400) for process in processes]
    failed = [stderr for process, (_, stderr) in zip(processes, printed, strict=True) if process.returncode]
    assert not failed, "\n".join(failed)
    (line,) = [line for line in printed[0][0].splitlines() if line.startswith("losses: ")]
    losses: dict[str, list[Any]] = json.loads(line.removeprefix("losses: "))
    return losses


def make_rows(folder: Path) -> Path:
    """A folder of Criteo-like rows."""
    subprocess.run([sys.executable, str(FOLDER / "dlrm" / "make_rows.py"), str(folder)], check=True)
    return folder


def main() -> None:
    """Record what TorchRec gives."""
    python = sys.argv[1]
    with tempfile.TemporaryDirectory() as rows, tempfile.TemporaryDirectory() as out:
        make_rows(Path(rows))
        path = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        losses = {}
        for name, program in PROGRAMS.items():
            losses[name] = run_program(program, [python], path, Path(rows), Path(out))
            print(name, {key: len(values) for key, values in losses[name].items()}, flush=True)
    code = "import json, torch, torchrec; print(json.dumps([torch.__version__, torchrec.__version__]))"
    torch, torchrec = json.loads(
        subprocess.run([python, "-c", code], check=True, capture_output=True, text=True, cwd="/").stdout
    )
    GOLDEN.write_text(json.dumps({"versions": {"torch": torch, "torchrec": torchrec}, "losses": losses}, indent=1))


if __name__ == "__main__":
    main()

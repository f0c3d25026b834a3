"""Next steps once a run is over: commands that work as they stand, from the folder that it was started in."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from arguments import Options
from beside import folder_of

from shardwise.data import Batch
from shardwise.planner.plan.files import table_to
from shardwise.planner.plan.planned import Planned

# of a file beside the page
TABLES = "_tables.json"
# ids of a feature that a request shows
SHOWN_IDS = 3


@dataclass(frozen=True)
class Step:
    """A command, and what it is for."""

    what: str
    command: str


def next_steps(
    args: Options, world_size: int, best: Path | Any, request: Mapping[str, Any], tables: Path | None
) -> list[Step]:
    """What the files of this run allow: `best` is the checkpoint of the best epoch, `tables` the file of tables."""
    python = _program(sys.executable)
    examples = _short(Path(__file__).resolve().parents[1])
    steps = []
    served = args.export
    if served is None and best is not None and args.checkpoint_dir is not None:
        # what serves is a folder; beside a store it is one of its name here
        folder = folder_of(args)
        served = folder.parent / "served" if isinstance(folder, Path) else Path(folder.name) / "served"
        factory = f"{examples / 'dlrm' / 'serving.py'}:from_checkpoint"
        parts = [python, "-m", "shardwise", "export", served, "--model", factory, "--checkpoint", best, "--force"]
        steps.append(Step("export the best epoch, its tables int8, into a folder that serves", _line(*parts)))
    if served is not None:
        steps += [
            Step("serve it over HTTP", _line(python, examples / "serve" / "server.py", "--folder", served)),
            Step(
                "and ask it, from another terminal",
                "curl localhost:8000/predict -H 'Content-Type: application/json'"
                f" -d {shlex.quote(json.dumps({'instances': [request]}))}",
            ),
        ]
    if args.checkpoint_dir is not None:
        steps.append(Step("resume: train three epochs more", _resumed(args, world_size)))
    if tables is not None:
        page = tables.with_name(tables.name.replace(TABLES, "_plan.html"))
        samples = args.batch_size // world_size
        parts = [python, "-m", "shardwise", "plan", "--tables", tables, "--world-size", 8, "--card", "h100"]
        steps.append(
            Step("plan the same tables for eight GPUs", _line(*parts, "--batch-size", samples, "--html", page))
        )
    return steps


def example_request(batch: Batch) -> dict[str, Any]:
    """A sample of a batch as the server takes it, a few ids of each feature."""
    lengths = batch.sparse_features.lengths().view(len(batch.sparse_features.keys()), -1)
    # the one with most features, so that the request shows them
    sample = int((lengths > 0).sum(0).argmax())
    features = {
        name: bags.to_dense()[sample][:SHOWN_IDS].tolist() for name, bags in batch.sparse_features.to_dict().items()
    }
    dense = [round(value, 3) for value in batch.dense_features[sample].tolist()]
    return {"dense": dense, "features": {name: ids for name, ids in features.items() if ids}}


def write_tables(planned: Planned, path: Path) -> None:
    """The tables of a plan as `shardwise plan --tables` reads them, with the ids that a sample has of each."""
    tables = [{key: value for key, value in table_to(table).items() if key != "module"} for table in planned.tables]
    path.write_text(json.dumps({"tables": tables}, indent=1) + "\n", encoding="utf-8")


def _resumed(args: Options, world_size: int) -> str:
    """The command that this process was started by, to go on."""
    argv: list[str] = []
    for part in sys.argv[1:]:
        if argv and argv[-1] == "--epochs":
            argv.pop()
        elif part not in ("--resume", "--overwrite") and not part.startswith("--epochs="):
            argv.append(part)
    parts = [*argv, "--epochs", str(args.epochs + 3), "--resume"]
    script = _short(Path(__file__).resolve().with_name("train.py"))
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return _line(_program(sys.executable), script, *parts)
    torchrun = Path(sys.executable).with_name("torchrun")
    launcher: Sequence[str] = [_program(torchrun)]
    if not torchrun.exists():
        launcher = [_program(sys.executable), "-m", "torch.distributed.run"]
    return _line(*launcher, "--standalone", f"--nproc_per_node={world_size}", script, *parts)


def _program(path: str | Path) -> str:
    # not resolved: the interpreter of an environment is a link to another one
    return str(_short(Path(path)))


def _short(path: Path) -> Path:
    """Relative to this folder, where it lies in it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _line(*parts: object) -> str:
    return shlex.join(map(str, parts))

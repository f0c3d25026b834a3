"""What the tests of checkpoints share: a small trained collection, the bytes of a folder, a checkpoint rewritten."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sharding_mixes import Mix, TableCase, batch_of, build, states_of, train, upstream_of
from torch import Tensor

from shardwise import checkpoint
from shardwise.planner.layout import TableOptions
from shardwise.sharding.checkpoint.manifest import seal as seal_manifest

MIX = Mix(
    tuple(
        TableCase(name, rows, 8, (f"f{name}",), strategy, options=TableOptions("ordered", "table"), seed=rows)
        for name, rows, strategy in (("t0", 40, "row_wise"), ("t1", 12, "column_wise"), ("t2", 7, "table_wise"))
    )
)


# under which tables have the bits of one process, whatever the plan
ORDERED = TableOptions("ordered", "table")


def mix_by(strategies: Sequence[str], pooled: bool = True) -> Mix:
    """Three tables cut by a strategy each."""
    sizes = enumerate(zip((5, 12, 7), strategies, strict=True))
    tables = [TableCase(f"t{n}", rows, 8, (f"f{n}",), cut, options=ORDERED, seed=n) for n, (rows, cut) in sizes]
    return Mix(tuple(tables), pooled)


def train_whole(mix: Mix, module: Any, steps: range) -> list[list[Tensor]]:
    """Outputs of an unsharded collection in these steps."""
    batches = [(batch_of(mix, step), upstream_of(mix, batch_of(mix, step), step)) for step in steps]
    return train(mix, module, batches, False).outputs


def trained(optimizer: str = "adam", steps: int = 2, mix: Mix = MIX) -> Any:
    """An unsharded collection after some steps."""
    module = build(mix, optimizer)
    train_whole(mix, module, range(steps))
    return module


def values_of(module: Any) -> dict[str, Tensor]:
    """Copies of weights and optimizer states."""
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return {**weights, **{f"{name} state": value.clone() for name, value in states_of(module).items()}}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether they have the same names and bits."""
    return set(a) == set(b) and all(torch.equal(value, b[name]) for name, value in a.items())


def bytes_of(folder: Path) -> dict[str, str]:
    """Checksums of all files below a folder, hidden ones too."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def rewrite(path: Path, change: Any) -> None:
    """Change the manifest of a step folder as a dict, in place, with the checksum that it has then."""
    manifest = json.loads((path / "manifest.json").read_text())
    for key in ("format", "sha256"):
        del manifest[key]
    change(manifest)
    (path / "manifest.json").write_bytes(seal_manifest(json.dumps(manifest).encode()))


def without_checksum(path: Path) -> None:
    """Make the manifest one of format 1."""
    manifest = json.loads((path / "manifest.json").read_text())
    del manifest["sha256"]
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 1}))


def seal(path: Path) -> None:
    """Make the manifest have the sizes and checksums that its files have now."""

    def change(manifest: dict[str, Any]) -> None:
        for file in manifest["files"]:
            data = (path / file["name"]).read_bytes()
            file.update(bytes=len(data), sha256=hashlib.sha256(data).hexdigest())

    rewrite(path, change)


def saved(folder: Path, optimizer: str = "adam", step: int = 1) -> Path:
    """A checkpoint of a trained collection."""
    return checkpoint.save(folder, trained(optimizer), step=step).path

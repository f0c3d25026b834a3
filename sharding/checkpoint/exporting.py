"""`export`: a checkpoint as one plain safetensors file of whole tensors, for everything that reads safetensors."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from .files import write_named
from .folder import sync_folder
from .manifest import DENSE, OPTIMIZER, TABLE, WEIGHT, Manifest, Stored
from .offline import Source


def export(path: str | os.PathLike[str], target: str | os.PathLike[str], *, states: bool = False) -> Path:
    """Write a checkpoint's tables, dense parameters and buffers, whole, by the names of the unsharded model.

    `model.load_state_dict(safetensors.torch.load_file(target))` loads it into that model, or into a sharded one.

    Args:
        path: a step folder, or a folder of them, of which the newest good one is taken.
        target: the file; one that is there is replaced at once or not at all.
        states: also the states of all optimizers, as `<parameter>/<state>`. Numbers per row of several column blocks
            are `<parameter>/<state>/<first column>:<last column + 1>`.

    Raises:
        CheckpointDamaged, FileNotFoundError, OSError: the checkpoint cannot be read, or the file not be written.
    """
    target = Path(target).absolute()
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with Source(path) as source:
            write_named(part, [(name, one, source.blocks(one)) for name, one in _whole(source.manifest, states)])
        os.replace(part, target)
        sync_folder(target.parent)
    finally:
        part.unlink(missing_ok=True)
    return target


def _whole(manifest: Manifest, states: bool) -> Iterator[tuple[str, Stored]]:
    """The tensors of the file: as if each lay in one piece."""
    names: dict[str, list[str]] = {}
    for alias, name in manifest.aliases.items():
        names.setdefault(name, []).append(alias)
    for (kind, name, state), pieces in manifest.by_address.items():
        if not states and (kind == OPTIMIZER or state != WEIGHT):
            continue
        for one in _joined(manifest, pieces) if kind == TABLE else pieces[:1]:
            if state == WEIGHT and kind in (TABLE, DENSE):
                # a parameter of several names is there by each of them, as in a state dict
                yield from ((known, one) for known in (name, *names.get(name, ())))
            else:
                blocks = {piece.columns for piece in pieces}
                place = f"/{one.columns[0]}:{one.columns[1]}" if one.columns and len(blocks) > 1 else ""
                yield f"{name}/{state}{place}", one


def _joined(manifest: Manifest, pieces: list[Stored]) -> list[Stored]:
    """The pieces as one, or as one for each column block where there are numbers per row."""
    facts, first = manifest.tables[pieces[0].name], pieces[0]
    if len(first.shape) == 2:
        return [replace(first, shape=(facts.rows, facts.dim), rows=(0, facts.rows), columns=(0, facts.dim))]
    blocks = sorted({one.columns for one in pieces if one.columns is not None})
    return [replace(first, shape=(facts.rows,), rows=(0, facts.rows), columns=columns) for columns in blocks]

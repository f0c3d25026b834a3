"""From and to torch.distributed.checkpoint, and so TorchRec: one process converts a folder, a piece at a time.

What does it (`dcp_reading.py`, `dcp_writing.py`) is loaded with the first call: torch.distributed.checkpoint takes
longer to import than all that checkpoints need otherwise.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .offline import Source, write_offline
from .places import locate
from .storage import has, is_empty

# whose names optimizer states get
NAMES = ("shardwise", "torchrec")


def from_dcp_trusted(
    dcp_folder: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    model: str | None = "model",
    optimizer: str | None = "optimizer",
    rules: Mapping[str, str] | str | None = None,
    steps: int | None = None,
    step: int | None = None,
    aliases: Mapping[str, str] | None = None,
) -> Path | Any:
    """Make a checkpoint out of what torch.distributed.checkpoint wrote; its step folder in the folder `target`.

    Trusted, because `.metadata` of such a folder is a pickle, and so is everything in it that is no tensor: whoever
    wrote the folder can run any program here. Convert only what you would run.

    The folder holds a state dict like `{"model": model.state_dict(), "optimizer": optimizer.state_dict()}`, of TorchRec
    or of shardwise, by any plan. Parameters named `...embedding_bags.<table>.weight` or `...embeddings.<table>.weight`
    are tables. Other numbers, texts and lists at the top become `extra`. One piece is in memory at a time.

    Args:
        dcp_folder: what `torch.distributed.checkpoint.save` was given, or its `FsspecWriter`: it may have a scheme.
        target: a folder of checkpoints.
        model: the key of the model's state dict; None if that is all that was saved.
        optimizer: the key of the optimizer's, which a folder without optimizer states need not have; None if there is
            none.
        rules: the tables' optimizer, for all or parameter -> rule ("lamb"), where its states do not tell: they are
            taken for those of "sgd", "rowwise_adagrad", "adagrad", "adam" or "partial_rowwise_adam".
        steps: how many updates Adam and its kin have counted, which TorchRec does not save.
        step: that of training; by default what was saved as "step", or 0.
        aliases: further names of parameters that the model has under several -> the name to keep.

    Raises:
        ValueError: something has no counterpart here; names it.
        FileNotFoundError: there is no such folder.
        OSError: a file of it is no regular one.
    """
    folder = locate(dcp_folder)
    if not has(folder, ".metadata"):
        raise FileNotFoundError(f"{folder} has no .metadata: torch.distributed.checkpoint saved nothing there")
    from .dcp_reading import Content, Saved

    content = Content(Saved(folder), model, optimizer, dict(aliases or {}))
    manifest = content.manifest(rules, steps, step)
    return write_offline(target, manifest, content.blocks)


def to_dcp(
    path: str | os.PathLike[str],
    dcp_folder: str | os.PathLike[str],
    *,
    names: str = "shardwise",
    model: str | None = "model",
    optimizer: str | None = "optimizer",
) -> Path | Any:
    """Write a checkpoint as torch.distributed.checkpoint does; the folder.

    It holds what saving `{"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step, **extra}`
    would have written, and loads into such a dict under any plan. TorchRec's keyed optimizers have no `param_groups`
    in theirs, and no counts of updates: with `names="torchrec"` these are left out, for
    `set_optimizer_step(manifest.tables[...].steps)` and the optimizer's construction to say.

    Args:
        path: a step folder, or a folder of them, of which the newest good one is taken.
        dcp_folder: a folder that is empty or not there; with a scheme torch's `FsspecWriter` writes it, and its
            `FsspecReader` reads it.
        names: whose names the states of tables get.
        model, optimizer: the keys of the state dicts; `model=None` puts the model's at the top and `optimizer=None`
            leaves all optimizers out.

    Raises:
        ValueError: the folder is not empty, or a table has states that TorchRec does not know.
        CheckpointDamaged, FileNotFoundError, OSError: the checkpoint cannot be read, or the folder not be written.
    """
    from torch.distributed.checkpoint import state_dict_saver

    from .dcp_writing import Planner, writer_of

    if names not in NAMES:
        raise ValueError(f"names must be one of {list(NAMES)}, got {names!r}")
    folder = locate(dcp_folder)
    if not is_empty(folder):
        raise ValueError(f"{folder} is not empty: torch.distributed.checkpoint would read what is there along with it")
    with Source(path) as source:
        planner = Planner(source, names, model, optimizer)
        writer = writer_of(folder)
        with warnings.catch_warnings():
            # that one process saves is what is meant
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            state_dict_saver.save({}, storage_writer=writer, planner=planner, no_dist=True)
    return folder

"""Take a checkpoint of TorchRec's into shardwise and back, in the same two processes over gloo.

Run as `python -m shardwise.perf.beside_checkpoint` where TorchRec 1.8.0 and safetensors are installed;
docs/beside_torchrec.md tells how. TorchRec trains and saves by torch.distributed.checkpoint; shardwise loads that under
another plan, trains on, saves, and what it saved goes back to TorchRec. Both sides' losses are held to those of a
TorchRec that was never interrupted. Exit status 1: they differ by more than the bound; 2: no TorchRec.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver

from .sharded_sides import Shape, Side, model_of

RANKS, STEPS, LOSS_BOUND = 2, 5, 1e-6
SHAPE = Shape(4, 50, 64, 8, 3)
OPTIMIZERS = ("sgd", "rowwise_adagrad", "adagrad")


class Case(NamedTuple):
    """The plan that TorchRec has, the one that shardwise has, and the optimizer of the tables."""

    theirs: str
    ours: str
    optimizer: str


# the sums of rowwise Adagrad are one for each block of columns, so that plan keeps the blocks and moves them
CASES = [
    Case(mine, "column_wise" if mine == "column_wise" and optimizer == "rowwise_adagrad" else other, optimizer)
    for mine, other in (("table_wise", "row_wise"), ("row_wise", "column_wise"), ("column_wise", "table_wise"))
    for optimizer in OPTIMIZERS
    if not (other == "column_wise" and optimizer == "rowwise_adagrad")
] + [Case("row_wise", "table_wise", "rowwise_adagrad")]


def sharded(side: Side, strategy: str, optimizer: str, *, first: int = 0) -> tuple[nn.Module, Any]:
    """A model and the optimizer of all of it: tables' and, for the head, Adam."""
    model = model_of(side, SHAPE, strategy, optimizer, first=first)
    head = dict(side.in_backward_optimizer_filter(model.named_parameters()))
    adam = side.KeyedOptimizerWrapper(head, partial(torch.optim.Adam, lr=0.01))
    return model, side.CombinedOptimizer([model.fused_optimizer, adam])


def save_dcp(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """As TorchRec's users save."""
    state_dict_saver.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)


def load_dcp(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """As TorchRec's users load: states have to be there to be filled."""
    for _, one in optimizer.optimizers:
        if isinstance(getattr(one, "_optimizer", None), torch.optim.Optimizer):
            one.init_state()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    state_dict_loader.load(state, checkpoint_id=folder)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])

"""Take a checkpoint of TorchRec's into shardwise and back, in the same two processes over gloo.

TorchRec trains and saves by torch.distributed.checkpoint; shardwise loads that under another plan, trains, saves, and
what it saved goes back to TorchRec, where training goes on. All losses are held to those of a TorchRec that was never
interrupted. Needs safetensors too; docs/howto/checkpoints_convert.md keeps what was printed.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from shardwise.checkpoint import diff, from_dcp_trusted, latest, load, save, to_dcp
from shardwise.perf.evidence.report import Report, Section, report_of
from shardwise.perf.suite import libraries
from shardwise.perf.suite.cases.sharded_sides import (
    Shape,
    model_of,
    train,
    worst_difference,
)
from shardwise.perf.suite.libraries import Library, ours, torchrec
from shardwise.perf.suite.ranks import of_ranks, on_ranks

# steps before the first save, between the two, and after
RANKS, STEPS, LOSS_BOUND = 2, 5, 1e-6
SHAPE = Shape(4, 50, 64, 8, 3)


class Case(NamedTuple):
    """The plan that TorchRec has, the one that shardwise has, and the optimizer of the tables."""

    theirs: str
    ours: str
    optimizer: str


class Found(NamedTuple):
    """A rank's losses in the steps after the first save: of TorchRec without a break, of shardwise, of TorchRec again.

    The last begin after the second save; `values` counts what differs where the round trip was made at once.
    """

    unbroken: list[float]
    ours: list[float]
    back: list[float]
    values: int


# sums of rowwise Adagrad are one for each block of columns in TorchRec: a plan that keeps these blocks takes them
CASES = [
    *(Case("table_wise", other, optimizer) for optimizer, other in (("sgd", "row_wise"), ("adagrad", "column_wise"))),
    Case("table_wise", "row_wise", "rowwise_adagrad"),
    *(Case("row_wise", other, optimizer) for optimizer, other in (("sgd", "column_wise"), ("adagrad", "table_wise"))),
    Case("row_wise", "table_wise", "rowwise_adagrad"),
    *(Case("column_wise", other, optimizer) for optimizer, other in (("sgd", "table_wise"), ("adagrad", "row_wise"))),
    Case("column_wise", "column_wise", "rowwise_adagrad"),
]


def sharded(side: Library, strategy: str, optimizer: str, *, first: int = 0) -> tuple[nn.Module, Any]:
    """A model and the optimizer of all of it: the tables' own and, for the head, Adam."""
    model = model_of(side, SHAPE, strategy, optimizer, first=first)
    head = dict(side.in_backward_optimizer_filter(model.named_parameters()))
    adam = side.KeyedOptimizerWrapper(head, partial(torch.optim.Adam, lr=0.01))
    return model, side.CombinedOptimizer([model.fused_optimizer, adam])


def save_theirs(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """As TorchRec's users save."""
    state_dict_saver.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=folder)


def load_theirs(model: nn.Module, optimizer: Any, folder: Path) -> None:
    """As TorchRec's users load: states have to be there to be filled."""
    for _, inner in optimizer.optimizers:
        if isinstance(getattr(inner, "_optimizer", None), torch.optim.Optimizer):
            inner.init_state()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    # without this torch looks for states of SGD on a rank that has no shard of a table, in its own checkpoints too
    planner = DefaultLoadPlanner(flatten_sharded_tensors=False)
    state_dict_loader.load(state, checkpoint_id=folder, planner=planner)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def there_and_back(case: Case, folder: Path) -> Found:
    """One case; all ranks call it together."""
    peer, own = torchrec(), ours()
    first, second, third = (range(n * STEPS, (n + 1) * STEPS) for n in range(3))
    model, optimizer = sharded(peer, case.theirs, case.optimizer)
    train(peer, SHAPE, model, optimizer, first)
    save_theirs(model, optimizer, folder / "theirs")
    unbroken = train(peer, SHAPE, model, optimizer, [*second, *third])

    on_rank_0(lambda: from_dcp_trusted(folder / "theirs", folder / "converted", step=STEPS))
    other, of_other = sharded(own, case.ours, case.optimizer, first=1)
    # nothing may be left of other values, moments and counts
    train(own, SHAPE, other, of_other, [999])
    newest = latest(folder / "converted")
    assert newest is not None
    load(newest, other, of_other)
    own_losses = train(own, SHAPE, other, of_other, second)
    saved = save(folder / "ours", other, of_other, step=2 * STEPS).path
    on_rank_0(lambda: to_dcp(saved, folder / "back", names="torchrec"))
    own_losses += train(own, SHAPE, other, of_other, third)

    again, of_again = sharded(peer, case.theirs, case.optimizer)
    train(peer, SHAPE, again, of_again, [999])
    load_theirs(again, of_again, folder / "back")
    back = train(peer, SHAPE, again, of_again, third)
    values = on_rank_0(lambda: differing_values(folder))
    return Found(unbroken, own_losses, back, values)


def differing_values(folder: Path) -> int:
    """What is not the same bits after TorchRec's checkpoint went to shardwise's format, back, and there once more."""
    to_dcp(folder / "converted", folder / "at once", names="torchrec")
    once_more = from_dcp_trusted(folder / "at once", folder / "once more", step=STEPS)
    return len(diff(folder / "converted", once_more).values)


def on_rank_0(work: Callable[[], Any]) -> Any:
    """Do it there, and have the others wait; what it returns on rank 0, 0 on the others."""
    result = work() if dist.get_rank() == 0 else 0
    dist.barrier()
    return result


def compare(folder: Path) -> Section:
    """Lines of a table of all cases, and what in them is not as it has to be."""
    lines = [
        f"Two ranks, {SHAPE} on average and a head of two layers with Adam. TorchRec trains {STEPS} steps and saves;"
        f" shardwise loads, trains {STEPS} and saves; both train {STEPS} more. Largest differences to the losses of a"
        f" TorchRec without a break, over ranks and steps; bound {LOSS_BOUND:g}.", "",
        "| plan of TorchRec | of shardwise | optimizer | its loss, first and last | shardwise | TorchRec again"
        " | tensors that a round trip changes |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]  # fmt: skip
    bad = []
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    for number, case in enumerate(CASES):
        ranks = of_ranks(there_and_back(case, folder / str(number)))
        unbroken = [rank.unbroken for rank in ranks]
        worst = worst_difference(unbroken, [rank.ours for rank in ranks])
        back = worst_difference([losses[STEPS:] for losses in unbroken], [rank.back for rank in ranks])
        ends = f"{unbroken[0][0]:.4f}, {unbroken[0][-1]:.4f}"
        lines.append(f"| {' | '.join(case)} | {ends} | {worst:.1e} | {back:.1e} | {ranks[0].values} |")
        if not max(worst, back) <= LOSS_BOUND or ranks[0].values:
            bad.append(f"{' '.join(case)}: {worst:.1e}, {back:.1e}, {ranks[0].values} tensors")
    return Section(lines, bad)


def run(options: argparse.Namespace) -> Report:
    """Go there and back with all cases, and print.

    Raises:
        ImportError: TorchRec is not installed.
    """
    libraries.torchrec()
    with tempfile.TemporaryDirectory() as folder:
        return report_of([on_ranks(RANKS, compare, Path(folder))], f"{RANKS} ranks over gloo")

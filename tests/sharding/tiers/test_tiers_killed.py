"""A run that is killed at any moment goes on from its last checkpoint, in the same scratch folder, with the same bits.

Takes some ten seconds: four processes train one after another, of which three are killed in the middle.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import context, start_fork_server
from torch import Tensor, nn

from shardwise import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    KeyedJaggedTensor,
    PrefetchTrainPipelineSparseDist,
    RowWiseAdagrad,
    apply_optimizer_in_backward,
    checkpoint,
    tiered,
)
from shardwise.planner.layout import Tier

ROWS, STEPS, SAVED, KILLS = 400, 120, 4, 3


class Model(nn.Module):
    """Two tables and a layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        configs = [EmbeddingBagConfig(ROWS, 8, f"t{n}", feature_names=[f"f{n}"]) for n in range(2)]
        self.ebc = EmbeddingBagCollection(configs)
        apply_optimizer_in_backward(RowWiseAdagrad, self.ebc.parameters(), {"lr": 0.1})
        self.over = nn.Linear(16, 1)

    def forward(self, features: KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        out = self.over(self.ebc(features).values())
        return out.square().mean(), out.detach()


def batch(step: int) -> KeyedJaggedTensor:
    ids = (ROWS * torch.rand(128, generator=torch.Generator().manual_seed(step)) ** 2).long()
    return KeyedJaggedTensor(["f0", "f1"], ids, lengths=torch.full((64,), 2))


def line_of(step: int, output: Tensor) -> str:
    return f"{step} {float(output.double().sum()).hex()}\n"


def train(folder: Path, ready: Connection) -> None:
    """From the last checkpoint to the end; a line for each step, once it is done."""
    torch.set_num_threads(1)
    model = Model()
    scratch = str(folder / "scratch")
    tiered(model, {"t0": Tier(150, "file", scratch), "t1": Tier(150, "file", scratch, ram_rows=60)})
    saved = checkpoint.steps(folder / "steps")
    begin = int(saved[-1].name.removeprefix("step-")) if saved else 0
    if saved:
        checkpoint.load(saved[-1], model)
    pipeline: Any = PrefetchTrainPipelineSparseDist(
        model, torch.optim.SGD(model.over.parameters(), 0.05), "cpu", ahead=6, prefetch=2
    )
    batches = map(batch, range(begin, STEPS))
    ready.send(begin)
    with open(folder / "lines", "a") as lines:
        for step in range(begin, STEPS):
            lines.write(line_of(step, pipeline.progress(batches)))
            lines.flush()
            if (step + 1) % SAVED == 0:
                checkpoint.save(folder / "steps", model, step=step + 1)


def start(folder: Path) -> tuple[Any, int]:
    """A process that trains, and the step from which."""
    start_fork_server()
    ours, theirs = context.Pipe()
    process = context.Process(target=train, args=(folder, theirs))
    process.start()
    theirs.close()
    try:
        assert ours.poll(60)
        return process, ours.recv()
    finally:
        ours.close()


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
@pytest.mark.ranks
def test_a_run_that_is_killed_at_any_moment_goes_on_from_its_last_checkpoint(tmp_path: Path) -> None:
    draw, begin, lines = random.Random(), 0, tmp_path / "lines"
    for _ in range(KILLS):
        process, begin = start(tmp_path)
        # some steps, among them one that saves, and a part of the next
        wanted = _lines(lines) + draw.randrange(SAVED + 1, STEPS // (KILLS + 1))
        while process.is_alive() and _lines(lines) < wanted:
            time.sleep(0.001)
        time.sleep(draw.uniform(0.0, 0.03))
        os.kill(process.pid, signal.SIGKILL)
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        # of the files of a run that is gone nothing is on the disk
        assert {path.suffix for path in (tmp_path / "scratch").iterdir()} == {".lock"}
    process, begin = start(tmp_path)
    process.join(60)
    assert process.exitcode == 0 and begin > 0

    whole = Model()
    optimizer, expected = torch.optim.SGD(whole.over.parameters(), 0.05), {}
    for step in range(STEPS):
        optimizer.zero_grad()
        loss, output = whole(batch(step))
        loss.backward()
        optimizer.step()
        expected[step] = line_of(step, output)
    # one that was killed may have begun a line, in which the next one went on
    done = [line for line in lines.read_text().splitlines(keepends=True) if line.count(" ") == 1]
    steps = [int(line.split()[0]) for line in done]
    assert [line for line, step in zip(done, steps, strict=True) if line != expected[step]] == []
    assert {*range(begin, STEPS)} <= {*steps}
    last, rows = checkpoint.full_state_dict(checkpoint.steps(tmp_path / "steps")[-1]), whole.state_dict()
    assert all(torch.equal(last[name], rows[name]) for name in rows)


def _lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0

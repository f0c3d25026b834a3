"""Kills ranks at random points of their saves, again and again, and looks each time that nothing good was lost.

    python tests/sharding/checkpoint/failing_saves.py --kills 100

Each round two ranks load the newest checkpoint and save some more, until one of them or both kill themselves
(SIGKILL) at some point: an opened file, a rename, the middle of a write, or whatever comes then. After each round

- every checkpoint that has its name is whole: checksums are right, and all numbers are of one step;
- the newest is no older than the newest that a rank said was saved;
- a rank that was left has ended by itself, with an error that is no timeout.

The next round begins on what the last one left. Points are counted in events, so that a seed is a run.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from checkpoint_cases import MIX
from sharding_mixes import build, environment, shard

from shardwise import checkpoint
from shardwise.sharding.checkpoint import files

RANKS = 2
SAVES = 3
# events of a rank in as many saves, roughly
EVENTS = 170
# events that change no file
MEMORY_ALONE = ("builtins.id", "ctypes.cdata")
HANG_SECONDS = 40.0
# how a rank ends that was not killed: it did all it should, or another rank was gone
DONE, LEFT = 0, 7


@dataclass
class Kill:
    """The event at which a rank kills itself; None lets it live."""

    at: int | None
    seen: int = 0

    def event(self, name: str, *_: Any) -> None:
        """Count one."""
        self.seen += name not in MEMORY_ALONE
        if self.seen == self.at and name not in MEMORY_ALONE:
            os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng, begin = random.Random(args.seed), time.monotonic()
    with tempfile.TemporaryDirectory() as place:
        folder, kills, rounds, newest = Path(place) / "steps", 0, 0, 0
        while kills < args.kills:
            victims = [rng.randint(1, EVENTS) if rng.random() < 0.7 else None for _ in range(RANKS)]
            ends = play(folder, victims, Path(place) / f"store{rounds}")
            kills += ends.count(-signal.SIGKILL)
            rounds += 1
            newest = expect_good(folder, ends)
        expect_good(folder, play(folder, [None] * RANKS, Path(place) / "last"))
        hidden = [entry.name for entry in folder.iterdir() if entry.name.startswith(".") and entry.name != ".lock"]
        assert hidden == [], f"leftovers {hidden}"
    seconds = time.monotonic() - begin
    print(f"{kills} kills in {rounds} rounds, {newest} steps reached, nothing lost, {seconds:.0f} s")


def play(folder: Path, victims: list[int | None], store: Path) -> list[int]:
    """How each rank of a round ended."""
    pids = [fork(lambda rank=rank, at=at: run(folder, rank, store, Kill(at))) for rank, at in enumerate(victims)]
    ends: dict[int, int] = {}
    deadline = time.monotonic() + HANG_SECONDS
    while len(ends) < len(pids):
        for rank, pid in enumerate(pids):
            if rank not in ends:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    ends[rank] = os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            for rank, pid in enumerate(pids):
                if rank not in ends:
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
            raise AssertionError(f"ranks hang after {victims}: {ends}")
        time.sleep(0.005)
    return [ends[rank] for rank in range(len(pids))]


def fork(work: Callable[[], int]) -> int:
    """The process that does some work and ends with its value."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            code = work()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return pid


def run(folder: Path, rank: int, store: Path, kill: Kill) -> int:
    """A rank's life: load the newest checkpoint, and save some more."""
    dist.init_process_group("gloo", store=dist.FileStore(str(store), RANKS), rank=rank, world_size=RANKS)
    model = shard(MIX, build(MIX, "adam"), environment())
    path, step = checkpoint.latest(folder), 0
    if path is not None:
        step = checkpoint.load(path, model).step
        assert values(model) == {float(step)}, f"rank {rank} loaded {values(model)} as step {step}"
    sys.addaudithook(kill.event)
    write_all = files.write_all

    def half(file: Any, data: Any) -> int:
        view = memoryview(data).cast("B")
        written = write_all(file, view[: len(view) // 2])
        kill.event("half of a write")
        return written + write_all(file, view[len(view) // 2 :])

    files.write_all = half
    try:
        for _ in range(SAVES):
            step += 1
            put(model, step)
            checkpoint.save(folder, model, step=step, keep_last=2, asynchronous=step % 2 == 0).wait()
            (folder.parent / f"saved{rank}").write_text(str(step))
    except RuntimeError as error:
        # of another rank, or of the process group
        assert "died in the save" in str(error) or "onnection" in str(error) or "gloo" in str(error), error
        return LEFT
    return DONE


def put(model: Any, step: int) -> None:
    """Make all numbers that the rank holds the step."""
    for param in model.parameters():
        param.data.fill_(step)
    for group in model._tables.all_groups():
        for state in group.states:
            state.fill_(step)


def values(model: Any) -> set[float]:
    """All numbers that there are in the rank's weights and states of the tables."""
    numbers: set[float] = set()
    for group in model._tables.all_groups():
        for number in range(len(group.tables)):
            for value in (group.view(number), *group.state_views(number).values()):
                if value.is_floating_point():
                    numbers |= set(value.unique().tolist())
    return numbers


def expect_good(folder: Path, ends: list[int]) -> int:
    """The newest step, of checkpoints that are all good.

    Raises:
        AssertionError: one is not, or a step that was saved is gone, or a rank ended as it should not.
    """
    assert set(ends) <= {DONE, LEFT, -signal.SIGKILL}, f"ranks ended with {ends}"
    for path in checkpoint.steps(folder):
        assert checkpoint.verify(path) == [], path
        step = checkpoint.read_manifest(path).step
        for name, value in checkpoint.full_state_dict(path).items():
            assert bool((value == step).all()), f"{path}: {name} has other numbers"
    newest = checkpoint.latest(folder)
    step = 0 if newest is None else checkpoint.read_manifest(newest).step
    saved_steps = [int(text) for rank in range(RANKS) if (text := _read(folder.parent / f"saved{rank}"))]
    assert step >= max(saved_steps, default=0), f"step {max(saved_steps)} was saved, the newest is {step}"
    return step


def _read(path: Path) -> str:
    # a kill may have left it empty
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

"""A program of TorchRec's tried on two processes: whether it ends, where it stops, and which names it took.

Each process is a rank as torchrun starts them, on the CPU, under `python -m shardwise.torchrec`. The ranks meet in a
store that outlives them; what a rank took from TorchRec it writes into a file when it ends.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import shardwise

from .names import Finding, finding

__all__ = ["NAMES_FILE", "Ending", "Trial", "try_program"]

RANKS = 2
# where a rank writes the names that it took
NAMES_FILE = "SHARDWISE_NAMES_TAKEN"
# what a rank may still take when another has failed: it may raise the same error, or wait for ever
_GRACE_S = 10.0
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+)')
_PREFIX = re.compile(r"^\[rank\d+\]: ?")


@dataclass(frozen=True)
class Ending:
    """How a rank ended: its status, None where it was stopped from outside; of an error the place and the words."""

    rank: int
    status: int | None
    place: str
    error: str


@dataclass(frozen=True)
class Trial:
    """Endings of all ranks, and what became of each name that they took."""

    endings: Sequence[Ending]
    findings: Sequence[Finding]
    seconds: float

    @property
    def works(self) -> bool:
        """Whether all ranks ended well."""
        return all(ending.status == 0 for ending in self.endings)


def try_program(program: Path, arguments: Sequence[str], timeout_s: float, port: int) -> Trial:
    """Run `program arguments` on two ranks and say what came of it; ranks that run longer are stopped.

    `port` is that of a store of this host in which the ranks meet.
    """
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        places = [Path(folder) / str(rank) for rank in range(RANKS)]
        outputs = [place.with_suffix(".err") for place in places]
        processes = [
            _start(program, arguments, rank, port, place, output)
            for rank, (place, output) in enumerate(zip(places, outputs, strict=True))
        ]
        try:
            stopped = _wait(processes, start + timeout_s)
        finally:
            # where this process is interrupted
            for process in processes:
                process.kill()
        printed = [output.read_text(errors="replace") for output in outputs]
        names = {name for place in places if place.exists() for name in json.loads(place.read_text())}
    endings = []
    for rank, (process, text) in enumerate(zip(processes, printed, strict=True)):
        place, error = _error_in(text, program) if process.returncode else ("", "")
        endings.append(Ending(rank, None if rank in stopped else process.returncode, place, error))
    return Trial(endings, [finding(name) for name in sorted(names)], time.monotonic() - start)


def _start(
    program: Path, arguments: Sequence[str], rank: int, port: int, names: Path, output: Path
) -> subprocess.Popen[bytes]:
    path = os.pathsep.join(filter(None, [str(Path(shardwise.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    env = {
        **os.environ,
        **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)},
        **{"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"},
        **{"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path},
        NAMES_FILE: str(names),
    }
    env.setdefault("OMP_NUM_THREADS", "1")
    command = [sys.executable, "-m", "shardwise.torchrec", str(program), *arguments]
    with output.open("wb") as stderr:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=stderr, env=env)


def _wait(processes: Sequence[subprocess.Popen[bytes]], deadline: float) -> set[int]:
    """Wait for all, a little longer once one has failed; returns the ranks that had to be stopped."""
    stopped: set[int] = set()
    while any(process.poll() is None for process in processes):
        if any(process.returncode for process in processes):
            deadline = min(deadline, time.monotonic() + _GRACE_S)
        if time.monotonic() > deadline:
            stopped = {rank for rank, process in enumerate(processes) if process.poll() is None}
            for rank in stopped:
                processes[rank].kill()
            break
        time.sleep(0.05)
    for process in processes:
        process.wait()
    return stopped


def _error_in(text: str, program: Path) -> tuple[str, str]:
    """The last line of the program's own folder in the last traceback, and the error itself."""
    lines = [_PREFIX.sub("", line) for line in text.splitlines()]
    begins = [number for number, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if not begins:
        return "", lines[-1].strip() if lines else ""
    place, error = "", ""
    folder = str(program.resolve().parent)
    for line in lines[begins[-1] + 1 :]:
        frame = _FRAME.match(line)
        if frame is not None and str(Path(frame[1]).resolve()).startswith(f"{folder}{os.sep}"):
            place = f"{frame[1]}:{frame[2]}"
        elif line and not line[0].isspace():
            error = line.strip()
            break
    return place, error

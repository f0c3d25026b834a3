"""Scripts in processes that begin with all imported: `run_script("examples/sharded.py", ranks=2)` is what it printed.

As `python script` or, with several ranks, as torchrun runs it, without the seconds that each process takes to import
torch. What a launcher itself does is told by tests that start one.
"""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from multiprocessing.connection import wait
from pathlib import Path

import torch
from checkout import ROOT, without_gloo
from ranks import context, count, start_fork_server

from shardwise.sharding.testing.environment import get_free_port

SECONDS = 300.0


def run_script(script: str, *argv: str, ranks: int = 1) -> str:
    """What all ranks of a script of this checkout print; each must end well and without a warning."""
    start_fork_server()
    port = get_free_port()
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder, "out"), Path(folder, "err")
        out.touch()
        err.touch()
        processes = [context.Process(target=_be, args=(folder, script, argv, n, ranks, port)) for n in range(ranks)]
        for process in processes:
            process.start()
        count(0.0, ranks)
        running = list(processes)
        # the others may wait for one that failed for ever
        while (
            running
            and not any(process.exitcode for process in processes)
            and wait([p.sentinel for p in running], SECONDS)
        ):
            running = [process for process in running if process.exitcode is None]
        for process in processes:
            # what hangs is seen by its exit code
            process.kill()
            process.join()
        printed, errors = out.read_text(), err.read_text()
    assert [process.exitcode for process in processes] == [0] * ranks, errors
    assert "Warning" not in errors, errors
    return without_gloo(printed)


def _be(folder: str, script: str, argv: tuple[str, ...], rank: int, ranks: int, port: int) -> None:
    for stream, name in ((sys.stdout, "out"), (sys.stderr, "err")):
        stream.flush()
        # ranks share a file, in which each appends whole lines
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_APPEND), stream.fileno())
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if ranks > 1:
        sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in sizes.items()}, MASTER_ADDR="127.0.0.1")
    os.chdir(ROOT)
    torch.set_num_threads(1)
    sys.argv = [script, *argv]
    sys.path[:0] = [str(ROOT / Path(script).parent), str(ROOT)]
    runpy.run_path(script, run_name="__main__")

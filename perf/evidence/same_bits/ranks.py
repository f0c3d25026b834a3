"""Ranks of a program as processes of their own, which meet by a file and leave their results as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def results_of(program: Sequence[str], world: int, *, path: Path, limit_s: float) -> list[Any]:
    """What a Python program wrote on each of `world` ranks, one thread each.

    Args:
        program: arguments of Python; --rank, --world, --store (the file by which ranks meet) and --out are added.
        path: where Python finds modules.

    Raises:
        RuntimeError: a rank failed, or all took longer than `limit_s`; has the end of the log of the first that did.
    """
    with tempfile.TemporaryDirectory() as folder:
        variables = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
        ranks = []
        for rank in range(world):
            command = [
                *(sys.executable, *program, "--rank", str(rank), "--world", str(world)),
                *("--store", f"{folder}/store", "--out", f"{folder}/{rank}.json"),
            ]
            with open(f"{folder}/{rank}.log", "w", encoding="utf-8") as log:
                ranks.append(subprocess.Popen(command, cwd=folder, env=variables, stdout=log, stderr=log))
        try:
            until = time.monotonic() + limit_s
            while time.monotonic() < until and any(process.poll() is None for process in ranks):
                # the others wait for one that failed
                if any(process.returncode for process in ranks):
                    break
                time.sleep(0.05)
            statuses = [process.poll() for process in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        if failed := [r for r, status in enumerate(statuses) if status] or [
            r for r, status in enumerate(statuses) if status is None
        ]:
            text = Path(folder, f"{failed[0]}.log").read_text(encoding="utf-8", errors="replace")
            raise RuntimeError(f"rank {failed[0]} of {world}: {text[-3000:]}")
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(world)]

"""The part of gpu_check.py that runs it again under NVIDIA's compute-sanitizer, where that is installed.

It finds what correct values do not show: accesses outside a tensor, races in shared memory, reads of what nobody wrote.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwise.perf.gpu_scripts.gpu_sizes import Sizes

# tool -> sections that are run under it; each takes tens of times as long as without
TOOLS = {"memcheck": ("correctness", "quantized_correctness", "collections"), "racecheck": ("correctness",)}
# the status that the sanitizer ends with where it found something
FOUND = 9


def sanitizer(device: str, sizes: Sizes, limit_s: float = 60) -> dict[str, Any]:
    """Small sections under each tool; nothing where there is no sanitizer.

    Raises:
        AssertionError: a tool found something; has the end of what it printed.
    """
    program = _program()
    if program is None:
        return {"note": "compute-sanitizer is not on this machine"}
    said: dict[str, Any] = {"program": Path(program).name}
    # every tensor an allocation of its own, so that an access behind one is seen
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for tool, sections in TOOLS.items():
        with tempfile.TemporaryDirectory() as folder:
            command = [program, "--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20", sys.executable]
            command += [
                "-m",
                "shardwise.perf.gpu_scripts.gpu_check",
                "--device",
                device,
                "--small",
                "--sections",
                *sections,
            ]
            try:
                status, printed = run_within(
                    limit_s / len(TOOLS), [*command, "--out", str(Path(folder) / "part.json")], environment
                )
            except subprocess.TimeoutExpired:
                said[tool] = f"not finished in {limit_s / len(TOOLS):.0f} s"
                continue
        summary = re.findall(r"ERROR SUMMARY: .*|RACECHECK SUMMARY: .*", printed)
        said[tool] = summary[-1] if summary else f"status {status}"
        assert status == 0, f"{tool}: status {status}\n{printed[-3000:]}"
    return said


def run_within(limit_s: float, command: Sequence[str], environment: Mapping[str, str]) -> tuple[int, str]:
    """Exit status of a command and what it printed; what it started ends with it.

    Raises:
        subprocess.TimeoutExpired: it was not done in time, and was ended.
    """
    with subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
    ) as process:
        try:
            printed, _ = process.communicate(timeout=limit_s)
        except BaseException:
            # a sanitizer's target is a child of the sanitizer, and would go on
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return process.returncode, printed


def _program() -> str | None:
    """The sanitizer on the path, or in CUDA's own folder."""
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ] + ["/usr/local/cuda"]
    return shutil.which("compute-sanitizer") or shutil.which(
        "compute-sanitizer", path=os.pathsep.join(f"{home}/bin" for home in homes)
    )

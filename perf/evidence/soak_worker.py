"""A rank of `perf/evidence/soak.py`: the DLRM example with a tracker that notes the time and process of each line.

    torchrun ... perf/evidence/soak_worker.py <events file> <seconds to pause at each line> <arguments of the example>

The pause spreads the steps of a disturbed run over more time, in which more goes wrong.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[2] / "examples" / "dlrm"


class Events:
    """A tracker that writes `t`, `pid` and `step` of each line of metrics, never cut, and then sleeps."""

    def __init__(self, path: Path, pause_s: float) -> None:
        self._path = path
        self._pause_s = pause_s

    def start(self, config: Mapping[str, Any], *, step: int, finished_epochs: int) -> None:
        """Nothing is cut."""

    def finish(self, final: Mapping[str, float] | None) -> None:
        """Each line is written whole."""

    def log(self, metrics: Mapping[str, float], *, epoch: int, step: int) -> None:
        if "loss" in metrics:
            with self._path.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"t": time.time(), "pid": os.getpid(), "step": step}) + "\n")
            time.sleep(self._pause_s)


if __name__ == "__main__":
    # asked where it stands, a worker says so
    faulthandler.register(signal.SIGUSR1)
    sys.path.insert(0, str(EXAMPLE))
    import_module("train").main(sys.argv[3:], [Events(Path(sys.argv[1]), float(sys.argv[2]))])

"""Where FBGEMM's own `fbgemm_gpu` is installed, whoever stands in for it here.

The standard library alone: whatever decides between FBGEMM and what serves its names may import this.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

# files named torchrec.py and fbgemm_gpu.py, for processes that nobody could call install() in
STAND_INS = Path(__file__).parent.resolve() / "served"


def installed_fbgemm() -> ModuleSpec | None:
    """Where FBGEMM's own `fbgemm_gpu` is, if it is installed; loaded or not."""
    return PathFinder.find_spec("fbgemm_gpu", [place for place in sys.path if Path(place).resolve() != STAND_INS])

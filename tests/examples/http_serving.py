"""For tests of examples/serve: its modules, which find the files beside them as when the scripts are run."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from checkout import ROOT

EXAMPLE = ROOT / "examples" / "serve"
# an instance that the model of small_model.py takes
GOOD: dict[str, Any] = {"features": {"user": [3], "item": [7, 8]}, "dense": [0.5, -1, 2.25]}


def example(name: str) -> Any:
    if str(EXAMPLE) not in sys.path:
        sys.path.insert(0, str(EXAMPLE))
    return importlib.import_module(name)

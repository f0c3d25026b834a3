"""Libraries that some tests need and not every environment has: skipped there, and never in .ci/run."""

from __future__ import annotations

import importlib
import os
from types import ModuleType

import pytest


def need(name: str) -> ModuleType:
    """The module of that name; without it the test or file is skipped, or fails where SHARDWISE_REQUIRE_ALL is set."""
    if os.environ.get("SHARDWISE_REQUIRE_ALL"):
        return importlib.import_module(name)
    return pytest.importorskip(name, reason=f"{name} is not installed: `make dev` brings it")

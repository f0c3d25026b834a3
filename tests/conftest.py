"""What every test gets: seeds, poisoned memory, a tier, a recorded duration, and reasons where it cannot run."""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

# before anything is poisoned
import torch._dynamo
from kernel_inputs import torch_device
from loops_cache import keep_loops
from poison import poisoned
from tiers import FOLDERS, TIERS, phase_of, tier_of

from shardwise.kernels.cpu import update as cpu_update

pytest_plugins = ["durations"]

if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 10):
    # numbers read from tensors and shapes that depend on data, which later versions have in whole graphs unasked
    torch._dynamo.config.capture_scalar_outputs = torch._dynamo.config.capture_dynamic_output_shape_ops = True

# the same examples in every run: what one run finds the next one finds too
hypothesis.settings.register_profile("same", derandomize=True)
hypothesis.settings.load_profile("same")

HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TESTS = Path(__file__).parent
LOOPS = keep_loops()


@pytest.fixture(autouse=True)
def _seeds() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readline, which pytest imports, tells every process that the terminal has 80 columns."""
    for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _poison() -> Iterator[None]:
    with poisoned():
        yield


@pytest.fixture(params=["torch", "numba"], scope="module")
def path(request: pytest.FixtureRequest) -> str:
    """The two ways of an op on a CPU: on torch alone, or on the loops that numba compiles."""
    return str(request.param)


@pytest.fixture(autouse=True)
def _cpu_path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests of "cpu" and "torch" run without the LOOPS of their file and those of updates, tests of "numba" on them."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    ways = {way for way in (params.get("device"), params.get("path")) if isinstance(way, str)}
    loops = getattr(request.module, "LOOPS", None)
    if "numba" in ways:
        pytest.importorskip("numba")
    elif loops and ways & {"cpu", "torch"}:
        monkeypatch.setattr(loops[0], loops[1], lambda: None)
    if loops and "path" in params and "numba" in ways:
        # threads share the smallest of works
        monkeypatch.setattr(loops[0], "_ALONE", 0)
    if "device" in params and "cpu" in ways:
        monkeypatch.setattr(cpu_update, "update", lambda *args: False)


@pytest.fixture
def where(device: str) -> torch.device:
    """Of a test of several paths, the device on which `device` runs it."""
    return torch_device(device)


def pytest_report_header() -> str:
    """Whether a compiler's cache is empty: such a run takes longer."""
    triton = Path(os.environ.get("TRITON_CACHE_DIR", Path.home() / ".triton" / "cache"))
    kept = sum(1 for _ in triton.iterdir()) if triton.exists() else 0
    return "\n".join([*([LOOPS] if LOOPS else []), f"kernels of Triton: {kept} kept in {triton}"])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--tier", choices=TIERS, help="how much of the suite: quick, test, all (but what is long), long")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Of a phase, the folders that it has tests in: a file elsewhere is not even imported."""
    folders = FOLDERS.get(phase_of(config))
    if folders is None or collection_path == TESTS or TESTS not in collection_path.parents:
        return None
    places = [TESTS / folder for folder in folders]
    on_the_way = any(place == collection_path or collection_path in place.parents for place in places)
    return None if on_the_way or any(place in collection_path.parents for place in places) else True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = {
        "gpu": None if torch.cuda.is_available() else "needs a CUDA device",
        "interpreted": _without_triton() or (None if INTERPRETED else "runs with TRITON_INTERPRET=1"),
        "compiled": _without_triton() or ("runs without TRITON_INTERPRET" if INTERPRETED else None),
        "executed": _without_triton() or ("runs without TRITON_INTERPRET" if INTERPRETED else None),
    }
    for item in items:
        for name, reason in reasons.items():
            if reason and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))
    tier = config.getoption("--tier")
    if tier is not None:
        others = [item for item in items if TIERS.index(tier_of(item)) > TIERS.index(tier)]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in {*others}]


def _without_triton() -> str | None:
    return None if HAS_TRITON else "triton is not installed"

"""Where the tests of jagged ops run on a CPU: on torch alone, or on the loops that numba compiles."""

from __future__ import annotations

import pytest

from shardwise.kernels.cpu import segments as cpu_segments


@pytest.fixture(params=["torch", "numba"], scope="module")
def path(request: pytest.FixtureRequest) -> str:
    """The CPU's two ways."""
    return str(request.param)


@pytest.fixture(autouse=True)
def _loops(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests on "cpu" and "torch" run without the LOOPS of their file, those on "numba" with them."""
    params = request.node.callspec.params if hasattr(request.node, "callspec") else {}
    if {"cpu", "torch"} & {params.get("device"), params.get("path")} and hasattr(request.module, "LOOPS"):
        monkeypatch.setattr(*request.module.LOOPS, lambda: None)
    elif params.get("path") == "numba":
        pytest.importorskip("numba")
        # threads share the smallest of works
        monkeypatch.setattr(cpu_segments, "_ALONE", 0)

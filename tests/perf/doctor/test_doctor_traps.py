"""Each trap of an environment that the doctor knows is found where it is open, and not where it is not."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardwise.perf.doctor import traps
from shardwise.perf.doctor.findings import NOTE, OK, PROBLEM, Finding

VARIABLES = (
    "SHARDWISE_NUMBA", "SHARDWISE_TUNED", "TRITON_INTERPRET", "NUMBA_CACHE_DIR", "TRITON_CACHE_DIR",
    "OMP_NUM_THREADS",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")


def test_where_no_trap_is_open_one_line_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_copies", "_shared_memory", "_open_files", "_huge_pages", "_numba_cache", "_triton_cache", "_parts"):
        monkeypatch.setattr(traps, name, lambda: None)
    assert [*traps.traps(1)] == [Finding(OK, "environment", "no trap that this project knows of is open")]


@pytest.mark.parametrize(
    ("name", "value", "mark", "words"),
    [
        ("SHARDWISE_NUMBA", "off", PROBLEM, "is 'off': shardwise does not import"),
        ("SHARDWISE_TUNED", "/nowhere/tuned.json", NOTE, "names /nowhere/tuned.json, which is not there"),
        ("TRITON_INTERPRET", "1", NOTE, "kernels are interpreted, a thousand times slower"),
        ("OMP_NUM_THREADS", "8", NOTE, "is 8 on 2 cores"),
        ("OMP_NUM_THREADS", "0", NOTE, "is '0', which is no number of threads"),
        ("OMP_NUM_THREADS", "two", NOTE, "is 'two', which is no number of threads"),
        ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0", NOTE, "may wait for a dead one for half an hour"),
    ],
)
def test_variables(name: str, value: str, mark: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert (name, words) not in [(trap.what, trap.text) for trap in traps.traps(2)]
    monkeypatch.setenv(name, value)
    (finding,) = [trap for trap in traps.traps(2) if trap.what == name]
    assert finding.mark == mark and words in finding.text and finding.mend


@pytest.mark.parametrize("good", ["1", "2", "2,1", " 1"])
def test_numbers_of_threads_are_no_trap(good: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", good)
    assert traps._threads(2) is None


def test_threads_of_ranks_are_told_where_nobody_set_them() -> None:
    finding = traps._threads(8)
    assert finding is not None and "takes all 8 cores" in finding.text and finding.mend.endswith("OMP_NUM_THREADS=8/R")
    assert traps._threads(1) is None


def test_two_copies_are_found_and_the_same_one_twice_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traps, "distributions", lambda **named: [])
    root = str(Path(traps.__file__).resolve().parents[2])
    link = tmp_path / "link"
    link.symlink_to(root)
    monkeypatch.setattr(traps.sys, "path", [root, str(link)])
    assert traps._copies() is None
    other = tmp_path / "other" / "shardwise"
    other.mkdir(parents=True)
    (other / "__init__.py").touch()
    monkeypatch.setattr(traps.sys, "path", [root, str(other.parent)])
    finding = traps._copies()
    assert finding is not None and finding.mark == NOTE and str(other) in finding.text


def test_parts_that_are_missing_or_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert traps._parts() is None
    real = importlib.util.find_spec
    find: Callable[..., Any] = lambda name: None if name == "shardwise.jagged" else real(name)  # noqa: E731
    monkeypatch.setattr(traps.importlib.util, "find_spec", find)
    missing = traps._parts()
    assert missing is not None and missing.mark == PROBLEM and "lacks jagged" in missing.text
    # as git with core.symlinks=false checks links out
    (tmp_path / "kernels").write_text("../kernels")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(traps.importlib.util, "find_spec", lambda name: spec)
    text = traps._parts()
    assert text is not None and text.mark == NOTE and "shardwise/kernels is a text file" in text.text


def test_caches_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    assert traps._writable(tmp_path / "not" / "there")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    assert traps._numba_cache() is None
    monkeypatch.setattr(traps, "_writable", lambda place: False)
    finding = traps._numba_cache()
    assert finding is not None and f"NUMBA_CACHE_DIR={tmp_path} cannot be written" in finding.text
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    finding = traps._numba_cache()
    assert finding is not None and "__pycache__ nor" in finding.text and "NUMBA_CACHE_DIR" in finding.mend
    monkeypatch.setenv("SHARDWISE_NUMBA", "0")
    assert traps._numba_cache() is None


def test_tritons_cache_matters_where_there_is_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traps, "_writable", lambda place: False)
    monkeypatch.setattr(traps.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(traps.os.path, "exists", lambda path: False)
    assert traps._triton_cache() is None
    monkeypatch.setattr(traps.os.path, "exists", lambda path: path == "/dev/nvidiactl")
    finding = traps._triton_cache()
    assert finding is not None and finding.mark == PROBLEM and "no kernel can be compiled" in finding.text


@pytest.mark.parametrize(("size", "free", "is_open"), [(64, 64, True), (8192, 8000, False), (8192, 10, True)])
def test_shared_memory_that_is_small_or_full(
    size: int, free: int, is_open: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = SimpleNamespace(f_blocks=size << 8, f_bavail=free << 8, f_frsize=1 << 12)
    monkeypatch.setattr(traps.os, "statvfs", lambda path: seen, raising=False)
    finding = traps._shared_memory()
    assert (finding is not None) == is_open
    if finding is not None:
        assert f"/dev/shm has {size} MiB, {free} free" in finding.text


@pytest.mark.parametrize(("soft", "hard", "mend"), [(256, 1 << 20, "ulimit -n 65536"), (256, 512, "ulimit -n 512")])
def test_few_open_files(soft: int, hard: int, mend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda which: (1024, 4096))
    assert traps._open_files() is None
    monkeypatch.setattr(resource, "getrlimit", lambda which: (soft, hard))
    finding = traps._open_files()
    assert finding is not None and f"may open {soft} files" in finding.text and finding.mend == mend


@pytest.mark.parametrize(("text", "is_open"), [("always madvise [never]", True), ("always [madvise] never", False)])
def test_huge_pages_that_are_off(text: str, is_open: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traps.Path, "read_text", lambda path: text)
    assert (traps._huge_pages() is not None) == is_open

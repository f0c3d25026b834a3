"""The self-test checks every op by every path, finds what is planted in any of them, and says what it did not test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise.kernels import _op, numba_loops
from shardwise.kernels.cpu import lookup as cpu_lookup
from shardwise.kernels.jagged import offsets, softmax
from shardwise.kernels.lookup import pooled
from shardwise.kernels.quantized import rows
from shardwise.kernels.update import update
from shardwise.perf.selftest import run
from shardwise.perf.selftest.check import Check
from shardwise.perf.suite.libraries import without_numba

CPU = torch.device("cpu")
NEEDS_CPU_PATHS = pytest.mark.skipif(_op.INTERPRETED, reason="kernels are interpreted: there is one path")


@pytest.fixture
def torch_alone() -> Iterator[None]:
    with without_numba():
        yield


class _Ops(TorchDispatchMode):
    """Collects the names of shardwise's ops that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "shardwise":
            self.names.add(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("torch_alone")
def test_every_op_of_the_library_is_called_by_the_checks_that_name_it() -> None:
    named = set()
    for check in run.all_checks():
        with _Ops() as ops:
            check.run(CPU)
        assert ops.names == {*check.ops}, f"{check.family}: {check.name}"
        named |= ops.names
    missing = run.registered_ops() - named
    assert not missing, f"give these ops a check in perf/selftest/: {', '.join(sorted(missing))}"


@pytest.mark.usefixtures("torch_alone")
def test_an_op_without_a_check_is_reported() -> None:
    library = torch.library.Library("shardwise", "FRAGMENT")
    library.define("nobody_checks_this(Tensor x) -> Tensor")
    try:
        assert "nobody_checks_this" in run.self_test(["cpu"], seconds=0).unchecked
    finally:
        library._destroy()


@NEEDS_CPU_PATHS
@pytest.mark.usefixtures("torch_alone")
def test_every_check_passes_on_torch_alone() -> None:
    progress: list[tuple[str, int, int]] = []
    done = run.self_test(["cpu"], tell=lambda *args: progress.append(args))
    assert done.failed == [] and done.unchecked == ()
    assert run.counted(done.results) == {"passed": len(run.all_checks()), "failed": 0, "untested": 0}
    assert {result.path.by for result in done.results} == {"torch"}
    # one part after another, up to the last
    assert [(part, total) for _, part, total in progress] == [(n + 1, len(progress)) for n in range(len(progress))]


@NEEDS_CPU_PATHS
@pytest.mark.full
def test_every_check_passes_on_the_loops_of_numba() -> None:
    """Takes a minute where no loop was compiled before."""
    pytest.importorskip("numba")
    done = run.self_test(["cpu"], compile_seconds=600)
    assert done.failed == []
    assert run.counted(done.results) == {"passed": 2 * len(run.all_checks()), "failed": 0, "untested": 0}
    assert {result.path.by for result in done.results} == {"numba", "torch"}


def _of(families: set[str]) -> Callable[[], list[Check]]:
    every = run.all_checks
    return lambda: [check for check in every() if check.family in families]


def _off(value: Any) -> Any:
    """A result a little off: its largest number is 1 in 1,000 larger."""
    first = value[0] if isinstance(value, tuple) else value
    flat = first.flatten()
    if len(flat):
        flat[flat.abs().argmax()] *= 1.001 if first.is_floating_point() else 2
    moved = flat.view_as(first)
    return (moved, *value[1:]) if isinstance(value, tuple) else moved


@NEEDS_CPU_PATHS
@pytest.mark.usefixtures("torch_alone")
@pytest.mark.parametrize(
    ("module", "name", "family"),
    [
        (pooled, "pooled_lookup_ref", "pooled lookup"),
        (offsets, "complete_cumsum_ref", "offsets"),
        (softmax, "jagged_softmax_ref", "softmax of bags"),
        (rows, "quantize_rows_ref", "quantized rows"),
    ],
)
def test_a_reference_that_is_off_is_found(module: Any, name: str, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    good = getattr(module, name)
    seen = count()
    # the path under test calls the same function first
    monkeypatch.setattr(module, name, lambda *args: _off(good(*args)) if next(seen) % 2 else good(*args))
    monkeypatch.setattr(run, "all_checks", _of({family}))
    done = run.self_test(["cpu"])
    assert done.failed and all(text.startswith(f"{family} (cpu, torch): ") for text in done.failed)
    assert "of its largest value, allowed" in done.failed[0]


@NEEDS_CPU_PATHS
@pytest.mark.usefixtures("torch_alone")
def test_a_rule_that_steps_too_far_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    good = update.fused_update_ref

    def further(weights: torch.Tensor, *args: Any) -> None:
        before = weights.clone()
        good(weights, *args)
        weights += 0.01 * (weights - before).nan_to_num(0.0)

    monkeypatch.setattr(update, "fused_update_ref", further)
    monkeypatch.setattr(run, "all_checks", _of({"fused update", "index of an update"}))
    failed = run.self_test(["cpu"]).failed
    assert {text.split(":")[1].split(",")[0].strip() for text in failed} >= {"sgd", "adam", "lamb", "rowwise_adagrad"}


@NEEDS_CPU_PATHS
def test_a_loop_of_numba_that_is_off_is_found_and_torch_alone_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("numba")
    good = cpu_lookup.pooled_lookup_cpu

    def off(*args: Any) -> torch.Tensor:
        result = good(*args)
        return _off(result) if numba_loops.compiles() else result

    monkeypatch.setattr(pooled, "pooled_lookup_cpu", off)
    monkeypatch.setattr(run, "all_checks", _of({"pooled lookup"}))
    failed = run.self_test(["cpu"]).failed
    assert failed and all("(cpu, numba)" in text for text in failed)


@NEEDS_CPU_PATHS
@pytest.mark.usefixtures("torch_alone")
def test_an_op_that_raises_has_failed_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any) -> Any:
        raise RuntimeError("a kernel\nthat does not start")

    monkeypatch.setattr(softmax, "jagged_softmax_ref", broken)
    monkeypatch.setattr(run, "all_checks", _of({"softmax of bags", "offsets"}))
    done = run.self_test(["cpu"])
    assert [text.split(": ", 2)[2] for text in done.failed] == ["RuntimeError: a kernel that does not start"] * 2
    assert run.counted(done.results)["passed"] == 3


@NEEDS_CPU_PATHS
@pytest.mark.usefixtures("torch_alone")
def test_what_does_not_fit_the_time_is_not_tested_and_has_not_passed() -> None:
    ticks = count()
    done = run.self_test(["cpu"], seconds=10, clock=lambda: float(next(ticks)))
    counted = run.counted(done.results)
    assert 0 < counted["passed"] < 11 and counted["failed"] == 0
    assert counted["passed"] + counted["untested"] == len(run.all_checks())
    left = ("3 outputs of 2 inputs", "tables by offsets and an order", "2 outputs of 2 inputs by rows of numbers")
    untested = {text for result in done.results for text in result.untested}
    assert {f"{name}: 10 s were over" for name in left} <= untested
    assert all(text.endswith(": 10 s were over") for text in untested)


@NEEDS_CPU_PATHS
@pytest.mark.usefixtures("torch_alone")
def test_no_family_is_left_out_as_long_as_there_is_time_for_a_check_of_each() -> None:
    """Families came one after another: of the interpreter's 24 the last 9 were never tested on a slow machine."""
    families = {check.family for check in run.all_checks()}
    ticks = count()
    done = run.self_test(["cpu"], seconds=len(families) + 0.5, clock=lambda: float(next(ticks)))
    assert {result.family for result in done.results if result.passed} == families
    assert run.counted(done.results)["untested"] > 0


@NEEDS_CPU_PATHS
def test_what_was_not_compiled_in_time_is_not_tested() -> None:
    pytest.importorskip("numba")
    done = run.self_test(["cpu"], compile_seconds=0)
    of_numba = [result for result in done.results if result.path.by == "numba"]
    assert of_numba and run.counted(of_numba)["passed"] == 0
    assert "compiling took more than 0 s; run it again" in of_numba[0].untested[0]
    assert run.counted([result for result in done.results if result.path.by == "torch"])["untested"] == 0

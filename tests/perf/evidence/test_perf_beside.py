"""What can be said of the comparison with TorchRec without it: plants are found, and our side of every case runs."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.kernels.cpu import update as cpu_update
from shardwise.perf.evidence import __main__ as evidence, compare_sharding, compare_torchrec
from shardwise.perf.evidence.compare_torchrec import (
    Bounds,
    Row,
    geometric_mean,
    report,
    rows_of,
    table,
    verdict,
)
from shardwise.perf.suite import libraries
from shardwise.perf.suite.case import (
    OURS,
    Fresh,
    Setting,
    with_states,
)
from shardwise.perf.suite.cases import operations
from shardwise.perf.suite.libraries import Library, ours, without_numba
from shardwise.perf.suite.measure import Budget
from shardwise.perf.suite.operations import inputs, jagged_ops, jagged_types
from shardwise.perf.suite.operations.operation import (
    Operation,
    Raised,
    Size,
    contents,
    difference,
)
from shardwise.perf.suite.record import Lap, Record

SIZE = Size(1, 64)
OPERATION = Operation("doubled", lambda lib, size: torch.ones(*size), lambda lib, x: lib.double(x))
TYPES = Bounds(mean=0.8, each=1.3)
# what needs none
PEERLESS = re.findall(r"^PEERLESS := (.*)$", (evidence.ROOT / "Makefile").read_text(), re.M)[0].split()
BRIEFLY = Budget(laps=1, rounds=9, seconds=0.02)


def double(x: torch.Tensor, turns: int = 2_000) -> torch.Tensor:
    sum(range(turns))
    return 2 * x


def slow(x: torch.Tensor) -> torch.Tensor:
    return double(x, 20_000)


def refuse(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("no ones")


def library(label: str, does: Callable[..., Any] | None) -> Library:
    return Library(label, [SimpleNamespace(**({} if does is None else {"double": does}))], peer=label == "theirs")


def row(ratio: float, ours_us: float = 100.0, wrong: str = "", size: Size = SIZE) -> Row:
    return Row("doubled", size, wrong, ours_us, ours_us / ratio, (ratio, ratio, ratio))


@pytest.fixture
def one_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite has nothing but OPERATION at SIZE."""
    cases = tuple(case for case in operations.CASES if case.name.startswith("fresh KJT keys, 1 x 64"))
    make = operations.make
    monkeypatch.setattr(
        operations, "CASES",
        [SimpleNamespace(**{**vars(case), "name": operations.name_of(OPERATION, SIZE), "slow": False,
                            "make": lambda setting: make(setting, operation=OPERATION, size=SIZE)}) for case in cases],
    )  # fmt: skip
    monkeypatch.setattr(compare_torchrec, "OPERATIONS", {"types": [OPERATION]})


@pytest.mark.parametrize(
    ("own", "peer", "outcome", "good"),
    [
        (double, slow, "equal", True),
        (slow, double, "SLOWER at 1 x 64", False),
        (lambda x: 3 * x, slow, "DIFFERENT at 1 x 64: off by 5.0e-01 of the largest", False),
        (lambda x: (2 * x).half(), slow, "DIFFERENT at 1 x 64: ours float16 [1, 64], theirs float32 [1, 64]", False),
        (None, double, "MISSING AttributeError: ours has no attribute double", False),
        (refuse, double, "DIFFERENT at 1 x 64: only ours raises ValueError: no ones", False),
        (double, refuse, "DIFFERENT at 1 x 64: only theirs raises ValueError: no ones", False),
        # an operation that has to raise says so, and gives that as its result
        (refuse, refuse, "DIFFERENT at 1 x 64: raises ValueError: no ones", False),
        # an operation that is not there may not hide behind one that raises
        (None, refuse, "MISSING AttributeError: ours has no attribute double", False),
    ],
)
def test_plants_are_found(
    own: Callable[..., Any] | None, peer: Callable[..., Any], outcome: str, good: bool, one_operation: None,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(operations, "ours", lambda: library("ours", own))
    monkeypatch.setattr(operations, "torchrec", lambda: library("theirs", peer))
    text, all_good = report(["types"], compiled=True, budget=BRIEFLY)
    lines = [line for line in text.splitlines() if line.startswith("| doubled |")]
    assert len(lines) == len(capsys.readouterr().err.splitlines()) == 1
    # whatever the plant's time was
    assert re.sub(r" \(\d+\.\d+\) at", " at", lines[0]).endswith(f"| {outcome} |")
    assert all_good is good


@pytest.mark.parametrize(
    ("rows", "bounds", "outcome"),
    [
        ([row(1.2)], TYPES, "equal"),
        ([row(1.4)], TYPES, "SLOWER (1.40) at 1 x 64"),
        ([row(1.4, ours_us=19.0)], TYPES, "equal"),
        ([row(0.1), row(1.4, size=Size(4, 5))], TYPES, "SLOWER (1.40) at 4 x 5"),
        ([row(0.5), row(1.5, size=Size(4, 5))], Bounds(operation=1.0), "equal"),
        ([row(0.8), row(1.5, size=Size(4, 5))], Bounds(operation=1.0), "SLOWER (1.10) at 1 x 64, 4 x 5"),
        ([row(0.5, wrong="values")], TYPES, "different: known"),
        # a difference that is allowed does not make it allowed to be slow, nor to be missing
        ([row(1.4, wrong="values")], TYPES, "SLOWER (1.40) at 1 x 64"),
        ([Row("doubled", SIZE, "missing: it")], TYPES, "MISSING it"),
    ],
)
def test_verdicts(rows: list[Row], bounds: Bounds, outcome: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "DIFFERENT", {"doub.*": "known"})
    assert verdict(rows, bounds) == outcome


def test_a_reason_holds_for_whole_names_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations, "DIFFERENT", {"double": "known"})
    assert verdict([row(0.5, wrong="values")], TYPES).startswith("DIFFERENT at 1 x 64: values")


def test_the_mean_of_everything_has_a_bound_too() -> None:
    rows = {"doubled": [row(1.0, size=Size(1, 64)), row(1.0, size=Size(26, 64))]}
    for bound, good in ((0.9, False), (1.1, True)):
        assert table("Plants", rows, Bounds(mean=bound))[1] is good
    assert geometric_mean([row(0.5), row(2.0), Row("untimed", SIZE)]) == pytest.approx(1.0)


def test_comparing_nothing_is_not_good() -> None:
    assert report(["types"], compiled=True, only="tripled") == ("No operation matches 'tripled'.\n", False)


def test_rows_come_from_the_records_of_a_run() -> None:
    name = operations.name_of(OPERATION, SIZE)
    lap = Lap({OURS: [2e-6, 4e-6, 6e-6], "torchrec": [1e-6, 4e-6, 4e-6]})
    (of_run,) = rows_of([OPERATION], {name: Record(name, "operations", (lap,))}, {})["doubled"]
    assert of_run == Row("doubled", SIZE, "", 4.0, 4.0, (1.25, 1.5, 1.75)) and of_run.timed
    (failed,) = rows_of([OPERATION], {}, {name: "AssertionError: missing: it"})["doubled"]
    assert failed.wrong == "missing: it" and not failed.timed


def test_differences_say_where() -> None:
    a = {"keys": ["x"], "values": [torch.tensor([1, 2]), None]}
    b = {"keys": ["x"], "values": [torch.tensor([1, 3]), None]}
    assert difference(a, a) == ""
    assert difference(a, b) == "[values][0]: 1 of 2 elements differ"
    assert difference(a, {"keys": ["x"]}) == "ours dict of 2: ['keys', 'values'], theirs dict of 1: ['keys']"
    assert difference([1], [True]) == "[0]: ours 1, theirs True"
    assert difference([torch.ones(2)], [torch.tensor([1.0, float("nan")])]) != ""
    assert difference([torch.ones(2)], [torch.tensor([1.0, 1.001])], tolerance=1e-2) == ""
    assert difference([Raised(ValueError("a"))], [Raised(TypeError("b"))]) == ""
    assert difference([Raised(ValueError("a"))], [1]) == "[0]: ours raises ValueError: a, theirs 1"


def test_each_call_has_a_state_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[int]] = []

    def make(lib: Any, size: Size) -> list[int]:
        made.append([])
        return made[-1]

    operation = Operation("appended", make, lambda lib, state: state.append(1))
    monkeypatch.setattr(operations, "ours", lambda: library("ours", double))
    (call,) = operations.make(Setting(), operation=operation, size=SIZE).calls
    assert isinstance(call, Fresh)
    before = len(made)
    for ready in with_states([call] * 3):
        # states are there before the first call
        assert len(made) == before + 3
        ready()
    assert {len(state) for state in made[before:]} == {1}


@pytest.mark.parametrize(
    "name",
    [name for name in evidence.KNOWN if name not in PEERLESS],
)
def test_without_the_peers_one_line_says_so(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)
    monkeypatch.setattr(evidence.logging, "disable", lambda level: None)
    for load in (libraries.torchrec, libraries.fbgemm):
        load.cache_clear()
    assert evidence.main([name, *(["times"] if name == "planner_plans" else [])]) == 2
    out, err = capsys.readouterr()
    assert not out.startswith("shardwise") and err.count("\n") == 1
    assert f"evidence {name} needs a peer" in err and "docs/evidence/beside_torchrec.md" in err


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not here")
def test_evidence_that_needs_no_peer_runs_without_one() -> None:
    """`make evidence NAME=tier_files` asked for an interpreter with TorchRec, which it does not import."""
    assert set(PEERLESS) < set(evidence.KNOWN)
    for name, python in (("tier_files", ".venv/bin/python"), ("parity", "no/python"), ("", "no/python")):
        command = ["make", "-n", "evidence", f"NAME={name}", "PEER=no/python"]
        done = subprocess.run(command, cwd=evidence.ROOT, capture_output=True, text=True, check=True)
        asks = "no interpreter at" in done.stdout
        assert f"{python} -m shardwise.perf.evidence {name}" in done.stdout and asks == (python == "no/python")


def test_every_document_has_the_mark_of_its_evidence_once() -> None:
    for name, (module, document) in evidence.KNOWN.items():
        assert importlib.util.find_spec(f"shardwise.perf.evidence.{module}") is not None
        if document:
            assert (evidence.ROOT / document).read_text(encoding="utf-8").count(f"{evidence.mark(name)}\n") == 1, (
                document
            )


def test_unknown_evidence_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        evidence.main(["nothing"])
    assert "there is no evidence 'nothing'; there is operations, sharding" in capsys.readouterr().err


def test_every_stage_of_a_step_is_a_function_that_there_is() -> None:
    """The stages of the comparison of sharded steps named a method that had gone, and its table could not be made."""
    with compare_sharding.stage_times() as times:
        assert times == {}


def test_ours_can_do_without_numba() -> None:
    before = sys.modules.get("numba")
    with without_numba():
        assert cpu_update._loops() is None
    assert sys.modules.get("numba") is before
    assert (cpu_update._loops() is None) == (importlib.util.find_spec("numba") is None)


def test_names_of_cases_are_distinct() -> None:
    for listed in (jagged_types.OPERATIONS, jagged_ops.OPERATIONS):
        names = [operation.name for operation in listed]
        assert sorted(set(names)) == sorted(names)


# until dist_init takes TorchRec's order bag by bag
RAISING = {f"KJT dist_init of {ranks} ranks, uneven batches" for ranks in (2, 4)}


@pytest.mark.parametrize("size", [Size(1, 8), Size(3, 8)], ids=str)
def test_our_side_of_every_case_runs_and_is_the_same_twice(size: Size) -> None:
    for operation in [*jagged_types.OPERATIONS, *jagged_ops.OPERATIONS]:
        if not operation.fits(size) or operation.needs_cuda:
            continue
        once, again = (operation.result(ours(), size) for _ in range(2))
        if isinstance(once, Raised):
            assert once.missing or operation.name in RAISING, f"{operation.name}: {once}"
        else:
            assert difference(once, again) == "", operation.name


def test_contents_of_our_types_are_read_out() -> None:
    kjt = inputs.kjt(ours(), Size(2, 3), weighted=True)
    leaves = contents([kjt, kjt["f1"]])
    assert leaves[0]["keys"] == ["f0", "f1"] and leaves[0]["stride"] == 3 and len(leaves[0]["lengths"]) == 6
    assert torch.equal(leaves[1]["values"], kjt["f1"].values()) and len(leaves[1]["offsets"]) == 4

"""What can be said of the comparison with TorchRec without it: plants are found, and our side of every case runs."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardwise.kernels.cpu import update_driver as cpu_compiled
from shardwise.perf.evidence import (
    beside,
    beside_inputs,
    beside_ops,
    beside_torchrec,
    beside_types,
)
from shardwise.perf.evidence.beside import (
    Case,
    Library,
    Raised,
    Row,
    Size,
    compare,
    contents,
    difference,
    missing,
)
from shardwise.perf.evidence.beside_torchrec import (
    Bounds,
    Section,
    geometric_mean,
    load_ours,
    report,
    verdict,
    without_numba,
)

SIZE = Size(2, 3)
CASE = Case("doubled", lambda lib, size: torch.ones(*size), lambda lib, x: lib.double(x))
TYPES = Bounds(mean=0.8, each=1.3)


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "CASE_S", 0.02)


def double(x: torch.Tensor) -> torch.Tensor:
    sum(range(2_000))
    return 2 * x


def slow(x: torch.Tensor) -> torch.Tensor:
    sum(range(20_000))
    return 2 * x


def triple(x: torch.Tensor) -> torch.Tensor:
    return 3 * x


def refuse(x: torch.Tensor) -> torch.Tensor:
    raise ValueError("no ones")


def half_precision(x: torch.Tensor) -> torch.Tensor:
    return (2 * x).half()


def library(label: str, does: Callable[..., Any] | None) -> Library:
    return Library(label, [SimpleNamespace(**({} if does is None else {"double": does}))], peer=label == "theirs")


def row(ratio: float, ours_us: float = 100.0, found: str = "", size: Size = SIZE) -> Row:
    return Row("doubled", size, found, ours_us, ours_us / ratio, (ratio, ratio, ratio))


@pytest.mark.parametrize(
    ("ours", "theirs", "said", "good"),
    [
        (double, slow, "equal", True),
        (slow, double, "SLOWER at 2 x 3", False),
        (triple, slow, "DIFFERENT at 2 x 3: off by 5.0e-01 of the largest", False),
        (half_precision, slow, "DIFFERENT at 2 x 3: ours float16 [2, 3], theirs float32 [2, 3]", False),
        (None, double, "MISSING AttributeError: ours has no attribute double", False),
        (refuse, double, "DIFFERENT at 2 x 3: only ours raises ValueError: no ones", False),
        (double, refuse, "DIFFERENT at 2 x 3: only theirs raises ValueError: no ones", False),
        (refuse, refuse, "both raise", True),
        # an operation that is not there may not hide behind one that raises
        (None, refuse, "MISSING AttributeError: ours has no attribute double", False),
    ],
)
def test_plants_are_found(
    ours: Callable[..., Any] | None, theirs: Callable[..., Any], said: str, good: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside_torchrec, "SIZES", [SIZE])
    printed: list[str] = []
    section = Section("Plants", [CASE], TYPES)
    text, found = report([section], library("ours", ours), library("theirs", theirs), say=printed.append)
    lines = [line for line in text.splitlines() if line.startswith("| doubled |")]
    assert len(lines) == len(printed) == 1
    # whatever the plant's time was
    assert re.sub(r" \(\d+\.\d+\) at", " at", lines[0]).endswith(f"| {said} |")
    assert found is good


@pytest.mark.parametrize(
    ("rows", "bounds", "said"),
    [
        ([row(1.2)], TYPES, "equal"),
        ([row(1.4)], TYPES, "SLOWER (1.40) at 2 x 3"),
        ([row(1.4, ours_us=19.0)], TYPES, "equal"),
        ([row(0.1), row(1.4, size=Size(4, 5))], TYPES, "SLOWER (1.40) at 4 x 5"),
        ([row(0.5), row(1.5, size=Size(4, 5))], Bounds(operation=1.0), "equal"),
        ([row(0.8), row(1.5, size=Size(4, 5))], Bounds(operation=1.0), "SLOWER (1.10) at 2 x 3, 4 x 5"),
        ([row(0.5, found="values")], TYPES, "different: known"),
        # a difference that is allowed does not make it allowed to be slow, nor to be missing
        ([row(1.4, found="values")], TYPES, "SLOWER (1.40) at 2 x 3"),
        ([Row("doubled", SIZE, "missing: it")], TYPES, "MISSING it"),
    ],
)
def test_verdicts(rows: list[Row], bounds: Bounds, said: str) -> None:
    assert verdict(rows, bounds, {"doub.*": "known"}) == said


def test_a_reason_holds_for_whole_names_only() -> None:
    assert verdict([row(0.5, found="values")], TYPES, {"double": "known"}).startswith("DIFFERENT at 2 x 3: values")


def test_the_mean_of_everything_has_a_bound_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside_torchrec, "run", lambda *_: [row(1.0, size=Size(1, 64)), row(1.0, size=Size(26, 64))])
    one = library("ours", double)
    for bound, good in ((0.9, False), (1.1, True)):
        assert report([Section("Plants", [CASE], Bounds(mean=bound))], one, one)[1] is good
    assert geometric_mean([row(0.5), row(2.0), Row("untimed", SIZE)]) == pytest.approx(1.0)


def test_comparing_nothing_is_not_good() -> None:
    one = library("ours", double)
    assert report([Section("Plants", [CASE], TYPES)], one, one, only="tripled") == (
        "No operation matches 'tripled'.\n",
        False,
    )


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


def test_each_call_has_a_state_of_its_own() -> None:
    made: list[list[int]] = []

    def make(lib: Any, size: Size) -> list[int]:
        made.append([])
        return made[-1]

    case = Case("appended", make, lambda lib, state: state.append(1))
    compare(case, library("ours", double), library("theirs", double), SIZE)
    assert {len(state) for state in made} == {1}


def test_without_torchrec_one_line_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "fbgemm_gpu", None)
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    assert beside_torchrec.main([]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and "needs TorchRec" in err and "docs/beside_torchrec.md" in err


def test_ours_can_do_without_numba() -> None:
    before = sys.modules.get("numba")
    with without_numba():
        assert cpu_compiled._loops() is None
    assert sys.modules.get("numba") is before
    assert (cpu_compiled._loops() is None) == (importlib.util.find_spec("numba") is None)


def test_names_of_cases_are_distinct() -> None:
    for cases in (beside_types.CASES, beside_ops.CASES):
        names = [case.name for case in cases]
        assert sorted(set(names)) == sorted(names)


# without weights, without inverse indices; and, until dist_init takes TorchRec's order bag by bag, uneven batches
RAISING = {
    *("KJT weights", "KJT inverse_indices"),
    *(f"KJT dist_init of {ranks} ranks, uneven batches" for ranks in (2, 4)),
}


@pytest.mark.parametrize("size", [Size(1, 8), Size(3, 8)], ids=str)
def test_our_side_of_every_case_runs_and_is_the_same_twice(size: Size) -> None:
    ours = load_ours()
    for case in [*beside_types.CASES, *beside_ops.CASES]:
        if not case.fits(size) or case.needs_cuda:
            continue
        once, again = (beside._run(case, ours, size) for _ in range(2))
        if isinstance(once, Raised):
            assert missing(once.error) or case.name in RAISING, f"{case.name}: {once}"
        else:
            assert difference(once, again) == "", case.name


def test_contents_of_our_types_are_read_out() -> None:
    kjt = beside_inputs.kjt(load_ours(), SIZE, weighted=True)
    found = contents([kjt, kjt["f1"]])
    assert found[0]["keys"] == ["f0", "f1"] and found[0]["stride"] == 3 and len(found[0]["lengths"]) == 6
    assert torch.equal(found[1]["values"], kjt["f1"].values()) and len(found[1]["offsets"]) == 4

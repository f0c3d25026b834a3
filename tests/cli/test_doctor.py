"""`shardwise doctor`: what it prints at every width and as JSON, how it ends, and machines on which much is broken."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import click
import pytest
import torch
from checkout import run_python
from click.testing import CliRunner, Result

from shardwise.cli.doctor import add_doctor
from shardwise.kernels import _op
from shardwise.kernels.jagged import softmax
from shardwise.perf.doctor import bandwidth, links
from shardwise.perf.doctor.findings import OK, Finding
from shardwise.perf.selftest import run

SECTIONS = ["Versions", "Devices", "Bandwidth", "Links", "Self-test", "Tuning", "Kernels", "Environment"]
# a program that is `shardwise doctor` alone
PROGRAM = "import click; from shardwise.cli.doctor import add_doctor; g = click.Group(); add_doctor(g); g()"


def doctor(*arguments: str, columns: int = 80) -> Result:
    group = click.Group()
    add_doctor(group)
    return CliRunner().invoke(group, ["doctor", *arguments], env={"COLUMNS": str(columns)})


@pytest.fixture
def few_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """One family of ops on torch alone, and nothing measured."""
    if _op.INTERPRETED:
        pytest.skip("kernels are interpreted: there is one path")
    every = run.all_checks
    monkeypatch.setattr(run, "all_checks", lambda: [check for check in every() if check.family == "softmax of bags"])
    monkeypatch.setattr(_op, "NUMBA", False)
    monkeypatch.setattr(_op, "HAS_TRITON", False)
    for module, name in ((bandwidth, "bandwidths"), (links, "links")):
        monkeypatch.setattr(module, name, _nothing)


def _nothing(devices: Sequence[str]) -> Iterator[Finding]:
    yield Finding(OK, "measured", "nothing")


@pytest.mark.parametrize("columns", [60, 80, 100, 160])
def test_every_line_fits_the_terminal(columns: int) -> None:
    printed = doctor("--quick", "--device", "cpu", columns=columns)
    assert printed.exit_code == 0, printed.output
    lines = printed.stdout.splitlines()
    assert max(map(len, lines)) <= columns
    assert [line for line in lines if line in SECTIONS] == SECTIONS
    # marks stand in a column of their own, what follows them in another
    marked = [line for line in lines if line.startswith(("ok ", "note ", "not tested "))]
    assert len(marked) > 10 and {line[10] for line in marked} == {" "} and " " not in {line[11] for line in marked}
    assert "left out by --quick" in printed.stdout
    assert lines[-1].startswith("nothing is wrong, ") and "3 not tested" in lines[-1]


def test_json_is_one_document_and_nothing_else_on_stdout() -> None:
    printed = doctor("--quick", "--json")
    document = json.loads(printed.stdout)
    assert printed.exit_code == document["status"] == 0
    assert [section["name"] for section in document["sections"]] == SECTIONS
    findings = [finding for section in document["sections"] for finding in section["findings"]]
    assert {finding["mark"] for finding in findings} <= {"ok", "note", "not tested"}
    assert all(finding["what"] and finding["text"] for finding in findings)
    assert [finding for finding in findings if finding["mark"] != "ok" and not finding.get("mend")] == []
    assert document["sections"][0]["findings"][2]["data"]["version"] == torch.__version__
    assert "importing torch" in printed.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "gpu"], "'gpu' is no device: expected cpu, cuda or cuda:0"),
        (["--device", "cuda:99"], "torch finds no device 'cuda:99' here; there is cpu"),
        (["--seconds", "0"], "0.0 is not in the range x>0"),
    ],
)
def test_bad_input_is_a_line_and_status_2(arguments: list[str], words: str) -> None:
    printed = doctor(*arguments)
    assert printed.exit_code == 2
    assert words in " ".join(printed.stderr.split())
    assert printed.stdout == "" and "Traceback" not in printed.stderr


@pytest.mark.usefixtures("few_checks")
def test_it_ends_well_where_every_check_passes() -> None:
    printed = doctor("--device", "cpu", columns=160)
    assert printed.exit_code == 0, printed.output
    assert "CPU, torch alone" in printed.stdout
    assert "all families passed, 2 checks of values and gradients" in printed.stdout


@pytest.mark.usefixtures("few_checks")
def test_a_planted_defect_ends_it_with_status_1(monkeypatch: pytest.MonkeyPatch) -> None:
    good = softmax.jagged_softmax_ref
    monkeypatch.setattr(softmax, "jagged_softmax_ref", lambda *args: 1.001 * good(*args))
    # the op itself calls the reference on the CPU: it keeps the good one
    monkeypatch.setattr("shardwise.perf.selftest.jagged_checks.ops.jagged_softmax", good)
    printed = doctor("--device", "cpu", columns=160)
    assert printed.exit_code == 1
    problems = [line for line in printed.stdout.splitlines() if line.startswith("problem")]
    assert len(problems) == 1
    assert "2 of 2 checks failed: results here cannot be trusted" in problems[0]
    assert "softmax of bags, D=20: result 0 differs by 0.000999 of its largest value" in printed.stdout
    assert "-> please report it" in printed.stdout and "1 problem" in printed.stdout.splitlines()[-1]


@pytest.mark.usefixtures("few_checks")
def test_what_raises_is_reported_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(devices: Sequence[str]) -> Iterator[Finding]:
        raise MemoryError("no room")

    monkeypatch.setattr(bandwidth, "bandwidths", broken)
    printed = doctor("--device", "cpu", columns=160)
    assert printed.exit_code == 1
    assert "ended early: MemoryError: no room" in printed.stdout
    assert "all families passed" in printed.stdout and "Environment" in printed.stdout


def test_help_imports_neither_torch_nor_rich() -> None:
    program = f"import sys, atexit; atexit.register(lambda: print(*sorted(sys.modules)));{PROGRAM}"
    loaded = run_python("-c", program, "doctor", "--help").stdout.splitlines()[-1].split()
    assert "click" in loaded
    assert not {"torch", "numpy", "rich", "numba", "triton"} & {*loaded}


@pytest.mark.parametrize(
    ("source", "words", "mend"),
    [
        (
            "raise OSError('libcudart.so.12: cannot open shared object file')",
            "does not import: OSError: libcudart.so.12: cannot open shared object file", "install torch anew",
        ),
        ("raise ModuleNotFoundError(\"No module named 'torch'\")", "is not installed", 'pip install "torch>=2.9"'),
    ],
)  # fmt: skip
def test_a_torch_that_does_not_import_is_a_problem_that_is_told(
    source: str, words: str, mend: str, tmp_path: Path
) -> None:
    (tmp_path / "torch.py").write_text(source)
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {PROGRAM}"
    printed = run_python("-c", program, "doctor", status=1, COLUMNS="160")
    assert words in printed.stdout and mend in printed.stdout
    assert "not looked at: torch does not import" in printed.stdout
    # what needs no torch is still looked at
    assert "Python" in printed.stdout and "Environment" in printed.stdout
    assert "Traceback" not in printed.stderr


def test_a_variable_that_keeps_shardwise_from_importing_is_told() -> None:
    printed = run_python("-c", PROGRAM, "doctor", status=1, COLUMNS="160", SHARDWISE_NUMBA="off")
    assert "is 'off': shardwise does not import" in printed.stdout
    assert "-> set it to 0 or 1" in printed.stdout and "Traceback" not in printed.stderr


@pytest.mark.full
@pytest.mark.skipif(_op.INTERPRETED, reason="kernels are interpreted: there is one path")
def test_a_whole_check_up_of_this_machine() -> None:
    """Takes 10 s, a minute more where numba compiled nothing before."""
    environment: dict[str, Any] = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    printed = run_python("-c", PROGRAM, "doctor", "--json", "--seconds", "60", **environment)
    findings = {section["name"]: section["findings"] for section in json.loads(printed.stdout)["sections"]}
    assert {finding["what"]: finding["mark"] for finding in findings["Links"]}["two processes, gloo"] == "ok"
    assert all(finding["data"]["gb_per_s"] > 0 for finding in findings["Bandwidth"])
    paths = [finding["data"] for finding in findings["Self-test"] if "path" in finding.get("data", {})]
    assert {"torch"} <= {path_data["path"] for path_data in paths}
    assert [(path_data["failed"], path_data["untested"]) for path_data in paths] == [(0, 0)] * len(paths)
    assert {path_data["passed"] for path_data in paths} == {len(run.all_checks())}

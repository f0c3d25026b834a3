"""The script for a machine with a GPU runs here, small: every section, a failing one, and its shell wrapper.

Takes a minute in the interpreter: all sections of the check at small sizes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT

from shardwise.perf.gpu_scripts import gpu_check, gpu_kernels
from shardwise.perf.gpu_scripts.gpu_shapes import SHAPES


def run(out: Path, *options: str) -> dict[str, Any]:
    """Exit status and report."""
    status = gpu_check.main(["--device", "cpu", "--small", "--out", str(out), *options])
    return {"status": status, **json.loads(out.read_text())}


INTERPRETED = pytest.param("interpreted", marks=[pytest.mark.interpreted, pytest.mark.full])


@pytest.mark.parametrize("device", ["cpu", INTERPRETED])
def test_every_section_is_ok(device: str, tmp_path: Path) -> None:
    # those of other tests; the suite, the A/B and cached steps take the interpreter minutes
    others = {"compile", "gpu_tests", "nccl", *(() if device == "cpu" else ("suite", "ab", "profile", "tiers"))}
    sections = [name for name in gpu_check.SECTIONS if name not in others]
    # every case by itself is run by test_perf_cases_*.py
    some = ("--cases", r"^(lookup: pooled_lookup, |update: fused_update, sgd|jagged: .*permute|keyed: KT regroup)")
    report = run(tmp_path / "new folder" / "check.json", *some, "--sections", *sections)
    statuses = {name: record["status"] for name, record in report["sections"].items()}
    assert statuses == dict.fromkeys(sections, "ok"), report
    assert report["status"] == 0
    assert report["machine"]["path"] == ("torch" if device == "cpu" else "interpreted kernels")
    assert report["machine"]["versions"]["torch"] and report["sizes"]["dims"]
    results = {name: record["result"] for name, record in report["sections"].items()}
    html = (tmp_path / "new folder" / "check.html").read_text()
    assert "Prediction beside measurement" in html and "<script" not in html and "http" not in html
    if device == "cpu":
        goals = {goal["goal"] for goal in results["tiers"]["goals"]}
        assert results["tiers"]["failed"] == [] and goals > {4.0, 15.0, 1.05}
        assert "Tables larger than the device, beside goals" in html
        assert "What to take" in html and results["ab"]["rows"] and not results["ab"]["dropped"]
        assert {profile["shape"] for profile in results["profile"]["shapes"]} == set(SHAPES)
        suite = json.loads((tmp_path / "new folder" / "perf.json").read_text())
        assert suite == results["suite"]["file"] and results["suite"]["cases"] == len(suite["benchmarks"])
        assert {benchmark["group"] for benchmark in suite["benchmarks"]} == {"lookup", "update", "jagged", "keyed"}
        assert results["suite"]["not_run"] == [], "the dry run has no time for these"
    else:
        assert results["autotune"]["entries"]
        tuned = json.loads((tmp_path / "new folder" / "tuned.json").read_text())
        assert tuned == results["autotune"]["file"] and tuned["entries"]


def test_a_section_that_fails_is_recorded_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: str, sizes: gpu_check.Sizes) -> dict[str, Any]:
        raise RuntimeError("no such kernel")

    monkeypatch.setitem(gpu_check.SECTIONS, "torch_path", broken)
    report = run(tmp_path / "check.json", "--sections", "torch_path", "yardsticks")
    assert report["status"] == 1
    assert report["sections"]["torch_path"]["status"] == "failed"
    assert "no such kernel" in report["sections"]["torch_path"]["error"]
    assert report["sections"]["yardsticks"]["status"] == "ok"
    assert "no such kernel" in (tmp_path / "check.html").read_text() or report["sections"]["torch_path"]["error"]

    # a second call adds to the file
    again = run(tmp_path / "check.json", "--keep", "--sections", "pinned_table")
    assert list(again["sections"]) == ["yardsticks", "torch_path", "pinned_table"] and again["status"] == 1


def test_a_kernel_that_differs_from_its_reference_fails_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lookup = gpu_kernels.pooled.pooled_lookup_ref
    monkeypatch.setattr(gpu_kernels.pooled, "pooled_lookup_ref", lambda *args: lookup(*args) * 1.001)
    report = run(tmp_path / "check.json", "--sections", "correctness")
    assert "differs from the reference" in report["sections"]["correctness"]["error"]


def test_no_section_starts_after_the_limit(tmp_path: Path) -> None:
    report = run(tmp_path / "check.json", "--sections", "yardsticks", "suite", "--limit-s", "0")
    assert report["status"] == 1
    assert {record["status"] for record in report["sections"].values()} == {"not run"}
    assert "--keep --sections suite" in report["sections"]["suite"]["error"]


@pytest.mark.full
def test_the_wrapper_isolates_sections_and_writes_under_out(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(tmp_path / "out")}
    command = [str(ROOT / "perf" / "gpu_check.sh")]
    done = subprocess.run([*command, "--help"], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("usage: perf/gpu_check.sh")
    assert not (tmp_path / "out").exists()

    options = ["--device", "cpu", "--small", "--sections", "yardsticks"]
    done = subprocess.run([*command, *options], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out" / "gpu_check.json").read_text())
    assert report["sections"]["yardsticks"]["status"] == "ok"
    assert "yardsticks" in (tmp_path / "out" / "gpu_check.txt").read_text()


def test_a_machine_without_pytest_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check.importlib.util, "find_spec", lambda name: None)
    assert "did not run" in gpu_check.gpu_tests("cpu", gpu_check.SMALL)["note"]


def test_the_sanitizer_comes_last_or_after_a_check_that_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("--sections", "sanitizer", "yardsticks", "correctness", "hot_row")
    for status, order in (
        ("ok", ["yardsticks", "correctness", "hot_row", "sanitizer"]),
        ("failed", ["yardsticks", "correctness", "sanitizer", "hot_row"]),
    ):
        went: list[str] = []

        def go(self: gpu_check.Run, name: str, went: list[str] = went, status: str = status) -> None:
            went.append(name)
            self.sections[name] = {"status": status}

        monkeypatch.setattr(gpu_check.Run, "go", go)
        (tmp_path / "check.json").write_text("{}")
        run(tmp_path / "check.json", *asked)
        assert went == order


SANITIZER = """#!{python}
import subprocess, sys
print("========= COMPUTE-SANITIZER", sys.argv[sys.argv.index("--tool") + 1])
status = subprocess.run(sys.argv[sys.argv.index("20") + 1:]).returncode
print("========= ERROR SUMMARY: {errors} errors")
sys.exit({errors} and 9 or status)
"""


@pytest.mark.full
@pytest.mark.parametrize("errors", [0, 3])
def test_what_a_sanitizer_finds_fails_its_section(errors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(SANITIZER.format(python=sys.executable, errors=errors))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(gpu_check, "TOOLS", {"memcheck": ("pinned_table",)})
    if errors:
        with pytest.raises(AssertionError, match="memcheck: status 9"):
            gpu_check.sanitizer("cpu", gpu_check.SMALL)
    else:
        summaries = gpu_check.sanitizer("cpu", gpu_check.SMALL)
        assert summaries["memcheck"] == "ERROR SUMMARY: 0 errors"


@pytest.mark.full
def test_what_takes_too_long_ends_with_all_that_it_started(tmp_path: Path) -> None:
    # the child of the command tells its own number
    program = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1], sys.argv[2]])"
    child = "import os, sys, time; open(sys.argv[1], 'w').write(str(os.getpid())); time.sleep(600)"
    command, pid_file = [sys.executable, "-c", program, child, str(tmp_path / "pid")], tmp_path / "pid"
    with pytest.raises(subprocess.TimeoutExpired):
        gpu_check.run_within(5, command, os.environ)
    number, end = int(pid_file.read_text()), time.monotonic() + 30
    while Path(f"/proc/{number}/cmdline").exists() and Path(f"/proc/{number}/cmdline").read_bytes():
        assert time.monotonic() < end, "it still runs"
        time.sleep(0.05)
    assert gpu_check.run_within(60, [sys.executable, "-c", "print(7); exit(3)"], os.environ) == (3, "7\n")


def test_a_machine_without_a_sanitizer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check.shutil, "which", lambda *_, **__: None)
    assert "not on this machine" in gpu_check.sanitizer("cpu", gpu_check.SMALL)["note"]

"""Run the tests against other versions of torch and triton, each pair in an environment of its own, outside .ci/run.

    make matrix VERSIONS="2.9.0:3.6.0 2.15.0:3.9.0"     torch:triton; ARGS has more arguments of pytest
    make kernels-check VERSIONS="3.6.0 3.9.0"           the whole `kernels check --record` on versions of triton

Environments are kept in $MATRIX (default .matrix/, ignored by git) and used again: DIR/torch-T-triton-R has both and
what the tests need, DIR/triton-R has triton alone and goes before that of the environment that runs this script. The
result of the tests, a pair that cannot be installed included, is perf/results/matrix.json; what it says of pairs and
phases that were not asked for stays. Only the standard library is needed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[2]
RESULT = ROOT / "perf" / "results" / "matrix.json"
EXTRAS = "test,data,cpu,plan,migrate,serve,perf"
# what the Makefile's `test` runs: name, environment, arguments of pytest
PHASES: tuple[tuple[str, dict[str, str], tuple[str, ...]], ...] = (
    ("torch path", {}, ()),
    ("interpreted", {"TRITON_INTERPRET": "1"}, ("-m", "interpreted")),
    ("compiled", {}, ("-m", "compiled")),
)
REPORTED = ("torch", "triton", "numpy", "numba")


def constraints(torch: str, triton: str) -> list[str]:
    """Lines of constraints.txt for this pair."""
    own = ("torch==", "triton==", *(("numpy==",) if _numbers(triton) < (3, 7) else ()))
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith(own)]
    lines.append(f"torch=={torch}")
    if _numbers(triton) < (3, 7):
        # its interpreter takes arrays of one element for bounds of loops, which numpy 2.4 refuses
        lines.append("numpy<2.4")
    return lines


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def installed(torch: str, triton: str, place: Path) -> tuple[Path, str]:
    """The environment's Python and "", or the last line of what went wrong."""
    python = place / "bin" / "python"
    if not (place / ".installed").exists():
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("\n".join(constraints(torch, triton)) + "\n")
            file.flush()
            pip = [str(python), "-m", "pip", "install", "-q", "--no-cache-dir"]
            steps = (
                [sys.executable, "-m", "venv", str(place)],
                # setuptools: tests build the wheel without a network
                [*pip, "-c", file.name, f"torch=={torch}", "setuptools", "-e", f".[{EXTRAS}]"],
                # torch names one version of triton as its own: this pair is tried whatever it says
                [*pip, "--no-deps", f"triton=={triton}"],
                [str(python), "-c", "import torch, triton"],
            )
            for step in steps:
                done = subprocess.run(step, cwd=ROOT, capture_output=True, text=True)
                if done.returncode:
                    return python, reason(done.stderr) or f"status {done.returncode}"
        (place / ".installed").touch()
    return python, ""


def reason(errors: str) -> str:
    """The last line that says what pip, or Python, could not do; after a conflict pip adds one that names a page."""
    lines = [line for line in errors.splitlines() if line.strip()]
    reasons = [line for line in lines if "WARNING" not in line and "ERROR: ResolutionImpossible" not in line]
    return reasons[-1] if reasons else ""


def versions(python: Path) -> dict[str, str]:
    """Installed versions by name, of Python as well."""
    code = (
        "import json, platform; from importlib.metadata import version;"
        f"print(json.dumps({{'python': platform.python_version(), **{{n: version(n) for n in {REPORTED!r}}}}}))"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    by_name: dict[str, str] = json.loads(done.stdout)
    return by_name


def run_phase(python: Path, variables: dict[str, str], arguments: Sequence[str]) -> dict[str, Any]:
    """Counts, seconds and failing tests of one pytest run."""
    start = time.monotonic()
    with tempfile.NamedTemporaryFile(suffix=".xml") as file:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **variables}
        command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={file.name}", *arguments]
        done = subprocess.run(command, cwd=ROOT, env=environment)
        text = Path(file.name).read_text()
    return {"status": done.returncode, "seconds": round(time.monotonic() - start), **counts(text)}


def counts(junit: str) -> dict[str, Any]:
    """Passed, failed and skipped tests of a report, and which failed; one that pytest could not write has none."""
    cases = ElementTree.fromstring(junit).iter("testcase") if junit else ()
    passed, skipped, failing = 0, 0, []
    for case in cases:
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failing.append(f"{case.get('classname')}::{case.get('name')}")
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    return {"passed": passed, "failed": len(failing), "skipped": skipped, "failing": sorted(failing)}


def run_pair(torch: str, triton: str, folder: Path, phases: Sequence[str], arguments: Sequence[str]) -> dict[str, Any]:
    """What matrix.json says of a pair."""
    python, trouble = installed(torch, triton, folder / f"torch-{torch}-triton-{triton}")
    about: dict[str, Any] = {"torch": torch, "triton": triton}
    when = {"date": str(date.today()), "commit": _commit(), **({"arguments": list(arguments)} if arguments else {})}
    if trouble:
        return {**about, **when, "not_installed": trouble}
    about["versions"] = versions(python)
    chosen = [phase for phase in PHASES if not phases or phase[0] in phases]
    about["phases"] = {
        name: {**when, **run_phase(python, variables, [*arguments, *marks])} for name, variables, marks in chosen
    }
    return about


def check_kernels(triton: str, folder: Path, arguments: Sequence[str]) -> int:
    """The status of `kernels check --record` with this triton."""
    place = folder / f"triton-{triton}"
    if not (place / "triton").exists():
        pip = [sys.executable, "-m", "pip", "install", "-q", "--no-cache-dir", "--no-deps", "--target", str(place)]
        if subprocess.run([*pip, f"triton=={triton}"]).returncode:
            return 1
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(place)])}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, "-m", "shardwise", "kernels", "check", "--record", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment).returncode


def _commit() -> str:
    """Of the checkout, with a plus where files differ from it."""
    name = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    changes = subprocess.run(["git", "status", "--porcelain"], cwd=ROOT, capture_output=True, text=True)
    return name.stdout.strip() + "+" * bool(changes.stdout.strip())


def main() -> int:
    """Run what the arguments name; 1 if anything failed or could not be installed."""
    parser = argparse.ArgumentParser(description="Tests, or checks of compiled kernels, on other versions.")
    parser.add_argument("versions", nargs="+", help="torch:triton, or with --kernels triton")
    parser.add_argument("--kernels", action="store_true", help="shardwise kernels check --record on each triton")
    parser.add_argument("--phase", action="append", default=[], choices=[name for name, *_ in PHASES])
    parser.add_argument("--result", type=Path, default=RESULT)
    asked, more = parser.parse_known_args()
    folder = Path(os.environ.get("MATRIX") or ROOT / ".matrix").resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if asked.kernels:
        return max(check_kernels(triton, folder, more) for triton in asked.versions)
    pairs = [pair.split(":") for pair in asked.versions]
    if wrong := [":".join(pair) for pair in pairs if len(pair) != 2]:
        parser.error(f"a pair is torch:triton, as 2.15.0:3.9.0, got {wrong[0]!r}")
    clean = True
    for torch, triton in pairs:
        result = run_pair(torch, triton, folder, asked.phase, more)
        # after each pair: the next may take long
        write(result, asked.result)
        clean &= "phases" in result and not any(phase["status"] for phase in result["phases"].values())
        print(json.dumps(result, indent=1))
    return 0 if clean else 1


def write(result: dict[str, Any], path: Path) -> None:
    """Put a pair's result in the place of the one before it; phases that did not run stay where versions agree."""
    known: list[dict[str, Any]] = json.loads(path.read_text())["pairs"] if path.exists() else []
    pair = (result["torch"], result["triton"])
    kept = [entry for entry in known if (entry["torch"], entry["triton"]) != pair]
    before = next((entry for entry in known if (entry["torch"], entry["triton"]) == pair), result)
    if "phases" in result and before.get("versions") == result["versions"]:
        result["phases"] = before["phases"] | result["phases"]
    order = sorted([*kept, result], key=lambda entry: (_numbers(entry["torch"]), _numbers(entry["triton"])))
    path.write_text(json.dumps({"pairs": order}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())

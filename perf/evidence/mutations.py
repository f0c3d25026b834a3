"""Defects planted one by one in a copy of the tree: for each, the tests that hold its claim must fail.

    python perf/evidence/mutations.py                             all of them, to perf/results/mutations.json
    python perf/evidence/mutations.py --only wire --only adam     those with one of these in their name or area
    python perf/evidence/mutations.py --left                      those that the results do not have yet
    python perf/evidence/mutations.py --check                     whether each can still be planted and has its tests

A defect (mutations.toml beside this file) is a text that stands once in the product, and what it becomes. It is caught
if its tests fail of an error that no mistake of the defect itself explains (an import, a syntax, an unknown name), and
if the test that failed passes without it. Needs pytest and what the tests need; one process, and no git.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").is_file())
PRODUCT = (
    *("kernels", "jagged", "embeddings", "fbgemm", "planner", "sharding", "models", "data", "inference", "shardwise"),
    "perf",
)
# what says that a defect is no program, rather than a wrong one
_BROKEN = re.compile(r"^E\s+(?:\w+\.)*(ImportError|ModuleNotFoundError|SyntaxError|IndentationError|NameError)\b", re.M)
_LEFT_OUT = (".git", ".venv", ".matrix", ".peer", "runs", "build", "dist", "__pycache__", ".*_cache", ".hypothesis")
_LIMIT_S = 600


@dataclass(frozen=True)
class Defect:
    """One of mutations.toml; `phase` says how pytest runs its tests."""

    area: str
    name: str
    old: str
    new: str
    claim: str
    tests: list[str]
    named: str = ""
    phase: str = "torch"


def defects() -> list[Defect]:
    """All of them, in order."""
    toml = import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return [Defect(**given) for given in toml.loads(text)["defects"]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Plant defects one by one and see whether tests catch them.")
    parser.add_argument("--only", action="append", default=[], help="In a name or an area; may repeat.")
    parser.add_argument("--left", action="store_true", help="Only those that the results do not have.")
    parser.add_argument("--check", action="store_true", help="Only whether each can be planted and tested.")
    default = ROOT / "perf" / "results" / "mutations.json"
    parser.add_argument("--json", type=Path, default=default, help="Results; those of other defects stay.")
    arguments = parser.parse_args()
    planted = defects()
    results = json.loads(arguments.json.read_text()) if arguments.json.is_file() else {}
    chosen = [
        defect
        for defect in planted
        if not arguments.only or any(part in f"{defect.area}: {defect.name}" for part in arguments.only)
        if not (arguments.left and defect.name in results)
    ]
    texts = sources(ROOT)
    lost = {defect.name: reason for defect in chosen if isinstance(reason := place(defect, texts), str)}
    if arguments.check:
        lost |= {defect.name: reason for defect in chosen if (reason := without_tests(defect, ROOT))}
    for name, reason in lost.items():
        print(f"{name}: {reason}")
    if arguments.check or not chosen:
        print(f"{len(chosen) - len(lost)} of {len(chosen)} can be planted")
        sys.exit(1 if lost or not chosen else 0)
    _import_ahead()
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns(*_LEFT_OUT))
        for defect in chosen:
            result = {"status": lost[defect.name]} if defect.name in lost else plant_and_test(tree, defect)
            results[defect.name] = {"area": defect.area, "claim": defect.claim, **result}
            print(f"{result['status']:<8} {defect.area}: {defect.name}  {result.get('by', '')}", flush=True)
            # at once: a run of all takes a while
            known = {other.name for other in planted}
            kept = {name: result for name, result in sorted(results.items()) if name in known}
            arguments.json.write_text(json.dumps(kept, indent=1) + "\n")
    caught = sum(results[defect.name]["status"] == "caught" for defect in chosen)
    print(f"{caught} of {len(chosen)} caught")
    sys.exit(0 if caught == len(chosen) else 1)


def sources(root: Path) -> dict[Path, str]:
    """The text of each Python file in which a defect may lie."""
    files = (file for folder in PRODUCT for file in _python(root / folder))
    return {file: file.read_text(encoding="utf-8") for file in files}


def _python(folder: Path) -> Iterator[Path]:
    """Python files below a folder, links not followed."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not (Path(place) / name).is_symlink() and name != "__pycache__"]
        yield from (Path(place) / name for name in names if name.endswith(".py"))


def place(defect: Defect, texts: dict[Path, str]) -> tuple[Path, int, int] | str:
    """File, begin and end of the text that the defect replaces, or why it cannot."""
    # between two tokens any white space is as good as another, and a formatter may end a list by a comma
    tokens = re.findall(r"\w+|[^\w\s]", defect.old)
    spaced = [rf"(?:,\s*)?{re.escape(token)}" if token in ")]}" else re.escape(token) for token in tokens]
    pattern = re.compile(r"(?<!\w)" + r"\s*".join(spaced))
    matches = [(file, match.start(), match.end()) for file, text in texts.items() for match in pattern.finditer(text)]
    if len(matches) != 1:
        return f"its text stands {len(matches)} times in the tree: correct mutations.toml"
    return matches[0]


def without_tests(defect: Defect, root: Path) -> str:
    """Why its tests cannot be run: a file that is gone, or a name that none of their tests has."""
    names: list[str] = []
    for file in (test.split("::")[0] for test in defect.tests):
        if not (root / file).is_file():
            return f"{file} is gone: correct mutations.toml"
        names += re.findall(r"^\s*def (test_\w+)", (root / file).read_text(encoding="utf-8"), re.MULTILINE)
    asked = defect.named.split(" or ") if defect.named else []
    missing = [part for part in asked if not any(part in name for name in names)]
    return f"no test of it is called {' or '.join(missing)}: correct mutations.toml" if missing else ""


def plant_and_test(tree: Path, defect: Defect) -> dict[str, Any]:
    """Plant it, run its tests, take it out again; then run the test that failed without it."""
    location = place(defect, sources(tree))
    if isinstance(location, str):
        return {"status": location}
    file, begin, end = location
    text = file.read_text(encoding="utf-8")
    kept = file.stat()
    file.write_text(text[:begin] + defect.new + text[end:], encoding="utf-8")
    started = time.monotonic()
    try:
        status, output = run(tree, defect, selection(tree, defect))
    finally:
        file.write_text(text, encoding="utf-8")
        # as it was, so that neither bytecode nor numba's code is made anew
        os.utime(file, ns=(kept.st_atime_ns, kept.st_mtime_ns))
    result: dict[str, Any] = {"file": str(file.relative_to(tree)), "seconds": round(time.monotonic() - started)}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+::[^\n]*?)(?: - |$)", output, re.M)
    if status == 0:
        return {"status": "missed", **result}
    if status != 1 or not failed or _BROKEN.search(output):
        return {"status": "broken", **result, "output": output[-2000:]}
    result["by"] = failed[0]
    result["error"] = next(iter(re.findall(r"^E\s+(.*)", output, re.M)), "")[:200]
    status, output = run(tree, defect, [failed[0]])
    return {"status": "caught" if status == 0 else "fails without it", **result}


def selection(tree: Path, defect: Defect) -> list[str]:
    """What pytest is to run: the files that are there, or else their folder with the tests that are named."""
    files = [name for name in defect.tests if (tree / name).is_file()]
    chosen = (
        files or sorted({str(Path(name).parent) for name in defect.tests if (tree / name).parent.is_dir()}) or ["tests"]
    )
    return [*chosen, *(["-k", defect.named] if defect.named else [])]


def run(tree: Path, defect: Defect, chosen: Sequence[str]) -> tuple[int, str]:
    """pytest's status and output; -1 where it took too long."""
    marks = [] if defect.phase == "torch" else ["-m", defect.phase]
    arguments = ["-x", "-q", "-p", "no:cacheprovider", "-rfE", "--tb=short", "-n", "0", *marks, *chosen]
    variables = {"PYTHONPATH": str(tree), "COLUMNS": "1000"}
    if defect.phase == "interpreted":
        variables["TRITON_INTERPRET"] = "1"
    # triton reads what it is to be as it is imported, and torch's compiler imports it
    context: Any = multiprocessing.get_context("spawn" if defect.phase == "interpreted" else "fork")
    with tempfile.NamedTemporaryFile() as output:
        process = context.Process(target=_pytest, args=(tree, arguments, variables, output.name))
        process.start()
        process.join(_LIMIT_S)
        status = -1 if process.exitcode is None else process.exitcode
        if process.is_alive():
            # its ranks and programs too
            os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
        return status, Path(output.name).read_text(errors="replace")


def _pytest(tree: Path, arguments: list[str], variables: dict[str, str], output: str) -> None:
    """In a fork of this process, which has imported torch: that is most of what a short test takes."""
    os.setsid()
    sys.stdout = sys.stderr = open(output, "w", encoding="utf-8")  # noqa: SIM115
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    os.chdir(tree)
    os.environ.pop("TRITON_INTERPRET", None)
    os.environ.update(variables)
    import pytest

    sys.path[:] = [str(tree), *(place for place in sys.path[1:] if Path(place).resolve() != ROOT)]
    status = int(pytest.main(arguments))
    sys.stdout.flush()
    os._exit(status)


def _import_ahead() -> None:
    """What tests import besides shardwise."""
    for name in ("torch", "torch._dynamo", "hypothesis", "numba", "numpy", "xdist"):
        with suppress(ImportError):
            import_module(name)


if __name__ == "__main__":
    main()

"""How long tests take: as a plugin of pytest it writes a JSON a run, as a command it shows one or compares two.

    python tests/durations.py show [RUN]            files over 20 s, and those that do not say why
    python tests/durations.py compare BEFORE AFTER  what became slower or faster, by file

RUN is a file of runs/durations/, by default the newest. A file over 20 s says why in its docstring ("Takes 40 s: ..."),
or its tests are marked `long`. Seconds are of a test's setup, call and teardown together.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

LONG_SECONDS = 20.0
KEPT_RUNS = 60
REASON = "Takes "


class Durations:
    """Collects what the tests of a run take and writes it at the end; with xdist in the process that has workers."""

    def __init__(self, config: pytest.Config) -> None:
        from tiers import phase_of

        self.root = config.rootpath
        self.about = {"phase": phase_of(config), "tier": config.getoption("--tier", None) or "all"}
        self.workers = config.getoption("numprocesses", None) or 1
        self.tests: Counter[str] = Counter()
        self.ranks: Counter[str] = Counter()
        self.start = time.monotonic()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add one phase of a test; what its ranks took comes with the report of its teardown."""
        self.tests[report.nodeid] += report.duration  # type: ignore[assignment]
        for name, value in report.user_properties:
            if report.when == "teardown" and name == "ranks":
                self.ranks.update(value)  # type: ignore[arg-type]

    def pytest_sessionfinish(self) -> None:
        """Write the run."""
        if not self.tests:
            return
        folder = folder_of(self.root)
        name = f"{datetime.now():%Y%m%d-%H%M%S}-{self.about['phase']}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(json.dumps(self.run(), indent=1))
            for old in sorted(folder.glob("*-*-*.json"))[:-KEPT_RUNS]:
                old.unlink()
        except OSError:
            # a checkout that nobody may write to can still be tested
            return

    def run(self) -> dict[str, Any]:
        """What is written of a run."""
        files: Counter[str] = Counter()
        for nodeid, seconds in self.tests.items():
            files[nodeid.split("::")[0]] += seconds  # type: ignore[assignment]
        return {
            **self.about,
            "date": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
            "commit": _commit(self.root),
            "versions": {"python": platform.python_version(), **_versions("torch", "triton", "numba", "pytest")},
            "cores": os.cpu_count(),
            "workers": self.workers,
            "seconds": round(time.monotonic() - self.start, 1),
            "ranks": {name: round(value, 1) for name, value in self.ranks.items()},
            "files": {name: round(seconds, 2) for name, seconds in files.most_common()},
            "tests": {name: round(seconds, 3) for name, seconds in self.tests.most_common()},
        }


def pytest_configure(config: pytest.Config) -> None:
    """Only the process that sees all reports records them; it tells its workers what an earlier run took."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Durations(config), "shardwise-durations")
        if config.pluginmanager.hasplugin("xdist"):
            config.pluginmanager.register(Tells(earlier(config)), "shardwise-earlier")


class Tells:
    """What each worker of xdist is told: seconds of files, the same for all."""

    def __init__(self, seconds: dict[str, float]) -> None:
        self.seconds = seconds

    def pytest_configure_node(self, node: Any) -> None:
        """Give a worker what all of them sort by."""
        node.workerinput["shardwise_seconds"] = self.seconds


def folder_of(root: Path) -> Path:
    """Where runs are written."""
    return Path(os.environ.get("SHARDWISE_DURATIONS", root / "runs" / "durations"))


def earlier(config: pytest.Config) -> dict[str, float]:
    """Seconds of each file in the longest of the last runs of this phase."""
    from tiers import phase_of

    runs = []
    for path in sorted(folder_of(config.rootpath).glob(f"*-{phase_of(config)}.json"))[-10:]:
        try:
            runs.append(json.loads(path.read_text())["files"])
        except (OSError, ValueError, KeyError):
            continue
    return max(runs, key=len, default={})


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The order of a run with workers."""
    from tiers import tier_of

    longest_first(config, items, lambda item: tier_of(item) == "test")


def longest_first(config: pytest.Config, items: list[pytest.Item], starts: Callable[[pytest.Item], bool]) -> None:
    """Sort files by what they take, so that no worker ends with a long one alone: by an earlier run, else a guess."""
    known = getattr(config, "workerinput", {}).get("shardwise_seconds")
    if known is None:
        return
    guessed: Counter[str] = Counter()
    for item in items:
        # about what a test takes that starts processes, and what others take
        guessed[file_of(item)] += 2.0 if starts(item) else 0.05  # type: ignore[assignment]
    items.sort(key=lambda item: -known.get(file_of(item), guessed[file_of(item)]))


def file_of(item: pytest.Item) -> str:
    """The file of a test, as its id has it."""
    return item.nodeid.split("::")[0]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Groups, processes and seconds of ranks since the last test."""
    ranks: Any = sys.modules.get("ranks")
    if ranks is not None and ranks.counted:
        item.user_properties.append(("ranks", dict(ranks.counted)))
        ranks.counted.clear()


def _commit(root: Path) -> str:
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _versions(*names: str) -> dict[str, str]:
    versions = {}
    for name in names:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def says_why(path: Path) -> bool:
    """Whether the docstring of a file of tests gives a reason for what it takes."""
    return path.exists() and REASON in (ast.get_docstring(ast.parse(path.read_text())) or "")


def long_files(run: Mapping[str, Any], root: Path) -> list[str]:
    """A line for each file over 20 s."""
    return [
        f"{seconds:7.1f} s  {name}{'' if says_why(root / name) else '  (does not say why)'}"
        for name, seconds in run["files"].items()
        if seconds > LONG_SECONDS
    ]


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """A line for each file whose seconds changed by more than one and by more than a fifth, slower ones first."""
    lines = []
    for name in {**before["files"], **after["files"]}:
        old, new = before["files"].get(name, 0.0), after["files"].get(name, 0.0)
        if abs(new - old) > max(1.0, 0.2 * old):
            lines.append((new - old, f"{old:7.1f} -> {new:7.1f} s  {name}"))
    return [line for _, line in sorted(lines, reverse=True)]


def headline(run: Mapping[str, Any]) -> str:
    """One line about a run."""
    ranks = run["ranks"]
    worlds = (
        f"; {ranks['worlds']:.0f} worlds of ranks in {ranks['seconds']:.0f} s, {ranks['processes']:.0f} processes"
        if ranks
        else ""
    )
    tests = f"{len(run['tests'])} tests of {len(run['files'])} files in {run['seconds']:.0f} s"
    work = f"{sum(run['tests'].values()):.0f} s of {run['workers']} workers"
    return f"{run['phase']}, tier {run['tier']}, {run['commit']}: {tests}, {work}{worlds}"


def main(arguments: list[str] | None = None) -> int:
    """The command; its status is 2 where there is no run to show."""
    parser = argparse.ArgumentParser(description="How long the tests of a run took.")
    commands = parser.add_subparsers(dest="command", required=True)
    show = commands.add_parser("show", help="files over 20 s")
    show.add_argument("runs", nargs="*", type=Path)
    compare = commands.add_parser("compare", help="what became slower or faster")
    compare.add_argument("runs", nargs=2, type=Path, metavar="RUN")
    asked = parser.parse_args(arguments)
    root = next(folder for folder in Path(__file__).resolve().parents if (folder / "pyproject.toml").exists())
    paths = asked.runs or sorted((root / "runs" / "durations").glob("*.json"))[-1:]
    if not paths:
        print("no run is recorded in runs/durations", file=sys.stderr)
        return 2
    runs = [json.loads(path.read_text()) for path in paths]
    print(*map(headline, runs), sep="\n")
    if asked.command == "compare":
        print(*changes(*runs), sep="\n")
    print(f"files over {LONG_SECONDS:.0f} s:", *[line for run in runs[-1:] for line in long_files(run, root)], sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Statements beside an earlier commit, and public names beside an earlier list: each on a few lines of text."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

from shardwise.perf.evidence import public_names, statements

KERNEL = "def launch(grid):\n    check(grid)\n    out = empty(grid)\n    return out\n"
CASE = "def case(name):\n    build(name)\n    return name\n"


def counted(base: dict[str, str], now: dict[str, str]) -> Counter[tuple[str, str]]:
    return statements.by_origin(base, now)


def test_neither_comments_nor_line_breaks_nor_names_of_files_count() -> None:
    base = {"kernels/a.py": KERNEL, "examples/x.py": KERNEL}
    now = {"kernels/b/c.py": "# why\n\n" + KERNEL.replace("check(grid)", "check(\n        grid,\n    )")}
    assert counted(base, now) == counted(base, base) == {("product", "product"): 4}


def test_what_moves_out_of_an_area_counts_there() -> None:
    """Compile tooling moves from kernels/ to perf/: that is no statement less of the product."""
    base = {"kernels/a.py": "import ast\n" + KERNEL, "perf/b.py": CASE}
    now = {"perf/compile/a.py": "import ast\nimport re\n" + KERNEL + CASE}
    assert counted(base, now) == {("product", "perf"): 6, ("perf", "perf"): 3}


def test_a_definition_that_changed_is_found_by_its_name_and_what_is_left_of_it() -> None:
    base = {"kernels/a.py": KERNEL, "tests/a.py": "def launch():\n    assert other()\n"}
    now = {"tests/a.py": KERNEL.replace("out =", "output =") + "def fresh():\n    pass\n"}
    assert counted(base, now) == {("product", "tests"): 4, ("tests", "tests"): 2}


def test_new_code_in_a_moved_file_counts_as_that_file_and_a_new_file_where_it_lies() -> None:
    base = {"kernels/a.py": KERNEL}
    now = {"perf/compile/a.py": KERNEL + "def fresh():\n    pass\n", "perf/fresh.py": "def other():\n    pass\n"}
    assert counted(base, now) == {("product", "perf"): 6, ("perf", "perf"): 2}


def test_a_copy_in_two_areas_counts_where_each_stands() -> None:
    base = {"perf/a.py": CASE, "tests/a.py": CASE}
    assert counted(base, base) == {("perf", "perf"): 3, ("tests", "tests"): 3}
    assert counted(base, {"perf/a.py": CASE}) == {("perf", "perf"): 3}


def test_a_clone_without_the_commit_says_so() -> None:
    asked = [sys.executable, str(Path(statements.__file__)), "--base", "0" * 40]
    done = subprocess.run(asked, capture_output=True, text=True)
    assert done.returncode == 2 and "this clone has no commit 0000" in done.stdout


class Old:
    def step(self, rows: int, *, lr: float = 0.1) -> None: ...


class New:
    def step(self, rows: int, lr: float = 0.1) -> None: ...


def test_a_name_that_went_or_whose_arguments_changed_is_said() -> None:
    before = {"packages": {"a.Old": public_names.facts(Old), "a.f": public_names.facts(len)}}
    assert public_names.differences(before, before) == []
    moved = {"packages": {name: {**entry, "module": "b"} for name, entry in before["packages"].items()}}
    assert public_names.differences(before, moved) == []
    assert public_names.differences(before, {"packages": {"a.Old": before["packages"]["a.Old"]}}) == [
        "gone     packages: a.f"
    ]


def test_a_method_of_ours_is_part_of_a_class(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    for kind in (Old, New):
        monkeypatch.setattr(kind, "__module__", "shardwise.a")
    old, new = ({"packages": {"a.T": public_names.facts(kind)}} for kind in (Old, New))
    [line] = public_names.differences(old, new)
    assert line.startswith("changed  packages: a.T: members") and "*, lr" in line


def test_commands_that_are_not_loaded_yet_are_listed() -> None:
    """Since commands are loaded by name the list had the root alone: one that went would not have been missed."""
    assert {"shardwise", "shardwise env", "shardwise plan whatif"} <= set(public_names.public_names()["commands"])

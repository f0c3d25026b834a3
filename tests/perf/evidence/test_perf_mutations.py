"""Planting defects: a text is found wherever it moved, and only a test that fails because of it has caught it.

Takes half a minute: defects are planted in a small tree, whose tests run in processes of their own.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from shardwise.perf.evidence import mutations

DEFECT = mutations.Defect(
    "kernels", "doubled", "return scaled(x, 1)", "return scaled(x, 2)", "once", ["tests/test_once.py"]
)
CODE = "def scaled(x, by):\n    return x * by\n\n\ndef once(x):\n    return scaled(x, 1)\n"
TESTS = "from kernels.a import once\n\n\ndef test_once():\n    assert once(3) == 3\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in (("kernels/__init__.py", ""), ("kernels/a.py", CODE), ("tests/test_once.py", TESTS)):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    # without the marks that our own pytest settings know
    (tmp_path / "pyproject.toml").write_text("[tool.pytest.ini_options]\n")
    return tmp_path


@pytest.mark.parametrize(
    "text",
    [CODE, CODE.replace("scaled(x, 1)", "scaled(\n        x,\n        1,\n    )"), f"class A:\n    pass\n\n{CODE}"],
)
def test_a_text_is_found_after_a_formatter_and_in_another_file(text: str) -> None:
    place = mutations.place(DEFECT, {Path("kernels/lookup/b.py"): text, Path("perf/c.py"): "x = 1\n"})
    assert not isinstance(place, str)
    _, begin, end = place
    planted = text[:begin] + DEFECT.new + text[end:]
    names: dict[str, object] = {}
    exec(planted, names)
    assert names["once"](3) == 6  # type: ignore[operator]


def test_a_text_that_is_gone_or_stands_twice_is_not_planted() -> None:
    texts = {Path("a.py"): CODE, Path("b.py"): CODE}
    assert "stands 2 times" in str(mutations.place(DEFECT, texts))
    assert "stands 0 times" in str(mutations.place(replace(DEFECT, old="return scaled(y, 1)"), texts))


@pytest.mark.full
def test_a_defect_is_caught_by_a_test_that_fails_and_the_tree_is_as_it_was(tree: Path) -> None:
    result = mutations.plant_and_test(tree, DEFECT)
    assert result["status"] == "caught" and result["by"] == "tests/test_once.py::test_once"
    assert "assert 6 == 3" in result["error"] and (tree / "kernels/a.py").read_text() == CODE


@pytest.mark.full
def test_neither_a_defect_that_is_no_program_nor_a_test_that_fails_anyway_counts(tree: Path) -> None:
    assert mutations.plant_and_test(tree, replace(DEFECT, new="return scale(x, 1)"))["status"] == "broken"
    assert mutations.plant_and_test(tree, replace(DEFECT, new="return scaled(x, 1.0)"))["status"] == "missed"
    (tree / "tests/test_once.py").write_text(TESTS.replace("== 3", "== 4"))
    assert mutations.plant_and_test(tree, DEFECT)["status"] == "fails without it"


@pytest.mark.full
def test_the_folder_is_run_where_files_of_tests_have_moved(tree: Path) -> None:
    gone = replace(DEFECT, tests=["tests/test_gone.py"], named="once")
    assert mutations.selection(tree, gone) == ["tests", "-k", "once"]
    assert mutations.plant_and_test(tree, gone)["status"] == "caught"


def test_files_and_names_of_tests_that_are_gone_are_told(tree: Path) -> None:
    assert mutations.without_tests(replace(DEFECT, named="once"), tree) == ""
    assert "test_gone.py is gone" in mutations.without_tests(replace(DEFECT, tests=["tests/test_gone.py"]), tree)
    assert "is called twice" in mutations.without_tests(replace(DEFECT, named="once or twice"), tree)


@pytest.mark.full
def test_every_defect_can_be_planted_and_says_what_it_breaks_and_which_tests_hold_it() -> None:
    planted, texts = mutations.defects(), mutations.sources(mutations.ROOT)
    assert len({defect.name for defect in planted}) == len(planted) >= 36
    for defect in planted:
        assert not isinstance(mutations.place(defect, texts), str), defect.name
        assert mutations.without_tests(defect, mutations.ROOT) == "", defect.name
        assert defect.claim and defect.old != defect.new and defect.tests, defect.name
        assert defect.phase in ("torch", "interpreted", "compiled", "executed"), defect.name

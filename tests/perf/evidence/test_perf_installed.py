"""What `make installed` says of steps, and what it wrote."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from shardwise.perf.evidence import installed


def test_a_step_passes_by_its_status_and_what_it_printed(tmp_path: Path) -> None:
    here = Path(sys.executable)
    assert installed._step(here, ("-c", "print('well done')"), "done", tmp_path) == "passed"
    assert installed._step(here, ("-c", "print('well')"), "done", tmp_path) == "status 0: well"
    assert installed._step(here, ("-c", "print('done'); raise SystemExit(3)"), "done", tmp_path) == "status 3: done"


def test_a_step_sees_nothing_of_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/checkout")
    look = "import os; print(os.environ.get('PYTHONPATH'), os.getcwd())"
    assert installed.run([sys.executable, "-c", look], tmp_path)[1].split() == ["None", str(tmp_path.resolve())]


def test_an_interpreter_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        installed.main(["python3.99"])
    assert "there is no interpreter python3.99" in capsys.readouterr().err


def test_the_quick_start_ran_from_a_wheel_on_each_python_that_was_tried() -> None:
    kept = json.loads(installed.RESULT.read_text())
    assert {"3.10", "3.11", "3.12", "3.13"} <= kept.keys()
    for about in kept.values():
        assert about["steps"] == {what: "passed" for what, _, _ in installed.STEPS}


def test_the_quick_start_is_to_print_what_the_readme_says() -> None:
    """The README got another quick start, and every interpreter would have failed by what the old one printed."""
    (expected,) = (text for what, _, text in installed.STEPS if what.startswith("quick start"))
    assert expected in (installed.ROOT / "README.md").read_text(encoding="utf-8")

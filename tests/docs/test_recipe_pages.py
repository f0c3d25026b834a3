"""Commands of the pages on configuring, logging and sweeping run as they stand, and print what is said."""

from __future__ import annotations

import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest
from checkout import ROOT
from optional import need

HOWTO = ROOT / "docs" / "howto"


@pytest.mark.parametrize(("page", "library"), [("configure", "tyro"), ("log", "tensorboard"), ("sweep", "optuna")])
def test_commands_print_what_stands_below_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], page: str, library: str
) -> None:
    need(library)
    text = (HOWTO / f"{page}.md").read_text()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "dlrm"))
    for table in re.findall(r"^```toml\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        Path("run.toml").write_text(table)
    commands = re.findall(r"^```\n\$ python (\S+) (.*)\n(.*)\n```", text, re.MULTILINE)
    assert commands
    for script, argv, said in commands:
        module = importlib.import_module(Path(script).stem)
        module.main(shlex.split(argv))
        assert said in capsys.readouterr().out, argv


def test_a_tracker_of_your_own_prints_what_the_page_says(capsys: pytest.CaptureFixture[str]) -> None:
    need("tyro")
    text = (HOWTO / "log.md").read_text()
    [code] = re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    said = text.split("prints among the rest\n\n```\n")[1].split("```")[0].splitlines()
    path = [*sys.path]
    try:
        exec(compile(code.replace('"examples/dlrm"', repr(str(ROOT / "examples" / "dlrm"))), "log.md", "exec"), {})
    finally:
        sys.path[:] = path
    printed = capsys.readouterr().out.splitlines()
    assert [line for line in printed if line in said] == said


def test_the_configured_example_is_the_one_of_the_page() -> None:
    need("tyro")
    text = (HOWTO / "configure.md").read_text()
    sys.path.insert(0, str(ROOT / "examples" / "dlrm"))
    try:
        progress, arguments = importlib.import_module("progress"), importlib.import_module("arguments")
    finally:
        sys.path.pop(0)
    listed = re.findall(r"`--([\w-]+)`", re.findall(r"^(`--steps`.*?) must stay", text, re.DOTALL | re.MULTILINE)[0])
    assert [*progress.SETTINGS, "batch_size"] == [name.replace("-", "_") for name in listed]
    assert [f"--{name}" in text for name in arguments.STARTS] == [True] * 3

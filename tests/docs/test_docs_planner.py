"""docs/planner.md says what is so: its snippets give what stands beside them, its commands and pictures are there."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest
from checkout import ROOT
from snippets import wrong_snippets

from shardwise.planner.constraints import ParameterConstraints
from shardwise.planner.plan.explanation import PART_NAMES
from shardwise.planner.search.problem import PARTS

DOCS = ROOT / "docs"
PAGE = DOCS / "planner.md"


def test_every_snippet_gives_what_stands_beside_it() -> None:
    wrong, said = wrong_snippets(PAGE)
    assert not wrong, "\n".join(wrong)
    assert said >= 12


def test_every_part_of_a_step_has_a_row() -> None:
    page = PAGE.read_text()
    assert [name for name in PART_NAMES.values() if f"\n| {name} | " not in page] == []
    assert tuple(PART_NAMES) == PARTS


def test_fields_of_constraints_that_are_named_are_there() -> None:
    table = PAGE.read_text().split("| field | says |")[1].split("\n\n")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named <= {field.name for field in fields(ParameterConstraints)}
    assert {field.name for field in fields(ParameterConstraints) if field.kw_only} <= named


def test_every_command_and_its_options_are_there() -> None:
    pytest.importorskip("click")
    pytest.importorskip("rich")
    from shardwise import cli

    plan: Any = cli.commands().commands["plan"]
    shown = re.findall(r"^shardwise plan ?(\w*) (.*)$", PAGE.read_text(), re.MULTILINE)
    assert {name for name, _ in shown if name} == set(plan.commands)
    for name, usage in shown:
        command = plan.commands[name] if name else plan
        options = {option for one in command.params for option in one.opts}
        assert set(re.findall(r"--[\w-]+", usage)) <= options, name


def test_pictures_are_there_small_and_made_by_the_script() -> None:
    shown = set(re.findall(r"!\[.*?\]\((pictures/.*?\.png)\)", PAGE.read_text()))
    script = (DOCS / "planner_pictures.py").read_text()
    assert shown == {f"pictures/planner_report_{name}.png" for name in re.findall(r'\("(\d+)", \w+_tables\(\)', script)}
    for path in shown:
        content = (DOCS / path).read_bytes()
        assert content.startswith(b"\x89PNG") and len(content) <= 300_000

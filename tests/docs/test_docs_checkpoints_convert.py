"""docs/checkpoints_convert.md says what is so: its snippets give what stands beside them, its commands are there."""

from __future__ import annotations

import re
from typing import Any

import pytest
from checkout import ROOT
from snippets import wrong_snippets

PAGE = ROOT / "docs" / "checkpoints_convert.md"


def test_every_snippet_gives_what_stands_beside_it() -> None:
    wrong, said = wrong_snippets(PAGE)
    assert not wrong, "\n".join(wrong)
    assert said >= 10


def test_every_command_and_its_options_are_there() -> None:
    pytest.importorskip("click")
    pytest.importorskip("rich")
    from shardwise import cli

    ckpt: Any = cli.commands().commands["ckpt"]
    told = dict(re.findall(r"^\| `shardwise ckpt (\w+) (.*?)` \|", PAGE.read_text(), re.MULTILINE))
    options = {
        name: {option for one in command.params for option in one.opts if option.startswith("--")} - {"--json"}
        for name, command in ckpt.commands.items()
    }
    assert {name: set(re.findall(r"--[\w-]+", usage)) for name, usage in told.items()} == options

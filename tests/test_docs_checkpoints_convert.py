"""docs/checkpoints_convert.md says what is so: its snippets give what stands beside them, its commands are there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from test_docs_jagged import outcome, plain, steps

PAGE = Path(__file__).parents[1] / "docs" / "checkpoints_convert.md"


def test_every_snippet_gives_what_stands_beside_it() -> None:
    names: dict[str, Any] = {"__name__": "docs"}
    wrong, said = [], 0
    for line, node, expected in steps(PAGE.read_text()):
        found = outcome(node, names, fails=re.match(r"\w+Error: ", expected or "") is not None)
        if found != "None" or expected is not None:
            said += expected is not None
            if plain(found or "") != plain(expected or ""):
                wrong.append(f"line {line}: {plain(found or '')!r} is not {plain(expected or '')!r}")
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

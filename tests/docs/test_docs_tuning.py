"""docs/tuning.md says what is so: its snippet runs, and its commands and kernels are there."""

from __future__ import annotations

import re
from typing import Any

import pytest
from checkout import ROOT
from snippets import wrong_snippets

from shardwise.kernels import configs

PAGE = ROOT / "docs" / "tuning.md"


def test_every_snippet_gives_what_stands_beside_it() -> None:
    try:
        wrong, said = wrong_snippets(PAGE)
    finally:
        configs.use_configs()
    assert not wrong, "\n".join(wrong)
    assert said == 1


def test_commands_and_their_options_are_there() -> None:
    pytest.importorskip("click")
    pytest.importorskip("rich")
    from shardwise import cli

    kernels: Any = cli.commands().commands["kernels"]
    options = {option for one in kernels.commands["autotune"].params for option in one.opts}
    shown = [line for line in PAGE.read_text().splitlines() if line.startswith("shardwise kernels autotune")]
    used = {option for line in shown for option in re.findall(r"--[\w-]+", line)}
    assert len(shown) > 5 and used <= options
    # what a proof takes is told by --help
    assert options - used - {"--again", "--small"} == set()
    assert "--candidates" in {option for one in kernels.commands["check"].params for option in one.opts}


def test_the_table_has_every_kernel_that_is_tuned() -> None:
    table = PAGE.read_text().split("## What is tuned")[1].split("## ")[0]
    named = {name.split()[0] for name in re.findall(r"`([\w <>]+)`", table)}
    assert named == set(configs.FIELDS)

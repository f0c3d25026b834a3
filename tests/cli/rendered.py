"""What a command prints at a width, held to it: no line that a terminal would break."""

from __future__ import annotations

import pytest
from click.testing import CliRunner, Result

from shardwise import cli

WIDTHS = (80, 100, 160)


def rendered(monkeypatch: pytest.MonkeyPatch, columns: int, *arguments: object) -> Result:
    """The result of a command on a terminal of so many columns; fails for a line that is longer."""
    monkeypatch.setenv("COLUMNS", str(columns))
    result = CliRunner().invoke(cli.commands(), [*map(str, arguments)])
    assert [line for line in result.stdout.splitlines() if len(line) > columns] == []
    return result

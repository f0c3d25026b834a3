"""`shardwise perf counts`: what a step calls and moves, exactly and without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click


def add_counts(perf: click.Group) -> None:
    """Give a group of commands the command `counts`."""

"""`shardwise perf`: the regression suite and its comparisons. Needs the extra `perf`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click


def add_perf(commands: click.Group) -> None:
    """Give a group of commands the group `perf`."""
    from .cli_counts import add_counts

    @commands.group()
    def perf() -> None:
        """Measure shardwise on this machine, and compare what was measured."""

    add_counts(perf)

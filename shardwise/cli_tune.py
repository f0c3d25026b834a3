"""`shardwise kernels autotune`: time the kernels' configs on this machine and keep the best."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import click


def add_autotune(kernels: click.Group) -> None:
    """Give a group of commands the command `autotune`."""
